"""Rules of the primitives that move elements: each output element is an input element, and the derivative is 1.

A message goes back by the transposed move: an input element that went to several places gets the plus of their
messages, one that went nowhere the semiring's zero.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from apgrad._programs.jaxprs import is_inexact, place
from apgrad._programs.kinds import IDENTITY
from apgrad.tracing._equation import EdgeRule, Equation, Pull, transposed_mode
from apgrad.tracing._sums import dtype_of, filled, plus_by_index, plus_over_copies, structs, zeros


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
        raise ValueError(f"gather from an array of {size:,} elements: tracing numbers them in 32 bits")
    changes = transposed_mode(equation.name, equation.params) | {"fill_value": -1}

    def pull(indices, messages):
        source = call(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices, **changes)[0]
        return [jax.tree.map(lambda x: x.reshape(shape), plus_by_index(semiring, messages[0], source, size)), None]

    call = equation.call
    return Partial(pull, equation.inputs[1])


def _scatter_sub(equation: Equation) -> Pull:
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    return equation.in_parts(lambda x, indices, updates: [lax.scatter_add(x, indices, -updates, numbers, mode=mode)])


_TO_ONE_PLACE = """concatenate dynamic_update_slice expand_dims reduce_sum reshape rev scatter-add select_n slice
split squeeze stack transpose unstack"""

MOVE_RULES: dict[str, EdgeRule] = {
    **dict.fromkeys(_TO_ONE_PLACE.split(), _to_one_place),
    **dict.fromkeys((*IDENTITY, "mark", "reduce_precision"), _identity),
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "pad": _pad,
    "scatter-sub": _scatter_sub,
    "tile": _tile,
}
