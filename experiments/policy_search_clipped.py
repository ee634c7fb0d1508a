"""Policies for the noisy Lorenz system, learnt from gradients whose exploding lanes are clipped.

    python -m experiments.policy_search_clipped                   # under two minutes, one task
    python -m experiments.policy_search_clipped --preset paper
    python -m experiments.policy_search_clipped --preset paper --warm_up 20 --seed 1

The system, the tasks, the policies and the optimizer are those of `experiments.policy_search`. "RP, lanes clipped" cuts
a lane's message to 4 times the typical lane's at every step (`ap.clip_lanes`), and "TP, lanes clipped" does so in total
propagation (`ap.adaptive`); `total_propagation` in results.json is how much more the second costs on the same seeds.
With "growth clipped" no message is cut below the length that it has when it comes back to the last state
(`growth_only=True`). "multilevel" weighs levels of clipping by what repeats from call to call, up to no clipping
(`ap.multilevel`), with one setting for both tasks. Beside them are the best of `policy_search`'s plain methods:
reparameterization (RP), and reparameterization over horizons of ten steps. The gradient of every method is clipped by
its global norm.

Adam's learning rate is tuned for each method and task on seeds of its own, by the cost at the end of `steps` steps,
which is the mean of the last fifth of the evaluations. The curves are of other seeds, the same for all methods, at the
tuned rate. They take `long` steps, and are read after `steps` and after `long` steps; and also after equal time, in
which RP makes so many steps, and another method fewer where its own take longer. A step's time is the processor's, of
the fastest round, measured in one process in which all methods take turns. Adam's first step is as long as any, and at
a rate of .03 it saturates an untrained policy; with `warm_up` the rate rises over so many steps.
"""

import itertools
from typing import Any

import numpy as np

from experiments import harness
from experiments.parts import policies
from experiments.policy_search import LORENZ, METHODS as PLAIN, TASKS

PARTIAL = True
EVERY = 5  # steps from one evaluation to the next
ROUNDS = 5  # of the measurement of time
ASTRAY = 0.01  # the share of lanes at the other fixed point from which on a policy counts as one that leaves some there
METHODS = {name: PLAIN[name] for name in ("RP", "RP, short")}
METHODS["RP, lanes clipped"] = PLAIN["RP"]._replace(clip_factor=4.0, colour="#d95f02")
METHODS["multilevel"] = PLAIN["RP"]._replace(multilevel=True, colour="#8e3fb1")
METHODS["TP, lanes clipped"] = PLAIN["TP adaptive"]._replace(clip_factor=4.0)
for name, colour in (("RP, lanes clipped", "#e7298a"), ("multilevel", "#1b9e77"), ("TP, lanes clipped", "#666666")):
    growth = name.replace("lanes", "growth") if "lanes" in name else f"{name}, growth clipped"
    METHODS[growth] = METHODS[name]._replace(growth_only=True, colour=colour)


class Config(policies.Config, among={"tasks": TASKS}):
    """Options of this experiment."""

    tasks: tuple[str, ...] = ("every step",)  # names in `policy_search.TASKS`.
    units: int = 64  # the width of the policy's hidden layers.
    horizon: int = 50  # H, the number of steps of an episode.
    steps: int = 100  # of Adam, for tuning and for the first reading.
    long: int = 100  # steps of Adam for the second reading.

    def __post_init__(self):
        """Refuses what cannot be measured."""
        super().__post_init__()
        if self.steps % EVERY or self.long % EVERY or not 5 * EVERY <= self.steps <= self.long:
            raise ValueError(f"steps and long must be multiples of {EVERY}, at least {5 * EVERY}, long the larger one")


RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
PAPER = Config(tasks=tuple(TASKS), steps=240, long=720, rates=RATES, tuning=2, groups=4, seeds=5)


def cells(config: Config) -> list[harness.Cell]:
    points = harness.grid(task=config.tasks, method=METHODS)
    return [*policies.tuned_cells(config, points), {"task": config.tasks[0], "group": "seconds"}]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The rate, and each seed's costs and lanes astray at each evaluation; or the seconds of each method's step."""
    task, size = cell["task"], (config.horizon, config.lanes, config.warm_up)
    training = lambda name: policies.training(LORENZ, METHODS[name], config.units, task, *size)
    if cell["group"] == "seconds":
        return {"seconds": policies.seconds({name: training(name) for name in METHODS}, EVERY, ROUNDS)}
    rate, keys = policies.tuned(config, cell)
    steps = config.steps if cell["group"] == "tuning" else config.long
    evaluate = policies.evaluation(LORENZ, task, config.horizon)
    return {"rate": rate, **policies.curves(training(cell["method"]), evaluate, keys, rate, steps // EVERY, EVERY)[0]}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Each method at its tuned rate, on the groups of seeds that are finished for all methods of a task."""
    rows, figures, curves = [], {}, {}
    took = next((r["seconds"] for c, r in records if c["group"] == "seconds"), None)
    for task in config.tasks:
        mine = {(c.get("method"), c["group"]): r for c, r in records if c["task"] == task}
        groups = policies.whole_groups(config, mine, METHODS)
        if not groups:
            continue
        curves[task] = {name: policies.of_groups(mine, name, groups) for name in METHODS}
        ends = {name: _end(costs, config.steps) for name, costs in curves[task].items()}
        best = min((name for name in METHODS if name in PLAIN), key=lambda name: ends[name].mean())
        quartiles = {n: np.percentile(c, (25, 50, 75), 0, method="higher") for n, c in curves[task].items()}
        figures[task] = {"seeds": len(ends[best]), "best_plain": best, "quartiles": quartiles, "total_propagation": {}}
        for steps, cut in itertools.product((config.steps, config.long), ("lanes", "growth")):
            more = np.subtract(*(_end(curves[task][f"{m}, {cut} clipped"], steps) for m in ("TP", "RP")))
            figures[task]["total_propagation"][f"{cut}_after_{steps}"] = policies.mean(config, "more", more)
        for name, costs in curves[task].items():
            less, more = policies.bounds(config, ends[name] - ends[best])
            success = policies.first_success(costs[:, : config.steps // EVERY], TASKS[task], EVERY)
            row = {"task": task, "method": name, "rate": mine[name, groups[0]]["rate"], "seeds": len(costs)}
            row |= {"after_60": costs[:, min(60, config.long) // EVERY - 1].mean()}
            row |= policies.mean(config, "cost", ends[name])
            row |= {"less_best_plain_low": less, "less_best_plain_high": more}
            row |= {"steps": np.percentile(success, 50, method="higher"), "success": np.isfinite(success).mean()}
            row |= policies.mean(config, "cost_long", _end(costs, config.long))
            astray = _end(policies.of_groups(mine, name, groups, "astray"), config.long)
            row |= {"astray_long": astray.mean(), "seeds_astray": np.sum(astray >= ASTRAY)}
            if took:
                row |= {"seconds_over_RP": took[name] / took["RP"]}
                for which, steps in (("cost", config.steps), ("cost_long", config.long)):
                    blocks = max(1, round(min(steps, steps / row["seconds_over_RP"]) / EVERY))
                    row |= policies.mean(config, f"{which}_in_time", _end(costs, blocks * EVERY))
            rows.append(row)
    columns = ("rate", "after_60", "cost", "cost_in_time", "cost_long", "cost_long_in_time", "steps", "success")
    table = harness.table(rows, "task", "method", *columns)
    return harness.Report(figures, rows, table, _picture(config, rows, curves))


def _end(costs, steps):
    """The mean of each curve at the end of so many steps, (seeds,)."""
    return costs[:, policies.last(steps // EVERY)].mean(1)


def _picture(config, rows, curves):
    figure, (axes,) = harness.panels(1, len(config.tasks), (13, 4.6))
    seeds = " or ".join(map(str, sorted({r["seeds"] for r in rows})))
    how = f"{config.lanes} lanes, rates tuned, warm-up {config.warm_up}; mean of {seeds} seeds with 95 % intervals"
    figure.suptitle(f"Policies for the noisy Lorenz system, clipped by lanes; {how}")
    for axis, task in zip(axes, config.tasks, strict=True):
        mine = [row for row in rows if row["task"] == task]
        policies.plot([axis], mine, curves.get(task, {}), METHODS, EVERY, config)
        axis.axhline(TASKS[task], color="gray", lw=0.8, ls=":")
        axis.set_ylabel(f"cost of {task}")
    return figure


if __name__ == "__main__":
    harness.main()
