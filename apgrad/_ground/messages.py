"""Messages: each has the form of the value that went forward, or an error says which message is wrong."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Memory that is no array: a hashable value that is known when the program is traced."""

    value: Any


def form_of(tree: Any) -> Static:
    leaves, treedef = jax.tree.flatten(tree)
    return Static((treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)))


def shapes_of(tree: Any) -> Any:
    """The pytree with `jax.ShapeDtypeStruct`s in place of arrays, for an error's text."""
    return jax.eval_shape(lambda tree: tree, tree)


def numbered(form: Static) -> Any:
    treedef, avals = form.value
    return treedef.unflatten(range(len(avals)))


def check_messages(messages: Any, form: Static, where: str = "", dense: bool = False) -> tuple[Any, ...]:
    inputs = numbered(form)
    if not isinstance(messages, tuple) or len(messages) != len(inputs):
        raise TypeError(
            f"backward{where or ' of a propagator'} must return a tuple with one message for each of its {len(inputs)} "
            f"input(s), got {describe(messages)}. A single message m is returned as (m,)."
        )

    avals, fitted = form.value[1], []
    for i, (message, part) in enumerate(zip(messages, inputs, strict=True)):
        name = f"the message for input {i}{where}"
        if not _is_prefix(message, part):
            got, wanted = jax.tree.structure(message), jax.tree.structure(part)
            raise ValueError(f"{name} has the structure {got}, not its input's, {wanted}. None stands for no message.")

        def fit(message, part, name=name):
            if message is None:
                return jax.tree.map(lambda n: _fit(name, None, avals[n], dense), part)
            return _fit(name, message, avals[part], dense)

        fitted.append(jax.tree.map(fit, message, part, is_leaf=_is_none))
    return tuple(fitted)


def _is_none(x: Any) -> bool:
    return x is None


def _is_prefix(message: Any, part: Any) -> bool:
    """Whether a message has the structure of an input, but for None in the place of a subtree."""
    fits = lambda m, p: m is None or isinstance(p, int)
    try:
        return all(jax.tree.leaves(jax.tree.map(fits, message, part, is_leaf=_is_none)))
    except (ValueError, TypeError):
        return False


def _fit(name: str, message: Any, aval: tuple[tuple[int, ...], Any], dense: bool) -> Any:
    shape, dtype = aval
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.zeros(shape, jax.dtypes.float0) if dense else None
    if message is None:
        return jnp.zeros(shape, dtype) if dense else None
    mine = jnp.result_type(message)
    if mine == jax.dtypes.float0:
        raise TypeError(
            f"{name} is JAX's empty message of an integer output (dtype float0), the input has dtype {dtype}: what is "
            "sent to an integer is lost. Let forward return a floating-point array, or send None."
        )
    if not (jnp.issubdtype(mine, jnp.number) or jnp.issubdtype(mine, jnp.bool_)):
        raise TypeError(f"{name} has dtype {mine}, the input has dtype {dtype}. A message is an array of numbers.")
    if jnp.issubdtype(mine, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{name} has dtype {mine}, the input is real, {dtype}. Return a part, as jnp.real(message).")
    if jnp.shape(message) != shape:
        found = f"{name} has shape {jnp.shape(message)}, the input has shape {shape}"
        raise ValueError(f"{found}. A message of another shape is sent through a port (ap.port).")
    return jnp.asarray(message, dtype)


def tuple_of(count: int, what: str, value: Any) -> tuple[Any, ...]:
    """The value, if it is a tuple of this length; else an error: `what` says what a user's function must return."""
    if not (isinstance(value, tuple) and len(value) == count):
        raise TypeError(f"{what}, got {describe(value)}")
    return value


def describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, jax.Array):  # a tracer's name says nothing
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{type(value).__name__}"
