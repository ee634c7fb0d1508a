"""What random memory costs a compiler: tracing and compiling over those of plain reverse mode, in one process.

One step of `value_and_grad` of an MLP, a ConvNet, a transformer of NNX modules (its blocks in a Python loop, and in a
scan), an RNN, a scan of checkpointed blocks, a deep MLP, and scans three deep beside one, plain and with
`ap.randomize`: with a budget of half of the bytes that reverse mode keeps, and with rounding to 4 bits. Of the
checkpointed blocks the inputs are rounded too, and of the deep ones, whose inputs are most of what plain checkpointing
keeps, the inputs alone; a budget does not choose a sampler for such inputs. The transformers have a width of 64, so
that starts of kernels make much of a step, and the wide one of 256. Seconds are those of the processor, so that what
else runs counts little; each program is traced and compiled anew. Seconds are those with JAX's own options; compiled
memory is with optimization barriers kept, as accelerators' compilers do.

    python -m experiments.benchmarks.compiling
    python -m experiments.benchmarks.compiling --preset paper
"""

import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import apgrad as ap
from apgrad import memory as rad
from experiments import harness
from experiments.parts.turns import BARRIERS, take_turns

MODELS = ("MLP", "ConvNet", "transformer, loop", "transformer, scan", "RNN", "checkpointed blocks")
MODELS += ("deep MLP", "one scan", "scans in scans", "wide transformer, loop", "deep checkpointed blocks")


METHODS = {"half": "half of the bytes", "rounding": "4 bits"}


class Config(harness.Config):
    """Options of this benchmark."""

    layers: int = 2  # of the MLP and of the transformers.
    deep: int = 4  # layers of the deep MLP, and half of the deep checkpointed blocks.
    steps: int = 32  # of the RNN.
    runs: int = 3  # of each compiled program.


PAPER = Config(layers=6, deep=100, steps=784, runs=7)


class Block(nnx.Module):
    """A transformer's block, of width d with 4 heads."""

    def __init__(self, d: int, rngs: nnx.Rngs):
        self.before, self.between = nnx.LayerNorm(d, rngs=rngs), nnx.LayerNorm(d, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, d, rngs=rngs, decode=False)
        self.up, self.down = nnx.Linear(d, 4 * d, rngs=rngs), nnx.Linear(4 * d, d, rngs=rngs)

    def __call__(self, x):
        """The same shape."""
        x = x + self.attention(self.before(x))
        return x + self.down(jax.nn.gelu(self.up(self.between(x))))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def cross_entropy(logits: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def same(f: Any) -> Any:
    """The function as it is, around a layer in place of `jax.checkpoint`."""
    return f


def mlp(layers: int, width: int, batch: int, around: Any = same) -> tuple[Any, Any, Any]:
    """`(weights, x) -> loss` of ReLU layers, weights and x."""
    layer = around(lambda x, w: jax.nn.relu(x @ w))

    def loss(weights, x):
        for w in weights:
            x = layer(x, w)
        return jnp.mean(x**2)

    return loss, [normal(i, width, width) / (width / 2) ** 0.5 for i in range(layers)], normal(99, batch, width)


def convnet(depth: int, side: int, around: Any = same) -> tuple[Any, Any, Any]:
    """`(parameters, x) -> loss` of twice as many convolutions as the depth, after which is a pool; parameters and x."""
    dimensions = ("NHWC", "HWIO", "NHWC")

    @around
    def convolution(x, k):
        return jax.nn.relu(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dimensions))

    def loss(parameters, x):
        kernels, w = parameters
        for i, k in enumerate(kernels):
            x = convolution(x, k)
            x = rad.max_pool(x, (2, 2)) if (i + 1) % depth == 0 else x
        return cross_entropy(x.reshape(len(x), -1) @ w)

    sizes = (3, *[16] * depth, *[32] * depth)
    kernels = [0.1 * normal(i, 3, 3, *pair) for i, pair in enumerate(itertools.pairwise(sizes))]
    return loss, (kernels, 0.01 * normal(50, 32 * (side // 4) ** 2, 10)), normal(99, side, side, side, 3)


def rnn(steps: int) -> tuple[Any, Any, Any]:
    """`(parameters, xs) -> loss` of an identity RNN, parameters and xs."""

    def loss(parameters, xs):
        w, u, out = parameters
        h = jnp.zeros((xs.shape[1], len(u)))
        h, _ = jax.lax.scan(lambda h, x: (jax.nn.relu(x @ w + h @ u), None), h, xs)
        return cross_entropy(h @ out)

    parameters = 0.1 * normal(0, 1, 100), 0.95 * jnp.eye(100), 0.1 * normal(2, 100, 10)
    return loss, parameters, normal(3, steps, 150, 1)


def scans(depth: int) -> tuple[Any, Any, Any]:
    """`(w, x) -> loss` of scans in scans, w and x."""

    def nested(depth, x, w):
        if depth == 0:
            return jnp.tanh(jnp.sin(x @ w) @ w)
        return jax.lax.scan(lambda x, _: (nested(depth - 1, x, w), None), x, length=4)[0]

    return lambda w, x: jnp.mean(nested(depth, x, w) ** 2), normal(0, 64, 64) / 8, normal(1, 64, 64)


def stacked(blocks: list[Block], scan: bool = False, around: Any = same) -> tuple[Any, Any]:
    """`(states, x) -> x` through all blocks, in a Python loop or in a scan, and their states."""
    split = [nnx.split(block) for block in blocks]
    graph, states = split[0][0], [state for _, state in split]
    apply = around(lambda state, x: nnx.merge(graph, state)(x))

    def run(states, x):
        if scan:
            return jax.lax.scan(lambda x, state: (apply(state, x), None), x, states)[0]
        for state in states:
            x = apply(state, x)
        return x

    return run, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states) if scan else states


def transformer(layers: int, scan: bool, around: Any, d: int = 64) -> tuple[Any, Any, Any]:
    """`(parameters, tokens) -> loss`, parameters and tokens."""
    rngs = nnx.Rngs(0)
    run, states = stacked([Block(d, rngs) for _ in range(layers)], scan, around)

    def loss(parameters, tokens):
        states, table = parameters
        return cross_entropy(run(states, table[tokens]) @ table.T)

    return loss, (states, 0.1 * normal(7, 64, d)), jax.random.randint(jax.random.key(3), (8, 32), 0, 64)


def model(config: Config, name: str) -> tuple[Any, Any, Any]:
    """`(parameters, x) -> loss`, parameters and x."""
    if name in ("MLP", "deep MLP"):
        return mlp(config.layers if name == "MLP" else config.deep, 256, 256)
    if name == "ConvNet":
        return convnet(2, 16)
    if name == "RNN":
        return rnn(config.steps)
    if name in ("one scan", "scans in scans"):
        return scans(1 if name == "one scan" else 3)
    around = jax.checkpoint if "checkpointed" in name else same
    layers = 2 * config.deep if "deep" in name else config.layers
    return transformer(layers, "loop" not in name, around, 256 if name.startswith("wide") else 64)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(model=MODELS)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    loss, *arguments = model(config, cell["model"])
    four, methods = rad.rounding(bits=4), {"plain": lambda key, *a: loss(*a)}
    if "checkpointed" in cell["model"]:
        methods["rounding"] = ap.randomize(loss, None if "deep" in cell["model"] else four, boundaries=four)
    else:
        kept = ap.memory_report(loss, *arguments).rows["reverse mode"].residual_bytes
        methods["rounding"] = ap.randomize(loss, four)
        methods["half"] = ap.randomize(loss, budget_bytes=kept // 2)
    found, programs = {}, {}
    for m, f in methods.items():
        jax.clear_caches()
        start = time.process_time()
        lowered = jax.jit(jax.value_and_grad(f, argnums=1)).lower(jax.random.key(seed), *arguments)
        programs[m] = lowered.compile()
        found[m] = {"trace_and_compile": time.process_time() - start}
        compiled: Any = lowered.compile(compiler_options=BARRIERS).memory_analysis()
        found[m]["temp_MB"] = compiled.temp_size_in_bytes / 1e6
    # Several in a row, as a training makes them: right after another program's step, a step takes longer.
    for m, steps in take_turns(programs, config.runs, 0.1, (jax.random.key(seed), *arguments)).items():
        found[m]["step"] = float(np.median(steps))
    return found


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, titles = [], {"trace_and_compile": "tracing and compiling", "step": "a step", "temp_MB": "scratch memory"}
    for cell, found in records:
        row = {**cell, **{f"plain_{name}": found["plain"][name] for name in titles}}
        for method, name in itertools.product(METHODS, titles):
            row[f"{method}_{name}_ratio"] = found[method][name] / row[f"plain_{name}"] if method in found else None
        rows.append(row)
    figure, (axes,) = harness.panels(1, 3, (13, 4.4))
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        over = {m: np.array([row[f"{m}_{name}_ratio"] for row in rows], float).tolist() for m in METHODS}
        harness.bars(ax, [row["model"] for row in rows], {METHODS[m]: ratios for m, ratios in over.items()})
        ax.axvline(1, color="k", lw=0.8)
        ax.set(xlabel=f"{title}, over plain's")
        ax.tick_params(labelleft=ax is axes[0])
    axes[0].axvline(3, color="k", lw=0.8, ls=":", label="three times")
    axes[0].legend(loc="lower right")
    return harness.Report({}, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
