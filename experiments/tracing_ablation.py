"""Whether influence says what a component is worth (DuSell, "Gradient tracing", section 1.3).

An RNN, an LSTM and a GRU read the same text side by side, and the average of their states predicts the next letter.
While they are trained, the paths by which the gradient reaches the shared embedding are traced: a component's
influence is the share of the embedding's elements whose path runs through it, averaged over training. Then components
are removed:

* from the trained network, each by itself, and all in the order of influence, the most influential first;
* from the beginning, training the network without it.

If influence is worth, the loss rises most without the most influential. Reported is the rank
correlation (Spearman, over the three components, the mean over seeds) of influence with the rise of the held-out loss,
with its standard error.

    python -m experiments.tracing_ablation
    python -m experiments.tracing_ablation --preset paper

The text is made here: sentences of a small grammar whose verbs agree with a subject some words before.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from scipy.stats import rankdata

import apgrad as ap
from experiments import harness

COMPONENTS = ("rnn", "lstm", "gru")
MEASURES = ("greedy", "viterbi", "gradient share")
LETTERS = " .abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      seeds: networks.
      steps: of Adam.
      width: units of each component.
      length: letters that the network reads at once.
      batch: pieces of text in a step.
      every: steps from trace to trace.
    """

    seeds: int = 3
    steps: int = 150
    width: int = 16
    length: int = 20
    batch: int = 16
    every: int = 25

    def __post_init__(self):
        """Refuses what has no figure."""
        if self.seeds < 2 or min(self.steps, self.width, self.length, self.batch, self.every) < 1:
            raise ValueError("seeds must be at least 2, and all other numbers at least 1")


PAPER = Config(seeds=12, steps=400, width=16)


class Network(nn.Module):
    """Three recurrent networks side by side; mask (3,) says which are there."""

    width: int

    @nn.compact
    def __call__(self, letters, mask):
        """Logits (batch, length, letters)."""
        x = nn.Embed(len(LETTERS), 8, name="embed")(letters)
        cells = (nn.SimpleCell, nn.OptimizedLSTMCell, nn.GRUCell)
        states = [
            nn.RNN(cell(self.width), name=name)(x) * m for cell, name, m in zip(cells, COMPONENTS, mask, strict=True)
        ]
        return nn.Dense(len(LETTERS), name="head")(sum(states[1:], states[0]) / jnp.sum(mask))


def text(length: int, seed: int) -> np.ndarray:
    """Numbers of letters: sentences of a small grammar, joined."""
    rng = np.random.default_rng(seed)
    nouns, plurals = ["cat", "dog", "child", "bird", "king"], ["cats", "dogs", "children", "birds", "kings"]
    verbs, base = ["sees", "hears", "likes", "follows"], ["see", "hear", "like", "follow"]
    words: list[str] = []
    while sum(map(len, words)) + len(words) < length:
        many = rng.integers(2)
        subject = [["the", "a"][rng.integers(2)] if not many else "the"]
        subject += [["old", "small", "quick"][rng.integers(3)]] * int(rng.integers(2))
        subject.append((plurals if many else nouns)[rng.integers(5)])
        if rng.integers(3) == 0:
            subject += ["near", "the", (nouns + plurals)[rng.integers(10)]]
        words += [*subject, (base if many else verbs)[rng.integers(4)], "the", (nouns + plurals)[rng.integers(10)], "."]
    return np.array([LETTERS.index(c) for c in " ".join(words)[:length]])


def cells(config: Config) -> list[harness.Cell]:
    """A network a cell."""
    return [{"network": i} for i in range(config.seeds)]


@functools.cache
def programs(config: Config) -> tuple[Any, Any, Any, Any]:
    """Compiled once for all networks: `init(key)`, `train(key, params, letters)`, `retrain(...)` and `test(...)`."""
    network, everything, without = Network(config.width), jnp.ones(3), 1.0 - jnp.eye(3)
    optimizer = optax.adam(1e-2)

    def loss(params, letters, mask):
        logits = jnp.asarray(network.apply(params, letters[:, :-1], mask))
        return optax.softmax_cross_entropy_with_integer_labels(logits, letters[:, 1:]).mean()

    def look(params, letters):
        greedy, viterbi = (
            ap.tracing.influence(loss, kind, depth=2)(params, letters, everything) for kind in ("greedy", "viterbi")
        )
        column = next(i for i, p in enumerate(greedy.parameters) if "embed" in p)
        rows = jnp.array([greedy.components.index(f"Network/{name}") for name in COMPONENTS])
        return jnp.stack([greedy.share[rows, column], viterbi.share[rows, column], viterbi.gradient[rows, column]])

    watch = ap.tracing.every(config.every, look)

    def train(key, params, text, mask, traced):
        def step(carry, i):
            params, state = carry
            starts = jax.random.randint(jax.random.fold_in(key, i), (config.batch, 1), 0, len(text) - config.length - 1)
            letters = text[starts + jnp.arange(config.length + 1)]
            seen = watch(i, params, letters) if traced else jnp.zeros(())
            updates, state = optimizer.update(jax.grad(loss)(params, letters, mask), state)
            return (optax.apply_updates(params, updates), state), seen

        (params, _), seen = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(config.steps))
        return params, seen

    return (
        jax.jit(lambda key: network.init(key, jnp.zeros((1, 2), jnp.int32), everything)),
        jax.jit(lambda key, params, text: train(key, params, text, everything, True)),
        jax.jit(lambda key, params, text: jax.vmap(lambda m: train(key, params, text, m, False)[0])(without)),
        jax.jit(jax.vmap(loss, in_axes=(None, None, 0))),
    )


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Trains and traces a network, then takes it apart."""
    init, train, retrain, test = programs(dataclasses.replace(config, out=None))
    train_text, held_out = jnp.asarray(text(20_000, seed)), jnp.asarray(text(6_300, seed + 1))
    held_out = held_out[: len(held_out) // (config.length + 1) * (config.length + 1)].reshape(-1, config.length + 1)
    key = jax.random.key(seed)
    params = init(key)
    trained, seen = train(key, params, train_text)
    seen = np.asarray(seen)[:: config.every]
    influence = seen.mean(axis=0)
    order = np.argsort(-influence[1], kind="stable")
    masks = np.ones((8, 3), np.float32)  # all; without each; without one and two, in order and in opposite order
    masks[1:4] -= np.eye(3)
    for row, gone in zip(masks[4:], (order[:1], order[:2], order[::-1][:1], order[::-1][:2]), strict=True):
        row[gone] = 0
    losses = np.asarray(test(trained, held_out, masks)).tolist()
    others = retrain(key, params, train_text)
    pick = lambda i: jax.tree.map(lambda x: x[i], others)
    return {
        "influence": influence.tolist(),
        "during": seen.tolist(),
        "loss": losses[0],
        "ablated": losses[1:4],
        "retrained": [float(test(pick(i), held_out, masks)[1 + i]) for i in range(3)],
        "in_order": [losses[0], *losses[4:6]],
        "in_opposite_order": [losses[0], *losses[6:8]],
    }


def correlation(a: Any, b: Any) -> float:
    """Spearman's: of the ranks. 0 where one does not vary."""
    x, y = rankdata(a) - 2, rankdata(b) - 2
    size = np.sqrt(np.sum(x * x) * np.sum(y * y))
    return float(np.sum(x * y) / size) if size > 0 else 0.0


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Correlations over the seeds, and what the networks lose."""
    results = [result for _, result in records]
    rows, figures = [], {}
    for i, result in enumerate(results):
        for c, name in enumerate(COMPONENTS):
            row = {"network": i, "component": name, "loss": result["loss"]}
            row |= {f"influence {m}": result["influence"][k][c] for k, m in enumerate(MEASURES)}
            row |= {f"{how} rise": result[how][c] - result["loss"] for how in ("ablated", "retrained")}
            rows.append(row)
    lines = [f"Rank correlation of influence with the rise of the loss, {config.seeds} networks"]
    for k, m in enumerate(MEASURES):
        for how in ("ablated", "retrained"):
            found = np.array([correlation(r["influence"][k], r[how]) for r in results])
            error = float(np.std(found, ddof=1) / np.sqrt(len(found)))
            figures[f"correlation {m} {how}"] = {"value": float(found.mean()), "standard_error": error}
            lines.append(f"{m:16} {how:10} {found.mean():+.2f} ± {error:.2f}")
    for name in ("in_order", "in_opposite_order"):
        losses = np.array([r[name] for r in results])
        figures[name] = [
            {"removed": i, "loss": float(losses[:, i].mean()), "standard_error": _error(losses[:, i])} for i in range(3)
        ]
        text = " ".join(f"{f['loss']:.3f} ± {f['standard_error']:.3f}" for f in figures[name])
        lines.append(f"loss with 0, 1, 2 removed, {name.replace('_', ' ')}: {text}")
    return harness.Report(figures, rows, "\n".join(lines), _picture(config, results, figures))


def _error(values):
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _picture(config, results, figures):
    figure = Figure(figsize=(13, 4), layout="constrained")
    during, rises, order = figure.subplots(1, 3)
    seen = np.array([r["during"] for r in results])  # (seeds, traces, measures, components)
    steps = np.arange(seen.shape[1]) * config.every
    colours = ("#1f77b4", "#d95f02", "#2a8a3e")
    for c, (name, colour) in enumerate(zip(COMPONENTS, colours, strict=True)):
        for k, style in ((0, ":"), (1, "-")):
            label = f"{name}, {MEASURES[k]}"
            during.plot(steps, seen[:, :, k, c].mean(axis=0), style, color=colour, label=label)
        influence = [r["influence"][1][c] for r in results]
        rises.plot(influence, [r["ablated"][c] - r["loss"] for r in results], "o", color=colour, label=name)
        rises.plot(influence, [r["retrained"][c] - r["loss"] for r in results], "x", color=colour)
    during.set(xlabel="training step", ylabel="share of the embedding's paths", title="Influence during training")
    during.legend(fontsize=8)
    rises.set(xlabel="influence (viterbi)", ylabel="rise of the held-out loss", title="o removed, x trained without")
    rises.legend(fontsize=8)
    for name, style in (("in_order", "o-"), ("in_opposite_order", "s--")):
        found = figures[name]
        errors = [2 * f["standard_error"] for f in found]
        order.errorbar(range(3), [f["loss"] for f in found], errors, fmt=style, label=name.replace("_", " "))
    order.set(
        xlabel="components removed", ylabel="held-out loss", title="Removed by influence (viterbi)", xticks=range(3)
    )
    order.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    harness.main()
