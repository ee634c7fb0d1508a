"""The main figure of the Proppo paper: gradient variance at the edge of chaos (Parmas & Seno, 2022, Fig. 4).

Reparameterization (RP), likelihood ratio (LR) and total propagation (TP) on the chaotic network of
`experiments.parts.chaotic_network`: how their variance depends on the inverse temperature beta and the horizon H (the
paper's Fig. 4a), and by how much TP betters the best of the two others (Fig. 4b). Beside it stands the ideal
naive mixture of RP and LR as whole gradients, 1 / (1 / V_RP + 1 / V_LR), which can halve the variance at most.
What the paper does not have is added: decoupled-CF, apgrad's default weights, cross-fitted (`apgrad.weights`), and the
bias, against the exact gradient. `experiments.total_propagation` compares more ways to weigh.

    python -m experiments.chaos                   # about a minute
    python -m experiments.chaos --preset paper    # about 20 minutes on two cores

Variances are of the mean over B lanes, estimated from K repetitions. Their intervals are 95 % percentile
bootstrap intervals. Where RP explodes, its estimates are so heavy-tailed that K of them tell no more than the
order of magnitude: the interval is too short, and the mean is far from normal. An estimate that overflows is
counted (`nonfinite`) and left out; the variance given is then a lower bound.

At beta = 1.5 chaos is far, and yet RP is heavy-tailed at H = 100: u_0 = .2 is near the unstable fixed point of
the map, which a few lanes are slow to leave, with gradients that grow all the while; a few of 800 estimates
have nearly all of the variance. TP gives such lanes little weight, and so has the variance of the others, and a bias,
5 %.
"""

import itertools
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments import harness
from experiments.parts import chaotic_network

TOP = 1e4  # of the axis of variances
RESAMPLES = 2000  # of the bootstrap
NEW = "decoupled-CF"
MIXED = ("TP", NEW)
BASIC = ("RP", "LR", *MIXED)
COLOURS = {"RP": "#1f77b4", "LR": "#d95f02", "TP": "#2a8a3e", NEW: "black"}
COLOURS |= {"GS-LR": "#e7298a", "GS-TP": "#6a51a3", "GR": "#8c6d1f"}
HORIZON_COLOURS = ("#9aa5b1", "#e0a100", "#c2255c", "#5f3dc4", "#087f5b", "#364fc7")


class Config(harness.Config, least={"betas": 0, "estimates": 2, "lanes": 2}):
    """Options of this experiment.

    Attributes:
      horizons: numbers of steps, H.
      betas: inverse temperatures.
      estimates: repetitions of the gradient estimate, K.
      lanes: trajectories for each estimate, B.
    """

    horizons: tuple[int, ...] = (10, 25, 50)
    betas: tuple[float, ...] = (1.0, 1.5, 2.0, 2.25, 2.4, 2.5, 2.6, 2.75, 3.0, 3.5)
    estimates: int = 100
    lanes: int = 1000


BETAS = tuple(sorted([round(1 + 0.1 * i, 1) for i in range(26)] + [2.25, 2.45, 2.55, 2.75]))
PAPER = Config(horizons=(10, 25, 50, 100), betas=BETAS, estimates=800)


def cells(config: Config) -> list[harness.Cell]:
    return cells_of(config, BASIC)


def cells_of(config: Config, methods: tuple[str, ...]) -> list[harness.Cell]:
    """The references first, then horizon by horizon."""
    exact = harness.grid(method=["exact"], beta=config.betas)
    return exact + [c for h in config.horizons for c in harness.grid(method=methods, H=[h], beta=config.betas)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    method, beta = cell["method"], cell["beta"]
    if method == "exact":
        exact = chaotic_network.reference(beta, config.horizons)
        return {str(horizon): exact[horizon]._asdict() for horizon in config.horizons}
    found = chaotic_network.gradients(method, beta, cell["H"], config.lanes, config.estimates, seed)
    return {"estimates": [float(g) for g in found]}


def summarize(config: Any, records: list[tuple[harness.Cell, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each horizon, beta and method: variance and bias, with their uncertainties."""
    exact = {cell["beta"]: result for cell, result in records if cell["method"] == "exact"}
    rows: list[dict[str, Any]] = []
    for cell, result in records:
        if cell["method"] == "exact":
            continue
        samples = np.array(result["estimates"], np.float64)
        finite = samples[np.isfinite(samples)]
        row = {"H": cell["H"], "beta": cell["beta"], "method": cell["method"]}
        row |= {"estimates": len(samples), "nonfinite": len(samples) - len(finite)}
        truth = chaotic_network.Exact(**exact[cell["beta"]][str(cell["H"])])
        variance, low, high, mean, error = [np.nan] * 5
        if len(finite) >= 2:
            low, high = harness.interval(_resampled_variances(config, cell, result))
            variance, mean = sample_variance(finite), np.mean(finite)
            error = np.sqrt(variance / len(finite))
        row |= {"variance": variance, "variance_low": low, "variance_high": high, "mean": mean, "standard_error": error}
        row |= {"exact": truth.gradient, "exact_error": truth.error, "bias": mean - truth.gradient}
        row["bias_in_standard_errors"] = row["bias"] / row["standard_error"] if error > 0 else float("nan")
        rows.append(row)
    return rows


def sample_variance(samples: np.ndarray) -> np.ndarray:
    """The unbiased variance over the last axis."""
    return np.var(samples, axis=-1, ddof=1)


def variance_of(row: dict[str, Any]) -> dict[str, Any]:
    """The variance of a row of `summarize`, for results.json."""
    interval = [row["variance_low"], row["variance_high"]]
    return {"value": row["variance"], "interval": interval, "nonfinite": row["nonfinite"]}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = summarize(config, records)
    by = {(row["H"], row["beta"], row["method"]): row for row in rows}
    results = {(c["H"], c["beta"], c["method"]): (c, r) for c, r in records if c["method"] != "exact"}
    figures, gains = {}, {}
    for horizon, beta in itertools.product(config.horizons, config.betas):
        point = f"H{horizon}_beta{beta:g}"
        group = {m: by[horizon, beta, m] for m in BASIC}
        figures |= {f"variance_{method}_{point}": variance_of(row) for method, row in group.items()}
        if not all(np.isfinite(row["variance"]) for row in group.values()):
            continue
        draws = {m: _resampled_variances(config, *results[horizon, beta, m]) for m in BASIC}
        better, worse = sorted(group[m]["variance"] for m in ("RP", "LR"))
        for method in MIXED:
            row = group[method]
            gain = {"value": better / row["variance"], "naive_mixture": 1 + better / worse}
            gain["interval"] = harness.interval(np.minimum(draws["RP"], draws["LR"]) / draws[method])
            gains[horizon, beta, method] = figures[f"variance_ratio_{method}_{point}"] = gain
            bias = {"value": row["bias"], "standard_error": row["standard_error"], "exact_gradient": row["exact"]}
            figures[f"bias_{method}_{point}"] = bias
    shown = []
    for place, row in by.items():
        gain = gains.get(place, {"value": None, "interval": (None, None)})
        low, high = gain["interval"]
        shown.append(row | {"improvement": gain["value"], "improvement_low": low, "improvement_high": high})
    columns = ("H", "beta", "method", "variance", "improvement", "bias_in_standard_errors", "nonfinite")
    return harness.Report(figures, rows, harness.table(shown, *columns), _picture(config, by, gains))


def _resampled_variances(config, cell, result):
    samples = np.array(result["estimates"], np.float64)
    finite = samples[np.isfinite(samples)]
    return harness.bootstrap(finite, sample_variance, harness.cell_seed(config.seed + 1, cell), RESAMPLES)


def counts(config: Config) -> str:
    """For the title of a picture."""
    return f"{config.lanes} lanes an estimate, {config.estimates} estimates a point, bands are 95 % bootstrap intervals"


def _picture(config, by, gains):
    horizons, betas = config.horizons, np.array(config.betas)
    count = max(4, len(horizons))
    figure, (above, below) = harness.panels(2, count, (4.3 * count, 9.5))
    figure.suptitle(f"Gradient estimators on the chaotic network: {counts(config)}")
    for ax in (*above[len(horizons) :], *below[4:]):
        ax.remove()
    for ax, horizon in zip(above, horizons, strict=False):
        plot_variances(ax, [row for row in by.values() if row["H"] == horizon], by.values())
        ax.set(title=f"H = {horizon}", ylabel="variance of the gradient")

    colours = dict(zip(horizons, itertools.cycle(HORIZON_COLOURS)))
    *improvements, errors, biases = below[:4]
    for ax, method in zip(improvements, MIXED, strict=True):
        for horizon, colour in colours.items():
            found = {b: gains[horizon, b, method] for b in config.betas if (horizon, b, method) in gains}
            # Where an interval is wider than a factor 100, one lane in many has the variance.
            found = {b: g for b, g in found.items() if g["interval"][1] <= 100 * g["interval"][0]}
            low, high = ([g["interval"][side] for g in found.values()] for side in (0, 1))
            values = [g["value"] for g in found.values()]
            harness.band(ax, list(found), values, low, high, color=colour, label=f"H = {horizon}")
            ax.plot(list(found), [g["naive_mixture"] for g in found.values()], ":", color=colour)
        ax.axhline(1, color="black", lw=0.8)
        ax.set(yscale="log", title=f"Improvement by {method} (dots: naive mixture)")
        ax.legend()

    def get(horizon, method, name):
        return np.array([by[horizon, b, method][name] for b in config.betas], float)

    marks = {"TP": "o-", NEW: "D", "RP": "x", "LR": "+"}
    for (horizon, colour), (method, mark) in itertools.product(colours.items(), marks.items()):
        label = method if horizon == horizons[0] else None
        errors.plot(betas, get(horizon, method, "bias_in_standard_errors"), mark, color=colour, label=label)
        if method in MIXED:
            bias, error = np.abs(get(horizon, method, "bias")), get(horizon, method, "standard_error")
            for some, face in ((bias > 3 * error, colour), (bias <= 3 * error, "none")):
                biases.errorbar(betas[some], bias[some], 2 * error[some], fmt=mark[0], mfc=face, color=colour, lw=1)
    for horizon, colour in colours.items():
        biases.plot(betas, np.abs(get(horizon, "TP", "exact")), lw=1, alpha=0.6, color=colour, label=f"H = {horizon}")
    errors.axhspan(-2, 2, color="gray", alpha=0.18, lw=0)
    if max(map(abs, errors.get_ylim())) > 10:
        errors.set_yscale("symlog", linthresh=10, linscale=2)
    errors.set_title("Bias, in standard errors (gray: within 2)")
    biases.set(yscale="log", title="|bias| ± 2 s.e. (hollow: < 3), lines: |gradient|")
    for ax in (errors, biases):
        ax.legend()
    for ax in figure.axes:
        ax.set_xlabel(r"$\beta$")
    return figure


def plot_variances(ax: Axes, rows: list[dict[str, Any]], every: Any) -> None:
    """Variance against beta with its intervals, on a log axis that holds those of every row up to `TOP`.

    Shaped methods are dashed: they lie on the unshaped ones where shaping changes nothing.
    """
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        columns = ([row[name] for row in mine] for name in ("beta", "variance", "variance_low", "variance_high"))
        lost = sum(row["nonfinite"] for row in mine)
        label = f"{method}, {lost} overflowed" if lost else method
        fmt = "o--" if method.startswith("GS") else "o-"
        harness.band(ax, *columns, fmt=fmt, color=COLOURS[method], label=label)
    bounds = [row[name] for row in every for name in ("variance_low", "variance_high")]
    if values := [v for v in bounds if np.isfinite(v) and v > 0]:
        ax.set_ylim(min(values) / 3, 3 * min(max(values), TOP))
    ax.set_yscale("log")
    ax.legend(loc="lower right")


if __name__ == "__main__":
    harness.main()
