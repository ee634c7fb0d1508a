"""Time and memory of tracing over those of jitted `jax.grad`, in one process.

    python -m experiments.benchmarks.tracing

Models: an MLP with three layers of 300 units on 150 examples of 784, an LSTM of 64 units over 50 steps of 32 examples,
a transformer block of width 64 with 4 heads on 16 sequences of 32. The two functions take turns of at least 50 ms; a
figure is the median of the ratios of neighbours, and its standard error comes from a bootstrap. Memory is the
compiler's: temporary buffers and outputs.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import apgrad as ap
from experiments import harness
from experiments.parts.turns import take_turns

KEY = jax.random.key(0)
MODELS = ("MLP-300", "LSTM-50", "transformer")
LOGARITHMS = ap.tracing.Semiring(
    "log max-product",
    lift=lambda w: (jnp.log(jnp.abs(w)),),
    times=lambda a, b: (a[0] + b[0],),
    plus=lambda a, b: (jnp.maximum(a[0], b[0]),),
    zero=(-jnp.inf,),
    one=(0.0,),
    kind="max",
)
SEMIRINGS: dict[str, Any] = {"max-product": ap.tracing.max_product(), "ordinary": ap.tracing.ordinary()}
SEMIRINGS["influence"] = None  # a function of its own, `ap.tracing.influence`
SEMIRINGS |= {"absolute sum": ap.tracing.absolute_sum(), "log max-product": LOGARITHMS}
SEMIRINGS |= {"entropy": ap.tracing.entropy(), "top 3": ap.tracing.top_k(3)}


class Config(harness.Config, least={"repeats": 3}):
    """Options of this experiment."""

    repeats: int = 5  # pairs of timings for each figure.
    scale: float = 0.5  # of batch sizes and widths, for a quick look 0.25.


class Transformer(nn.Module):
    """A transformer block on embedded words."""

    width: int

    @nn.compact
    def __call__(self, x):
        """Logits."""
        x = nn.Embed(50, self.width)(x)
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


def model(name: str, scale: float) -> tuple[Any, Any, int]:
    """A loss, its parameters, and their number."""
    size = lambda n: max(4, int(n * scale) // 4 * 4)
    if name == "MLP-300":
        hidden = [layer for _ in range(3) for layer in (nn.Dense(size(300)), nn.relu)]
        module = nn.Sequential([*hidden, nn.Dense(10)])
        x = jax.random.normal(KEY, (size(150) if scale < 1 else 150, 784))
    elif name == "LSTM-50":
        module = nn.Sequential([nn.RNN(nn.OptimizedLSTMCell(size(64))), lambda x: x[:, -1], nn.Dense(10)])
        x = jax.random.normal(KEY, (size(32), 50, size(64)))
    else:
        module, x = Transformer(size(64)), jax.random.randint(KEY, (size(16), 32), 0, 50)
    params = jax.jit(module.init)(KEY, x)
    labels = jnp.arange(x.shape[0]) % 10

    def loss(params):
        logits = jnp.asarray(module.apply(params, x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss, params, sum(p.size for p in jax.tree.leaves(params))


PAPER = Config(repeats=15, scale=1.0)


def cells(config: Config) -> list[harness.Cell]:
    return [{"model": m, "semiring": s} for s in SEMIRINGS for m in MODELS]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Neighbouring timings of `jax.grad` and of the semiring."""
    loss, params, count = model(cell["model"], config.scale)
    semiring = SEMIRINGS[cell["semiring"]]
    traced = ap.tracing.influence(loss, depth=2) if semiring is None else ap.semiring_grad(loss, semiring)
    compiled = {name: jax.jit(f).lower(params).compile() for name, f in (("grad", jax.grad(loss)), ("traced", traced))}
    seconds = take_turns(compiled, config.repeats, 0.05, arguments=(params,))
    sizes: list[Any] = [f.memory_analysis() for f in compiled.values()]
    memory = [int(size.temp_size_in_bytes + size.output_size_in_bytes) for size in sizes]
    return {"parameters": count, "memory": memory, "seconds": np.stack([*seconds.values()], axis=1).tolist()}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = []
    for i, (cell, result) in enumerate(records):
        seconds = np.array(result["seconds"])
        ratios = seconds[:, 1] / seconds[:, 0]
        draws = harness.bootstrap(ratios, lambda x: np.median(x, axis=-1), config.seed + i)
        row = {**cell, "parameters": result["parameters"], "grad_ms": float(1e3 * np.median(seconds[:, 0]))}
        row |= {"ratio": float(np.median(ratios)), "standard_error": float(np.std(draws))}
        rows.append(row | {"memory_ratio": result["memory"][1] / result["memory"][0]})
    figure, ((ax,),) = harness.panels(size=(9, 4))
    for i, m in enumerate(MODELS):
        chosen = [r for r in rows if r["model"] == m]
        x = np.arange(len(chosen)) + 0.25 * (i - 1)
        ax.bar(x, [r["ratio"] for r in chosen], 0.25, yerr=[2 * r["standard_error"] for r in chosen], label=m)
    ax.axhline(1, color="black", lw=0.8)
    ax.set_xticks(range(len(SEMIRINGS)), SEMIRINGS)
    ax.set(ylabel="time / time of jitted jax.grad", yscale="log", title="Bars: two standard errors")
    ax.legend()
    figures = {f"{r['model']} {r['semiring']}": r for r in rows}
    return harness.Report(figures, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
