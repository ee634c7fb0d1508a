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

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import apgrad as ap
from apgrad import memory as rad
from experiments import harness
from experiments.parts import rad_networks
from experiments.parts.turns import take_turns

RECURRENT = (
    "checkpoint blocks",
    "same",
    "stratified",
    "different",
    "rounding 4",
    "rounding 2",
    "blocks + same",
    "blocks + rounding 4",
)
LAYERED = ("checkpoint each", *RECURRENT)


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this benchmark.

    Attributes:
      layers: of the network.
      width: of each.
      batch: examples of the network.
      side: of the RNN's images: side^2 steps.
      rounds: of timing.
    """

    layers: int = 6
    width: int = 128
    batch: int = 256
    side: int = 8
    rounds: int = 5


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
        return ap.randomize(run, rad.rounding(bits=int(name.split()[1])))
    if name in rad_networks.methods(0.1):
        return ap.randomize(run, rad_networks.methods(0.1)[name], through=None)
    return lambda key, *args: run(*args)


def recurrent(config: Config, method: str) -> Any:
    """`(key, parameters, images, labels) -> loss`."""
    if method in rad_networks.methods(0.1) or method == "baseline":
        return rad_networks.method_loss("rnn", method, 0.1)
    if method.startswith("rounding"):
        return rad_networks.method_loss("rnn", method, 0.1)

    def blocks(params, images, labels):
        (w, u, b), (v, c) = params
        x = rad_networks.standardized(images)
        pixels = x.reshape(len(x), config.side, config.side, 1).transpose(1, 2, 0, 3)

        @jax.checkpoint
        def block(h, pixels):
            return jax.lax.scan(lambda h, p: (jax.nn.relu(p @ w + h @ u + b), None), h, pixels)[0], None

        h, _ = jax.lax.scan(block, jnp.zeros((len(x), u.shape[0])), pixels)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h @ v + c), labels[:, None], 1))

    if method == "checkpoint blocks":
        return lambda key, params, images, labels: blocks(params, images, labels)
    sampler = rad.same_sample(0.1) if method.endswith("same") else rad.rounding(bits=4)
    return lambda key, *args: ap.randomize(blocks, sampler)(key, *args)


def cells(config: Config) -> list[harness.Cell]:
    """Both networks."""
    both = [("layers", m) for m in LAYERED] + [("rnn", m) for m in RECURRENT]
    return [{"network": network, "method": method} for network, method in both]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Times of the method and of the baseline, in turns, and their memory."""
    key = jax.random.key(seed)
    if cell["network"] == "layers":
        scale = (2 / config.width) ** 0.5
        weights = [
            scale * jax.random.normal(k, (config.width, config.width)) for k in jax.random.split(key, config.layers)
        ]
        arguments = (weights, jax.random.normal(key, (config.batch, config.width)))
        make = layered
    else:
        shape = (config.side, config.side, 1)
        images = jax.random.randint(key, (150, *shape), 0, 256).astype(jnp.uint8)
        arguments = (rad_networks.parameters("rnn", key, shape), images, jnp.zeros(150, jnp.int32))
        make = recurrent
    options: Any = {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else None
    steps, memory = {}, {}
    for method in ("baseline", cell["method"]):
        gradient = jax.jit(jax.value_and_grad(make(config, method), argnums=1))
        steps[method] = gradient.lower(key, *arguments).compile(compiler_options=options)
        analysis = steps[method].memory_analysis()
        loss = make(config, method)
        kept = rad.residuals(lambda *a, f=loss: f(jax.random.key(0), *a), *arguments)
        memory[method] = [int(analysis.temp_size_in_bytes), sum(r.nbytes for r in kept)]
    seconds = take_turns({m: lambda step=step: step(key, *arguments) for m, step in steps.items()}, config.rounds)
    return {"seconds": {m: s.tolist() for m, s in seconds.items()}, "memory": memory}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Ratios of time; megabytes."""
    rows = []
    for cell, result in records:
        mine, base = (np.array(result["seconds"][m]) for m in (cell["method"], "baseline"))
        low, high = np.percentile(mine / base, [25, 75])
        rows.append(
            {
                **cell,
                "time_ratio": float(np.median(mine) / np.median(base)),
                "time_ratio_low": float(low),
                "time_ratio_high": float(high),
                "temp_MB": result["memory"][cell["method"]][0] / 1e6,
                "temp_MB_reverse_mode": result["memory"]["baseline"][0] / 1e6,
                "residual_MB": result["memory"][cell["method"]][1] / 1e6,
                "residual_MB_reverse_mode": result["memory"]["baseline"][1] / 1e6,
            }
        )
    lines = [f"{'':28}  time over reverse mode   temp MB (reverse mode)   residual MB (reverse mode)"]
    lines += [
        f"{r['network']:7} {r['method']:20} {r['time_ratio']:7.2f} "
        f"[{r['time_ratio_low']:.2f}, {r['time_ratio_high']:.2f}] "
        f"{r['temp_MB']:12.2f} ({r['temp_MB_reverse_mode']:.2f}) {r['residual_MB']:15.2f} "
        f"({r['residual_MB_reverse_mode']:.2f})"
        for r in rows
    ]
    figure = Figure(figsize=(10, 4), layout="constrained")
    for ax, network in zip(figure.subplots(1, 2), ("layers", "rnn"), strict=True):
        mine = sorted((r for r in rows if r["network"] == network), key=lambda r: r["time_ratio"])
        memory = [r["temp_MB"] / r["temp_MB_reverse_mode"] for r in mine]
        ax.barh([r["method"] for r in mine], [r["time_ratio"] for r in mine], 0.35, align="edge", label="step time")
        ax.barh([r["method"] for r in mine], memory, -0.35, align="edge", label="temp bytes")
        ax.axvline(1, color="k", lw=0.8)
        ax.set(xlabel="over reverse mode's", title=network)
        ax.legend(frameon=False)
    return harness.Report({}, rows, "\n".join(lines), figure)


if __name__ == "__main__":
    harness.main()
