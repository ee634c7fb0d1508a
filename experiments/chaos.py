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
the map, which a few lanes are slow to leave, with gradients that grow all the while; two of 800 estimates have
nearly all of the variance. TP gives such lanes little weight, and so has the variance of the others, and a bias, 5 %.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments import harness
from experiments.parts import chaotic_network

VARIANCE_COLUMNS = ("variance", "variance_low", "variance_high", "nonfinite")
TOP = 1e4  # of the axis of variances
NEW = "decoupled-CF"
MIXED = ("TP", NEW)
BASIC = ("RP", "LR", *MIXED)
COLOURS = {
    "RP": "#1f77b4",
    "LR": "#d95f02",
    "TP": "#2a8a3e",
    NEW: "black",
    "GS-LR": "#e7298a",
    "GS-TP": "#6a51a3",
    "GR": "#8c6d1f",
}
HORIZON_COLOURS = ("#9aa5b1", "#e0a100", "#c2255c", "#5f3dc4", "#087f5b", "#364fc7")


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      horizons: numbers of steps, H.
      betas: inverse temperatures.
      estimates: repetitions of the gradient estimate, K.
      lanes: trajectories for each estimate, B.
      resamples: of the bootstrap.
    """

    horizons: tuple[int, ...] = (10, 25, 50)
    betas: tuple[float, ...] = (1.0, 1.5, 2.0, 2.25, 2.4, 2.5, 2.6, 2.75, 3.0, 3.5)
    estimates: int = 100
    lanes: int = 1000
    resamples: int = 2000

    def __post_init__(self):
        """Refuses what has no variance, as early as can be."""
        if self.estimates < 2 or self.lanes < 2 or self.resamples < 1 or not self.betas or not self.horizons:
            raise ValueError("estimates and lanes must be at least 2, resamples 1, and betas and horizons not empty")
        if min(self.horizons) < 1 or min(self.betas) <= 0:
            raise ValueError("horizons must be at least 1 and betas positive")


PAPER = Config(
    horizons=(10, 25, 50, 100),
    betas=tuple(sorted([round(1 + 0.1 * i, 1) for i in range(26)] + [2.25, 2.45, 2.55, 2.75])),
    estimates=800,
)


def cells(config: Config) -> list[harness.Cell]:
    """The references first, then horizon by horizon."""
    exact: list[harness.Cell] = [{"method": "exact", "beta": beta} for beta in config.betas]
    grid = [(h, m, beta) for h in config.horizons for m in BASIC for beta in config.betas]
    return exact + [{"method": m, "H": h, "beta": beta} for h, m, beta in grid]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """The exact gradients, or the K estimates."""
    method, beta = cell["method"], cell["beta"]
    if method == "exact":
        exact = chaotic_network.reference(beta, config.horizons)
        return {str(horizon): exact[horizon]._asdict() for horizon in config.horizons}
    found = chaotic_network.gradients(method, beta, cell["H"], config.lanes, config.estimates, seed)
    return {"estimates": [float(g) for g in found]}


def summarize(config: Any, records: list[tuple[harness.Cell, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each horizon, beta and method: variance and bias, with their uncertainties.

    Args:
      config: with `seed`, `resamples` and `lanes`.
      records: cells with a method, a beta, H and estimates, and the exact cells.
    """
    exact = {cell["beta"]: result for cell, result in records if cell["method"] == "exact"}
    rows = []
    for cell, result in records:
        if cell["method"] == "exact":
            continue
        samples = np.array(result["estimates"], np.float64)
        finite = samples[np.isfinite(samples)]
        row = {"H": cell["H"], "beta": cell["beta"], "method": cell["method"]}
        row |= {"estimates": len(samples), "nonfinite": len(samples) - len(finite)}
        truth = chaotic_network.Exact(**exact[cell["beta"]][str(cell["H"])])
        variance, low, high, mean, error = [float("nan")] * 5
        if len(finite) >= 2:
            draws = _resampled_variances(config, cell, result)
            variance, (low, high) = sample_variance(finite), harness.interval(draws)
            mean, error = np.mean(finite), np.sqrt(variance / len(finite))
        row |= {"variance": float(variance), "variance_low": low, "variance_high": high}
        row |= {"mean": float(mean), "standard_error": float(error)}
        row |= {"exact": truth.gradient, "exact_error": truth.error, "bias": float(mean - truth.gradient)}
        row["bias_in_standard_errors"] = row["bias"] / row["standard_error"] if error > 0 else float("nan")
        rows.append(row)
    return rows


def sample_variance(samples: np.ndarray) -> np.ndarray:
    """The unbiased variance over the last axis."""
    return np.var(samples, axis=-1, ddof=1)


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """The table, the improvements with their intervals, and the picture."""
    rows = summarize(config, records)
    by = {(row["H"], row["beta"], row["method"]): row for row in rows}
    results = {(c["H"], c["beta"], c["method"]): (c, r) for c, r in records if c["method"] != "exact"}
    figures, improvements = {}, {}
    for horizon in config.horizons:
        for beta in config.betas:
            point = f"H{horizon}_beta{beta:g}"
            group = {m: by[horizon, beta, m] for m in BASIC}
            for method, row in group.items():
                figures[f"variance_{method}_{point}"] = {
                    "value": row["variance"],
                    "interval": [row["variance_low"], row["variance_high"]],
                    "nonfinite": row["nonfinite"],
                }
            if any(not np.isfinite(row["variance"]) for row in group.values()):
                continue
            v = {m: row["variance"] for m, row in group.items()}
            draws = {m: _resampled_variances(config, *results[horizon, beta, m]) for m in BASIC}
            for method in MIXED:
                improvements[horizon, beta, method] = figures[f"variance_ratio_{method}_{point}"] = {
                    "value": min(v["RP"], v["LR"]) / v[method],
                    "interval": harness.interval(np.minimum(draws["RP"], draws["LR"]) / draws[method]),
                    "naive_mixture": 1 + min(v["RP"], v["LR"]) / max(v["RP"], v["LR"]),
                }
                figures[f"bias_{method}_{point}"] = {
                    "value": group[method]["bias"],
                    "standard_error": group[method]["standard_error"],
                    "exact_gradient": group[method]["exact"],
                }
    return harness.Report(
        figures=figures,
        rows=rows,
        table=_table(config, by, improvements),
        figure=_picture(config, by, improvements),
    )


def _resampled_variances(config, cell, result):
    samples = np.array(result["estimates"], np.float64)
    finite = samples[np.isfinite(samples)]
    return harness.bootstrap(finite, sample_variance, config.resamples, harness.cell_seed(config.seed + 1, cell))


def _table(config, by, improvements):
    betas = [b for b in config.betas if len(config.betas) <= 12 or (2 * b) % 1 == 0]
    lines = [
        "Variances, and the improvement on the better of RP and LR with its 95 % interval; biases in standard errors"
    ]
    lines.append(
        "  H  beta " + "".join(f"{m:>13}" for m in BASIC) + "".join(f"{m:>25}" for m in MIXED) + "   naive  biases"
    )
    for h in config.horizons:
        for b in betas:
            line = f"{h:3d} {b:5.2f} " + "".join(f"{by[h, b, m]['variance']:13.2e}" for m in BASIC)
            for m in MIXED:
                gain = improvements.get((h, b, m))
                low, high = gain["interval"] if gain else (np.nan, np.nan)
                line += f"{gain['value']:9.2f} ({low:.2f} to {high:.2f})".rjust(25) if gain else "-".rjust(25)
            naive = f"{improvements[h, b, 'TP']['naive_mixture']:8.2f}" if (h, b, "TP") in improvements else "       -"
            biases = " ".join(f"{by[h, b, m]['bias_in_standard_errors']:+.1f}" for m in MIXED)
            heavy = any((h, b, m) in improvements and _heavy_tailed(improvements[h, b, m]) for m in MIXED)
            overflowed = sum(by[h, b, m]["nonfinite"] for m in BASIC)
            notes = "  heavy-tailed" * heavy + f"   {overflowed} estimates not finite" * (overflowed > 0)
            lines.append(f"{line}{naive}  {biases}{notes}")
    return "\n".join(lines)


def _picture(config, by, improvements):
    horizons, betas = config.horizons, np.array(config.betas)
    figure = Figure(figsize=(max(17.0, 4.3 * len(horizons)), 9.5), layout="constrained")
    figure.suptitle(
        f"Gradient estimators on the chaotic network: {config.lanes} lanes an estimate, {config.estimates} estimates a "
        "point, bands are 95 % bootstrap intervals",
        fontsize=12,
    )

    def get(horizon, method, name):
        return np.array([by[horizon, b, method][name] for b in config.betas], float)

    above, below = np.asarray(figure.subfigures(2, 1, hspace=0.03))
    variances = above.subplots(1, len(horizons), sharey=True, squeeze=False)[0]
    for ax, horizon in zip(variances, horizons, strict=True):
        plot_variances(ax, betas, {m: {name: get(horizon, m, name) for name in VARIANCE_COLUMNS} for m in BASIC})
        ax.set(title=f"H = {horizon}", xlabel=r"$\beta$")
    limit_variances(variances[0], by.values())
    variances[0].set_ylabel("variance of the gradient")
    variances[0].legend(loc="lower right")

    *improvements_axes, errors, biases = below.subplots(1, 4)
    colours = dict(zip(horizons, itertools.cycle(HORIZON_COLOURS)))
    for ax, method in zip(improvements_axes, MIXED, strict=True):
        _plot_improvements(ax, config, colours, improvements, method)
    shared = [ax.get_ylim() for ax in improvements_axes]
    for ax in improvements_axes:
        ax.set_ylim(min(low for low, _ in shared) / 2, 3 * max(high for _, high in shared))
        _plain_ticks(ax.yaxis, [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500])

    ax = errors
    ax.axhspan(-2, 2, color="gray", alpha=0.18, lw=0)
    ax.axhline(0, color="black", lw=0.8)
    for horizon, colour in colours.items():
        for method, mark in (("RP", "x"), ("LR", "+")):
            values = get(horizon, method, "bias_in_standard_errors")
            ax.plot(betas, values, mark, ms=4, alpha=0.6, color=colour)
        ax.plot(betas, get(horizon, "TP", "bias_in_standard_errors"), "o-", ms=4, lw=1.2, color=colour)
        ax.plot(betas, get(horizon, NEW, "bias_in_standard_errors"), "D", ms=4, mfc=colour, mec="black")
    marks = (("TP", "o"), (NEW, "D"), ("RP", "x"), ("LR", "+"))
    ax.legend(handles=[_mark(marker=m, label=n, ls="") for n, m in marks], fontsize=9, loc="lower right")
    ax.set_yscale("symlog", linthresh=10, linscale=2)
    _plain_ticks(ax.yaxis, [-100, -50, -20, -10, -6, -4, -2, 0, 2, 4, 6, 10, 20, 50, 100])
    largest = 1.3 * max([5.0] + [abs(v) for r in by.values() if np.isfinite(v := r["bias_in_standard_errors"])])
    ax.set(xlabel=r"$\beta$", ylabel="(mean - exact) / standard error", ylim=(-largest, largest))
    ax.set_title("Bias, in standard errors (gray: within 2)", fontsize=11)
    ax.grid(alpha=0.25)

    ax = biases
    for horizon, colour in colours.items():
        ax.plot(betas, np.abs(get(horizon, "TP", "exact")), "-", lw=1, alpha=0.6, color=colour)
        for method, mark, below_mark in (("TP", "o", "v"), (NEW, "D", "1")):
            bias, error = np.abs(get(horizon, method, "bias")), get(horizon, method, "standard_error")
            found = bias > 3 * error
            ax.errorbar(betas[found], bias[found], 2 * error[found], fmt=mark, ms=4, lw=1, color=colour)
            ax.plot(betas[~found], (bias + 2 * error)[~found], below_mark, ms=5, mfc="none", color=colour)
    handles = [_mark(label="|exact gradient|", ls="-")]
    kinds = ((("TP", "o"), (NEW, "D")), (("TP", "v"), (NEW, "1")))
    handles += [_mark(marker=mark, ls="", label=f"{m}: |bias| ± 2 s.e.") for m, mark in kinds[0]]
    handles += [_mark(marker=mark, ls="", mfc="none", label=f"{m}, within 3 s.e.: below this") for m, mark in kinds[1]]
    ax.legend(handles=handles, fontsize=7, loc="upper left")
    ax.set(xlabel=r"$\beta$", yscale="log")
    ax.set_ylim(top=30 * ax.get_ylim()[1])
    ax.set_title("Bias against the exact gradient", fontsize=11)
    ax.grid(alpha=0.25)
    return figure


def _plot_improvements(ax, config, colours, improvements, method):
    left_out = []
    for horizon, colour in colours.items():
        known = [b for b in config.betas if (horizon, b, method) in improvements]
        found = [b for b in known if not _heavy_tailed(improvements[horizon, b, method])]
        left_out += [f"H = {horizon}, $\\beta$ = {b:g}" for b in known if b not in found]
        gains = [improvements[horizon, b, method] for b in found]
        ax.plot(found, [g["value"] for g in gains], "o-", ms=3, lw=1.4, color=colour, label=f"H = {horizon}")
        low, high = ([g["interval"][side] for g in gains] for side in (0, 1))
        ax.fill_between(found, low, high, color=colour, alpha=0.2, lw=0)
        ax.plot(found, [g["naive_mixture"] for g in gains], ":", lw=1.4, color=colour)
    ax.axhline(1, color="black", lw=0.8)
    ax.set(xlabel=r"$\beta$", ylabel=r"$\min(V_{RP}, V_{LR})\,/\,V$", yscale="log")
    if left_out:
        note = "interval wider than a factor 100, left out:\n" + "\n".join(left_out)
        ax.text(0.98, 0.02, note, ha="right", va="bottom", transform=ax.transAxes, fontsize=8)
    ax.set_title(f"Improvement of {method} on the best of RP and LR", fontsize=11)
    handles, _ = ax.get_legend_handles_labels()
    ax.legend(handles=[*handles, _mark(ls=":", label="ideal naive mixture")], fontsize=8, loc="upper left")
    ax.grid(alpha=0.25)


def plot_variances(ax: Axes, betas: np.ndarray, columns: dict[str, dict[str, np.ndarray]]) -> None:
    """Variance against beta with its intervals, on a log axis.

    Args:
      ax: to draw on.
      betas: the horizontal axis.
      columns: for each method its `VARIANCE_COLUMNS` of `summarize`, arrays like betas.
    """
    notes = 0
    for method, column in columns.items():
        colour, variance = COLOURS[method], column["variance"]
        ax.plot(betas, variance, marker="o", ms=3, lw=1.4, ls=line_style(method), color=colour, label=method)
        ax.fill_between(betas, column["variance_low"], column["variance_high"], color=colour, alpha=0.25, lw=0)
        largest, lost = np.max(variance, where=np.isfinite(variance), initial=0), int(column["nonfinite"].sum())
        if largest > TOP or lost:
            text = f"{method} goes on to {largest:.0e}" + (f", {lost} estimates overflowed" if lost else "")
            where = {"x": 0.02, "y": 0.98 - 0.05 * notes, "transform": ax.transAxes}
            ax.text(**where, s=text, va="top", color=colour, fontsize=8)
            notes += 1
    ax.set_yscale("log")
    ax.grid(alpha=0.25)


def line_style(method: str) -> str:
    """Shaped methods are dashed: they lie on the unshaped ones where shaping changes nothing."""
    return "--" if method.startswith("GS") else "-"


def limit_variances(ax: Axes, rows: Iterable[dict[str, Any]]) -> None:
    """Makes the (shared) axis hold all variances but those above `TOP`, where only exploding methods are."""
    values = [v for row in rows for v in (row["variance_low"], row["variance_high"]) if np.isfinite(v) and v > 0]
    if values:
        ax.set_ylim(min(values) / 3, 3 * min(max(values), TOP))


def _heavy_tailed(ratio):
    low, high = ratio["interval"]
    return high > 100 * low


def _mark(**style):
    """An entry of a legend that stands for a style and no curve."""
    return Line2D([], [], **{"color": "gray", **style})


def _plain_ticks(axis, ticks):
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


if __name__ == "__main__":
    harness.main()
