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

Found (paper preset): shaping gains nothing here, and resampling has little variance about a wrong mean.
`experiments.gaussian_shaping_swarm` has several paths and near-Gaussian states.
"""

from typing import Any

import numpy as np

from experiments import chaos, harness

METHODS = ("RP", "LR", "TP", "GS-LR", "GS-TP", "GR")


class Config(chaos.Config):
    """Options of this experiment: those of `experiments.chaos`, with other defaults."""

    horizons: tuple[int, ...] = (50,)
    betas: tuple[float, ...] = (1.5, 2.0, 2.25, 2.5, 2.75, 3.0)
    estimates: int = 60


measure = chaos.measure
BETAS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.4, 2.5, 2.6, 2.75, 3.0, 3.25, 3.5)
PAPER = Config(horizons=(25, 50), betas=BETAS, estimates=300)


def cells(config: Config) -> list[harness.Cell]:
    return chaos.cells_of(config, METHODS)


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, figures = chaos.summarize(config, records), {}
    for row in rows:
        squared_bias = max(0.0, row["bias"] ** 2 - row["standard_error"] ** 2)
        row["rms_error"] = float(np.sqrt(squared_bias + row["variance"]))
        point = f"{row['method']}_H{row['H']}_beta{row['beta']:g}"
        figures[f"variance_{point}"] = chaos.variance_of(row)
        figures[f"mean_{point}"] = {"value": row["mean"], **{k: row[k] for k in ("standard_error", "exact")}}
    columns = ("variance", "exact", "mean", "standard_error", "bias_in_standard_errors", "rms_error", "nonfinite")
    table = harness.table(rows, "H", "beta", "method", *columns)
    return harness.Report(figures, rows, table, _picture(config, rows))


def _picture(config, rows):
    by = {(row["H"], row["beta"], row["method"]): row for row in rows}
    betas = np.array(config.betas)
    figure, axes = harness.panels(len(config.horizons), 3, (13.5, 4.6 * len(config.horizons)))
    figure.suptitle(f"Gaussian shaping (GS) and resampling (GR): {chaos.counts(config)}")
    for (variances, means, errors), horizon in zip(axes, config.horizons, strict=True):
        mine = [row for row in rows if row["H"] == horizon]
        chaos.plot_variances(variances, mine, mine)
        exact = np.array([by[horizon, b, "RP"]["exact"] for b in config.betas])
        means.plot(betas, exact, color="black", lw=2.5, alpha=0.4, label="exact")
        errors.plot(betas, np.abs(exact), color="black", lw=2.5, alpha=0.4, label="|exact gradient|")
        limit = 1.6 * np.max(np.abs(exact))
        for i, method in enumerate(METHODS):
            names = ("mean", "standard_error", "rms_error")
            mean, error, rms = (np.array([by[horizon, b, method][name] for b in config.betas]) for name in names)
            shown = 2 * error < limit  # a mean that is known no better says nothing
            style: dict[str, Any] = {"color": chaos.COLOURS[method], "label": method}
            place = betas[shown] + 0.006 * (i - 2.5)
            means.errorbar(place, mean[shown], 2 * error[shown], fmt="o", lw=1, **style)
            errors.plot(betas, rms, "o--" if method.startswith("GS") else "o-", **style)
        values = [row["rms_error"] for row in mine if np.isfinite(row["rms_error"])]
        errors.set(yscale="log", ylim=(0.5 * min(values), 2 * min(max(values), 10.0)))
        means.set_ylim(-limit, limit)
        titles = ("variance", "mean ± 2 standard errors", "RMS error, bias included")
        for ax, title in zip((variances, means, errors), titles, strict=True):
            ax.set(title=f"H = {horizon}: {title}", xlabel=r"$\beta$")
            ax.legend()
    return figure


if __name__ == "__main__":
    harness.main()
