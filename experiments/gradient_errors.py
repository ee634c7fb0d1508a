"""Errors of gradients of policies in the noisy Lorenz system: at the start of training, after some steps, and settled.

    python -m experiments.gradient_errors                   # under two minutes
    python -m experiments.gradient_errors --preset paper

The system and the policies are those of `experiments.policy_search`, at a cost of every step. A policy is drawn by a
seed and trained for a number of steps by reparameterization over horizons of ten steps. There the gradient is estimated
many times, with independent keys, by reparameterization (RP), the likelihood ratio (LR), total propagation (TP is
`ap.adaptive`, TP by state its option), RP whose messages are cut at 4 and at 10 times the typical lane's, or at 4 where
they have grown (`ap.clip_lanes`), and levels of clipping (`ap.multilevel`). Levels and TP go on from call to call,
after `past` calls at the same policy.

The truth is the mean of other estimates of that unbiased gradient which has the least variance. The squared bias is
the squared distance of the means, less what the noise of both adds to it. `ratio` is variance and squared bias over the
least variance of RP, LR and TP, `of_plain` the same over the lesser one of RP and LR. *Where RP explodes* it has at
least ten times LR's variance.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import harness
from experiments.parts import policies
from experiments.policy_search import LORENZ, METHODS as PLAIN

PARTIAL = True
RATE = 0.01  # of the training
METHODS = {"RP": PLAIN["RP"], "LR": PLAIN["LR"], "TP": PLAIN["TP adaptive"]._replace(colour="#777777")}
METHODS["TP by state"] = PLAIN["TP adaptive"]._replace(by_state=True)
METHODS["clipped at 4"] = PLAIN["RP"]._replace(clip_factor=4.0, colour="#2a8a3e")
METHODS["clipped at 10"] = PLAIN["RP"]._replace(clip_factor=10.0, colour="#8c6d1f")
METHODS["growth clipped at 4"] = METHODS["clipped at 4"]._replace(growth_only=True, colour="#e7298a")
METHODS["multilevel"] = PLAIN["RP"]._replace(multilevel=True, colour="#8e3fb1")
PAIR = ("RP", "LR")
BASELINES = (*PAIR, "TP")
TP = ("TP", "TP by state")
UNBIASED = (*PAIR, *TP)


class Config(harness.Config, least={"stages": 0}):
    """Options of this experiment."""

    policies: int = 1  # how many policies are drawn.
    stages: tuple[int, ...] = (0, 20)  # for how many steps each is trained.
    units: int = 8  # the width of a policy's hidden layers.
    horizon: int = 50  # H, the number of steps of an episode.
    lanes: int = 100  # trajectories for each gradient.
    estimates: int = 60  # of each gradient.
    reference: int = 240  # estimates for the truth.
    past: int = 50  # earlier calls of TP and multilevel.


PAPER = Config(policies=20, stages=(0, 20, 240), estimates=200, reference=500, past=200)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(policy=range(config.policies), stage=config.stages)


@functools.cache
def _estimates(name, horizon, lanes):
    """`(keys of the past, keys, policy) -> gradients`, a row each key."""
    method = METHODS[name]
    made = policies.gradients(method, policies.program(LORENZ, method, "every step", horizon), lanes)

    def call(policy, state, key):
        _, gradient, state = made.value_and_grad(key, state, policy)
        return state, jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(gradient)])

    def several(past, keys, policy):
        state = made.init(past[0], policy)
        state, _ = jax.lax.scan(lambda s, k: (call(policy, s, k)[0], None), state, past[1:])
        return jax.lax.scan(functools.partial(call, policy), state, keys)[1]

    return jax.jit(several)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(config.seed), config.policies)
    start, training, estimating = jax.random.split(keys[cell["policy"]], 3)
    size = config.units, "every step", config.horizon, config.lanes
    learner = policies.training(LORENZ, PLAIN["RP, short"], *size)
    state = learner.init(start)
    for key in jax.random.split(training, cell["stage"]):
        state = learner.step(state, key[None], jnp.float32(RATE))

    def estimates(name, key, number):
        past, keys = jax.random.split(key)
        past = jax.random.split(past, config.past if METHODS[name].adaptive or METHODS[name].multilevel else 1)
        found = _estimates(name, config.horizon, config.lanes)(past, jax.random.split(keys, number), state[0])
        return np.asarray(found, np.float64)

    # All methods see the same noise, the truth another one.
    same, other = jax.random.split(estimating)
    found = {name: estimates(name, same, config.estimates) for name in METHODS}
    variances = {name: float(x.var(0, ddof=1).sum()) for name, x in found.items()}
    best = min(UNBIASED, key=lambda name: variances[name])
    reference = estimates(best, other, config.reference)
    truth, noise = reference.mean(0), reference.var(0, ddof=1).sum() / config.reference
    result: dict[str, Any] = {"squared_truth": float(truth @ truth - noise)}
    for name, x in found.items():
        off = np.square(x.mean(0) - truth).sum() - noise - variances[name] / config.estimates
        lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(truth)
        result[name] = {"variance": variances[name], "squared_bias": 0.0 if name in UNBIASED else max(0.0, float(off))}
        result[name]["cosine"] = float(np.median(x @ truth / np.where(lengths > 0, lengths, 1)))
    return result


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, figures = [], {}
    for cell, found in records:
        plain, best = (min(found[name]["variance"] for name in names) for names in (PAIR, BASELINES))
        explodes = found["RP"]["variance"] > 10 * found["LR"]["variance"]
        for name in METHODS:
            row = {**cell, "method": name, "squared_truth": found["squared_truth"], "RP_explodes": explodes}
            row |= found[name] | {"error": found[name]["variance"] + found[name]["squared_bias"]}
            rows.append(row | {"ratio": row["error"] / best, "of_plain": row["error"] / plain})

    def gathered(name, column, **chosen):
        ratios = [r[column] for r in rows if r["method"] == name and all(r[k] == v for k, v in chosen.items())]
        return {"mean": float(np.exp(np.mean(np.log(ratios)))), "worst": max(ratios), "points": len(ratios)}

    for stage in sorted({r["stage"] for r in rows}):
        names = [name for name in METHODS if name not in UNBIASED]
        figures[f"after {stage}"] = {name: gathered(name, "ratio", stage=stage) for name in names}
    for where, explodes in (("where RP explodes", True), ("elsewhere", False)):
        if any(r["RP_explodes"] == explodes for r in rows):
            figures[where] = {name: gathered(name, "of_plain", RP_explodes=explodes) for name in TP}
    columns = ("policy", "stage", "method", "variance", "squared_bias", "cosine", "ratio", "of_plain")
    return harness.Report(figures, rows, harness.table(rows, *columns), _figure(config, rows))


def _figure(config, rows):
    figure, axes = harness.panels(1, len(config.stages), (4.2 * len(config.stages), 3.8))
    figure.suptitle(f"Squared error of one gradient of {config.lanes} lanes: variance (dots) and squared bias (dashes)")
    for ax, stage in zip(axes[0], config.stages, strict=True):
        for number, (name, method) in enumerate(METHODS.items()):
            mine = [r for r in rows if r["stage"] == stage and r["method"] == name]
            place = np.arange(len(mine)) + (number - 3) / 9
            for column, size in (("variance", 0.4), ("squared_bias", 1.0)):
                style = {"color": method.colour, "alpha": size, "label": name if size == 1 else None}
                ax.scatter(place, [r[column] for r in mine], s=22, marker="o" if size < 1 else "_", **style)
        ax.set(yscale="log", xlabel="policy", ylabel="squared error", title=f"after {stage} steps")
        ax.locator_params(axis="x", integer=True)
    figure.legend(*axes[0, -1].get_legend_handles_labels(), loc="outside right upper")
    return figure


if __name__ == "__main__":
    harness.main()
