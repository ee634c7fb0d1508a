"""Gradient descent as a message passing protocol, k = 1, a test of the nodes (MPLP, section 1; thesis, section 4.2).

    loss          m = dL/dp
    elementwise   m' = J^T m
    dense         m'_i = sum_j W_ij m_j,    W <- W - lr mean_b x_i m_j

Here p is the prediction, J the Jacobian of the node, and b numbers the examples.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from apgrad.mplp._protocol import Answer, Dense, Diagonal, Elementwise, Site


class Exact(nnx.Module):
    """Gradient descent.

    Args:
      learning_rate: the learning rate, which can be meta-trained like any other parameter of a rule.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> def network(places, params, batch):
      ...     p = ap.mplp.dense(places["layer"], places.signal(batch[0]), params["w"])
      ...     return ap.mplp.squared_error(places["loss"], p, batch[1])
      >>> batch, params, rule = (jnp.ones((4, 1)), 2 * jnp.ones((4, 1))), {"w": jnp.zeros((1, 1))}, ap.mplp.Exact(0.1)
      >>> state = ap.mplp.init_state(rule, network, params, batch)
      >>> updates, _, metrics = jax.jit(ap.mplp.backward, static_argnums=1)(rule, network, params, state, batch)
      >>> float(updates["w"][0, 0]), float(metrics["loss"])
      (0.2..., 2.0)
    """

    message_size = 1

    def __init__(self, learning_rate: float):
        self.learning_rate = nnx.Param(jnp.asarray(learning_rate, float))

    def init(self, site: Site) -> tuple[()]:
        return ()

    def at(self, site: Site) -> jax.tree_util.Partial:
        return jax.tree_util.Partial(_descend, self.learning_rate[...])


def _descend(rate: jax.Array, site: Site, question: Dense | Diagonal | Elementwise, state: tuple[()]) -> Answer:
    if isinstance(question, Elementwise):
        return Answer(question.exact[..., None])
    m = question.message[..., 0]
    if isinstance(question, Diagonal):
        return Answer((m * question.through)[..., None], -rate * m * question.slope)
    message = (m @ question.weight.T)[..., None]
    bias = None if question.bias is None else -rate * jnp.sum(m, axis=0) / site.batch
    return Answer(message, -rate * question.inputs.T @ m / site.batch, bias)
