"""What a primitive's edges are: for each primitive, how messages to its outputs become messages to its inputs.

A rule looks at one equation where it stands (a `Site`) and returns its pull: a function of the messages to the outputs,
with the arrays it must remember, as a pytree, so that `scan` can stack them. Most primitives are of four families:

* elementwise, y_i = f(x_i): one edge an element; its derivative is what `jax.vjp` makes of ones, for all of them;
* moves (reshape, transpose, slice, gather, ...): each y is one of the x, derivative 1; the rule is the transposed move;
* reductions: each x goes into one y; the derivative is again what `jax.vjp` makes of ones;
* products (dot_general, convolution): every x goes into many y, with the other factor as derivative.

What has no rule falls to `dense`: the Jacobian itself, with a warning, and up to `LIMIT` elements. It is also the
oracle for the other rules in the tests. Derivatives are JAX's own, so that at a kink an edge has what `jax.grad` says.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from apgrad.tracing.semirings import Semiring, Value
from apgrad.tracing.sums import contract, dtype_of, plus_by_index, plus_over, zeros

LIMIT = 2**24  # elements of a dense Jacobian


class Site(NamedTuple):
    """An equation where it stands.

    Attributes:
      semiring: that messages are of.
      name: of the primitive.
      call: the primitive with its parameters, `(*inputs) -> list of outputs`; keywords override parameters.
      inputs: arrays.
      active: for each input, whether a message for it is wanted.
      outputs: arrays.
      params: of the primitive.
    """

    semiring: Semiring
    name: str
    call: Callable[..., list[Any]]
    inputs: Sequence[Any]
    active: tuple[bool, ...]
    outputs: Sequence[Any]
    params: dict[str, Any]


Pull = Partial
"""`(messages to outputs) -> messages to inputs`, lists with None where there is no message; and a pytree."""
Rule = Callable[[Site], Pull]


def edge(semiring: Semiring, weight: Any, message: Value, dtype: Any) -> Value:
    """A message along edges with the given derivatives, for an input of the given dtype."""
    weight = jnp.asarray(weight, dtype_of(message))
    return cast(semiring.times(semiring.lift(weight), message), dtype)


def cast(message: Value, dtype: Any) -> Value:
    """The message with its floating components in another dtype."""
    return tuple(x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in message)


def derivatives(site: Site) -> list[Any]:
    """For each active input what `jax.vjp` makes of ones, None for the others."""
    chosen = [i for i, a in enumerate(site.active) if a]

    def function(*values):
        inputs = list(site.inputs)
        for i, value in zip(chosen, values, strict=True):
            inputs[i] = value
        return site.call(*inputs)

    outputs, pullback = jax.vjp(function, *(site.inputs[i] for i in chosen))
    found = iter(pullback([jnp.ones_like(y) for y in outputs]))
    return [next(found) if a else None for a in site.active]


def elementwise(site: Site) -> Pull:
    """Y = f(x_1, ..., x_n), element by element; an x with one element along an axis goes into all of them."""
    semiring, shape = site.semiring, jnp.shape(site.outputs[0])
    shapes = [jnp.shape(x) for x in site.inputs]
    dtypes = [jnp.result_type(x) for x in site.inputs]
    fixed: tuple[Any, ...] = CONSTANT.get(site.name, (None,) * len(shapes))
    weights: list[Any] = [None] * len(shapes)
    if site.name == "mul":
        weights = [o if a else None for a, o in zip(site.active, reversed(site.inputs), strict=True)]
    elif fixed[0] is None:
        full = [jnp.broadcast_to(x, shape) if a else x for x, a in zip(site.inputs, site.active, strict=True)]
        weights = derivatives(site._replace(inputs=full))

    def pull(weights, messages):
        answers: list[Value | None] = []
        for i, active in enumerate(site_active):
            if not active:
                answers.append(None)
                continue
            message = edge(semiring, weights[i] if fixed[i] is None else fixed[i], messages[0], dtypes[i])
            answers.append(_unbroadcast(semiring, message, shape, shapes[i]))
        return answers

    site_active = site.active
    return Partial(pull, weights)


def choice(site: Site) -> Pull:
    """select_n(which, *cases)."""
    semiring, active, shape = site.semiring, site.active, jnp.shape(site.outputs[0])

    def pull(which, messages):
        (message,) = messages
        nothing = zeros(semiring, shape, dtype_of(message))
        answers: list[Value | None] = [None]
        for i, a in enumerate(active[1:]):
            chosen = which == i if which.dtype != bool else which == bool(i)
            chosen = jnp.broadcast_to(chosen, shape)
            answers.append(_where(chosen, message, nothing) if a else None)
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
    return lambda _, m: _map(lambda x: x.reshape(shape), m)


def _transpose(site):
    inverse = tuple(sorted(range(len(site.params["permutation"])), key=lambda i: site.params["permutation"][i]))
    return lambda _, m: _map(lambda x: jnp.transpose(x, inverse), m)


def _reverse(site):
    dimensions = site.params["dimensions"]
    return lambda _, m: _map(lambda x: lax.rev(x, dimensions), m)


def _broadcast(site):
    shape, wide, kept = jnp.shape(site.inputs[0]), site.params["shape"], site.params["broadcast_dimensions"]
    grown = {d for n, d in zip(shape, kept, strict=True) if n == 1 and wide[d] != 1}
    axes = tuple(i for i in range(len(wide)) if i not in kept or i in grown)
    return lambda semiring, m: _map(lambda x: x.reshape(shape), plus_over(semiring, m, axes))


def _slice(site):
    shape, start = jnp.shape(site.inputs[0]), site.params["start_indices"]
    strides = site.params["strides"] or (1,) * len(shape)
    taken = jnp.shape(site.outputs[0])
    ends = [n - s - ((t - 1) * d + 1 if t else 0) for n, s, t, d in zip(shape, start, taken, strides, strict=True)]
    config = [(s, e, d - 1) for s, e, d in zip(start, ends, strides, strict=True)]
    return lambda semiring, m: _each(semiring, lambda x, zero: lax.pad(x, jnp.asarray(zero, x.dtype), config), m)


def _reduce_sum(site):
    shape, axes = jnp.shape(site.inputs[0]), site.params["axes"]
    return lambda _, m: _map(lambda x: jnp.broadcast_to(jnp.expand_dims(x, axes), shape), m)


def _cumsum(site):
    axis, reverse = site.params["axis"], not site.params["reverse"]

    def transposed(semiring, m):
        # The scan joins (what it has, the next): going backward, the next comes first.
        plus = (lambda a, b: semiring.plus(b, a)) if reverse else semiring.plus
        return lax.associative_scan(plus, m, reverse=reverse, axis=axis)

    return transposed


def identity(site: Site) -> Pull:
    """Outputs are the inputs."""
    active = site.active
    return Partial(lambda messages: [m if a else None for m, a in zip(messages, active, strict=True)])


def pad(site: Site) -> Pull:
    """pad(operand, value): the padding's message is the plus of all that is no operand."""
    semiring, active, config = site.semiring, site.active, site.params["padding_config"]

    def pull(messages):
        (message,) = messages

        def crop(x, zero):
            x = lax.pad(x, jnp.asarray(zero, x.dtype), [(-low, -high, 0) for low, high, _ in config])
            return x[tuple(slice(None, None, inner + 1) for _, _, inner in config)]

        padding = None
        if active[1]:
            inside = lax.pad(jnp.ones(shape, bool), jnp.asarray(False), config)
            outside = _where(~inside, message, zeros(semiring, inside.shape, dtype_of(message)))
            padding = plus_over(semiring, outside, tuple(range(len(config))))
        return [_each(semiring, crop, message) if active[0] else None, padding]

    shape = jnp.shape(site.inputs[0])
    return Partial(pull)


def concatenate(site: Site) -> Pull:
    """Each operand gets its piece."""
    active, axis = site.active, site.params["dimension"]
    sizes = [jnp.shape(x)[axis] for x in site.inputs]

    def pull(messages):
        pieces, start = [], 0
        for size, a in zip(sizes, active, strict=True):
            piece = _map(
                functools.partial(lax.slice_in_dim, start_index=start, limit_index=start + size, axis=axis), messages[0]
            )
            pieces.append(piece if a else None)
            start += size
        return pieces

    return Partial(pull)


def split(site: Site) -> Pull:
    """The pieces' messages, joined."""
    semiring, axis = site.semiring, site.params["axis"]
    shapes, dtype = [jnp.shape(y) for y in site.outputs], site.outputs[0].dtype

    def pull(messages):
        full = [m if m is not None else zeros(semiring, s, dtype) for m, s in zip(messages, shapes, strict=True)]
        return [tuple(jnp.concatenate(parts, axis) for parts in zip(*full, strict=True))]

    return Partial(pull)


def dynamic_slice(site: Site) -> Pull:
    """dynamic_slice(operand, *starts)."""
    semiring, shape = site.semiring, jnp.shape(site.inputs[0])

    def pull(starts, messages):
        (message,) = messages
        whole = zeros(semiring, shape, dtype_of(message))
        placed = tuple(lax.dynamic_update_slice(w, x, starts) for w, x in zip(whole, message, strict=True))
        return [placed, *(None for _ in starts)]

    return Partial(pull, list(site.inputs[1:]))


def dynamic_update_slice(site: Site) -> Pull:
    """dynamic_update_slice(operand, update, *starts)."""
    semiring, active, shape = site.semiring, site.active, jnp.shape(site.inputs[1])

    def pull(starts, messages):
        (message,) = messages
        hole = zeros(semiring, shape, dtype_of(message))
        operand = tuple(lax.dynamic_update_slice(x, h, starts) for x, h in zip(message, hole, strict=True))
        update = _map(lambda x: lax.dynamic_slice(x, starts, shape), message)
        return [operand if active[0] else None, update if active[1] else None, *(None for _ in starts)]

    return Partial(pull, list(site.inputs[2:]))


def gather(site: Site) -> Pull:
    """gather(operand, indices): which element each output is, is what the gather makes of the elements' numbers."""
    semiring, shape = site.semiring, jnp.shape(site.inputs[0])
    size = _countable(site, math.prod(shape))

    def pull(indices, messages):
        source = site_call(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices, fill_value=-1)[0]
        return [_map(lambda x: x.reshape(shape), plus_by_index(semiring, messages[0], source, size)), None]

    site_call = site.call
    return Partial(pull, site.inputs[1])


def scatter(site: Site) -> Pull:
    """Scatter and scatter-add (operand, indices, updates)."""
    semiring, active, params = site.semiring, site.active, site.params
    shape, updates = jnp.shape(site.inputs[0]), jnp.shape(site.inputs[2])
    size, count = _countable(site, math.prod(shape)), _countable(site, math.prod(updates))
    numbers, replaces, site_call = params["dimension_numbers"], site.name == "scatter", site.call
    sign = -1.0 if site.name == "scatter-sub" else 1.0
    collapsed = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    window = iter(updates[d] for d in numbers.update_window_dims)
    where = functools.partial(
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
        target = where(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices)
        kept = target >= 0
        operand = message
        if replaces:
            own = jnp.arange(count, dtype=jnp.int32).reshape(updates)
            last = site_call(jnp.full(shape, -1, jnp.int32), indices, own)[0]
            operand = _where(last < 0, message, zeros(semiring, shape, dtype_of(message)))
            kept &= last.ravel()[jnp.clip(target, 0)] == own
        arrived = _map(lambda x: x.ravel()[jnp.clip(target, 0)], message)
        update = _where(kept, arrived, zeros(semiring, updates, dtype_of(message)))
        update = edge(semiring, sign, update, dtypes[2])
        return [operand if active[0] else None, None, update if active[2] else None]

    return Partial(pull, site.inputs[1])


def reduction(site: Site) -> Pull:
    """Each input element goes into one output element; the derivative is what `jax.vjp` makes of ones."""
    semiring, shape, axes = site.semiring, jnp.shape(site.inputs[0]), site.params["axes"]
    dtype = site.inputs[0].dtype

    def pull(weight, messages):
        message = _map(lambda x: jnp.broadcast_to(jnp.expand_dims(x, axes), shape), messages[0])
        return [edge(semiring, weight, message, dtype)]

    return Partial(pull, derivatives(site)[0])


def sort(site: Site) -> Pull:
    """sort(*operands): all go where the order of the keys says."""
    axis, active = site.params["dimension"], site.active
    place = lax.broadcasted_iota(jnp.int32, jnp.shape(site.inputs[0]), axis)
    order = lax.sort((*site.inputs, place), dimension=axis, is_stable=True, num_keys=site.params["num_keys"])[-1]

    def pull(order, messages):
        back = jnp.argsort(order, axis=axis)
        taken = lambda m: _map(lambda x: jnp.take_along_axis(x, back, axis), m)
        return [taken(m) if a and m is not None else None for m, a in zip(messages, active, strict=True)]

    return Partial(pull, order)


def top_k(site: Site) -> Pull:
    """top_k(operand) -> values, indices."""
    semiring, shape = site.semiring, jnp.shape(site.inputs[0])
    axis = site.params.get("axis", len(shape) - 1)

    def pull(index, messages):
        message = messages[0]
        whole = zeros(semiring, shape, dtype_of(message))
        put = lambda w, x: jnp.put_along_axis(w, index, x, axis, inplace=False)
        return [tuple(put(w, x) for w, x in zip(whole, message, strict=True))]

    return Partial(pull, site.outputs[1])


def dot_general(site: Site) -> Pull:
    """Products of matrices: to one factor goes the semiring's product of the message with the other."""
    ((left_sum, right_sum), (left_batch, right_batch)) = site.params["dimension_numbers"]
    left, right = site.inputs
    factors = _Factor(jnp.shape(left), left_batch, left_sum), _Factor(jnp.shape(right), right_batch, right_sum)
    semiring, active, precision = site.semiring, site.active, site.params["precision"]
    dtypes = left.dtype, right.dtype
    shape = jnp.shape(site.outputs[0])

    def pull(memory, messages):
        batch = len(left_batch)
        middle = batch + len(factors[0].free)
        flat = (math.prod(shape[:batch]), math.prod(shape[batch:middle]), math.prod(shape[middle:]))
        message = _map(lambda x: x.reshape(flat), messages[0])  # (B, I, J)
        answers: list[Value | None] = [None, None]
        for side in (0, 1):
            if not active[side]:
                continue
            mine, other = factors[side], factors[1 - side]
            # (B, J, contracted): the other's free axes are summed.
            weight = other.flat(memory[1 - side], other.batch, other.free, other.contracted)
            arrived = message if side == 1 else _map(lambda x: jnp.swapaxes(x, 1, 2), message)  # (B, J, I)
            # The other's contracted axes come in its order, that of the pairs.
            back = functools.partial(mine.restore, batch=mine.batch)
            swapped = mine.last_is_contracted and (side == 0 or weight.shape[2] >= 16)
            found = contract(semiring, weight, arrived, swapped=swapped, precision=precision)
            order = (mine.free, mine.contracted) if swapped else (mine.contracted, mine.free)
            answers[side] = cast(_map(lambda x: back(x, first=order[0], last=order[1]), found), dtypes[side])
        return answers

    return Partial(pull, [left if active[1] else None, right if active[0] else None])


class _Factor:
    """The axes of one factor of a dot_general."""

    def __init__(self, shape, batch, contracted):
        self.shape, self.batch, self.contracted = shape, tuple(batch), tuple(contracted)
        self.free = tuple(i for i in range(len(shape)) if i not in (*batch, *contracted))
        self.last_is_contracted = bool(shape) and len(shape) - 1 in self.contracted

    def flat(self, x, *groups):
        shape = tuple(math.prod(self.shape[i] for i in group) for group in groups)
        return jnp.transpose(x, tuple(i for group in groups for i in group)).reshape(shape)

    def restore(self, x, batch, first, last):
        order = (*batch, *first, *last)
        inverse = tuple(sorted(range(len(order)), key=lambda i: order[i]))
        return jnp.transpose(x.reshape(tuple(self.shape[i] for i in order)), inverse)


def along_axis(site: Site) -> Pull:
    """Cumprod and its kin: the Jacobian along the axis, for each line by itself."""
    semiring, axis, dtype = site.semiring, site.params["axis"], site.inputs[0].dtype
    x = jnp.moveaxis(site.inputs[0], axis, -1)
    lines, length = x.reshape(-1, x.shape[-1]), x.shape[-1]
    _limit(site.name, lines.size * length)

    def line(values):
        shape = [1] * x.ndim
        shape[axis] = length
        return site.call(values.reshape(shape))[0].reshape(length)

    moved = x.shape

    def pull(jacobian, messages):
        message = _map(lambda m: jnp.moveaxis(m, axis, -1).reshape(-1, length, 1), messages[0])
        found = contract(semiring, jacobian, message)
        return [cast(_map(lambda m: jnp.moveaxis(m.reshape(moved), -1, axis), found), dtype)]

    return Partial(pull, jax.vmap(jax.jacrev(line))(lines))


def dense(site: Site, quiet: bool = False) -> Pull:
    """The Jacobian of any primitive, with a warning. Where messages are cotangents, `jax.vjp` itself, without one.

    Raises:
      ValueError: for a Jacobian of more than `LIMIT` elements.
    """
    semiring, chosen = site.semiring, [i for i, a in enumerate(site.active) if a]
    shapes = [jnp.shape(x) for x in site.inputs]

    def function(*values):
        inputs = list(site.inputs)
        for i, value in zip(chosen, values, strict=True):
            inputs[i] = value
        return [y for y in site.call(*inputs) if jnp.issubdtype(y.dtype, jnp.inexact)]

    real = [jnp.issubdtype(y.dtype, jnp.inexact) for y in site.outputs]
    outputs, pullback = jax.vjp(function, *(site.inputs[i] for i in chosen))

    def fill(messages):
        wanted = [m for m, r in zip(messages, real, strict=True) if r]
        return [
            zeros(semiring, s, d) if m is None else m for m, s, d in zip(wanted, output_shapes, dtypes, strict=True)
        ]

    output_shapes, dtypes = [jnp.shape(y) for y in outputs], [y.dtype for y in outputs]
    count = len(shapes)

    def answer(found):
        answers: list[Value | None] = [None] * count
        for i, value in zip(chosen, found, strict=True):
            answers[i] = value
        return answers

    if semiring.kind == "gradient" and not quiet:
        return Partial(lambda pb, messages: answer([(g,) for g in pb([m[0] for m in fill(messages)])]), pullback)

    rows = sum(y.size for y in outputs)
    _limit(site.name, rows * sum(math.prod(shapes[i]) for i in chosen))
    if not quiet:
        warnings.warn(
            f"tracing has no rule for the primitive {site.name!r}; its Jacobian ({rows} rows) is computed in full. "
            "Right, but slow.",
            stacklevel=2,
        )
    jacobians = []  # for each output, (its elements, *input shape) for each input
    for k, y in enumerate(outputs):
        basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
        place = functools.partial(lambda k, e: [e if j == k else jnp.zeros_like(o) for j, o in enumerate(outputs)], k)
        jacobians.append(jax.vmap(lambda e, place=place: pullback(place(e)))(basis))

    def pull(jacobians, messages):
        total: list[Value | None] = [None] * len(chosen)
        for rows, message in zip(jacobians, fill(messages), strict=True):
            column = _map(lambda x: x.reshape(1, -1, 1), message)
            for n, jacobian in enumerate(rows):
                weight = jacobian.reshape(1, jacobian.shape[0], -1)
                found = contract(semiring, weight, column)
                part = cast(_map(lambda x, n=n: x.reshape(shapes[chosen[n]]), found), jacobian.dtype)
                before = total[n]
                total[n] = part if before is None else semiring.plus(before, part)
        return answer(total)

    return Partial(pull, jacobians)


def _unbroadcast(semiring, message, wide, shape):
    if wide == shape:
        return message
    axes = tuple(range(len(wide))) if not shape else tuple(i for i, n in enumerate(shape) if n == 1 != wide[i])
    return _map(lambda x: x.reshape(shape), plus_over(semiring, message, axes))


def _limit(name, elements):
    if elements > LIMIT:
        raise ValueError(
            f"tracing has no rule for the primitive {name!r} but its Jacobian, which has {elements:,} elements here; "
            f"at most {LIMIT:,} are computed. Trace a smaller input, or write the operation with other primitives."
        )


def _countable(site, size):
    if size >= 2**31:
        raise ValueError(f"{site.name} on an array of {size:,} elements: tracing numbers them in 32 bits")
    return size


def _map(function, message):
    return tuple(function(x) for x in message)


def _each(semiring, function, message):
    return tuple(function(x, zero) for x, zero in zip(message, semiring.zero, strict=True))


def _where(condition, a, b):
    return tuple(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True))


CONSTANT = {
    "add": (1.0, 1.0),
    "add_any": (1.0, 1.0),
    "sub": (1.0, -1.0),
    "neg": (-1.0,),
    "convert_element_type": (1.0,),
    "reduce_precision": (1.0,),
}
ELEMENTWISE = [
    "acos",
    "acosh",
    "add",
    "add_any",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "cbrt",
    "clamp",
    "cos",
    "cosh",
    "digamma",
    "div",
    "convert_element_type",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "integer_pow",
    "lgamma",
    "log",
    "log1p",
    "logistic",
    "max",
    "min",
    "mul",
    "neg",
    "nextafter",
    "polygamma",
    "pow",
    "random_gamma",
    "reduce_precision",
    "refuse_derivative",
    "regularized_incomplete_beta",
    "rem",
    "rsqrt",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
    "abs",
    "zero_with_gradient",
    "zeta",
]
IDENTITIES = ("copy", "copy_p", "optimization_barrier", "sharding_constraint", "layout_constraint", "pvary", "name")
CONSTANTS = [
    "sign",
    "floor",
    "ceil",
    "round",
    "is_finite",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "argmax",
    "argmin",
    "iota",
    "stop_gradient",
    "random_bits",
    "shift_left",
    "shift_right_logical",
    "shift_right_arithmetic",
    "and",
    "or",
    "not",
    "xor",
    "population_count",
    "clz",
    "bitcast_convert_type",
]
"""Primitives whose outputs do not depend on their inputs, as far as derivatives go: no edges."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(IDENTITIES, identity),
    **dict.fromkeys(("reshape", "expand_dims", "squeeze"), move(_reshape)),
    "transpose": move(_transpose),
    "rev": move(_reverse),
    "broadcast_in_dim": move(_broadcast),
    "slice": move(_slice),
    "reduce_sum": move(_reduce_sum),
    "cumsum": move(_cumsum),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod"), reduction),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), along_axis),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter_add", "scatter_sub"), scatter),
    "select_n": choice,
    "pad": pad,
    "concatenate": concatenate,
    "split": split,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "sort": sort,
    "top_k": top_k,
    "dot_general": dot_general,
}
