"""Where a random memory's noise hurts: the noise of each layer's gradient, predicted by one backward pass of squares.

A layer is linear in its kernel: G = sum_i x_i a_i, over the entries x_i of its input, with a_i the derivative of G by
x_i: messages delta, each in its place of the kernel. A random memory puts x_i + e_i for x_i, with E e_i = 0 and
variances v_i, which samplers give by `variance`. If the errors are independent, or their a_i orthogonal,

    E |G^ - G|^2 = sum_i v_i |a_i|^2 = the sum over the kernel of the kernel's gradient at x := v, delta := delta^2,

since no two products of x and delta that enter one entry of G have the same a_i. With a share f of the entries kept,
v = x^2 / f, and the noise is N / f, N = sum_i x_i^2 |a_i|^2. In a layer whose weights are used once for an example
the a_i of an example are orthogonal: N is S, the mean square of an example's gradient. Where weights are shared, over
positions or steps, an example's gradient is a sum over its positions: S / N, here called the coherence, is 1 if the
positions' messages are independent, and up to their number if they agree.

A smaller batch of as many bytes, f' of them a B-th of a batch of B, has the squared error (S - |g|^2) / (f' B), with g
the gradient over all data. A sample has (S - |g|^2) / B + N / (f B). So at equal memory the sample's squared error over
the smaller batch's is

    f' (1 + (1/f) (N / S) / (1 - |g|^2 / S)),     about f' + 1 / coherence where f' = f:

above 1 in dense layers, below it where weights are shared and messages agree. Rounding has v = scale^2 p (1 - p), which
is relative to the range of its group, and not to x^2 / f: small in both.

    python -m experiments.rad_prediction
    python -m experiments.rad_prediction --preset paper

The errors of a layer's entries are taken for independent. In truth, entries that are drawn with replacement, or one of
each run, are chosen in place of each other, which matters where coherence is high and few entries are drawn. All is of
one batch: S and g are its examples'; measured are `draws` of `ap.randomize` on it. The preset `paper` is no paper's
setting, but the whole of this study: all networks, before and after training, on MNIST. The report takes any of the
cells.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import apgrad as ap
from apgrad import memory as rad, meta
from experiments import harness
from experiments.parts import networks, rad_networks
from experiments.parts.rad_networks import apply

PARTIAL = True
# As `rad_networks.LAYERS`.
NETWORKS = {
    "mlp": (("dense", 300), ("dense", 300), ("dense", 10)),
    "convnet": (("conv 5", 16), ("conv 5", 32), ("pool", 0), ("conv 5", 32), ("pool", 0), ("dense", 10)),
    "wide convnet": (("conv 3", 64), ("pool", 0), ("conv 3", 64), ("pool", 0), ("dense", 100), ("dense", 10)),
    "rows": (("rows", 64), ("rows", 64), ("rows", 64), ("dense", 10)),
}


class Config(harness.Config, least={"training_steps": 0}):
    """Options of this experiment."""

    data: str = "digits"  # "mnist", or "digits", the fall-back.
    networks: tuple[str, ...] = ("mlp", "convnet")  # of `NETWORKS`.
    samplers: tuple[str, ...] = ("different 0.1", "rounding 4")  # by `rad_networks.sampler`.
    batch: int = 100  # examples.
    training_steps: tuple[int, ...] = (0, 100)  # of Adam before the noise is measured.
    draws: int = 30  # of the memory, for each noise.


SAMPLERS = ("different 0.05", "different 0.1", "different 0.3", "distinct 0.1", "stratified 0.1")
SAMPLERS += ("rounding 8", "rounding 4", "rounding 2")
PAPER = Config(data="mnist", networks=tuple(NETWORKS), samplers=SAMPLERS, batch=300, training_steps=(0, 300), draws=60)


def run(network: str, params: Any, zeros: Any, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The scores of images (n, height, width, channels), and the layers' inputs; `zeros` are added to their outputs."""
    x = jax.lax.optimization_barrier(x)  # the first layer's input is remembered like the others'
    return rad_networks.run(NETWORKS[network], params, x[..., 0] if network == "rows" else x, zeros)


def loss(network: str, params: Any, x: jax.Array, y: jax.Array, zeros: Any = None) -> tuple[jax.Array, list[jax.Array]]:
    """The mean cross-entropy, and the layers' inputs."""
    scores, inputs = run(network, params, zeros or [0.0] * len(params), x)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1)), inputs


def parameters(network: str, key: jax.Array, shape: tuple[int, ...]) -> Any:
    """He-initialized kernels, and zero biases."""
    params, (height, width, _) = [], shape
    for size in rad_networks.kernels(NETWORKS[network], (height, 1, width) if network == "rows" else shape):
        key, own = jax.random.split(key)
        params.append((jax.random.normal(own, size) * (2 / np.prod(size[:-1])) ** 0.5, jnp.zeros(size[-1])))
    return params


def predicted(network: str, memory: Any, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """E |G^ - G|^2 of each kernel on a batch; for no sampler N, with v = x^2."""
    _, inputs = run(network, params, [0.0] * len(params), x)
    kinds, found = [name.split()[0] for name, _ in NETWORKS[network] if name != "pool"], []
    outputs = lambda: [apply(kind, x, w) for kind, x, (w, _) in zip(kinds, inputs, params, strict=True)]
    zeros = [jnp.zeros(s.shape) for s in jax.eval_shape(outputs)]
    messages = jax.grad(lambda zeros: loss(network, params, x, y, zeros)[0])(zeros)
    for kind, v, (kernel, _), message in zip(kinds, inputs, params, messages, strict=True):
        flat = v.reshape(len(v), -1, v.shape[-1]) if kind == "conv" else v  # positions, each with all its channels
        if kind == "dense":
            flat = v.reshape(len(v), -1)
        spread = flat**2 if memory is None else memory.variance(flat, 1 if kind == "conv" else -1)
        _, pull = jax.vjp(functools.partial(apply, kind, spread.reshape(v.shape)), kernel)
        found.append(jnp.sum(pull(message**2)[0]))
    return jnp.stack(found)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(network=config.networks, steps=config.training_steps)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """For each layer S, |g|^2 and the coherence; for each sampler its bytes, and what is predicted and measured."""
    network = cell["network"]
    data = meta.data.load_bytes(config.data, or_digits=True)
    x = jnp.asarray((data.x_train - data.x_train.mean()) / data.x_train.std(), jnp.float32)
    y = jnp.asarray(data.y_train)
    key = jax.random.key(seed)
    params = parameters(network, key, x.shape[1:])
    optimizer, plain = optax.adam(1e-3), lambda params, x, y: loss(network, params, x, y)[0]

    def of_a_batch(params, key):
        chosen = jax.random.randint(key, (config.batch,), 0, len(x))
        return plain(params, x[chosen], y[chosen])

    step, state = networks.descent(optimizer, of_a_batch), optimizer.init(params)
    for i in range(cell["steps"]):
        params, state, _ = step(params, state, jax.random.fold_in(key, i))

    kernels = lambda gradient: [g for g, _ in gradient]
    square = lambda arrays: jnp.stack([jnp.sum(a**2) for a in arrays])

    @jax.jit
    def moments(x, y):
        each = jax.vmap(lambda x, y: kernels(jax.grad(plain)(params, x[None], y[None])))(x, y)
        return [g.sum(0) for g in each], square(each)

    chosen = jax.random.permutation(jax.random.fold_in(key, config.draws + cell["steps"]), len(x))[: config.batch]
    x, y = x[chosen], y[chosen]
    parts = [moments(x[i : i + 50], y[i : i + 50]) for i in range(0, len(x), 50)]
    sums, squares = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    whole = (square(sums) - squares) / (len(x) * (len(x) - 1))  # |g|^2 without bias
    exact = kernels(jax.jit(jax.grad(plain))(params, x, y))
    size = lambda f: sum(r.nbytes for r in rad.residuals(f, params, x, y))
    foreseen, of_samplers = jax.jit(predicted, static_argnums=(0, 1)), {}
    for name in config.samplers:
        memory = rad_networks.sampler(name)
        lean = ap.randomize(plain, memory, through=memory if name.startswith("rounding") else None)

        @jax.jit
        def error(key, lean=lean):
            found = kernels(jax.grad(lean, argnums=1)(key, params, x, y))
            return square([a - b for a, b in zip(found, exact, strict=True)])

        found = np.array([error(jax.random.fold_in(key, i)) for i in range(config.draws)], np.float64)
        of_samplers[name] = {"bytes": size(lambda *args, lean=lean: lean(key, *args)), "measured": found.mean(0)}
        of_samplers[name]["predicted"] = foreseen(network, memory, params, x, y)
        of_samplers[name]["standard_error"] = found.std(0, ddof=1) / len(found) ** 0.5
    once = foreseen(network, None, params, x, y) * config.batch**2
    result = {"data": data.description, "bytes": size(plain), "samplers": of_samplers}
    return result | {"S": squares / len(x), "coherence": squares / once, "whole": whole}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = []
    for cell, result in records:
        names = [name for name, _ in NETWORKS[cell["network"]] if name != "pool"]
        for (i, layer), (name, found) in itertools.product(enumerate(names), result["samplers"].items()):
            spread, measured = result["S"][i] - result["whole"][i], found["measured"][i]
            smaller = spread / (config.batch * found["bytes"] / result["bytes"])
            row = {**cell, "layer": f"{i + 1}, {layer}", "sampler": name, "coherence": result["coherence"][i]}
            row["predicted_over_measured"] = found["predicted"][i] / measured
            row["standard_error"] = found["standard_error"][i] / measured
            for kind in ("predicted", "measured"):
                row[f"{kind}_against_smaller_batch"] = (spread / config.batch + found[kind][i]) / smaller
            rows.append(row)
    figure, ((left, right),) = harness.panels(1, 2, (8.5, 4))
    networks = dict.fromkeys(row["network"] for row in rows)
    for (number, network), (marker, drawn) in itertools.product(enumerate(networks), (("o", True), ("x", False))):
        shown = [r for r in rows if r["network"] == network and r["sampler"].startswith("rounding") != drawn]
        measured = [r["measured_against_smaller_batch"] for r in shown]
        for ax, name in ((left, "predicted_against_smaller_batch"), (right, "coherence")):
            label = f"{network}, {'samples' if drawn else 'rounding'}"
            ax.plot([r[name] for r in shown], measured, f"C{number}{marker}", label=label)
    ends = [min(r["predicted_against_smaller_batch"] for r in rows) / 1.3, 4]
    left.plot(ends, ends, "k:", lw=1)
    left.set(xscale="log", yscale="log", xlabel="predicted", ylabel="squared error over a smaller batch's, measured")
    right.axhline(1, color="k", ls=":", lw=1)
    right.set(xscale="log", yscale="log", xlabel="coherence of the layer")
    left.legend()
    off = lambda r: abs(r["predicted_against_smaller_batch"] / r["measured_against_smaller_batch"] - 1)
    worst = {name: max(off(r) for r in rows if r["network"] == name) for name in networks}
    figures = {"data": harness.common(r for _, r in records), "worst_relative_error_of_a_predicted_ratio": worst}
    return harness.Report(figures, rows, f"{figures['data']}\n{harness.table(rows, *rows[0])}", figure)


if __name__ == "__main__":
    harness.main()
