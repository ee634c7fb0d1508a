"""What of a run is held against what a paper says: functions of its results, named in `pages.toml`."""

import statistics
from typing import Any

from experiments.report.verdicts import Results, Value, figure


def named(results: Results, key: str) -> Value:
    return Value(results[key]["mean"], results[key]["standard_error"])


def interval(results: Results, key: str) -> Value:
    """The value with a quarter of its 95 % interval's width, about its standard error."""
    low, high = results[key]["interval"]
    return Value(results[key]["value"], (high - low) / 4)


def rows_with(results: Results, **values: Any) -> list[dict[str, Any]]:
    """The rows that have these values."""
    return [row for row in results["rows"] if values.items() <= row.items()]


def of_row(results: Results, values: dict[str, Any], column: str, factor: float = 1) -> Value:
    """A column, times a factor, of the only row that has these values, with its standard error if it has one."""
    (row,) = rows_with(results, **values)
    return Value(factor * row[column], factor * row[f"{column}_se"] if f"{column}_se" in row else None)


def largest_ratio(results: Results, method: str, steps: int = 50) -> Value:
    """The largest gain over betas, but for those where a rare lane has nearly all of the variance."""
    start = f"variance_ratio_{method}_H{steps}_"
    known = {k: v for k, v in results.items() if k.startswith(start) and v["interval"][0] > 1}
    return interval(results, max(known, key=lambda k: known[k]["value"]))


def loss_at_equal_memory(results: Results, *ordered: list[str]) -> tuple[str, bool]:
    """Final losses; whether the first method of each pair comes lower than the second."""
    of = {r["method"]: r for r in results["rows"]}
    shown = [m for m in ("baseline", "different", "same", "project", "reduced", "rounding 4") if m in of]
    words = ", ".join(f"{m} {of[m]['train_loss']:.3g} ({100 * of[m]['test_accuracy']:.1f} %)" for m in shown)
    holds = all(of[a]["train_loss"] < of[b]["train_loss"] for a, b in ordered)
    return f"training loss (test accuracy): {words}", holds


def noise(results: Results, last: bool) -> tuple[str, bool]:
    """Squared errors over those of smaller batches of equal memory, in the last layer or in those before it."""
    config, final = results["config"], max(r["layer"] for r in results["rows"])
    rows = rows_with(results, steps=max(config["training_steps"]), batch=config["batch"])
    rows = [r for r in rows if (r["layer"] == final) == last]
    found = lambda name: [r["against_smaller_batch"] for r in rows if r["method"].split()[0] == name]
    ratios = {name: found(name) for name in ("same", "different", "stratified", "rounding")}
    words = ", ".join(f"{name} {min(each):.2f} to {max(each):.2f}" for name, each in ratios.items())
    most = max(max(ratios[name]) for name in ("same", "different"))
    return f"squared error over that of a smaller batch of equal memory: {words}", most < 1


def pde_losses(results: Results) -> tuple[str, bool]:
    losses = {r["fraction"]: r["final_losses"] for r in rows_with(results, iterations=800)}
    ratios = {f: [a / b for a, b in zip(ends, losses[1.0], strict=True)] for f, ends in losses.items() if f != 1.0}
    words = ", ".join(f"{f:g}: {min(each):.3f} to {max(each):.3f}" for f, each in ratios.items())
    starts = f"final loss over exact reverse mode's from {len(losses[1.0])} starts, by fraction"
    return f"{starts}: {words}", all(abs(r - 1) < 0.1 for each in ratios.values() for r in each)


def counted(results: Results, network: str) -> tuple[str, bool]:
    """The paper's count by hand, done again, beside its totals; a total is printed to .01."""
    rows = [r for r in rows_with(results, network=network) if r["paper_count_MB"]]
    off = [r["paper_with_weights_MB"] - r["paper_count_MB"] for r in rows]
    words = f"the paper's totals minus ours are {min(off):+.3f} to {max(off):+.3f} MB at {len(off)} fractions"
    return words, max(map(abs, off)) < 0.01


def growth(results: Results, graph: str, draw: str) -> list[float]:
    """What a layer multiplies the variance of path sampling by, least and most over the edges drawn at a vertex."""
    factors = results["variance_factor_of_a_layer"]
    found = [factors[f"{graph}, {draw}, {k} edges"] for k in results["config"]["samples"]]
    return [min(found), max(found)]


def path_variance(results: Results) -> tuple[str, bool]:
    (_, independent), (interleaved, _) = (growth(results, g, "uniform") for g in ("independent", "interleaved"))
    words = f"a layer multiplies it by at most {independent:.2f} and at least {interleaved:.2f}"
    return words, independent < 1.05 and interleaved > 1.2


def by_messages(results: Results, graph: str) -> tuple[str, bool]:
    """Growth of the variance by the messages of an earlier call, and uniformly; whether the former stops it."""
    (low, high), (least, most) = (growth(results, graph, draw) for draw in ("by messages", "uniform"))
    words = f"a layer multiplies it by {low:.2f} to {high:.2f}, where uniform draws have {least:.2f} to {most:.2f}"
    return words, high < 1.05


def flat_phase(results: Results) -> tuple[str, bool]:
    arms, words = ("random start", "random start, batch entropy", "started as gradient descent"), []
    for arm in filter(results.__contains__, arms):
        begun = [f"{phase:,}" for phase in results[arm]["flat_phase"] if phase is not None]
        after = f" (after {', '.join(begun)} outer steps)" if begun else ""
        last = f"held-out loss at the end {results[arm]['held_out']:.2f}"
        words.append(f"{arm}: {len(begun)} of {results[arm]['of']} seeds start{after}, {last}")
    words.append(f"SGD {results['SGD']['held_out']:.2f}, Adam {results['Adam']['held_out']:.2f}")
    begun = [results.get(arm, {}).get("seeds_started", 0) for arm in arms]
    return "; ".join(words), begun[1] > begun[0]


def influence_balancing(results: Results) -> tuple[str, bool]:
    rows = {r["method"]: r for r in rows_with(results, start="influence balancing")}
    begun, biased, unbiased = results["influence balancing"], rows["truncated, K = 1"], rows["PES, K = 1"]
    words = (
        f"loss {begun['loss at the start']:.2g} at first, {biased['loss']:.2g} by truncated reverse mode, "
        f"{unbiased['loss']:.2g} by PES, which once reaches {begun['threshold']:.2g} on average; "
        f"PES's bias {figure(Value(unbiased['bias'], unbiased['bias_standard_error']))} of 24"
    )
    holds = biased["loss"] > begun["loss at the start"] and unbiased["seconds_to_threshold"] is not None
    return words, holds and abs(unbiased["bias"]) < 4 * unbiased["bias_standard_error"]


def dynamics(results: Results) -> tuple[str, bool]:
    losses = {k: v for k, v in results.items() if k.startswith("k = ")}
    least = lambda part: min(loss for name, loss in losses.items() if part in name)
    best = min(losses, key=lambda k: losses[k])
    words = f"best: {best} ({losses[best]:.2f}); best with k = 1 {least('k = 1,'):.2f}, without batch norm "
    words += f"{least('none'):.2f}; SGD {results['SGD']['judged']:.2f}, Adam {results['Adam']['judged']:.2f}"
    return words, best == "k = 8, batch norm, learned rate"


def message_sizes(results: Results) -> tuple[str, bool]:
    found = {name: seeds for name, seeds in results.items() if name.startswith("k = ")}
    words, means = [], {}
    for share in dict.fromkeys(name.partition(", ")[2] for name in found):
        sizes = {name.partition(", ")[0]: seeds for name, seeds in sorted(found.items()) if name.endswith(share)}
        errors = {size: [seed["mean"] for seed in seeds.values()] for size, seeds in sizes.items()}
        means[share] = {size: statistics.fmean(each) for size, each in errors.items()}
        words.append(f"{share}: " + ", ".join(f"{k} {' and '.join(f'{e:.4f}' for e in v)}" for k, v in errors.items()))
    by_size = all([*each.values()] == sorted(each.values(), reverse=True) for each in means.values())
    own = means.pop("shared: none")
    by_sharing = all(own[k] < shared[k] for shared in means.values() for k in own.keys() & shared.keys())
    return "; ".join(words), by_size and by_sharing


def between(results: Results) -> tuple[str, bool]:
    """The rule at the outer steps where the thesis takes it, beside SGD at the rate that its script uses, and Adam."""
    rule = [loss for step, loss in results["outer_loss_by_step"] if 105_000 <= step <= 129_000]
    sgd, adam = results["SGD"]["sweep"]["0.01"], results["Adam"]["outer_loss"]
    words = f"rule {min(rule):.1f} to {max(rule):.1f} from 105,000 to 129,000 outer steps, SGD at .01 {sgd:.1f}, Adam "
    return f"{words}{adam:.1f}", adam < min(rule) and max(rule) < sgd


def tuned(results: Results) -> tuple[str, bool]:
    rule, sgd = (results[name]["outer_loss"] for name in ("MPLP", "SGD"))
    return f"SGD {sgd:.1f} at rate {results['SGD']['rate']}, the rule at its best {rule:.1f}", sgd < rule


def functions(results: Results) -> tuple[str, bool]:
    start = "correlation, "
    found = {key.removeprefix(start): value for key, value in results.items() if key.startswith(start)}
    words = ", ".join(f"{name} {value:+.2f}" for name, value in found.items())
    return f"correlations with those of gradient descent: {words}", min(map(abs, found.values())) > 0.5


def shaping(results: Results) -> tuple[str, bool]:
    rows = {(r["H"], r["beta"], r["method"]): r["variance"] for r in results["rows"]}
    ratios = [v / rows[h, b, "LR"] for (h, b, method), v in rows.items() if method == "GS-LR"]
    return f"{min(ratios):.2g} to {max(ratios):.2g} times the variance without it: no clear gain", min(ratios) <= 0.01


def largest_gain(results: Results, method: str, baseline: str) -> tuple[str, bool]:
    ends = (results[f"{which} gain of {method} over {baseline}"] for which in ("smallest", "largest"))
    (least, _), (most, within) = ((end["value"], end["interval"]) for end in ends)
    return f"squared error over that of {method}: {least:.2g} to {most:,.{0 if most > 10 else 1}f}", within[0] >= 100


def gain_of_both(results: Results) -> tuple[str, bool]:
    """The largest gain of shaped total propagation on the likelihood ratio, and what unshaped has in that cell."""
    where = results["largest gain of GS-TP over LR"]["where"].removeprefix("gain of GS-TP over LR, ")
    both, part = (results[f"gain of {gain}, {where}"]["value"] for gain in ("GS-TP over LR", "GS-TP over TP"))
    words = f"at most {both:,.0f}, of which {both / part:,.0f} is total propagation's without shaping"
    return f"{words}, {part:.1f} its own", both >= 100


def exponents(results: Results, graphs: str) -> tuple[str, bool]:
    words, found = [], {}
    for name in ("grad", "max-product"):
        row = results[f"{graphs} {name}"]
        found[name] = Value(row["exponent"], row["exponent_standard_error"])
        words.append(f"{name} {figure(found[name])}")
    return ", ".join(words), all(abs(v.mean - 1) <= 2 * (v.error or 0) for v in found.values())


def larger_batch(results: Results, last: bool) -> tuple[str, bool]:
    """A tenth of the entries for 600 examples, over all of them for 150: the squared errors' ratio."""
    rows = rows_with(results, steps=max(results["config"]["training_steps"]))
    final = max(r["layer"] for r in rows)
    errors = {(r["method"], r["batch"], r["layer"]): r["squared_error"] for r in rows}
    layers = sorted({r["layer"] for r in rows if (r["layer"] == final) == last})
    ratios = [errors["different 0.1", 600, n] / errors["baseline", 150, n] for n in layers]
    words = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else f"{ratios[0]:.2f}"
    return f"squared error over the batch's of 150: {words}", max(ratios) < 1
