"""The chaotic network itself: its attractor, trajectories, Lyapunov exponent and loss (Proppo, appendix C.1).

    python -m experiments.bifurcation                   # about half a minute
    python -m experiments.bifurcation --preset paper    # about five minutes

Four panels, all from float64 NumPy, as no gradient is estimated here: (a) the attractor, u = x_2 - x_1 after a
transient, against beta, without and with the noise; (b) trajectories of u; (c) the Lyapunov exponent; (d) what an
optimizer would see, the loss after 50 steps without noise against the exact expected loss with it.

The exponent is the long-run mean of log |dg/du| along u_{t+1} = g(u_t) (+ noise), with g as in
`experiments.parts.chaotic_network`: because W has rank one, the other exponent of the two-dimensional network is minus
infinity, and this is the larger one. Below zero, differences die out; above zero they grow exponentially,
and with them the reparameterization gradient.
"""

from typing import Any

import numpy as np
from scipy.special import expit

from experiments import harness
from experiments.parts import chaotic_network
from experiments.parts.chaotic_network import SIGMA, START, transition, transition_slope

CLEAN, NOISY = "#1f3b73", "#d95f02"
LOW, HIGH = 1.0, 3.5  # inverse temperatures
SHOWN = (1.5, 2.25, 2.5, 3.0)  # of the trajectories that are drawn


class Config(harness.Config, least={"betas": 2, "noisy_lanes": 2}):
    """Options of this experiment."""

    betas: int = 101  # how many inverse temperatures, from `LOW` to `HIGH`.
    transient: int = 1000  # steps before anything is measured.
    steps: int = 1000  # steps measured.
    noisy_lanes: int = 32  # trajectories of the noisy system, whose spread gives the exponent's standard error.
    horizon: int = 50  # of the loss.


PAPER = Config(betas=501, transient=2000, steps=4000, noisy_lanes=64)


def cells(config: Config) -> list[harness.Cell]:
    return [{"beta": round(float(beta), 6)} for beta in np.linspace(LOW, HIGH, config.betas)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    beta, rng = cell["beta"], np.random.default_rng(seed)
    u = np.full(1 + config.noisy_lanes, START[1] - START[0])  # the first without noise
    seen, growth = [], np.zeros(len(u))
    for step in range(config.transient + config.steps):
        if step >= config.transient:  # log |dg/du| is minus infinity at the maximum of g, and must not swallow a mean
            growth += np.log(np.maximum(np.abs(transition_slope(u, beta)), 1e-12))
        seen.append(u)
        noise = np.pad(SIGMA * rng.standard_normal((2, config.noisy_lanes)), ((0, 0), (1, 0)))
        u = transition(u, beta) + noise[1] - noise[0]
    (clean, *noisy), attractor = growth / config.steps, [float(u[0]) for u in seen[-100:]]
    result = {"lyapunov": clean, "period": _period(attractor), "attractor": attractor}
    result |= {"noisy_lyapunov": np.mean(noisy), "noisy_lyapunov_error": harness.standard_error(noisy)}
    loss = chaotic_network.exact(beta, [config.horizon])[config.horizon].loss
    return result | {"expected_loss": loss, "noisy_attractor": np.ravel([u[1:] for u in seen[-3:]])}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    points = ("attractor", "noisy_attractor")
    rows = [{**cell, **{k: v for k, v in found.items() if k not in points}} for cell, found in records]
    figures = {}
    for name, label in (("lyapunov", "without_noise"), ("noisy_lyapunov", "with_noise")):
        positive = [row["beta"] for row in rows if row[name] > 0]
        figures[f"lowest_beta_of_positive_exponent_{label}"] = min(positive, default=None)
        figures[f"fraction_of_positive_exponents_{label}"] = len(positive) / len(rows)
    figures["grid_spacing_of_beta"] = (HIGH - LOW) / (config.betas - 1)
    columns = ("beta", "period", "lyapunov", "noisy_lyapunov", "noisy_lyapunov_error", "expected_loss")
    table = harness.table(rows[:: max(1, len(rows) // 10)], *columns)
    return harness.Report(figures, rows, table, _picture(config, records, rows))


def _period(attractor: list[float], longest: int = 32) -> int:
    """The smallest period of the attractor to 1e-6, 0 if longer than `longest` or not converged."""
    x = np.array(attractor)
    for period in range(1, min(longest, len(x) // 2) + 1):
        if np.max(np.abs(x[period:] - x[:-period])) < 1e-6:
            return period
    return 0


def _picture(config, records, rows):
    betas, start = np.array([row["beta"] for row in rows]), START[1] - START[0]
    figure, ((attractor, trajectories), (exponent, losses)) = harness.panels(2, 2, (13.5, 9))
    for name, colour, label in (("noisy_attractor", NOISY, "with noise"), ("attractor", CLEAN, "without")):
        x = np.concatenate([np.full(len(found[name]), cell["beta"]) for cell, found in records])
        points = np.concatenate([found[name] for _, found in records])
        attractor.plot(x, points, ".", ms=1.2, color=colour, alpha=0.5, label=label)
    attractor.set(xlabel=r"$\beta$", ylabel=r"$u = x_2 - x_1$", title="(a) Attractor")
    attractor.legend(loc="lower left", markerscale=8)

    rng = np.random.default_rng(config.seed)
    for i, beta in enumerate(SHOWN):
        paths = np.full((1, 21), start)  # the first one without noise
        for _ in range(config.horizon):
            noise = np.sqrt(2) * SIGMA * np.append(0, rng.standard_normal(20))
            paths = np.vstack([paths, transition(paths[-1], beta) + noise])
        trajectories.plot(paths[:, 1:] - 0.42 * i, color=NOISY, lw=0.5, alpha=0.35)
        trajectories.plot(paths[:, 0] - 0.42 * i, color=CLEAN, lw=1)
        trajectories.text(config.horizon * 1.02, 0.15 - 0.42 * i, rf"$\beta$ = {beta:g}", va="center")
    trajectories.set(xlabel="t", ylabel="u, shifted", xlim=(0, config.horizon * 1.15), yticks=[])
    trajectories.set_title("(b) Trajectories: without noise (dark), 20 with it (orange)")

    exponent.axhline(0, color="black", lw=0.8)
    exponent.plot(betas, [row["lyapunov"] for row in rows], color=CLEAN, lw=0.8, label="without noise")
    noisy, error = (np.array([row[name] for row in rows]) for name in ("noisy_lyapunov", "noisy_lyapunov_error"))
    style = {"fmt": "-", "color": NOISY, "label": "with noise (band: 2 standard errors)"}
    harness.band(exponent, betas, noisy, noisy - 2 * error, noisy + 2 * error, **style)
    exponent.set(xlabel=r"$\beta$", ylabel="Lyapunov exponent, a step", ylim=(-2.5, 1.1))
    exponent.set_title("(c) Lyapunov exponent (cut below)")

    fine = np.linspace(LOW, HIGH, 4001)
    x = np.full_like(fine, start)
    for _ in range(config.horizon - 1):
        x = transition(x, fine)
    loss = 0.5 * ((expit(5 * fine * x) - 1) ** 2 + (expit(25 * fine * x) - 1) ** 2)
    losses.plot(fine, loss, color=CLEAN, lw=0.5, alpha=0.7, label="without noise")
    losses.plot(betas, [row["expected_loss"] for row in rows], color=NOISY, label="expected, with noise (exact)")
    losses.set(xlabel=r"$\beta$", ylabel="loss", yscale="log", title=f"(d) Loss after {config.horizon} steps")
    for ax in (exponent, losses):
        ax.legend()
    return figure


if __name__ == "__main__":
    harness.main()
