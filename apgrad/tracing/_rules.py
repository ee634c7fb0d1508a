"""The rules of primitives: how messages to a primitive's outputs become messages to its inputs.

Most primitives are of four families:

* elementwise, y_i = f(x_i): each element has one edge, and the pullback of ones (`jax.vjp`) has all their derivatives;
* moves (reshape, slice, gather, ...): each y is one of the x, with the derivative 1; the rule is the transposed move,
  by which an x that went to several places gets the plus of their messages, one that went nowhere the semiring's zero;
* reductions: each x goes into one y, and the pullback of ones again has the derivatives;
* products (dot_general, convolution): every x goes into many y, and the derivatives are the other factor.

A primitive without a rule falls to `dense`, its whole Jacobian, with which the tests compare all other rules.
Derivatives are JAX's own, so that at a kink an edge has the derivative that `jax.grad` uses.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from apgrad._programs.jaxprs import is_inexact, place
from apgrad._programs.kinds import ELEMENTWISE, IDENTITY
from apgrad.tracing._equation import EdgeRule, Equation, Pull, derivatives, edge, transposed_mode
from apgrad.tracing._products import PRODUCT_RULES
from apgrad.tracing._sums import dtype_of, filled, plus_by_index, plus_over_copies, structs, zeros


def _elementwise(equation: Equation) -> Pull:
    """Functions element by element, y = f(x_1, ..., x_n); an x of length 1 along an axis goes into all y along it."""
    semiring, active, shape = equation.semiring, equation.active, jnp.shape(equation.outputs[0])
    shapes = [jnp.shape(x) for x in equation.inputs]
    dtypes = [jnp.result_type(x) for x in equation.inputs]
    fixed: tuple[Any, ...] = FIXED_WEIGHTS.get(equation.name, (None,) * len(shapes))
    weights: list[Any] = [None] * len(shapes)
    if equation.name == "mul":
        weights = [o if a else None for a, o in zip(active, reversed(equation.inputs), strict=True)]
    elif fixed[0] is None:
        full = [jnp.broadcast_to(x, shape) if a else x for x, a in zip(equation.inputs, active, strict=True)]
        weights = derivatives(equation._replace(inputs=full))

    def pull(weights, messages):
        def back(i):
            message = edge(semiring, weights[i] if fixed[i] is None else fixed[i], messages[0], dtypes[i])
            return plus_over_copies(semiring, message, shape, shapes[i] or (1,) * len(shape), shapes[i])

        return [back(i) if a else None for i, a in enumerate(active)]

    return Partial(pull, weights)


def _reduction(equation: Equation) -> Pull:
    semiring, shape, axes = equation.semiring, jnp.shape(equation.inputs[0]), equation.params["axes"]
    dtype = equation.inputs[0].dtype

    def pull(weight, messages):
        message = jax.tree.map(lambda x: jnp.broadcast_to(jnp.expand_dims(x, axes), shape), messages[0])
        return [edge(semiring, weight, message, dtype)]

    return Partial(pull, derivatives(equation)[0])


def _to_one_place(equation: Equation) -> Pull:
    """Moves by which an input element goes to at most one place: JAX's transpose, of each component of the messages."""
    semiring, call = equation.semiring, equation.call
    chosen = [i for i, active in enumerate(equation.active) if active]
    shapes, like = [jnp.shape(x) for x in equation.inputs], structs(equation.outputs)
    indices = [None if is_inexact(x) else x for x in equation.inputs]

    def pull(indices, messages):
        def back(arrived):
            dtype = arrived[0].dtype
            values = [jnp.zeros(s, dtype) if x is None else x for s, x in zip(shapes, indices, strict=True)]
            moved = lambda *parts: call(*place(parts, chosen, values))
            return jax.linear_transpose(moved, *(jax.ShapeDtypeStruct(shapes[i], dtype) for i in chosen))(arrived)

        found = []
        for *arrived, zero in zip(*filled(semiring, messages, like), semiring.zero, strict=True):
            sent = back(arrived)
            if zero != 0:
                reached = back([jnp.ones_like(x) for x in arrived])
                sent = [jnp.where(r != 0, x, jnp.asarray(zero, x.dtype)) for r, x in zip(reached, sent, strict=True)]
            found.append(sent)
        return place(list(zip(*found, strict=True)), chosen, [None] * len(shapes))

    return Partial(pull, indices)


def _broadcast(equation: Equation) -> Pull:
    semiring, shape, wide = equation.semiring, jnp.shape(equation.inputs[0]), equation.params["shape"]
    narrow = place(shape, equation.params["broadcast_dimensions"], [1] * len(wide))
    return Partial(lambda messages: [plus_over_copies(semiring, messages[0], wide, narrow, shape)])


def _tile(equation: Equation) -> Pull:
    """tile: the copies along each axis come before what is copied, as if they were axes of their own."""
    semiring, shape, reps = equation.semiring, jnp.shape(equation.inputs[0]), equation.params["reps"]
    sizes = (1,) * (len(reps) - len(shape)) + shape
    in_turn = lambda copies: [n for pair in zip(copies, sizes, strict=True) for n in pair]
    wide, narrow = in_turn(reps), in_turn([1] * len(reps))
    return Partial(lambda messages: [plus_over_copies(semiring, messages[0], wide, narrow, shape)])


def _identity(equation: Equation) -> Pull:
    active = equation.active
    return Partial(lambda messages: [m if a else None for m, a in zip(messages, active, strict=True)])


def _pad(equation: Equation) -> Pull:
    """pad: an active padding value is copied to all places that the operand leaves free."""
    config = equation.params["padding_config"]
    if not equation.active[1]:
        return _to_one_place(equation)

    def parts(x, value):
        inside = lax.pad(jnp.ones(x.shape, bool), jnp.asarray(False), config)
        return [lax.select(inside, lax.pad(x, jnp.zeros((), x.dtype), config), jnp.broadcast_to(value, inside.shape))]

    return equation.in_parts(parts)


def _dynamic_slice(equation: Equation) -> Pull:
    """The operand gets the message at the place of the slice. JAX's transpose takes no integers, which masks are."""
    semiring, shape = equation.semiring, jnp.shape(equation.inputs[0])

    def pull(starts, messages):
        (message,) = messages
        whole = zeros(semiring, shape, dtype_of(message))
        placed = tuple(lax.dynamic_update_slice(w, x, starts) for w, x in zip(whole, message, strict=True))
        return [placed, *(None for _ in starts)]

    return Partial(pull, list(equation.inputs[1:]))


def _gather(equation: Equation) -> Pull:
    """gather: gathering the numbers of the operand's elements tells which element each output element is."""
    semiring, shape = equation.semiring, jnp.shape(equation.inputs[0])
    if (size := math.prod(shape)) >= 2**31:
        raise ValueError(f"tracing follows a gather from fewer than 2^31 elements, got {size:,}: trace a smaller array")
    changes = transposed_mode(equation.name, equation.params) | {"fill_value": -1}

    def pull(indices, messages):
        source = call(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices, **changes)[0]
        return [jax.tree.map(lambda x: x.reshape(shape), plus_by_index(semiring, messages[0], source, size)), None]

    call = equation.call
    return Partial(pull, equation.inputs[1])


def _scatter_sub(equation: Equation) -> Pull:
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    return equation.in_parts(lambda x, indices, updates: [lax.scatter_add(x, indices, -updates, numbers, mode=mode)])


FIXED_WEIGHTS = {
    "add": (1.0, 1.0),
    "add_any": (1.0, 1.0),
    "sub": (1.0, -1.0),
    "neg": (-1.0,),
    "convert_element_type": (1.0,),
}

_TO_ONE_PLACE = """concatenate dynamic_update_slice expand_dims reduce_sum reshape rev scatter-add select_n slice
split squeeze stack transpose unstack"""

RULES: dict[str, EdgeRule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod"), _reduction),
    **dict.fromkeys(_TO_ONE_PLACE.split(), _to_one_place),
    **dict.fromkeys((*IDENTITY, "mark", "reduce_precision"), _identity),
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "pad": _pad,
    "scatter-sub": _scatter_sub,
    "tile": _tile,
    **PRODUCT_RULES,
}
