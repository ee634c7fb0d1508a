"""Variance and seconds of the estimators of discrete choices, beside exact variances.

    python -m experiments.benchmarks.discrete_choices                   # under two minutes
    python -m experiments.benchmarks.discrete_choices --preset paper    # ten times the estimates, and 200 choices

*Toy.* One Bernoulli choice b with probability theta and the cost (b - .499)^2 (Grathwohl et al., 2018): the two costs
differ by .002 alone, so that nearly all of a gradient's size is noise. *Quadratic.* Several choices b_d of different
probabilities, and the cost D (mean of b_d - .499)^2, through which every choice disturbs the others.

The variance is that of the gradient with respect to the logits of one lane, summed over the choices. For up to six
choices the variances of REINFORCE, leave-one-out, ARM and DisARM are known exactly, by sums over all outcomes and pairs
of outcomes. The control variates of REBAR and RELAX are trained on the variance first, at the same logits. Seconds are
those of a gradient with 1,000 lanes over those of plain `jax.grad` of a surrogate loss written by hand (REINFORCE
without a baseline), in turns.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from flax import nnx
from jax import lax

import apgrad as ap
from experiments import harness
from experiments.parts import networks
from experiments.parts.turns import take_turns

PROBLEMS: dict[str, tuple[float, ...]] = {"toy, theta .5": (0.5,), "toy, theta .1": (0.1,)}
PROBLEMS |= {f"quadratic, {size}": tuple(np.linspace(0.1, 0.9, size)) for size in (6, 200)}
METHODS = ("reinforce", "rloo, 2", "rloo, 4", "arm", "disarm", "rao_blackwellized, 1", "enumeration", "rebar", "relax")
METHODS += ("double_control_variates, 2", "measure_valued")
LANES = 1000
MOST_ENUMERATED = 6


class Control(nnx.Module):
    """RELAX's control variate: a network with one hidden layer of the relaxed choices, and a quadratic's features."""

    def __init__(self, size: int, rngs: nnx.Rngs):
        self.hidden, self.out = nnx.Linear(size, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, z: jax.Array) -> jax.Array:
        """The value at one lane's relaxation."""
        return self.out(jnp.tanh(self.hidden(jax.nn.sigmoid(2 * z))))[0]


def cost(x: jax.Array) -> jax.Array:
    """The cost of one lane's choices, (D,) of 0 and 1."""
    return x.shape[0] * (jnp.mean(x) - 0.499) ** 2


def logits_of(problem: str) -> jax.Array:
    """The logits of the problem's choices."""
    p = np.array(PROBLEMS[problem])
    return jnp.asarray(np.log(p / (1 - p)), jnp.float32)


def start(method: str, size: int) -> Any:
    """The parameters of the method's control variate before training; None where there are none."""
    if method == "rebar":
        return {"log_temperature": jnp.float32(np.log(0.5)), "eta": jnp.float32(1.0)}
    return Control(size, nnx.Rngs(0)) if method == "relax" else None


def estimator(method: str, control: Any) -> ap.ChoiceEstimator:
    """The estimator for `ap.choose`."""
    if method == "rebar":
        return ap.rebar(jnp.exp(control["log_temperature"]), control["eta"])
    if method == "relax":
        return ap.relax(control)
    name, _, samples = method.partition(", ")
    return getattr(ap, name)(*([int(samples)] if samples else []))


def objective(method: str, lanes: int) -> Callable[..., jax.Array]:
    """`(key, logits, control) -> ` the expected cost, estimated."""

    def program(tape, logits, control):
        coins = dist.Bernoulli(logits=jnp.broadcast_to(logits, (tape.lanes, *logits.shape)))
        if method == "reinforce":
            tape, x = ap.sample(tape, coins, ap.likelihood_ratio(None))
            return tape.cost(lambda x: cost(x.astype(jnp.float32)), x)
        go_on = lambda x: (cost(x.astype(jnp.float32)), None)
        return ap.choose(tape, coins, go_on, estimator(method, control))[0]

    return ap.expectation(program, lanes)


def trained(method: str, logits: jax.Array, steps: int, key: jax.Array) -> Any:
    """The control variate's parameters after Adam on the variance."""
    control = start(method, len(logits))
    if control is None:
        return None
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, steps))
    cost = objective(method, 50)
    step = networks.descent(optimizer, lambda control, key: cost(key, logits, control))
    train = jax.jit(lambda begin, keys: lax.scan(lambda carry, key: (step(*carry, key)[:2], None), begin, keys)[0][0])
    return train((control, optimizer.init(control)), jax.random.split(key, steps))


def exact_variance(method: str, probabilities: tuple[float, ...]) -> float | None:
    """The variance of one lane's gradient with respect to the logits, by sums over all outcomes; None where unknown."""
    p, size = np.array(probabilities), len(probabilities)
    if method == "enumeration":
        return 0.0
    if size > MOST_ENUMERATED or method not in ("reinforce", "rloo, 2", "arm", "disarm"):
        return None
    x = np.array(list(itertools.product((0, 1), repeat=size)))
    c = size * (x.mean(axis=1) - 0.499) ** 2
    weight = np.prod(np.where(x, p, 1 - p), axis=1)
    truth = (weight * c) @ (x - p)
    if method == "reinforce":
        return float(np.sum(weight[:, None] * (c[:, None] * (x - p)) ** 2) - truth @ truth)
    difference = (c[:, None] - c[None, :])[..., None] / 2
    moves = x[:, None] - x[None, :]
    if method == "rloo, 2":
        square = np.sum((difference * moves) ** 2, axis=-1)
        return float(weight @ square @ weight - truth @ truth)
    # An antithetic pair of one choice: (1, 0) and (0, 1) with probability m each, and the likelier outcome twice.
    m = np.minimum(p, 1 - p)
    twice = np.where(x[:, None], np.maximum(p - m, 0), np.maximum(1 - p - m, 0))
    joint = np.prod(np.where(moves != 0, m, np.where(x[:, None] == x[None, :], twice, 0)), axis=-1)
    if method == "disarm":
        squares = moves**2 * np.maximum(p, 1 - p) ** 2
    else:
        # (u - 1/2)^2 where the two differ, u below m or above 1 - m, and between m and 1 - m; ARM has no 1/2.
        outside = (0.125 - (0.5 - m) ** 3) / (3 * m)
        inside = np.where(m < 0.5, (0.5 - m) ** 2 / 3, 0.0)
        squares = 4 * np.where(moves != 0, outside, inside)
    return float(np.sum(joint[..., None] * difference**2 * squares) - truth @ truth)


def by_hand(draw_logits: Callable[[Any], jax.Array], costs: Callable[[jax.Array], jax.Array], samples: int = 1) -> Any:
    """A surrogate loss without apgrad, `(key, parameters) -> scalar`, of costs (lanes,) of choices (lanes, D).

    The baseline of a sample is the mean cost of the others; none has a baseline if there is one sample.
    """

    def loss(key, parameters):
        logits = draw_logits(parameters)
        p = jax.nn.sigmoid(lax.stop_gradient(logits))
        x = jax.random.bernoulli(key, p, (samples, *p.shape)).astype(p.dtype)
        cost = jax.vmap(costs)(x)
        baseline = (jnp.sum(cost, axis=0) - cost) / (samples - 1) if samples > 1 else 0.0
        density = -jnp.sum(jax.nn.softplus((1 - 2 * x) * logits), axis=-1)
        return jnp.mean(lax.stop_gradient(cost - baseline) * density)

    return loss


class Config(harness.Config):
    """Options of the benchmark."""

    problems: tuple[str, ...] = ("toy, theta .5", "toy, theta .1", "quadratic, 6")  # names in PROBLEMS.
    estimates: int = 20_000  # gradients of one lane each, for a variance.
    steps: int = 1_000  # of training for a control variate.
    rounds: int = 20  # how often each method is timed.


PAPER = Config(problems=tuple(PROBLEMS), estimates=200_000, steps=5_000, rounds=100)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(problem=config.problems)


def variance_of(samples: jax.Array) -> dict[str, float]:
    """The variance of estimates (n, D), summed over D, and its standard error."""
    squares = np.sum((np.asarray(samples, np.float64) - np.asarray(samples, np.float64).mean(axis=0)) ** 2, axis=1)
    error = float(squares.std() / np.sqrt(len(squares)))
    return {"variance": float(squares.sum() / (len(squares) - 1)), "standard_error": error}


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    problem, key = cell["problem"], jax.random.key(seed)
    logits = logits_of(problem)
    small = len(logits) <= MOST_ENUMERATED
    methods = [m for m in METHODS if small or m not in ("enumeration", "rao_blackwellized, 1", "measure_valued")]
    rows, calls = [], {}
    for method in methods:
        control = trained(method, logits, config.steps, jax.random.fold_in(key, 1))
        gradient = jax.grad(objective(method, 1), argnums=1)
        one = lambda key, control, g=gradient: g(key, logits, control)
        many = jax.jit(lambda keys, control, one=one: lax.map(lambda k: one(k, control), keys, batch_size=200))
        row = {"method": method, **variance_of(many(jax.random.split(key, config.estimates), control))}
        coins = dist.Bernoulli(logits=logits[None])
        evaluations = 1 if method == "reinforce" else estimator(method, control).evaluations(coins)
        rows.append(row | {"exact": exact_variance(method, PROBLEMS[problem]), "evaluations": evaluations})
        timed = jax.jit(jax.grad(objective(method, LANES), argnums=1))
        calls[method] = lambda timed=timed, control=control: timed(key, logits, control)
    surrogate = by_hand(lambda logits: jnp.broadcast_to(logits, (LANES, *logits.shape)), jax.vmap(cost))
    plain = jax.jit(jax.grad(surrogate, argnums=1))
    seconds = take_turns({"plain": lambda: plain(key, logits), **calls}, config.rounds)
    for row in rows:
        row["seconds_ratio"] = float(np.median(seconds[row["method"]] / seconds["plain"]))
        row["variance_times_evaluations"] = row["variance"] * row["evaluations"]
    return {"rows": rows}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = [{**cell, **row} for cell, result in records for row in result["rows"]]
    shown = ("variance", "standard_error", "exact", "seconds_ratio")
    figures = {f"{row['problem']}: {row['method']}": {k: row[k] for k in shown} for row in rows}
    figure, (line,) = harness.panels(1, len(records), (4 * len(records), 4))
    for axes, (cell, _) in zip(line, records, strict=True):
        mine = [r for r in rows if r["problem"] == cell["problem"]]
        values = [r["variance_times_evaluations"] for r in mine]
        harness.bars(axes, [r["method"] for r in mine], {"": values}, color="0.7")
        axes.set(xscale="log", xlabel="variance x evaluations (0: no bar)", title=cell["problem"])
        axes.set_xlim(left=10 ** np.floor(np.log10(min(v for v in values if v > 1e-12))))  # below it is rounding
        axes.tick_params(axis="y", labelsize=7)
    return harness.Report(figures, rows, harness.table(rows, "problem", "method", "evaluations", *shown), figure)


if __name__ == "__main__":
    harness.main()
