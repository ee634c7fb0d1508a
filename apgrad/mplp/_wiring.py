"""Wiring: functions of signals that need no rule, and signals that are used several times.

A function's Jacobian is applied to the port, which stays zero; reverse mode transposes it, component by component.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import whole
from apgrad._ground.port import Signal
from apgrad._ground.propagator import Propagator, node
from apgrad._programs.jaxprs import has_own_rule, trace
from apgrad.mplp import _paths as paths
from apgrad.mplp._learned import require_signals


def wire(function: Callable[..., jax.Array], *signals: Signal) -> Signal:
    """A function of signals that needs no rule: a sum, a concatenation, a reshape.

    Args:
      function: `(*values) -> value`. The function need not be linear, but a rule has no say in it.
      *signals: the inputs, signals of any shapes.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> a, b = (ap.Signal.of(jnp.ones((4, n)), message_size=8) for n in (2, 3))
      >>> both = ap.mplp.wire(lambda a, b: jnp.concatenate([a, b], axis=-1), a, b)
      >>> both.value.shape, both.port.shape
      ((4, 5), (4, 5, 8))
    """
    require_signals("mplp.wire", signals)
    entered, _ = paths.enter(paths.WIRE, signals)
    values, ports = tuple(s.value for s in entered), [s.port for s in entered]
    push = lambda *tangents: jax.jvp(function, values, tangents)[1]
    if has_own_rule(trace(function, *values)[0]):
        output = _reverse(function)(*entered)
    else:
        output = Signal(function(*values), jax.vmap(push, in_axes=-1, out_axes=-1)(*ports))
    return paths.leave(paths.WIRE, output)


def _reverse(function: Callable[..., jax.Array]) -> Callable[..., Signal]:
    """`wire` of a function with a reverse-mode rule alone, as `jax.custom_vjp` makes them."""

    def forward(*signals):
        output, pull = jax.vjp(function, *(s.value for s in signals))
        return Signal.of(output, signals[0].port.shape[-1]), pull

    def backward(pull, message):
        ports = jax.vmap(pull, in_axes=-1, out_axes=-1)(message.port)
        return tuple(map(Signal, pull(message.value), ports))

    return node(Propagator(forward, backward))


def fork(signal: Signal, n: int, aggregate: Literal["sum", "mean"] = "mean") -> tuple[Signal, ...]:
    """A signal for each of n uses, whose messages are aggregated; if one signal has n uses, reverse mode adds them up.

    The value's true derivative is the sum over the uses all the same.

    Args:
      signal: a signal of any shape.
      n: the number of uses, at least 1.
      aggregate: "sum" or "mean". A use to which no message comes back counts with zeros.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> signal = ap.Signal.of(jnp.ones((1, 2)), message_size=1)
      >>> weighed = lambda a, b: jnp.sum(2 * a.port + 4 * b.port)
      >>> jax.grad(lambda s: weighed(*ap.mplp.fork(s, 2, "mean")))(signal).port[..., 0]
      Array([[3., 3.]], dtype=float32)
    """
    require_signals("mplp.fork", [signal])
    n = whole("n of fork, a number of signals,", n)
    if aggregate not in ("sum", "mean"):
        raise ValueError(f'fork aggregates by "sum" or "mean", got {aggregate!r}')

    def backward(_, messages):
        value, message = jax.tree.map(lambda *each: jnp.sum(jnp.stack(each), axis=0), *messages)
        return (Signal(value, message / n if aggregate == "mean" else message),)

    return node(Propagator(lambda signal: ((signal,) * n, None), backward))(signal)
