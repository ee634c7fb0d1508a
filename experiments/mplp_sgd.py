"""What a rule learns with messages of one number: its functions beside gradient descent's (thesis, 5.1, Figs 3 to 7,
12, 13).

    python -m experiments.mplp_sgd                   # 1-20-1, 200 outer steps of T=20: only g_loss has its shape
    python -m experiments.mplp_sgd --preset paper    # T=200, K=10, 300,000 outer steps: many hours of one core

A random rule without batch norm and without a learned step size learns to learn sin(x + p). Along the training it is
judged on fixed networks and tasks, by the thesis's outer loss: the sum over inner steps of the loss before the step
(its code leaves out the first step's). Of the rules so judged the best is looked at. Each of its four functions is
drawn, over the range from the 1st to the 99th percentile of the inputs that it sees while it learns some tasks, beside
the function with which message passing is gradient descent; the two are correlated over that grid. A negative
correlation of two neighbours is the thesis's finding too: messages may be the gradient's negative. An example shows a
network's output while it learns.

The preset paper is the thesis's setting (Table 3): 1-20-20-1 relu, p in [0, pi], x in [-5, 5], batches of 32, T = 200,
K = 10, 300,000 outer steps, networks of 80 units, updates times .001, a loss node that sees prediction and target
alone, Adam with beta_1 = .99, gradients clipped elementwise to 1, judged on 10 networks and tasks. It differs in this:

* the thesis does not say Adam's rate; ours is 1e-4, the default of its code, whose Adam has no correction of its bias;
* the thesis looks at a rule chosen at random between outer steps 100,000 and 130,000, "relatively good" ones;
* rules are judged by the loss on a grid of the domain, the thesis's by the loss on the minibatches;
* segments end with an update, as in its code, not in its Algorithm 2; a training starts at a random segment.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from apgrad import meta, mplp
from experiments import harness
from experiments.parts import meta_curves

# Name, the network's key, labels of the two inputs, gradient descent's function.
SURFACES = {
    "f": ("dense/f", ("m", "x"), lambda m, x: m * x),
    "g_lin": ("dense/g", ("m", "w"), lambda m, w: m * w),
    "g_relu": ("activation/g", ("m", "z"), lambda m, z: m * (z > 0)),
    "g_loss": ("squared_error/g", ("p", "y"), lambda p, y: p - y),
}
BASELINES = {"SGD": (optax.sgd, (0.01, 0.03, 0.1, 0.3, 1.0)), "Adam": (optax.adam, (0.003, 0.01, 0.03, 0.1))}
GRID = 21  # points of a surface in each direction
SHOWN = (0, 0.05, 0.25, 1)  # fractions of the T steps after which the example is shown


class Config(meta_curves.Config):
    """Options of this experiment; updates are multiplied by `learning_rate`."""

    points: int = 20
    segment: int = 10
    hidden: int = 40
    learning_rate: float = 0.01
    visited: int = 5  # tasks whose inputs make the ranges.


THESIS: Any = meta_curves.THESIS | {"length": 200}
PAPER = Config(steps=300_000, hidden=80, widths=(20, 20), visited=20, **THESIS)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(method=[*BASELINES, "MPLP"])


def task_family(config: Config) -> meta.Task:
    """The thesis's tasks: sin(x + p)."""
    return meta.sinusoid(sizes=(1, *config.widths, 1), amplitude=(1.0, 1.0), batch=32, deviation=None)


def new_rule(config: Config, seed: int) -> mplp.Thesis:
    """The rule at its start."""
    options = {"message_size": 1, "batch_norm": False, "learn_rate": False, "see_loss": False}
    return meta_curves.thesis_rule(config, task_family(config), seed, **options)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    task = task_family(config)
    if cell["method"] in BASELINES:
        best = BASELINES[cell["method"]]
        values, sweep = meta_curves.tuned(task, best, 0, config.judged, config.length, by_sum=True)
        return {"eval": values, **sweep}
    learner = meta.message_passing(task.network)
    problem = meta.inner_problem(task, learner, config.length, **config.hint)
    outer = meta.batched(meta.truncated(problem, config.segment), config.tasks)
    evaluate = meta_curves.evaluation(task, learner, 0, config.judged, config.length)
    adam, judge = meta_curves.thesis_adam(config.rate), lambda rule: np.array([meta_curves.total_loss(evaluate(rule))])
    found = meta_curves.judged_cell(config, cell, outer, adam, new_rule(config, seed), judge, seed)
    ranges = visited_ranges(config, found.best, jax.random.key(seed))
    kept = [0, 1, *(2 + round(part * config.length) for part in SHOWN)]  # x, the target, outputs after some steps
    example = meta_curves.example(task, learner, found.best, config.length)[kept]
    result = {"eval": evaluate(found.best), "judged": found.judgements[:, 0], "losses": found.losses}
    surfaces = {name: surface(found.best, name, ranges[name]) for name in SURFACES}
    return result | {"skipped": found.skipped, "surfaces": surfaces, "example": example}


class Recorder(NamedTuple):
    """A rule with messages of one number, whose state is what its functions see in a step."""

    rule: mplp.Thesis

    @property
    def message_size(self) -> int:
        """The rule's."""
        return self.rule.message_size

    def init(self, site: mplp.Site) -> dict[str, jax.Array]:
        """Zeros, with the sizes of what is seen."""
        rows, *units = site.shape
        if site.family == "dense":
            n, m = units
            return {"m": jnp.zeros((rows, m)), "x": jnp.zeros((rows, n)), "w": jnp.zeros((n + 1, m))}
        return {name: jnp.zeros(site.shape) for name in (("p", "y") if site.begins else ("m", "z"))}

    def at(self, site: mplp.Site) -> Partial:
        """The local rule, which also answers what it has seen."""
        return Partial(recorded, self.rule.at(site))


def recorded(local: Any, site: mplp.Site, question: Any, state: Any) -> mplp.Answer:
    """The answer of a local rule, with what it has seen as its state."""
    if isinstance(question, mplp.Dense):
        assert question.bias is not None  # every layer here has one
        weights = jnp.concatenate([question.weight, question.bias[None]])
        seen = {"m": question.message[..., 0], "x": question.inputs, "w": weights}
    elif question.message is None:
        seen = {"p": question.features["prediction"], "y": question.features["target"]}
    else:
        (z,) = question.features.values()
        seen = {"m": question.message[..., 0], "z": z}
    return local(site, question, ())._replace(state=seen)


def visited_ranges(config: Config, rule: mplp.Thesis, key: jax.Array) -> dict[str, list[list[float]]]:
    """For each function the 1st and 99th percentile of its two inputs, over tasks that the rule learns."""
    task = task_family(config)
    learner = meta.message_passing(task.network)

    def run(rule, key):
        keys = jax.random.split(key, 3)
        drawn, params, recorder = task.draw(keys[0]), task.prior(keys[1]), Recorder(rule)
        state = learner.init(recorder, params, task.batch(drawn, keys[2]))

        def step(carry, key):
            params, state = learner.step(recorder, carry[0], carry[1], task.batch(drawn, key))
            return (params, state), state

        return jax.lax.scan(step, (params, state), jax.random.split(keys[2], config.length))[1]

    keys = jax.random.split(key, config.visited)
    seen = jax.jit(lambda rule: jax.lax.map(lambda key: run(rule, key), keys))(rule)
    gather = lambda kind, name: np.concatenate([np.ravel(v[name]) for place, v in seen.items() if kind in place])
    kinds = {"f": "dense", "g_lin": "dense", "g_relu": "activation", "g_loss": "loss"}
    percentiles = lambda values: [float(v) for v in np.nanpercentile(values, [1, 99])]
    of = lambda function: [percentiles(gather(kinds[function], name)) for name in SURFACES[function][1]]
    return {function: of(function) for function in SURFACES}


def surface(rule: Any, name: str, ranges: list[list[float]]) -> dict[str, Any]:
    """A learned function on a grid over the ranges of its inputs, and its correlation with gradient descent's."""
    key, _, exact = SURFACES[name]
    axes = [np.linspace(bounds[0], bounds[1], GRID) for bounds in ranges]
    a, b = (jnp.asarray(x, jnp.float32) for x in np.meshgrid(*axes, indexing="ij"))
    learned = rule.networks[key](a.reshape(-1, 1), b.reshape(-1, 1))[:, 0]
    descent = exact(a, b).reshape(-1)
    return {"learned": learned, "ranges": ranges, "correlation": np.corrcoef(learned, descent)[0, 1]}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    results = {cell["method"]: result for cell, result in records}
    rule = results["MPLP"]
    figures: dict[str, Any] = {f"correlation, {n}": s["correlation"] for n, s in rule["surfaces"].items()}
    judged_at = np.linspace(0, config.steps, len(rule["judged"]))
    figures["outer_loss_by_step"] = [[round(t), loss] for t, loss in zip(judged_at, rule["judged"], strict=True)]
    rows, shown = [], [{"correlation with SGD's": n, "value": s["correlation"]} for n, s in rule["surfaces"].items()]
    for method, result in results.items():
        values = np.array(result["eval"])
        found = meta_curves.along(values)[-1] | {"outer_loss": meta_curves.total_loss(values)}
        figures[method] = found | ({"rate": result["rate"], "sweep": result["sweep"]} if "rate" in result else {})
        rows.append({"method": method, **found})
    table = f"{harness.table(rows, *rows[0])}\n{harness.table(shown, *shown[0])}"
    figure, axes = harness.panels(4, 4, (13, 10.5))
    for column, (name, (_, labels, exact)) in enumerate(SURFACES.items()):
        first, second, learned = _grid(rule, name)
        descent = np.asarray(exact(first[:, None], second[None]), float)
        for row, (values, title) in enumerate(((learned, f"learned {name}"), (descent, f"{name} of SGD"))):
            ax = axes[row, column]
            figure.colorbar(ax.contourf(first, second, values.T, 15, cmap="RdBu_r"), ax=ax)
            ax.set(title=title, xlabel=labels[0], ylabel=labels[1])
    # Figs 12 and 13: g_relu over m is the derivative of the activation that the rule believes in; its integral. Where
    # the message is small the quotient is noise.
    m, z, relu = _grid(rule, "g_relu")
    large = np.abs(m) >= np.abs(m).max() / 2
    slope = (relu[large] / m[large, None]).mean(axis=0)
    activation = np.cumsum(slope) * (z[1] - z[0])
    (derivative, integral, training, inner), (judged, example, *empty) = axes[2:]
    for ax, title, learned, exact in (
        (derivative, "derivative: g_relu / m", slope, z > 0),
        (integral, "activation", activation - np.interp(0.0, z, activation), np.maximum(z, 0)),  # 0 at 0
    ):
        ax.plot(z, learned, label="learned")
        ax.plot(z, exact, label="relu's")
        ax.set(xlabel="z", title=title)
    training.plot(np.linspace(config.steps / config.points, config.steps, config.points), rule["losses"])
    training.set(xlabel="outer step", title=f"outer loss of {config.segment} steps, in training", yscale="log")
    for method, result in results.items():
        inner.plot(np.array(result["eval"]).mean(axis=0), label=method)
    inner.set(xlabel="inner step", title="half squared error", yscale="log")
    # Fig. 3: the outer loss on fixed tasks, with the tuned optimizers as lines; and a fit.
    judged.plot(judged_at, rule["judged"], label="MPLP")
    for i, method in enumerate(BASELINES):
        judged.axhline(figures[method]["outer_loss"], color=f"C{i + 1}", linestyle="--", label=method)
    judged.set(xlabel="outer step", title=f"outer loss of {config.length} steps, judged", yscale="log")
    x, y, *outputs = np.array(rule["example"])
    example.plot(x, y, "k--", label="target")
    for part, output in zip(SHOWN, outputs, strict=True):
        example.plot(x, output, color=f"{0.75 * (1 - part)}", label=f"after {round(part * config.length)} steps")
    example.set(xlabel="x", title="an example")
    for ax in empty:
        ax.axis("off")
    for ax in (derivative, integral, inner, judged, example):
        ax.legend()
    return harness.Report(figures, rows, table, figure)


def _grid(rule: dict[str, Any], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The values of the two inputs of a surface, and the surface."""
    found = rule["surfaces"][name]
    first, second = (np.linspace(bounds[0], bounds[1], GRID) for bounds in found["ranges"])
    return first, second, np.array(found["learned"]).reshape(GRID, GRID)


if __name__ == "__main__":
    harness.main()
