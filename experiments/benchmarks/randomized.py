"""Step time and compiled memory of random memory, over plain reverse mode in the same process.

A network of equal ReLU layers, unrolled, as one step of `value_and_grad`: reverse mode, `jax.checkpoint` of each
layer and of blocks of about sqrt(layers), `ap.randomize` with the samplers and with rounding, and random memory inside
of three checkpointed blocks (a block's input stays exact, so fewer and longer blocks than of a checkpoint alone). And
the identity RNN under `scan`. Programs are compiled with optimization barriers kept, which XLA drops on the CPU by
default. Times alternate with the baseline's; the ratio is of medians, with the interquartile range of the single
ratios.

    python -m experiments.benchmarks.randomized
    python -m experiments.benchmarks.randomized --preset paper
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap
from apgrad import memory as rad
from experiments import harness
from experiments.parts import rad_networks
from experiments.parts.turns import BARRIERS, take_turns

RECURRENT = ("checkpoint blocks", "same", "stratified", "different", "rounding 4", "rounding 2")
RECURRENT = (*RECURRENT, "blocks + same", "blocks + rounding 4")
LAYERED = ("checkpoint each", *RECURRENT)


class Config(harness.Config):
    """Options of this benchmark."""

    layers: int = 6  # of the network.
    width: int = 128  # of each.
    batch: int = 256  # examples of the network.
    side: int = 8  # of the RNN's images: side^2 steps.
    rounds: int = 5  # of timing.


PAPER = Config(layers=17, width=300, batch=2048, side=28, rounds=11)


def layered(config: Config, method: str) -> Any:
    """`(key, weights, x) -> scalar`."""
    name = method.removeprefix("blocks + ")

    def run(weights, x):
        def layers(x, weights):
            for w in weights:
                x = jax.nn.relu(x @ w)
            return x

        block = {"checkpoint each": 1, "checkpoint blocks": round(config.layers**0.5)}.get(method, config.layers)
        block = -(-config.layers // 3) if method.startswith("blocks") else block
        for i in range(0, config.layers, block):
            part = jax.checkpoint(layers) if block < config.layers else layers
            x = part(x, weights[i : i + block])
        return jnp.mean(x**2)

    if name.startswith("rounding"):
        return ap.randomize(run, rad_networks.sampler(name))
    if name in rad_networks.SAMPLERS:
        return ap.randomize(run, rad_networks.sampler(name), through=None)
    return lambda key, *args: run(*args)


def recurrent(config: Config, method: str) -> Any:
    """`(key, parameters, images, labels) -> loss`."""
    if "blocks" not in method:
        return rad_networks.method_loss("rnn", method)
    if method == "checkpoint blocks":
        return lambda key, *args: rad_networks.checkpointed_rnn(*args)
    sampler = rad_networks.sampler(method.removeprefix("blocks + "))
    return lambda key, *args: ap.randomize(rad_networks.checkpointed_rnn, sampler)(key, *args)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(network=["layers"], method=LAYERED) + harness.grid(network=["rnn"], method=RECURRENT)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    key = jax.random.key(seed)
    if cell["network"] == "layers":
        draw = lambda key: (2 / config.width) ** 0.5 * jax.random.normal(key, (config.width, config.width))
        weights = [draw(k) for k in jax.random.split(key, config.layers)]
        arguments = (weights, jax.random.normal(key, (config.batch, config.width)))
        make = layered
    else:
        shape = (config.side, config.side, 1)
        images = jax.random.randint(key, (150, *shape), 0, 256).astype(jnp.uint8)
        arguments = (rad_networks.parameters("rnn", key, shape), images, jnp.zeros(150, jnp.int32))
        make = recurrent
    steps, memory = {}, {}
    for method in ("baseline", cell["method"]):
        gradient = jax.jit(jax.value_and_grad(make(config, method), argnums=1))
        steps[method] = gradient.lower(key, *arguments).compile(compiler_options=BARRIERS)
        analysis = steps[method].memory_analysis()
        loss = make(config, method)
        kept = rad.residuals(lambda *a, f=loss: f(jax.random.key(0), *a), *arguments)
        memory[method] = [int(analysis.temp_size_in_bytes), sum(r.nbytes for r in kept)]
    seconds = take_turns(steps, config.rounds, arguments=(key, *arguments))
    return {"seconds": {m: s.tolist() for m, s in seconds.items()}, "memory": memory}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = []
    for cell, result in records:
        both = [cell["method"], "baseline"]
        mine, base = (np.array(result["seconds"][m]) for m in both)
        (temp, residual), (temp_base, residual_base) = (np.array(result["memory"][m]) / 1e6 for m in both)
        low, high = np.percentile(mine / base, [25, 75])
        row = {**cell, "time_ratio": np.median(mine) / np.median(base), "time_ratio_low": low, "time_ratio_high": high}
        row |= {"temp_MB": temp, "temp_MB_reverse_mode": temp_base}
        rows.append(row | {"residual_MB": residual, "residual_MB_reverse_mode": residual_base})
    columns = [name for name in rows[0] if name not in ("time_ratio_low", "time_ratio_high")]
    figure, (axes,) = harness.panels(1, 2, (10, 4))
    for ax, network in zip(axes, ("layers", "rnn"), strict=True):
        mine = sorted((r for r in rows if r["network"] == network), key=lambda r: r["time_ratio"])
        memory = [r["temp_MB"] / r["temp_MB_reverse_mode"] for r in mine]
        values = {"step time": [r["time_ratio"] for r in mine], "temp bytes": memory}
        harness.bars(ax, [r["method"] for r in mine], values)
        ax.axvline(1, color="k", lw=0.8)
        ax.set(xlabel="over reverse mode's", title=network)
        ax.legend()
    return harness.Report({}, rows, harness.table(rows, *columns), figure)


if __name__ == "__main__":
    harness.main()
