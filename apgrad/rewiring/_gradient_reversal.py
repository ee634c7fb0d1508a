"""Gradient reversal: the message changes its sign at a place, so that what is before it learns the opposite.

Ganin et al., "Domain-adversarial training of neural networks", JMLR 17, 2016, section 4.2.
"""

import jax

from apgrad._ground.arguments import number
from apgrad.rewiring._layers import Where, chosen, on_message
from apgrad.rewiring._rewire import Rule


def gradient_reversal(where: Where, *, strength: float | jax.Array = 1.0) -> Rule:
    """Sites multiply the message by a negative number, and are otherwise as they were.

    Args:
      where: which sites, see `ap.rewiring.Where`; the name in `checkpoint_name(x, name)` marks a place.
      strength: the message is multiplied by minus this number or scalar; the paper raises it from 0 to 1.

    Example:
      >>> import jax, apgrad as ap
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> f = ap.rewire(lambda x: checkpoint_name(x, "features") ** 2, ap.rewiring.gradient_reversal("features"))
      >>> float(jax.grad(f)(3.0))
      -6.0
    """
    number("strength", strength, signed=True)
    negative = lambda message: -jax.numpy.asarray(strength, message.dtype) * message
    return Rule(chosen(where), lambda site, params: on_message(site, negative))
