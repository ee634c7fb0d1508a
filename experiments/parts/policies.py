"""Policies that learn in a simulator: rollouts, ways to estimate their gradients, training, and rates that are tuned.

A rate is tuned for each method on seeds of its own (a *group* of them, "tuning"), and the curves are of other groups.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from flax import nnx

import apgrad as ap
from experiments import harness
from experiments.parts.turns import take_turns

CLIP, SEGMENT = 0.1, 10


class Config(harness.Config, least={"warm_up": 0, "seeds": 2}):
    """Options of a study whose learning rates are tuned."""

    lanes: int = 100  # trajectories for each gradient.
    rates: tuple[float, ...] = (1e-2,)  # learning rates to choose from.
    warm_up: int = 0  # the first steps of Adam, over which the rate rises to its own.
    tuning: int = 1  # seeds on which rates are chosen.
    groups: int = 1  # how many groups of other seeds.
    seeds: int = 2  # of a group.


class System(NamedTuple):
    """What is simulated, a lane a row."""

    sizes: tuple[int, int]  # of a state, and of a policy's output.
    start: Callable[[jax.Array, int], jax.Array]  # `(key, lanes) -> states`, (lanes, n).
    step: Callable[[Any, jax.Array], dist.Distribution]  # `(policy, state)` to the next state, of one lane.
    cost: Callable[[jax.Array], jax.Array]  # states (..., n) to costs (...).
    also: Callable[[jax.Array], dict[str, jax.Array]] = lambda s: {}  # of the last states, for an evaluation.


class Method(NamedTuple):
    """A way to estimate the gradient, and what is done about its explosion."""

    estimator: ap.Estimator | ap.Mixer  # of each random choice.
    cross_fit: bool = False  # of `ap.expectation`.
    adaptive: bool = False  # weigh by the moments of earlier calls, `ap.adaptive`.
    clip_norm: float = CLIP  # the largest norm of a gradient; 0 for any.
    segment: int = 0  # the number of steps after which the gradient stops; 0 for none.
    colour: str = "black"  # of its curves.
    clip_factor: float = 0  # a lane's message is cut to so many times the typical lane's; 0 for any.
    multilevel: bool = False  # levels of such clipping, `ap.multilevel`.
    growth_only: bool = False  # cut only what has grown since it came from the last state.
    by_state: bool = False  # its option.


def policy(system: System, units: int, key: jax.Array) -> nnx.Module:
    """A network of tanh units with two hidden layers."""
    (inputs, outputs), rngs = system.sizes, nnx.Rngs(key)
    sizes = ((inputs, units), (units, units), (units, outputs))
    first, second, third = (nnx.Linear(*pair, rngs=rngs) for pair in sizes)
    return nnx.Sequential(first, nnx.tanh, second, nnx.tanh, third, nnx.tanh)


def program(system: System, method: Method, task: str, horizon: int, has_aux: bool = False) -> Callable[..., Any]:
    """The rollout of a policy, with the costs of "every step" or of the "last step".

    It takes the factor of clipping as a last argument; with `has_aux` it returns the lanes' last states, too.
    """
    step = ap.stochastic(method.estimator)(system.step)

    def rollout(tape, policy, factor=method.clip_factor):
        tape, key = tape.next_key()

        def body(carry, t):
            tape, s = carry
            if method.segment:
                s = jnp.where(t % method.segment == 0, jax.lax.stop_gradient(s), s)
            tape, s = step(tape, policy, s)
            if method.clip_factor or method.multilevel:
                tape, s = ap.clip_lanes(tape, s, factor, growth_only=method.growth_only)
            return (tape.cost(system.cost(s) / horizon) if task == "every step" else tape, s), None

        (tape, s), _ = jax.lax.scan(body, (tape, system.start(key, tape.lanes)), jnp.arange(horizon))
        tape = tape if task == "every step" else tape.cost(system.cost(s))
        return (tape, s) if has_aux else tape

    return rollout


def gradients(method: Method, program: Callable[..., ap.Tape], lanes: int) -> ap.Adaptive:
    """The method's gradients as `ap.adaptive` has them; the state is empty for all that are not adaptive."""
    if method.adaptive:
        return ap.adaptive(program, lanes, by_state=method.by_state, check_nan=False)
    if method.multilevel:
        return ap.multilevel(ap.value_and_grad(program, lanes, check_nan=False))
    function = ap.value_and_grad(program, lanes, cross_fit=method.cross_fit, check_nan=False)
    return ap.Adaptive(lambda key, *args: (), lambda key, state, *args: (*function(key, *args), state))  # pyright: ignore


class Learning(NamedTuple):
    """A learner as pure functions, `init(key, *args) -> state` and `step(state, key, rate, *args) -> state`.

    The first element of a state is the parameters.
    """

    init: Callable[..., Any]
    step: Callable[..., Any]


def adam(clip: float, warm_up: int) -> optax.GradientTransformation:
    """Adam without its rate, which rises linearly over the first `warm_up` updates, on gradients clipped by norm."""
    clipped = optax.clip_by_global_norm(clip) if clip else optax.identity()
    rise = optax.scale_by_schedule(optax.linear_schedule(1 / warm_up, 1, warm_up)) if warm_up else optax.identity()
    return optax.apply_if_finite(optax.chain(clipped, optax.scale_by_adam(), rise), 10**9)


def learning(gradients: ap.Adaptive, init: Callable[[jax.Array], Any], clip: float, warm_up: int = 0) -> Learning:
    """Adam on an expected cost."""
    optimizer = adam(clip, warm_up)

    def start(key, *args):
        parameters = init(key)
        return parameters, optimizer.init(parameters), gradients.init(jax.random.fold_in(key, 1), parameters, *args)

    def step(state, key, rate, *args):
        parameters, moments, weights = state
        _, gradient, weights = gradients.value_and_grad(key, weights, parameters, *args)
        updates, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(parameters, jax.tree.map(lambda u: -rate * u, updates)), moments, weights

    return Learning(start, step)


def compiled(learner: Learning) -> Learning:
    """A learner whose `step(state, keys, rate, *args)` makes a step a key, compiled once for all rates."""

    def several(state, keys, rate, *args):
        return jax.lax.scan(lambda state, key: (learner.step(state, key, rate, *args), None), state, keys)[0]

    return Learning(jax.jit(learner.init), jax.jit(several))


@functools.cache
def training(
    system: System, method: Method, units: int, task: str, horizon: int, lanes: int, warm_up: int = 0
) -> Learning:
    """Adam on the cost of a policy, compiled."""
    estimates = gradients(method, program(system, method, task, horizon), lanes)
    return compiled(learning(estimates, functools.partial(policy, system, units), method.clip_norm, warm_up))


@functools.cache
def evaluation(system: System, task: str, horizon: int) -> Callable[[nnx.Module], dict[str, float]]:
    """The cost of a policy, and what else the system tells, on 500 lanes, the same for all policies."""
    rollout = program(system, Method(ap.reparameterization()), task, horizon, has_aux=True)
    cost = ap.expectation(rollout, 500, has_aux=True, check_nan=False)

    @jax.jit
    def evaluate(policy):
        mean, s = cost(jax.random.key(0), policy)
        return {"costs": mean, **system.also(s)}

    return lambda policy: {name: float(x) for name, x in evaluate(policy).items()}


def curves(
    learner: Learning, evaluate: Any, keys: jax.Array, rate: float, evaluations: int, every: int
) -> tuple[dict[str, Any], float]:
    """For each key a training's evaluations, between which are `every` steps; and the least processor seconds a step.

    Seeds run one after the other: under `vmap` a step of a seed was 10 to 20 % slower on one core.
    """
    found, seconds = [], []
    for key in keys:
        first, second = jax.random.split(key)
        state, curve = learner.init(first), []
        for key in jax.random.split(second, evaluations):
            keys, begun = jax.random.split(key, every), time.process_time()
            state = jax.block_until_ready(learner.step(state, keys, jnp.float32(rate)))
            seconds.append((time.process_time() - begun) / every)
            curve.append(evaluate(state[0]))
        found.append(curve)
    return {name: [[at[name] for at in curve] for curve in found] for name in found[0][0]}, min(seconds)


def seconds(learners: dict[str, Learning], every: int, rounds: int) -> dict[str, float]:
    """The processor's seconds for the fastest step of each learner; all take turns, `every` steps at a time."""
    keys = jax.random.split(jax.random.key(1), every)
    steps = lambda learner: functools.partial(learner.step, learner.init(jax.random.key(0)), keys, jnp.float32(1e-3))
    times = take_turns({name: steps(learner) for name, learner in learners.items()}, rounds)
    return {name: float(found.min()) / every for name, found in times.items()}


def finite(costs: Any) -> np.ndarray:
    """Costs (seeds, evaluations), infinite where they are not finite."""
    return np.where(np.isfinite(costs := np.array(costs, float)), costs, np.inf)


def last(evaluations: int) -> slice:
    """The last fifth of so many evaluations."""
    return slice(evaluations - max(1, evaluations // 5), evaluations)


def bounds(config: Any, values: np.ndarray) -> list[float]:
    """The 95 % bootstrap interval of the mean of values (n,)."""
    return harness.interval(harness.bootstrap(values, lambda x: x.mean(-1), config.seed))


def mean(config: Any, name: str, values: np.ndarray) -> dict[str, float]:
    """The mean of values (n,) under a name, with its interval, as `harness.table` shows them, and their median."""
    low, high = bounds(config, values)
    return {name: values.mean(), f"{name}_low": low, f"{name}_high": high, f"{name}_median": np.median(values)}


def plot(
    axes: Any, rows: Any, curves: Any, methods: Any, every: int, config: Any, seconds: Any = None, dashed: Any = ()
) -> None:
    """The cost of each row's method against steps, and on a second panel against seconds, given those of a step."""
    for row in rows:
        name, costs = row["method"], curves[row["method"]]
        steps = every * np.arange(1, costs.shape[1] + 1)
        style = {"color": methods[name].colour, "label": f"{name} (rate {row['rate']:g})"}
        style["fmt"] = "--" if name in dashed else "-"
        for axis, scale in zip(axes, (1,) if seconds is None else (1, seconds[name]), strict=True):
            harness.averaged(axis, steps * scale, costs, config.seed, **style)
    for axis, clock in zip(axes, ("steps of Adam", "processor seconds (steps times seconds a step)"), strict=False):
        axis.set(yscale="log", xlabel=clock)
    axes[-1].legend()


def first_success(costs: np.ndarray, limit: float, every: int) -> np.ndarray:
    """The steps until a curve's cost is at most the limit, (seeds,); infinite where it never is."""
    below = costs <= limit
    return np.where(below.any(1), every * (1 + below.argmax(1)), np.inf)


def tuned_cells(config: Any, points: list[harness.Cell]) -> list[harness.Cell]:
    """The seeds for tuning, a cell each rate; then a group of the other seeds after the other, at the tuned rates."""
    found: list[harness.Cell] = [{**point, "rate": r, "group": "tuning"} for point in points for r in config.rates]
    return found + [{**point, "group": g} for g in range(config.groups) for point in points]


def seed_keys(config: Any) -> jax.Array:
    """A key for each seed, those for tuning first: the same for all methods."""
    return jax.random.split(jax.random.key(config.seed), config.tuning + config.groups * config.seeds)


def tuned(config: Any, cell: harness.Cell) -> tuple[float, jax.Array]:
    """The rate of a cell, the best at the end of tuning, and the keys of its seeds."""
    keys = seed_keys(config)
    if cell["group"] == "tuning":
        return cell["rate"], keys[: config.tuning]
    first, point = config.tuning + cell["group"] * config.seeds, {k: v for k, v in cell.items() if k != "group"}

    def at_the_end(rate):
        costs = finite(harness.finished(config, {**point, "rate": rate, "group": "tuning"})["costs"])
        return costs[:, last(costs.shape[1])].mean()

    return min(config.rates, key=at_the_end), keys[first : first + config.seeds]


def whole_groups(config: Any, found: dict[Any, Any], methods: Any) -> list[int]:
    """The groups that are finished for all methods, of results by method and group."""
    return [g for g in range(config.groups) if all((m, g) in found for m in methods)]


def of_groups(found: dict[Any, Any], method: str, groups: list[int], name: str = "costs") -> np.ndarray:
    """The curves of a method in these groups, (seeds, evaluations)."""
    return finite(np.concatenate([found[method, group][name] for group in groups]))
