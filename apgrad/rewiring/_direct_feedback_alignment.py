"""Direct feedback alignment: every layer hears the error at the output, through fixed random weights.

Nokland, "Direct feedback alignment provides learning in deep neural networks", NeurIPS 2016. With e the message to the
output of the whole network, the message to the input x of a layer is B e, with B drawn once for the layer. It then
passes the derivative of the activation as usual, and the weight has its usual gradient.
"""

import math

import jax

from apgrad._ground.keys import normal, require_key
from apgrad.rewiring._layers import Where, chosen_layers, layer, require_one_layer
from apgrad.rewiring._rewire import Rule


def direct_feedback_alignment(key: jax.Array, *, where: Where = None) -> Rule:
    """Layers send the output's message, through fixed random weights, to their inputs.

    So a layer that is taken changes what the layers *before* it learn, not itself: to teach the first of two layers
    directly, name the second. The output must be one array (..., outputs), with the leading axes of the layers' inputs:
    (examples, 1), if it is one number for each example. The rule's parameters, which get no update, are an array for
    each layer: of the shape (outputs, ...), which ends in the axes of the layer's input without the leading ones.

    Args:
      key: the PRNG key of the random weights, normal with a deviation of 1 / sqrt(outputs).
      where: which layers send it, see `ap.rewiring.Where`; all dense layers and convolutions if not given.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> network = lambda ws, x: jnp.tanh(x @ ws[0]) @ ws[1]
      >>> rewired = ap.rewire(network, ap.rewiring.direct_feedback_alignment(jax.random.key(0)))
      >>> jax.tree.map(jnp.shape, rewired.init([jnp.ones((3, 4)), jnp.ones((4, 2))], jnp.ones((8, 3))))
      {'dot_general[0]': (2, 3), 'dot_general[1]': (2, 4)}
    """
    key = require_key("the key of direct_feedback_alignment", key)

    def axes(site):
        """The leading axes, the number of outputs, and the other axes of the input."""
        require_one_layer(site)
        (output, *others), x = jax.tree.leaves(site.result), site.inputs[0]
        if others or not output.shape or output.shape[:-1] != x.shape[: output.ndim - 1]:
            raise ValueError(
                f"direct feedback alignment needs one output, with the leading axes of the input of {site}; got "
                f"{site.result}. Leave the loss outside of the function, and state too, or name other layers (where=)."
            )
        if output.shape == x.shape[:1] != (1,) and x.ndim > 1:
            raise ValueError(
                f"the output seems one number for each of {x.shape[0]} examples, which the input of {site} has too: "
                f"each layer would hear the errors of all examples. Keep its last axis, {(*output.shape, 1)}. (Give a "
                "function of one example a leading axis of 1, at its input and its output.)"
            )
        return output.shape[:-1], output.shape[-1], x.shape[output.ndim - 1 :]

    def init(site):
        _, outputs, rest = axes(site)
        deviation, dtype = max(outputs, 1) ** -0.5, site.inputs[0].dtype
        return normal(jax.random.fold_in(key, site.number), (outputs, *rest), dtype, deviation)

    def at(site, feedback):
        leading, outputs, rest = axes(site)

        def answer(x, w, message, update, result):
            (error,) = jax.tree.leaves(result)
            flat = error.astype(feedback.dtype) @ feedback.reshape(outputs, math.prod(rest))
            return None, flat.reshape(*leading, *rest), update

        return layer(site, answer)

    return Rule(chosen_layers(where), at, init, direct=True)
