"""A second system, on which no weights were tuned: a neural controller of the noisy Lorenz system.

    python -m experiments.lorenz_control                   # under two minutes on two quiet cores
    python -m experiments.lorenz_control --preset paper

A step is one of Runge and Kutta (fourth order, dt = .08) of Lorenz's equations with a force u on y, held meanwhile:

    x' = 10 (y - x),   y' = x (rho - z) - y + u,   z' = x y - 8/3 z,   then  s_{t+1} = step(s_t) + N(0, .1^2 I),

u = 10 a the output of a network of 8 tanh units on the scaled state, with random weights: 41 parameters. The cost is
the mean over steps of (|s - s*|^2 / 100 + a^2 / 10) / 2, s* the fixed point with x > 0 of the system without force.
At rho = 20 perturbations neither grow nor decay for long, at rho = 28, Lorenz's own, trajectories are chaotic. Wanted
is the gradient of the expected cost in all parameters, at random ones; variances are summed over them. The methods
are those of `experiments.total_propagation`; "adaptive" has one state for all estimates of a point.

*Bias.* The reference is the mean of estimates, with noise of their own, of whichever of `REFERENCES`, all unbiased, has
the least variance in a pilot run. Against it stand, both with the reference's own error, the largest |z| over the
parameters with Sidak's p-value (p < .05 / number of points and methods is called significant), and the bias along the
gradient in percent of its length, the direction being the pilot run's, which is independent of the rest.

What these gradients cost is measured by `experiments.benchmarks.estimators`.

Each method has its own cells: to measure one anew, delete `cells/method=NAME,*` and start the experiment again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from scipy.stats import norm

import apgrad as ap
from experiments import harness
from experiments.parts import chaotic_network
from experiments.parts.systems import DT, lorenz

SIGMA, START, UNITS = 0.1, (-5.0, -5.0, 20.0), 8
CHUNK = 5  # estimates that a call makes


COLOURS = {"RP": "#1f77b4", "LR": "#d95f02", "TP": "#e0a100", "local": "#8e6fc1", "suffix": "#e7298a"}
COLOURS |= {"unshrunk": "#8c6d1f", "decoupled": "black", "adaptive": "#2a8a3e"}  # of what stands before -CF
METHODS = ("RP", "LR", "TP", "TP-CF", "local-CF", "suffix-CF", "unshrunk-CF", "decoupled", "decoupled-CF", "adaptive")
BIASED = ("TP", "decoupled")  # not cross-fitted
REFERENCES = ("RP", "LR", "unshrunk-CF")
DEFAULT = "decoupled-CF"


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
    """

    horizons: tuple[int, ...] = (25,)
    rhos: tuple[float, ...] = (20.0, 28.0)
    estimates: int = 20
    reference: int = 50
    lanes: int = 1000
    resamples: int = 500

    def __post_init__(self):
        harness.require_least(self, horizons=1, rhos=1, estimates=CHUNK + 1, reference=50, lanes=4, resamples=2)
        harness.require_even(self, "lanes")


PAPER = Config(horizons=(10, 25, 50), estimates=100, reference=100, resamples=2000)


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
    return lorenz(s, rho, 10 * action(theta, s))


def cost(theta: dict[str, jax.Array], s: jax.Array, rho: jax.Array) -> jax.Array:
    """The cost of a state (3,) and of what the controller does there."""
    x = jnp.sqrt(8 / 3 * (rho - 1))
    return 0.5 * (jnp.sum((s - jnp.stack([x, x, rho - 1])) ** 2) / 100 + 0.1 * action(theta, s) ** 2)


def program(method: str, horizon: int) -> Callable[..., ap.Tape]:
    """The program whose expected cost is the controller's, `(tape, theta, rho) -> tape`."""
    chosen = chaotic_network.METHODS[method]

    def rollout(tape, theta, rho):
        @ap.stochastic(chosen.estimator())
        def step(theta, s):
            return dist.Normal(flow(theta, s, rho), SIGMA)

        def body(carry, _):
            tape, s = step(carry[0], theta, carry[1])
            costs = jax.vmap(cost, (None, 0, None))(theta, s, rho)
            return (tape.cost(costs / horizon), s), None

        start = jnp.broadcast_to(jnp.array(START), (tape.lanes, 3))
        return jax.lax.scan(body, (tape, start), length=horizon)[0][0]

    return rollout


@functools.cache
def _compiled(method, horizon, lanes):
    """`(state, keys, theta, rho) -> estimates`, and what makes the state."""
    if method == "adaptive":
        made = ap.adaptive(program(method, horizon), lanes)
        gradient = lambda state, key, *args: made.value_and_grad(key, state, *args)[1]
        begin = jax.jit(lambda keys, *args: chaotic_network.past(made, keys, *args))
    else:
        cross_fit = chaotic_network.METHODS[method].cross_fit
        plain = jax.grad(ap.expectation(program(method, horizon), lanes, cross_fit=cross_fit), argnums=1)
        gradient, begin = lambda state, *args: plain(*args), lambda *args: None
    one = lambda state, key, *args: ravel_pytree(gradient(state, key, *args))[0]
    return begin, jax.jit(lambda state, keys, *args: jax.lax.map(lambda key: one(state, key, *args), keys))


def gradients(config: Config, method: str, rho: float, horizon: int, count: int, seed: int) -> np.ndarray:
    """Independent estimates of the gradient, (count, 41), with the same seed of the same noise."""
    theta, (begin, function) = controller(config.seed), _compiled(method, horizon, config.lanes)
    state = begin(jax.random.key(seed + 1), theta, rho)
    chunks = jax.random.split(jax.random.key(seed), (-(-count // CHUNK), CHUNK))
    return np.concatenate([np.asarray(function(state, keys, theta, rho), np.float64) for keys in chunks])[:count]


def growth(config: Config, rho: float, seed: int, lanes: int = 256) -> dict[str, Any]:
    """The largest Lyapunov exponent of the noisy closed loop, and the growth of perturbations from the start.

    The exponent is per unit of time, over 500 steps after 200, with its standard error over lanes. Growth is, for
    each horizon, the root mean square over lanes of |ds_H| / |ds_0|, for ds_0 in a random direction.
    """
    theta = controller(config.seed)

    def one(key):
        def body(carry, key):
            s, v = carry
            s, v = jax.jvp(lambda s: flow(theta, s, jnp.float32(rho)), (s,), (v,))
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
    found: list[harness.Cell] = [{"method": "growth", "rho": rho} for rho in config.rhos]
    for h in config.horizons:
        found += [{"method": m, "H": h, "rho": rho} for rho in config.rhos for m in ("reference", *METHODS)]
    return found


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    if cell["method"] == "growth":
        return growth(config, cell["rho"], seed)
    draw = functools.partial(gradients, config, rho=cell["rho"], horizon=cell["H"])
    if cell["method"] != "reference":
        # The seed of the point: the methods see the same noise.
        seed = harness.cell_seed(config.seed, {"H": cell["H"], "rho": cell["rho"]})
        return {"estimates": draw(cell["method"], count=config.estimates, seed=seed).tolist()}
    pilots = {m: draw(m, count=config.reference // 5, seed=seed) for m in REFERENCES}
    chosen = min(pilots, key=lambda m: total_variance(pilots[m]))
    found = draw(chosen, count=config.reference, seed=seed + 1)
    return {"chosen": chosen, "direction": pilots[chosen].mean(0).tolist(), "estimates": found.tolist()}


def total_variance(estimates: np.ndarray) -> np.ndarray:
    """The unbiased variance of (..., K, parameters) over K, summed over the parameters."""
    return np.var(estimates, axis=-2, ddof=1).sum(-1)


def bias(estimates: np.ndarray, reference: np.ndarray, direction: np.ndarray) -> dict[str, float]:
    """How far the mean of the estimates is from the reference's."""

    def difference(a, b):
        return a.mean(0) - b.mean(0), np.sqrt(a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b))

    off, error = difference(estimates, reference)
    z = float(np.max(np.abs(off) / error))
    found = {"max_z": z, "p": float(-np.expm1(len(off) * np.log1p(-2 * norm.sf(z))))}
    along, error = difference(estimates @ direction, reference @ direction)
    percent = 100 / float(reference.mean(0) @ direction)
    return found | {"bias_percent": percent * float(along), "bias_percent_error": abs(percent) * float(error)}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
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
            rows.append(row | {"significant": row["p"] < level})
    worst = max((r for r in rows if r["method"] == DEFAULT), key=lambda r: r["ratio"])
    figures = {
        f"worst_ratio_{DEFAULT}": {k: worst[k] for k in ("H", "rho", "better", "ratio", "ratio_low", "ratio_high")},
        "growth": {f"rho{rho:g}": g for rho, g in grown.items()},
        "level_of_significance": level,
    }
    return harness.Report(figures, rows, _table(rows, grown), _picture(config, rows, grown))


def _table(rows, grown):
    lines = [f"rho = {rho:g}: Lyapunov exponent {g['exponent']:+.2f} per unit of time" for rho, g in grown.items()]
    shown = [{**row, "bias_percent_se": row["bias_percent_error"]} for row in rows]
    columns = ("variance", "better", "ratio", "bias_percent", "max_z", "significant")
    return "\n".join([*lines, harness.table(shown, "H", "rho", "method", *columns)])


def _picture(config, rows, grown):
    figure, grid = harness.panels(len(config.rhos), 3, (13, 0.6 + 3.8 * len(config.rhos)))
    figure.suptitle(
        f"Controller of the noisy Lorenz system, 41 parameters: {config.lanes} lanes an estimate, {config.estimates}\n"
        "estimates a point; bands and bars are 95 % intervals; dashed and hollow: not cross-fitted"
    )
    panels = {
        "variance": "variance, summed over parameters",
        "ratio": "variance over the better of RP and LR",
        "bias": "bias along the gradient, %",
    }
    horizons = np.array(config.horizons)
    for rho, line in zip(config.rhos, grid, strict=True):
        axes = dict(zip(panels, line, strict=True))
        for i, name in enumerate(METHODS):
            mine = [r for r in rows if r["rho"] == rho and r["method"] == name]
            get = {key: np.array([r[key] for r in mine]) for key in mine[0]}
            colour, wide = COLOURS[name.removesuffix("-CF")], 2.2 if name == DEFAULT else 1.3
            style = {"color": colour, "marker": "o", "ms": 4, "mfc": "white" if name in BIASED else colour}
            for key in ("variance", "ratio"):
                dashes = "--" if name in BIASED else "-"
                axes[key].plot(horizons, get[key], label=name, ls=dashes, lw=wide, **style)
                axes[key].fill_between(horizons, get[f"{key}_low"], get[f"{key}_high"], color=colour, alpha=0.1, lw=0)
            if name not in ("RP", "LR"):
                places = np.arange(len(horizons)) + 0.1 * (i - 5)
                axes["bias"].errorbar(places, get["bias_percent"], 1.96 * get["bias_percent_error"], ls="", **style)
        axes["variance"].set_ylabel(f"$\\rho$ = {rho:g}, Lyapunov exponent {grown[rho]['exponent']:+.2f}")
        for key, title in panels.items():
            axes[key].set(title=title, xlabel="H")
            if key == "bias":
                axes[key].set_xticks(range(len(horizons)), config.horizons)
                axes[key].axhline(0, color="black", lw=0.8)
            else:
                axes[key].set_yscale("log")
                axes[key].set_xticks(config.horizons)
        axes["ratio"].axhline(1, color="gray", lw=0.8)
        axes["ratio"].axhline(1.5, color="gray", lw=0.8, ls=":")
    grid[0, 0].legend()
    return figure


if __name__ == "__main__":
    harness.main()
