"""Gaussian shaping and resampling on the chaotic network: variance and bias (Parmas & Seno, 2022, appendix C.3).

    python -m experiments.gaussian_shaping                   # about a minute
    python -m experiments.gaussian_shaping --preset paper    # about five minutes on two cores

Six gradient estimators, on the network of `experiments.parts.chaotic_network`:

* RP, LR, TP: reparameterization, likelihood ratio, total propagation.
* GS-LR, GS-TP: the loss shaped by a Gaussian fit of the last states, in likelihood ratio and total propagation.
* GR: reparameterization with Gaussian resampling after each step.

Shaping and resampling take the distribution of the states for Gaussian, and it is not where the dynamics is
chaotic. A low variance about a wrong mean helps nobody, so what is compared is the root-mean-square error
about the exact gradient, sqrt(bias^2 + variance), beside the variance. The squared bias is estimated
without the noise of the mean, (mean - exact)^2 - variance / K, and may come out at zero.

Found (paper preset): shaping gains nothing here, its variances are those of the unshaped estimators, or up to twice
them. Resampling has a variance of 3e-5 at beta = 2.5, H = 50, about a mean of .018 where -.221 is right; just
below its own edge of chaos, at beta = 2.25 and 2.4, it explodes.
`experiments.gaussian_shaping_swarm` has several paths and near-Gaussian states.
"""

import dataclasses
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import chaos, harness

METHODS = ("RP", "LR", "TP", "GS-LR", "GS-TP", "GR")


@dataclasses.dataclass(frozen=True)
class Config(chaos.Config):
    """Options of this experiment: those of `experiments.chaos`, with other defaults."""

    horizons: tuple[int, ...] = (50,)
    betas: tuple[float, ...] = (1.5, 2.0, 2.25, 2.5, 2.75, 3.0)
    estimates: int = 60


measure = chaos.measure
PAPER = Config(
    horizons=(25, 50),
    betas=(1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.4, 2.5, 2.6, 2.75, 3.0, 3.25, 3.5),
    estimates=300,
)


def cells(config: Config) -> list[harness.Cell]:
    """The references first, then horizon by horizon."""
    exact: list[harness.Cell] = [{"method": "exact", "beta": beta} for beta in config.betas]
    grid = [(h, m, beta) for h in config.horizons for m in METHODS for beta in config.betas]
    return exact + [{"method": m, "H": h, "beta": beta} for h, m, beta in grid]


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Variances, biases and errors of all methods."""
    rows = chaos.summarize(config, records)
    for row in rows:
        squared_bias = max(0.0, row["bias"] ** 2 - row["standard_error"] ** 2)
        row["rms_error"] = float(np.sqrt(squared_bias + row["variance"]))
    figures = {}
    for row in rows:
        point = f"{row['method']}_H{row['H']}_beta{row['beta']:g}"
        figures[f"variance_{point}"] = {
            "value": row["variance"],
            "interval": [row["variance_low"], row["variance_high"]],
            "nonfinite": row["nonfinite"],
        }
        figures[f"mean_{point}"] = {
            "value": row["mean"],
            "standard_error": row["standard_error"],
            "exact": row["exact"],
        }
    return harness.Report(figures, rows, _table(rows), _picture(config, rows))


def _table(rows):
    shown = [row for row in rows if row["beta"] in (1.5, 2.5, 3.0)] or rows
    lines = ["  H  beta  method   variance       exact        mean (standard error)   bias in s.e.   RMS error"]
    for row in sorted(shown, key=lambda row: (row["H"], row["beta"])):
        lost = f"   {row['nonfinite']} estimates not finite" if row["nonfinite"] else ""
        lines.append(
            f"{row['H']:3d} {row['beta']:5.2f}  {row['method']:6s} {row['variance']:10.2e} {row['exact']:+11.4f} "
            f"{row['mean']:+11.4g} ({row['standard_error']:9.2g}) {row['bias_in_standard_errors']:14.1f} "
            f"{row['rms_error']:11.2e}{lost}"
        )
    return "\n".join(lines)


def _picture(config, rows):
    by = {(row["H"], row["beta"], row["method"]): row for row in rows}
    betas = np.array(config.betas)
    figure = Figure(figsize=(13.5, 4.6 * len(config.horizons)), layout="constrained")
    figure.suptitle(
        f"Gaussian shaping (GS) and resampling (GR): {config.lanes} lanes an estimate, {config.estimates} estimates a "
        "point, bands are 95 % bootstrap intervals",
        fontsize=12,
    )
    axes = figure.subplots(len(config.horizons), 3, squeeze=False)
    for line, horizon in zip(axes, config.horizons, strict=True):

        def get(method, name, horizon=horizon):
            return np.array([by[horizon, b, method][name] for b in config.betas], float)

        chaos.plot_variances(
            line[0], betas, {m: {name: get(m, name) for name in chaos.VARIANCE_COLUMNS} for m in METHODS}
        )
        chaos.limit_variances(line[0], [row for row in rows if row["H"] == horizon])
        line[0].set(title=f"H = {horizon}: variance", xlabel=r"$\beta$")

        line[1].plot(betas, get("RP", "exact"), color="black", lw=2.5, alpha=0.4, label="exact")
        limit = 1.6 * np.max(np.abs(get("RP", "exact")))
        for i, method in enumerate(METHODS):
            mean, error = get(method, "mean"), 2 * get(method, "standard_error")
            shown = error < limit  # a mean that is known no better says nothing
            place = betas[shown] + 0.006 * (i - 2.5)
            style = {"fmt": "o", "ms": 3.5, "lw": 1, "color": chaos.COLOURS[method], "label": method}
            line[1].errorbar(place, mean[shown], error[shown], **style)
        line[1].set(title=f"H = {horizon}: mean ± 2 standard errors", xlabel=r"$\beta$", ylim=(-limit, limit))
        line[1].grid(alpha=0.25)
        line[1].legend(fontsize=8, ncols=2, loc="upper left")

        line[2].plot(betas, np.abs(get("RP", "exact")), color="black", lw=2.5, alpha=0.4, label="|exact gradient|")
        for method in METHODS:
            error = get(method, "rms_error")
            style = {"ls": chaos.line_style(method), "color": chaos.COLOURS[method], "label": method}
            line[2].plot(betas, error, marker="o", ms=3, lw=1.4, **style)
        values = [row["rms_error"] for row in rows if row["H"] == horizon and np.isfinite(row["rms_error"])]
        line[2].set(title=f"H = {horizon}: RMS error, bias included", xlabel=r"$\beta$", yscale="log")
        line[2].set_ylim(0.5 * min(values), 2 * min(max(values), 10.0))
        line[2].grid(alpha=0.25)
        line[2].legend(fontsize=8, loc="lower right")
    return figure


if __name__ == "__main__":
    harness.main()
