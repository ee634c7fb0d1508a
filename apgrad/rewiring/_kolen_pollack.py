"""Kolen-Pollack learning: feedback weights that get the same updates as the weights, and so become equal to them.

Kolen & Pollack, "Backpropagation without weight transport", ICNN 1994; Akrout, Wilson, Humphreys, Lillicrap & Tweed,
"Deep learning without weight transport", NeurIPS 2019, section 4. A layer y = w x sends B' m back. Both w and B get the
update m x', and both decay, w <- (1 - decay) w - rate m x', the same for B. So the difference w - B shrinks by the
factor 1 - decay at each step, and the messages become those of backpropagation.
"""

import jax

from apgrad.rewiring._layers import Where, chosen_layers, layer, random_feedback, to_input
from apgrad.rewiring._rewire import Rule


def kolen_pollack(key: jax.Array, *, where: Where = None) -> Rule:
    """Layers send their messages back through weights that learn with the layers' own updates.

    Train the feedback weights, the rule's parameters, with the layers' optimizer, rate and decay. Without decay the two
    do not become equal; nor do they if layers share a weight, as each layer's feedback gets its own part of the update.

    Args:
      key: the PRNG key of the first feedback weights, normal with a deviation of 1 over the root of the
        number of a neuron's inputs.
      where: which layers, see `ap.rewiring.Where`; all dense layers and convolutions if not given.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> rewired = ap.rewire(lambda w, x: jnp.sum(x @ w), ap.rewiring.kolen_pollack(jax.random.key(0)))
      >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
      >>> update, gradient = jax.jit(jax.grad(rewired, argnums=(0, 1)))(rewired.init(*args), *args)
      >>> bool(jnp.all(update["dot_general[0]"] == gradient))
      True
    """

    def at(site, feedback):
        return layer(site, lambda x, w, message, update: (update, to_input(site, feedback, message), update))

    return Rule(chosen_layers(where), at, random_feedback("kolen_pollack", key))
