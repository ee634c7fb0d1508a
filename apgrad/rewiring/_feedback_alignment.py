"""Feedback alignment: messages go back through fixed random weights.

Lillicrap, Cownden, Tweed & Akerman, "Random synaptic feedback weights support error backpropagation for deep learning",
Nature Communications 7, 2016. Backpropagation's message to the input of a layer y = w x is w' m, with m the message to
y; feedback alignment sends B' m, with B drawn once. The weight has its usual gradient, m x'. Learning turns w until the
two messages are less than 90 degrees apart. In a convolution B stands in the place of the kernel.
"""

import jax

from apgrad._ground.propagator import Propagator
from apgrad.rewiring._layers import chosen, is_layer, random_weight, to_input, to_weight
from apgrad.rewiring._rewire import Rule


def feedback_alignment(key: jax.Array, scale: float | None = None, where=None) -> Rule:
    """Dense layers and convolutions send their messages through fixed random weights.

    Args:
      key: of the random weights, which are normal.
      scale: their standard deviation; 1 over the square root of the number of the layer's inputs if not given.
      where: which layers, a function `Site -> bool` or labels; all if not given.

    Returns:
      A rule with parameters: for each layer its feedback weights. They get no updates.

    Example:
      See `ap.rewire`.
    """

    def init(site):
        return random_weight(site, jax.random.fold_in(key, site.number), scale)

    def at(site, feedback):
        def backward(memory, message):
            x, w = memory
            return None, to_input(site, x, feedback, message), to_weight(site, x, w, message)

        return Propagator(lambda x, w: (site.function(x, w), (x, w)), backward)

    return Rule(chosen(where, is_layer), at, init)
