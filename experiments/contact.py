"""Contact: a jump in the simulator biases pathwise gradients, and which mixers see it.

    python -m experiments.contact                   # under two minutes
    python -m experiments.contact --preset paper

*Ball and wall* (after Suh et al., 2022). A ball is thrown at an angle a ~ N(theta, .1^2) and flies sin(2 a) far, in
units of v^2 / g. A wall of height .1 stands at .6: a ball that reaches it lower stays there. The cost is minus the
distance. The cost is discontinuous in the angle where the ball just clears the wall. One random choice, one parameter;
the exact gradient is an integral over the angle.

*Pendulum with a stop.* Twenty steps (dt = .2, semi-implicit Euler) of q'' = -sin q + theta_0 - theta_1 q', and a stop
at q = .5 that throws it back: q - .5 and q' change their sign and are halved. Noise N(0, .05^2 I) after each step. The
cost is (q^2 + q'^2) / 2 at the end. The speed jumps at the stop, and so does the cost as a function of any earlier
state. The reference is the mean of the likelihood ratio's estimates on many lanes.

For both: the bias of each method, in the figure that of theta_0 with its 95 % interval, and the root mean square error
of one estimate, which counts bias and noise in all parameters. All but RP, LR and TP published are cross-fitted.

*What comes out.* Rules that make the variance small take the biased estimator, whose variance is small: TP published,
TP and per step are as biased as RP. `alpha_order` sees the ball's jump with its gamma, and not the pendulum's with
1,000 lanes, where gamma is spent at each of twenty nodes. `mean_test` sees what is beyond the likelihood ratio's noise:
with 1,000 lanes most of the ball's jump and half of the pendulum's. `variance_test` sees most in both, but at the
pendulum it turns to the likelihood ratio where nothing is biased as well, since later noise looks like a jump.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import apgrad as ap
from experiments import harness
from experiments.parts import jump_weights

WALL, HEIGHT, THROW = 0.6, 0.1, 0.1
STOP, DT, NOISE, STEPS, DAMPING = 0.5, 0.2, 0.05, 20, 0.1
GAMMA = 0.2  # the error that `alpha_order` may make, in the whole gradient
POINTS: dict[str, tuple[float, ...]] = {"ball": (0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 1.0, 1.2)}
POINTS["pendulum"] = (-0.4, -0.2, 0.0, 0.2, 0.4, 0.6)
COLOURS = {"RP": "#1f77b4", "LR": "#d95f02", "TP published": "#2a8a3e", "per step": "#7fc97f", "TP": "black"}
COLOURS |= {"alpha order": "#e7298a", "mean test": "#e0a100", "variance test": "#8e3fb1"}
METHODS = tuple(COLOURS)
PLAIN = ("RP", "LR", "TP published")  # not cross-fitted


class Config(harness.Config, least={"lanes": 4, "estimates": 2, "reference": 20_000}, multiple={"lanes": 2}):
    """Options of this experiment."""

    lanes: tuple[int, ...] = (100, 1000)  # numbers of lanes for an estimate.
    estimates: int = 100  # repetitions of each estimate, K.
    reference: int = 2_000_000  # lanes of the pendulum's reference.


PAPER = Config(estimates=400, reference=4_000_000)


def estimator(method: str) -> ap.Estimator | ap.Mixer:
    """The estimator of each random choice."""
    if method in ("RP", "LR"):
        return ap.reparameterization() if method == "RP" else ap.likelihood_ratio()
    weights = {
        "TP published": ap.weights.inverse_variance(),
        "per step": ap.weights.per_step_inverse_variance(),
        "TP": ap.weights.decoupled(),
        "alpha order": jump_weights.alpha_order(GAMMA / 2),  # the rule sees half of the lanes
        "mean test": jump_weights.mean_test(),
        "variance test": jump_weights.variance_test(),
    }
    return ap.total_propagation(weights=weights[method])


def distance(angle: Any, numpy: Any = jnp) -> Any:
    """How far the ball flies."""
    flown = numpy.sin(2 * angle)
    height = WALL * numpy.tan(angle) - WALL**2 / (2 * numpy.cos(angle) ** 2)
    return numpy.where((flown > WALL) & (height < HEIGHT), WALL, flown)


def pendulum_step(theta: jax.Array, s: jax.Array) -> jax.Array:
    """The pendulum's angle and speed (2,) a step later, without noise."""
    q, v = s
    v = v + DT * (-jnp.sin(q) + theta[0] - theta[1] * v)
    q = q + DT * v
    hit = q > STOP
    return jnp.stack([jnp.where(hit, STOP - (q - STOP) / 2, q), jnp.where(hit, -v / 2, v)])


def ball(tape: ap.Tape, theta: jax.Array, chosen: Any) -> ap.Tape:
    """The program of one throw."""
    tape, angle = ap.stochastic(chosen)(lambda theta: dist.Normal(theta[0], THROW))(tape, theta)
    return tape.cost(-distance(angle))


def pendulum(tape: ap.Tape, theta: jax.Array, chosen: Any) -> ap.Tape:
    """The program of twenty steps."""
    step = ap.stochastic(chosen)(lambda theta, s: dist.Normal(pendulum_step(theta, s), NOISE).to_event(1))
    start = jnp.broadcast_to(jnp.array([-0.8, 0.0]), (tape.lanes, 2))
    (tape, s), _ = jax.lax.scan(lambda c, _: (step(c[0], theta, c[1]), None), (tape, start), length=STEPS)
    return tape.cost(jnp.sum(s**2, axis=-1) / 2)


@functools.cache
def _compiled(system, method, lanes):
    chosen, program = estimator(method), {"ball": ball, "pendulum": pendulum}[system]
    run = lambda tape, theta: program(tape, theta, chosen)
    objective = ap.expectation(run, lanes, cross_fit=method not in PLAIN, check_nan=False)
    return jax.jit(lambda keys, theta: jax.lax.map(lambda key: jax.grad(objective, argnums=1)(key, theta), keys))


def gradients(system: str, method: str, point: float, lanes: int, count: int, seed: int) -> np.ndarray:
    """Independent estimates of the gradient, (count, parameters), by the angle, or by torque and damping."""
    keys = jax.random.split(jax.random.key(seed), count)
    theta = jnp.array([point] if system == "ball" else [point, DAMPING], jnp.float32)
    return np.asarray(_compiled(system, method, lanes)(keys, theta), np.float64)


def exact_ball(theta: float, points: int = 400_001) -> float:
    """The derivative in theta of the expected cost: the integral of cost times the derivative of the density."""
    a = theta + THROW * np.linspace(-9, 9, points)
    density = np.exp(-0.5 * ((a - theta) / THROW) ** 2) / (THROW * np.sqrt(2 * np.pi))
    return float(np.trapezoid(-distance(a, np) * density * (a - theta) / THROW**2, a))


def cells(config: Config) -> list[harness.Cell]:
    found = []
    for system, points in POINTS.items():
        found += harness.grid(system=[system], method=["reference"], point=points)
        found += harness.grid(system=[system], method=METHODS, lanes=config.lanes, point=points)
    return found


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    system, point = cell["system"], cell["point"]
    if cell["method"] != "reference":
        found = gradients(system, cell["method"], point, cell["lanes"], config.estimates, seed)
        return {"mean": found.mean(0).tolist(), "variance": found.var(0, ddof=1).tolist()}
    if system == "ball":
        return {"mean": [exact_ball(point)], "error": [0.0]}
    found = gradients(system, "LR", point, 10_000, config.reference // 10_000, seed)
    return {"mean": found.mean(0).tolist(), "error": (found.std(0, ddof=1) / len(found) ** 0.5).tolist()}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    found = {(c["system"], c["method"], c.get("lanes"), c["point"]): r for c, r in records}
    rows = []
    for system, method, lanes, point in found:
        if method == "reference":
            continue
        truth, mine = found[system, "reference", None, point], found[system, method, lanes, point]
        off, variance = np.subtract(mine["mean"], truth["mean"]), np.array(mine["variance"])
        error = np.sqrt(variance / config.estimates + np.square(truth["error"]))
        z = float(np.max(np.abs(off) / np.where(error == 0, 1e-12, error)))
        square = float(np.sum(off**2 - error**2))  # of the bias, without what noise adds to it
        row = {"system": system, "method": method, "lanes": lanes, "point": point, "truth": truth["mean"][0]}
        row |= {"bias": off[0], "bias_error": error[0], "largest_z": z, "bias_norm": np.sqrt(max(square, 0))}
        row |= {"variance": variance.sum(), "gradient_norm": np.linalg.norm(truth["mean"])}
        rows.append(row | {"rmse": np.sqrt(max(square, 0) + variance.sum())})
    summary = {}
    for system, lanes, method in itertools.product(POINTS, config.lanes, METHODS):
        mine = [r for r in rows if (r["system"], r["method"], r["lanes"]) == (system, method, lanes)]
        gradient, error = (np.sqrt(np.mean([r[k] ** 2 for r in mine])) for k in ("gradient_norm", "rmse"))
        found = {"rmse_over_gradient": error / gradient}
        found["largest_bias_over_gradient"] = max(r["bias_norm"] for r in mine) / gradient
        found["biased_points"] = sum(r["largest_z"] > 4 for r in mine)  # beyond four standard errors
        summary[f"{system}, {lanes} lanes, {method}"] = found | {"points": len(mine)}
    shown = [{"system, lanes, method": name, **found} for name, found in summary.items()]
    return harness.Report({"summary": summary}, rows, harness.table(shown, *shown[0]), _picture(config, rows))


def _picture(config, rows):
    count = len(config.lanes) + 1
    figure, grid = harness.panels(len(POINTS), count, (5.2 * count, 8.5))
    bars = f"bars are 95 % intervals, {config.estimates} estimates"
    figure.suptitle(f"Contact: bias ({bars}) and error of one estimate; all but {', '.join(PLAIN)} are cross-fitted")
    labels = {"ball": "the mean angle", "pendulum": "the torque $\\theta_0$"}
    for (system, points), (*biases, errors) in zip(POINTS.items(), grid, strict=True):
        place = 0.05 * np.min(np.diff(points)) * (np.arange(len(METHODS)) - 3.5)
        for (i, method), (lanes, ax) in itertools.product(enumerate(METHODS), zip(config.lanes, biases, strict=True)):
            mine = [r for r in rows if (r["system"], r["method"], r["lanes"]) == (system, method, lanes)]
            style = {"color": COLOURS[method], "label": method}
            bias, error = ([r[name] for r in mine] for name in ("bias", "bias_error"))
            ax.errorbar(np.array(points) + place[i], bias, 1.96 * np.array(error), fmt="o", lw=1, **style)
            ax.set(title=f"{system}: bias, {lanes} lanes", ylabel=f"bias of the derivative by {labels[system]}")
            if lanes == config.lanes[-1]:
                errors.plot(points, [r["rmse"] for r in mine], "o--" if method in PLAIN else "o-", **style)
        if system == "ball":
            dense = np.linspace(points[0], points[-1], 60)
            for ax in biases:
                ax.plot(dense, [exact_ball(t, 20_001) for t in dense], color="gray", lw=0.8, label="exact gradient")
        errors.set(yscale="log", title=f"{system}: root mean square error, {config.lanes[-1]} lanes")
        for ax in (*biases, errors):
            ax.set_xlabel(labels[system])
        biases[0].legend()
    return figure


if __name__ == "__main__":
    harness.main()
