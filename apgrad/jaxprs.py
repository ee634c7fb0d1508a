"""Equations of jaxprs, the same on every supported JAX: the only file that reads the parameters of nested ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr


class Nested(NamedTuple):
    """An equation with programs inside.

    Attributes:
      kind: "call", "remat", "scan", "while", "cond" or "custom" (a function with a derivative rule of its own).
      jaxprs: the programs as `(jaxpr, consts)`: one; for "while" the condition and the body; for "cond" the branches.
      counts: how the inputs divide: for "scan" (consts, carry, xs), for "while" (consts of the condition, of the body,
        carry).
      length: of a scan.
      reverse: of a scan.
    """

    kind: str
    jaxprs: tuple[tuple[Any, tuple[Any, ...]], ...]
    counts: tuple[int, ...] = ()
    length: int = 0
    reverse: bool = False


_KINDS = {
    "jit": ("call", "jaxpr"),
    "pjit": ("call", "jaxpr"),
    "closed_call": ("call", "call_jaxpr"),
    "core_call": ("call", "call_jaxpr"),
    "remat2": ("remat", "jaxpr"),
    "checkpoint": ("remat", "jaxpr"),
    "custom_jvp_call": ("custom", "call_jaxpr"),
    "custom_vjp_call": ("custom", "call_jaxpr"),
}


def nested(eqn: Any) -> Nested | None:
    """What is inside an equation, or None if it is a plain primitive.

    Raises:
      NotImplementedError: on a version of JAX that gives the equation other parameters.
    """
    name, params = eqn.primitive.name, eqn.params
    try:
        if name in _KINDS:
            kind, key = _KINDS[name]
            return Nested(kind, (_open(params[key]),))
        if name == "scan":
            body = _open(params["jaxpr"])
            if "ft_in" in params:
                counts = tuple(len(part) for part in params["ft_in"].unpack())
            else:
                consts, carry = params["num_consts"], params["num_carry"]
                counts = (consts, carry, len(eqn.invars) - consts - carry)
            return Nested("scan", (body,), counts, params["length"], params["reverse"])
        if name == "while":
            consts = params["cond_nconsts"], params["body_nconsts"]
            counts = (*consts, len(eqn.invars) - sum(consts))
            return Nested("while", (_open(params["cond_jaxpr"]), _open(params["body_jaxpr"])), counts)
        if name == "cond":
            return Nested("cond", tuple(_open(branch) for branch in params["branches"]))
    except (KeyError, AttributeError, TypeError) as error:
        raise NotImplementedError(
            f"JAX {jax.__version__} gives the primitive {name!r} parameters that apgrad does not know ({error!r}); "
            f"they are {sorted(params)}. Please report it; versions 0.10.2 to 0.12 are known to work."
        ) from error
    return None


def caller(eqn: Any) -> Callable[..., list[Any]]:
    """The equation's primitive as a function `(*inputs) -> list of outputs`; keywords override its parameters."""

    def call(*inputs, **changes):
        outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params({**eqn.params, **changes}))
        return list(outputs) if eqn.primitive.multiple_results else [outputs]

    return call


def scope(eqn: Any) -> str:
    """The named scopes around an equation, as "encoder/LSTM_0"; relative to the program that it is in."""
    return str(eqn.source_info.name_stack)


def _open(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, tuple(jaxpr.consts)
    return jaxpr, tuple(getattr(jaxpr, "consts", ()))
