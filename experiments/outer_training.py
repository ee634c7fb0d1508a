"""Outer gradients that train: validation loss against seconds, through 200 inner steps and in influence balancing.

    python -m experiments.outer_training                   # a part of the methods, under 90 seconds
    python -m experiments.outer_training --preset paper

*A rule.* A learned optimizer with 147 meta-parameters trains a 1-16-1 network on sinusoids for T = 200 steps. It sees
each parameter's gradient g, its momenta, the parameter and the time, and starts as gradient descent along g / (1 +
|g|^2)^(1/2). There are two starts: *tame*, with a learning rate twenty times too small, and *chaotic*, with one that is
seven and a half times too large. The loss of an unroll is the mean loss on the minibatches before each step; the
validation loss is the mean over the same steps on the held-out points of tasks that are always the same.

*Influence balancing* (`parts/influence_balancing.py`) is a linear recurrence in which few steps say that theta, one
number, moves the loss the wrong way, and whose derivative has a closed form. It has no randomness, so the methods that
do not perturb compute one unroll for all tasks.

*Lanes.* `lanes clipped` is reverse mode with the tasks as lanes: after each step the message to what the rule trains
and to the rule's own state is cut to 4 times the typical task's, or to half of it (`ap.clip_lanes`). `multilevel` has
weights for levels of such clipping, up to none, by what repeats from outer step to outer step (`ap.multilevel`).

All methods have the same tasks in an outer step, rates of Adam and seeds, but for total propagation, whose lanes are as
many noisy unrolls of one task; those that perturb have the same deviations. Shown is the best rate and deviation by the
mean over seeds, on the tasks that also judge, after the seconds of the shortest training; a threshold is looked for in
the whole of each. Seconds are steps times the processor time of a step without compilation: the median over stretches,
divided by the trainings that a program makes.

*What was found.* Short segments win, and the bias of truncation does the rule no visible harm; in influence balancing
it diverges, as its sign is wrong up to K = 50. From the chaotic start all tasks explode alike, and a cut at 4 times the
typical message fails, as does total propagation; one at half of it, which makes every message decay, reaches the
threshold.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import apgrad as ap
from apgrad import meta
from experiments import harness
from experiments.parts import influence_balancing, meta_curves

PARTIAL = True
DECAYS, HIDDEN = (0.5, 0.9, 0.98), 16
STARTS = {"tame": 0.01, "chaotic": 1.5}  # learning rates
BALANCE, MULTILEVEL = "influence balancing", "multilevel"
CLIPPED = {"lanes clipped at 4": 4.0, "lanes clipped at .5": 0.5}
# Outer steps of a stretch: at eight tasks, all stretches of a bed take about the same time.
RULE = {"reverse mode": 3, "PES, K = 10": 150, "truncated, K = 10": 50, "ES": 10, "total propagation": 2}
RULE |= {"ES-Single, K = 10": 150, "truncated ES, K = 10": 100, **dict.fromkeys(CLIPPED, 3), MULTILEVEL: 1}
BALANCED = {"reverse mode": 150, "forward mode": 100, "truncated, K = 1": 640, "truncated, K = 10": 150}
BALANCED |= {"truncated, K = 50": 38, "PES, K = 1": 280, "PES, K = 10": 190, "ES": 44, "ES-Single, K = 10": 180}
BALANCED |= {"truncated ES, K = 10": 180, "total propagation": 1}
REFERENCE, CONSTANT = "constant rate", (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
NO_DEVIATION = ("reverse mode", "forward mode", "truncated,", *CLIPPED, MULTILEVEL)


class Config(harness.Config, least={"seeds": 2}, among={"rule": RULE, "balanced": BALANCED}):
    """Options of this experiment."""

    rule: tuple[str, ...] = ("reverse mode", "lanes clipped at .5", "ES")  # methods that train the rule.
    balanced: tuple[str, ...] = ("truncated, K = 10", "PES, K = 10")  # methods for influence balancing.
    rates: tuple[float, ...] = (0.01,)  # Adam's.
    # of the perturbations of the rule's meta-parameters (evolution strategies); the noise of total propagation, on what
    # the rule trains, has a fifth of it. Influence balancing has .1, as published.
    deviations: tuple[float, ...] = (0.1,)
    seeds: int = 2  # how many trainings of each.
    points: int = 5  # how often a training of the rule is judged; in influence balancing five times as often.
    # a stretch between two judgements has this many times the steps that the tables RULE and BALANCED say.
    pace: float = 1.0
    length: int = 200  # T, of the rule.
    tasks: int = 8  # in an outer step; for total propagation, perturbed unrolls of one task.
    judged: int = 16  # tasks to judge by.
    chains: int = 400  # estimates of whole unrolls that the bias in influence balancing is measured with.


METHODS: dict[str, Any] = {"rule": tuple(RULE), "balanced": tuple(BALANCED)}
PAPER = Config(**METHODS, rates=(0.003, 0.01, 0.03), deviations=(0.1, 0.02), seeds=3, points=12, judged=32, chains=1000)


class Bed(NamedTuple):
    """A problem to train on."""

    problem: meta.Problem
    starts: dict[str, Callable[[jax.Array], Any]]  # by name, key -> theta
    judge: Callable[[Any], jax.Array]  # theta -> the validation loss


def learned_rule(loss: Callable[[Any, Any], jax.Array], length: int) -> meta.Learner:
    """The learner whose theta is made by `new_rule`."""
    decays = jnp.asarray(DECAYS)[:, None]

    def init(theta, params, batch):
        flat, _ = ravel_pytree(params)
        return jnp.zeros((len(DECAYS), flat.size)), jnp.zeros(())

    def step(theta, params, state, batch):
        (momenta, t), (flat, unravel) = state, ravel_pytree(params)
        gradient, _ = ravel_pytree(jax.grad(loss)(params, batch))
        gradient = gradient * jax.lax.rsqrt(1 + jnp.sum(gradient**2))
        momenta = decays * momenta + (1 - decays) * gradient
        slopes = jnp.concatenate([gradient[None], momenta])
        slopes = slopes * jax.lax.rsqrt(jnp.mean(slopes**2, axis=1, keepdims=True) + 1e-8)
        seen = jnp.concatenate([slopes, flat[None], jnp.full((1, flat.size), t / length)])
        hidden = jnp.tanh(theta["kernel_0"] @ seen + theta["bias_0"][:, None])
        more, other = theta["kernel_1"] @ hidden + theta["bias_1"][:, None]
        moved = flat - jnp.exp(theta["log_rate"]) * (jnp.exp(more) * gradient + other / 10)
        return unravel(moved), (momenta, t + 1)

    return meta.Learner(init, step)


def new_rule(rate: float, key: jax.Array) -> dict[str, jax.Array]:
    """Meta-parameters of gradient descent at a rate."""
    features = len(DECAYS) + 3
    rule = {"kernel_0": jax.random.normal(key, (HIDDEN, features)) / features**0.5, "bias_0": jnp.zeros(HIDDEN)}
    rule |= {"kernel_1": jnp.zeros((2, HIDDEN)), "bias_1": jnp.zeros(2)}
    return rule | {"log_rate": jnp.log(jnp.asarray(rate, float))}


def rule_bed(length: int, judged: int) -> Bed:
    """A rule for T steps."""
    options: dict[str, Any] = {"amplitude": (1.0, 1.0), "batch": 16, "held_out": 32, "deviation": None}
    task = meta.sinusoid(sizes=(1, 16, 1), activation=jnp.tanh, **options)
    learner = learned_rule(task.loss, length)
    problem = meta.inner_problem(task, learner, length, hint=1.0, held_out=0.0, hint_before=True)

    def judge(theta):
        return jnp.mean(meta.evaluate(task, learner, theta, jax.random.key(1000), length, tasks=judged).mean[:-1])

    starts = {name: functools.partial(new_rule, rate) for name, rate in STARTS.items()}
    return Bed(problem, starts, judge)


def balance_bed() -> Bed:
    """Influence balancing from the published start."""
    judge = lambda theta: influence_balancing.steady_state(theta)[0]
    return Bed(influence_balancing.problem(), {BALANCE: lambda key: jnp.asarray(influence_balancing.START)}, judge)


def one_task(problem: meta.Problem, name: str, segment: int, sigma: float, *, stagger: bool = True):
    """The outer gradient of a task by its name."""
    return {
        "reverse mode": lambda: meta.reverse_mode(problem),
        "forward mode": lambda: meta.forward_mode(problem),
        "truncated": lambda: meta.truncated(problem, segment, stagger=stagger),
        "ES": lambda: meta.evolution(problem, sigma=sigma),
        "truncated ES": lambda: meta.truncated_evolution(problem, segment, sigma=sigma, stagger=stagger),
        "PES": lambda: meta.persistent_evolution(problem, segment, sigma=sigma, stagger=stagger),
        "ES-Single": lambda: meta.single_evolution(problem, segment, sigma=sigma, stagger=stagger),
    }[name]()


def outer_gradient(problem: meta.Problem, method: str, sigma: float, tasks: int, *, stagger: bool = True):
    """The mean over tasks, in the units of a whole unroll; and how many estimates in a row make an unroll."""
    name, _, steps = method.partition(", K = ")
    segment = int(steps or problem.length)
    if name == "total propagation":
        return finite(meta.perturbed(problem, sigma=sigma / 5, unrolls=tasks), 1), 1
    if name in (*CLIPPED, MULTILEVEL):
        return finite(clipped(problem, tasks, CLIPPED.get(name)), 1), 1
    count = problem.length // segment
    return meta.batched(finite(one_task(problem, name, segment, sigma, stagger=stagger), count), tasks), count


def clipped(problem: meta.Problem, tasks: int, factor: float | None) -> meta.OuterGradient:
    """Reverse mode with tasks as lanes, whose messages are clipped at each step by a factor, or if None at levels."""

    def program(tape, theta, factor):
        tape, key = tape.next_key()
        state = jax.vmap(problem.init, (None, 0))(theta, jax.random.split(key, tape.lanes))

        def body(carry, _):
            state, losses = jax.vmap(problem.step, (None, 0))(theta, carry[1])
            tape, (params, learner) = ap.clip_lanes(carry[0], (state.params, state.learner), factor)
            return (tape.cost(losses), state._replace(params=params, learner=learner)), None

        (tape, state), _ = jax.lax.scan(body, (tape, state), length=problem.length)
        return tape.cost(jax.vmap(problem.final, (None, 0))(theta, state))

    gradient = ap.value_and_grad(program, tasks, check_nan=False)
    if factor is not None:
        estimate = lambda theta, key, carry: (*gradient(key, theta, factor), carry)
        return meta.OuterGradient(lambda theta, key: (), estimate)
    made = ap.multilevel(gradient)
    estimate = lambda theta, key, carry: made.value_and_grad(key, carry, theta)
    return meta.OuterGradient(lambda theta, key: made.init(key, theta), estimate)


def finite(outer: meta.OuterGradient, times: int) -> meta.OuterGradient:
    """The gradient of each task times a number; a gradient that is not finite counts as zero."""

    def estimate(theta, key, carry):
        loss, gradient, carry = outer.estimate(theta, key, carry)
        fine = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradient))
        kept = lambda x: jnp.where(fine, times * x, jnp.zeros_like(x))
        return kept(loss), jax.tree.map(kept, gradient), carry

    return meta.OuterGradient(outer.init, estimate)


def many(outer: meta.OuterGradient, seed: jax.Array) -> meta.OuterGradient:
    """Many trainings in one program, in turn: theta has a leading axis; the same seed has the same random numbers."""
    keys = lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(seed)

    def estimate(theta, key, carry):
        one = lambda x: outer.estimate(*x)
        losses, gradients, carry = jax.lax.map(one, (theta, keys(key), carry))
        return jnp.mean(losses), gradients, carry

    return meta.OuterGradient(lambda theta, key: jax.vmap(outer.init)(theta, keys(key)), estimate)


def optimizers(rates: jax.Array) -> optax.GradientTransformation:
    """An optimizer for each of many trainings: gradients clipped to a norm of 1, then Adam."""
    of = lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def update(updates, state, params=None):
        return jax.vmap(lambda rate, g, s: of(rate).update(g, s))(rates, updates, state)

    return optax.GradientTransformation(jax.vmap(of(0.0).init), update)


def cells(config: Config) -> list[harness.Cell]:
    grid: list[harness.Cell] = [{"bed": "rule", "method": REFERENCE}] if config.rule else []
    grid += [{"bed": BALANCE, "method": method, "sigma": 0.1} for method in config.balanced]
    for i, sigma in enumerate(config.deviations):  # a run that is cut short has every method
        exact = [m for m in config.rule if m.startswith(NO_DEVIATION) and i == 0]
        grid += [{"bed": "rule", "method": method, "sigma": 0.0} for method in exact]
        perturbed = [m for m in config.rule if not m.startswith(NO_DEVIATION)]
        grid += [{"bed": "rule", "method": method, "sigma": sigma} for method in perturbed]
    return grid


def stretch(config: Config, cell: harness.Cell) -> int:
    """Outer steps between two judgements."""
    return max(1, round(config.pace * (BALANCED if cell["bed"] == BALANCE else RULE)[cell["method"]]))


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    bed = balance_bed() if cell["bed"] == BALANCE else rule_bed(config.length, config.judged)
    if cell["method"] == REFERENCE:
        losses = jax.jit(lambda rates: jax.lax.map(lambda r: bed.judge(new_rule(r, jax.random.key(0))), rates))
        return {"rates": CONSTANT, "losses": losses(jnp.asarray(CONSTANT)).tolist()}
    steps, points = stretch(config, cell), config.points * (5 if cell["bed"] == BALANCE else 1)
    outer, _ = outer_gradient(bed.problem, cell["method"], cell["sigma"], config.tasks)
    lanes = list(itertools.product(bed.starts, config.rates, range(config.seeds)))
    theta = [bed.starts[start](jax.random.key(s)) for start, _, s in lanes]
    theta = jax.tree.map(lambda *xs: jnp.stack(xs), *theta)
    which, rates = jnp.asarray([s for *_, s in lanes]), jnp.asarray([rate for _, rate, _ in lanes])
    judge = jax.jit(lambda theta: jax.lax.map(bed.judge, theta))
    mark = time.process_time()

    def judgement(theta):  # the mean, all losses, and the seconds since the last judgement
        nonlocal mark
        jax.block_until_ready(theta)
        taken = time.process_time() - mark
        losses = np.asarray(judge(theta), np.float64)
        mark = time.process_time()
        return np.array([np.mean(losses), *losses, taken])

    training = many(outer, which), optimizers(rates), theta, seed, points * steps, points
    found = meta_curves.judged_training(*training, judgement, harness.checkpoint(config, cell))
    curves = found.judgements[:, 1:-1].T.reshape(len(bed.starts), len(config.rates), config.seeds, -1)
    pace = float(np.median(found.judgements[1:, -1])) / steps / len(lanes)  # the stretch that compiles is no median's
    result = {"curves": dict(zip(bed.starts, curves, strict=True)), "seconds a step": pace}
    return result | (bias(config, cell, seed) if cell["bed"] == BALANCE else {})


def bias(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The mean over unrolls of an estimate in influence balancing at the start, less the closed form's."""
    bed = balance_bed()
    outer, count = outer_gradient(bed.problem, cell["method"], cell["sigma"], config.tasks, stagger=False)
    theta = bed.starts[BALANCE](jax.random.key(0))

    def one(key):  # the estimates of an unroll from its start add up to its gradient
        def estimate(carry, key):
            _, gradient, carry = outer.estimate(theta, key, carry)
            return carry, gradient

        begin, key = jax.random.split(key)
        return jnp.mean(jax.lax.scan(estimate, outer.init(theta, begin), jax.random.split(key, count))[1])

    values = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), config.chains)), np.float64)
    off = float(values.mean() - influence_balancing.steady_state(theta)[1])
    return {"bias": off, "bias_standard_error": harness.standard_error(values)}


def trainings(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]], start: str) -> list[dict[str, Any]]:
    """All trainings from a start: a method at a deviation and a rate, with the curves of its seeds."""
    found = []
    for cell, result in records:
        curves = np.array(result.get("curves", {}).get(start, []), float)
        for rate, seeds in zip(config.rates, curves, strict=False):
            steps = stretch(config, cell) * np.arange(seeds.shape[1])
            row = {"start": start, "method": cell["method"], "sigma": cell["sigma"], "rate": rate}
            row |= {"steps": int(steps[-1]), "seconds_a_step": result["seconds a step"]}
            found.append({"row": row, "curves": seeds, "seconds": steps * result["seconds a step"], "result": result})
    return found


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    level = {BALANCE: float(influence_balancing.steady_state(influence_balancing.START)[0]) / 100}
    level |= {start: min(r["losses"]) for c, r in records if c["method"] == REFERENCE for start in STARTS}
    figures, best = {}, []
    for start in (s for s in (*STARTS, BALANCE) if trainings(config, records, s)):
        found, goal = trainings(config, records, start), level.get(start, np.nan)
        budget = min(t["seconds"][-1] for t in found)
        for t in found:
            ends = np.array([np.interp(budget, t["seconds"], curve) for curve in t["curves"]])
            reached = np.flatnonzero(t["curves"].mean(axis=0) <= goal)
            t["row"] |= {"loss": float(ends.mean()), "standard_error": harness.standard_error(ends)}
            t["row"] |= {"seconds_to_threshold": float(t["seconds"][reached[0]]) if len(reached) else None}
            t["row"] |= {name: t["result"].get(name) for name in ("bias", "bias_standard_error")}
        begin = float(np.mean(found[0]["curves"][:, 0]))
        figures[start] = {"seconds": float(budget), "threshold": goal, "loss at the start": begin}
        for method in dict.fromkeys(t["row"]["method"] for t in found):
            some = [t for t in found if t["row"]["method"] == method]
            best.append(min(some, key=lambda t: np.nan_to_num(t["row"]["loss"], nan=np.inf)))
    rows = [t["row"] for t in best]
    columns = ("loss", "standard_error", "seconds_to_threshold", "bias", "bias_standard_error")
    shown = [{"start": start, **found} for start, found in figures.items()]
    table = f"{harness.table(shown, *shown[0])}\n{harness.table(rows, 'start', 'method', *columns)}"
    return harness.Report(figures, rows, table, _figure(best, level, rows))


def _figure(best, level, rows):
    shown, balanced = dict.fromkeys(row["start"] for row in rows), [row for row in rows if row["start"] == BALANCE]
    figure, panels = harness.panels(1 + bool(balanced), 2, (11, 8 if balanced else 4.2))
    colors = {name: f"C{i}" for i, name in enumerate(RULE)}
    colors |= {"forward mode": "C7", "truncated, K = 1": "C8", "truncated, K = 50": "C9", "PES, K = 1": "k"}
    for start, panel in zip(shown, panels.flat, strict=False):
        for t in (t for t in best if t["row"]["start"] == start):
            color = colors[t["row"]["method"]]
            panel.plot(t["seconds"], np.median(t["curves"], axis=0), label=t["row"]["method"], color=color)
            panel.plot(t["seconds"], t["curves"].T, alpha=0.3, linewidth=0.6, color=color)
        if start in level:
            panel.axhline(level[start], color="k", linestyle=":", linewidth=0.8, label="threshold")
        limits = (0.02, 10.0) if start in STARTS else (1e-6, 1e3)
        panel.set(xlabel="seconds", ylabel="validation loss", yscale="log", ylim=limits, title=start)
        panel.legend()
    if not balanced:
        return figure
    ax = panels.flat[-1]
    for i, row in enumerate(balanced):
        ax.errorbar(row["bias"], i, xerr=2 * row["bias_standard_error"], fmt="o", color=colors[row["method"]])
    ax.axvline(0.0, color="k", linewidth=0.8)
    wrong = -float(influence_balancing.steady_state(influence_balancing.START)[1])
    ax.axvline(wrong, color="k", linestyle=":", linewidth=0.8)
    ax.set_yticks(range(len(balanced)), [row["method"] for row in balanced], fontsize=7)
    ax.set(xlabel="bias of the gradient ± 2 s.e.; left of the dots the sign is wrong", title=BALANCE)
    ax.invert_yaxis()
    return figure


if __name__ == "__main__":
    harness.main()
