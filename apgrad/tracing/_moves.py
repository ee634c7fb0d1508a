"""Rules of the primitives that move elements: each output element is an input element, and the derivative is 1.

A message goes back by the transposed move. An input element that went to several places gets the plus of their
messages; an input element that went nowhere gets the semiring's zero.
"""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from apgrad._programs.kinds import IDENTITY
from apgrad.tracing._equation import EdgeRule, Equation, Pull, each, each_with_zero, edge, require_countable, where
from apgrad.tracing._semirings import Semiring, Value
from apgrad.tracing._sums import dtype_of, plus_by_index, plus_over, zeros


def _choice(equation: Equation) -> Pull:
    """select_n: each case gets the message where this case was chosen."""
    semiring, active, shape = equation.semiring, equation.active, jnp.shape(equation.outputs[0])

    def pull(which, messages):
        (message,) = messages
        nothing = zeros(semiring, shape, dtype_of(message))
        answers: list[Value | None] = [None]
        for i, a in enumerate(active[1:]):
            chosen = which == i if which.dtype != bool else which == bool(i)
            chosen = jnp.broadcast_to(chosen, shape)
            answers.append(where(chosen, message, nothing) if a else None)
        return answers

    return Partial(pull, jnp.asarray(equation.inputs[0]))


def _move(transposed: Callable[[Equation], Callable[[Semiring, Value], Value]]) -> EdgeRule:
    """The rule of a primitive with one array input, whose output elements are some of the input's elements."""

    def rule(equation):
        function, semiring, rest = transposed(equation), equation.semiring, [None] * (len(equation.inputs) - 1)
        return Partial(lambda messages: [function(semiring, messages[0]), *rest])

    return rule


def _reshape(equation):
    shape = jnp.shape(equation.inputs[0])
    return lambda _, m: each(lambda x: x.reshape(shape), m)


def _transpose(equation):
    inverse = tuple(sorted(range(len(equation.params["permutation"])), key=lambda i: equation.params["permutation"][i]))
    return lambda _, m: each(lambda x: jnp.transpose(x, inverse), m)


def _reverse(equation):
    dimensions = equation.params["dimensions"]
    return lambda _, m: each(lambda x: lax.rev(x, dimensions), m)


def _broadcast(equation):
    shape, wide, kept = jnp.shape(equation.inputs[0]), equation.params["shape"], equation.params["broadcast_dimensions"]
    grown = {d for n, d in zip(shape, kept, strict=True) if n == 1 and wide[d] != 1}
    axes = tuple(i for i in range(len(wide)) if i not in kept or i in grown)
    return lambda semiring, m: each(lambda x: x.reshape(shape), plus_over(semiring, m, axes))


def _slice(equation):
    shape, start = jnp.shape(equation.inputs[0]), equation.params["start_indices"]
    strides = equation.params["strides"] or (1,) * len(shape)
    taken = jnp.shape(equation.outputs[0])
    ends = [n - s - ((t - 1) * d + 1 if t else 0) for n, s, t, d in zip(shape, start, taken, strides, strict=True)]
    config = [(s, e, d - 1) for s, e, d in zip(start, ends, strides, strict=True)]
    return lambda semiring, m: each_with_zero(
        semiring, lambda x, zero: lax.pad(x, jnp.asarray(zero, x.dtype), config), m
    )


def _reduce_sum(equation):
    shape, axes = jnp.shape(equation.inputs[0]), equation.params["axes"]
    return lambda _, m: each(lambda x: jnp.broadcast_to(jnp.expand_dims(x, axes), shape), m)


def _cumsum(equation):
    axis, reverse = equation.params["axis"], not equation.params["reverse"]

    def transposed(semiring, m):
        # The scan joins (what it has, the next): going backward, the next comes first.
        plus = (lambda a, b: semiring.plus(b, a)) if reverse else semiring.plus
        return lax.associative_scan(plus, m, reverse=reverse, axis=axis)

    return transposed


def _tile(equation):
    shape, reps = jnp.shape(equation.inputs[0]), equation.params["reps"]
    full = (1,) * (len(reps) - len(shape)) + shape
    pairs = [n for pair in zip(reps, full, strict=True) for n in pair]
    axes = tuple(range(0, len(pairs), 2))
    return lambda semiring, m: each(
        lambda x: x.reshape(shape), plus_over(semiring, each(lambda x: x.reshape(pairs), m), axes)
    )


def _stack(equation: Equation) -> Pull:
    """stack: each operand gets its slice of the message."""
    active, axis = equation.active, equation.params["axis"]

    def pull(messages):
        cut = lambda i: each(functools.partial(lax.index_in_dim, index=i, axis=axis, keepdims=False), messages[0])
        return [cut(i) if a else None for i, a in enumerate(active)]

    return Partial(pull)


def _identity(equation: Equation) -> Pull:
    """Primitives whose outputs are their inputs: each message goes through."""
    active = equation.active
    return Partial(lambda messages: [m if a else None for m, a in zip(messages, active, strict=True)])


def _pad(equation: Equation) -> Pull:
    """pad: the operand gets its part of the message, and the padding value the plus of all the rest."""
    semiring, active, config = equation.semiring, equation.active, equation.params["padding_config"]

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

    shape = jnp.shape(equation.inputs[0])
    return Partial(pull)


def _concatenate(equation: Equation) -> Pull:
    """concatenate: each operand gets its piece of the message."""
    active, axis = equation.active, equation.params["dimension"]
    sizes = [jnp.shape(x)[axis] for x in equation.inputs]

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


def _split(equation: Equation) -> Pull:
    """Split and unstack: the input gets the joined messages of its pieces."""
    semiring, axis = equation.semiring, equation.params["axis"]
    shapes, dtype = [jnp.shape(y) for y in equation.outputs], equation.outputs[0].dtype
    join = jnp.stack if equation.name == "unstack" else jnp.concatenate

    def pull(messages):
        full = [m if m is not None else zeros(semiring, s, dtype) for m, s in zip(messages, shapes, strict=True)]
        return [tuple(join(parts, axis) for parts in zip(*full, strict=True))]

    return Partial(pull)


def _dynamic_slice(equation: Equation) -> Pull:
    """dynamic_slice: the operand gets the message at the place of the slice. Start indices get no message."""
    semiring, shape = equation.semiring, jnp.shape(equation.inputs[0])

    def pull(starts, messages):
        (message,) = messages
        whole = zeros(semiring, shape, dtype_of(message))
        placed = tuple(lax.dynamic_update_slice(w, x, starts) for w, x in zip(whole, message, strict=True))
        return [placed, *(None for _ in starts)]

    return Partial(pull, list(equation.inputs[1:]))


def _dynamic_update_slice(equation: Equation) -> Pull:
    """dynamic_update_slice: the update gets the message at its place, and the operand gets the rest."""
    semiring, active, shape = equation.semiring, equation.active, jnp.shape(equation.inputs[1])

    def pull(starts, messages):
        (message,) = messages
        hole = zeros(semiring, shape, dtype_of(message))
        operand = tuple(lax.dynamic_update_slice(x, h, starts) for x, h in zip(message, hole, strict=True))
        update = each(lambda x: lax.dynamic_slice(x, starts, shape), message)
        return [operand if active[0] else None, update if active[1] else None, *(None for _ in starts)]

    return Partial(pull, list(equation.inputs[2:]))


def _gather(equation: Equation) -> Pull:
    """gather: gathering the numbers of the operand's elements tells which element each output element is."""
    semiring, shape = equation.semiring, jnp.shape(equation.inputs[0])
    size = require_countable(equation, math.prod(shape))

    def pull(indices, messages):
        source = call(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices, fill_value=-1)[0]
        return [each(lambda x: x.reshape(shape), plus_by_index(semiring, messages[0], source, size)), None]

    call = equation.call
    return Partial(pull, equation.inputs[1])


def _scatter(equation: Equation) -> Pull:
    """scatter, scatter-add and scatter-sub, with inputs (operand, indices, updates)."""
    semiring, active, params = equation.semiring, equation.active, equation.params
    shape, updates = jnp.shape(equation.inputs[0]), jnp.shape(equation.inputs[2])
    size, count = require_countable(equation, math.prod(shape)), require_countable(equation, math.prod(updates))
    numbers, replaces, call = params["dimension_numbers"], equation.name == "scatter", equation.call
    sign = -1.0 if equation.name == "scatter-sub" else 1.0
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
    dtypes = [jnp.result_type(x) for x in equation.inputs]

    def pull(indices, messages):
        (message,) = messages
        target = read(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices)
        kept = target >= 0
        operand = message
        if replaces:
            own = jnp.arange(count, dtype=jnp.int32).reshape(updates)
            last = call(jnp.full(shape, -1, jnp.int32), indices, own)[0]
            operand = where(last < 0, message, zeros(semiring, shape, dtype_of(message)))
            kept &= last.ravel()[jnp.clip(target, 0)] == own
        arrived = each(lambda x: x.ravel()[jnp.clip(target, 0)], message)
        update = where(kept, arrived, zeros(semiring, updates, dtype_of(message)))
        update = edge(semiring, sign, update, dtypes[2])
        return [operand if active[0] else None, None, update if active[2] else None]

    return Partial(pull, equation.inputs[1])


def _sort(equation: Equation) -> Pull:
    """sort: every operand is moved in the order of the keys, and its message is moved back."""
    axis, active = equation.params["dimension"], equation.active
    place = lax.broadcasted_iota(jnp.int32, jnp.shape(equation.inputs[0]), axis)
    order = lax.sort((*equation.inputs, place), dimension=axis, is_stable=True, num_keys=equation.params["num_keys"])[
        -1
    ]

    def pull(order, messages):
        back = jnp.argsort(order, axis=axis)
        taken = lambda m: each(lambda x: jnp.take_along_axis(x, back, axis), m)
        return [taken(m) if a and m is not None else None for m, a in zip(messages, active, strict=True)]

    return Partial(pull, order)


def _top_k(equation: Equation) -> Pull:
    """top_k: the indices say where in the operand the values come from."""
    semiring, shape = equation.semiring, jnp.shape(equation.inputs[0])
    axis = equation.params.get("axis", len(shape) - 1)

    def pull(index, messages):
        message = messages[0]
        whole = zeros(semiring, shape, dtype_of(message))
        put = lambda w, x: jnp.put_along_axis(w, index, x, axis, inplace=False)
        return [tuple(put(w, x) for w, x in zip(whole, message, strict=True))]

    return Partial(pull, equation.outputs[1])


MOVE_RULES: dict[str, EdgeRule] = {
    **dict.fromkeys(("reshape", "expand_dims", "squeeze"), _move(_reshape)),
    "transpose": _move(_transpose),
    "rev": _move(_reverse),
    "broadcast_in_dim": _move(_broadcast),
    "slice": _move(_slice),
    "reduce_sum": _move(_reduce_sum),
    "cumsum": _move(_cumsum),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub"), _scatter),
    "select_n": _choice,
    "pad": _pad,
    "concatenate": _concatenate,
    **dict.fromkeys(("split", "unstack"), _split),
    "stack": _stack,
    "tile": _move(_tile),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "sort": _sort,
    "top_k": _top_k,
    **dict.fromkeys((*IDENTITY, "mark"), _identity),
}
