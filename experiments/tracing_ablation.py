"""Whether influence says what a component is worth (DuSell, "Gradient tracing", section 1.3).

An RNN, an LSTM and a GRU read the same text side by side, and the average of their outputs predicts the next letter.
They have 8, 16 and 32 units, and which has how many differs from network to network, so that the order of their
influence is not the same in all. While they are trained, the paths by which the gradient reaches the shared embedding
are traced: a component's influence is the share of the embedding's elements whose path runs through it, averaged over
training. *Viterbi, a sentence* traces each piece of text by itself and takes the mean. Then components are removed:

* from the trained network, each by itself, and all in the order of influence, the most influential first;
* from the beginning, training the network without it: its loss at the end, and the steps that it needs to the loss that
  the whole network has after half of its training.

If influence is worth, the loss rises most, or the threshold comes latest, without the most influential. Reported is the
rank correlation (Spearman, over the three components, the mean over networks) of influence with each, with its standard
error; beside it that of the width, which needs no tracing. *At equal width* is the correlation over the networks in
which a component has one width, the mean over the three components and their widths: whether influence says more. Its
standard error is the jackknife's over networks.

    python -m experiments.tracing_ablation
    python -m experiments.tracing_ablation --preset paper

The text is Python's own documentation, `pydoc_data.topics`, in small letters.
"""

import functools
import itertools
import re
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.stats import rankdata

import apgrad as ap
from experiments import harness
from experiments.parts import networks

COMPONENTS = ("rnn", "lstm", "gru")
MEASURES = ("greedy", "viterbi", "gradient share", "viterbi, a sentence")
OUTCOMES = ("ablated", "retrained", "delayed")
LETTERS = " .abcdefghijklmnopqrstuvwxyz"


WIDTHS = (8, 16, 32)  # of the three components, in another order in each network
LENGTH, BATCH, EVERY = 20, 16, 25  # letters that are read at once, pieces of text in a step, steps between traces


class Config(harness.Config, least={"seeds": 2}):
    """Options of this experiment."""

    seeds: int = 2  # networks.
    steps: int = 100  # of Adam.


PAPER = Config(seeds=48, steps=600)


class Network(nn.Module):
    """Three recurrent networks side by side; mask (3,) says which are there."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, letters, mask):
        """Logits (batch, length, letters)."""
        x = nn.Embed(len(LETTERS), 8, name="embed")(letters)
        cells = (nn.SimpleCell, nn.OptimizedLSTMCell, nn.GRUCell)
        logits = []
        for cell, width, name, m in zip(cells, self.widths, COMPONENTS, mask, strict=True):
            h = nn.RNN(cell(width), name=name)(x)
            logits.append(nn.Dense(len(LETTERS), name=f"head_{name}")(h) * m)
        return sum(logits[1:], logits[0]) / jnp.sum(mask)


@functools.cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Numbers of letters of the text: what is trained on, and the last tenth, held out."""
    words = re.sub(r"[^a-z.]+", " ", " ".join(topics.values()).lower())
    letters = np.array([LETTERS.index(c) for c in words])
    train, held_out = np.split(letters, [len(letters) * 9 // 10])
    return train, held_out


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(network=range(config.seeds))


@functools.cache
def programs(steps: int, widths: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
    """Compiled once for all networks of equal widths: `init(key)`, `train(...)`, `retrain(...)` and `test(...)`."""
    network, everything, without = Network(widths), jnp.ones(3), 1.0 - jnp.eye(3)
    optimizer = optax.adam(1e-2)

    def loss(params, letters, mask):
        logits = jnp.asarray(network.apply(params, letters[:, :-1], mask))
        return optax.softmax_cross_entropy_with_integer_labels(logits, letters[:, 1:]).mean()

    def look(params, letters):
        of = lambda kind, letters: ap.tracing.influence(loss, kind, depth=2)(params, letters, everything)
        greedy, viterbi = (of(kind, letters) for kind in ("greedy", "viterbi"))
        one = lambda letters: of("viterbi", letters[None])
        column = next(i for i, p in enumerate(greedy.parameters) if "embed" in p)
        rows = jnp.array([greedy.components.index(f"Network/{name}") for name in COMPONENTS])
        each = jnp.mean(jax.vmap(one)(letters).share[:, rows, column], axis=0)
        return jnp.stack([*(x[rows, column] for x in (greedy.share, viterbi.share, viterbi.gradient)), each])

    descend, watch = networks.descent(optimizer, loss), ap.tracing.every(EVERY, look)

    def train(key, params, text, mask, traced):
        def step(carry, i):
            params, state = carry
            starts = jax.random.randint(jax.random.fold_in(key, i), (BATCH, 1), 0, len(text) - LENGTH - 1)
            letters = text[starts + jnp.arange(LENGTH + 1)]
            seen = watch(i, params, letters) if traced else jnp.zeros(())
            params, state, value = descend(params, state, letters, mask)
            return (params, state), (value, seen)

        (params, _), (losses, seen) = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))
        return params, losses, seen

    return (
        jax.jit(lambda key: network.init(key, jnp.zeros((1, 2), jnp.int32), everything)),
        jax.jit(lambda key, params, text: train(key, params, text, everything, True)),
        jax.jit(lambda key, params, text: jax.vmap(lambda m: train(key, params, text, m, False)[:2])(without)),
        jax.jit(jax.vmap(loss, in_axes=(None, None, 0))),
    )


def reached(losses: np.ndarray, threshold: float) -> int:
    """The first step from which the mean of 20 losses is at most the threshold; the number of steps where never."""
    size = min(20, len(losses))
    below = np.convolve(losses, np.ones(size) / size, "valid") <= threshold
    return int(np.argmax(below)) + size if below.any() else len(losses)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    orders = list(itertools.permutations(WIDTHS))
    own = orders[cell["network"] % len(orders)]  # each order in turn
    init, train, retrain, test = programs(config.steps, own)
    train_text, held_out = (jnp.asarray(part) for part in text())
    pieces = min(300, len(held_out) // (LENGTH + 1))
    held_out = held_out[: pieces * (LENGTH + 1)].reshape(pieces, LENGTH + 1)
    key = jax.random.key(seed)
    params = init(key)
    trained, during, seen = train(key, params, train_text)
    seen, during = np.asarray(seen)[::EVERY], np.asarray(during)
    influence = seen.mean(axis=0)
    order = np.argsort(-influence[1], kind="stable")
    masks = np.ones((8, 3), np.float32)  # all; without each; without one and two, in order and in opposite order
    masks[1:4] -= np.eye(3)
    for row, gone in zip(masks[4:], (order[:1], order[:2], order[::-1][:1], order[::-1][:2]), strict=True):
        row[gone] = 0
    losses = np.asarray(test(trained, held_out, masks)).tolist()
    others, others_during = retrain(key, params, train_text)
    retrained = jax.vmap(test, (0, None, 0))(others, held_out, masks[1:4, None])
    half = len(during) // 2
    threshold = float(during[max(0, half - 20) : half].mean())
    delayed = [reached(np.asarray(each), threshold) for each in others_during]
    result = {"widths": own, "influence": influence, "during": seen, "loss": losses[0], "ablated": losses[1:4]}
    result |= {"retrained": retrained[:, 0], "delayed": delayed}
    return result | {"in_order": [losses[0], *losses[4:6]], "in_opposite_order": [losses[0], *losses[6:8]]}


def correlation(a: Any, b: Any) -> float:
    """Spearman's: of the ranks. 0 where one does not vary."""
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1]) if np.ptp(a) > 0 and np.ptp(b) > 0 else 0.0


def at_equal_width(influence: np.ndarray, cost: np.ndarray, alike: Any) -> np.ndarray:
    """A value for each network, (networks,), whose mean is the mean correlation over components and widths of influence
    and cost (networks, components), and whose standard error is the jackknife's.

    A network has all three components, so that the correlations are not independent of each other: networks are.
    """

    def of(some):
        sets = [(some & own, c) for c, own in alike if sum(some & own) > 1]
        return np.mean([correlation(influence[own, c], cost[own, c]) for own, c in sets])

    left = np.array([of(some) for some in ~np.eye(len(cost), dtype=bool)])
    return of(True) + (len(cost) - 1) * (left.mean() - left)


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    results, rows, figures = [result for _, result in records], [], {}
    for (i, result), (c, name) in itertools.product(enumerate(results), enumerate(COMPONENTS)):
        row = {"network": i, "component": name, "units": result["widths"][c], "loss": result["loss"]}
        row |= {f"influence {m}": result["influence"][k][c] for k, m in enumerate(MEASURES)}
        row |= {f"{how} rise": result[how][c] - result["loss"] for how in ("ablated", "retrained")}
        rows.append(row | {"steps to the threshold": result["delayed"][c]})
    # What is measured, (networks, measures, components), and what a component's removal costs, (networks, components).
    measured = np.array([[*r["influence"], r["widths"]] for r in results])
    base = {how: 0 if how == "delayed" else np.array([[r["loss"]] for r in results]) for how in OUTCOMES}
    costs = {how: np.array([r[how] for r in results]) - base[how] for how in OUTCOMES}
    alike = [(c, measured[:, -1, c] == width) for c, width in itertools.product(range(3), WIDTHS)]
    for (k, m), (how, cost) in itertools.product(enumerate((*MEASURES, "width")), costs.items()):
        found: dict[str, Any] = {"": [correlation(*each) for each in zip(measured[:, k], cost, strict=True)]}
        if m != "width" and any(sum(own) > 2 for _, own in alike):
            found[" at equal width"] = at_equal_width(measured[:, k], cost, alike)
        for where, each in found.items():
            mean = {"value": float(np.mean(each)), "standard_error": harness.standard_error(each)}
            figures[f"correlation {m} {how}{where}"] = mean
    shown = [{"with the cost of removal": name, **found} for name, found in figures.items()]
    figures["orders of influence"] = len({tuple(np.argsort(r["influence"][1])) for r in results})
    table = harness.table(shown, *shown[0])
    of = lambda some: {"loss": some.mean(), "standard_error": harness.standard_error(some)}
    for name in ("in_order", "in_opposite_order"):
        losses = enumerate(np.array([r[name] for r in results]).T)
        figures[name] = [{"removed": i, **of(some)} for i, some in losses]
        table += f"\nremoved {name.replace('_', ' ')}\n{harness.table(figures[name], *figures[name][0])}"
    return harness.Report(figures, rows, table, _picture(results, figures))


def _picture(results, figures):
    figure, ((during, rises, order),) = harness.panels(1, 3, (13, 4))
    seen = np.array([r["during"] for r in results])  # (seeds, traces, measures, components)
    steps = np.arange(seen.shape[1]) * EVERY
    for c, name in enumerate(COMPONENTS):
        for k, style in ((0, ":"), (1, "-")):
            during.plot(steps, seen[:, :, k, c].mean(axis=0), style, color=f"C{c}", label=f"{name}, {MEASURES[k]}")
        influence = [r["influence"][1][c] for r in results]
        for how, mark in (("ablated", "o"), ("retrained", "x")):
            rises.plot(influence, [r[how][c] - r["loss"] for r in results], mark, color=f"C{c}", label=f"{name}, {how}")
    for name, style in (("in_order", "o-"), ("in_opposite_order", "s--")):
        losses, errors = (np.array([f[k] for f in figures[name]]) for k in ("loss", "standard_error"))
        order.errorbar(range(3), losses, 2 * errors, fmt=style, label=name.replace("_", " "))
    during.set(xlabel="training step", ylabel="share of the embedding's paths", title="Influence during training")
    rises.set(xlabel="influence (viterbi)", ylabel="rise of the held-out loss", title="o removed, x trained without")
    order.set(xlabel="components removed", ylabel="held-out loss", xticks=range(3))
    order.set_title("Removed by influence (viterbi)")
    for ax in (during, rises, order):
        ax.legend()
    return figure


if __name__ == "__main__":
    harness.main()
