"""The separable rule: small networks for every neuron, in place of networks for every synapse.

The update of a synapse is a sum of R products of a factor for its input neuron and a factor for its output neuron. Each
factor is made by a small network that sees one neuron. A message is a weighted sum, as in backpropagation:

    dW_ij = -lr mean_b sum_r B_r(x_bi, u_i) A_r(m_bj, v_j),      db_j = -lr' mean_b A_0'(m_bj, v_j)
    m'_bi = G(sum_j W_ij U(m_bj, v_j), z_bi, s_i)

x are the inputs, m (of size k) the messages at the outputs, z the inputs of the activation, where G stands. The work is
about 1 + k + R matrix products of the forward pass's size. A loss makes the first message, from [L, p, y, ...].

*Start as gradient descent.* Component 0 of m, A_0, B_0 and U_0 are those of gradient descent, A(m) = m, B(x) = x, U(m)
= m, G(m, z) = act'(z) m, plus corrections whose gains begin at 0. The A_r (r > 0) are 0 at first, so the B_r (r > 0)
need not be 0, and neither need the other components of messages, which nothing reads yet.

*State of neurons.* u, v and s are recurrent states of neurons, not of examples. A gated unit makes a new state from the
mean and the mean square over the batch of what the neuron sees, so a rule can follow these statistics, as Adam does.
*Whitening.* With `whiten` B_0 is P x, and the networks see P x beside x (`_whitening.py`): recursive least squares.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from apgrad._ground.arguments import number, require_one_of
from apgrad.mplp._protocol import Answer, Dense, Diagonal, Elementwise, Site
from apgrad.mplp._rule_options import MadeForSites, first_sites, require_sizes, role
from apgrad.mplp._rule_parts import NORMAL, Corrected
from apgrad.mplp.rules import _whitening as whitening

WHITENING = 3.0, 1e-3  # the whitening's lambda and epsilon at first


class Separable(MadeForSites):
    """The separable rule.

    Args:
      sites: the sites of a network, from `mplp.sites`.
      message_size: the size k of a message.
      rank: the number R of products in an update.
      hidden: the number of hidden units of each network, which are tanh.
      neuron_state: the size of a neuron's state; 0 for none.
      whiten: whether dense layers whiten their inputs.
      share: which places share networks and step sizes, and so which networks the rule fits. False: none. True:
        places of a kind. "role", for any depth: places whose names differ in digits only ("dense_1" and "dense_2").
      normalize: whether a dense layer's step is divided by 1 + mean |x|^2 (Nagumo & Noda, 1967), so that a learned
        step size means the same in layers of every width.
      learning_rate: the learning rate of each place at first, which is meta-trained.
      full: the largest number of inputs with which a layer has a full P; a wider layer has a window.
      window: the largest number of rows of a window; a layer with more rows in a minibatch has a full P.
      rngs: the source of keys for the networks.

    Example:
      >>> import jax, jax.numpy as jnp, flax.nnx as nnx, apgrad as ap
      >>> network, prior = ap.meta.mlp((1, 5, 1), jnp.tanh, ap.mplp.squared_error)
      >>> params, batch = prior(jax.random.key(0)), (jnp.ones((10, 1)), jnp.zeros((10, 1)))
      >>> rule = ap.mplp.Separable(ap.mplp.sites(network, params, batch), whiten=True, rngs=nnx.Rngs(2))
      >>> state = ap.mplp.init_state(rule, network, params, batch)
      >>> updates, state, _ = jax.jit(ap.mplp.backward, static_argnums=1)(rule, network, params, state, batch)
      >>> state["dense_out"]["whitening"]["P"].shape
      (5, 5)
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        message_size: int = 8,
        rank: int = 8,
        hidden: int = 32,
        neuron_state: int = 0,
        whiten: bool = False,
        share: bool | Literal["role"] = False,
        normalize: bool = False,
        learning_rate: float = 0.3,
        full: int = 512,
        window: int = 64,
        rngs: nnx.Rngs,
    ):
        networks = {"message_size": message_size, "rank": rank, "hidden": hidden}
        sizes = {"neuron_state": neuron_state, "full": full, "window": window}
        flags = {"whiten": whiten, "normalize": normalize}
        require_one_of((False, True, "role"), share=share)
        require_one_of((False, True), **flags)
        require_sizes(1, **networks)
        require_sizes(0, **sizes)
        number("learning_rate", learning_rate, positive=True)
        sites = self.remember(sites, **networks, **sizes, **flags, share=share)
        self.message_size, self.neuron_state, self.share, self.whitens = message_size, neuron_state, share, whiten
        self.full, self.window = full, window
        self.places = nnx.Dict({})
        for key, site in first_sites(sites, self._key).items():
            if site.family == "dense":
                made = _Dense(message_size, rank, hidden, neuron_state, learning_rate, whiten, normalize, rngs)
            elif site.family == "diagonal":
                made = _Diagonal(message_size, hidden, neuron_state, learning_rate, rngs)
            else:
                seen = len(site.features) + (0 if site.begins else message_size)
                made = _Elementwise(seen, message_size, hidden, neuron_state, rngs)
            self.places[key] = made

    def init(self, site: Site) -> dict[str, Any]:
        """Zeros for each neuron, and P = I."""
        zeros = lambda *units: jnp.zeros((*units, self.neuron_state), float)
        dense = site.family == "dense"
        state: dict[str, Any] = {}
        if self.neuron_state and dense:
            state = {"inputs": zeros(site.shape[1]), "outputs": zeros(site.shape[2])}
        elif self.neuron_state:
            state = {"units": zeros(*site.shape[1:])}
        if dense and self.whitens:
            state["whitening"] = whitening.init(site, self.full, self.window)
        return state

    def at(self, site: Site) -> Any:
        return self.of(site, self._key(site), by_name=not self.share)

    def _key(self, site: Site) -> str:
        if self.share == "role":
            return role(site)
        return site.kind if self.share else site.name


class _NeuronState(nnx.Module):
    """A gated unit, `s + sigmoid(gate) * (tanh(new) - s)`, which sees the mean and the mean square over the batch."""

    def __init__(self, features: int, size: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(NORMAL(rngs.params(), (2 * features + size, 2 * size), float))
        self.bias = nnx.Param(jnp.zeros(2 * size, float))

    def __call__(self, seen: jax.Array, state: jax.Array) -> jax.Array:
        x = jnp.concatenate([jnp.mean(seen, axis=0), jnp.mean(seen**2, axis=0), state], axis=-1)
        gate, new = jnp.split(x @ self.kernel[...] + self.bias[...], 2, axis=-1)
        return state + jax.nn.sigmoid(gate) * (jnp.tanh(new) - state)


class _Dense(nnx.Module):
    def __init__(self, message_size, rank, hidden, neuron_state, learning_rate, whiten, normalize, rngs):
        make = lambda features, out, gain: Corrected(features + neuron_state, hidden, out, gain, rngs)
        self.A = make(message_size, rank, (0.0, 0.0))
        self.B = make(1 + whiten, rank, (0.0, 1.0))
        self.U = make(message_size, message_size, (0.0, 1.0))
        self.bias = make(message_size, 1, (0.0, 0.0))
        self.log_rate = nnx.Param(jnp.full(2, jnp.log(learning_rate), float))
        self.inputs: Any = _NeuronState(1, neuron_state, rngs) if neuron_state else nnx.data(None)
        self.outputs: Any = _NeuronState(message_size, neuron_state, rngs) if neuron_state else nnx.data(None)
        self.log_white = nnx.Param(jnp.log(jnp.asarray(WHITENING, float))) if whiten else nnx.data(None)
        self.normalize = normalize

    def __call__(self, site: Site, question: Dense, state: dict[str, Any]) -> Answer:
        m, x, new = question.message, question.inputs, dict(state)
        at_output, at_input = [m], [x[..., None]]
        if self.log_white is not None:
            strength, forget = jnp.exp(self.log_white[...])
            x, new["whitening"] = whitening.whiten(x, state["whitening"], strength, forget)
            at_input.append(x[..., None])
        if self.outputs is not None:
            new["inputs"] = self.inputs(at_input[0], state["inputs"])
            new["outputs"] = self.outputs(at_output[0], state["outputs"])
            at_input.append(new["inputs"])
            at_output.append(new["outputs"])
        gradient = m[..., 0]
        rate = jnp.exp(self.log_rate[...])
        if self.normalize:
            rate = rate / (1.0 + jnp.mean(jnp.sum(question.inputs**2, axis=-1)))
        A, B = self.A(gradient, *at_output), self.B(x, *at_input)
        update = -rate[0] / site.batch * jnp.einsum("bir,bjr->ij", B, A)
        bias = None
        if question.bias is not None:
            bias = -rate[1] / site.batch * jnp.sum(self.bias(gradient, *at_output)[..., 0], axis=0)
        message = jnp.einsum("bjk,ij->bik", self.U(gradient, *at_output), question.weight)
        return Answer(message, update, bias, new)


class _Diagonal(nnx.Module):
    """The local rule of a bias, a scale or an embedded row: one network makes the update, and one makes the message."""

    def __init__(self, message_size, hidden, neuron_state, learning_rate, rngs):
        make = lambda out, gain: Corrected(message_size + 2 + neuron_state, hidden, out, gain, rngs)
        self.update, self.message = make(1, (0.0, 0.0)), make(message_size, (0.0, 1.0))
        self.log_rate = nnx.Param(jnp.log(jnp.asarray(learning_rate, float)))
        self.neuron = _NeuronState(message_size, neuron_state, rngs) if neuron_state else nnx.data(None)

    def __call__(self, site: Site, question: Diagonal, state: dict[str, Any]) -> Answer:
        m, new = question.message, dict(state)
        parameter = jnp.broadcast_to(question.parameter, question.inputs.shape)
        parts = [m, parameter[..., None], question.inputs[..., None]]
        if self.neuron is not None:
            new["units"] = self.neuron(m, state["units"])
            parts.append(new["units"])
        gradient = m[..., 0]
        update = -jnp.exp(self.log_rate[...]) * self.update(gradient * question.slope, *parts)[..., 0]
        return Answer(self.message(gradient * question.through, *parts), update, state=new)


class _Elementwise(nnx.Module):
    def __init__(self, seen, message_size, hidden, neuron_state, rngs):
        self.G = Corrected(seen + neuron_state, hidden, message_size, (0.0, 1.0), rngs)
        self.neuron = _NeuronState(seen, neuron_state, rngs) if neuron_state else nnx.data(None)

    def __call__(self, site: Site, question: Elementwise, state: dict[str, Any]) -> Answer:
        parts = [jnp.stack(list(question.features.values()), axis=-1)]
        if question.message is not None:
            parts.insert(0, question.message)
        new = dict(state)
        if self.neuron is not None:
            new["units"] = self.neuron(jnp.concatenate(parts, axis=-1), state["units"])
            parts.append(new["units"])
        return Answer(self.G(question.exact, *parts), state=new)
