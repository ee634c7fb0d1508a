"""The rows of the tables of single runs: functions of a run's results that return rows of text, the head first.

Beside them `told`, which reads the figures in a text.
"""

import re
from typing import Any, ClassVar

import numpy as np

from experiments.report.verdicts import Results, Value, figure

Rows = list[list[str]]


def _figure(row, name, factor=1, error=None):
    """The figure of a row with its standard error, each times a factor."""
    error = row[error or f"{name}_se"]
    return figure(Value(factor * row[name], None if error is None else factor * error))


class _Shown:
    """A value of a row, formatted as Python does, in a unit (`.1f%`, `.2fMB`), or with what says how exact it is.

    `se` and `se%` show a standard error, in NAME_se or standard_error; `.3g95` the interval NAME_low to NAME_high. What
    is None shows as nothing, or as what stands behind a bar: `.0f|none`.
    """

    UNITS: ClassVar = {"%": 100, "kB": 1e-3, "MB": 1e-6, "ms": 1e3}

    def __init__(self, row: dict[str, Any], name: str):
        self.row, self.name = row, name

    def __format__(self, form: str) -> str:
        value, (form, _, absent) = self.row[self.name], form.partition("|")
        if value is None or (value == "" and absent):
            return absent
        unit = next((unit for unit in self.UNITS if form.endswith(unit)), "")
        form = form.removesuffix(unit)
        if form == "se":
            error = None if f"{self.name}_se" in self.row else "standard_error"
            return _figure(self.row, self.name, self.UNITS.get(unit, 1), error)
        if form.endswith("95"):
            form = form.removesuffix("95")
            low, high = (self.row[f"{self.name}_{end}"] for end in ("low", "high"))
            return f"{value:{form}} ({low:{form}} to {high:{form}})"
        return format(self.UNITS[unit] * value if unit else value, form)


def _shown(form: str, row: dict[str, Any]) -> str:
    return form.format(**{name: _Shown(row, name) for name in row})


def told(text: str, runs: dict[str, Results], run: str = "") -> str:
    """A text with its figures: each `<where: format>` is a row's, or another part's of a run, without a leading zero.

    Each paragraph, and each item of a list, becomes one line. `where` has, with semicolons between, another run's name
    or none, names that lead into the results, and the values that one row of them alone has.

    Example:
      >>> run = {"rows": [{"who": "RP", "cost": 0.25}, {"who": "LR", "cost": 2.0}], "tame": {"loss": -0.5}}
      >>> told("RP costs <who=RP: {cost:.2f}>, LR <a; who=LR: {cost:.0f}>, a loss <tame: {loss:.1f}>.", {"a": run}, "a")
      'RP costs .25, LR 2, a loss -.5.'
    """

    def read(match: re.Match[str]) -> str:
        parts = [part.partition("=") for part in match[1].split("; ") if part]
        found = runs.get(parts[0][0] if parts else run) or runs[run]
        for name in (name for name, given, _ in parts if not given and name not in runs):
            found = found[name]
        if where := {(name, value) for name, given, value in parts if given}:
            (found,) = (row for row in found["rows"] if where <= {(name, str(value)) for name, value in row.items()})
        return re.sub(r"(?<![\d.])0(?=\.\d)", "", _shown(match[2], found))

    return re.sub(r"<([^<>:]*): ([^<>]*)>", read, re.sub(r"(?<!\n)\n *(?!\n|\* )", " ", text.strip()))


def listed(results: Results, columns: list[list[str]], by: str | None = None) -> Rows:
    """A line for each row of the results, whose columns are format strings, sorted by a value if one is named.

    Example:
      >>> rows = [{"who": "RP", "cost": 0.25, "cost_se": 0.01}]
      >>> listed({"rows": rows}, [["method", "{who}"], ["cost", "{cost:se%} %"]])
      [['method', 'cost'], ['RP', '25.0 ± 1.0 %']]
    """
    rows = results["rows"] if by is None else sorted(results["rows"], key=lambda row: row[by])
    return [[head for head, _ in columns], *([_shown(form, row) for _, form in columns] for row in rows)]


def pivoted(results: Results, by: list[list[str]], over: str, columns: list[list[str]], **where: list[Any]) -> Rows:
    """A line for all rows of the results that `by` shows alike; a column, [head, value, format], shows the row of them
    in which `over` has the value. Of `where` a row has one of the values under each name.

    Example:
      >>> rows = [{"who": who, "H": 5, "cost": cost} for who, cost in (("RP", 0.25), ("LR", 1))]
      >>> rows.append({"who": "RP", "H": 9, "cost": 0.5})
      >>> pivoted({"rows": rows}, [["steps", "{H}"]], "who", [["RP's", "RP", "{cost:.2f}"], ["LR's", "LR", "{cost}"]])
      [['steps', "RP's", "LR's"], ['5', '0.25', '1'], ['9', '0.50', '']]
    """
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in results["rows"]:
        if all(row[name] in values for name, values in where.items()):
            lines.setdefault(tuple(_shown(form, row) for _, form in by), {})[row[over]] = row
    texts = ([*line, *(_shown(f, of[v]) if v in of else "" for _, v, f in columns)] for line, of in lines.items())
    return [[head for head, *_ in (*by, *columns)], *texts]


def of_figures(results: Results, heads: list[str], lines: list[list[str]], columns: list[list[str]]) -> Rows:
    """A line for each of `lines`, some texts under the heads, whose first one names figures of the results: a further
    column, [head, name, format], shows the figure whose name is made of it.

    Example:
      >>> results = {"RP, 5 steps": {"cost": 0.25}}
      >>> of_figures(results, ["who", "lanes"], [["RP", "9"]], [["cost", "{}, 5 steps", "{cost:.2f}"]])
      [['who', 'lanes', 'cost'], ['RP', '9', '0.25']]
    """
    found = lambda line, name, form: _shown(form, results[key]) if (key := name.format(line[0])) in results else ""
    texts = ([*line, *(found(line, name, form) for _, name, form in columns)] for line in lines)
    return [[*heads, *(head for head, *_ in columns)], *texts]


def swarms(results) -> Rows:
    methods = ("RP", "LR, no baseline", "LR", "GS-LR", "TP", "GS-TP", "GR")
    rows, found = [["swarm", "cost", *methods]], {}
    for r in results["rows"]:
        if (r["H"], r["B"]) == (25, 1000):
            bias = f" (bias {r['bias']:.2g})" if r["bias"] > r["bias_limit"] else ""
            found.setdefault((r["swarm"], r["cost"]), {})[r["method"]] = f"{r['rms_error']:.2g}{bias}"
    return rows + [[*place, *(errors[m] for m in methods)] for place, errors in found.items()]


def gradient_errors(results) -> Rows:
    stages = [f"after {stage}" for stage in results["config"]["stages"]]
    of = lambda x: f"{x['mean']:.2g} ({x['worst']:.2g})"
    rows = [["gradient", *(f"{stage} steps" for stage in stages), "where RP explodes", "elsewhere"]]
    nothing = []  # the error of a gradient of zero is the truth's square, where that is known
    for stage in results["config"]["stages"]:
        mine = [r for r in results["rows"] if (r["stage"], r["method"]) == (stage, "RP")]
        errors = np.array([r["squared_truth"] * r["ratio"] / r["error"] for r in mine])
        known = (errors > 0).all()
        nothing.append(of({"mean": np.exp(np.log(errors).mean()), "worst": errors.max()}) if known else "")
    rows.append(["zero", *nothing, "", ""])
    for name in results[stages[0]]:
        rows.append([name, *(of(results[stage][name]) for stage in stages), "", ""])
    for name in results["elsewhere"]:
        rows.append([name, *[""] * len(stages), *(of(results[k][name]) for k in ("where RP explodes", "elsewhere"))])
    return rows


def clipped_at_the_edge(results) -> Rows:
    """Squared errors: the variance, and for what is biased the bias's square without its own noise's."""
    found = {(r["beta"], r["method"]): r for r in results["rows"]}
    rows = [["beta", "zero", "RP", "LR", *results["config"]["methods"]]]
    for beta in results["config"]["betas"]:
        mine = {method: r for (b, method), r in found.items() if b == beta}
        of = {m: r["variance"] + max(r["bias"] ** 2 - r["standard_error"] ** 2, 0) for m, r in mine.items()}
        of |= {m: mine[m]["variance"] for m in ("RP", "LR", "decoupled-CF")} | {"zero": mine["RP"]["exact"] ** 2}
        rows.append([f"{beta:g}", *(f"{of[m]:.2g}" for m in rows[0][1:])])
    return rows


def rule_for_long(results) -> Rows:
    rows = [["network", "learner", *(f"{t} steps" for t in (20, 100, 200, 1000))]]
    for setting in results["config"]["settings"]:
        for method in ("MPLP", "Muon", "momentum", "Adam", "SGD"):
            if (found := results.get(f"{setting}, {method}")) is not None:
                name = setting.rpartition(", ")[0] if method == "MPLP" else ""
                method = "normalized" if found["rate"] == "untrained" else method
                steps = (figure(Value(*found["at steps"][t])) for t in ("20", "100", "200", "1000"))
                rows.append([name, method, *steps])
    return rows


def rule_in_architectures(results) -> Rows:
    ahead = "ahead by (95 %)"
    rows = [["network", "updates", "best optimizer", "untrained rule", ahead, "trained rule", ahead]]
    found = {(r["network"], r["updates"], r["method"]): r for r in results["rows"]}
    for network, updates in dict.fromkeys(key[:2] for key in found):
        best = found[network, updates, found[network, updates, "trained"]["best"]]
        row = [network, str(updates), f"{best['method']} {_figure(best, 'accuracy')}"]
        for method in ("untrained", "trained"):
            mine = found[network, updates, method]
            row += [_figure(mine, "accuracy"), "{ahead:.1f} ({ahead_low:.1f} to {ahead_high:.1f})".format(**mine)]
        rows.append(row)
    return rows


def outer_gradients(results) -> Rows:
    found = {(r["estimator"], r["theta"]): r for r in results["rows"] if r["T"] == 40}
    rows = [["outer gradient", "variance, tame", "bias", "variance, chaotic", "bias"]]
    for name in dict.fromkeys(r["estimator"] for r in results["rows"]):
        rows.append([name])
        for r in (found.get((name, theta), {"variance": None}) for theta in (0.1, 0.9)):
            tame = r["variance"] is not None and r["variance"] < 1e6
            bias = _figure(r, "bias", error="bias_standard_error") if tame else "-"
            rows[-1] += [_shown("{variance:.2g|-}", r), bias]
    return rows


def outer_training(results) -> Rows:
    rows = [["bed", "outer gradient", "validation loss", "seconds to the threshold", "bias of the gradient"]]
    for r in results["rows"]:
        begun = results[r["start"]]
        name = f"{r['start']}, {begun['seconds']:.2g} s, threshold {begun['threshold']:.2g}"
        shown = _figure(r, "loss", error="standard_error") if r["loss"] is not None else "not finite"
        when = _shown("{seconds_to_threshold:.2g|never}", r)
        off = "" if r["bias"] is None else _figure(r, "bias", error="bias_standard_error")
        rows.append(["" if any(name in row for row in rows) else name, r["method"], shown, when, off])
    return rows


def noise(results) -> Rows:
    times = sorted({r["steps"] for r in results["rows"]})
    columns = [f"{layers}, after {t:,} steps" for t in times for layers in ("before the last layer", "last layer")]
    rows = [["method", "batch", "residual kB", *columns]]
    shown = [r for r in results["rows"] if r["method"] != "baseline" and r["batch"] == results["config"]["batch"]]
    for method in dict.fromkeys(r["method"] for r in shown):
        mine, cells = [r for r in shown if r["method"] == method], []
        for t in times:
            *others, last = sorted((r for r in mine if r["steps"] == t), key=lambda r: r["layer"])
            found = [r["against_smaller_batch"] for r in others]
            cells += [f"{min(found):.2f} to {max(found):.2f}", f"{last['against_smaller_batch']:.2f}"]
        rows.append([method, str(mine[0]["batch"]), f"{mine[0]['residual_bytes'] / 1e3:.0f}", *cells])
    return rows


def collectives(results) -> Rows:
    columns = [["devices", "{devices}"], ["sharded", "{sharded}"], ["collectives once", "{once}"]]
    columns += [["in each turn of the loop", "{each_turn}"], ["bytes a step", "{bytes:,}"]]
    columns.append(["scratch MB a device", "{temp_bytes_per_device:.1fMB}"])
    size = lambda r: r | {"bytes": r["bytes_once"] + r["turns"] * r["bytes_each_turn"]}
    return listed({"rows": [*map(size, results["rows"])]}, columns)


def choice_peers(results) -> Rows:
    found = {(r["problem"], r["method"]): r for r in results["rows"]}
    methods = ("ap.enumeration", "ap.rloo, 4", "ap.disarm", "ap.arms, 4", "ap.rebar", "TraceGraph_ELBO")
    rows = [["problem", "at equal", "best peer", *(f"`{m}`" for m in methods)]]
    for problem in dict.fromkeys(r["problem"] for r in results["rows"]):
        of = [found.get((problem, m)) for m in methods]
        ratios = ["" if r is None else f"{r['over_best_peer']:.2g} ({r['low']:.2g} to {r['high']:.2g})" for r in of]
        ratios = ["0" if r is not None and r["over_best_peer"] < 1e-9 else x for r, x in zip(of, ratios, strict=True)]
        rows.append([problem, "evaluations", found[problem, "ap.disarm"]["best_peer"], *ratios])
        in_time = {m: r["variance"] * r["seconds_ratio"] for (p, m), r in found.items() if p == problem}
        best = min((m for m in in_time if not m.startswith("ap.")), key=lambda m: in_time[m])
        of = [in_time[m] / in_time[best] if m in in_time else None for m in methods]
        rows.append(["", "time", best, *("" if x is None else "0" if x < 1e-9 else f"{x:.2g}" for x in of)])
    return rows
