"""The rules of primitives: how messages to a primitive's outputs become messages to its inputs.

A rule looks at one `Equation` and returns its pull: a function of the messages to the outputs, and a pytree of the
arrays that the function remembers, so that `scan` can stack them. Most primitives are of four families:

* elementwise, y_i = f(x_i): each element has one edge, and the pullback of ones (`jax.vjp`) has all their derivatives;
* moves (reshape, transpose, slice, gather, ...): each y is one of the x, with the derivative 1; the rule is the
  transposed move;
* reductions: each x goes into one y, and the pullback of ones again has the derivatives;
* products (dot_general, convolution): every x goes into many y, and the derivatives are the other factor.

A primitive without a rule falls to `dense`: its whole Jacobian of at most `LIMIT` elements, with a warning. The tests
compare all other rules with `dense`. Derivatives are JAX's own, so that at a kink an edge has the derivative that
`jax.grad` uses.
"""

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from apgrad._programs.jaxprs import place, restrict
from apgrad._programs.kinds import ELEMENTWISE
from apgrad.tracing import _moves as moves, _products as products
from apgrad.tracing._equation import EdgeRule, Equation, Pull, cast, derivatives, each, edge, require_small
from apgrad.tracing._semirings import Value
from apgrad.tracing._sums import contract, plus_over, zeros


def _elementwise(equation: Equation) -> Pull:
    """Functions element by element, y = f(x_1, ..., x_n); an x of length 1 along an axis goes into all y along it."""
    semiring, shape = equation.semiring, jnp.shape(equation.outputs[0])
    shapes = [jnp.shape(x) for x in equation.inputs]
    dtypes = [jnp.result_type(x) for x in equation.inputs]
    fixed: tuple[Any, ...] = FIXED_WEIGHTS.get(equation.name, (None,) * len(shapes))
    weights: list[Any] = [None] * len(shapes)
    if equation.name == "mul":
        weights = [o if a else None for a, o in zip(equation.active, reversed(equation.inputs), strict=True)]
    elif fixed[0] is None:
        full = [jnp.broadcast_to(x, shape) if a else x for x, a in zip(equation.inputs, equation.active, strict=True)]
        weights = derivatives(equation._replace(inputs=full))

    def pull(weights, messages):
        answers: list[Value | None] = []
        for i, active in enumerate(active_inputs):
            if not active:
                answers.append(None)
                continue
            message = edge(semiring, weights[i] if fixed[i] is None else fixed[i], messages[0], dtypes[i])
            answers.append(_unbroadcast(semiring, message, shape, shapes[i]))
        return answers

    active_inputs = equation.active
    return Partial(pull, weights)


def _rounding(equation: Equation) -> Pull:
    """reduce_precision: edges of weight 1. Where messages are cotangents, they are rounded too, as JAX does."""
    if equation.semiring.kind == "gradient":
        return Partial(lambda messages: [(equation.call(messages[0][0])[0],)])
    return Partial(lambda messages: [messages[0]])


def _reduction(equation: Equation) -> Pull:
    """Reductions: each input element goes into one output element, and the pullback of ones has the derivatives."""
    semiring, shape, axes = equation.semiring, jnp.shape(equation.inputs[0]), equation.params["axes"]
    dtype = equation.inputs[0].dtype

    def pull(weight, messages):
        message = each(lambda x: jnp.broadcast_to(jnp.expand_dims(x, axes), shape), messages[0])
        return [edge(semiring, weight, message, dtype)]

    return Partial(pull, derivatives(equation)[0])


def dense(equation: Equation, quiet: bool = False) -> Pull:
    """The pull of any primitive, through its whole Jacobian, with a warning.

    Where messages are cotangents (`semiring.kind == "gradient"`), this is `jax.vjp` itself, without a warning.
    """
    semiring, chosen = equation.semiring, [i for i, a in enumerate(equation.active) if a]
    shapes = [jnp.shape(x) for x in equation.inputs]

    def with_messages(*inputs):
        return [y for y in equation.call(*inputs) if jnp.issubdtype(y.dtype, jnp.inexact)]

    real = [jnp.issubdtype(y.dtype, jnp.inexact) for y in equation.outputs]
    function, values = restrict(with_messages, equation.inputs, chosen)
    outputs, pullback = jax.vjp(function, *values)

    def fill(messages):
        wanted = [m for m, r in zip(messages, real, strict=True) if r]
        return [zeros(semiring, *f) if m is None else m for m, f in zip(wanted, forms, strict=True)]

    forms = [(jnp.shape(y), y.dtype) for y in outputs]
    nothing: list[Value | None] = [None] * len(shapes)

    def answer(found):
        return place(found, chosen, nothing)

    if semiring.kind == "gradient" and not quiet:
        return Partial(lambda pb, messages: answer([(g,) for g in pb([m[0] for m in fill(messages)])]), pullback)

    rows = sum(y.size for y in outputs)
    require_small(equation.name, rows * sum(math.prod(shapes[i]) for i in chosen))
    if not quiet:
        warnings.warn(
            f"tracing has no rule for the primitive {equation.name!r}; its Jacobian ({rows} rows) is computed in full. "
            "Right, but slow.",
            stacklevel=2,
        )
    jacobians = []  # for each output, (its elements, *input shape) for each input
    for k, y in enumerate(outputs):
        basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
        one_hot = functools.partial(lambda k, e: [e if j == k else jnp.zeros_like(o) for j, o in enumerate(outputs)], k)
        rows_of = lambda e, one_hot=one_hot: pullback(one_hot(e))
        try:
            jacobians.append(jax.vmap(rows_of)(basis))
        except NotImplementedError:  # some primitives cannot be batched
            jacobians.append(jax.lax.map(rows_of, basis))

    def pull(jacobians, messages):
        total: list[Value | None] = [None] * len(chosen)
        for rows, message in zip(jacobians, fill(messages), strict=True):
            column = each(lambda x: x.reshape(1, -1, 1), message)
            for n, jacobian in enumerate(rows):
                weight = jacobian.reshape(1, jacobian.shape[0], -1)
                found = contract(semiring, weight, column)
                part = cast(each(lambda x, n=n: x.reshape(shapes[chosen[n]]), found), jacobian.dtype)
                before = total[n]
                total[n] = part if before is None else semiring.plus(before, part)
        return answer(total)

    return Partial(pull, jacobians)


def _unbroadcast(semiring, message, wide, shape):
    if wide == shape:
        return message
    axes = tuple(range(len(wide))) if not shape else tuple(i for i, n in enumerate(shape) if n == 1 != wide[i])
    return each(lambda x: x.reshape(shape), plus_over(semiring, message, axes))


FIXED_WEIGHTS = {
    "add": (1.0, 1.0),
    "add_any": (1.0, 1.0),
    "sub": (1.0, -1.0),
    "neg": (-1.0,),
    "convert_element_type": (1.0,),
}

RULES: dict[str, EdgeRule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "reduce_precision": _rounding,
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod"), _reduction),
    **moves.MOVE_RULES,
    **products.PRODUCT_RULES,
}
