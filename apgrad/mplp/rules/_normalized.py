"""The normalized rule: steps of learned length along whitened, averaged and normalized updates.

The steps of a separable rule (`_separable.py`) are proportional to its messages: messages that fade in a deep network
teach it nothing, large ones make it diverge, and the rule fits one scale alone. Here nothing depends on the scale of
inputs and messages, and the rule sets the length of each step. At a dense layer with inputs x (B, N), messages m (B, M,
k) and weights W (N, M), with |a| for the root mean square of all elements of a,

    U = mean_b sum_r B_r(P x) A_r(m)      V <- beta V + (1 - beta) U
    dW = -l c(t / T) V / (|V| sqrt(N))    db = -l l' c(t / T) v / |v|

P x are the inputs whitened by recursive least squares (`_whitening.py`). The first product, of A_0 = m_0 and B_0 = P x,
is that of gradient descent on whitened inputs, plus corrections. The corrections, and the messages

    m' = g |m| G(m / |m|, z) + the exact message in component 0,

are made by small networks, each for one neuron, that see m / |m|, x / |x| and P x / |x|. At first the corrections do
not change an update. c falls from 1 to 0 at the horizon of T updates (without `for_steps` it is 1).

*Corrections fade.* A gradient's mean over examples vanishes as the network learns. The mean of a function of m / |m|
does not, and would outweigh it, sooner in large minibatches and wide layers: so their factor is g / (1 + t B / 1000).

*Controllers.* l, l', beta, the whitening's lambda and epsilon, and g are made anew for each step t by the controller of
a role (`dense_in`, `dense_`, `dense_out`; g alone in roles without parameters): a learned constant plus a network that
sees t / T, the logarithms of T, B, N and M and of |W| sqrt(N), 1 / sqrt(t + 1), and two running means that tell signal
from noise: |V| / (|U| + |V|), and the cosine of U with the average before it. With `settle` s the network's output is
multiplied by 1 / (1 + t / s).

*Shared parameters.* Where a parameter is used in many steps or at many positions (`mplp.shared`, a bias, a scale, the
table of an embedding), the U of all uses are added, and V is the average of these sums.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad._ground.arguments import meets, require_one_of, whole
from apgrad.mplp._protocol import Answer, Dense, Diagonal, Elementwise, Shared, Site
from apgrad.mplp._reach import warn_of_updates
from apgrad.mplp._rule_options import MadeForSites, first_sites, require_sizes, role
from apgrad.mplp._rule_parts import NORMAL, Corrected, Fixed, Mlp, uncorrected
from apgrad.mplp.rules import _whitening as whitening

CONTROLS = {"rate": -2.3, "bias": -1.5, "beta": 0.0, "lambda": 1.0, "epsilon": -6.0, "correct": 0.0}
"""What a controller gives at first: logarithms, and for beta a logit."""
STEP, WHITEN, CORRECT = ("rate", "bias", "beta"), ("lambda", "epsilon"), ("correct",)
SEEN = 9  # numbers that a controller sees
FADES = 1000.0  # examples after which half of the corrections is left
TINY = 1e-20


class Normalized(MadeForSites):
    """The normalized rule.

    Args:
      sites: the sites of a network, from `mplp.sites`. Places share networks by role, as "role" of `Separable` says.
      message_size: the size k of a message; 0 for the gradient alone, without corrections.
      rank: the number of products in an update.
      hidden: the number of hidden units of each network, which are tanh.
      whiten: whether dense layers whiten their inputs.
      full: the largest number of inputs with which a layer has a full P; a wider layer has a window.
      window: the largest number of rows of a window; a layer with more rows in a minibatch has a full P.
      settle: the number of steps after which the output of controllers' networks is halved; None never fades it.
      rngs: the source of keys for the networks.

    Example:
      >>> import jax, jax.numpy as jnp, flax.nnx as nnx, apgrad as ap
      >>> network, prior = ap.meta.mlp((4, 5, 2), jnp.tanh, ap.mplp.softmax_cross_entropy)
      >>> sites = ap.mplp.sites(network, prior(jax.random.key(0)), (jnp.ones((3, 4)), jnp.ones((3, 2)) / 2))
      >>> rule = ap.mplp.Normalized(sites, rngs=nnx.Rngs(2)).for_steps(100)
      >>> sites[0].name, rule.init(sites[0])["whitening"]["P"].shape
      ('dense_in', (4, 4))
    """

    sums_uses = True

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        message_size: int = 4,
        rank: int = 4,
        hidden: int = 16,
        whiten: bool = True,
        full: int = 512,
        window: int = 64,
        settle: int | None = None,
        rngs: nnx.Rngs,
    ):
        sizes = {"message_size": message_size, "full": full, "window": window}
        networks = {"rank": rank, "hidden": hidden}
        require_sizes(0, **sizes)
        require_sizes(1, **networks)
        require_one_of((False, True), whiten=whiten)
        if settle is not None:
            require_sizes(1, settle=settle)
        self.remember(sites, **sizes, **networks, whiten=whiten, settle=settle)
        self.message_size = max(message_size, 1)
        self.whitens, self.full, self.window = whiten, full, window
        self.horizon, self.told = Fixed(jnp.zeros((), float)), False
        self.places = nnx.Dict({})
        control = lambda names: _Controller(names, hidden, settle, rngs)
        for key, site in first_sites(sites, role).items():
            if site.family == "dense":
                self.places[key] = _NormalizedDense(message_size, rank, hidden, whiten, site.shared, control, rngs)
            elif site.family == "diagonal":
                if site.kind == "embedding" and not site.shared:
                    raise ValueError(
                        f"the embedding {site.name!r} of a normalized rule takes its table through mplp.shared, as "
                        "that of mplp.from_nnx does: a step is normalized for the table, not for rows looked up"
                    )
                self.places[key] = _NormalizedDiagonal(site.shared, control)
            elif site.family == "shared":
                self.places[key] = _NormalizedShared(control)
            else:
                features = len(site.features) + (0 if site.begins else message_size)
                self.places[key] = _NormalizedElementwise(features, message_size, hidden, control, rngs)

    def for_steps(self, steps: int | jax.Array) -> "Normalized":
        """The rule for a known number of updates, over which its steps get shorter. Later updates are 0.

        Args:
          steps: the number of updates, a positive integer, or an array that is one.
        """
        if not isinstance(steps, jax.Array):
            warn_of_updates(self.reach, whole("steps", steps))
        elif steps.shape or not meets(steps, lambda n: (n >= 1) & (n == np.floor(n))):
            raise ValueError(f"steps must be an integer of at least 1, or an array that is one, got {steps}")
        told = nnx.clone(self)
        told.horizon[...] = jnp.asarray(steps, told.horizon[...].dtype)
        told.told = True
        return told

    def init(self, site: Site) -> dict[str, Any]:
        """P = I, and zeros for the averages."""
        zeros = lambda *shape: jnp.zeros(shape, float)
        dense = site.family == "dense"
        state: dict[str, Any] = {"count": zeros(), "signal": zeros(2)}
        if site.family != "elementwise" and not site.shared:
            shapes = {"shared": site.shape, "dense": site.shape[1:], "diagonal": site.shape[-1:]}
            state["average"] = zeros(*shapes[site.family])
        if dense and not site.shared:
            state["bias"] = zeros(site.shape[2] if site.bias else 0)
        if dense and self.whitens:
            state["whitening"] = whitening.init(site, self.full, self.window)
        return state

    def at(self, site: Site) -> Any:
        return jax.tree_util.Partial(_ask, self.of(site, role(site)), self.horizon[...])


def _ask(local: Any, horizon: jax.Array, site: Site, question: Any, state: Any) -> Answer:
    return local(site, question, state, horizon)


def _size(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(x**2) + TINY)


def _inputs(site: Site) -> int:
    """How many inputs an output has: of a convolution's kernel (*window, N, M) those of its whole window."""
    return math.prod({"dense": site.shape[-2:-1], "shared": site.shape[:-1]}.get(site.family, ()))


def _squash(x: jax.Array) -> jax.Array:
    # sign(x) log(1 + |x|), whose derivative at 0 is 1: each maximum gives a half.
    return jnp.log1p(jnp.maximum(x, 0)) - jnp.log1p(jnp.maximum(-x, 0))


class _Controller(nnx.Module):
    """Makes the numbers of a step; at first they are those of `CONTROLS`."""

    def __init__(self, controls: Sequence[str], hidden: int, settle: int | None, rngs: nnx.Rngs):
        self.controls, self.settle = tuple(controls), settle
        self.network = Mlp([SEEN, hidden, len(controls)], jnp.tanh, rngs=rngs, initializer=NORMAL)
        self.base = nnx.Param(jnp.array([CONTROLS[name] for name in controls], float))
        self.gain = nnx.Param(jnp.zeros(len(controls), float))

    def __call__(self, site: Site, state: dict[str, Any], horizon: jax.Array, weight: Any = 1.0) -> dict[str, Any]:
        t = state["count"]
        fraction = jnp.minimum(jnp.where(horizon > 0, t / jnp.maximum(horizon, 1.0), 0.0), 1.0)
        inputs, outputs = _inputs(site), site.shape[-1] if site.shape else 1
        sizes = jnp.stack([jnp.where(horizon > 0, horizon, 1000.0), *map(float, (site.batch, inputs, outputs))])
        scale = jnp.log(_size(jnp.asarray(weight, float)) * inputs**0.5 + 1e-3)
        seen = [fraction[None], (t[None] + 1) ** -0.5, jnp.log(sizes) / 5, scale[None], state["signal"]]
        part = self.gain[...] if self.settle is None else self.gain[...] / (1 + t / self.settle)
        made = self.base[...] + part * self.network(jnp.concatenate(seen))
        found: dict[str, Any] = dict(zip(self.controls, made, strict=True))
        if "correct" in found:
            found["correct"] = jnp.exp(found["correct"]) / (1 + t * site.batch / FADES)
        if "rate" in found:
            found["rate"] = jnp.exp(found["rate"]) * (1 - fraction)
            found["bias"] = found["rate"] * jnp.exp(found["bias"])
            found["beta"] = jax.nn.sigmoid(found["beta"])
        if "lambda" in found:
            found["whitening"] = jnp.exp(found["lambda"]), jnp.exp(jnp.minimum(found["epsilon"], 0.0))
        return found


Control = Callable[[Sequence[str]], _Controller]
"""Makes a controller of the numbers with these names."""


class _NormalizedDense(nnx.Module):
    """The local rule of a dense node. With messages of size 0 it sees the gradient alone."""

    def __init__(self, message_size, rank, hidden, whiten, shared, control: Control, rngs):
        made = lambda seen, out, gain: Corrected(seen, hidden, out, gain, rngs) if message_size else uncorrected
        self.A = made(message_size, rank, (0.0, 0.0))
        self.B = made(1 + whiten, rank, (0.0, 1.0))
        self.U = made(message_size, message_size, (0.0, 1.0))
        self.bias = made(message_size, 1, (0.0, 0.0))
        self.controller = control((*(STEP if not shared else ()), *WHITEN, *CORRECT))

    def __call__(self, site: Site, question: Dense, state: dict[str, Any], horizon: jax.Array) -> Answer:
        m, x, new = question.message, question.inputs, dict(state)
        control = self.controller(site, state, horizon, question.weight)
        of_m, of_x, inputs = _size(m), _size(x), [x[..., None]]
        if "whitening" in state:
            x, new["whitening"] = whitening.whiten(x, state["whitening"], *control["whitening"])
            inputs.append(x[..., None])
        corrected = lambda network: network(m[..., 0], m / of_m, size=control["correct"] * of_m)
        A, message, b = map(corrected, (self.A, self.U, self.bias))
        B = self.B(x, *(z / of_x for z in inputs), size=control["correct"] * of_x)
        passed = jnp.einsum("bjk,ij->bik", message, question.weight)
        step = jnp.einsum("bir,bjr->ij", B, A) / site.batch
        bias = None if question.bias is None else jnp.sum(b[..., 0], axis=0) / site.batch
        if site.shared:
            return Answer(passed, step, bias, new | {"count": state["count"] + 1})
        new |= _averaged(step, control["beta"], state)
        step = -control["rate"] * new["average"] / (_size(new["average"]) * _inputs(site) ** 0.5)
        if bias is not None:
            new["bias"] = control["beta"] * state["bias"] + (1 - control["beta"]) * bias
            bias = -control["bias"] * new["bias"] / _size(new["bias"])
        return Answer(passed, step, bias, new)


class _NormalizedDiagonal(nnx.Module):
    """The local rule of a bias or a scale: an averaged and normalized gradient step, and the exact message."""

    def __init__(self, shared: bool, control: Control):
        self.controller: Any = nnx.data(None) if shared else control(STEP)

    def __call__(self, site: Site, question: Diagonal, state: dict[str, Any], horizon: jax.Array) -> Answer:
        update = question.message[..., 0] * question.slope
        through = question.through[..., None] * question.message
        if self.controller is None:
            return Answer(through, update, state=state | {"count": state["count"] + 1})
        control = self.controller(site, state, horizon, question.parameter)
        positions = tuple(range(update.ndim - 2))
        new = dict(state) | _averaged(jnp.sum(jnp.mean(update, axis=0), axis=positions), control["beta"], state)
        step = -control["rate"] * new["average"] / _size(new["average"])
        # The node adds up what is answered, and divides the sum by the batch.
        step = step * site.batch / math.prod(update.shape[:-1])
        return Answer(through, jnp.broadcast_to(step, update.shape), state=new)


class _NormalizedShared(nnx.Module):
    """The local rule of a shared parameter: a vector gets the step of a bias, any other that of a dense weight."""

    def __init__(self, control: Control):
        self.controller = control(STEP)

    def __call__(self, site: Site, question: Shared, state: dict[str, Any], horizon: jax.Array) -> Answer:
        control = self.controller(site, state, horizon, question.parameter)
        new = state | _averaged(question.update, control["beta"], state)
        length = control["rate"] / _inputs(site) ** 0.5 if len(site.shape) > 1 else control["bias"]
        return Answer(None, -length * new["average"] / _size(new["average"]), state=new)


class _NormalizedElementwise(nnx.Module):
    def __init__(self, features: int, message_size: int, hidden: int, control: Control, rngs: nnx.Rngs):
        self.controller: Any = nnx.data(None)
        if message_size:
            self.G = Corrected(features, hidden, message_size, (0.0, 1.0), rngs)
            self.controller = control(CORRECT)

    def __call__(self, site: Site, question: Elementwise, state: dict[str, Any], horizon: jax.Array) -> Answer:
        new = state | {"count": state["count"] + 1}
        if self.controller is None:
            return Answer(question.exact[..., None], state=new)
        part, seen = self.controller(site, state, horizon)["correct"], []
        size = _size(question.exact if question.message is None else question.message)
        if question.message is not None:
            seen.append(question.message / size)
        seen.append(_squash(jnp.stack(list(question.features.values()), axis=-1)))
        return Answer(self.G(question.exact, *seen, size=part * size), state=new)


def _averaged(update: jax.Array, beta: jax.Array, state: dict[str, Any]) -> dict[str, Any]:
    average = beta * state["average"] + (1 - beta) * update
    cosine = jnp.mean(update / _size(update) * (state["average"] / _size(state["average"])))
    signal = jnp.stack([_size(average) / (_size(update) + _size(average)), cosine])
    return {"average": average, "signal": 0.9 * state["signal"] + 0.1 * signal, "count": state["count"] + 1}
