"""Second derivatives of estimates, against closed forms: one choice and two, unrolled and in a `scan`.

    python -m experiments.second_derivatives                   # under a minute
    python -m experiments.second_derivatives --preset paper    # a hundred times the samples, minutes

A surrogate loss whose score is a constant to differentiation gives a right first derivative and a wrong second one
(Foerster et al., 2018), and rules that JAX drops inside a differentiated `scan` do so there only. The
programs here have two choices, the second one's distribution depending on the first sample, and costs
after each that depend on the parameter too, so that every term of the second derivative is present. Truth: by
enumeration for Bernoulli choices, by quadrature in float64 for normal ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import apgrad as ap
from experiments import harness

THETA = 0.4
GRAPHS = ("one node", "two nodes, unrolled", "two nodes, scan")
ESTIMATORS: dict[str, Callable[[], ap.Estimator]] = {"LR": ap.likelihood_ratio, "RP": ap.reparameterization}
ESTIMATORS["LR, no baseline"] = lambda: ap.likelihood_ratio(None)


class Family(NamedTuple):
    """A distribution with a parameter, and its expectations."""

    make: Callable[[Any], Any]  # u -> distribution
    outcomes: Callable[[Any], tuple[Any, Any]]  # u -> (outcomes, weights); E[f(x)] = sum of weights times f(outcomes)


def _normal_outcomes(u):
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = np.broadcast_to(weights / weights.sum(), (*jnp.shape(u), 60))
    return jnp.sin(u)[..., None] + jnp.exp(0.3 * u)[..., None] * nodes, weights


FAMILIES = {
    "bernoulli": Family(
        lambda u: dist.Bernoulli(probs=u), lambda u: (jnp.array([0.0, 1.0]), jnp.stack([1 - u, u], axis=-1))
    ),
    "normal": Family(lambda u: dist.Normal(jnp.sin(u), jnp.exp(0.3 * u)), _normal_outcomes),
}


def program(family: str, graph: str, estimator: ap.Estimator | ap.Mixer) -> Callable[..., ap.Tape]:
    """`program(tape, theta)`: x from u = theta, y from u = theta (1 + x) / 2; costs theta x, theta y and y^2.

    With one node, y is x.
    """

    @ap.stochastic(estimator)
    def choose(theta, x):
        return FAMILIES[family].make(theta * (0.5 + 0.5 * x))

    def run(tape, theta):
        def body(carry, _):
            tape, x = choose(carry[0], theta, carry[1])
            x = x.astype(jnp.float32)
            return (tape.cost(theta * x), x), None

        carry = (tape, jnp.ones(tape.lanes))
        if graph == "two nodes, scan":
            carry, _ = jax.lax.scan(body, carry, length=2)
        else:
            for _ in range(1 if graph == "one node" else 2):
                carry, _ = body(carry, None)
        tape, x = carry
        return tape.cost(x**2)

    return run


def exact(family: str, graph: str, order: int, theta: float = THETA) -> float:
    """The derivative of the expected cost, by sums over all outcomes in float64."""
    outcomes = FAMILIES[family].outcomes

    def expected(theta):
        x, weights = outcomes(theta)
        if graph == "one node":
            return jnp.sum(weights * (theta * x + x**2))
        y, more = outcomes(theta * (0.5 + 0.5 * x))
        return jnp.sum(weights * theta * x) + jnp.sum(weights[:, None] * more * (theta * y + y**2))

    with jax.enable_x64(True):
        derivative = expected
        for _ in range(order):
            derivative = jax.grad(derivative)
        return float(jax.jit(derivative)(jnp.float64(theta)))


def estimate(family: str, graph: str, order: int, estimator: Any, lanes: int = 1000) -> Callable[..., jax.Array]:
    """`key -> an estimate of exact(...)`."""
    derivative = ap.expectation(program(family, graph, estimator), lanes)
    for _ in range(order):
        derivative = jax.grad(derivative, argnums=1)
    return lambda key: derivative(key, THETA)


class Config(harness.Config, among={"families": FAMILIES, "graphs": GRAPHS}):
    """Options of this experiment."""

    estimates: int = 1000  # how many, of 1,000 lanes each; at least 2.
    families: tuple[str, ...] = tuple(FAMILIES)  # which distributions.
    graphs: tuple[str, ...] = GRAPHS  # which programs.


PAPER = Config(estimates=20_000)


def cells(config: Config) -> list[harness.Cell]:
    grid = harness.grid(family=config.families, graph=config.graphs, method=ESTIMATORS, order=(1, 2))
    return [cell for cell in grid if (cell["method"], cell["family"]) != ("RP", "bernoulli")]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    case = (cell["family"], cell["graph"], cell["order"])
    found = ap.testing.moments(estimate(*case, ESTIMATORS[cell["method"]]()), jax.random.key(seed), config.estimates)
    truth, mean, error = exact(*case), float(found.mean), float(found.standard_error)
    return {"mean": mean, "standard_error": error, "exact": truth, "off": (mean - truth) / error}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = [{**cell, **result} for cell, result in records]
    worst = max(rows, key=lambda r: abs(r["off"]))
    case = {k: worst[k] for k in records[0][0]}
    figures = {"worst_distance_in_standard_errors": abs(worst["off"]), "worst_case": case}
    figure, ((axes,),) = harness.panels(size=(8, 0.5 + 0.22 * len(rows)))
    for order, colour in ((1, "#1f77b4"), (2, "#d95f02")):
        shown = [(i, r) for i, r in enumerate(rows) if r["order"] == order]
        axes.plot([r["off"] for _, r in shown], [i for i, _ in shown], "o", color=colour, label=f"order {order}")
    axes.axvspan(-4, 4, color="0.93")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{r['family']}, {r['graph']}, {r['method']}" for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="(mean - exact) / standard error", xlim=(-6, 6), title="Derivatives against closed forms")
    axes.legend()
    return harness.Report(figures, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
