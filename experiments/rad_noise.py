"""Gradient noise of each layer against memory (Oktay et al., 2021, Fig. 5): samplers, and smaller batches.

After some training steps, each method's gradient on a batch is compared with the full gradient, over the whole
training set: mean squared error a layer, over the squared norm of the full gradient there. The mini-batch's own noise
is in it, as in the paper; `own` is the part that the method adds to its batch's exact gradient. Standard errors are
over batches. Rounding's noise is measured at other batch sizes too, beside that of a batch of that size alone (the
paper's baseline of the same memory).

    python -m experiments.rad_noise
    python -m experiments.rad_noise --preset paper
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from apgrad import memory as rad
from experiments import harness, images, rad_networks

METHODS = (
    "baseline",
    "same",
    "different",
    "distinct",
    "stratified",
    "project",
    "heavy",
    "rounding 8",
    "rounding 4",
    "rounding 2",
)
AT_OTHER_BATCHES = ("baseline", "rounding 4", "rounding 2")


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      network: "mlp" or "convnet".
      data: "mnist", "cifar10" or "digits", the fall-back.
      fraction: of the entries kept.
      batches: numbers of examples; all methods at the first, exact gradients and rounding at the others too.
      training_steps: before the noise is measured; 0 for the initial network as well.
      draws: batches.
      examples: of the training set.
    """

    network: str = "mlp"
    data: str = "digits"
    fraction: float = 0.1
    batches: tuple[int, ...] = (150, 22)
    training_steps: tuple[int, ...] = (0, 100)
    draws: int = 20
    examples: int = 1500


PAPER = Config(data="mnist", batches=(150, 22, 600), training_steps=(0, 200, 2000), draws=50, examples=6000)


def cells(config: Config) -> list[harness.Cell]:
    """Each method at each time of the training."""
    return [
        {"steps": steps, "method": method, "batch": batch}
        for steps in config.training_steps
        for batch in config.batches
        for method in (METHODS if batch == config.batches[0] else AT_OTHER_BATCHES)
    ]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Squared errors of each layer's gradient, for each draw."""
    data = images.load(config.data)
    x, y = jnp.asarray(data.train[: config.examples]), jnp.asarray(data.train_labels[: config.examples])
    params = trained(config, cell["steps"])
    exact = _exact(config.network)
    loss = rad_networks.method_loss(config.network, cell["method"], config.fraction)
    size = cell["batch"]
    noisy = jax.jit(jax.grad(loss, argnums=1))
    parts = [exact(params, a, b) for a, b in zip(_chunks(x), _chunks(y), strict=True)]
    full = [sum(p) / len(parts) for p in zip(*map(_layers, parts), strict=True)]
    errors, own = [], []
    for key in jax.random.split(jax.random.key(seed), config.draws):
        chosen = jax.random.randint(key, (size,), 0, len(x))
        mine = _layers(noisy(key, params, x[chosen], y[chosen]))
        batch = _layers(exact(params, x[chosen], y[chosen]))
        errors.append([float(np.sum((a - b) ** 2) / np.sum(b**2)) for a, b in zip(mine, full, strict=True)])
        own.append([float(np.sum((a - b) ** 2) / np.sum(b**2)) for a, b in zip(mine, batch, strict=True)])
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, x[:size], y[:size]))
    kept = rad.residuals(lambda p, x, y: loss(jax.random.key(0), p, x, y), *structs)
    return {"errors": errors, "own": own, "residual_bytes": sum(r.nbytes for r in kept), "data": data.name}


@functools.cache
def _exact(network: str) -> Any:
    return jax.jit(jax.grad(rad_networks.loss(network)))


@functools.cache
def trained(config: Config, steps: int) -> Any:
    """Parameters after so many steps of Adam on exact gradients: the same for every method."""
    data = images.load(config.data)
    x, y = jnp.asarray(data.train[: config.examples]), jnp.asarray(data.train_labels[: config.examples])
    params = rad_networks.parameters(config.network, jax.random.key(config.seed), x.shape[1:])
    optimizer = optax.adam(1e-3)
    loss = rad_networks.loss(config.network)

    @jax.jit
    def step(params, state, key):
        chosen = jax.random.randint(key, (config.batches[0],), 0, len(x))
        gradient = jax.grad(loss)(params, x[chosen], y[chosen])
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for i in range(steps):
        params, state = step(params, state, jax.random.fold_in(jax.random.key(config.seed), i))
    return params


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Noise over signal, in squares, by layer; and in all of memory."""
    rows = []
    for cell, result in records:
        errors, own = np.array(result["errors"]), np.array(result["own"])
        for layer in range(errors.shape[1]):
            rows.append(
                {
                    "steps": cell["steps"],
                    "method": cell["method"],
                    "batch": cell["batch"],
                    "layer": layer + 1,
                    "residual_bytes": result["residual_bytes"],
                    "squared_error": errors[:, layer].mean(),
                    "squared_error_se": errors[:, layer].std(ddof=1) / np.sqrt(len(errors)),
                    "own": own[:, layer].mean(),
                    "own_se": own[:, layer].std(ddof=1) / np.sqrt(len(own)),
                    "own_noise_over_signal": float(np.sqrt(own[:, layer].mean())),
                }
            )
    layers = sorted({r["layer"] for r in rows})
    end, main = config.training_steps[-1], config.batches[0]
    last = [r for r in rows if r["steps"] == end]
    lines = [f"squared error over signal after {end} steps ({records[0][1]['data']}), by layer"]
    for method, batch in dict.fromkeys((r["method"], r["batch"]) for r in last):
        mine = [r for r in last if (r["method"], r["batch"]) == (method, batch)]
        values = " ".join(f"{r['squared_error']:8.3f}±{r['squared_error_se']:.3f}" for r in mine)
        lines.append(f"{method:11} {batch:4} {mine[0]['residual_bytes'] / 1e3:9.1f} kB {values}")
    lines.append("own noise over signal, by layer")
    for r in (r for r in rows if r["layer"] == 1 and r["method"].startswith("rounding")):
        mine = [q for q in rows if all(q[n] == r[n] for n in ("method", "batch", "steps"))]
        values = " ".join(f"{100 * q['own_noise_over_signal']:6.1f} %" for q in mine)
        lines.append(f"{r['method']:11} batch {r['batch']:4} step {r['steps']:5} {values}")
    figure = Figure(figsize=(3.2 * len(layers), 6.6), layout="constrained")
    upper, lower = figure.subplots(2, len(layers), sharey="row", squeeze=False)
    for ax, below, layer in zip(upper, lower, layers, strict=True):
        for number, method in enumerate(METHODS):
            found = [r for r in last if r["layer"] == layer and r["method"] == method]
            color = f"C{number}" if number < 10 else "k"
            ax.errorbar(
                [r["residual_bytes"] / 1e3 for r in found],
                [r["squared_error"] for r in found],
                [r["squared_error_se"] for r in found],
                fmt="o",
                color=color,
                label=method,
            )
            if method == "baseline":
                continue
            for batch in config.batches:
                along = [r for r in rows if (r["layer"], r["method"], r["batch"]) == (layer, method, batch)]
                noise = [r["own_noise_over_signal"] for r in along]
                style = "o-" if batch == main else "o--"
                below.plot([r["steps"] for r in along], noise, style, color=color, alpha=1 if batch == main else 0.4)
        ax.set(xscale="log", yscale="log", title=f"layer {layer}", xlabel="residuals, kB")
        below.set(xscale="symlog", yscale="log", xlabel="training step")
    lower[0].set_ylim(bottom=1e-4)  # below is rounding of floats
    upper[0].set_ylabel("squared error / squared gradient")
    lower[0].set_ylabel(f"own noise / signal (dashed: batches but {main})")
    upper[-1].legend(fontsize=6, frameon=False)
    return harness.Report({"data": records[0][1]["data"]}, rows, "\n".join(lines), figure)


def _chunks(a: jax.Array, size: int = 500) -> list[jax.Array]:
    return [a[i : i + size] for i in range(0, len(a) - size + 1, size)]


def _layers(gradient: Any) -> list[np.ndarray]:
    return list(rad_networks.layers(gradient).values())


if __name__ == "__main__":
    harness.main()
