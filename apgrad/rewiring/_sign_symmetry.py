"""Sign-symmetry: messages go back through the signs of the weights.

Liao, Leibo & Poggio, "How important is weight symmetry in backpropagation?", AAAI 2016 (uniform sign-concordant
feedback); Xiao, Chen, Liao & Poggio, "Biologically-plausible learning algorithms can scale to large datasets", ICLR
2019. A layer y = w x sends sign(w)' m back. Both papers keep messages small by batch normalization or updates of fixed
size; here the signs have the root mean square of the weights, if no other scale is given.
"""

import jax.numpy as jnp

from apgrad._ground.arguments import number
from apgrad._ground.norms import widened
from apgrad.rewiring._layers import Where, chosen_layers, layer, to_input
from apgrad.rewiring._rewire import Rule


def sign_symmetry(*, scale: float | None = None, where: Where = None) -> Rule:
    """Layers send their messages back through the signs of their weights.

    Args:
      scale: what the signs are multiplied by: 1 as published; the root mean square of the layer's weights if not given.
      where: which layers, see `ap.rewiring.Where`; all dense layers and convolutions if not given.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> rewired = ap.rewire(lambda w, x: x @ w, ap.rewiring.sign_symmetry(scale=1.0))
      >>> jax.jit(jax.grad(lambda x: rewired(jnp.array([0.5, -3.0]), x)))(jnp.ones(2))
      Array([ 1., -1.], dtype=float32)
    """
    if scale is not None:
        number("scale", scale, positive=True)

    def at(site, params):
        def answer(x, w, message, update):
            size = jnp.sqrt(jnp.mean(jnp.abs(widened(w)[0]) ** 2)) if scale is None else scale
            return to_input(site, jnp.asarray(size, w.dtype) * jnp.sign(w), message), update

        return layer(site, answer)

    return Rule(chosen_layers(where), at)
