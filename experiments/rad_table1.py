"""Table 1 of the RAD paper, measured: what reverse mode remembers, in place of a count by hand (Oktay et al., 2021).

Residual bytes of `jax.vjp` (see `ap.memory.residuals`) for 150 examples of the three networks: plain reverse mode,
`ap.randomize` with "different sample" for each fraction and with rounding, and `jax.checkpoint` of everything but its
inputs for the RNN in blocks of 28 steps. Weights, which the paper's totals have, are a column.

    python -m experiments.rad_table1
    python -m experiments.rad_table1 --preset paper

Sizes are those of the shapes: nothing is computed, and there is no standard error.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from apgrad import memory as rad
from experiments import harness
from experiments.parts import rad_networks

PAPER_TOTALS = {
    "convnet": {1.0: 23.08, 0.8: 19.19, 0.5: 12.37, 0.3: 7.82, 0.1: 3.28, 0.05: 2.14},
    "mlp": {1.0: 2.69, 0.8: 2.51, 0.5: 2.21, 0.3: 2.00, 0.1: 1.80, 0.05: 1.75},
    "rnn": {1.0: 47.93, 0.8: 39.98, 0.5: 25.85, 0.3: 16.43, 0.1: 7.01, 0.05: 4.66},
}


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      networks: of "mlp", "convnet", "rnn" and "transformer", which is not in the paper.
      fractions: of the entries that "different sample" keeps.
      batch: examples.
    """

    networks: tuple[str, ...] = rad_networks.NAMES
    fractions: tuple[float, ...] = (0.5, 0.1)
    batch: int = 150


PAPER = Config(fractions=(0.8, 0.5, 0.3, 0.1, 0.05))


def cells(config: Config) -> list[harness.Cell]:
    """Network by network."""
    named = ["baseline", *(f"different {f}" for f in config.fractions), "rounding 8", "rounding 4", "rounding 2"]
    return [
        {"network": network, "method": method}
        for network in config.networks
        for method in (*named, *(["checkpoint"] if network == "rnn" else []))
    ]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Bytes of residuals and of weights."""
    network, method = cell["network"], cell["method"]
    shape = rad_networks.SHAPES[network]
    params = jax.eval_shape(lambda k: rad_networks.parameters(network, k, shape), jax.random.key(0))
    images = jax.ShapeDtypeStruct((config.batch, *shape), jnp.uint8)
    labels = jax.ShapeDtypeStruct((config.batch,), jnp.int32)
    name, *rest = method.split()
    if name == "checkpoint":
        loss = _checkpointed_rnn
    else:
        loss = rad_networks.method_loss(network, method if name == "rounding" else name, float(rest[0]) if rest else 1)
    kept = rad.residuals(lambda p, x, y: loss(jax.random.key(seed), p, x, y), params, images, labels)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    return {
        "residual_bytes": sum(r.nbytes for r in kept),
        "weight_bytes": weights,
        "largest": [f"{r.name} {r.shape} {r.nbytes}" for r in sorted(kept, key=lambda r: -r.nbytes)[:5]],
    }


def _checkpointed_rnn(key, params, images, labels):
    """The RNN in blocks of 28 steps, each recomputed: about 2 sqrt(784) states."""
    del key
    (w, u, b), (v, c) = params
    x = rad_networks.standardized(images)
    pixels = x.reshape(len(x), 28, 28, 1).transpose(1, 2, 0, 3)

    @jax.checkpoint
    def block(h, pixels):
        return jax.lax.scan(lambda h, p: (jax.nn.relu(p @ w + h @ u + b), None), h, pixels)[0], None

    h, _ = jax.lax.scan(block, jnp.zeros((len(x), u.shape[0])), pixels)
    scores = jax.nn.log_softmax(h @ v + c)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Bytes an example, how many times fewer than reverse mode, and the paper's totals beside ours."""
    full = {c["network"]: r["residual_bytes"] for c, r in records if c["method"] == "baseline"}
    rows = []
    for cell, result in records:
        fraction = {"baseline": 1.0}.get(cell["method"]) or (
            float(cell["method"].split()[1]) if cell["method"].startswith("different") else None
        )
        paper = PAPER_TOTALS.get(cell["network"], {}).get(fraction) if fraction and config.batch == 150 else None
        rows.append(
            {
                "network": cell["network"],
                "method": cell["method"],
                "bytes_per_example": round(result["residual_bytes"] / config.batch, 1),
                "times_fewer": round(full[cell["network"]] / result["residual_bytes"], 2),
                "residual_MB": result["residual_bytes"] / 1e6,
                "with_weights_MB": (result["residual_bytes"] + result["weight_bytes"]) / 1e6,
                "paper_with_weights_MB": paper,
            }
        )
    lines = [f"{'':8} {'':15} bytes/example   fewer   MB with weights   paper"]
    lines += [
        f"{r['network']:8} {r['method']:15} {r['bytes_per_example']:13.0f} {r['times_fewer']:6.1f}x "
        f"{r['with_weights_MB']:16.2f} {r['paper_with_weights_MB'] or '':>7}"
        for r in rows
    ]
    figure = Figure(figsize=(4 * len(config.networks), 3.4), layout="constrained")
    for ax, network in zip(np.atleast_1d(figure.subplots(1, len(config.networks))), config.networks, strict=True):
        mine = [r for r in rows if r["network"] == network]
        ax.barh([r["method"] for r in mine], [r["residual_MB"] for r in mine], color="#1f77b4")
        ax.invert_yaxis()
        ax.set_title(network)
        ax.set_xlabel("residuals, MB")
    return harness.Report({}, rows, "\n".join(lines), figure)


if __name__ == "__main__":
    harness.main()
