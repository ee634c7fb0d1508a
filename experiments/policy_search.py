"""Policy search in a known stochastic simulator: Flax policies learn to hold the noisy Lorenz system at a fixed point.

    python -m experiments.policy_search                   # under two minutes
    python -m experiments.policy_search --preset paper

A step is one of Runge and Kutta (dt = .08) of Lorenz's equations with rho = 28 and a force of 20 tanh(network) on y,
held meanwhile, and noise N(0, .1^2 I) after it. A lane starts at (0, 0, 25) + N(0, 8^2 I). The policy is an NNX network
of tanh units with two hidden layers. The cost of a state is |s - s*|^2 / 200, s* the fixed point with x > 0 of the
system without force, and the task is a low mean of it over all the steps. Uncontrolled, trajectories are chaotic, and
the gradient through H steps explodes; a good policy ends the chaos.

Adam's learning rate is the best of `rates` for each method, by the cost over the last fifth of the evaluations, on
seeds of its own; curves are of the other seeds. `METHODS` are reparameterization (RP), likelihood ratio (LR) and total
propagation (TP): with the published weights, and with the default ones, cross-fitted; each with one weight a step from
the gradient of the policy, and mixed "at parameters" of the distribution, coordinate by coordinate; "TP adaptive" takes
the weights from the moments of earlier steps, `ap.adaptive`. What people do about exploding gradients stands beside
them: every method's gradient is clipped by its global norm, but for "RP, unclipped", and "RP, short" stops the gradient
at every tenth step. Updates that are not finite are skipped.

*Success* is an evaluated cost of at most .45. *Seconds* are steps times the seconds of a step, and
these are measured apart from the curves: seconds of the processor, on one core, methods taking turns in one process,
the least of many rounds. So a curve is not changed by what else the machine does.

*What comes out.* Short horizons win: all seeds succeed, before any other method's.
Full horizons explode, and clipping is enough of a remedy for Adam: no way of total propagation is better than clipped
reparameterization beyond the intervals, the cross-fitted ones are worse in the mean, and a step costs 1 to 2 times as
much.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import apgrad as ap
from experiments import harness
from experiments.parts import policies
from experiments.parts.policies import SEGMENT, Method, System

SIGMA, RHO, FORCE, DT = 0.1, 28.0, 20.0, 0.08
EDGE = (8 / 3 * (RHO - 1)) ** 0.5
TARGET = (EDGE, EDGE, RHO - 1)
TASKS = {"every step": 0.45, "last step": 0.3}  # with the cost that counts as success; here it is every step's
TASK = "every step"
INVERSE = ap.weights.inverse_variance()
METHODS = {
    "RP, unclipped": Method(ap.reparameterization(), clip_norm=0, colour="#9ecae1"),
    "RP": Method(ap.reparameterization(), colour="#1f77b4"),
    "RP, short": Method(ap.reparameterization(), segment=SEGMENT, colour="#2a8a3e"),
    "LR": Method(ap.likelihood_ratio(), colour="#d95f02"),
    "TP published": Method(ap.total_propagation(weights=INVERSE), colour="#8e3fb1"),
    "TP published, at parameters": Method(ap.total_propagation(weights=INVERSE, target="parameters"), colour="#d4a6e8"),
    "TP": Method(ap.total_propagation(), cross_fit=True, colour="#777777"),
    "TP, at parameters": Method(ap.total_propagation(target="parameters"), cross_fit=True, colour="#cccccc"),
    "TP adaptive": Method(ap.total_propagation(), adaptive=True),
}


class Config(harness.Config, least={"lanes": 4, "evaluations": 5, "seeds": 2}, multiple={"lanes": 2}):
    """Options of this experiment."""

    units: int = 64  # the width of the policy's two hidden layers.
    horizon: int = 50  # H, the number of steps.
    lanes: int = 100  # trajectories for each gradient.
    iterations: int = 60  # steps of Adam.
    evaluations: int = 15  # how often the cost is evaluated on the way, on 500 lanes.
    rates: tuple[float, ...] = (3e-3,)  # learning rates to choose from.
    tuning: int = 1  # seeds on which they are chosen.
    seeds: int = 3  # other seeds, for the curves.
    rounds: int = 2  # how often seconds are measured.

    def __post_init__(self):
        super().__post_init__()
        if self.iterations % self.evaluations:
            raise ValueError(f"iterations must be a multiple of evaluations, got {self.iterations}, {self.evaluations}")


PAPER = Config(iterations=240, evaluations=24, rates=(1e-3, 3e-3, 1e-2), tuning=2, seeds=6, rounds=20)


def runge_kutta(velocity: Any, s: jax.Array, dt: float) -> jax.Array:
    """The state a step of fourth order later."""
    b = velocity(s + dt / 2 * (a := velocity(s)))
    c = velocity(s + dt / 2 * b)
    return s + dt / 6 * (a + 2 * b + 2 * c + velocity(s + dt * c))


def step(policy: Any, s: jax.Array) -> dist.Distribution:
    """The state (3,) a step later, under a force on y that stays the same."""
    force = FORCE * policy(s / 10 - jnp.array([0.0, 0.0, 2.5]))[0]

    def velocity(s):
        x, y, z = s
        return jnp.stack([10 * (y - x), x * (RHO - z) - y + force, x * y - 8 / 3 * z])

    return dist.Normal(runge_kutta(velocity, s, DT), SIGMA)


LORENZ = System(
    (3, 1),
    lambda key, lanes: jnp.array([0.0, 0.0, 25.0]) + 8 * jax.random.normal(key, (lanes, 3)),
    step,
    lambda s: jnp.sum((s - jnp.array(TARGET)) ** 2, axis=-1) / 200,
    lambda s: {"astray": jnp.mean(s[:, 0] < 0, dtype=jnp.float32)},  # lanes on the side of the other fixed point
)


def cells(config: Config) -> list[harness.Cell]:
    return [{"method": "seconds"}, *harness.grid(method=METHODS, rate=config.rates)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    every = config.iterations // config.evaluations
    training = lambda name: policies.training(LORENZ, METHODS[name], config.units, TASK, config.horizon, config.lanes)
    if cell["method"] == "seconds":
        return {"seconds": policies.seconds({name: training(name) for name in METHODS}, every, config.rounds)}
    keys = jax.random.split(jax.random.key(config.seed), config.tuning + config.seeds)  # the same for all methods
    evaluate = policies.evaluation(LORENZ, TASK, config.horizon)
    return policies.curves(training(cell["method"]), evaluate, keys, cell["rate"], config.evaluations, every)[0]


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, curves, last = [], {}, policies.last(config.evaluations)
    took = next(r["seconds"] for c, r in records if c["method"] == "seconds")
    for name in METHODS:
        costs = {c["rate"]: policies.finite(r["costs"]) for c, r in records if c["method"] == name}
        rate = min(costs, key=lambda rate: costs[rate][: config.tuning, last].mean())
        chosen = curves[name] = costs[rate][config.tuning :]
        steps = policies.first_success(chosen, TASKS[TASK], config.iterations // config.evaluations)
        # The middle of the sorted seeds, not of neighbours, as infinity has no mean.
        median = lambda x: np.percentile(x, 50, axis=-1, method="higher")
        with np.errstate(invalid="ignore"):
            draws = harness.bootstrap(steps, median, config.seed)
            fast, slow = np.percentile(draws, [2.5, 97.5], method="nearest")
        row = {"method": name, "rate": rate, "seconds_per_step": took[name], "seconds_over_RP": took[name] / took["RP"]}
        row |= policies.mean(config, "cost", chosen[:, last].mean(1)) | {"success": np.isfinite(steps).mean()}
        row |= {"steps": float(median(steps)), "steps_low": float(fast), "steps_high": float(slow)}
        rows.append(row | {f"success_{k}": row[k.replace("seconds", "steps")] * took[name] for k in _SECONDS})
    speed = lambda row: (row["success_seconds"], row["cost"])
    plain, total = (min((r for r in rows if r["method"] in some), key=speed) for some in (_PLAIN, _TP))
    figures = {"best_without_total_propagation": plain["method"], "best_total_propagation": total["method"]}
    figures["seconds_to_success_ratio"] = total["success_seconds"] / plain["success_seconds"]
    columns = ("rate", "cost", "success", "steps", "success_seconds", "seconds_per_step", "seconds_over_RP")
    return harness.Report(figures, rows, harness.table(rows, "method", *columns), _picture(config, rows, curves))


_SECONDS = ("seconds", "seconds_low", "seconds_high")
_TP, _PLAIN = ([name for name in METHODS if name.startswith("TP") == total] for total in (True, False))


def _picture(config, rows, curves):
    figure, (axes,) = harness.panels(1, 2, (13, 5))
    how = f"best of {len(config.rates)} learning rates; mean of {config.seeds} seeds with 95 % intervals"
    figure.suptitle(f"Policies for the noisy Lorenz system, H = {config.horizon}, {config.lanes} lanes, {how}")
    seconds = {row["method"]: row["seconds_per_step"] for row in rows}
    policies.plot(axes, rows, curves, METHODS, config.iterations // config.evaluations, config, seconds, _PLAIN)
    axes[0].set_ylabel(f"cost of {TASK}, policy {config.units}-{config.units}")
    for axis in axes:
        axis.axhline(TASKS[TASK], color="gray", lw=0.8, ls=":")
    return figure


if __name__ == "__main__":
    harness.main()
