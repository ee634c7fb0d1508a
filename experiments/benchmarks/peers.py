"""apgrad beside its peers on the same problems: variance, seconds, and whether first and second derivatives are right.

    python -m experiments.benchmarks.peers                   # under two minutes
    python -m experiments.benchmarks.peers --preset paper    # five times the estimates

*Data.* The negative ELBO of a mixture of two normals, with a Bernoulli choice for each of eight data. *Chain.* Four
Bernoulli choices in turn, each of which moves a state that the next choice and a cost depend on; written step by step,
and in a scan. Both have exact values, by sums over all outcomes, which JAX differentiates in float64.

The methods: a surrogate loss written by hand, with the costs-to-go and without a baseline; NumPyro's `TraceGraph_ELBO`;
GenJAX's ADEV with `flip_reinforce`; apgrad's likelihood ratio in `ap.expectation`, and `ap.variational.elbo`. All draw
the same number of samples. The variance is summed over the elements of the gradient. Seconds are over those of the
surrogate. A derivative is right if the mean of its estimates is within 4 standard errors of the exact one in each
element; where a method raises an error instead, the table says "refused".

GenJAX needs an environment of its own: the variable APGRAD_GENJAX_PYTHON names its Python, and without the variable
GenJAX is left out. Its seconds are measured in its own process, with another version of JAX.
"""

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro.contrib.control_flow import scan as numpyro_scan
from numpyro.infer import TraceGraph_ELBO

import apgrad as ap
from apgrad.testing._moments import Moments, moments_of
from experiments import harness
from experiments.parts.turns import take_turns

DATA = jnp.array([-1.0, 0.5, 2.0, 2.5, -0.3, 0.8, 1.1, 1.9])
STEPS, SAMPLES = 4, 16  # of the chain; that a gradient is the mean of
THETA = {"data": jnp.linspace(-0.4, 0.6, 8), "chain": jnp.array([0.3, 0.7])}
PROBLEMS = ("data", "chain", "chain in scan")
METHODS = ("surrogate", "TraceGraph_ELBO", "GenJAX", "ap.expectation", "ap.variational.elbo")


class Config(harness.Config):
    """Options of the benchmark."""

    estimates: int = 2_000  # how many gradients each mean and variance is of.
    rounds: int = 20  # how often each gradient is timed.


PAPER = Config(estimates=10_000, rounds=300)


def log_bernoulli(logit: jax.Array, x: jax.Array) -> jax.Array:
    """The log-density of a Bernoulli choice x."""
    return x * jax.nn.log_sigmoid(logit) + (1 - x) * jax.nn.log_sigmoid(-logit)


def fit(z: jax.Array, x: jax.Array) -> jax.Array:
    """-log p(x, z) of the mixture."""
    return (x - 2 * z) ** 2 / 2 - jnp.log(jnp.where(z > 0, 0.4, 0.6)) + jnp.log(2 * jnp.pi) / 2


def logit_at(theta: jax.Array, x: jax.Array) -> jax.Array:
    """The logit of the chain's choice at a state."""
    return theta[0] - theta[1] * x


def move(theta: jax.Array, x: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of the chain: what follows from a choice at a state, the next state and the cost."""
    after = 0.8 * x + a
    return after, log_bernoulli(logit_at(theta, x), a) + jnp.log(2.0) + (after - 1) ** 2


def run(problem: str, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """The chain's steps, in a scan or written out."""
    if problem == "chain in scan":
        return lax.scan(step, carry, xs)
    made = []
    for x in xs:
        carry, y = step(carry, x)
        made.append(y)
    return carry, jax.tree.map(lambda *ys: jnp.stack(ys), *made)


def exact(problem: str) -> Callable[[jax.Array], Any]:
    """The exact objective, by a sum over outcomes."""

    def of_data(theta):
        x = DATA.astype(theta.dtype)
        p, one = jax.nn.sigmoid(theta), jnp.ones_like(theta)
        term = lambda z: log_bernoulli(theta, z) + fit(z, x)
        return jnp.sum(p * term(one) + (1 - p) * term(0 * one))

    def of_chain(theta):
        total = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=STEPS):
            x, log_chance, cost = jnp.zeros((), theta.dtype), 0.0, 0.0
            for a in jnp.asarray(outcome, theta.dtype):
                log_chance += log_bernoulli(logit_at(theta, x), a)
                x, paid = move(theta, x, a)
                cost += paid
            total += jnp.exp(log_chance) * cost
        return total

    return of_data if problem == "data" else of_chain


def surrogate(problem: str, samples: int) -> Callable[..., Any]:
    """The gradient of a surrogate loss, as it is written by hand."""

    def of_data(theta, key):
        p = jax.nn.sigmoid(lax.stop_gradient(theta))
        z = jax.random.bernoulli(key, p, (samples, len(DATA))).astype(theta.dtype)
        score = log_bernoulli(theta, z)
        return jnp.mean(jnp.sum(score * lax.stop_gradient(score + fit(z, DATA)), axis=-1))

    def of_chain(theta, key):
        def step(x, key):
            logit = logit_at(theta, x)
            a = jax.random.bernoulli(key, jax.nn.sigmoid(lax.stop_gradient(logit))).astype(theta.dtype)
            after, cost = move(theta, x, a)
            return after, (log_bernoulli(logit, a), cost)

        _, (scores, costs) = run(problem, step, jnp.zeros(samples), jax.random.split(key, STEPS))
        to_go = lax.stop_gradient(jnp.cumsum(costs[::-1], axis=0)[::-1])
        return jnp.mean(jnp.sum(scores * to_go, axis=0))

    loss = of_data if problem == "data" else of_chain
    return lambda key, theta: jax.grad(loss)(theta, key)


def program(problem: str, samples: int) -> Callable[..., Any]:
    """The gradient by `ap.expectation`."""

    def of_data(tape, theta):
        d = dist.Bernoulli(logits=jnp.broadcast_to(theta, (tape.lanes, len(DATA))))
        tape, z = ap.sample(tape, d, ap.likelihood_ratio(), parts=True)
        z = z.astype(theta.dtype)
        return tape.cost(log_bernoulli(theta, z) + fit(z, DATA))

    def of_chain(tape, theta):
        def step(carry, _):
            tape, x = carry
            tape, a = ap.sample(tape, dist.Bernoulli(logits=logit_at(theta, x)), ap.likelihood_ratio())
            x, cost = move(theta, x, a.astype(theta.dtype))
            return (tape.cost(cost), x), None

        return run(problem, step, (tape, jnp.zeros(tape.lanes)), jnp.arange(STEPS))[0][0]

    return ap.grad(of_data if problem == "data" else of_chain, lanes=samples)


def in_numpyro(problem: str, elbo: Any) -> Callable[..., Any]:
    """The gradient of a NumPyro ELBO."""

    def data_model():
        with numpyro.plate("data", len(DATA)):
            z = numpyro.sample("z", dist.Bernoulli(0.4))
            numpyro.sample("x", dist.Normal(2.0 * z, 1.0), obs=DATA)

    def data_guide():
        theta = numpyro.param("theta", THETA["data"])
        with numpyro.plate("data", len(DATA)):
            numpyro.sample("z", dist.Bernoulli(logits=theta))

    def chain(in_guide):
        def run():
            theta = jnp.asarray(numpyro.param("theta", THETA["chain"]) if in_guide else THETA["chain"])

            def step(x, name):
                logit = logit_at(theta, x) if in_guide else jnp.zeros(())
                a = numpyro.sample(f"a{name}", dist.Bernoulli(logits=logit))
                x = 0.8 * x + a
                if not in_guide:
                    numpyro.factor(f"cost{name}", -((x - 1) ** 2))
                return x, None

            if problem == "chain in scan":
                numpyro_scan(lambda x, _: step(x, ""), jnp.zeros(()), None, length=STEPS)
                return
            x = jnp.zeros(())
            for number in range(STEPS):
                x, _ = step(x, number)

        return run

    model, guide = (data_model, data_guide) if problem == "data" else (chain(False), chain(True))

    def gradient(key, theta):
        with jax.numpy_dtype_promotion("standard"):
            return jax.grad(lambda theta: elbo.loss(key, {"theta": theta}, model, guide))(theta)

    return gradient


def gradients(problem: str, samples: int) -> dict[str, Callable[..., Any]]:
    """The methods that run in this process, as functions `(key, theta) -> gradient`."""
    elbo, own = TraceGraph_ELBO(num_particles=samples), ap.variational.elbo(lanes=samples)
    found = {"surrogate": surrogate(problem, samples), "TraceGraph_ELBO": in_numpyro(problem, elbo)}
    return found | {"ap.expectation": program(problem, samples), "ap.variational.elbo": in_numpyro(problem, own)}


def verdict(found: Moments, truth: Any) -> str:
    """Whether a mean is right."""
    off = np.max(np.abs(found.mean - truth) / np.maximum(found.standard_error, 1e-30))  # some are 0 in each estimate
    return "right" if off < 4 else f"wrong, {off:.0f} s.e."


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(problem=PROBLEMS)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    problem, key = cell["problem"], jax.random.key(seed)
    theta = THETA[problem.removesuffix(" in scan")]
    with jax.enable_x64(True):
        wide = jnp.asarray(theta, jnp.float64)
        truths = {order: np.asarray(f(exact(problem))(wide)) for order, f in ((1, jax.grad), (2, jax.hessian))}
    result: dict[str, Any] = {method: {} for method in METHODS}
    timed = {}
    for method, gradient in gradients(problem, SAMPLES).items():
        for order, function in ((1, gradient), (2, jax.jacfwd(gradient, argnums=1))):
            try:
                found = ap.testing.moments(lambda key, f=function: f(key, theta), key, config.estimates)
            except Exception as error:  # whatever a peer raises is the finding
                result[method][f"order {order}"] = "refused"
                result[method][f"error {order}"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                continue
            result[method][f"order {order}"] = verdict(found, truths[order])
            if order == 1:
                result[method]["variance"] = float(np.sum(found.variance))
                jitted = jax.jit(gradient)
                timed[method] = lambda jitted=jitted: jitted(key, theta)
    seconds = {method: float(np.median(s)) for method, s in take_turns(timed, config.rounds).items()}
    result["GenJAX"] = genjax(config, problem, seed, truths)
    for method, found in result.items():
        spent = seconds.get(method, found.pop("seconds", None))
        found["seconds"] = None if spent is None else spent / seconds["surrogate"]
    return result


def genjax(config: Config, problem: str, seed: int, truths: dict[int, np.ndarray]) -> dict[str, Any]:
    """GenJAX's gradients, made by its own Python."""
    python = os.environ.get("APGRAD_GENJAX_PYTHON")
    if not python:
        return {"order 1": "not run", "order 2": "not run"}
    found: dict[str, Any] = {}
    script = Path(__file__).with_name("peers_genjax.py")
    for order in (1, 2):
        command = [python, str(script), problem, str(SAMPLES), str(config.estimates), str(seed), str(order)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        answer = json.loads(output.splitlines()[-1])
        if "error" in answer:
            found |= {f"order {order}": "refused", f"error {order}": answer["error"]}
            continue
        values = moments_of(np.asarray(answer["values"], np.float64))
        found[f"order {order}"] = verdict(values, truths[order])
        if order == 1:
            found |= {"variance": float(np.sum(values.variance)), "seconds": answer["seconds"]}
    return found


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = []
    for cell, result in records:
        base = result["surrogate"]["variance"]
        for method in METHODS:
            found, variance = result[method], result[method].get("variance")
            row = {**cell, "method": method, "variance": variance}
            row["variance_over_surrogate"] = None if variance is None else variance / base
            row |= {"seconds_over_surrogate": found.get("seconds")}
            row |= {f"order_{n}": found[f"order {n}"] for n in (1, 2)}
            rows.append(row | {f"error_{n}": found.get(f"error {n}", "") for n in (1, 2)})
    columns = ("variance_over_surrogate", "seconds_over_surrogate")
    figure, (axes,) = harness.panels(1, 2, (10, 4))
    for axis, name in zip(axes, columns, strict=True):
        mine = {method: [row for row in rows if row["method"] == method] for method in METHODS}
        lengths = {method: [row[name] or 0 for row in found] for method, found in mine.items()}
        harness.bars(axis, [cell["problem"] for cell, _ in records], lengths)
        for bar, row in zip(axis.patches, itertools.chain(*mine.values()), strict=True):
            bar.set_hatch("///" if row["order_1"].startswith("wrong") else "")
        axis.set(xscale="log", xlabel=f"{name.replace('_', ' ')} loss by hand")
        axis.axvline(1, color="gray", linewidth=0.8)
    figure.suptitle("Hatched: the gradient is wrong. No bar: refused or not run.")
    axes[1].legend()
    return harness.Report({}, rows, harness.table(rows, "problem", "method", *columns, "order_1", "order_2"), figure)


if __name__ == "__main__":
    harness.main()
