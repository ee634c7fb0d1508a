"""Rules of matrix products, and of any primitive by the matrix that its derivative is."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from apgrad._ground.warning import warn
from apgrad._programs.jaxprs import is_inexact, place, restrict
from apgrad.tracing._equation import Equation, Pull, cast
from apgrad.tracing._semirings import Value
from apgrad.tracing._sums import contract, filled, structs

LIMIT = 2**24  # the most elements that a dense Jacobian may have


def dot_general(equation: Equation) -> Pull:
    """dot_general: each factor gets the matrix product, in the semiring, of the message with the other factor."""
    ((left_sum, right_sum), (left_batch, right_batch)) = equation.params["dimension_numbers"]
    left, right = equation.inputs
    factors = _Factor(jnp.shape(left), left_batch, left_sum), _Factor(jnp.shape(right), right_batch, right_sum)
    semiring, active, precision = equation.semiring, equation.active, equation.params["precision"]
    dtypes = left.dtype, right.dtype
    shape = jnp.shape(equation.outputs[0])

    def pull(memory, messages):
        batch = len(left_batch)
        middle = batch + len(factors[0].free)
        flat = (math.prod(shape[:batch]), math.prod(shape[batch:middle]), math.prod(shape[middle:]))
        message = jax.tree.map(lambda x: x.reshape(flat), messages[0])  # (B, I, J)

        def answer(side):
            mine, other = factors[side], factors[1 - side]
            # (B, J, contracted): the other's free axes are summed.
            weight = other.flat(memory[1 - side], other.batch, other.free, other.contracted)
            arrived = message if side == 1 else jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), message)  # (B, J, I)
            # The contracted axes of both come in the order of their pairs.
            swapped = mine.last_is_contracted and (side == 0 or weight.shape[2] >= 16)
            found = contract(semiring, weight, arrived, swapped=swapped, precision=precision)
            order = (mine.free, mine.contracted) if swapped else (mine.contracted, mine.free)
            return cast(semiring, jax.tree.map(functools.partial(mine.restore, order=order), found), dtypes[side])

        return [answer(side) if wanted else None for side, wanted in enumerate(active)]

    return Partial(pull, [left if active[1] else None, right if active[0] else None])


class _Factor:
    def __init__(self, shape, batch, contracted):
        self.shape, self.batch, self.contracted = shape, tuple(batch), tuple(contracted)
        self.free = tuple(i for i in range(len(shape)) if i not in (*batch, *contracted))
        self.last_is_contracted = bool(shape) and len(shape) - 1 in self.contracted

    def flat(self, x, *groups):
        shape = tuple(math.prod(self.shape[i] for i in group) for group in groups)
        return jnp.transpose(x, tuple(i for group in groups for i in group)).reshape(shape)

    def restore(self, x, order):
        order = (*self.batch, *order[0], *order[1])
        return jnp.transpose(x.reshape(tuple(self.shape[i] for i in order)), np.argsort(order).tolist())


def dense(equation: Equation) -> Pull:
    """The pull of any primitive: where messages are cotangents `jax.vjp`, else its whole Jacobian, with a warning."""
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
            f"{lacks} but its Jacobian, of {elements:,} elements; at most {LIMIT:,} are computed. Trace a smaller "
            "input, or write the operation with other primitives."
        )
    warn(f"{lacks}; its Jacobian ({rows} rows) is computed in full. Right, but slow.")
    jacobians = []  # for each output, (its elements, *input shape) for each input
    for k, y in enumerate(outputs):
        rows_of = lambda e, k=k: pullback([e if j == k else jnp.zeros_like(o) for j, o in enumerate(outputs)])
        basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
        try:
            jacobians.append(jax.vmap(rows_of)(basis))
        except NotImplementedError:  # some primitives cannot be batched
            jacobians.append(jax.lax.map(rows_of, basis))

    def pull(jacobians, messages):
        total: list[Value | None] = [None] * len(chosen)
        for rows, message in zip(jacobians, arrived(messages), strict=True):
            column = jax.tree.map(lambda x: x.reshape(1, -1, 1), message)
            for n, jacobian in enumerate(rows):
                found = contract(semiring, jacobian.reshape(1, jacobian.shape[0], -1), column)
                part = cast(semiring, jax.tree.map(lambda x, n=n: x.reshape(shapes[chosen[n]]), found), jacobian.dtype)
                before = total[n]
                total[n] = part if before is None else semiring.plus(before, part)
        return answer(total)

    return Partial(pull, jacobians)
