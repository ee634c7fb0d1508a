"""Feedback alignment: messages go back through fixed random weights.

Lillicrap, Cownden, Tweed & Akerman, "Random synaptic feedback weights support error backpropagation for deep learning",
Nature Communications 7, 2016. Where backpropagation sends w' m to the input of a layer y = w x, this rule sends B' m,
with B drawn once. The weight has its usual gradient, m x'. In a convolution B stands in the place of the kernel.
"""

import jax

from apgrad.rewiring._layers import Where, chosen_layers, layer, random_feedback, to_input
from apgrad.rewiring._rewire import Rule


def feedback_alignment(key: jax.Array, *, where: Where = None) -> Rule:
    """Layers send their messages back through fixed random weights, the rule's parameters, which get no update.

    The first layer has feedback weights too, which change nothing, as their message goes to the data. A layer that is
    called several times in Python has other ones at each call; in a `scan` it has one set. For an example: `ap.rewire`.

    Args:
      key: the PRNG key of the random weights, normal with a deviation of 1 over the root of the
        number of a neuron's inputs.
      where: which layers, see `ap.rewiring.Where`; all dense layers and convolutions if not given.
    """

    def at(site, feedback):
        return layer(site, lambda x, w, message, update: (None, to_input(site, feedback, message), update))

    return Rule(chosen_layers(where), at, random_feedback("feedback_alignment", key))
