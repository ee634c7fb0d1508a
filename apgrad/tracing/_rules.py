"""The rules of primitives: how messages to a primitive's outputs become messages to its inputs.

Most primitives are of four families:

* elementwise, y_i = f(x_i): each element has one edge, and the pullback of ones (`jax.vjp`) has all their derivatives;
* moves (reshape, slice, gather, ...): each y is one of the x, with the derivative 1; the rule is the transposed move;
* reductions: each x goes into one y, and the pullback of ones again has the derivatives;
* products (dot_general, convolution): every x goes into many y, and the derivatives are the other factor.

A primitive without a rule falls to `dense`, its whole Jacobian, with which the tests compare all other rules.
Derivatives are JAX's own, so that at a kink an edge has the derivative that `jax.grad` uses.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from apgrad._programs.kinds import ELEMENTWISE
from apgrad.tracing._equation import EdgeRule, Equation, Pull, derivatives, edge
from apgrad.tracing._moves import MOVE_RULES
from apgrad.tracing._parts import PART_RULES
from apgrad.tracing._products import PRODUCT_RULES
from apgrad.tracing._sums import plus_over_copies


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


FIXED_WEIGHTS = {
    "add": (1.0, 1.0),
    "add_any": (1.0, 1.0),
    "sub": (1.0, -1.0),
    "neg": (-1.0,),
    "convert_element_type": (1.0,),
}

RULES: dict[str, EdgeRule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod"), _reduction),
    **MOVE_RULES,
    **PRODUCT_RULES,
    **PART_RULES,
}
