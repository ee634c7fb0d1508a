"""Outer gradients against the length of the unroll, where the inner problem turns chaotic.

    python -m experiments.outer_gradients                   # under two minutes
    python -m experiments.outer_gradients --preset paper    # more estimates, longer unrolls

The thesis proposes evolution strategies in place of truncated backpropagation and has no study of them (its section 6),
so the preset paper is no paper's: it is only larger.

The inner problem is gradient descent at rate theta on f(s) = s^2/2 + 3/4 sin(3 s), from s_0 ~ N(0, 1): a learning
rate as a meta-parameter. At a small rate it converges; at theta = 0.9 it is chaotic, and the derivative of the T-th
iterate grows like exp(lambda T), while the mean loss E[sum_t f(s_t)] / T is a smooth function of theta once it is
smoothed by sigma.

Estimators do not all estimate the derivative of the same function: evolution strategies smooth theta, PES with another
perturbation for each truncation, total propagation smooths the iterates. Each has its *bias against its own*, by many
samples of a method without bias, with its standard error:

    nearly exact      theta smoothed by sigma / 10, antithetic pairs          BPTT, truncated, forward
    smoothed          by sigma, antithetic pairs                              ES, truncated ES, ES-Single
    by segment        by sigma, for each truncation its own, the same         PES
    noise             of sigma on the iterates, likelihood ratio              total propagation

and the variance of one estimate of 32 tasks. Estimators that go on across truncations (K = 5) give the gradient of K
steps and are multiplied by T / K. A bias and variance of 1e20 are those of a mean that never settles.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap
from apgrad import meta
from experiments import harness
from experiments.outer_training import one_task

SEGMENT, TASKS, LANES = 5, 32, 32
SIGMA = 0.03  # deviation of the perturbations, of theta and (total propagation) of the iterates
OBJECTIVES = dict.fromkeys(("BPTT", "truncated", "forward"), "nearly exact")
OBJECTIVES |= {"ES": "smoothed", "truncated ES": "smoothed", "PES": "by segment", "ES-Single": "smoothed"}
OBJECTIVES["total propagation"] = "noise"
ESTIMATORS = tuple(OBJECTIVES)
REFERENCES = ("nearly exact", "smoothed", "by segment", "noise")


class Config(harness.Config, multiple={"lengths": SEGMENT}):
    """Options of this experiment."""

    rates: tuple[float, ...] = (0.1, 0.9)  # values of theta, a tame and a chaotic one.
    lengths: tuple[int, ...] = (5, 20)  # T.
    estimates: int = 200  # for each cell.
    reference: int = 50_000  # samples of a reference.


PAPER = Config(lengths=(5, 10, 20, 40, 80), estimates=2000, reference=2_000_000)


def problem(length: int) -> meta.Problem:
    """The recurrence; its loss is that of the mean over steps."""
    f = lambda s: s**2 / 2 + 0.75 * jnp.sin(3 * s)

    def step(theta, s):
        s = s - theta * jax.grad(f)(s)
        return s, f(s) / length

    def init(theta, key):
        return jax.random.normal(key, (), theta.dtype)

    return meta.Problem(init, step, lambda theta, s: jnp.zeros((), theta.dtype), length)


def estimator(name: str, length: int) -> tuple[meta.OuterGradient, int]:
    """The estimator, and how many estimates in a row make one unroll."""
    p = problem(length)
    if name == "total propagation":
        return meta.batched(meta.perturbed(p, sigma=SIGMA, unrolls=TASKS // 2), 2), 1
    goes_on = name in ("truncated", "truncated ES", "PES", "ES-Single")
    name = {"BPTT": "reverse mode", "forward": "forward mode"}.get(name, name)
    return meta.batched(one_task(p, name, SEGMENT, SIGMA), TASKS), length // SEGMENT if goes_on else 1


@functools.cache
def sampler(name: str, length: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`(theta, keys) -> samples of a derivative`, jitted: an estimator's estimates or a reference's samples."""
    p, batch = problem(length), 10_000
    if name == "reference, noise":
        one, batch = meta.perturbed(p, sigma=SIGMA, unrolls=LANES, estimator=ap.likelihood_ratio()), 1000
    elif name == "reference, by segment":
        # One theta for each segment; the derivative is with all of them.
        def step(thetas, state):
            s, t = state
            s, loss = p.step(thetas[t // SEGMENT], s)
            return (s, t + 1), loss

        init = lambda thetas, key: (p.init(thetas[0], key), jnp.zeros((), int))
        one = meta.evolution(p._replace(init=init, step=step), sigma=SIGMA)
    elif name in ("reference, smoothed", "reference, nearly exact"):
        one = meta.evolution(p, sigma=SIGMA if name == "reference, smoothed" else SIGMA / 10)
    else:
        one, batch = None, 50
        estimate, segments = estimator(name, length)

    def draw(theta, key):
        if one is not None:
            spread = jnp.full(length // SEGMENT, theta) if name == "reference, by segment" else theta
            return jnp.sum(one(spread, key)[1])
        carry = estimate.init(theta, jax.random.fold_in(key, 0))
        # An unroll to warm up: particles that began in the middle have not been perturbed before.
        # (Keys of their own: split(key)[i] is fold_in(key, i), and perturbations that repeat would bias PES.)
        body = lambda carry, key: (estimate.estimate(theta, key, carry)[2], None)
        warm = jax.random.split(jax.random.fold_in(key, 2), segments if segments > 1 else 0)
        carry, _ = jax.lax.scan(body, carry, warm)
        return segments * estimate.estimate(theta, jax.random.fold_in(key, 1), carry)[1]

    return jax.jit(lambda theta, keys: jax.lax.map(lambda k: draw(theta, k), keys, batch_size=min(batch, len(keys))))


def cells(config: Config) -> list[harness.Cell]:
    names = (*(f"reference, {name}" for name in REFERENCES), *ESTIMATORS)
    return harness.grid(estimator=names, theta=config.rates, T=config.lengths)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    name, draw = cell["estimator"], sampler(cell["estimator"], cell["T"])
    count = config.reference if name.startswith("reference") else config.estimates
    count = count // LANES if name == "reference, noise" else count
    values = draw(jnp.float32(cell["theta"]), jax.random.split(jax.random.key(seed), count))
    values = np.asarray(values, np.float64)
    found = {"mean": float(values.mean()), "variance": float(values.var(ddof=1))}
    return found | {"standard_error": harness.standard_error(values)}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    found = {(c["estimator"], c["theta"], c["T"]): r for c, r in records}
    rows, figures = [], {}
    for cell, result in records:
        if cell["estimator"] not in OBJECTIVES:
            continue
        objective = OBJECTIVES[cell["estimator"]]
        known = found[f"reference, {objective}", cell["theta"], cell["T"]]
        error = float(np.hypot(result["standard_error"], known["standard_error"]))
        bias = {"bias": result["mean"] - known["mean"], "bias_standard_error": error}
        rows.append({**cell, **result, "objective": objective, "reference": known["mean"], **bias})
    for theta in config.rates:
        step = lambda s, theta=theta: problem(1).step(jnp.float32(theta), s)[0]
        grow = lambda s, _, step=step: (step(s), jnp.log(jnp.abs(jax.grad(step)(s))))
        slopes = jax.lax.scan(grow, jnp.float32(0.3), length=5000)[1]
        figures[f"Lyapunov exponent at theta={theta}"] = float(jnp.mean(slopes))
    for theta, length in itertools.product(config.rates, config.lengths):
        for name in REFERENCES:
            r = found[f"reference, {name}", theta, length]
            shown = {k: r[k] for k in ("mean", "standard_error")}
            figures[f"reference, {name}, theta={theta}, T={length}"] = shown
    longest = [r for r in rows if r["T"] == config.lengths[-1]]
    columns = ("variance", "bias", "bias_standard_error", "objective", "reference")
    table = harness.table(longest, "T", "theta", "estimator", *columns)
    return harness.Report(figures, rows, table, _figure(config, rows))


def _figure(config, rows):
    figure, axes = harness.panels(len(config.rates), 2, (11, 3.6 * len(config.rates)))
    for theta, (left, right) in zip(config.rates, axes, strict=True):
        for i, name in enumerate(ESTIMATORS):
            mine = [r for r in rows if r["theta"] == theta and r["estimator"] == name]
            lengths = np.array([r["T"] for r in mine])
            style = {"color": f"C{i}", "marker": "os^vD<>*"[i], "markersize": 4, "linewidth": 1.2}
            left.plot(lengths, [r["variance"] for r in mine], label=name, **style)
            bias = np.abs([r["bias"] for r in mine])
            noise = np.array([2 * r["bias_standard_error"] for r in mine])
            seen = bias > noise  # what is within two standard errors of 0 is hollow
            right.plot(lengths, bias, color=f"C{i}", linewidth=0.8, alpha=0.6)
            at = lengths * (1 + 0.012 * (i - 3.5))
            for some, face in ((seen, f"C{i}"), (~seen, "white")):
                style |= {"markerfacecolor": face, "linewidth": 0.7}
                right.errorbar(at[some], bias[some], noise[some], ls="", **style)
        for ax, label in ((left, "variance of an estimate"), (right, "|bias| ± 2 s.e.; hollow: within 2 s.e. of 0")):
            ax.set(xscale="log", yscale="log", xlabel="T", ylabel=label, title=f"theta = {theta}")
            ax.set_xticks(config.lengths, [str(t) for t in config.lengths])
            ax.minorticks_off()
        left.set(ylim=(1e-3, 1e5))
        right.set(ylim=(1e-3, 1e2))
    axes[0, 0].legend(fontsize=7, ncols=2)
    figure.suptitle("What leaves the picture has left it upwards", fontsize=8)
    return figure


if __name__ == "__main__":
    harness.main()
