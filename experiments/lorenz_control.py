"""A second system, on which no weights were tuned: a neural controller of the noisy Lorenz system.

    python -m experiments.lorenz_control                   # about two minutes
    python -m experiments.lorenz_control --preset paper    # about 20 minutes on two cores

A step is one of Runge and Kutta (fourth order, dt = .08) of Lorenz's equations with a force u on y, held meanwhile:

    x' = 10 (y - x),   y' = x (rho - z) - y + u,   z' = x y - 8/3 z,   then  s_{t+1} = step(s_t) + N(0, .1^2 I),

u = 10 a the output of a network of 8 tanh units on the scaled state, with random weights: 41 parameters. The cost is
the mean over steps of (|s - s*|^2 / 100 + a^2 / 10) / 2, s* the fixed point with x > 0 of the system without force.
rho is swept from where trajectories settle to where they are chaotic. Wanted is the gradient of the expected cost in
all parameters; variances are summed over them.

*Bias.* The reference is the mean of estimates, with noise of their own, of whichever unbiased estimator has the least
variance in a pilot run. Against it stand, both with the reference's own error, the largest |z| over the parameters with
Sidak's p-value (p < .05 / number of points and methods is called significant), and the bias along the gradient in
percent of its length, the direction being the pilot run's, which is independent of the rest.

Times are the least of several rounds in which the methods take turns; with other work on the machine they are rough.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from scipy.stats import norm

import apgrad as ap
from experiments import harness

DT, SIGMA, START, UNITS = 0.08, 0.1, (-5.0, -5.0, 20.0), 8
CHUNK = 5  # estimates that a call makes


class Method(NamedTuple):
    """A way to estimate the gradient, and its colour."""

    estimator: ap.Estimator | ap.Mixer
    cross_fit: bool
    colour: str


_published = ap.total_propagation(weights=ap.weights.inverse_variance())
METHODS = {
    "RP": Method(ap.reparameterization(), False, "#1f77b4"),
    "LR": Method(ap.likelihood_ratio(), False, "#d95f02"),
    "published": Method(_published, False, "#e0a100"),
    "inverse variance": Method(_published, True, "#e0a100"),
    "local": Method(ap.total_propagation(weights=ap.weights.local_covariance()), True, "#6a51a3"),
    "suffix": Method(ap.total_propagation(weights=ap.weights.suffix_covariance()), True, "#c2255c"),
    "decoupled": Method(ap.total_propagation(), True, "#2a8a3e"),
    "decoupled, plain": Method(ap.total_propagation(), False, "#2a8a3e"),
}
BIASED = ("published", "decoupled, plain")  # not cross-fitted


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      horizons: numbers of steps, H.
      rhos: parameters of the Lorenz system.
      estimates: repetitions of the gradient estimate, K.
      reference: estimates of the reference; the pilot run has a tenth.
      lanes: trajectories for each estimate, B.
      resamples: of the bootstrap.
      rounds: of the timing.
    """

    horizons: tuple[int, ...] = (25,)
    rhos: tuple[float, ...] = (10.0, 24.0, 32.0)
    estimates: int = 20
    reference: int = 50
    lanes: int = 1000
    resamples: int = 500
    rounds: int = 3

    def __post_init__(self):
        """Refuses what cannot be measured."""
        if min(self.estimates, self.resamples) < 2 or self.reference < 50 or self.rounds < 1:
            raise ValueError("estimates and resamples must be at least 2, reference 50, rounds 1")
        if self.lanes < 4 or self.lanes % 2:
            raise ValueError("cross-fitting needs an even number of lanes, at least 4")
        if not self.horizons or not self.rhos or min(self.horizons) < 1 or min(self.rhos) <= 1:
            raise ValueError("horizons must be at least 1 and rhos above 1, and neither empty")


PAPER = Config(horizons=(50,), rhos=(10.0, 20.0, 24.0, 26.0, 30.0), estimates=300, reference=300)


def controller(seed: int) -> dict[str, jax.Array]:
    """The controller's parameters: normal weights by 1 / sqrt(fan-in), no bias."""
    first, second = jax.random.split(jax.random.key(seed))
    w1, w2 = jax.random.normal(first, (UNITS, 3)) / 3**0.5, jax.random.normal(second, (UNITS,)) / UNITS**0.5
    return {"w1": w1, "b1": jnp.zeros(UNITS), "w2": w2, "b2": jnp.zeros(())}


def action(theta: dict[str, jax.Array], s: jax.Array) -> jax.Array:
    """The controller's answer, a scalar, to a state (3,)."""
    scaled = s / 10 - jnp.array([0.0, 0.0, 2.5])
    return theta["w2"] @ jnp.tanh(theta["w1"] @ scaled + theta["b1"]) + theta["b2"]


def flow(theta: dict[str, jax.Array], s: jax.Array, rho: jax.Array) -> jax.Array:
    """The state (3,) a step later, without noise."""
    force = 10 * action(theta, s)

    def velocity(s):
        x, y, z = s
        return jnp.stack([10 * (y - x), x * (rho - z) - y + force, x * y - 8 / 3 * z])

    b = velocity(s + DT / 2 * (a := velocity(s)))
    c = velocity(s + DT / 2 * b)
    return s + DT / 6 * (a + 2 * b + 2 * c + velocity(s + DT * c))


def cost(theta: dict[str, jax.Array], s: jax.Array, rho: jax.Array) -> jax.Array:
    """The cost of a state (3,) and of what the controller does there."""
    x = jnp.sqrt(8 / 3 * (rho - 1))
    return 0.5 * (jnp.sum((s - jnp.stack([x, x, rho - 1])) ** 2) / 100 + 0.1 * action(theta, s) ** 2)


def objective(method: str, horizon: int, lanes: int) -> Callable[..., jax.Array]:
    """The expected cost as an ordinary JAX function, `(key, theta, rho) -> scalar`."""

    def rollout(tape, theta, rho):
        @ap.stochastic(METHODS[method].estimator)
        def step(theta, s):
            return dist.Normal(flow(theta, s, rho), SIGMA)

        def body(carry, _):
            tape, s = step(carry[0], theta, carry[1])
            costs = jax.vmap(cost, (None, 0, None))(theta, s, rho)
            return (tape.cost(costs / horizon), s), None

        start = jnp.broadcast_to(jnp.array(START), (tape.lanes, 3))
        return jax.lax.scan(body, (tape, start), length=horizon)[0][0]

    return ap.expectation(rollout, lanes=lanes, cross_fit=METHODS[method].cross_fit)


@functools.cache
def _compiled(method, horizon, lanes):
    gradient = jax.grad(objective(method, horizon, lanes), argnums=1)
    return jax.jit(lambda keys, theta, rho: jax.lax.map(lambda key: ravel_pytree(gradient(key, theta, rho))[0], keys))


def gradients(config: Config, method: str, rho: float, horizon: int, count: int, seed: int) -> np.ndarray:
    """Independent estimates of the gradient, (count, 41): with the same seed, of the same noise."""
    theta, function = controller(config.seed), _compiled(method, horizon, config.lanes)
    keys = jax.random.split(jax.random.key(seed), (-(-count // CHUNK), CHUNK))
    return np.concatenate([np.asarray(function(k, theta, rho), np.float64) for k in keys])[:count]


def growth(config: Config, rho: float, seed: int, lanes: int = 256) -> dict[str, Any]:
    """The largest Lyapunov exponent of the noisy closed loop, and the growth of perturbations from the start.

    The exponent is per unit of time, over 500 steps after 200, with its standard error over lanes. Growth is, for
    each horizon, the root mean square over lanes of |ds_H| / |ds_0|, for ds_0 in a random direction.
    """
    theta = controller(config.seed)

    def one(key):
        def body(carry, key):
            s, v = carry
            s, v = jax.jvp(lambda s: flow(theta, s, rho), (s,), (v,))
            length = jnp.linalg.norm(v)
            return (s + SIGMA * jax.random.normal(key, (3,)), v / length), jnp.log(length)

        keys = jax.random.split(key, 701)
        v = jax.random.normal(keys[700], (3,))
        return jax.lax.scan(body, (jnp.array(START), v / jnp.linalg.norm(v)), keys[:700])[1]

    logs = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(seed), lanes)), np.float64)
    exponents = logs[:, 200:].mean(1) / DT
    rms = [float(np.sqrt(np.mean(np.exp(2 * logs[:, :h].sum(1))))) for h in config.horizons]
    return {"exponent": exponents.mean(), "standard_error": exponents.std(ddof=1) / lanes**0.5, "growth": rms}


def cells(config: Config) -> list[harness.Cell]:
    """Growth, then point by point the estimates and the reference, then the times."""
    found: list[harness.Cell] = [{"method": "growth", "rho": rho} for rho in config.rhos]
    for h in config.horizons:
        found += [{"method": m, "H": h, "rho": rho} for rho in config.rhos for m in (*METHODS, "reference")]
        found.append({"method": "time", "H": h})
    return found


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Growth of perturbations, times, or estimates."""
    if cell["method"] == "growth":
        return growth(config, cell["rho"], seed)
    rho = cell.get("rho", config.rhos[-1])

    draw = functools.partial(gradients, config, rho=rho, horizon=cell["H"])
    if cell["method"] == "time":
        seconds = {m: [] for m in METHODS}
        for _ in range(config.rounds + 1):
            for m in METHODS:
                start = time.perf_counter()
                draw(m, count=CHUNK, seed=seed)
                seconds[m].append((time.perf_counter() - start) / CHUNK)
        return {"seconds": {m: min(s[1:]) for m, s in seconds.items()}}  # the first compiles
    if cell["method"] != "reference":
        # The seed of the point: the methods see the same noise.
        seed = harness.cell_seed(config.seed, {"H": cell["H"], "rho": rho})
        return {"estimates": draw(cell["method"], count=config.estimates, seed=seed).tolist()}
    pilots = {m: draw(m, count=config.reference // 10, seed=seed) for m in METHODS if m not in BIASED}
    chosen = min(pilots, key=lambda m: total_variance(pilots[m]))
    found = draw(chosen, count=config.reference, seed=seed + 1)
    return {"chosen": chosen, "direction": pilots[chosen].mean(0).tolist(), "estimates": found.tolist()}


def total_variance(estimates: np.ndarray) -> np.ndarray:
    """The unbiased variance of (..., K, parameters) over K, summed over the parameters."""
    return np.var(estimates, axis=-2, ddof=1).sum(-1)


def bias(estimates: np.ndarray, reference: np.ndarray, direction: np.ndarray) -> dict[str, float]:
    """How far the mean of the estimates is from the reference's.

    Args:
      estimates: (K, parameters).
      reference: (any number, parameters), unbiased.
      direction: (parameters,), near the gradient, independent of both.
    """

    def difference(a, b):
        return a.mean(0) - b.mean(0), np.sqrt(a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b))

    off, error = difference(estimates, reference)
    z = float(np.max(np.abs(off) / error))
    found = {"max_z": z, "p": float(-np.expm1(len(off) * np.log1p(-2 * norm.sf(z))))}
    along, error = difference(estimates @ direction, reference @ direction)
    percent = 100 / float(reference.mean(0) @ direction)
    return found | {"bias_percent": percent * float(along), "bias_percent_error": abs(percent) * float(error)}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """The table, the ratios with their intervals, and the picture."""
    found = {(c["method"], c.get("H"), c.get("rho")): r for c, r in records}
    grown = {rho: found["growth", None, rho] for rho in config.rhos}
    level = 0.05 / (len(METHODS) * len(config.horizons) * len(config.rhos))
    rows = []
    for h, rho in [(h, rho) for h in config.horizons for rho in config.rhos]:
        truth = found["reference", h, rho]
        reference = np.array(truth["estimates"])
        samples = {m: np.array(found[m, h, rho]["estimates"]) for m in METHODS}
        # The same resamples for all the methods, as they have the same noise.
        seed = harness.cell_seed(config.seed + 1, {"H": h, "rho": rho})
        draws = {m: harness.bootstrap(g, total_variance, config.resamples, seed) for m, g in samples.items()}
        variance = {m: float(total_variance(g)) for m, g in samples.items()}
        better = min(("RP", "LR"), key=lambda m: variance[m])
        for m, g in samples.items():
            low, high = harness.interval(draws[m])
            ratio = harness.interval(draws[m] / np.minimum(draws["RP"], draws["LR"]))
            square = np.sum((g - g.mean(0)) ** 2, axis=1)
            row = {"H": h, "rho": rho, "method": m, "variance": variance[m], "variance_low": low, "variance_high": high}
            row |= {"better": better, "ratio": variance[m] / variance[better]}
            row |= {"ratio_low": ratio[0], "ratio_high": ratio[1], "largest_share": float(square.max() / square.sum())}
            row |= {"gradient_norm": float(np.linalg.norm(reference.mean(0))), "reference": truth["chosen"]}
            row |= bias(g, reference, np.array(truth["direction"]))
            row |= {"significant": row["p"] < level, "seconds": found["time", h, None]["seconds"][m]}
            rows.append(row | {"efficiency": 1 / (variance[m] * row["seconds"])})
    worst = max((r for r in rows if r["method"] == "decoupled"), key=lambda r: r["ratio"])
    figures = {
        "worst_ratio_of_decoupled": {k: worst[k] for k in ("H", "rho", "better", "ratio", "ratio_low", "ratio_high")},
        "growth": {f"rho{rho:g}": g for rho, g in grown.items()},
        "level_of_significance": level,
    }
    return harness.Report(figures, rows, _table(rows, grown), _picture(config, rows, grown))


def _table(rows, grown):
    lines = [
        "  H  rho exponent method             variance  over the better (95 %)         bias, %          max|z|   ms"
    ]
    for r in rows:
        ratio = f"{r['ratio']:.3g} ({r['ratio_low']:.3g} to {r['ratio_high']:.3g}) of {r['better']}"
        off = f"{r['bias_percent']:+.2g} ± {r['bias_percent_error']:.1g}"
        lines.append(
            f"{r['H']:3d} {r['rho']:4g} {grown[r['rho']]['exponent']:+8.2f} {r['method']:16s} {r['variance']:10.2e}  "
            f"{ratio:30s} {off:16s} {r['max_z']:4.1f}{'*' if r['significant'] else ' '} {1e3 * r['seconds']:5.0f}"
        )
    return "\n".join([*lines, "* significant after correction for all parameters, points and methods"])


def _picture(config, rows, grown):
    horizons, rhos = config.horizons, np.array(config.rhos)
    figure = Figure(figsize=(15, 4.5 + 4.5 * len(horizons)), layout="constrained")
    figure.suptitle(
        f"Controller of the noisy Lorenz system, 41 parameters: {config.lanes} lanes an estimate, {config.estimates} "
        "estimates a point; bands and bars are 95 % intervals; dashed: not cross-fitted"
    )
    names = [[f"{h} {key}" for key in ("variance", "ratio", "efficiency")] for h in horizons]
    axes = figure.subplot_mosaic([*names, ["off", "off", "exponent"]])
    off = axes["off"]
    for h, line in zip(horizons, [[axes[name] for name in row] for row in names], strict=True):
        for i, (name, method) in enumerate(METHODS.items()):
            mine = [r for r in rows if r["H"] == h and r["method"] == name]
            get = {key: np.array([r[key] for r in mine]) for key in mine[0]}
            style = {"color": method.colour, "marker": "o", "ms": 3, "lw": 1.4, "ls": "--" if name in BIASED else "-"}
            for ax, key in zip(line, ("variance", "ratio", "efficiency"), strict=True):
                ax.plot(rhos, get[key], label=name, **style)
                if key != "efficiency":
                    ax.fill_between(rhos, get[f"{key}_low"], get[f"{key}_high"], color=method.colour, alpha=0.15, lw=0)
            if name not in ("RP", "LR") and h == horizons[-1]:
                style |= {"ls": "", "mfc": "white" if name in BIASED else method.colour, "ms": 4}
                places = rhos + (i - 4.5) * 0.012 * np.ptp(rhos)
                off.errorbar(places, get["bias_percent"], 1.96 * get["bias_percent_error"], label=name, **style)
        titles = ("variance, summed over parameters", "variance over that of the better of RP and LR")
        for ax, title in zip(line, (*titles, "efficiency, 1 / variance / second"), strict=True):
            ax.set(title=f"H = {h}: {title}", yscale="log")
        for level, ls in ((1, "-"), (1.5, ":")):
            line[1].axhline(level, color="black", lw=0.8, ls=ls)
        line[1].set_ylim(0.1, 30)
        line[0].legend(fontsize=8)
    off.set(title=f"H = {horizons[-1]}: bias along the gradient, % (hollow: not cross-fitted)")
    off.legend(fontsize=8)
    exponent, error = np.array([(g["exponent"], g["standard_error"]) for g in grown.values()]).T
    axes["exponent"].errorbar(rhos, exponent, 1.96 * error, fmt="ko-", ms=3)
    axes["exponent"].set(title="largest Lyapunov exponent of the closed loop, per unit of time")
    for ax in (off, axes["exponent"]):
        ax.axhline(0, color="black", lw=0.8)
    for ax in axes.values():
        ax.set_xlabel(r"$\rho$")
        ax.grid(alpha=0.25)
    return figure


EXPERIMENT = harness.Experiment(
    name="lorenz_control",
    description="RP, LR and total propagation on a noisy Lorenz system with a neural controller: a held-out check.",
    presets={"quick": Config(), "paper": PAPER},
    cells=cells,
    measure=measure,
    report=report,
)

if __name__ == "__main__":
    harness.main(EXPERIMENT)
