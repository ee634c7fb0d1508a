"""Rules of matrix products, of primitives made of others, and `dense`, which takes any primitive by its Jacobian.

Convolutions, windows, cumulative operations and sorting are made of parts, which are walked for the way back only. The
parts give the primitive's edges, since at most one path leads through them from an input to an output element. A
window's taps are slices of the padded input: so a convolution is a sum over taps k of products w_k . x[k :: stride], a
maximum a choice of slices. Cumulative operations are scans. Other parts are those of JAX's own derivative.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from apgrad._ground.warning import warn
from apgrad._programs.jaxprs import is_inexact, place, restrict
from apgrad.tracing._equation import EdgeRule, Equation, Pull, cast
from apgrad.tracing._sums import bilinear, contract, dtype_of, filled, structs

LIMIT = 2**24  # the most elements that a dense Jacobian may have
_OF_ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
MOST_POSITIONS = 1024  # a window of more positions is left to `dense`


def _dot_general(equation: Equation) -> Pull:
    """dot_general: each factor gets the matrix product, in the semiring, of the message with the other factor."""
    # The contracted axes of both come in the order of their pairs.
    sums, batches = equation.params["dimension_numbers"]
    semiring, active, precision = equation.semiring, equation.active, equation.params["precision"]
    left, right = equation.inputs
    shapes, dtypes = (jnp.shape(left), jnp.shape(right)), (left.dtype, right.dtype)
    free = [[i for i in range(len(shapes[k])) if i not in (*batches[k], *sums[k])] for k in (0, 1)]
    size = lambda side, axes: math.prod(shapes[side][i] for i in axes)

    def pull(memory, messages):
        flat = size(0, batches[0]), size(0, free[0]), size(1, free[1])
        message = jax.tree.map(lambda x: x.reshape(flat), messages[0])  # (B, I, J)

        def answer(side):
            # (B, J, contracted): the other's free axes are summed.
            other, groups = 1 - side, (batches[1 - side], free[1 - side], sums[1 - side])
            weight = jnp.transpose(memory[other], [i for group in groups for i in group])
            weight = weight.reshape([size(other, group) for group in groups])
            arrived = message if side == 1 else jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), message)  # (B, J, I)
            swapped = len(shapes[side]) - 1 in sums[side] and (side == 0 or weight.shape[2] >= 16)
            found = contract(semiring, weight, arrived, swapped=swapped, precision=precision)
            order = [*batches[side], *(free[side] if swapped else sums[side])]
            order += sums[side] if swapped else free[side]
            restored = lambda x: x.reshape([shapes[side][i] for i in order]).transpose(np.argsort(order).tolist())
            return cast(semiring, jax.tree.map(restored, found), dtypes[side])

        return [answer(side) if wanted else None for side, wanted in enumerate(active)]

    return Partial(pull, [left if active[1] else None, right if active[0] else None])


def dense(equation: Equation) -> Pull:
    """The pull of any primitive: `jax.vjp`'s if messages are cotangents, else by its whole Jacobian, with a warning."""
    semiring, chosen = equation.semiring, [i for i, a in enumerate(equation.active) if a]
    shapes, like = [jnp.shape(x) for x in equation.inputs], structs(equation.outputs)
    with_messages = lambda *inputs: [y for y in equation.call(*inputs) if is_inexact(y)]
    function, values = restrict(with_messages, equation.inputs, chosen)
    outputs, pullback = jax.vjp(function, *values)
    arrived = lambda messages: [m for m in filled(semiring, messages, like) if m is not None]
    answer = lambda found: place(found, chosen, [None] * len(shapes))
    if semiring.kind == "gradient":
        return Partial(lambda pb, messages: answer([(g,) for g in pb([g for (g,) in arrived(messages)])]), pullback)
    rows = sum(y.size for y in outputs)
    elements = rows * sum(math.prod(shapes[i]) for i in chosen)
    lacks = f"tracing has no rule for the primitive {equation.name!r}"
    if elements > LIMIT:
        raise ValueError(
            f"{lacks}, and its Jacobian has {elements:,} elements; at most {LIMIT:,} are computed. Trace a smaller "
            "input, or write the operation with other primitives."
        )
    warn(f"{lacks}; its Jacobian ({rows} rows) is computed in full. Right, but slow.")
    ends = np.cumsum([y.size for y in outputs])[:-1].tolist()

    def row(message):
        parts = zip(jnp.split(message, ends), outputs, strict=True)
        return pullback([part.reshape(y.shape).astype(y.dtype) for part, y in parts])

    try:
        jacobians = jax.vmap(row)(jnp.eye(rows))
    except NotImplementedError:  # some primitives cannot be batched
        jacobians = jax.lax.map(row, jnp.eye(rows))

    def pull(jacobians, messages):
        dtype = functools.reduce(np.promote_types, [dtype_of(m) for m in arrived(messages)])
        parts = zip(*(cast(semiring, m, dtype) for m in arrived(messages)), strict=True)
        column = tuple(jnp.concatenate([x.ravel() for x in part]).reshape(1, -1, 1) for part in parts)

        def sent(jacobian):
            found = contract(semiring, jacobian.reshape(1, rows, -1), column)
            return cast(semiring, tuple(x.reshape(jacobian.shape[1:]) for x in found), jacobian.dtype)

        return answer(list(map(sent, jacobians)))

    return Partial(pull, jacobians)


def _convolution(equation: Equation) -> Pull:
    params = equation.params
    size = [jnp.shape(equation.inputs[1])[d] for d in params["dimension_numbers"].rhs_spec[2:]]
    if equation.semiring.kind == "add":
        return _bilinear(equation)
    if params["batch_group_count"] != 1 or math.prod(size) > MOST_POSITIONS:
        return dense(equation)
    return equation.in_parts(functools.partial(_convolve, params=params, shape=jnp.shape(equation.outputs[0])))


def _window(equation: Equation) -> Pull:
    if math.prod(equation.params["window_dimensions"]) > MOST_POSITIONS:
        return dense(equation)
    options = {"name": equation.name, "params": equation.params, "shape": jnp.shape(equation.outputs[0])}
    return equation.in_parts(functools.partial(_windowed, **options))


def _ragged(equation: Equation) -> Pull:
    """ragged_dot_general as `lax.ragged_dot` makes it: each row of the left factor meets the matrix of its group."""
    params = equation.params
    if params["ragged_dot_dimension_numbers"] != _OF_ROWS or params["group_offset"] is not None:
        return dense(equation)

    def parts(left, right, sizes):
        group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(left.shape[0]), side="right")
        # Rows after the last group are multiplied by zeros.
        matrices = right.at[group].get(mode="fill", fill_value=0)
        each_row = (((1,), (1,)), ((0,), (0,)))
        return [lax.dot_general(left, matrices, each_row, params["precision"], params["preferred_element_type"])]

    return equation.in_parts(parts)


def _cumulative(equation: Equation) -> Pull:
    """By the scan of the operation itself, a smaller program than that of JAX's derivative."""
    combine, axis, reverse = _CUMULATIVE[equation.name], equation.params["axis"], equation.params["reverse"]
    return equation.in_parts(lambda x: [lax.associative_scan(combine, x, axis=axis, reverse=reverse)])


def _by_derivative(equation: Equation) -> Pull:
    """By the program of JAX's own derivative: a gather where elements are sorted, or a `scatter-add`."""
    changes = {"unique_indices": False} if equation.name == "scatter" else {}  # else its derivative is a scatter too
    call, chosen = functools.partial(equation.call, **changes), [i for i, a in enumerate(equation.active) if a]

    def parts(*inputs):
        function, values = restrict(call, inputs, chosen)
        outputs, tangents = jax.jvp(function, lax.stop_gradient(values), values)
        return [t if is_inexact(y) else y for y, t in zip(outputs, tangents, strict=True)]

    return equation.in_parts(parts)


def _bilinear(equation: Equation) -> Pull:
    """Where plus is addition: JAX's own transposes, component by component."""
    semiring, active, call = equation.semiring, equation.active, equation.call
    forms = structs(equation.inputs)

    def pull(inputs, messages):
        def answer(side):
            mine, other = forms[side], forms[1 - side]

            def transposed(a, b):
                a = a.astype(other.dtype)
                return jax.linear_transpose(lambda x: call(*((x, a) if side == 0 else (a, x)))[0], mine)(b)[0]

            lifted = semiring.lift(inputs[1 - side].astype(dtype_of(messages[0])))
            return cast(semiring, bilinear(semiring, lifted, messages[0], transposed), mine.dtype)

        return [answer(side) if wanted else None for side, wanted in enumerate(active)]

    return Partial(pull, list(equation.inputs))


def _convolve(x, kernel, *, params, shape):
    spec, groups = params["dimension_numbers"], params["feature_group_count"]
    precision = params["precision"][::-1] if isinstance(params["precision"], tuple) else params["precision"]
    x, kernel = jnp.transpose(x, spec.lhs_spec), jnp.transpose(kernel, spec.rhs_spec)
    out = tuple(shape[d] for d in spec.out_spec)
    padding = [(lo, hi, d - 1) for (lo, hi), d in zip(params["padding"], params["lhs_dilation"], strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *padding])
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    kernel = kernel.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
    total: Any = None
    for tap, index in _taps(x, 3, kernel.shape[3:], params["window_strides"], params["rhs_dilation"], out[2:]):
        weight = kernel[(..., *index)]
        # (groups, out / groups, batch, *positions)
        part = lax.dot_general(weight, tap, (((2,), (2,)), ((0,), (1,))), precision)
        total = part if total is None else total + part
    total = jnp.moveaxis(total, 2, 0).reshape(out).astype(params["preferred_element_type"] or x.dtype)
    return [jnp.transpose(total, tuple(int(i) for i in np.argsort(spec.out_spec)))]


def _windowed(x, *, name, params, shape):
    outside = {"reduce_window_sum": 0, "reduce_window_max": -jnp.inf, "reduce_window_min": jnp.inf}[name]
    dilation = [(lo, hi, d - 1) for (lo, hi), d in zip(params["padding"], params["base_dilation"], strict=True)]
    x = lax.pad(x, jnp.asarray(outside, x.dtype), dilation)
    size, strides = params["window_dimensions"], params["window_strides"]
    taps = [tap for tap, _ in _taps(x, 0, size, strides, params["window_dilation"], shape)]
    if name == "reduce_window_sum":
        return [functools.reduce(jnp.add, taps)]
    best, total = taps[0], taps[0]
    for tap in taps[1:]:
        greater = lax.stop_gradient(tap > best if name == "reduce_window_max" else tap < best)
        best, total = lax.stop_gradient(jnp.where(greater, tap, best)), jnp.where(greater, tap, total)
    return [total]


def _taps(x, first, size, strides, dilation, shape):
    """For each position in the window, the slice of x that it sees, (..., *shape), and the position."""
    for index in itertools.product(*(range(n) for n in size)):
        starts = [k * d for k, d in zip(index, dilation, strict=True)]
        ends = [s + (n - 1) * t + 1 if n else s for s, n, t in zip(starts, shape, strides, strict=True)]
        head = (0,) * first
        yield (lax.slice(x, (*head, *starts), (*x.shape[:first], *ends), ((1,) * first + tuple(strides))), index)


_CUMULATIVE = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}

PRODUCT_RULES: dict[str, EdgeRule] = {
    "dot_general": _dot_general,
    **dict.fromkeys(_CUMULATIVE, _cumulative),
    **dict.fromkeys(("scatter", "sort", "top_k"), _by_derivative),
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
}
