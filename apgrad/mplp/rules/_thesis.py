"""The thesis's rule: two-layer networks for every synapse, batch norm, a learned step size, clipped updates.

This is the stateless protocol of the MPLP thesis (Simons, 2023, chapters 4 and 5). With Wa = [W; b] and xa = [x, 1]:

    loss           m = g_loss([L, p, y]),       L the loss of one output, as in its code (in its text of all)
    activation     m' = g_act([m, z])
    dense          D_bij = f([m_bj, xa_bi]),    Wa <- Wa - clip(lr mean_b D, -1, 1)
                   m'_bi = sum_j g_lin([m_bj, Wa_ij])

Each network is linear, relu, linear; nodes of a kind share it (in the thesis each activation function is a kind, which
`mplp.transform` makes). Batch norm standardizes a network's inputs over all rows of a call, so that training leaves the
flat phase sooner (section 5.2). Gradient descent is k = 1, f = x m, g_lin = W m, g_act = act'(z) m, g_loss = dL/dp.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from apgrad._ground.arguments import number, require_one_of
from apgrad.mplp._protocol import Answer, Diagonal, Elementwise, Site
from apgrad.mplp._rule_options import MadeForSites, first_sites, require_sizes
from apgrad.mplp._rule_parts import Fixed, Mlp, beside, in_chunks, split

CHUNK = 2**17  # hidden units computed at once: three times as fast as all of them (measured, CPU, 80 hidden units)
CLIP = 1.0  # the largest size of an update
UNUSED = ("error", "log_prediction")  # features of losses that this rule does not see


class Thesis(MadeForSites):
    """The thesis's rule, made and used as `Separable` is in its example.

    Args:
      sites: the sites of a network, from `mplp.sites`. The rule fits every network of these kinds of nodes.
      message_size: the size k of a message.
      hidden: the number of hidden units of each network.
      batch_norm: whether batch norm standardizes the networks' inputs.
      learn_rate: whether the step size lr is meta-trained (not its logarithm, so its sign may change).
      learning_rate: the step size at first; .001 in the thesis.
      see_loss: whether the network of a loss sees the loss itself; not so in the thesis's section 5.1.
      start: "random"; or "gradient_descent", which is exact at first, as long as no update is clipped.
      rngs: the source of keys for the networks, which are uniform within 1 / sqrt(features), as in the thesis's code.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        message_size: int = 8,
        hidden: int = 50,
        batch_norm: bool = True,
        learn_rate: bool = True,
        learning_rate: float = 1e-3,
        see_loss: bool = True,
        start: Literal["random", "gradient_descent"] = "random",
        rngs: nnx.Rngs,
    ):
        require_one_of(("random", "gradient_descent"), start=start)
        require_one_of((False, True), batch_norm=batch_norm, learn_rate=learn_rate, see_loss=see_loss)
        require_sizes(1, message_size=message_size, hidden=hidden)
        number("learning_rate", learning_rate, positive=True)
        self.message_size = message_size
        sites = self.remember(sites)
        self.rate = (nnx.Param if learn_rate else Fixed)(jnp.asarray(learning_rate, float))
        self.networks = nnx.Dict({})
        exact = start == "gradient_descent"
        make = lambda features, out, used=(): _Network(features, hidden, out, used, batch_norm, exact, rngs)
        for site in first_sites(sites, lambda site: site.kind).values():
            if site.family == "elementwise":
                used = tuple(name for name in site.features if name not in UNUSED and (see_loss or name != "loss"))
                features = len(used) + (0 if site.begins else message_size)
                self.networks[f"{site.kind}/g"] = make(features, message_size, used)
            else:
                self.networks[f"{site.kind}/f"] = make(message_size + 1, 1)
                self.networks[f"{site.kind}/g"] = make(message_size + 1, message_size)

    def init(self, site: Site) -> tuple[()]:
        return ()

    def at(self, site: Site) -> jax.tree_util.Partial:
        self.require(site, by_name=False)
        f, g = self.networks.get(f"{site.kind}/f"), self.networks[f"{site.kind}/g"]
        return jax.tree_util.Partial(_answer, f, g, self.rate[...])


class BatchNorm(nnx.Module):
    """`(v - mean) / sqrt(var + 1e-8) * gain + shift` of each feature over all rows; var has ddof 1, and may be 0."""

    def __init__(self, features: int):
        self.gain = nnx.Param(jnp.ones(features, float))
        self.shift = nnx.Param(jnp.zeros(features, float))

    def __call__(self, *parts: jax.Array) -> list[jax.Array]:
        """Normalizes parts that broadcast against each other, without broadcasting them."""
        rows = math.prod(jnp.broadcast_shapes(*[part.shape[:-1] for part in parts]))
        out = []
        for part, gain, shift in zip(parts, split(self.gain[...], parts), split(self.shift[...], parts), strict=True):
            axes = tuple(range(part.ndim - 1))
            centred = part - jnp.mean(part, axis=axes)
            variance = jnp.mean(centred**2, axis=axes) * (rows / max(rows - 1, 1))
            out.append(centred * (gain * jax.lax.rsqrt(variance + 1e-8)) + shift)
        return out


class _Network(nnx.Module):
    """Makes a message or a step or, if it `corrects`, a correction of gradient descent's, 0 at first in component 0.

    `used` names the features that it sees of an elementwise node.
    """

    def __init__(self, features, hidden, out, used, batch_norm, corrects, rngs):
        self.used = used
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.norm = BatchNorm(features) if batch_norm else nnx.data(None)
        self.mlp = Mlp([features, hidden, out], jax.nn.relu, rngs=rngs, initializer=uniform)
        for kernel, bias in zip(self.mlp.kernels, self.mlp.biases, strict=True):
            bound = kernel.shape[0] ** -0.5
            bias[...] = jax.random.uniform(rngs.params(), bias.shape, float, -bound, bound)
        self.gain = nnx.Param(jnp.ones(out, float).at[0].set(0.0)) if corrects else nnx.data(None)

    def __call__(self, *parts: jax.Array) -> jax.Array:
        seen = parts if self.norm is None else self.norm(*parts)
        hidden = self.mlp.kernels[0].shape[1]
        return in_chunks(lambda own, _: self.mlp(*own), seen, (), CHUNK // hidden)

    def combined(self, exact: jax.Array, learned: jax.Array) -> jax.Array:
        """The message or the step, (..., out): `learned` alone, or gradient descent's `exact` (...) corrected by it."""
        return learned if self.gain is None else beside(exact, self.gain[...] * learned)


def _answer(f: Any, g: _Network, rate: jax.Array, site: Site, question: Any, state: tuple[()]) -> Answer:
    if isinstance(question, Elementwise):
        parts = [] if question.message is None else [question.message]
        learned = g(*parts, *[question.features[name][..., None] for name in g.used])
        return Answer(g.combined(question.exact, learned))
    m = question.message
    if isinstance(question, Diagonal):
        parameter = jnp.broadcast_to(question.parameter, question.slope.shape)
        step = f.combined(m[..., 0] * question.slope, f(m, question.slope[..., None]))[..., 0]
        # The update of one example is clipped here, since the node takes the mean over the batch.
        message = g.combined(m[..., 0] * question.through, g(m, parameter[..., None]))
        return Answer(message, -jnp.clip(rate * step, -CLIP, CLIP))
    x, W = question.inputs, question.weight
    inputs = W.shape[0]
    if question.bias is not None:
        x = jnp.concatenate([x, jnp.ones((x.shape[0], 1), x.dtype)], axis=1)
        W = jnp.concatenate([W, question.bias[None]], axis=0)
    learned = jnp.sum(f(m[:, None], x[:, :, None, None]), axis=0) / site.batch
    step = f.combined(x.T @ m[..., 0] / site.batch, learned)[..., 0]
    update = -jnp.clip(rate * step, -CLIP, CLIP)
    synapses = g(m[:, None], W[None, :, :, None])[:, :inputs]
    message = g.combined(m[..., 0] @ question.weight.T, jnp.sum(synapses, axis=2))
    return Answer(message, update[:inputs], None if question.bias is None else update[inputs])
