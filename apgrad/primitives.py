"""Two JAX primitives: a zero with a gradient, and a value that refuses one.

Both could be `jax.custom_jvp` functions of one line, and would be wrong. When `scan` is differentiated, JAX
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


_zero_p = _elementwise("zero_with_gradient", jnp.zeros_like, _zero_jvp)
_refuse_p = _elementwise("refuse_derivative", lambda x, *, reason: x, _refuse_jvp)
