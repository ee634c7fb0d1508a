"""Table 1 of the RAD paper, measured: what reverse mode remembers, in place of a count by hand (Oktay et al., 2021).

Residual bytes of `jax.vjp` (see `ap.memory.residuals`) for 150 examples of the three networks: plain reverse mode,
`ap.randomize` with "different sample" for each fraction and with rounding, and `jax.checkpoint` of everything but its
inputs for the RNN in blocks of 28 steps. Weights, which the paper's totals have, are a column.

    python -m experiments.rad_table1
    python -m experiments.rad_table1 --preset paper

Sizes are those of the shapes: nothing is computed, and there is no standard error. `paper_count_MB` is the paper's
count by hand (its appendix) for the same network: the entries of each linear layer's input that are kept, rounded up,
and the scores, at 32 bits; for a sample one bit for each entry of a ReLU, after the pool where one follows.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from apgrad import memory as rad
from experiments import harness
from experiments.parts import rad_networks
from experiments.parts.rad_networks import BATCH

PAPER_TOTALS = {
    "convnet": {1.0: 23.08, 0.8: 19.19, 0.5: 12.37, 0.3: 7.82, 0.1: 3.28, 0.05: 2.14},
    "mlp": {1.0: 2.69, 0.8: 2.51, 0.5: 2.21, 0.3: 2.00, 0.1: 1.80, 0.05: 1.75},
    "rnn": {1.0: 47.93, 0.8: 39.98, 0.5: 25.85, 0.3: 16.43, 0.1: 7.01, 0.05: 4.66},
}

# For an example: inputs of linear layers as (how many, of what size), and entries of ReLUs, as the paper counts them.
COUNTED = {
    "mlp": (((1, 784), (3, 300)), 3 * 300),
    "convnet": (((1, 3 * 32**2), (1, 16 * 32**2), (2, 32 * 16**2), (1, 32 * 8**2)), 16 * 32**2 + 2 * 32 * 16**2 + 2048),
    "rnn": (((784, 1), (784, 100), (1, 100)), 784 * 100),
}


def counted(network: str, fraction: float) -> float:
    """Bytes of an example by the paper's count.

    Example:
      >>> [counted("mlp", f) for f in (1.0, 0.1)]
      [6776.0, 828.5]
    """
    inputs, relus = COUNTED[network]
    kept = sum(n * math.ceil(round(fraction * size, 6)) for n, size in inputs)
    return 4.0 * (kept + 10) + (relus / 8 if fraction < 1 else 0)


class Config(harness.Config):
    """Options of this experiment."""

    # of "mlp", "convnet", "rnn" and "transformer", which is not in the paper.
    networks: tuple[str, ...] = rad_networks.NAMES
    fractions: tuple[float, ...] = (0.5, 0.1)  # of the entries that "different sample" keeps.


PAPER = Config(fractions=(0.8, 0.5, 0.3, 0.1, 0.05))


def cells(config: Config) -> list[harness.Cell]:
    named = ["baseline", *(f"different {f}" for f in config.fractions), "rounding 8", "rounding 4", "rounding 2"]
    more = lambda network: ["checkpoint"] if network == "rnn" else []
    return [cell for n in config.networks for cell in harness.grid(network=[n], method=[*named, *more(n)])]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    network, method = cell["network"], cell["method"]
    shape = rad_networks.SHAPES[network]
    params = jax.eval_shape(lambda k: rad_networks.parameters(network, k, shape), jax.random.key(0))
    images = jax.ShapeDtypeStruct((BATCH, *shape), jnp.uint8)
    labels = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    if method == "checkpoint":
        loss = lambda key, *args: rad_networks.checkpointed_rnn(*args)
    else:
        loss = rad_networks.method_loss(network, method)
    kept = rad.residuals(lambda p, x, y: loss(jax.random.key(seed), p, x, y), params, images, labels)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    largest = [f"{r.name} {r.shape} {r.nbytes}" for r in sorted(kept, key=lambda r: -r.nbytes)[:5]]
    return {"residual_bytes": sum(r.nbytes for r in kept), "weight_bytes": weights, "largest": largest}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    full = {c["network"]: r["residual_bytes"] for c, r in records if c["method"] == "baseline"}
    published = {"baseline": 1.0} | {f"different {f}": f for f in config.fractions}
    rows = []
    for cell, result in records:
        size = result["residual_bytes"]
        row = {**cell, "bytes_per_example": round(size / BATCH, 1)}
        row |= {"times_fewer": round(full[cell["network"]] / size, 2), "residual_MB": size / 1e6}
        row["with_weights_MB"] = (size + result["weight_bytes"]) / 1e6
        fraction = published.get(cell["method"]) if cell["network"] in COUNTED else None
        paper = None if fraction is None else PAPER_TOTALS[cell["network"]].get(fraction)
        count = None if fraction is None else counted(cell["network"], fraction) * BATCH + result["weight_bytes"]
        rows.append(row | {"paper_with_weights_MB": paper, "paper_count_MB": count and count / 1e6})
    figure, (axes,) = harness.panels(1, len(config.networks), (4 * len(config.networks), 3.4))
    for ax, network in zip(axes, config.networks, strict=True):
        mine = [r for r in rows if r["network"] == network][::-1]
        ax.barh([r["method"] for r in mine], [r["residual_MB"] for r in mine], color="#1f77b4")
        ax.set(title=network, xlabel="residuals, MB")
    return harness.Report({}, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
