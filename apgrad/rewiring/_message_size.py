"""The size of messages, node by node: clipping and normalization.

Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, clip the gradient as a
whole, when it has already exploded. At the nodes, a message can be kept from growing on its way back, in a recurrent
network at each step. Normalization sends a message of one length always, and the direction alone is what was computed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from apgrad.rewiring._layers import Where, chosen, is_layer, on_message
from apgrad.rewiring._rewire import Rule


def clip_messages(max_norm: float, *, where: Where = None, memory: Any = None) -> Rule:
    """Sites scale the message to their output down to a norm of at most `max_norm`; their derivatives stay.

    Args:
      max_norm: the bound on the Euclidean norm of the whole array, positive.
      where: which sites, see `ap.rewiring.Where`; all dense layers and convolutions if not given.
      memory: for layers, see `ap.rewiring.feedback_alignment`.

    Returns:
      A rule without parameters.

    Raises:
      ValueError: for a bound that is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> f = ap.rewire(lambda x: 5 * jnp.sin(x), ap.rewiring.clip_messages(1.0, where="sin"))
      >>> float(jax.grad(f)(0.0))
      1.0
    """
    if not max_norm > 0:
        raise ValueError(f"clip_messages needs a positive bound, got max_norm={max_norm}")

    def clip(message):
        return message * (max_norm / jnp.maximum(_norm(message), max_norm)).astype(message.dtype)

    at = lambda site, params: on_message(site, clip, memory)
    return Rule(chosen(where, is_layer), at, random=memory is not None)


def normalize_messages(norm: float = 1.0, *, where: Where = None, memory: Any = None) -> Rule:
    """Sites scale the message to their output to one norm; their derivatives stay. A message of zeros stays zeros.

    Args:
      norm: the Euclidean norm of the whole array, positive.
      where: which sites, see `ap.rewiring.Where`; all dense layers and convolutions if not given.
      memory: for layers, see `ap.rewiring.feedback_alignment`.

    Returns:
      A rule without parameters.

    Raises:
      ValueError: for a norm that is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> f = ap.rewire(lambda x: jnp.sum(5 * jnp.sin(x)), ap.rewiring.normalize_messages(10.0, where="sin"))
      >>> jax.grad(f)(jnp.zeros(4))
      Array([5., 5., 5., 5.], dtype=float32)
    """
    if not norm > 0:
        raise ValueError(f"normalize_messages needs a positive norm, got norm={norm}")

    def normalize(message):
        length = _norm(message)
        return message * jnp.where(length > 0, norm / jnp.where(length > 0, length, 1), 0).astype(message.dtype)

    at = lambda site, params: on_message(site, normalize, memory)
    return Rule(chosen(where, is_layer), at, random=memory is not None)


def _norm(message: jax.Array) -> jax.Array:
    """The Euclidean norm, which does not overflow where the elements do not."""
    largest = jnp.max(jnp.abs(message), initial=0)
    safe = jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(jnp.sum(jnp.abs(message / safe) ** 2))
