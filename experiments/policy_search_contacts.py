"""A policy learns through contacts: a puck among round posts, beside a short-horizon actor-critic.

    python -m experiments.policy_search_contacts                   # smaller: fewer steps, seeds and rates; two minutes
    python -m experiments.policy_search_contacts --preset paper
    python -m experiments.policy_search_contacts --preset paper --warm_up 20 --seed 1

The simulator is `parts/puck.py`: each contact with a round post scatters, and the pathwise gradient through an episode
explodes. The policy is a network of two hidden layers, from place and velocity to two forces; the cost is the mean over
an episode's steps. Gradients are those of `experiments.policy_search_clipped`: reparameterization (RP), over the whole
episode and over ten steps (`RP, short`), lanes clipped at 4 times the typical lane's message, all or only where it has
grown (`RP, growth clipped`), levels of clipping (`multilevel`), and `ap.adaptive` with lanes clipped (`TP, lanes
clipped`); and the likelihood ratio (LR). `SHAC` is a short-horizon actor-critic in plain JAX (`parts/actor_critic.py`),
with windows of ten steps. In a step it makes as many updates as windows fit into an episode, so that all methods
simulate the same number of steps in a step.

Adam's learning rate, the actor's of SHAC, is tuned for each method by the cost at the end, the mean of the last fifth
of the evaluations, on seeds of its own. The curves are of other seeds, the same for all methods, at the tuned rate.
Seconds of a step are the processor's, the least of many blocks of steps on one core, without evaluations.

*Does it explode?* For untrained policies: the median and the largest length of the gradient over many keys.

*What comes out.* It does, and RP hardly learns. Lanes clipped fail with one seed in twenty, and SHAC with none, unless
the rate rises over the first steps (`warm_up`): then lanes clipped fail with none, and end below SHAC in less than
a third of its time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax

import apgrad as ap
from experiments import harness
from experiments.parts import actor_critic, policies, puck
from experiments.policy_search import METHODS as PLAIN
from experiments.policy_search_clipped import METHODS as CLIPPED

PARTIAL = True
EVERY = 5  # steps from one evaluation to the next
SHAC, EXPLOSION, TASK = "SHAC", "explosion", "every step"
METHODS = {name: CLIPPED[name] for name in ("RP", "RP, short")}
METHODS |= {SHAC: CLIPPED["RP, short"]._replace(colour="#e0a100"), "LR": PLAIN["LR"]._replace(colour="#777777")}
METHODS |= {n: CLIPPED[n] for n in ("RP, lanes clipped", "RP, growth clipped", "multilevel", "TP, lanes clipped")}
OTHERS = ("RP", "RP, short", SHAC, "LR")  # what people do without this library's ways


class Config(
    policies.Config, least={"estimates": 2}, multiple={"horizon": policies.SEGMENT}, among={"methods": METHODS}
):
    """Options of this experiment."""

    methods: tuple[str, ...] = tuple(METHODS)  # names in `METHODS`, RP among them, whose time is the unit.
    units: int = 32  # the width of the hidden layers of the policy, and of SHAC's critic.
    horizon: int = 60  # H, the number of steps of an episode.
    steps: int = 50  # of Adam.
    estimates: int = 20  # gradients of each untrained policy.

    def __post_init__(self):
        super().__post_init__()
        if "RP" not in self.methods:
            raise ValueError(f"methods must have RP, whose time is the unit, got {list(self.methods)}")
        if self.steps % EVERY or self.steps < 5 * EVERY:
            raise ValueError(f"steps must be a multiple of {EVERY}, at least {5 * EVERY}, got {self.steps}")


PAPER = Config(steps=240, rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2), tuning=2, groups=4, seeds=5, estimates=200)


def step(policy: Any, s: jax.Array) -> dist.Distribution:
    """The state (4,) a step later."""
    return dist.Normal(puck.step(s, puck.FORCE * policy(s)), jnp.array(puck.NOISE)).to_event(1)


PUCK = policies.System((4, 2), puck.start, step, puck.cost)


@functools.cache
def _training(name, units, horizon, lanes, warm_up):
    if name != SHAC:
        return policies.training(PUCK, METHODS[name], units, TASK, horizon, lanes, warm_up)
    new_policy = functools.partial(policies.policy, PUCK, units)
    return policies.compiled(actor_critic.learner(PUCK, horizon, new_policy, lanes, policies.SEGMENT, units, warm_up))


def cells(config: Config) -> list[harness.Cell]:
    return [{"method": EXPLOSION}, *policies.tuned_cells(config, harness.grid(method=config.methods))]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The rate, the costs of each seed at each evaluation, and the seconds of a step."""
    if cell["method"] == EXPLOSION:
        return _explosion(config, policies.seed_keys(config)[config.tuning :][:4])
    rate, keys = policies.tuned(config, cell)
    learner = _training(cell["method"], config.units, config.horizon, config.lanes, config.warm_up)
    evaluate = policies.evaluation(PUCK, TASK, config.horizon)
    found, seconds = policies.curves(learner, evaluate, keys, rate, config.steps // EVERY, EVERY)
    return {"rate": rate, **found, "seconds": seconds}


def _explosion(config, keys):
    """The median and the largest length of each gradient over many keys, the mean over policies."""
    found = {}
    for name in ("RP", "LR", "RP, lanes clipped"):
        rollout = policies.program(PUCK, METHODS[name], TASK, config.horizon)
        gradient = ap.grad(rollout, config.lanes, check_nan=False)

        def lengths(key, gradient=gradient):
            start = policies.policy(PUCK, config.units, key)
            one = lambda key: optax.tree.norm(gradient(key, start))
            return jax.lax.map(one, jax.random.split(jax.random.fold_in(key, 1), config.estimates))

        measured = jax.jit(lengths)
        values = np.array([measured(key) for key in keys], np.float64)
        found[name] = {"median": float(np.median(values, 1).mean()), "largest": float(values.max(1).mean())}
    return found


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Each method at its tuned rate, on the groups of seeds that are finished for all methods."""
    found = {(c["method"], c["group"]): r for c, r in records if c.get("group", "tuning") != "tuning"}
    groups = policies.whole_groups(config, found, config.methods)
    if not groups:
        raise SystemExit("no group of seeds is finished for all methods")
    curves = {name: policies.of_groups(found, name, groups) for name in config.methods}
    ends = {name: costs[:, policies.last(costs.shape[1])].mean(1) for name, costs in curves.items()}
    best = min((name for name in config.methods if name in OTHERS), key=lambda name: ends[name].mean())
    seconds, rows = {name: min(found[name, g]["seconds"] for g in groups) for name in config.methods}, []
    for name, costs in curves.items():
        less, more = policies.bounds(config, ends[name] - ends[best])
        row = {"method": name, "rate": found[name, groups[0]]["rate"], "seeds": len(costs)}
        for steps in (20, 60):
            row |= {f"after_{steps}": float(costs[:, min(steps, config.steps) // EVERY - 1].mean())}
        row |= policies.mean(config, "cost", ends[name])
        row |= {"over_best_other_low": less, "over_best_other_high": more}
        rows.append(row | {"seconds_a_step": seconds[name], "seconds_over_RP": seconds[name] / seconds["RP"]})
    figures = {"best_other": best, "explosion": next((r for c, r in records if c["method"] == EXPLOSION), {})}
    columns = ("rate", "after_20", "after_60", "cost", "cost_median", "seconds_over_RP", "seeds")
    return harness.Report(figures, rows, harness.table(rows, "method", *columns), _picture(config, rows, curves))


def _picture(config, rows, curves):
    figure, ((place, *axes),) = harness.panels(1, 3, (15, 4.6))
    how = f"H = {config.horizon}, {config.lanes} lanes, rates tuned, warm-up {config.warm_up}; mean, 95 % intervals"
    figure.suptitle(f"{rows[0]['seeds']} policies push a puck to the middle of six posts; {how}")
    _trajectories(place)
    policies.plot(axes, rows, curves, METHODS, EVERY, config, {row["method"]: row["seconds_a_step"] for row in rows})
    axes[0].set(xlabel="steps of Adam, each of as many simulated steps", ylabel="cost")
    return figure


def _trajectories(axis):
    """Two pucks that start a ten-thousandth apart, without force and noise."""
    s = puck.start(jax.random.key(7), 400)[74]
    for k, start in enumerate((s, s + 1e-4)):
        body = lambda s, _: ((after := puck.step(s, jnp.zeros(2))), after)
        path = np.asarray(jax.lax.scan(body, start, length=80)[1])
        axis.plot(path[:, 0], path[:, 1], ".-", lw=0.8, ms=2, label=("a puck", "begun .0001 away")[k])
    turn = np.linspace(0, 2 * np.pi, 60)
    for x, y in puck.POSTS:
        axis.fill(x + puck.RADIUS * np.cos(turn), y + puck.RADIUS * np.sin(turn), color="0.8")
    limits = (-1.1 * puck.BOX, 1.1 * puck.BOX)
    axis.plot(0, 0, "k+")
    axis.set(aspect="equal", xlim=limits, ylim=limits, title="two pucks without a policy, 80 steps")
    axis.legend(loc="lower right")


if __name__ == "__main__":
    harness.main()
