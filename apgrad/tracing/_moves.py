"""Rules of the primitives that move elements: each output is one of the inputs, and the derivative 1.

A message goes back by the transposed move. Where an element went to several places, their plus comes back; where it
went nowhere, the semiring's zero.
"""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from apgrad.tracing._semirings import Semiring, Value
from apgrad.tracing._site import Pull, Rule, Site, each, each_with_zero, edge, require_countable, where
from apgrad.tracing._sums import dtype_of, plus_by_index, plus_over, zeros


def choice(site: Site) -> Pull:
    """Each case where it is chosen, by select_n."""
    semiring, active, shape = site.semiring, site.active, jnp.shape(site.outputs[0])

    def pull(which, messages):
        (message,) = messages
        nothing = zeros(semiring, shape, dtype_of(message))
        answers: list[Value | None] = [None]
        for i, a in enumerate(active[1:]):
            chosen = which == i if which.dtype != bool else which == bool(i)
            chosen = jnp.broadcast_to(chosen, shape)
            answers.append(where(chosen, message, nothing) if a else None)
        return answers

    return Partial(pull, jnp.asarray(site.inputs[0]))


def move(transposed: Callable[[Site], Callable[[Semiring, Value], Value]]) -> Rule:
    """The rule of a primitive with one array input whose outputs are some of its elements."""

    def rule(site):
        function, semiring, rest = transposed(site), site.semiring, [None] * (len(site.inputs) - 1)
        return Partial(lambda messages: [function(semiring, messages[0]), *rest])

    return rule


def _reshape(site):
    shape = jnp.shape(site.inputs[0])
    return lambda _, m: each(lambda x: x.reshape(shape), m)


def _transpose(site):
    inverse = tuple(sorted(range(len(site.params["permutation"])), key=lambda i: site.params["permutation"][i]))
    return lambda _, m: each(lambda x: jnp.transpose(x, inverse), m)


def _reverse(site):
    dimensions = site.params["dimensions"]
    return lambda _, m: each(lambda x: lax.rev(x, dimensions), m)


def _broadcast(site):
    shape, wide, kept = jnp.shape(site.inputs[0]), site.params["shape"], site.params["broadcast_dimensions"]
    grown = {d for n, d in zip(shape, kept, strict=True) if n == 1 and wide[d] != 1}
    axes = tuple(i for i in range(len(wide)) if i not in kept or i in grown)
    return lambda semiring, m: each(lambda x: x.reshape(shape), plus_over(semiring, m, axes))


def _slice(site):
    shape, start = jnp.shape(site.inputs[0]), site.params["start_indices"]
    strides = site.params["strides"] or (1,) * len(shape)
    taken = jnp.shape(site.outputs[0])
    ends = [n - s - ((t - 1) * d + 1 if t else 0) for n, s, t, d in zip(shape, start, taken, strides, strict=True)]
    config = [(s, e, d - 1) for s, e, d in zip(start, ends, strides, strict=True)]
    return lambda semiring, m: each_with_zero(
        semiring, lambda x, zero: lax.pad(x, jnp.asarray(zero, x.dtype), config), m
    )


def _reduce_sum(site):
    shape, axes = jnp.shape(site.inputs[0]), site.params["axes"]
    return lambda _, m: each(lambda x: jnp.broadcast_to(jnp.expand_dims(x, axes), shape), m)


def _cumsum(site):
    axis, reverse = site.params["axis"], not site.params["reverse"]

    def transposed(semiring, m):
        # The scan joins (what it has, the next): going backward, the next comes first.
        plus = (lambda a, b: semiring.plus(b, a)) if reverse else semiring.plus
        return lax.associative_scan(plus, m, reverse=reverse, axis=axis)

    return transposed


def _tile(site):
    shape, reps = jnp.shape(site.inputs[0]), site.params["reps"]
    full = (1,) * (len(reps) - len(shape)) + shape
    pairs = [n for pair in zip(reps, full, strict=True) for n in pair]
    axes = tuple(range(0, len(pairs), 2))
    return lambda semiring, m: each(
        lambda x: x.reshape(shape), plus_over(semiring, each(lambda x: x.reshape(pairs), m), axes)
    )


def stack(site: Site) -> Pull:
    """Each operand gets its slice."""
    active, axis = site.active, site.params["axis"]

    def pull(messages):
        cut = lambda i: each(functools.partial(lax.index_in_dim, index=i, axis=axis, keepdims=False), messages[0])
        return [cut(i) if a else None for i, a in enumerate(active)]

    return Partial(pull)


def identity(site: Site) -> Pull:
    """Outputs are the inputs."""
    active = site.active
    return Partial(lambda messages: [m if a else None for m, a in zip(messages, active, strict=True)])


def pad(site: Site) -> Pull:
    """The operand and what it is padded with: the padding's message is the plus of all that is no operand."""
    semiring, active, config = site.semiring, site.active, site.params["padding_config"]

    def pull(messages):
        (message,) = messages

        def crop(x, zero):
            x = lax.pad(x, jnp.asarray(zero, x.dtype), [(-low, -high, 0) for low, high, _ in config])
            return x[tuple(slice(None, None, inner + 1) for _, _, inner in config)]

        padding = None
        if active[1]:
            inside = lax.pad(jnp.ones(shape, bool), jnp.asarray(False), config)
            outside = where(~inside, message, zeros(semiring, inside.shape, dtype_of(message)))
            padding = plus_over(semiring, outside, tuple(range(len(config))))
        return [each_with_zero(semiring, crop, message) if active[0] else None, padding]

    shape = jnp.shape(site.inputs[0])
    return Partial(pull)


def concatenate(site: Site) -> Pull:
    """Each operand gets its piece."""
    active, axis = site.active, site.params["dimension"]
    sizes = [jnp.shape(x)[axis] for x in site.inputs]

    def pull(messages):
        pieces, start = [], 0
        for size, a in zip(sizes, active, strict=True):
            piece = each(
                functools.partial(lax.slice_in_dim, start_index=start, limit_index=start + size, axis=axis), messages[0]
            )
            pieces.append(piece if a else None)
            start += size
        return pieces

    return Partial(pull)


def split(site: Site) -> Pull:
    """The pieces' messages, joined; of split and unstack."""
    semiring, axis = site.semiring, site.params["axis"]
    shapes, dtype = [jnp.shape(y) for y in site.outputs], site.outputs[0].dtype
    join = jnp.stack if site.name == "unstack" else jnp.concatenate

    def pull(messages):
        full = [m if m is not None else zeros(semiring, s, dtype) for m, s in zip(messages, shapes, strict=True)]
        return [tuple(join(parts, axis) for parts in zip(*full, strict=True))]

    return Partial(pull)


def dynamic_slice(site: Site) -> Pull:
    """The operand; starts have no message."""
    semiring, shape = site.semiring, jnp.shape(site.inputs[0])

    def pull(starts, messages):
        (message,) = messages
        whole = zeros(semiring, shape, dtype_of(message))
        placed = tuple(lax.dynamic_update_slice(w, x, starts) for w, x in zip(whole, message, strict=True))
        return [placed, *(None for _ in starts)]

    return Partial(pull, list(site.inputs[1:]))


def dynamic_update_slice(site: Site) -> Pull:
    """The operand, less a hole, and the update, which is in it."""
    semiring, active, shape = site.semiring, site.active, jnp.shape(site.inputs[1])

    def pull(starts, messages):
        (message,) = messages
        hole = zeros(semiring, shape, dtype_of(message))
        operand = tuple(lax.dynamic_update_slice(x, h, starts) for x, h in zip(message, hole, strict=True))
        update = each(lambda x: lax.dynamic_slice(x, starts, shape), message)
        return [operand if active[0] else None, update if active[1] else None, *(None for _ in starts)]

    return Partial(pull, list(site.inputs[2:]))


def gather(site: Site) -> Pull:
    """Which element each output is, is what gather makes of the elements' numbers."""
    semiring, shape = site.semiring, jnp.shape(site.inputs[0])
    size = require_countable(site, math.prod(shape))

    def pull(indices, messages):
        source = site_call(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices, fill_value=-1)[0]
        return [each(lambda x: x.reshape(shape), plus_by_index(semiring, messages[0], source, size)), None]

    site_call = site.call
    return Partial(pull, site.inputs[1])


def scatter(site: Site) -> Pull:
    """Scatter and scatter-add (operand, indices, updates)."""
    semiring, active, params = site.semiring, site.active, site.params
    shape, updates = jnp.shape(site.inputs[0]), jnp.shape(site.inputs[2])
    size, count = require_countable(site, math.prod(shape)), require_countable(site, math.prod(updates))
    numbers, replaces, site_call = params["dimension_numbers"], site.name == "scatter", site.call
    sign = -1.0 if site.name == "scatter-sub" else 1.0
    collapsed = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    window = iter(updates[d] for d in numbers.update_window_dims)
    read = functools.partial(
        lax.gather,
        dimension_numbers=lax.GatherDimensionNumbers(
            offset_dims=numbers.update_window_dims,
            collapsed_slice_dims=numbers.inserted_window_dims,
            start_index_map=numbers.scatter_dims_to_operand_dims,
            operand_batching_dims=numbers.operand_batching_dims,
            start_indices_batching_dims=numbers.scatter_indices_batching_dims,
        ),
        slice_sizes=tuple(1 if d in collapsed else next(window) for d in range(len(shape))),
        mode=params["mode"],
        fill_value=-1,
    )
    dtypes = [jnp.result_type(x) for x in site.inputs]

    def pull(indices, messages):
        (message,) = messages
        target = read(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices)
        kept = target >= 0
        operand = message
        if replaces:
            own = jnp.arange(count, dtype=jnp.int32).reshape(updates)
            last = site_call(jnp.full(shape, -1, jnp.int32), indices, own)[0]
            operand = where(last < 0, message, zeros(semiring, shape, dtype_of(message)))
            kept &= last.ravel()[jnp.clip(target, 0)] == own
        arrived = each(lambda x: x.ravel()[jnp.clip(target, 0)], message)
        update = where(kept, arrived, zeros(semiring, updates, dtype_of(message)))
        update = edge(semiring, sign, update, dtypes[2])
        return [operand if active[0] else None, None, update if active[2] else None]

    return Partial(pull, site.inputs[1])


def sort(site: Site) -> Pull:
    """All operands go where the order of the keys says."""
    axis, active = site.params["dimension"], site.active
    place = lax.broadcasted_iota(jnp.int32, jnp.shape(site.inputs[0]), axis)
    order = lax.sort((*site.inputs, place), dimension=axis, is_stable=True, num_keys=site.params["num_keys"])[-1]

    def pull(order, messages):
        back = jnp.argsort(order, axis=axis)
        taken = lambda m: each(lambda x: jnp.take_along_axis(x, back, axis), m)
        return [taken(m) if a and m is not None else None for m, a in zip(messages, active, strict=True)]

    return Partial(pull, order)


def top_k(site: Site) -> Pull:
    """The values come from where the indices say."""
    semiring, shape = site.semiring, jnp.shape(site.inputs[0])
    axis = site.params.get("axis", len(shape) - 1)

    def pull(index, messages):
        message = messages[0]
        whole = zeros(semiring, shape, dtype_of(message))
        put = lambda w, x: jnp.put_along_axis(w, index, x, axis, inplace=False)
        return [tuple(put(w, x) for w, x in zip(whole, message, strict=True))]

    return Partial(pull, site.outputs[1])


RULES: dict[str, Rule] = {
    **dict.fromkeys(("reshape", "expand_dims", "squeeze"), move(_reshape)),
    "transpose": move(_transpose),
    "rev": move(_reverse),
    "broadcast_in_dim": move(_broadcast),
    "slice": move(_slice),
    "reduce_sum": move(_reduce_sum),
    "cumsum": move(_cumsum),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub"), scatter),
    "select_n": choice,
    "pad": pad,
    "concatenate": concatenate,
    **dict.fromkeys(("split", "unstack"), split),
    "stack": stack,
    "tile": move(_tile),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "sort": sort,
    "top_k": top_k,
    **dict.fromkeys(
        (
            "copy",
            "copy_p",
            "optimization_barrier",
            "sharding_constraint",
            "layout_constraint",
            "pvary",
            "name",
            "device_put",
        ),
        identity,
    ),
}
