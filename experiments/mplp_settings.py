"""Where a trained rule can be taken: 40 settings drawn at random, beside optimizers tuned at each horizon.

    python -m experiments.mplp_settings                                   # 2 settings of digits, two minutes
    APGRAD_DATA=... python -m experiments.mplp_settings --preset paper    # 40 settings, 20 runs: some hours of one core
    python -m experiments.mplp_settings --preset paper --settings 20 --rules regression untrained \
        --images diabetes None friedman1 None friedman2 None friedman3 None halves None

No paper has this study; the preset paper is only larger. A setting is images, their side, hidden layers, their
activation, the size of a minibatch and a prior. Settings are drawn by a seed that stands here (`DRAWN`), and no rule
has been chosen by them. Where a setting lies outside a rule's card, the rule warns: each row says whether it did.

*The rules* are the trained ones that come with apgrad; "untrained" is a normalized rule (`mplp.Normalized`) as it is
before any training. *The baselines* are SGD, SGD with momentum .9, Adam, AdamW with
warm-up over a tenth of the steps and a cosine to zero, and Muon (`optax.contrib`; optax has neither Shampoo nor SOAP).
Each baseline is tuned for each setting and horizon by random search: 16 draws of its rate, of whether that stays or
goes to zero on a line (but for AdamW), and of its weight decay (but for Adam), judged on other tasks of the same
setting, whose test examples may be the same. A rule that takes the number
of updates is told it. Then all methods learn the same tasks. A step has no derivative, so baselines get the
sigmoid's in its place (a surrogate gradient). The rules see the step as it is, but for "images, surrogate", which is
the first rule given what baselines get.

Given is the accuracy on test images after the last update, 0 of a run that diverged; in regression, on the data sets of
`experiments.parts.regression`, the part of the test targets' variance that is explained. A rule is compared run by run
with the baseline that is best on the same tasks, which favours the baselines a little, and with tuned momentum. An
interval is 95 % by Student's t.
"""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from scipy import stats

from apgrad import meta, mplp
from experiments import harness
from experiments.meta_train import step_function, timed
from experiments.parts import meta_curves, regression

PARTIAL = True
DRAWN = 20261124
IMAGES = (("digits", None), ("mnist", 12), ("mnist", 20), ("mnist", 28), ("cifar10", 12))
RULES = ("images", "untrained", "image_mlp")
TOGETHER = 4  # runs side by side


class Setting(NamedTuple):
    """What a network learns, and how; `data` names images or one of `regression.SETS`.

    A prior of None is uniform on ±1/sqrt(inputs).
    """

    data: str
    size: int | None
    hidden: tuple[int, ...]
    activation: str
    batch: int
    prior: float | None

    def __str__(self) -> str:
        """The setting in a line."""
        side, widths = "" if self.size is None else f" {self.size}x{self.size}", "-".join(map(str, self.hidden))
        return f"{self.data}{side}, {widths} {self.activation}, minibatches of {self.batch}, prior {self.prior}"


def surrogate_step(z: jax.Array) -> jax.Array:
    """The step forward, the sigmoid's derivative backward."""
    smooth = jax.nn.sigmoid(z)
    return smooth + jax.lax.stop_gradient(step_function(z) - smooth)


# By name: what the rules see, and what the baselines see.
ACTIVATIONS = {name: (f, f) for name, f in (("sigmoid", jax.nn.sigmoid), ("tanh", jnp.tanh), ("relu", jax.nn.relu))}
ACTIVATIONS |= {"gelu": (jax.nn.gelu,) * 2, "softplus": (jax.nn.softplus,) * 2, "step": (step_function, surrogate_step)}


def draw_setting(number: int, images: tuple[tuple[str, int | None], ...] = IMAGES) -> Setting:
    """1 to 5 hidden layers of 16 to 512 units and minibatches of 2 to 256, both uniform in their logarithms."""
    rng = np.random.default_rng((DRAWN, number))
    data, size = images[rng.integers(len(images))]
    widths = np.exp(rng.uniform(np.log(16), np.log(513), rng.integers(1, 6))).astype(int)
    activation = list(ACTIVATIONS)[rng.integers(len(ACTIVATIONS))]
    batch, prior = int(np.exp(rng.uniform(np.log(2), np.log(257)))), (0.02, 0.05, None)[rng.integers(3)]
    return Setting(data, size, tuple(map(int, widths)), activation, batch, prior)


class Drawn(NamedTuple):
    """Hyperparameters: the rate, what is left of it at the horizon, the weight decay, and the horizon."""

    rate: Any
    end: Any
    decay: Any
    steps: Any

    def line(self, count: Any) -> Any:
        """The rate of an update, on a line to its end."""
        return self.rate * (1 - (1 - self.end) * count / self.steps)


def _decayed(make: Any) -> Any:
    return lambda drawn: optax.chain(optax.add_decayed_weights(drawn.decay), make(drawn.line))


def _scheduled(drawn: Drawn) -> optax.GradientTransformation:
    def rate(count):
        warm = jnp.minimum((count + 1) / (0.1 * drawn.steps), 1.0)
        return drawn.rate * warm * 0.5 * (1 + jnp.cos(jnp.pi * count / drawn.steps))

    return optax.adamw(rate, weight_decay=drawn.decay)


OPTIMIZERS = {
    "SGD": (_decayed(optax.sgd), (0.01, 10.0)),
    "momentum": (_decayed(functools.partial(optax.sgd, momentum=0.9)), (0.001, 3.0)),
    "Adam": (lambda drawn: optax.adam(drawn.line), (0.0003, 0.3)),
    "AdamW, cosine": (_scheduled, (0.0003, 0.3)),
    "Muon": (lambda drawn: optax.contrib.muon(drawn.line, weight_decay=drawn.decay), (0.003, 3.0)),
}


class Config(harness.Config, least={"runs": 2}):
    """Options of this experiment."""

    # names and sides of the images, or names of the data sets of regression, that settings are drawn of.
    images: tuple[tuple[str, int | None], ...] = (("digits", None),)
    rules: tuple[str, ...] = RULES  # trained ones by name, and "untrained".
    settings: int = 2  # how many are drawn.
    horizons: tuple[int, ...] = (20,)  # updates.
    draws: int = 8  # of each baseline's rate and decay.
    tuning: int = 2  # tasks that a draw is judged on.
    runs: int = 4  # networks and tasks of each method.

    @property
    def surrogate(self) -> str:
        """The first rule, given what baselines get."""
        return f"{self.rules[0]}, surrogate"


PAPER = Config(images=IMAGES, settings=40, horizons=(20, 100), draws=16, tuning=2, runs=20)


def cells(config: Config) -> list[harness.Cell]:
    """A setting and a method each, the baselines of all settings first, and then one rule after the other."""
    blocks = [OPTIMIZERS, *((rule,) for rule in config.rules)]
    every = [cell for methods in blocks for cell in harness.grid(setting=range(config.settings), method=methods)]
    steps = [i for i in range(config.settings) if draw_setting(i, config.images).activation == "step"]
    return every + harness.grid(setting=steps, method=[config.surrogate])


class Start(NamedTuple):
    """What runs begin with, and are judged by; each with a leading axis of runs."""

    keys: jax.Array
    params: Any
    judged: Any

    @classmethod
    def of(cls, task: meta.Task, seed: int, count: int) -> "Start":
        """The same for every method, in one program of its own, since random numbers take long to compile."""
        keys = jax.random.split(jax.random.key(seed), count)
        made = jax.jit(jax.vmap(lambda key: (task.prior(key), task.held_out({}, jax.random.fold_in(key, 1)))))
        return cls(keys, *made(keys))


def learn(task: meta.Task, learner: meta.Learner, score: Any = meta.accuracy) -> Any:
    """`(thetas, starts, steps) -> scores in percent` after the steps: one program for all horizons and runs."""

    def one(theta, start, steps):
        told = timed(learner, steps)
        state = told.init(theta, start.params, task.batch({}, start.keys))

        def step(i, carry):
            return told.step(theta, carry[0], carry[1], task.batch({}, jax.random.fold_in(start.keys, i + 2)))

        params, _ = jax.lax.fori_loop(0, steps, step, (start.params, state))
        finite = jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()  # NaN is some class, too
        return jnp.where(finite, 100 * score(task, params, start.judged), jnp.nan)

    @jax.jit
    def over(thetas, starts, steps):
        together = min(TOGETHER, len(starts.keys))
        return jax.lax.map(lambda each: one(each[0], each[1], steps), (thetas, starts), batch_size=together)

    return lambda *args: np.asarray(over(*args))


@functools.lru_cache(maxsize=1)
def prepared(config: Config, number: int) -> tuple[meta.Task, meta.Task, Start, Start]:
    """The task as rules and as baselines see it, what baselines are tuned on, and what all methods are judged on."""
    setting = draw_setting(number, config.images)
    options: Any = {"batch": setting.batch, "hidden": setting.hidden, "deviation": setting.prior}
    if setting.data in regression.SETS:
        make = functools.partial(regression.task, setting.data, **options)
    else:
        images = meta.data.load(setting.data, size=setting.size)
        make = functools.partial(meta.images, images, held_out=min(1000, len(images.y_test)), split="test", **options)
    for_rules, for_baselines = (make(activation=f) for f in ACTIVATIONS[setting.activation])
    return for_rules, for_baselines, Start.of(for_rules, 1, config.tuning), Start.of(for_rules, 2, config.runs)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """By horizon the accuracy of each run; of a baseline what was drawn, of a rule whether it warned."""
    for_rules, for_baselines, tuning, judged = prepared(config, cell["setting"])
    regresses = draw_setting(cell["setting"], config.images).data in regression.SETS
    score = regression.explained if regresses else meta.accuracy
    found: dict[str, Any] = {}
    if cell["method"] not in OPTIMIZERS:
        task = for_baselines if cell["method"] == config.surrogate else for_rules
        run = learn(task, meta.message_passing(task.network), score)
        name = cell["method"].removesuffix(", surrogate")
        if name == "untrained":
            rule = mplp.Normalized(meta_curves.sites(for_rules), rngs=nnx.Rngs(0))
        else:
            rule = mplp.load_pretrained(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for steps in config.horizons:
                found[str(steps)] = {"accuracy": run(repeated(rule, config.runs), judged, steps).tolist()}
        return {"horizons": found, "warned": bool(caught)}
    return {"horizons": tuned(config, cell["method"], for_baselines, tuning, judged, seed, score)}


def tuned(
    config: Any, name: str, task: meta.Task, tuning: Start, judged: Start, seed: int, score: Any = meta.accuracy
) -> dict[str, Any]:
    """By horizon the accuracy of each run of an optimizer, with the best of the drawn hyperparameters."""
    make, (low, high) = OPTIMIZERS[name]
    run, rng, found = learn(task, meta.optimizer(make, task.loss), score), np.random.default_rng(seed), {}
    rates = np.exp(rng.uniform(np.log(low), np.log(high), config.draws)).astype(np.float32)
    ends = rng.integers(0, 2, config.draws).astype(np.float32)
    decays = np.exp(rng.uniform(np.log(1e-6), np.log(1e-2), config.draws)).astype(np.float32)
    for steps in config.horizons:
        drawn = Drawn(rates, ends, decays, np.full(config.draws, steps, np.float32))
        each = jax.tree.map(lambda x: np.repeat(x, config.tuning), drawn)
        again = jax.tree.map(lambda x: jnp.concatenate([x] * config.draws), tuning)
        scores = run(each, again, steps).reshape(config.draws, config.tuning).mean(axis=1)
        best = Drawn(*(x[int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))] for x in drawn))
        found[str(steps)] = {"accuracy": run(repeated(best, config.runs), judged, steps).tolist()}
        found[str(steps)] |= {name: float(value) for name, value in best._asdict().items()}
    return found


def repeated(tree: Any, count: int) -> Any:
    """The same for so many runs."""
    return jax.tree.map(lambda x: jnp.stack([x] * count), tree)


def learned(accuracies: list[float]) -> np.ndarray:
    """The accuracies of runs, 0 of those that diverged: they learned nothing."""
    return np.nan_to_num(np.array(accuracies, float))


def half_interval(values: np.ndarray) -> float:
    """Half the width of the 95 % interval of a mean, by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows: list[dict[str, Any]] = []
    settings: dict[int, dict[str, Any]] = {}
    for cell, result in records:
        settings.setdefault(cell["setting"], {})[cell["method"]] = result
    for number, methods in settings.items():
        if not set(OPTIMIZERS) <= set(methods):
            continue
        if config.rules[0] in methods and draw_setting(number, config.images).activation != "step":
            methods[config.surrogate] = methods[config.rules[0]]
        for steps in config.horizons:
            given = {name: result["horizons"][str(steps)]["accuracy"] for name, result in methods.items()}
            accuracy = {name: learned(found) for name, found in given.items()}
            best = max(OPTIMIZERS, key=lambda name: accuracy[name].mean())
            for rule in (rule for rule in (*config.rules, config.surrogate) if rule in methods):
                row: dict[str, Any] = {"setting": number, "images": str(draw_setting(number, config.images))}
                row |= {"steps": steps, "rule": rule, "warned": methods[rule]["warned"]}
                finite = np.isfinite(np.array(given[rule], float)).all()
                row |= {"accuracy": accuracy[rule].mean(), "finite": bool(finite), "best baseline": best}
                for name, other in (("best", best), ("momentum", "momentum")):
                    ahead = accuracy[rule] - accuracy[other]
                    row |= {name: accuracy[other].mean(), f"ahead of {name}": ahead.mean()}
                    row |= {f"interval {name}": half_interval(ahead)}
                rows.append(row)
    figures, measured = {}, list(dict.fromkeys(row["rule"] for row in rows))
    for rule in measured:
        for steps in config.horizons:
            mine = [r for r in rows if (r["rule"], r["steps"]) == (rule, steps)]
            behind = [r for r in mine if r["ahead of momentum"] + r["interval momentum"] < 0]
            figures[f"{rule}, {steps} steps"] = {
                "settings": len(mine),
                "at or above the best baseline": sum(r["ahead of best"] >= 0 for r in mine),
                "above beyond the interval": sum(r["ahead of best"] - r["interval best"] > 0 for r in mine),
                "below beyond the interval": sum(r["ahead of best"] + r["interval best"] < 0 for r in mine),
                "below momentum beyond the interval": len(behind),
                "of these without a warning": sum(not r["warned"] for r in behind),
                "without a warning": sum(not r["warned"] for r in mine),
                "not finite": sum(not r["finite"] for r in mine),
            }
    columns = ("settings", "at or above the best baseline", "below momentum beyond the interval", "not finite")
    table = harness.table([{"rule": name, **found} for name, found in figures.items()], "rule", *columns)
    figure, axes = harness.panels(1, len(config.horizons), (5 * len(config.horizons), 4.2))
    for ax, steps in zip(axes.flat, config.horizons, strict=True):
        for colour, rule in enumerate(measured):
            for warned, mark in ((False, "o"), (True, "x")):
                mine = [r for r in rows if (r["rule"], r["steps"], r["warned"]) == (rule, steps, warned)]
                if not mine:
                    continue
                style = {"fmt": mark, "ms": 4, "lw": 0.7, "color": f"C{colour}"}
                points = ([r[k] for r in mine] for k in ("best", "ahead of best", "interval best"))
                ax.errorbar(*points, label=f"{rule}{', warned' if warned else ''}", **style)
        ax.axhline(0, color="black", lw=0.8)
        ax.set(xlabel="best tuned baseline, %", ylabel="the rule's lead, points", title=f"{steps} updates")
        ax.legend()
    return harness.Report(figures, rows, table, figure)


if __name__ == "__main__":
    harness.main()
