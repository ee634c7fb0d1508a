"""The size of messages, node by node: clipping and normalization.

Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, clip the gradient.
"""

from apgrad._ground.arguments import number
from apgrad._ground.norms import rescaled
from apgrad.rewiring._layers import Where, chosen, is_layer, on_message
from apgrad.rewiring._rewire import Rule


def clip_messages(max_norm: float, *, where: Where = None) -> Rule:
    """Sites scale the message to their output down to a norm of at most `max_norm`; their derivatives stay.

    Args:
      max_norm: the bound on the Euclidean norm of the whole array, positive.
      where: which sites, see `ap.rewiring.Where`; all dense layers and convolutions if not given.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> f = ap.rewire(lambda x: 5 * jnp.sin(x), ap.rewiring.clip_messages(1.0, where="sin"))
      >>> float(jax.grad(f)(0.0))
      1.0
    """
    number("max_norm", max_norm, positive=True)
    return _scaling(max_norm, where, shorten=True)


def normalize_messages(norm: float = 1.0, *, where: Where = None) -> Rule:
    """Sites scale the message to their output to one norm; their derivatives stay. A message of zeros stays zeros.

    Args:
      norm: the Euclidean norm of the whole array, positive.
      where: which sites, see `ap.rewiring.Where`; all dense layers and convolutions if not given.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> f = ap.rewire(lambda x: jnp.sum(5 * jnp.sin(x)), ap.rewiring.normalize_messages(10.0, where="sin"))
      >>> jax.grad(f)(jnp.zeros(4))
      Array([5., 5., 5., 5.], dtype=float32)
    """
    number("norm", norm, positive=True)
    return _scaling(norm, where, shorten=False)


def _scaling(norm: float, where: Where, shorten: bool) -> Rule:
    scale = lambda message: rescaled(message, norm, shorten=shorten)
    return Rule(chosen(where, is_layer), lambda site, params: on_message(site, scale))
