"""JAX primitives: a zero with a gradient, and values that refuse a derivative, a message or a batch axis.

The first two could be `jax.custom_jvp` functions of one line, and would be wrong. When `scan` is differentiated, JAX
evaluates the part of its body that needs no derivative with the custom rules dropped
(`JaxprTrace.process_custom_jvp_call`), so a second derivative sees the function's plain body: of a zero with
a gradient, a plain zero. That error is silent (the second derivative of a likelihood-ratio estimate came out
as -0.09 where 5.2 is right). A primitive keeps its rule wherever it goes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def zero_with_gradient(x: jax.Array) -> jax.Array:
    """Zero in value, with the derivatives of `x`, of any order.

    Like `x - stop_gradient(x)`, but zero also where `x` is infinite or NaN, and nothing has to compute `x`
    for its value alone.

    Args:
      x: a floating-point array.

    Raises:
      TypeError: for another dtype, which has no gradient.

    Example:
      >>> import jax, apgrad as ap
      >>> [float(v) for v in jax.value_and_grad(lambda x: ap.zero_with_gradient(x**2))(3.0)]
      [0.0, 6.0]
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"zero_with_gradient takes floating-point arrays, got dtype {x.dtype}, which has no gradient")
    return _zero_p.bind(x)


def refuse_derivative(tree: Any, reason: str) -> Any:
    """The same pytree; differentiating it raises `TypeError(reason)` at trace time.

    Args:
      tree: a pytree of arrays.
      reason: what the error says.

    Example:
      >>> import jax, apgrad as ap
      >>> try:
      ...     jax.grad(lambda x: ap.refuse_derivative(x, "x is data") * 2.0)(1.0)
      ... except TypeError as error:
      ...     print(error)
      x is data
    """

    def refuse(leaf):
        inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        return _refuse_p.bind(jnp.asarray(leaf), reason=reason) if inexact else leaf

    return jax.tree.map(refuse, tree)


def refuse_message(tree: Any, reason: str) -> Any:
    """The same pytree; a message that comes back to it in reverse mode raises `TypeError(reason)` at trace time.

    Unlike `refuse_derivative` it lets a derivative pass that nobody uses, as that of the `aux` of `jax.grad`. Forward
    mode computes derivatives before anyone can know whether they are used: there the derivative is NaN.

    Args:
      tree: a pytree; leaves that are no floating-point arrays stay as they are.
      reason: what the error says.

    Example:
      >>> import jax
      >>> from apgrad._ground.primitives import refuse_message
      >>> def function(x):
      ...     return x**2, refuse_message(x, "no message")
      >>> float(jax.grad(function, has_aux=True)(3.0)[0])
      6.0
      >>> try:
      ...     jax.grad(lambda x: function(x)[1])(3.0)
      ... except TypeError as error:
      ...     print(error)
      no message
    """

    def refuse(leaf):
        inexact = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return _mute_p.bind(leaf, reason=reason) if inexact else leaf

    return jax.tree.map(refuse, tree)


def refuse_batching(x: jax.Array, reason: str) -> jax.Array:
    """The same array; any `jax.vmap` around it, whether it maps the array or not, raises `ValueError(reason)`.

    Args:
      x: an array.
      reason: what the error says.

    Example:
      >>> import jax
      >>> from apgrad._ground.primitives import refuse_batching
      >>> try:
      ...     jax.vmap(lambda x: x + refuse_batching(jax.numpy.float32(1), "not mapped"))(jax.numpy.ones(3))
      ... except ValueError as error:
      ...     print(error)
      not mapped
    """
    return _alone_p.bind(x, reason=reason)


def mark(x: jax.Array, name: str) -> jax.Array:
    """The same array, with a mark in the program that a walk over the program finds (`apgrad/_programs/marks.py`).

    Args:
      x: an array.
      name: of the mark.
    """
    return _mark_p.bind(x, name=name)


def _elementwise(name: str, implementation: Callable[..., Any], jvp: Callable[..., Any]) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(implementation)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=False))
    batching.defvectorized(primitive)
    ad.primitive_jvps[primitive] = jvp
    return primitive


def _zero_jvp(primals, tangents):
    # The primitive itself, not plain zeros: the next derivative must still see x in the zero.
    return _zero_p.bind(*primals), tangents[0]


def _refuse_jvp(primals, tangents, *, reason):
    raise TypeError(reason)


def _mark_jvp(primals, tangents, *, name):
    return _mark_p.bind(*primals, name=name), tangents[0]


_mark_p = _elementwise("mark", lambda x, *, name: x, _mark_jvp)
_zero_p = _elementwise("zero_with_gradient", jnp.zeros_like, _zero_jvp)
_refuse_p = _elementwise("refuse_derivative", lambda x, *, reason: x, _refuse_jvp)


def _mute_jvp(primals, tangents, *, reason):
    return _mute_p.bind(*primals, reason=reason), _muted_p.bind(*tangents, reason=reason)


def _muted_jvp(primals, tangents, *, reason):
    return _muted_p.bind(*primals, reason=reason), _muted_p.bind(*tangents, reason=reason)


def _mute_transpose(message, _, *, reason):
    if type(message) is ad.Zero:
        return [message]
    raise TypeError(reason)


_mute_p = _elementwise("refuse_message", lambda x, *, reason: x, _mute_jvp)
# What a derivative goes through: transposed in reverse mode, evaluated in forward mode alone.
_muted_p = _elementwise("refused_message", lambda x, *, reason: jnp.full_like(x, jnp.nan), _muted_jvp)
ad.primitive_transposes[_muted_p] = _mute_transpose


def _alone_batching(axis, values, dims, *, reason):
    raise ValueError(reason)


_alone_p = _elementwise("refuse_batching", lambda x, *, reason: x, _refuse_jvp)
# Rules of this table are called also where no operand is mapped.
batching.fancy_primitive_batchers[_alone_p] = _alone_batching
