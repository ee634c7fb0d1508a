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
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from apgrad.tracing import _moves as moves, _products as products
from apgrad.tracing._semirings import Value
from apgrad.tracing._site import Pull, Rule, Site, cast, derivatives, each, edge, require_small
from apgrad.tracing._sums import contract, plus_over, zeros


def elementwise(site: Site) -> Pull:
    """A function element by element, y = f(x_1, ..., x_n). An x of length 1 along an axis goes into all along it."""
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


def rounding(site: Site) -> Pull:
    """reduce_precision: an edge of weight 1. Where messages are cotangents they are rounded too, as JAX does."""
    if site.semiring.kind == "gradient":
        return Partial(lambda messages: [(site.call(messages[0][0])[0],)])
    return Partial(lambda messages: [messages[0]])


def reduction(site: Site) -> Pull:
    """Each input element goes into one output element; the derivative is what `jax.vjp` makes of ones."""
    semiring, shape, axes = site.semiring, jnp.shape(site.inputs[0]), site.params["axes"]
    dtype = site.inputs[0].dtype

    def pull(weight, messages):
        message = each(lambda x: jnp.broadcast_to(jnp.expand_dims(x, axes), shape), messages[0])
        return [edge(semiring, weight, message, dtype)]

    return Partial(pull, derivatives(site)[0])


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
        return [zeros(semiring, *f) if m is None else m for m, f in zip(wanted, forms, strict=True)]

    forms = [(jnp.shape(y), y.dtype) for y in outputs]
    count = len(shapes)

    def answer(found):
        answers: list[Value | None] = [None] * count
        for i, value in zip(chosen, found, strict=True):
            answers[i] = value
        return answers

    if semiring.kind == "gradient" and not quiet:
        return Partial(lambda pb, messages: answer([(g,) for g in pb([m[0] for m in fill(messages)])]), pullback)

    rows = sum(y.size for y in outputs)
    require_small(site.name, rows * sum(math.prod(shapes[i]) for i in chosen))
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
        rows_of = lambda e, place=place: pullback(place(e))
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


CONSTANT = {
    "add": (1.0, 1.0),
    "add_any": (1.0, 1.0),
    "sub": (1.0, -1.0),
    "neg": (-1.0,),
    "convert_element_type": (1.0,),
}
ELEMENTWISE = """acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clamp cos cosh digamma
    div convert_element_type erf erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac integer_pow lgamma log log1p
    log2 logistic max min mul neg nextafter one_minus_square polygamma pow random_gamma refuse_derivative
    regularized_incomplete_beta rem rsqrt sin sinh sqrt square sub tan tanh abs zero_with_gradient
    zeta"""
CONSTANTS = frozenset(
    """sign floor ceil round is_finite eq ne lt le gt ge argmax argmin iota stop_gradient random_bits shift_left
    shift_right_logical shift_right_arithmetic and or not xor population_count clz bitcast_convert_type""".split()  # noqa: SIM905
)
"""Primitives whose outputs do not depend on their inputs, as far as derivatives go: no edges."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE.split(), elementwise),
    "reduce_precision": rounding,
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod"), reduction),
    **moves.RULES,
    **products.RULES,
}
