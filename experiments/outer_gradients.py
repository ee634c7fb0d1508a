"""Outer gradients against the length of the unroll, where the inner problem turns chaotic.

    python -m experiments.outer_gradients                   # under two minutes
    python -m experiments.outer_gradients --preset paper    # more estimates, longer unrolls

The inner problem is gradient descent at rate theta on f(s) = s^2/2 + 3/4 sin(3 s), from s_0 ~ N(0, 1): a learning
rate as a meta-parameter. At a small rate it converges; at theta = 0.9 it is chaotic, and the derivative of the T-th
iterate grows like exp(lambda T), while the mean loss E[sum_t f(s_t)] / T is a smooth function of theta once it is
smoothed by sigma.

Given is, for each estimator and length T, the bias against the derivative of the smoothed mean loss (by antithetic
evolution strategies with many pairs, with its standard error) and the variance of one estimate of 32 tasks. Estimators
that go on across truncations (K = 5) are multiplied by T / K, so that all estimate the same.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from apgrad import meta
from experiments import harness

SEGMENT, TASKS = 5, 32
ESTIMATORS = ("BPTT", "truncated", "forward", "ES", "truncated ES", "PES", "ES-Single", "total propagation")


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      rates: values of theta, a tame and a chaotic one.
      lengths: T.
      estimates: for each cell.
      reference: pairs of the reference.
      sigma: deviation of the perturbations, of theta and (total propagation) of the iterates.
    """

    rates: tuple[float, ...] = (0.1, 0.9)
    lengths: tuple[int, ...] = (5, 10, 20, 40)
    estimates: int = 200
    reference: int = 200_000
    sigma: float = 0.03

    def __post_init__(self):
        """Refuses lengths that truncations do not divide."""
        if bad := [t for t in self.lengths if t % SEGMENT]:
            raise ValueError(f"lengths must be multiples of {SEGMENT}, got {bad}")


def problem(length: int) -> meta.Problem:
    """The recurrence; its loss is that of the mean over steps."""
    f = lambda s: s**2 / 2 + 0.75 * jnp.sin(3 * s)

    def step(theta, s):
        s = s - theta * jax.grad(f)(s)
        return s, f(s) / length

    def init(theta, key):
        return jax.random.normal(key, (), theta.dtype)

    return meta.Problem(init, step, lambda theta, s: jnp.zeros((), theta.dtype), length)


def estimator(name: str, length: int, sigma: float) -> tuple[meta.OuterGradient, int]:
    """The estimator, and how many estimates in a row make one unroll."""
    p = problem(length)
    one = {
        "BPTT": lambda: meta.backpropagation(p),
        "truncated": lambda: meta.truncated(p, SEGMENT),
        "forward": lambda: meta.forward_mode(p),
        "ES": lambda: meta.evolution(p, sigma=sigma),
        "truncated ES": lambda: meta.truncated_evolution(p, SEGMENT, sigma=sigma),
        "PES": lambda: meta.persistent_evolution(p, SEGMENT, sigma=sigma),
        "ES-Single": lambda: meta.single_evolution(p, SEGMENT, sigma=sigma),
    }
    if name == "total propagation":
        return meta.lanes(meta.perturbed(p, sigma=sigma, unrolls=TASKS // 2), 2), 1
    goes_on = name in ("truncated", "truncated ES", "PES", "ES-Single")
    return meta.lanes(one[name](), TASKS), length // SEGMENT if goes_on else 1


def cells(config: Config) -> list[harness.Cell]:
    """The reference, then every estimator."""
    grid = [{"theta": r, "T": t} for r in config.rates for t in config.lengths]
    return [{"estimator": e, **point} for point in grid for e in ("reference", *ESTIMATORS)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Mean, variance of one estimate, and the mean's standard error."""
    theta, key, length = jnp.float32(cell["theta"]), jax.random.key(seed), cell["T"]
    if cell["estimator"] == "reference":
        single = meta.evolution(problem(length), sigma=config.sigma)
        values = jax.jit(jax.vmap(lambda k: single(theta, k)[1]))(jax.random.split(key, config.reference))
    else:
        estimate, segments = estimator(cell["estimator"], length, config.sigma)

        def one(key):
            carry = estimate.init(theta, jax.random.fold_in(key, 0))
            # An unroll to warm up: particles that began in the middle have not been perturbed before.
            body = lambda carry, key: (estimate.estimate(theta, key, carry)[2], None)
            carry, _ = jax.lax.scan(body, carry, jax.random.split(key, segments if segments > 1 else 0))
            return segments * estimate.estimate(theta, jax.random.fold_in(key, 1), carry)[1]

        values = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=50))(jax.random.split(key, config.estimates))
    values = np.asarray(values, np.float64)
    return {
        "mean": float(values.mean()),
        "variance": float(values.var(ddof=1)),
        "standard_error": float(values.std(ddof=1) / np.sqrt(len(values))),
    }


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Bias and variance of each."""
    truth = {(c["theta"], c["T"]): r for c, r in records if c["estimator"] == "reference"}
    rows = []
    for cell, result in records:
        if cell["estimator"] == "reference":
            continue
        known = truth[cell["theta"], cell["T"]]
        error = float(np.hypot(result["standard_error"], known["standard_error"]))
        bias = result["mean"] - known["mean"]
        rows.append({**cell, **result, "reference": known["mean"], "bias": bias, "bias_standard_error": error})
    growth = {}
    for theta in config.rates:
        start = jnp.float32(0.3)
        slopes = jax.lax.scan(functools.partial(_slope, jnp.float32(theta)), start, length=5000)[1]
        growth[f"Lyapunov exponent at theta={theta}"] = float(jnp.mean(slopes))
    last = config.lengths[-1]
    lines = [f"T = {last}: variance, bias ± standard error; reference gradient"]
    for theta in config.rates:
        lines.append(f"theta = {theta}, {growth[f'Lyapunov exponent at theta={theta}']:+.2f} per step")
        for r in (r for r in rows if r["theta"] == theta and r["T"] == last):
            lines.append(
                f"  {r['estimator']:<18}{r['variance']:10.3g} {r['bias']:+11.3g} ± {r['bias_standard_error']:.2g}"
            )
    return harness.Report(growth, rows, "\n".join(lines), _figure(config, rows))


def _slope(theta, s, _):
    step = lambda s: problem(1).step(theta, s)[0]
    return step(s), jnp.log(jnp.abs(jax.grad(step)(s)))


def _figure(config, rows):
    figure = Figure(figsize=(11, 3.6 * len(config.rates)), layout="constrained")
    axes = figure.subplots(len(config.rates), 2, squeeze=False)
    for theta, (left, right) in zip(config.rates, axes, strict=True):
        for i, name in enumerate(ESTIMATORS):
            mine = [r for r in rows if r["theta"] == theta and r["estimator"] == name]
            lengths = [r["T"] for r in mine]
            style = {"marker": "os^vD<>*"[i], "markersize": 4, "linewidth": 1.2, "label": name}
            left.plot(lengths, [max(r["variance"], 1e-12) for r in mine], **style)
            bias = np.array([abs(r["bias"]) for r in mine])
            right.errorbar(lengths, bias, yerr=[2 * r["bias_standard_error"] for r in mine], **style)
        left.set(yscale="log", xlabel="T", ylabel="variance of an estimate", title=f"theta = {theta}")
        right.set(yscale="log", ylim=(1e-4, 1e4), xlabel="T", ylabel="|bias| ± 2 s.e.", title=f"theta = {theta}")
    axes[0, 0].legend(fontsize=7)
    return figure


EXPERIMENT = harness.Experiment(
    name="outer_gradients",
    description="Bias and variance of outer gradients against unroll length on a chaotic inner problem.",
    presets={
        "quick": Config(lengths=(5, 20), reference=50_000),
        "paper": Config(lengths=(5, 10, 20, 40, 80), estimates=2000, reference=2_000_000),
    },
    cells=cells,
    measure=measure,
    report=report,
)

if __name__ == "__main__":
    harness.main(EXPERIMENT)
