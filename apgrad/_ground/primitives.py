"""JAX primitives: a zero with a gradient, and arrays that refuse a derivative, a message or `jax.vmap`.

They are no `jax.custom_jvp` functions: when JAX differentiates a `scan`, it drops custom rules in the part of the body
that needs no derivative. A second derivative then sees a plain zero, and is wrong without a word.
"""

import enum
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from apgrad._programs.jaxprs import is_inexact

__all__ = ["refuse_derivative", "zero_with_gradient"]


def zero_with_gradient(x: jax.Array) -> jax.Array:
    """An array of zeros whose derivatives, of any order, are the derivatives of `x`.

    (`x - stop_gradient(x)` is NaN where `x` is infinite or NaN, and needs `x` to be computed.)

    Args:
      x: a floating-point or complex array of any shape.

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
    """Returns the pytree as it is; whoever differentiates the result gets `TypeError(reason)` at trace time.

    Args:
      tree: a pytree of arrays; integers, Booleans and keys pass.
      reason: the text of the error: what has no derivative, and what to do.

    Example:
      >>> import jax, pytest, apgrad as ap
      >>> with pytest.raises(TypeError, match="x is data"):
      ...     jax.grad(lambda x: ap.refuse_derivative(x, "x is data") * 2.0)(1.0)
    """
    return _refuse(_refuse_p, tree, reason)


def refuse_second_derivative(tree: Any, reason: str) -> Any:
    """Returns the pytree as it is; whoever differentiates twice with respect to it gets `TypeError(reason)`."""
    return _refuse(_refuse_second_p, tree, reason)


def _refuse(primitive, tree, reason):
    refuse = lambda leaf: primitive.bind(jnp.asarray(leaf), reason=reason) if is_inexact(leaf) else leaf
    return jax.tree.map(refuse, tree)


def refuse_message(tree: Any, reason: str) -> Any:
    """Returns the pytree; using a message to it raises `TypeError(reason)`; in forward mode its tangent is NaN."""
    refuse = lambda x: _refuse_message_p.bind(x, reason=reason) if isinstance(x, jax.Array) and is_inexact(x) else x
    return jax.tree.map(refuse, tree)


def refuse_batching(x: jax.Array, reason: str) -> jax.Array:
    """Returns the array as it is; `jax.vmap` around the call, even if it maps nothing, raises `ValueError(reason)`."""
    return _refuse_batching_p.bind(x, reason=reason)


def mapped_with(tree: Any, others: Any) -> Any:
    """The pytree, whose floating-point arrays `jax.vmap` maps where it maps any of the other arrays.

    Else the message is the sum over all copies, and each copy of a node's memory would answer that sum.
    """
    # JAX takes a key for used that one of our primitives is given. The words of the key it does not.
    words = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    arrays = [words(x) for x in jax.tree.leaves(others) if isinstance(x, jax.Array)]
    if not arrays:
        return tree
    flag = _any_mapped_p.bind(*arrays)
    return jax.tree.map(lambda x: _mapped_with_p.bind(jnp.asarray(x), flag) if is_inexact(x) else x, tree)


def mark(x: jax.Array, kind: enum.Enum, label: Hashable) -> jax.Array:
    """Returns the array as it is, and leaves a mark in the program, which also says whether `vmap` maps the array."""
    return _mark_p.bind(x, kind=kind, label=label, mapped=False)


def _first(x: Any, *_: Any, **__: Any) -> Any:
    return x


def elementwise(name: str, jvp: Any = None, implementation: Callable[..., Any] = _first) -> Primitive:
    """A primitive with the derivative rule `jvp`; without a rule, the first operand's tangent passes unchanged."""
    primitive = Primitive(name)
    primitive.def_impl(implementation)
    primitive.def_abstract_eval(_first)
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=False))
    batching.defvectorized(primitive)
    through = lambda primals, tangents, **params: (primitive.bind(*primals, **params), tangents[0])
    ad.primitive_jvps[primitive] = jvp or through
    return primitive


def _any_mapped_batched(values, dims):
    size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
    return jnp.broadcast_to(_any_mapped_p.bind(*values), size), 0


def _any_mapped_jvp(primals, _):
    return _any_mapped_p.bind(*primals), np.zeros((), jax.dtypes.float0)


def _mapped_with_batched(values, dims):
    (x, flag), (axis, of_flag) = values, dims
    if axis is None:
        x, axis = jnp.broadcast_to(x, (flag.shape[of_flag], *x.shape)), 0
    return _mapped_with_p.bind(x, flag), axis


def _mark_batched(values, dims, **of):
    # The mapped axis comes first, as a port's does: else a value would be turned after the mark, and its port not.
    (x,), (axis,) = values, dims
    return _mark_p.bind(jnp.moveaxis(x, axis, 0), **of | {"mapped": True}), 0


def _refuse_jvp(primals, tangents, *, reason):
    raise TypeError(reason)


def _refuse_second_jvp(primals, tangents, *, reason):
    return _refuse_p.bind(*primals, reason=reason), tangents[0]


def _refuse_message_jvp(primals, tangents, *, reason):
    return _refuse_message_p.bind(*primals, reason=reason), _refused_message_p.bind(*tangents, reason=reason)


def _refused_message_jvp(primals, tangents, *, reason):
    return _refused_message_p.bind(*primals, reason=reason), _refused_message_p.bind(*tangents, reason=reason)


def _refused_message_transpose(message, _, *, reason):
    if type(message) is ad.Zero:  # nobody has used the derivative
        return [message]
    raise TypeError(reason)


def _refuse_batching(axis, values, dims, *, reason):
    raise ValueError(reason)


# The derivative has the primitive again instead of plain zeros: the next derivative must still find x.
_zero_p = elementwise("zero_with_gradient", implementation=jnp.zeros_like)
_refuse_p = elementwise("refuse_derivative", _refuse_jvp)
# A linear function, such as a backward pass, may be transposed: a derivative would have raised the error before.
ad.primitive_transposes[_refuse_p] = lambda message, _, **__: [message]
_refuse_second_p = elementwise("refuse_second_derivative", _refuse_second_jvp)
# The second operand says by its axes where the output is mapped, and is otherwise not looked at.
_mapped_with_p = elementwise("mapped_with")
batching.primitive_batchers[_mapped_with_p] = _mapped_with_batched
_any_mapped_p = elementwise("any_mapped", _any_mapped_jvp, lambda *_: jnp.zeros((), bool))
_any_mapped_p.def_abstract_eval(lambda *_: jax.typeof(np.False_))
batching.primitive_batchers[_any_mapped_p] = _any_mapped_batched
_mark_p = elementwise("mark")
batching.primitive_batchers[_mark_p] = _mark_batched
_refuse_message_p = elementwise("refuse_message", _refuse_message_jvp)
# The derivative of `refuse_message`: reverse mode transposes this primitive, forward mode evaluates it.
_refused_message_p = elementwise("refused_message", _refused_message_jvp, lambda x, **_: jnp.full_like(x, jnp.nan))
ad.primitive_transposes[_refused_message_p] = _refused_message_transpose
_refuse_batching_p = elementwise("refuse_batching", _refuse_jvp)
# JAX calls the rules in this table even where no operand is mapped.
batching.fancy_primitive_batchers[_refuse_batching_p] = _refuse_batching
