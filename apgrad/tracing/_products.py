"""Rules of matrix products, and of cumulative operations, whose derivative along an axis is a matrix."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from apgrad.tracing._equation import EdgeRule, Equation, Pull, cast, each, require_small
from apgrad.tracing._semirings import Value
from apgrad.tracing._sums import contract


def _dot_general(equation: Equation) -> Pull:
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
        message = each(lambda x: x.reshape(flat), messages[0])  # (B, I, J)
        answers: list[Value | None] = [None, None]
        for side in (0, 1):
            if not active[side]:
                continue
            mine, other = factors[side], factors[1 - side]
            # (B, J, contracted): the other's free axes are summed.
            weight = other.flat(memory[1 - side], other.batch, other.free, other.contracted)
            arrived = message if side == 1 else each(lambda x: jnp.swapaxes(x, 1, 2), message)  # (B, J, I)
            # The contracted axes of both come in the order of their pairs.
            swapped = mine.last_is_contracted and (side == 0 or weight.shape[2] >= 16)
            found = contract(semiring, weight, arrived, swapped=swapped, precision=precision)
            order = (mine.free, mine.contracted) if swapped else (mine.contracted, mine.free)
            answers[side] = cast(each(functools.partial(mine.restore, order=order), found), dtypes[side])
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

    def restore(self, x, order):
        order = (*self.batch, *order[0], *order[1])
        inverse = tuple(sorted(range(len(order)), key=lambda i: order[i]))
        return jnp.transpose(x.reshape(tuple(self.shape[i] for i in order)), inverse)


def _along_axis(equation: Equation) -> Pull:
    """cumprod, cummax, cummin and cumlogsumexp: each line along the axis has its own Jacobian."""
    semiring, axis, dtype = equation.semiring, equation.params["axis"], equation.inputs[0].dtype
    x = jnp.moveaxis(equation.inputs[0], axis, -1)
    lines, length = x.reshape(-1, x.shape[-1]), x.shape[-1]
    require_small(equation.name, lines.size * length)

    def line(values):
        shape = [1] * x.ndim
        shape[axis] = length
        return equation.call(values.reshape(shape))[0].reshape(length)

    moved = x.shape

    def pull(jacobian, messages):
        message = each(lambda m: jnp.moveaxis(m, axis, -1).reshape(-1, length, 1), messages[0])
        found = contract(semiring, jacobian, message)
        return [cast(each(lambda m: jnp.moveaxis(m.reshape(moved), -1, axis), found), dtype)]

    return Partial(pull, jax.vmap(jax.jacrev(line))(lines))


PRODUCT_RULES: dict[str, EdgeRule] = {
    "dot_general": _dot_general,
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp"), _along_axis),
}
