"""Estimators of discrete choices beside what one would write or import in their place, at equal evaluations.

    python -m experiments.benchmarks.choice_peers                   # under two minutes
    python -m experiments.benchmarks.choice_peers --preset paper    # five times the estimates

The toy and the quadratic of `discrete_choices.py`, and the linear autoencoder of `discrete_vae.py` with 20 latents and
digits, at parameters that were trained for a while; there the gradient is that of the encoder on one minibatch. The
peers: REINFORCE and leave-one-out (of 2 and 4 samples) as surrogate losses by hand, in plain JAX, and NumPyro's
`TraceGraph_ELBO`. On the toy and the quadratic the ELBO's prior is the guide itself, held fixed, so that the cost alone
has a gradient.

The mean of n independent estimates has 1/n of the variance at n times the evaluations, so that *variance times
evaluations* is the variance at equal evaluations. The table has its ratio to that of the best peer, with 95 %
intervals. Seconds are those of a gradient over those of REINFORCE by hand, in turns; 1,000 lanes for toy and quadratic.
GenJAX is in `peers.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro.infer import TraceGraph_ELBO

import apgrad as ap
from experiments import discrete_vae as vae, harness
from experiments.benchmarks import discrete_choices as toys
from experiments.parts.networks import apply
from experiments.parts.turns import take_turns

PROBLEMS = ("toy, theta .5", "toy, theta .1", "quadratic, 200", "autoencoder")
BY_HAND = {"REINFORCE by hand": 1, "leave-one-out by hand, 2": 2, "leave-one-out by hand, 4": 4}  # samples
PEERS = (*BY_HAND, "TraceGraph_ELBO")
OURS: dict[str, ap.ChoiceEstimator] = {"ap.enumeration": ap.enumeration(), "ap.rloo, 2": ap.rloo(2)}
OURS |= {"ap.rloo, 4": ap.rloo(4), "ap.arm": ap.arm(), "ap.disarm": ap.disarm(), "ap.arms, 4": ap.arms(4)}
OURS["ap.rebar"] = ap.rebar()


class Problem(NamedTuple):
    """Bernoulli choices of some lanes, and what they cost.

    `elbo` is (model, guide) of NumPyro, functions of the parameters, with the sum over lanes as the negative ELBO.
    """

    parameters: Any  # what the gradient is with respect to
    logits: Callable[[Any], jax.Array]  # parameters -> (lanes, D)
    cost: Callable[..., jax.Array]  # (x (D,), *row) -> the cost of one lane
    rows: tuple[jax.Array, ...]  # with the lanes as leading axis
    known: Callable[[Any], Any]  # parameters -> a cost that is not random
    elbo: tuple[Callable[..., Any], Callable[..., Any]]


def toy(name: str, lanes: int) -> Problem:
    """A problem of `discrete_choices.py`."""
    start = toys.logits_of(name)
    logits = lambda parameters: jnp.broadcast_to(parameters, (lanes, len(start)))

    def guide(parameters):
        with numpyro.plate("lanes", lanes):
            numpyro.sample("x", dist.Bernoulli(logits=logits(parameters)).to_event(1))

    def model(parameters):
        with numpyro.plate("lanes", lanes):
            x = numpyro.sample("x", dist.Bernoulli(logits=lax.stop_gradient(logits(parameters))).to_event(1))
            numpyro.factor("cost", -jax.vmap(toys.cost)(jnp.asarray(x, jnp.float32)))

    return Problem(start, logits, toys.cost, (), lambda parameters: 0.0, (model, guide))


def autoencoder(steps: int = 2000) -> Problem:
    """The linear autoencoder's encoder, on one minibatch."""
    config = vae.Config(steps=steps, records=1, learning_rate=1e-3)
    images = vae.images("digits")[0]
    keys = jax.random.split(jax.random.key(0), 3)
    begin = vae.start(keys[0], "linear", images.shape[1], 20, "RLOO, 2")
    state = vae.optax.adam(config.learning_rate).init(begin)
    trained = vae.functions(config, "RLOO, 2")[0](keys[1], begin, state, 0, steps)[0]
    x = vae.binarized(keys[2], images[: vae.BATCH])
    decoder, prior = trained["decoder"], trained["prior"]
    logits = lambda encoder: apply(encoder, x)

    def cost(z, x):
        scores = apply(decoder, z)
        return jnp.sum(jax.nn.softplus(scores) - x * scores)

    def guide(encoder):
        with numpyro.plate("images", len(x)):
            numpyro.sample("z", dist.Bernoulli(logits=logits(encoder)).to_event(1))

    def model(encoder):
        with numpyro.plate("images", len(x)):
            z = numpyro.sample("z", dist.Bernoulli(logits=jnp.broadcast_to(prior, (len(x), 20))).to_event(1))
            means = apply(decoder, jnp.asarray(z, jnp.float32))
            numpyro.sample("x", dist.Bernoulli(logits=means).to_event(1), obs=x)

    known = lambda encoder: jnp.mean(vae.divergence(logits(encoder), prior))
    return Problem(trained["encoder"], logits, cost, (x,), known, (model, guide))


def by_hand(problem: Problem, samples: int) -> Callable[[jax.Array, Any], Any]:
    """A surrogate loss's gradient, `(key, parameters) -> gradient`, with the other samples as baseline."""
    surrogate = toys.by_hand(problem.logits, lambda x: jax.vmap(problem.cost)(x, *problem.rows), samples)
    return jax.grad(lambda key, parameters: surrogate(key, parameters) + problem.known(parameters), argnums=1)


def in_numpyro(problem: Problem) -> Callable[[jax.Array, Any], Any]:
    """The gradient of `TraceGraph_ELBO`, a mean over lanes."""
    model, guide = problem.elbo
    lanes = len(problem.logits(problem.parameters))

    def loss(parameters, key):
        of = lambda function: lambda: function(parameters)
        return TraceGraph_ELBO().loss(key, {}, of(model), of(guide)) / lanes

    return lambda key, parameters: jax.grad(loss)(parameters, key)


def by_apgrad(problem: Problem, estimator: ap.ChoiceEstimator) -> Callable[[jax.Array, Any], Any]:
    """The gradient of `ap.choose`."""

    def program(tape, parameters):
        coins = dist.Bernoulli(logits=problem.logits(parameters))
        follow = lambda x, *row: (problem.cost(x.astype(jnp.float32), *row), None)
        tape, _ = ap.choose(tape, coins, follow, estimator, *problem.rows)
        return tape.cost(jnp.full(tape.lanes, problem.known(parameters)))

    return jax.grad(ap.expectation(program, len(problem.logits(problem.parameters))), argnums=1)


def methods(problem: Problem) -> dict[str, tuple[Callable[[jax.Array, Any], Any], int]]:
    """Each method's gradient and evaluations."""
    made = {name: (by_hand(problem, samples), samples) for name, samples in BY_HAND.items()}
    made["TraceGraph_ELBO"] = in_numpyro(problem), 1
    logits = problem.logits(problem.parameters)
    for name, estimator in OURS.items():
        if name != "ap.enumeration" or logits.shape[1] <= toys.MOST_ENUMERATED:
            made[name] = by_apgrad(problem, estimator), estimator.evaluations(dist.Bernoulli(logits=logits))
    return made


class Config(harness.Config):
    """Options of the benchmark."""

    estimates: int = 4_000  # gradients for a variance.
    rounds: int = 20  # how often each method is timed.


PAPER = Config(estimates=20_000, rounds=100)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(problem=PROBLEMS)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    name, key = cell["problem"], jax.random.key(seed)
    learned = autoencoder() if name == "autoencoder" else None
    problem, timed = learned or toy(name, 1), learned or toy(name, toys.LANES)
    found, calls = {}, {}
    with jax.numpy_dtype_promotion("standard"):
        for method, (gradient, evaluations) in methods(problem).items():
            flat = lambda key, g=gradient: jax.flatten_util.ravel_pytree(g(key, problem.parameters))[0]
            estimates = jax.jit(lambda keys, flat=flat: lax.map(flat, keys, batch_size=100))
            samples = estimates(jax.random.split(key, config.estimates))
            found[method] = toys.variance_of(samples) | {"evaluations": evaluations}
        for method, (gradient, _) in methods(timed).items():
            jitted = jax.jit(gradient)
            calls[method] = lambda jitted=jitted: jitted(key, timed.parameters)
        seconds = take_turns(calls, config.rounds)
    for method, row in found.items():
        row["seconds_ratio"] = float(np.median(seconds[method] / seconds["REINFORCE by hand"]))
    return found


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, figures = [], {}
    for cell, found in records:
        equal = {m: np.multiply((r["variance"], r["standard_error"]), r["evaluations"]) for m, r in found.items()}
        best = min(PEERS, key=lambda m: equal[m][0])
        for method, row in found.items():
            (mine, error), (peer, peer_error) = equal[method], equal[best]
            # The interval of the logarithm of the ratio; where no variance is left, the ratio is 0.
            certain = method == best or mine < 1e-12 * peer
            wide = 0.0 if certain else 1.96 * np.hypot(error / mine, peer_error / peer)
            ratio = mine / peer
            more = {"at_equal_evaluations": mine, "best_peer": best, "over_best_peer": ratio}
            more |= {"low": ratio * np.exp(-wide), "high": ratio * np.exp(wide)}
            rows.append({**cell, "method": method, **row, **more})
        mine = [r for r in rows if r["problem"] == cell["problem"] and r["method"] in OURS]
        ours = min(mine, key=lambda r: r["high"])
        figures[cell["problem"]] = {k: ours[k] for k in ("method", "best_peer", "over_best_peer", "low", "high")}
    columns = ("problem", "method", "variance", "evaluations", "over_best_peer", "low", "high", "seconds_ratio")
    figure, (line,) = harness.panels(1, len(records), (4 * len(records), 3.5))
    for axes, (cell, _) in zip(line, records, strict=True):
        shown = [r for r in rows if r["problem"] == cell["problem"]][::-1]
        for place, r in enumerate(shown):
            colour = "C0" if r["method"] in OURS else "0.6"
            if r["over_best_peer"] <= 1e-9:
                axes.annotate("0", (0.02, place), xycoords=("axes fraction", "data"), va="center", color=colour)
                continue
            middle, low, high = (r[k] for k in ("over_best_peer", "low", "high"))
            axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", color=colour)
        axes.set_yticks(range(len(shown)), [r["method"] for r in shown], fontsize=7)
        axes.axvline(1, color="0.6", linewidth=0.8)
        axes.set(xscale="log", xlabel="variance at equal evaluations\nover the best peer's", title=cell["problem"])
    return harness.Report(figures, rows, harness.table(rows, *columns), figure)


if __name__ == "__main__":
    harness.main()
