"""Cart-pole swing-up through a learned probabilistic model, as in PIPPS: episodes of real interaction to success.

    python -m experiments.policy_search_cartpole                   # under two minutes
    python -m experiments.policy_search_cartpole --preset paper

The set-up of PILCO and PIPPS (Deisenroth & Rasmussen, 2011; Parmas et al., 2018): a pole hangs from a cart, and a force
on the cart, of at most 10 N, is to swing it up and hold it there. After each real episode of 2.5 s (25 steps) a
probabilistic model of the step is fitted to all the data, particles go through the model, and the policy is improved by
gradients of their expected cost. The first episode has random forces. Success is a real episode whose last ten steps
have a mean cost of at most `SUCCESS`.

*The model* is Bayesian linear regression on random Fourier features (Rahimi & Recht, 2007) of speeds, angle and force,
beside these themselves: a Gaussian process with a sparse spectrum (Lazaro-Gredilla et al., 2010). PIPPS has exact
Gaussian processes. The regression was chosen because its posterior is two matrix products, so that a gradient through
25 steps on 100 particles takes milliseconds, where an exact process's cost grows with the square of the number of data.
A step is

    s' = s + N(W' f(s, u), diag(v) (1 + f' A f)),    A = (F' F + 1e-3 I)^-1,    W = A F' Y,

F the features of the data, Y the changes of state, and v what is left of Y: what the model does not know is part of the
noise.

*The policy* is a network of `UNITS` tanh units on speeds, position, and sine and cosine of the angle. Each method has
the same Adam, the same number of steps after each episode, and clipped gradients.

*Gradient variance*: after each episode's learning, over `repetitions` estimates at that policy, summed over the
parameters and divided by the squared length of their mean. The mean has noise, too, so that estimates of nothing but
noise have about `repetitions`: what is near to that is not known.

*What comes out* (ten runs a method, on seeds other than those that settled what success is). By the cost of a real
episode total propagation with the published weights learns best from the third episode on: .42 (.38 to .46) after
eight, where reparameterization has .57 (.48 to .67), the adaptive weights .55 (.45 to .66), and the likelihood ratio
.65 (.57 to .75). By the number of episodes to the first success no method is ahead of reparameterization beyond the
intervals: runs are few, and at most half of them succeed. The report takes any of the cells.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from flax import nnx
from jax.flatten_util import ravel_pytree
from scipy.stats import binomtest

import apgrad as ap
from experiments import harness
from experiments.parts import policies
from experiments.policy_search import METHODS as ALL_METHODS, runge_kutta

CART, POLE, LENGTH, FRICTION, GRAVITY, FORCE = 0.5, 0.5, 0.5, 0.1, 9.82, 10.0
DT, SUBSTEPS, NOISE, HORIZON, WIDTH, UNITS = 0.1, 4, 0.01, 25, 0.5, 32
FEATURES, RIDGE, SUCCESS, SCALES = 150, 1e-3, 0.25, (3.0, 6.0, 1.0, 1.0, 10.0)
PARTIAL = True
METHODS = ("RP", "LR", "TP published", "TP adaptive")


class Config(
    harness.Config, least={"seeds": 2, "episodes": 2, "particles": 4, "repetitions": 2}, multiple={"particles": 2}
):
    """Options of this experiment."""

    seeds: int = 2  # runs of each method.
    episodes: int = 3  # real episodes with a learned policy, after the random one.
    iterations: int = 40  # steps of Adam after each episode.
    rate: float = 1e-2  # learning rate.
    particles: int = 100  # lanes.
    repetitions: int = 10  # estimates for a gradient's variance.


PAPER = Config(seeds=10, episodes=8, iterations=150)


def real_step(s: jax.Array, force: jax.Array) -> jax.Array:
    """The true state (4,) a step later: position, speed, angle from hanging, its speed."""

    def velocity(s):
        _, v, a, w = s
        sine, cosine, total = jnp.sin(a), jnp.cos(a), CART + POLE
        push = force - FRICTION * v
        bottom = 4 * total - 3 * POLE * cosine**2
        cart = (2 * POLE * LENGTH * w**2 * sine + 3 * POLE * GRAVITY * sine * cosine + 4 * push) / bottom
        pole = -3 * POLE * LENGTH * w**2 * sine * cosine - 6 * total * GRAVITY * sine - 6 * push * cosine
        return jnp.stack([v, cart, w, pole / (LENGTH * bottom)])

    for _ in range(SUBSTEPS):
        s = runge_kutta(velocity, s, DT / SUBSTEPS)
    return s


def cost(s: jax.Array) -> jax.Array:
    """Between 0 and 1, by the distance of the pole's tip from where it is to stand."""
    x, _, a, _ = s
    square = (x + LENGTH * jnp.sin(a)) ** 2 + (LENGTH * jnp.cos(a) + LENGTH) ** 2
    return 1 - jnp.exp(-square / (2 * WIDTH**2))


def policy(key: jax.Array) -> nnx.Module:
    """A network from what is seen of a state (5,) to the force (1,) in units of `FORCE`."""
    rngs = nnx.Rngs(key)
    return nnx.Sequential(nnx.Linear(5, UNITS, rngs=rngs), nnx.tanh, nnx.Linear(UNITS, 1, rngs=rngs), nnx.tanh)


def act(policy: nnx.Module, s: jax.Array) -> jax.Array:
    """The force in a state (4,)."""
    x, v, a, w = s
    seen = jnp.stack([x, v / 3, jnp.sin(a), jnp.cos(a), w / 6])
    return FORCE * policy(seen)[0]  # pyright: ignore[reportCallIssue]


def features(basis: tuple[jax.Array, jax.Array], s: jax.Array, force: jax.Array) -> jax.Array:
    """Random Fourier features of a state (4,) and a force, beside what they are made of."""
    _, v, a, w = s
    z = jnp.stack([v, w, jnp.sin(a), jnp.cos(a), force]) / jnp.array(SCALES)
    return jnp.concatenate([(2 / FEATURES) ** 0.5 * jnp.cos(basis[0] @ z + basis[1]), z, jnp.ones(1)])


def fit(basis: Any, states: jax.Array, forces: jax.Array, changes: jax.Array, used: jax.Array) -> Any:
    """The model of the data, each (n, ...), of which `used` (n,) is 1 where there are data, and 0 elsewhere."""
    F = jax.vmap(features, (None, 0, 0))(basis, states, forces) * used[:, None]
    Y = changes * used[:, None]
    A = jnp.linalg.inv(F.T @ F + RIDGE * jnp.eye(F.shape[1]))
    W = A @ F.T @ Y
    v = jnp.sum((Y - F @ W) ** 2, axis=0) / jnp.sum(used) + 1e-6
    return basis, W, (A + A.T) / 2, v


def model_step(model: Any, policy: nnx.Module, s: jax.Array) -> dist.Distribution:
    """The model's distribution of the next state (4,)."""
    basis, W, A, v = model
    f = features(basis, s, act(policy, s))
    return dist.Normal(s + f @ W, jnp.sqrt(v * (1 + jnp.maximum(f @ A @ f, 0)))).to_event(1)


def start(key: jax.Array) -> jax.Array:
    """A state near hanging at rest."""
    return 0.1 * jax.random.normal(key, (4,))


def program(method: str) -> Any:
    """The rollout of a policy through the model, `(tape, policy, model) -> tape`."""
    chosen = ALL_METHODS[method]
    step = ap.stochastic(chosen.estimator, in_axes=(None, None, 0))(lambda p, model, s: model_step(model, p, s))

    def rollout(tape, policy, model):
        tape, key = tape.next_key()

        def body(carry, _):
            tape, s = step(carry[0], policy, model, carry[1])
            return (tape.cost(jax.vmap(cost)(s) / HORIZON), s), None

        states = jax.vmap(start)(jax.random.split(key, tape.lanes))
        return jax.lax.scan(body, (tape, states), length=HORIZON)[0][0]

    return rollout


def episode(key: jax.Array, policy: nnx.Module, random: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A real episode: states (HORIZON + 1, 4) and forces (HORIZON,), which are random ones if told so."""

    def body(s, key):
        first, second = jax.random.split(key)
        force = jnp.where(random, FORCE * jax.random.uniform(first, minval=-1, maxval=1), act(policy, s))
        after = real_step(s, force) + NOISE * jax.random.normal(second, (4,))
        return after, (after, force)

    first, *keys = jax.random.split(key, HORIZON + 1)
    _, (states, forces) = jax.lax.scan(body, start(first), jnp.stack(keys))
    return jnp.concatenate([start(first)[None], states]), forces


@functools.cache
def _compiled(method, particles, repetitions):
    estimates = policies.gradients(ALL_METHODS[method], program(method), particles)
    learner = policies.compiled(policies.learning(estimates, policy, ALL_METHODS[method].clip_norm))

    def noise(key, state, model):
        """The gradient's variance over the squared length of its mean."""
        gradient = lambda key: ravel_pytree(estimates.value_and_grad(key, state[2], state[0], model)[1])[0]
        found = jax.lax.map(gradient, jax.random.split(key, repetitions))
        return jnp.sum(jnp.var(found, axis=0, ddof=1)) / jnp.sum(jnp.mean(found, axis=0) ** 2)

    return *learner, jax.jit(noise)


_FIT, _EPISODE = jax.jit(fit), jax.jit(episode)


def cells(config: Config) -> list[harness.Cell]:
    return [{"method": method, "seed": seed} for seed in range(config.seeds) for method in METHODS]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    init, learn, noise = _compiled(cell["method"], config.particles, config.repetitions)
    key = jax.random.key(harness.cell_seed(config.seed, {"seed": cell["seed"]}))  # the same for all methods
    key, one, two, three = jax.random.split(key, 4)
    basis = jax.random.normal(one, (FEATURES, 5)), jax.random.uniform(two, (FEATURES,), maxval=2 * jnp.pi)
    start_key, state, first = three, None, policy(three)
    room = HORIZON * (config.episodes + 1)
    data = [np.zeros((room, n) if n else room, np.float32) for n in (4, 0, 4, 0)]
    found = {"costs": [], "last": [], "noise": []}
    for number in range(config.episodes + 1):
        key, one, two, three = jax.random.split(key, 4)
        states, forces = _EPISODE(one, first if state is None else state[0], jnp.asarray(number == 0))
        costs = np.asarray(jax.vmap(cost)(states[1:]), np.float64)
        if number:
            found["costs"].append(costs.mean())
            found["last"].append(costs[-10:].mean())
        here = slice(HORIZON * number, HORIZON * (number + 1))
        for array, new in zip(data, (states[:-1], forces, states[1:] - states[:-1], np.ones(HORIZON)), strict=True):
            array[here] = new
        if number < config.episodes:
            model = _FIT(basis, *map(jnp.asarray, data))
            # The first policy is that of the random episode.
            state = init(start_key, model) if state is None else state
            state = learn(state, jax.random.split(two, config.iterations), jnp.float32(config.rate), model)
            found["noise"].append(float(noise(three, state, model)))
    return found


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, curves = [], {}
    for method in METHODS:
        runs = [r for c, r in records if c["method"] == method]
        if len(runs) < 2:
            continue
        found = curves[method] = {name: np.array([r[name] for r in runs], float) for name in ("costs", "noise", "last")}
        episodes = policies.first_success(found["last"], SUCCESS, 1)
        low, high = binomtest(int(np.isfinite(episodes).sum()), len(episodes)).proportion_ci()  # Clopper & Pearson
        row = {"method": method, "runs": len(runs), "success": np.isfinite(episodes).mean()}
        row |= {"success_low": low, "success_high": high}
        row |= policies.mean(config, "episodes", np.minimum(episodes, config.episodes + 1))
        row |= policies.mean(config, "cost", found["costs"][:, -1])
        rows.append(row | {"noise": float(np.median(found["noise"][:, -1]))})
    table = harness.table(rows, "method", "success", "episodes", "cost", "noise")
    table += f"\nruns without success count as {config.episodes + 1} episodes"
    return harness.Report({}, rows, table, _picture(config, curves))


def _picture(config, curves):
    figure, (axes,) = harness.panels(1, 3, (15, 4.4))
    how = f"{config.particles} particles, {config.iterations} steps of Adam an episode, runs as given"
    figure.suptitle(f"Cart-pole swing-up through a learned model: {how}; bands are 95 % bootstrap intervals")
    episodes = np.arange(1, config.episodes + 1)
    panels = (
        ("mean cost of a real episode", lambda found: found["costs"], np.mean),
        ("share of runs with success so far", lambda f: np.logical_or.accumulate(f["last"] <= SUCCESS, 1), np.mean),
        (f"gradient variance / |mean of {config.repetitions}|$^2$ (median)", lambda found: found["noise"], np.median),
    )
    for axis, (title, choose, centre) in zip(axes, panels, strict=True):
        for method, found in curves.items():
            values = choose(found).astype(float)
            style = {"color": ALL_METHODS[method].colour, "label": f"{method}, {len(values)} runs"}
            harness.averaged(axis, episodes, values, config.seed, centre, **style)
        axis.set(title=title, xlabel="real episodes with a learned policy")
    axes[2].set_yscale("log")
    axes[0].legend()
    return figure


if __name__ == "__main__":
    harness.main()
