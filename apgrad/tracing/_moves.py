"""Rules of the primitives that move elements: each output element is an input element, and the derivative is 1.

A message goes back by the transposed move: an input element that went to several places gets the plus of their
messages, one that went nowhere the semiring's zero.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from apgrad._programs.jaxprs import is_inexact, place
from apgrad._programs.kinds import IDENTITY
from apgrad.tracing._equation import EdgeRule, Equation, Pull, require_countable, transposed_mode
from apgrad.tracing._sums import dtype_of, plus_by_index, plus_over, zeros


def _to_one_place(equation: Equation) -> Pull:
    """Moves by which an input element goes to at most one place: JAX's transpose, of each component of the messages."""
    semiring, call = equation.semiring, equation.call
    chosen = [i for i, active in enumerate(equation.active) if active]
    shapes, forms = [jnp.shape(x) for x in equation.inputs], [(jnp.shape(y), y.dtype) for y in equation.outputs]
    indices = [None if is_inexact(x) else x for x in equation.inputs]

    def pull(indices, messages):
        full = [zeros(semiring, *form) if m is None else m for m, form in zip(messages, forms, strict=True)]

        def back(arrived):
            dtype = arrived[0].dtype
            values = [jnp.zeros(s, dtype) if x is None else x for s, x in zip(shapes, indices, strict=True)]
            moved = lambda *parts: call(*place(parts, chosen, values))
            return jax.linear_transpose(moved, *(jax.ShapeDtypeStruct(shapes[i], dtype) for i in chosen))(arrived)

        found = []
        for *arrived, zero in zip(*full, semiring.zero, strict=True):
            sent = back(arrived)
            if zero != 0:
                reached = back([jnp.ones_like(x) for x in arrived])
                sent = [jnp.where(r != 0, x, jnp.asarray(zero, x.dtype)) for r, x in zip(reached, sent, strict=True)]
            found.append(sent)
        return place(list(zip(*found, strict=True)), chosen, [None] * len(shapes))

    return Partial(pull, indices)


def _broadcast(equation: Equation) -> Pull:
    semiring, kept = equation.semiring, equation.params["broadcast_dimensions"]
    shape, wide = jnp.shape(equation.inputs[0]), equation.params["shape"]
    grown = {d for n, d in zip(shape, kept, strict=True) if n == 1 and wide[d] != 1}
    axes = tuple(i for i in range(len(wide)) if i not in kept or i in grown)
    return Partial(lambda messages: [jax.tree.map(lambda x: x.reshape(shape), plus_over(semiring, messages[0], axes))])


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
    size = require_countable(equation, math.prod(shape))
    changes = transposed_mode(equation.name, equation.params) | {"fill_value": -1}

    def pull(indices, messages):
        source = call(jnp.arange(size, dtype=jnp.int32).reshape(shape), indices, **changes)[0]
        return [jax.tree.map(lambda x: x.reshape(shape), plus_by_index(semiring, messages[0], source, size)), None]

    call = equation.call
    return Partial(pull, equation.inputs[1])


def _scatter(equation: Equation) -> Pull:
    """Scatter and scatter-sub, with inputs (operand, indices, updates), are written with scatter-add, a move."""
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    write, subtracts = equation.call, equation.name == "scatter-sub"
    require_countable(equation, math.prod(jnp.shape(equation.inputs[2])))

    def parts(x, indices, updates):
        add = lambda x, updates: lax.scatter_add(x, indices, updates, numbers, mode=mode)
        if subtracts:
            return [add(x, -updates)]
        # Of several updates at one place the last one counts; each place gets its number, or 0 if none is written.
        own = jnp.arange(1, updates.size + 1, dtype=jnp.int32).reshape(updates.shape)
        (last,) = write(jnp.zeros(x.shape, jnp.int32), indices, own)
        (seen,) = jax.linear_transpose(functools.partial(add, jnp.zeros_like(last)), own)(last)
        return [add(jnp.where(last == 0, x, 0), jnp.where(seen == own, updates, 0))]

    return equation.in_parts(parts)


_TO_ONE_PLACE = """concatenate dynamic_update_slice expand_dims reduce_sum reshape rev scatter-add select_n slice
split squeeze stack transpose unstack"""

MOVE_RULES: dict[str, EdgeRule] = {
    **dict.fromkeys(_TO_ONE_PLACE.split(), _to_one_place),
    **dict.fromkeys((*IDENTITY, "mark", "reduce_precision"), _identity),
    "broadcast_in_dim": _broadcast,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "pad": _pad,
    "scatter": _scatter,
    "scatter-sub": _scatter,
}
