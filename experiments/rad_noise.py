"""Gradient noise of each layer against memory (Oktay et al., 2021, Fig. 5): samplers, and smaller batches.

After some training steps, each method's gradient on a batch is compared with the full gradient, over the whole
training set: mean squared error a layer, over the squared norm of the full gradient there. The mini-batch's own noise
is in it, as in the paper; `own` is the part that the method adds to its batch's exact gradient, over the squared norm
of that. All methods have the same batches. Standard errors are over batches.

The paper's claim is about equal memory: `against_smaller_batch` is the squared error over that of a smaller (or larger)
batch of reverse mode with as many residual bytes. The latter is c / n of n examples, drawn with replacement, with c
that of the method's own batches, whose noise both have, so that it leaves the ratio. Below 1 the method is better than
the smaller batch.

    python -m experiments.rad_noise
    python -m experiments.rad_noise --preset paper
    python -m experiments.rad_noise --preset paper --network mlp --data mnist --training-steps 0 200 2000 --draws 50

The preset paper is the paper's ConvNet on all of CIFAR-10's training images (of those at hand: the header says how
many), batch 150 and, for RAD, larger ones. The paper does not say after how many steps, how many draws, nor which
fractions; ours are 0 and 500 steps of Adam at 1e-3, 20 draws, fractions .05 to .5. A layer's gradient is that of its
kernel and biases. The paper has "same" and "different" only, with the weights in the memory; memory here is measured,
the residual bytes of `jax.vjp`, without weights, but with the derivatives of relu.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from apgrad import meta
from experiments import harness
from experiments.parts import networks, rad_networks

ROUNDINGS = ("rounding 8", "rounding 4", "rounding 2")


class Config(harness.Config, least={"training_steps": 0}):
    """Options of this experiment."""

    network: str = "mlp"  # "mlp" or "convnet".
    data: str = "digits"  # "mnist", "cifar10" or "digits", the fall-back.
    fractions: tuple[float, ...] = (0.1,)  # of the entries kept.
    batch: int = 150  # examples, for all methods.
    # batches for rounding and for "different" and "stratified" with a tenth of the entries.
    larger: tuple[int, ...] = ()
    smaller: tuple[int, ...] = (16,)  # batches of reverse mode.
    training_steps: tuple[int, ...] = (0, 100)  # before the noise is measured; 0 for the initial network as well.
    draws: int = 20  # batches.


PARTIAL = True
SIZES: dict[str, Any] = {"larger": (300, 600), "smaller": (5, 10, 16, 20, 40, 75)}
PAPER = Config(network="convnet", data="cifar10", fractions=(0.05, 0.1, 0.3, 0.5), **SIZES, training_steps=(0, 500))


def cells(config: Config) -> list[harness.Cell]:
    """Each method at each time of the training; the longest trained first."""
    methods = [("baseline", n) for n in (config.batch, *config.smaller)]
    methods += [(f"{name} {f}", config.batch) for f in config.fractions for name in rad_networks.SAMPLERS]
    methods += [(name, config.batch) for name in ROUNDINGS]
    methods += [(m, n) for n in config.larger for m in ("baseline", "different 0.1", "stratified 0.1", *ROUNDINGS)]
    both = itertools.product(reversed(config.training_steps), methods)
    return [{"steps": steps, "method": method, "batch": batch} for steps, (method, batch) in both]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    data, x, y = _images(config.data)
    params, full = trained(config, cell["steps"])
    size, method = cell["batch"], cell["method"]
    noisy = jax.jit(jax.grad(rad_networks.method_loss(config.network, method), argnums=1))
    errors, own = [], []
    for i, batch in enumerate(_exact_of_batches(config, cell["steps"], size)):
        mine = batch
        if method != "baseline":
            chosen = _batch(config, size, i)
            mine = _layers(noisy(jax.random.fold_in(jax.random.key(seed), i), params, x[chosen], y[chosen]))
        for found, right in ((errors, full), (own, batch)):
            found.append([float(np.sum((a - b) ** 2) / np.sum(b**2)) for a, b in zip(mine, right, strict=True)])
    kept = rad_networks.residual_bytes(config.network, method, size, x.shape[1:])
    return {"errors": errors, "own": own, "residual_bytes": kept, "data": data}


@functools.cache
def _images(name: str) -> tuple[str, jax.Array, jax.Array]:
    data = meta.data.load_bytes(name, or_digits=True)
    return data.description, jnp.asarray(data.x_train), jnp.asarray(data.y_train)


@functools.cache
def _exact(network: str) -> Any:
    return jax.jit(jax.grad(rad_networks.loss(network)))


def _batch(config: Config, size: int, draw: int) -> jax.Array:
    """The examples of a draw: the same for every method."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed + 1), size), draw)
    return jax.random.randint(key, (size,), 0, len(_images(config.data)[1]))


@functools.cache
def _exact_of_batches(config: Config, steps: int, size: int) -> list[list[np.ndarray]]:
    """The exact gradient of each draw's batch, by layer."""
    _, x, y = _images(config.data)
    params, _ = trained(config, steps)
    chosen = [_batch(config, size, i) for i in range(config.draws)]
    return [_layers(_exact(config.network)(params, x[c], y[c])) for c in chosen]


@functools.cache
def trained(config: Config, steps: int) -> tuple[Any, list[np.ndarray]]:
    """Parameters after so many steps of Adam on exact gradients, and the full gradient by layer; kept in a file."""
    _, x, y = _images(config.data)
    params = rad_networks.parameters(config.network, jax.random.key(config.seed), x.shape[1:])
    optimizer, exact = optax.adam(1e-3), _exact(config.network)

    def loss(params, key):
        chosen = jax.random.randint(key, (config.batch,), 0, len(x))
        return rad_networks.loss(config.network)(params, x[chosen], y[chosen])

    step = networks.descent(optimizer, loss)
    checkpoint = harness.checkpoint(config, {"trained": steps})
    state = (params, optimizer.init(params), [np.zeros(0)] * len(params), np.zeros((), np.int32))
    params, moments, full, done = checkpoint.load(state)
    for i in range(int(done), steps):
        params, moments, _ = step(params, moments, jax.random.fold_in(jax.random.key(config.seed), i))
        if (i + 1) % 100 == 0:
            checkpoint.save((params, moments, full, np.int32(i + 1)))
    if full[0].size == 0:
        ends = [(i, min(i + 500, len(x))) for i in range(0, len(x), 500)]
        parts = [[(b - a) / len(x) * g for g in _layers(exact(params, x[a:b], y[a:b]))] for a, b in ends]
        full = [np.sum(p, 0) for p in zip(*parts, strict=True)]
        checkpoint.save((params, moments, full, np.int32(steps)))
    return params, full


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = []
    for steps in config.training_steps:
        mine = [(c, r) for c, r in records if c["steps"] == steps]
        plain = {c["batch"]: r for c, r in mine if c["method"] == "baseline"}
        for cell, result in mine:
            both = zip(*(np.transpose(result[k]) for k in ("errors", "own")), strict=True)
            for layer, (errors, own) in enumerate(both):
                row = {**cell, "layer": layer + 1, "residual_bytes": result["residual_bytes"]}
                row |= {"squared_error": errors.mean(), "squared_error_se": harness.standard_error(errors)}
                row |= {"own": own.mean(), "own_se": harness.standard_error(own), "against_smaller_batch": None}
                row["own_noise_over_signal"] = np.sqrt(own.mean())
                if same := plain.get(cell["batch"]):  # of n examples the squared error is c / n, the bytes in n
                    exact = np.mean(same["errors"], 0)[layer] * same["residual_bytes"]
                    row["against_smaller_batch"] = float(row["squared_error"] * row["residual_bytes"] / exact)
                rows.append(row)
    layers, end = sorted({r["layer"] for r in rows}), max(r["steps"] for r in rows)
    last = [r for r in rows if r["steps"] == end]
    columns = ("layer", "method", "batch", "residual_bytes", "squared_error", "against_smaller_batch")
    table = harness.table(sorted(last, key=lambda r: r["layer"]), *columns)
    figure, (axes,) = harness.panels(1, len(layers), (3.2 * len(layers), 3.4))
    names = list(dict.fromkeys(r["method"].split()[0] for r in last))
    for (ax, layer), (number, name) in itertools.product(zip(axes, layers, strict=True), enumerate(names)):
        found = [r for r in last if (r["layer"], r["method"].split()[0]) == (layer, name)]
        large = [r for r in found if r["batch"] > config.batch and name != "baseline"]
        for part, mark in (([r for r in found if r not in large], "o"), (large, "^")):
            part = sorted(part, key=lambda r: r["residual_bytes"])
            kept, *values = ([r[k] for r in part] for k in ("residual_bytes", "squared_error", "squared_error_se"))
            style = {"fmt": f"{mark}-" if name == "baseline" else mark, "color": f"C{number}"}
            ax.errorbar(np.array(kept) / 1e3, *values, label=name if mark == "o" else None, **style)
        ax.set(xscale="log", yscale="log", title=f"layer {layer}", xlabel="residuals, kB")
    axes[0].set_ylabel("squared error / squared gradient")
    axes[-1].legend()
    batch = f"batch {config.batch}; triangles: {' and '.join(map(str, config.larger))}"
    figure.suptitle(f"{config.network} after {end} steps; {batch}")
    data = harness.common(r for _, r in records)
    return harness.Report({"data": data}, rows, f"{data}\n{table}", figure)


def _layers(gradient: Any) -> list[np.ndarray]:
    return list(rad_networks.layers(gradient).values())


if __name__ == "__main__":
    harness.main()
