"""Ways to weigh total propagation, over horizons, inverse temperatures and numbers of parameters.

The network of `experiments.parts.chaotic_network`, its gradient in beta alone and in beta and the four elements of
W. Each way to mix reparameterization (RP) and likelihood ratio (LR) is compared with the better of the two:

    ratio = V / min(V_RP, V_LR),    V the variance of the gradient, summed over parameters.

    python -m experiments.total_propagation                   # under two minutes
    python -m experiments.total_propagation --preset paper    # about an hour on two cores

TP is the published way, inverse variances from the samples that are mixed. CF is cross-fitted: weights of one half of
the lanes are used on the other. `apgrad.weights` has the derivations of local covariance, suffix covariance, and
decoupled, which is the default and shrunk; unshrunk-CF is the same without. adaptive is `ap.adaptive`, with weights
from 200 earlier calls, and "by state" its option. "clipped at 4" and "clipped at 10" are RP with lanes clipped
(`ap.clip_lanes`), and biased. The bias of the derivative in beta alone stands in the rows of results.json; the lower
panels show what the weights cost in bias, far from chaos, with more estimates: only cross-fitting is right.

Intervals are 95 % percentile bootstrap intervals over the K estimates, or, with several sets of them, over the sets:
each has its own keys, and `ap.adaptive` its own earlier calls. Where RP explodes its variance is known to an order of
magnitude at best; there LR is the better one. At beta = 1.5, H = 100 RP explodes rarely, so that one set tells nothing.
"""

import functools
import itertools
from typing import Any

import numpy as np

from experiments import chaos, harness
from experiments.parts import chaotic_network

RULES = ("TP", "TP-CF", "local-CF", "suffix-CF", "unshrunk-CF", "decoupled-CF", "adaptive", "by state")
CLIPPED = ("clipped at 4", "clipped at 10")
BIASED = ("TP", "decoupled", "TP-CF", "local-CF", "suffix-CF", "decoupled-CF")
DEFAULT = "decoupled-CF"
STYLES = {"TP": ("#2a8a3e", "--"), "TP-CF": ("#2a8a3e", "-"), "local-CF": ("#1f77b4", "-")}
STYLES |= {"suffix-CF": ("#e7298a", "-"), "unshrunk-CF": ("#8c6d1f", "-"), "decoupled-CF": ("black", "-")}
STYLES |= {"adaptive": ("#d95f02", "-"), "by state": ("#d95f02", "--")}
STYLES |= {"clipped at 4": ("#e0a100", "-"), "clipped at 10": ("#e0a100", "--")}


class Config(
    harness.Config,
    least={"estimates": 2, "lanes": 4},
    among={"parameters": (1, 5), "methods": (*RULES, *CLIPPED)},
    multiple={"lanes": 2},
):
    """Options of this experiment."""

    horizons: tuple[int, ...] = (25, 50)  # numbers of steps, H.
    betas: tuple[float, ...] = (1.5, 2.4, 2.5, 2.75)  # inverse temperatures.
    parameters: tuple[int, ...] = (1, 5)  # numbers of differentiated parameters, 1 or 5.
    methods: tuple[str, ...] = RULES[:-1]  # ways to weigh.
    estimates: int = 60  # repetitions of the gradient estimate, K.
    sets: int = 1  # of so many estimates, for the variance.
    lanes: int = 1000  # trajectories for each estimate, B.
    # horizon, lanes and repetitions of the bias, at beta = 1.5.
    bias_points: tuple[tuple[int, int, int], ...] = ((25, 30, 4_000),)


POINTS = ((25, 30, 4_000), (25, 1000, 400), (50, 30, 24_000), (50, 1000, 1_500))
BETAS = (1.0, 1.5, 2.0, 2.4, 2.5, 2.75, 3.0, 3.5)
PAPER = Config(horizons=(10, 25, 50, 100), betas=BETAS, estimates=300, bias_points=POINTS)
BIAS_BETA = 1.5


def cells(config: Config) -> list[harness.Cell]:
    cell = lambda kind, m, p, h, beta, b, k: {"kind": kind, "method": m, "P": p, "H": h, "beta": beta, "B": b, "K": k}
    points = itertools.product(config.parameters, config.horizons, ("RP", "LR", *config.methods), config.betas)
    biases = [cell("bias", m, 1, h, BIAS_BETA, b, k) for h, b, k in config.bias_points for m in BIASED]
    return [*biases, *(cell("variance", m, p, h, beta, config.lanes, config.estimates) for p, h, m, beta in points)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    # Methods see the same noise, so that their ratios are sharper than they are.
    same = {k: cell[k] for k in ("kind", "P", "H", "beta", "B", "K")}
    gradients = functools.partial(chaotic_network.gradients, *(cell[k] for k in ("method", "beta", "H", "B", "K")))
    means, squares = [], []
    for number in range(config.sets if cell["kind"] == "variance" else 1):
        seed = harness.cell_seed(config.seed, same | ({"set": number} if number else {}))
        found = gradients(seed, cell["P"]).astype(np.float64).reshape(cell["K"], -1)
        finite = found[np.isfinite(found).all(axis=1)]
        means.append(finite.mean(axis=0) if len(finite) else np.full(found.shape[1], np.nan))
        squares.append(((finite - means[-1]) ** 2).sum(axis=1))
    count = sum(map(len, squares))
    result = {"mean": np.mean(means, axis=0).tolist(), "nonfinite": cell["K"] * len(squares) - count}
    if cell["kind"] == "bias":
        return result | {"variance": float(squares[0].sum() / (count - 1))}
    return result | {"squares": np.concatenate(squares).tolist()}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, figures = [], {}
    found = {(c["P"], c["H"], c["beta"], c["method"]): r for c, r in records if c["kind"] == "variance"}
    for p, h, beta in itertools.product(config.parameters, config.horizons, config.betas):
        rows += _ratios(config, p, h, beta, {m: found[p, h, beta, m] for m in ("RP", "LR", *config.methods)})
    for p, method in itertools.product(config.parameters, config.methods):
        worst = max((r for r in rows if r["P"] == p and r["method"] == method), key=lambda r: r["ratio"])
        shown = ("H", "beta", "ratio", "ratio_low", "ratio_high")
        figures[f"worst_ratio_{method}_P{p}"] = {k: worst[k] for k in shown}
    biases = [_bias(c, r) for c, r in records if c["kind"] == "bias"]
    for b in biases:
        figures[f"bias_{b['method']}_H{b['H']}_B{b['B']}"] = {k: b[k] for k in ("bias", "standard_error", "exact")}
    table = harness.table(rows, "P", "H", "beta", "method", "variance", "better", "ratio")
    columns = ("H", "B", "method", "mean", "exact", "bias", "standard_error", "in_standard_errors")
    table += f"\nBias at beta = {BIAS_BETA:g}\n{harness.table(biases, *columns)}"
    return harness.Report(figures, rows, table, _figure(config, rows, biases))


def _ratios(config, p, h, beta, found):
    """A row for each method; the bootstrap draws the same estimates of all methods, as their noise is the same."""
    rng = np.random.default_rng(config.seed)
    count = config.sets if config.sets > 1 else config.estimates
    draws = rng.integers(count, size=(chaos.RESAMPLES, count))

    def variances(values):
        means = np.array([part.mean() for part in np.array_split(values, min(count, len(values)))])
        return np.mean(means[draws % len(means)], axis=1) * len(values) / (len(values) - config.sets)

    squares = {m: np.array(r["squares"]) for m, r in found.items()}
    resampled = {m: variances(s) for m, s in squares.items() if len(s) > config.sets}
    value = {m: float(s.sum() / (len(s) - config.sets)) if m in resampled else np.inf for m, s in squares.items()}
    better = min(("RP", "LR"), key=lambda m: value[m])
    exact = chaotic_network.reference(beta, [h])[h].gradient if p == 1 else None
    rows = []
    for method, variance in value.items():
        known = method in resampled
        low, high = harness.interval(resampled[method] / resampled[better]) if known else (np.nan, np.nan)
        row = {"P": p, "H": h, "beta": beta, "method": method, "variance": variance}
        row |= {"nonfinite": found[method]["nonfinite"], "better": better, "ratio": variance / value[better]}
        row |= {"ratio_low": low, "ratio_high": high}
        if config.sets > 1 and known:
            of_sets = [part.mean() for part in np.array_split(squares[method], config.sets)]
            row |= dict(zip(("least", "median", "largest"), np.quantile(of_sets, [0, 0.5, 1]).tolist(), strict=True))
        if exact is not None:
            error = np.sqrt(variance / len(squares[method])) if known else np.nan
            row |= {"exact": exact, "bias": found[method]["mean"][0] - exact, "standard_error": error}
        rows.append(row)
    return rows


def _bias(cell, result):
    mean, exact = result["mean"][0], chaotic_network.reference(cell["beta"], [cell["H"]])[cell["H"]].gradient
    bias, error = mean - exact, np.sqrt(result["variance"] / (cell["K"] - result["nonfinite"]))
    row = {k: cell[k] for k in ("method", "H", "beta", "B", "K")} | {"mean": mean, "exact": exact, "bias": bias}
    return row | {"standard_error": error, "in_standard_errors": bias / error}


def _figure(config, rows, biases):
    columns = max(len(config.horizons), len(config.bias_points))
    lines = len(config.parameters) + bool(biases)
    figure, axes = harness.panels(lines, columns, (4.2 * columns, 3.4 * lines))
    count = f"{config.sets} sets of {config.estimates}" if config.sets > 1 else config.estimates
    words = f"{config.lanes} lanes an estimate, {count} estimates a point, bands are 95 % bootstrap intervals"
    words = f"Variance over the better of RP and LR: {words}; at the bottom of a panel stands which is the better"
    figure.suptitle(words, wrap=True, fontsize="medium")
    for line, p in zip(axes, config.parameters, strict=False):
        for ax, h in zip(line, config.horizons, strict=False):
            _plot_ratios(ax, [r for r in rows if (r["P"], r["H"]) == (p, h)])
            ax.set(xlabel=r"$\beta$", yscale="log", title=f"H = {h}, {p} parameter{'s' * (p > 1)}")
            ax.set_ylabel(r"$V\,/\,\min(V_{RP}, V_{LR})$")
    for ax, (h, b, _) in zip(axes[-1], config.bias_points, strict=False):
        found = [row for row in biases if (row["H"], row["B"]) == (h, b)][::-1]
        for place, row in enumerate(found):
            value, error = (100 * row[name] / abs(row["exact"]) for name in ("bias", "standard_error"))
            colour = "black" if row["method"].endswith("CF") else "#c2255c"
            ax.errorbar(np.sign(row["exact"]) * value, place, xerr=2 * error, fmt="o", color=colour)
        ax.axvline(0, color="gray", lw=0.8)
        ax.set_yticks(range(len(found)), [row["method"] for row in found])
        ax.set(title=f"Bias, H = {h}, {b} lanes, $\\beta$ = {BIAS_BETA:g}", xlabel="% of the gradient, ± 2 s.e.")
    for ax in [ax for ax in axes.flat if not ax.has_data()]:
        ax.remove()
    return figure


def _plot_ratios(ax, rows):
    for method, (colour, line) in STYLES.items():
        found = [r for r in rows if r["method"] == method]
        if not found:
            continue
        betas, values, low, high = ([r[k] for r in found] for k in ("beta", "ratio", "ratio_low", "ratio_high"))
        if method == DEFAULT:
            ax.fill_between(betas, low, high, color=colour, alpha=0.15, lw=0)
        ax.plot(betas, values, line, color=colour, marker="o", lw=2 if method == DEFAULT else 1.2, label=method)
    ax.axhline(1, color="gray", lw=0.8)
    for r in (r for r in rows if r["method"] == "RP"):
        style = {"color": "gray", "size": 7, "rotation": 90, "ha": "right", "va": "bottom"}
        ax.text(r["beta"], 0.01, r["better"], transform=ax.get_xaxis_transform(), **style)
    ax.legend()


if __name__ == "__main__":
    harness.main()
