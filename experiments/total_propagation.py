"""Ways to weigh total propagation, over horizons, inverse temperatures and numbers of parameters.

The network of `experiments.parts.chaotic_network`, its gradient in beta alone and in beta and the four elements of
W. Each way to mix reparameterization (RP) and likelihood ratio (LR) is compared with the better of the two:

    ratio = V / min(V_RP, V_LR),    V the variance of the gradient, summed over parameters.

    python -m experiments.total_propagation                   # under two minutes
    python -m experiments.total_propagation --preset paper    # about an hour on two cores

TP is the published way, inverse variances from the samples that are mixed. CF is cross-fitted: weights of one half of
the lanes are used on the other. `apgrad.weights` has the derivations of local covariance, suffix covariance, and
decoupled, which is the default and shrunk; unshrunk-CF is the same without. adaptive is `ap.adaptive`, with weights
from 200 earlier calls. The lower panels show what the weights cost
in bias, far from chaos where the exact gradient can be told: only cross-fitting is right.

Intervals are 95 % percentile bootstrap intervals over the K estimates. Where RP explodes its variance is known to an
order of magnitude at best; there LR is the better one. At beta = 1.5, H = 100 RP is heavy-tailed as well.
"""

import dataclasses
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import harness
from experiments.parts import chaotic_network

RULES = ("TP", "TP-CF", "local-CF", "suffix-CF", "unshrunk-CF", "decoupled-CF", "adaptive")
BIASED = ("TP", "decoupled", "TP-CF", "local-CF", "suffix-CF", "decoupled-CF")
DEFAULT = "decoupled-CF"
STYLES = {
    "TP": ("#2a8a3e", "--"),
    "TP-CF": ("#2a8a3e", "-"),
    "local-CF": ("#1f77b4", "-"),
    "suffix-CF": ("#e7298a", "-"),
    "unshrunk-CF": ("#8c6d1f", "-"),
    "decoupled-CF": ("black", "-"),
    "adaptive": ("#d95f02", "-"),
}


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      horizons: numbers of steps, H.
      betas: inverse temperatures.
      parameters: numbers of differentiated parameters, 1 or 5.
      methods: ways to weigh.
      estimates: repetitions of the gradient estimate, K.
      lanes: trajectories for each estimate, B.
      bias_points: horizon, lanes and repetitions of the bias, at beta = 1.5.
      resamples: of the bootstrap.
    """

    horizons: tuple[int, ...] = (25, 50)
    betas: tuple[float, ...] = (1.5, 2.4, 2.5, 2.75)
    parameters: tuple[int, ...] = (1, 5)
    methods: tuple[str, ...] = RULES
    estimates: int = 60
    lanes: int = 1000
    bias_points: tuple[tuple[int, int, int], ...] = ((25, 30, 4_000),)
    resamples: int = 2000

    def __post_init__(self):
        """Refuses what has no variance."""
        if self.estimates < 2 or self.lanes < 4 or self.lanes % 2 or set(self.parameters) - {1, 5}:
            raise ValueError("estimates must be at least 2, lanes even and at least 4, parameters 1 or 5")
        if set(self.methods) - set(RULES):
            raise ValueError(f"methods are of {RULES}, got {self.methods}")


PAPER = Config(
    horizons=(10, 25, 50, 100),
    betas=(1.0, 1.5, 2.0, 2.4, 2.5, 2.75, 3.0, 3.5),
    estimates=300,
    bias_points=((25, 30, 4_000), (25, 1000, 400), (50, 30, 24_000), (50, 1000, 1_500)),
)
BIAS_BETA = 1.5


def cells(config: Config) -> list[harness.Cell]:
    """The biases, then the grid."""
    found: list[harness.Cell] = [
        {"kind": "bias", "method": m, "P": 1, "H": h, "beta": BIAS_BETA, "B": b, "K": k}
        for h, b, k in config.bias_points
        for m in BIASED
    ]
    for p in config.parameters:
        for h in config.horizons:
            for m in ("RP", "LR", *config.methods):
                found += [
                    {"kind": "variance", "method": m, "P": p, "H": h, "beta": beta, "B": config.lanes}
                    | {"K": config.estimates}
                    for beta in config.betas
                ]
    return found


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Each estimate's squared distance from their mean, and the mean."""
    # Methods see the same noise, so that their ratios are sharper than they are.
    seed = harness.cell_seed(config.seed, {k: cell[k] for k in ("kind", "P", "H", "beta", "B", "K")})
    found = chaotic_network.gradients(cell["method"], cell["beta"], cell["H"], cell["B"], cell["K"], seed, cell["P"])
    found = found.astype(np.float64).reshape(cell["K"], -1)
    finite = found[np.isfinite(found).all(axis=1)]
    mean = finite.mean(axis=0) if len(finite) else np.full(found.shape[1], np.nan)
    squares = ((finite - mean) ** 2).sum(axis=1)
    result = {"mean": mean.tolist(), "nonfinite": len(found) - len(finite)}
    if cell["kind"] == "bias":
        return result | {"variance": float(squares.sum() / (len(finite) - 1))}
    return result | {"squares": squares.tolist()}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Ratios to the better of RP and LR, and biases."""
    rows, figures = [], {}
    squares = {
        (c["P"], c["H"], c["beta"], c["method"]): np.array(r["squares"]) for c, r in records if c["kind"] == "variance"
    }
    lost = {(c["P"], c["H"], c["beta"], c["method"]): r["nonfinite"] for c, r in records}
    for p in config.parameters:
        for h in config.horizons:
            for beta in config.betas:
                point = {m: squares[p, h, beta, m] for m in ("RP", "LR", *config.methods)}
                rows += _ratios(config, p, h, beta, point, {m: lost[p, h, beta, m] for m in point})
    for p in config.parameters:
        for method in config.methods:
            worst = max((r for r in rows if r["P"] == p and r["method"] == method), key=lambda r: r["ratio"])
            figures[f"worst_ratio_{method}_P{p}"] = {
                k: worst[k] for k in ("H", "beta", "ratio", "ratio_low", "ratio_high")
            }
    biases = [_bias(c, r) for c, r in records if c["kind"] == "bias"]
    for b in biases:
        figures[f"bias_{b['method']}_H{b['H']}_B{b['B']}"] = {k: b[k] for k in ("bias", "standard_error", "exact")}
    return harness.Report(figures, rows, _table(config, rows, biases), _figure(config, rows, biases))


def _ratios(config, p, h, beta, squares, lost):
    """A row for each method; the bootstrap draws the same estimates of all methods, as their noise is the same."""
    rng = np.random.default_rng(config.seed)
    draws = rng.integers(config.estimates, size=(config.resamples, config.estimates))

    def variances(values):
        return np.mean(values[draws % len(values)], axis=1) * len(values) / (len(values) - 1)

    resampled = {m: variances(s) for m, s in squares.items() if len(s) > 1}
    value = {m: float(s.sum() / (len(s) - 1)) if len(s) > 1 else np.inf for m, s in squares.items()}
    better = min(("RP", "LR"), key=lambda m: value[m])
    rows = []
    for method, variance in value.items():
        low, high = (np.nan, np.nan)
        if method in resampled:
            low, high = harness.interval(resampled[method] / resampled[better])
        rows.append(
            {"P": p, "H": h, "beta": beta, "method": method, "variance": variance, "nonfinite": lost[method]}
            | {"better": better, "ratio": variance / value[better], "ratio_low": low, "ratio_high": high}
        )
    return rows


def _bias(cell, result):
    exact = chaotic_network.reference(cell["beta"], [cell["H"]])[cell["H"]]
    row = {k: cell[k] for k in ("method", "H", "beta", "B", "K")}
    row |= {"mean": result["mean"][0], "exact": exact.gradient, "bias": result["mean"][0] - exact.gradient}
    row["standard_error"] = float(np.sqrt(result["variance"] / (cell["K"] - result["nonfinite"])))
    return row | {"in_standard_errors": row["bias"] / row["standard_error"]}


def _table(config, rows, biases):
    lines = []
    for p in config.parameters:
        lines.append(f"{p} parameter{'s' * (p > 1)}: V_RP, V_LR, and each way's variance over the smaller of them")
        lines.append(f"{'H':>4} {'beta':>5} {'V_RP':>8} {'V_LR':>8} " + " ".join(f"{m:>12}" for m in config.methods))
        for h in config.horizons:
            for beta in config.betas:
                row = {r["method"]: r for r in rows if (r["P"], r["H"], r["beta"]) == (p, h, beta)}
                line = f"{h:>4} {beta:>5g} {row['RP']['variance']:>8.1e} {row['LR']['variance']:>8.1e} "
                lines.append(line + " ".join(f"{row[m]['ratio']:>12.3g}" for m in config.methods))
    lines.append(f"Bias at beta = {BIAS_BETA:g}")
    lines.append(f"{'H':>4} {'B':>5} {'method':>13} {'mean':>9} {'exact':>9} {'bias':>9} {'s.e.':>8} {'in s.e.':>8}")
    for b in biases:
        line = f"{b['H']:>4} {b['B']:>5} {b['method']:>13} {b['mean']:>9.5f} {b['exact']:>9.5f} {b['bias']:>+9.5f}"
        lines.append(f"{line} {b['standard_error']:>8.5f} {b['in_standard_errors']:>+8.1f}")
    return "\n".join(lines)


def _figure(config, rows, biases):
    columns = max(len(config.horizons), 2)
    height = 3.4 * len(config.parameters) + 3.2 * bool(biases)
    figure = Figure(figsize=(4.2 * columns, height), layout="constrained")
    figure.suptitle(
        f"Variance over the better of RP and LR: {config.lanes} lanes an estimate, {config.estimates} estimates a "
        "point, bands are 95 % bootstrap intervals",
        fontsize=11,
    )
    heights = [1.0] * len(config.parameters) + [0.9] * bool(biases)
    parts = np.ravel(np.asarray(figure.subfigures(len(heights), 1, height_ratios=heights), object))
    for part, p in zip(parts, config.parameters, strict=False):
        axes = part.subplots(1, len(config.horizons), sharey=True, squeeze=False)[0]
        for ax, h in zip(axes, config.horizons, strict=True):
            _plot_ratios(ax, [r for r in rows if (r["P"], r["H"]) == (p, h)])
            ax.set(xlabel=r"$\beta$", yscale="log")
            ax.set_title(f"H = {h}, {p} parameter{'s' * (p > 1)}", pad=12)
        axes[0].set_ylabel(r"$V\,/\,\min(V_{RP}, V_{LR})$")
        axes[-1].legend(fontsize=7, loc="best")
    if biases:
        _plot_biases(parts[-1], config, biases)
    return figure


def _plot_ratios(ax, rows):
    betas = sorted({r["beta"] for r in rows})
    for method, (colour, line) in STYLES.items():
        found = {r["beta"]: r for r in rows if r["method"] == method}
        if not found:
            continue
        values, low, high = (np.array([found[b][k] for b in betas]) for k in ("ratio", "ratio_low", "ratio_high"))
        ax.plot(betas, values, line, color=colour, marker="o", ms=3, lw=2 if method == DEFAULT else 1.2, label=method)
        if method == DEFAULT:
            ax.fill_between(betas, low, high, color=colour, alpha=0.15, lw=0)
    ax.axhline(1, color="gray", lw=0.8)
    for b in betas:
        better = next(r["better"] for r in rows if r["beta"] == b)
        ax.text(b, 1.0, better, fontsize=6, color="gray", ha="center", va="bottom", transform=ax.get_xaxis_transform())
    ax.grid(alpha=0.25)


def _plot_biases(part, config, biases):
    points = [(h, b) for h, b, _ in config.bias_points]
    axes = part.subplots(1, len(points), squeeze=False)[0]
    for ax, (h, b) in zip(axes, points, strict=True):
        found = [row for row in biases if (row["H"], row["B"]) == (h, b)][::-1]
        places = np.arange(len(found))
        relative = np.array([100 * row["bias"] / row["exact"] for row in found])
        errors = np.array([200 * row["standard_error"] / abs(row["exact"]) for row in found])
        colours = ["black" if row["method"].endswith("CF") else "#c2255c" for row in found]
        for place, value, error, colour in zip(places, relative, errors, colours, strict=True):
            ax.errorbar(value, place, xerr=error, fmt="o", ms=4, color=colour)
        ax.axvline(0, color="gray", lw=0.8)
        ax.set_yticks(places, [row["method"] for row in found], fontsize=8)
        ax.set(title=f"Bias, H = {h}, {b} lanes, $\\beta$ = {BIAS_BETA:g}", xlabel="% of the gradient, ± 2 s.e.")
        ax.grid(alpha=0.25)


if __name__ == "__main__":
    harness.main()
