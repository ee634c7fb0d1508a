"""Gaussian shaping where it should pay: several paths, near-Gaussian states (Parmas & Seno, 2022, appendix C.3).

    python -m experiments.gaussian_shaping_swarm                   # about a minute
    python -m experiments.gaussian_shaping_swarm --preset paper    # some ten minutes of one core

Gaussian shaping charges choices with what a Gaussian fit of the states explains of the cost. On the chaotic network
(`experiments.gaussian_shaping`) states are not Gaussian, and nothing is gained. The paper says of total propagation and
of Gaussian shaping that they "can improve the gradient accuracy by multiple orders of magnitude", and its appendix C.3
is on several paths, that is, many costs after each choice. Here are the swarms of `experiments.parts.linear_swarm`,
with a cost at each step, quadratic or PIPPS's saturating cost of several widths:

* "tight": particles start within .1 of each other; noise of .1 a step.
* "broad": particles start within 1 of each other; noise of .02 a step. This is much information on the parameters in
  each step, so the likelihood ratio (LR) is noisy, and a narrow target is hit by few.
* "bounded force": broad, with a force that saturates, so that states are only roughly Gaussian.

The gradient is known exactly, or to a standard error for the bounded force. What is compared is the root-mean-square
error about it, bias included: sqrt(mean |estimate - exact|^2), over the length of the gradient. A gain is a ratio of
mean squared errors. LR is shown with the leave-one-out baseline and without any; shaped costs have mean zero and need
none. Ranges are 95 % bootstrap intervals.

Found (paper preset), where states are Gaussian: beside LR without a baseline, shaped LR has orders of magnitude less
error; beside LR with the leave-one-out baseline, at best 3 times less. What pays is the fit in the pathwise message:
shaped total propagation has up to 7 times less squared error than total propagation, for narrow costs of the broad
swarm. With a quadratic cost nothing is gained. Where states are only roughly Gaussian, its bias is 71 to 96 % of the
gradient for saturating costs.
"""

import itertools
from typing import Any

import numpy as np

from experiments import chaos, harness
from experiments.parts import linear_swarm
from experiments.parts.linear_swarm import SWARMS

COLOURS = {"LR, no baseline": "#f4a582", **{m: c for m, c in chaos.COLOURS.items() if m in linear_swarm.METHODS}}
GAINS = tuple(itertools.product(("GS-LR", "GS-TP"), ("LR, no baseline", "LR")))
GAINS += (("GS-TP", "TP"), ("GS-TP", "RP"), ("GR", "RP"))
SHOWN = (("GS-LR", "LR, no baseline"), ("GS-LR", "LR"), ("GS-TP", "LR"), ("GS-TP", "TP"), ("GR", "RP"))


class Config(harness.Config, least={"widths": 0, "lanes": 2, "estimates": 2, "reference": 2}, among={"swarms": SWARMS}):
    """Options of this experiment."""

    swarms: tuple[str, ...] = ("broad",)  # names in `SWARMS`.
    widths: tuple[float, ...] = (linear_swarm.QUADRATIC, 0.3)  # of the cost; infinite for the quadratic cost.
    horizons: tuple[int, ...] = (10,)  # numbers of steps, H, of which the first is that of all but `lanes`'s first.
    # particles for each estimate, of which the first is that of all other horizons.
    lanes: tuple[int, ...] = (1000, 50)
    estimates: int = 60  # repetitions of the gradient estimate, K.
    reference: int = 100  # estimates by RP with 10,000 lanes, for a gradient that is not known exactly.


WIDTHS = (linear_swarm.QUADRATIC, 1.0, 0.3, 0.1)
PAPER = Config(swarms=tuple(SWARMS), widths=WIDTHS, horizons=(25, 10, 50), lanes=(1000, 20, 100), reference=200)


def sizes(config: Config, swarm: str) -> list[tuple[int, int]]:
    """Horizons and lanes: each horizon with the first number of lanes, each number of lanes with the first horizon.

    The bounded force has the first horizon only, since each of its references costs as much as many cells.
    """
    horizons = config.horizons[:1] if SWARMS[swarm].bend else config.horizons
    return [(h, config.lanes[0]) for h in horizons] + [(config.horizons[0], b) for b in config.lanes[1:]]


def cells(config: Config) -> list[harness.Cell]:
    """The references first, then the methods, with what is compiled once side by side."""
    horizons = {s: sorted({h for h, _ in sizes(config, s)}) for s in config.swarms}
    grid = lambda m, s, **more: harness.grid(method=[m], swarm=[s], width=config.widths, **more)
    found = [cell for s in config.swarms for cell in grid("exact", s, H=horizons[s])]
    compiled = sorted({size for s in config.swarms for size in sizes(config, s)})
    for h, b in compiled:
        swarms = [s for s in config.swarms if (h, b) in sizes(config, s)]
        found += [cell for m in linear_swarm.METHODS for s in swarms for cell in grid(m, s, H=[h], B=[b])]
    return found


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    swarm, width, horizon = SWARMS[cell["swarm"]], cell["width"], cell["H"]
    if cell["method"] != "exact":
        found = linear_swarm.gradients(cell["method"], swarm, width, horizon, cell["B"], config.estimates, seed)
        return {"estimates": found.tolist()}
    if not swarm.bend:
        return {"gradient": linear_swarm.exact(swarm, width, horizon).tolist(), "error": 0.0}
    found = linear_swarm.gradients("RP", swarm, width, horizon, 10_000, config.reference, seed)
    error = np.sqrt(np.var(found, axis=0, ddof=1).sum() / len(found))
    return {"gradient": found.mean(axis=0).tolist(), "error": float(error)}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    exact = {(c["swarm"], c["width"], c["H"]): r for c, r in records if c["method"] == "exact"}
    rows, squares = [], {}
    for cell, result in records:
        if cell["method"] == "exact":
            continue
        truth = exact[cell["swarm"], cell["width"], cell["H"]]
        row, squares[_place(cell), cell["method"]] = _row(config, cell, np.array(result["estimates"]), truth)
        rows.append(row)
    figures, largest = {}, {}
    places = list(dict.fromkeys(place for place, _ in squares))
    for place, (method, baseline) in itertools.product(places, GAINS):
        worse, better = squares[place, baseline], squares[place, method]
        interval = harness.interval(_means(config, worse, 1) / _means(config, better, 2))
        figures[_name(place, method, baseline)] = {"value": np.mean(worse) / np.mean(better), "interval": interval}
    gaussian = [place for place in places if not SWARMS[place[0]].bend]
    for method, baseline in GAINS:
        names = [_name(place, method, baseline) for place in gaussian or places]
        for label, choose in (("largest", max), ("smallest", min)):
            name = choose(names, key=lambda n: figures[n]["value"])
            largest[f"{label} gain of {method} over {baseline}"] = {"where": name, **figures[name]}
    biases = {}
    for row in rows:
        name = f"largest relative bias of {row['method']}, {row['swarm']}"
        biases[name] = max(biases.get(name, 0.0), row["bias"] if row["bias"] > row["bias_limit"] else 0.0)
    table = harness.table(rows, "swarm", "cost", "H", "B", "method", "rms_error", "bias", "bias_limit")
    ends = lambda gain: dict(zip(("value_low", "value_high"), gain["interval"], strict=True))
    shown = [{"gain": name, "value": gain["value"], **ends(gain)} for name, gain in largest.items()]
    table += "\n" + harness.table(shown, "gain", "value")
    return harness.Report(biases | largest | figures, rows, table, _picture(config, rows, figures))


def _place(cell):
    return cell["swarm"], cell["width"], cell["H"], cell["B"]


def _name(place, method, baseline):
    swarm, width, horizon, lanes = place
    return f"gain of {method} over {baseline}, {swarm}, {_cost(width)}, H={horizon}, B={lanes}"


def _cost(width):
    return "quadratic" if np.isinf(width) else f"s={width:g}"


def _means(config, squares, seed):
    return harness.bootstrap(squares, lambda x: x.mean(axis=-1), config.seed + seed)


def _row(config, cell, estimates, truth):
    """The row of a cell, and the squared error of each estimate, (K,)."""
    gradient, length = np.array(truth["gradient"]), float(np.linalg.norm(truth["gradient"]))
    squares = np.sum((estimates - gradient) ** 2, axis=-1)
    variance = float(np.sum(np.var(estimates, axis=0, ddof=1)))
    # The squared length of the mean's distance, less what noise adds to it on average; this noise is a sum of
    # chi-squares times the eigenvalues of the covariance, and four of its standard deviations hide the bias.
    noise = variance / len(estimates) + truth["error"] ** 2
    bias = np.sqrt(max(0.0, float(np.sum((estimates.mean(axis=0) - gradient) ** 2)) - noise))
    spread = np.sqrt(2 * np.sum(np.cov(estimates.T) ** 2)) / len(estimates) + np.sqrt(2) * truth["error"] ** 2
    low, high = np.sqrt(harness.interval(_means(config, squares, 0))) / length
    row = {**cell, "cost": _cost(cell["width"]), "gradient": length, "gradient_error": truth["error"]}
    row |= {"variance": variance, "rms_error": np.sqrt(squares.mean()) / length, "rms_low": low, "rms_high": high}
    return row | {"bias": bias / length, "bias_limit": np.sqrt(4 * spread) / length}, squares


def _picture(config, rows, gains):
    by = {(_place(row), row["method"]): row for row in rows}
    horizon, lanes, counts = config.horizons[0], config.lanes[0], sorted(config.lanes)
    narrow = config.widths[-1] if len(config.widths) < 3 else config.widths[-2]
    figure, axes = harness.panels(len(config.swarms), 4, (19, 4.4 * len(config.swarms) + 0.4))
    count = f"{config.estimates} estimates a point, bands are 95 % bootstrap intervals"
    figure.suptitle(f"Gaussian shaping (GS) and resampling (GR) for swarms with a cost at each step: {count}")
    at = np.arange(len(config.widths))
    for swarm, (errors, over_lanes, ratios, biases) in zip(config.swarms, axes, strict=True):
        for i, method in enumerate(linear_swarm.METHODS):
            widths = [by[(swarm, w, horizon, lanes), method] for w in config.widths]
            by_lanes = [by[(swarm, narrow, horizon, b), method] for b in counts]
            for ax, x, found in ((errors, at, widths), (over_lanes, counts, by_lanes)):
                values = ([row[name] for row in found] for name in ("rms_error", "rms_low", "rms_high"))
                mark = "o--" if method.startswith("GS") else "o-"
                harness.band(ax, x, *values, fmt=mark, color=COLOURS[method], label=method)
            bias, limit = (np.array([row[name] for row in widths]) for name in ("bias", "bias_limit"))
            seen, place = bias > limit, at + 0.08 * (i - 3)
            biases.plot(place[seen], bias[seen], "o", color=COLOURS[method])
            biases.plot(place[~seen], limit[~seen], "v", mfc="none", color=COLOURS[method])
        for method, baseline in SHOWN:
            found = [gains[_name((swarm, w, horizon, lanes), method, baseline)] for w in config.widths]
            low, high = zip(*(g["interval"] for g in found), strict=True)
            harness.band(ratios, at, [g["value"] for g in found], low, high, label=f"{method} / {baseline}")
        ratios.axhline(1, color="black", lw=0.8)
        errors.set_title(f"{swarm}: RMS error / |gradient|, H = {horizon}, B = {lanes}")
        over_lanes.set(xscale="log", xlabel="lanes, B", title=f"the same against lanes, {_cost(narrow)}")
        ratios.set_title("gain of the first: ratio of squared errors")
        biases.set_title("bias / |gradient|; open: hidden by noise, below this")
        for ax in (errors, ratios, biases):
            ax.set_xticks(at, [_cost(w) for w in config.widths])
        for ax in (errors, over_lanes, ratios, biases):
            ax.set_yscale("log")
        errors.legend()
        ratios.legend()
    return figure


if __name__ == "__main__":
    harness.main()
