"""Batch-entropy regularisation against the flat phase of meta-training (thesis, section 5.3, Figs 9 to 11).

    python -m experiments.mplp_batch_entropy                                   # digits, 64-16-10, one seed
    APGRAD_DATA=... python -m experiments.mplp_batch_entropy --preset paper    # MNIST, 784-32-20-10: days a cell

A rule on image classification: from a random start without and with the penalty of weight 2, and, without it, from
gradient descent, which the rule equals at first. The *flat phase* are the outer steps until the held-out loss after T
inner steps, a mean over the networks it is judged on, is first below 95 % of log 10, that of guessing; a seed that
gets there has started.

Along the training the rule learns the test images on networks that stay the same, and three numbers are recorded: the
held-out loss after T steps; the batch entropy of the last hidden layer (Fig. 9b); and the penalty (Fig. 10b), of which
entropies below .5 are penalized. The two are means over the inner steps. Adam and SGD at the best of their rates learn
the same (Fig. 11).

*The penalty* is the thesis's Algorithm 2. To the sum of the losses L_1, ..., L_K of a segment it adds

    2 (R_1 + ... + R_K) / K * L_K,        L_K held constant

where R_i is the penalty of the parameters before step i. The gradient is that of no function, since L_K is held
constant. `--penalty each` has the penalty of `meta.inner_problem` in its place, R_i L_i at each step, which is one.

The preset paper is the thesis's setting (Table 5): 784-32-20-10 relu, batches of 32, T = 100, K = 5, 150,000 outer
steps, k = 24, networks of 40 units, batch norm, a learned step size from .001, Adam with beta_1 = .99, gradients
clipped elementwise to 1, five seeds. It differs from the thesis in this:

* the thesis does not say Adam's rate; ours is 1e-4, the default of its code, whose Adam has no correction of its bias;
* the start as gradient descent is not in the thesis;
* the step size begins at .001, as the thesis says; its code has .01;
* batch entropy has Eq. 6's 2 pi e; its code has pi e, and the variance with ddof 1;
* its code has no probability below 1e-8 in the cross-entropy; ours has no bound;
* minibatches are drawn anew at each step; its code goes through the training images in one order;
* the thesis judges every 150 outer steps by the sum of the losses on the first T batches of the test set, ours every
  1,500 by the loss on 200 test images after T steps, on random ones; entropy and penalty are those of the 200 images;
* Algorithm 2 leaves out the last update of a segment, which acts on no loss there; ours makes it, as its code does, so
  that T updates are made, and a training starts at a random segment of its first task.

The report takes any of the cells. A training goes on where it was killed.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from apgrad import meta
from experiments import harness
from experiments.parts import meta_curves

PARTIAL = True
HELD_OUT = 200  # images
ARMS = {"random start": ("random", 0.0), "random start, batch entropy": ("random", 2.0)}
ARMS["started as gradient descent"] = ("gradient_descent", 0.0)
BASELINES = {"Adam": (optax.adam, (0.001, 0.003, 0.01, 0.03)), "SGD": (optax.sgd, (0.03, 0.1, 0.3, 1.0))}
RECORDED = ("held_out", "entropy", "penalty")


class Config(meta_curves.Config):
    """Options of this experiment."""

    data: str = "digits"  # of `meta.data.load`.
    seeds: int = 1  # of each start.
    steps: int = 300
    batch: int = 16  # examples of an inner step.
    learning_rate: float = 0.05
    message_size: int = 8  # k.
    hidden: int = 16
    widths: tuple[int, ...] = (16,)
    tasks: int = 1
    rate: float = 3e-4
    # "last" multiplies the mean penalty of a segment by its last loss, held constant; "each" the penalty of each step
    # by the step's loss.
    penalty: Literal["last", "each"] = "last"


THESIS: Any = meta_curves.THESIS | {"data": "mnist", "batch": 32, "message_size": 24}
PAPER = Config(seeds=5, steps=150_000, hidden=40, widths=(32, 20), judged=20, **THESIS)


def cells(config: Config) -> list[harness.Cell]:
    arms = [{"arm": arm, "seed": s} for s in range(config.seeds) for arm in ARMS]
    return harness.grid(optimizer=BASELINES) + arms


def task_family(config: Config, split: str) -> meta.Task:
    """Images to learn, of one split; held-out images are of the same split."""
    data = meta.data.load(config.data)
    if split == "test":
        data = data._replace(x_train=data.x_test, y_train=data.y_test)
    options: dict[str, Any] = {"activation": nnx.relu, "batch": config.batch, "deviation": None}
    return meta.images(data, hidden=config.widths, held_out=HELD_OUT, **options)


def new_rule(config: Config, cell: harness.Cell) -> meta_curves.Numbered:
    """The rule at its start, and the weight of Algorithm 2's penalty."""
    start, weight = ARMS[cell["arm"]]
    options = {"message_size": config.message_size, "start": start}
    rule = meta_curves.thesis_rule(config, task_family(config, "train"), cell["seed"], **options)
    return meta_curves.Numbered(rule, jnp.float32(weight if config.penalty == "last" else 0.0))


def outer_gradient(config: Config, each: float) -> meta.OuterGradient:
    """The gradient of the sum of the losses of K steps, and of the penalty, with respect to what `new_rule` makes.

    The number is the weight of the penalty "each"; that of the penalty "last" is the number of `new_rule`.
    """
    task = task_family(config, "train")
    learner = meta.message_passing(task.network)
    # The penalty's weight is for a mean over the K steps of a segment.
    entropy = each * config.length / config.segment
    plain = meta.inner_problem(task, learner, config.length, batch_entropy=entropy, **config.hint)

    def one(weight):
        last = config.penalty == "last"
        return meta.truncated(algorithm_2(plain, task, config.segment, weight) if last else plain, config.segment)

    return meta.batched(meta_curves.numbered(one), config.tasks)


class Penalized(NamedTuple):
    """The state of a problem with the penalty of Algorithm 2."""

    inner: meta.Inner  # the state of the problem without it
    penalty: jax.Array  # the sum of the penalties of the segment so far


def algorithm_2(problem: meta.Problem, task: meta.Task, segment: int, weight: float | jax.Array) -> meta.Problem:
    """The problem, with the penalty of the thesis's Algorithm 2 at the end of each segment; see the top of the file."""

    def init(theta, key):
        return Penalized(problem.init(theta, key), jnp.zeros((), float))

    def step(theta, state):
        inner = state.inner
        x, _ = task.batch(inner.task, jax.random.fold_in(inner.key, inner.t))  # as the problem draws it
        total = state.penalty + meta.entropy_penalty(task.network, inner.params, x)
        inner, loss = problem.step(theta, inner)
        ends = inner.t % segment == 0
        extra = jnp.where(ends, weight * total / segment * jax.lax.stop_gradient(loss), 0.0)
        return Penalized(inner, jnp.where(ends, 0.0, total)), loss + extra

    return meta.Problem(init, step, lambda theta, state: problem.final(theta, state.inner), problem.length)


def recorder(config: Config) -> Any:
    """`rule -> (held-out loss, entropy, penalty)` before and after each step, means over networks that stay the same.

    An array (T + 1, 3) float64.
    """
    task = task_family(config, "test")
    learner = meta.message_passing(task.network)

    def measure(params, batch):
        entropy = meta.batch_entropy(task.network, params, batch[0])[-1]
        penalty = meta.entropy_penalty(task.network, params, batch[0])
        return jnp.stack([task.loss(params, batch), entropy, penalty])

    evaluate = meta_curves.evaluation(task, learner, 0, config.judged, config.length, measure)
    return lambda rule: evaluate(rule).mean(axis=0)


@functools.lru_cache(maxsize=1)
def _shared(config, each):
    """What all starts have in common, so that it is compiled once for each structure of a rule."""
    return outer_gradient(config, each), meta_curves.thesis_adam(config.rate), recorder(config)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    if "optimizer" in cell:
        task = task_family(config, "test")
        values, sweep = meta_curves.tuned(task, BASELINES[cell["optimizer"]], 0, config.judged, config.length)
        return {"inner": values.mean(axis=0).tolist(), **sweep}
    outer, optimizer, record = _shared(config, ARMS[cell["arm"]][1] if config.penalty == "each" else 0.0)

    def judge(theta):
        """The held-out loss after T steps, and the means of entropy and penalty over the steps."""
        values = record(theta.rule)
        return np.array([values[-1, 0], *values[:, 1:].mean(axis=0)])

    rule = new_rule(config, cell)
    found = meta_curves.judged_cell(config, cell, outer, optimizer, rule, judge, cell["seed"])
    recorded = {name: column.tolist() for name, column in zip(RECORDED, found.judgements.T, strict=True)}
    return recorded | {"inner": record(found.best.rule)[:, 0].tolist(), "skipped": found.skipped}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, lines, flat, figures = [], {}, {}, {}
    for cell, result in records:
        if "optimizer" in cell:
            figures[cell["optimizer"]] = {"held_out": result["inner"][-1], **{k: result[k] for k in ("rate", "sweep")}}
            continue
        losses = result["held_out"]
        below = np.flatnonzero(np.array(losses) < 0.95 * np.log(10))
        phase = config.steps * int(below[0]) // config.points if len(below) else None
        last = {name: result[name][-1] for name in RECORDED[1:]}
        rows.append({**cell, "last": losses[-1], **last, "flat_phase": phase, "skipped": result["skipped"]})
        for name in RECORDED:  # a curve's points end its stretches of steps
            lines.setdefault(name, {}).setdefault(cell["arm"], []).append(result[name][1:])
        flat.setdefault(cell["arm"], []).append(phase)
    for arm, phases in flat.items():
        begun = sum(p is not None for p in phases)
        last = float(np.mean([seed[-1] for seed in lines["held_out"][arm]]))
        figures[arm] = {"seeds_started": begun, "of": len(phases), "flat_phase": phases, "held_out": last}
    shown = [{"rule": name, **found} for name, found in figures.items()]
    table = harness.table(shown, "rule", "seeds_started", "of", "flat_phase", "held_out")
    return harness.Report(figures, rows, table, _figure(config, records, lines))


def _figure(config, records, lines):
    titles = (f"held-out loss after {config.length} steps", "batch entropy of the last hidden layer", "penalty")
    curves = {title: lines[name] for title, name in zip(titles, RECORDED, strict=True) if name in lines}
    figure = meta_curves.curve_figure(curves, config.steps, config.data, inner=True)
    for ax in figure.axes[1:3]:
        ax.set(yscale="linear", ylabel="")
    last = figure.axes[3]
    colors = {label: f"C{i}" for i, label in enumerate([*ARMS, *BASELINES])}
    for cell, result in records:
        label = cell.get("optimizer", cell.get("arm", ""))
        new = label not in [line.get_label() for line in last.lines]
        last.plot(result["inner"], color=colors[label], label=label if new else None, linewidth=1)
    last.set(xlabel="inner step", ylabel="held-out loss", title="the best rules, test images")
    last.legend()
    return figure


if __name__ == "__main__":
    harness.main()
