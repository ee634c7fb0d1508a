"""The pages: their Python runs, every public name has its entry, links live, and Results is what the results say."""

import ast
import importlib
import inspect
import json
import re
import statistics
import tomllib
from pathlib import Path

import jax
import pytest

import apgrad as ap
from apgrad import mplp
from experiments import tracing_ablation
from experiments.mplp_from_random import PUBLISHED
from experiments.report import __main__ as report
from experiments.report.contents import NOTES, TABLES
from experiments.report.readers import growth

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in [ROOT / "README.md", *DOCS.rglob("*.md")] if "notebooks" not in path.parts)
SOON = ("README", "start_here", "how_it_works")  # other pages' Python is left to `-m long`
INTERLEAVED, DRAWS = ("interleaved", "interleaved, one sign"), ("uniform", "by messages")
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def words_of(path):
    return " ".join(path.read_text().split())


def results(name):
    return json.loads((ROOT / "experiments" / "results" / name / "results.json").read_text())


WITH_PYTHON = [pytest.param(p, marks=[pytest.mark.long] * (p.stem not in SOON)) for p in PAGES if blocks(p)]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_python_of_a_page_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": path.stem}
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        for block in blocks(path):
            exec(block, names)
    if path.parent.name == "tasks":  # a page says what its program prints; figures differ between machines
        shown = re.findall(r"```text\n(.*?)```", path.read_text(), flags=re.DOTALL)
        words = lambda text: re.sub(r"[-\d.]+", "", text).split()
        assert words("".join(shown)) == words(capsys.readouterr().out)
    if path.name == "README.md":
        assert names["mean"][20] > names["mean"][0] + 0.3  # a rule learns data that it never saw
    if path.stem == "expectations" and path.parent.name == "wings":
        assert abs(names["costs"][-1]) < 0.5 * names["costs"][0]


@pytest.mark.quick
def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def documented():
    """The objects that the API reference has an entry for."""
    found = []
    for path in (DOCS / "api").rglob("*.md"):
        module = None
        entries = re.findall(r"^\.\. (currentmodule|auto\w+|py:data):: (\S+)$", path.read_text(), flags=re.MULTILINE)
        for kind, name in entries:
            if kind == "currentmodule":
                module = importlib.import_module(name)
            else:
                found.append((f"{module.__name__}.{name}", getattr(module, name)))
    return found


def public(module):
    """The names that a module defines without an underscore, and those that it hands on (`import a as a` or `*`)."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname for alias in node.names if alias.asname == alias.name)
            yield from importlib.import_module(node.module).__all__ if node.names[0].name == "*" else ()


@pytest.mark.quick
def test_every_public_name_is_in_the_api_reference():
    entries = documented()
    there = {id(value) for _, value in entries}
    modules = ["expectations", "memory", "meta", "mplp", "rewiring", "tracing", "testing"]
    modules += ["expectations.diagnostics", "expectations.weights", "meta.data"]
    values = {n: getattr(ap, n) for n in ap.__all__}
    missing = [f"ap.{n}" for n, value in values.items() if not inspect.ismodule(value) and id(value) not in there]
    for name in modules:
        module = importlib.import_module(f"apgrad.{name}")
        values = {n: getattr(module, n) for n in public(module)}
        missing += [f"{name}.{n}" for n, v in values.items() if not inspect.ismodule(v) and id(v) not in there]
    assert not missing, "give them an entry on a page in docs/api/"
    names = [name for name, _ in entries]
    assert len(names) == len(set(names))


@pytest.mark.quick
def test_public_functions_and_methods_document_their_arguments():
    """A method where one class of its part documents the method of this name."""
    entries, found = {}, []
    for name, value in documented():
        for own, function in (vars(value) if inspect.isclass(value) else {"": value}).items():
            function = inspect.unwrap(getattr(function, "__func__", function))
            if own.startswith("_") or not inspect.isfunction(function):
                continue
            section = re.search(r"^Args:\n((?:  .*\n|\n)*)", (inspect.getdoc(function) or "") + "\n", re.MULTILINE)
            named = set(re.findall(r"^  \*{0,2}(\w+): ", section[1] if section else "", re.MULTILINE))
            place = (function.__module__.split(".")[1], own)
            found.append((name, place, set(inspect.signature(function).parameters) - {"self", "cls"} - named))
            entries.setdefault(place, set()).update(named)
    assert len(found) > 200 and "0x" not in str(inspect.signature(ap.total_propagation))
    for name, place, without in found:
        missing = without - (entries[place] if place[1] else set())
        assert not missing, (name, place[1], sorted(missing))


@pytest.mark.quick
@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target) if target else path
        if page.suffix == ".ipynb":  # copied there when the pages are built
            page = ROOT / "notebooks" / page.name
        assert page.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            slugs |= {re.sub(r"[^\w]+", "-", h.lower()).strip("-") for h in headings}
            assert anchor in slugs, link


@pytest.mark.quick
def test_results_are_what_the_files_say():
    assert report.main(["--check"]) == 0


@pytest.mark.quick
def test_the_address_of_the_repository_stands_in_one_place():
    wrong = []
    for path in [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "notebooks").glob("*.ipynb")]:
        found = set(re.findall(r"github\.com/([\w.-]+/[\w.-]+?)(?=[\"#@/\s)\\]|\.git|$)", path.read_text()))
        own = {name for name in found if name.endswith("/apgrad") or name.startswith("apgrad/")}
        wrong += [(path.name, name) for name in own | ({"google"} & found) if not ADDRESS.endswith(name)]
    assert not wrong, f"not the address of pyproject.toml, {ADDRESS}"


def rows(run, **where):
    """The rows of a run that have these values."""
    return [r for r in results(run)["rows"] if where.items() <= r.items()]


def one(run, column, **where):
    return next(r[column] for r in rows(run, **where))


def figures_of_results() -> dict[str, set[str]]:
    """The measured figures of the README, of the wings' pages and of what is new, from the results they are made of.

    And what is typed in the texts of *Results*, by the run or paper, since it compares rows.
    """
    ends = lambda values, form: f"{min(values):{form}} to {max(values):{form}} times"
    percent = lambda run, names: [f"{results(run)[name]['mean']:.0f}" for name in names]
    shares = lambda run, names: [f"{p} %" for p in percent(run, names)]

    chaos = results("chaos-paper")
    value = lambda key: chaos[key]["value"]
    default, rest = value("variance_decoupled-CF_H50_beta3.5"), chaos["bias_decoupled-CF_H100_beta1.5"]
    median = statistics.median(v["value"] for k, v in chaos.items() if k.startswith("variance_ratio_decoupled-CF_H50_"))
    rare = lambda method: one("total_propagation-by_state", "median", beta=1.5, method=method)
    biases = [r["bias"] for r in rows("gaussian_shaping_swarm-paper", swarm="bounded force", method="GS-TP")
              if r["cost"] != "quadratic"]  # fmt: skip

    errors = results("gradient_errors-paper")
    clipped = [errors[stage]["clipped at 10"]["mean"] for stage in ("after 0", "after 20")]
    plain = rows("gradient_errors-paper", method="RP", stage=0)
    zero = statistics.geometric_mean(r["squared_truth"] * r["ratio"] / r["error"] for r in plain)

    noise = {run: rows(run, batch=150) for run in ("rad_noise-paper", "rad_noise-mlp")}
    last = max(r["layer"] for r in noise["rad_noise-paper"])
    kind, better = lambda r: r["method"].split()[0], lambda found: [1 / r["against_smaller_batch"] for r in found]
    sampled = [r for r in noise["rad_noise-paper"] if kind(r) not in ("baseline", "rounding") and r["layer"] < last]
    samples = ends(better(r for r in sampled if r["steps"] == 500), ".1f")
    rounded = {run: [r for r in found if kind(r) == "rounding"] for run, found in noise.items()}
    trained_on = [r for found in rounded.values() for r in found if r["steps"]]
    few, all_of_them = (
        one("rad_noise-paper", "squared_error", method=method, batch=batch, steps=500, layer=last)
        for method, batch in (("different 0.1", 600), ("baseline", 150))
    )

    ratio = lambda r: r["predicted_against_smaller_batch"] / r["measured_against_smaller_batch"]
    off = lambda found: max(abs(ratio(r) - 1) for r in found)
    of_layer = lambda found, part: [[r for r in found if (part in r["layer"]) == which] for which in (True, False)]
    dense, convnets = rows("rad_prediction-paper"), rows("rad_prediction-convnets")
    last_dense, other = of_layer(rows("rad_prediction-small"), "dense")
    stratified = max(ratio(r) - 1 for r in convnets if (r["steps"], r["sampler"]) == (300, "stratified 0.1"))
    losses = [one("rad_training-mlp", "train_loss", method=method) for method in ("reduced", "different")]
    ways = ("jax.checkpoint", "plan, quarter")
    compiled = [one("benchmarks.accelerator-paper", "MB_compiled", method=method) for method in ways]

    paths, costs = results("rad_paths-paper"), rows("benchmarks.tracing-paper")
    ratios = [r["ratio"] for r in costs if r["semiring"] not in ("top 3", "influence")]
    influence = [r["ratio"] for r in costs if r["semiring"] == "influence"]
    deep = rows("rad_paths-paper", graph="interleaved", depth=16, samples=1)
    noise_of = {r["draw"]: r["relative_variance"] for r in deep}

    trained = ("mnist, trained here", "mnist, trained here, step", "mnist, trained here, 784-100-10")
    here, held = (shares(f"mplp_from_random-{which}", trained) for which in ("paper", "held_out"))
    a, b, c = percent("mplp_from_random-held_out", trained)
    seeds = [[r["accuracy"] for r in rows("mplp_objective-random", objective=o)] for o in ("published", "held-out")]
    apart = f"{max(max(each) - min(each) for each in seeds):.0f} points"
    behind = min(r["ahead of best"] for r in rows("mplp_settings-paper", rule="images, surrogate", steps=100))
    part = lambda column, **where: one("mplp_ablation-paper", column, updates=20, **where)
    before, after = (part("accuracy", rule="whole", training=when) for when in ("before", "after"))
    accuracy = [one("ways_back-convnet", "test_accuracy", rule=r) for r in ("feedback_alignment", "last_layer")]
    return {
        "README.md": {
            f"{value('variance_ratio_decoupled-CF_H50_beta2.5'):.0f} times",
            f"{default / value('variance_LR_H50_beta3.5'):.1f} times",
            f"{default / value('variance_TP_H50_beta3.5'):.1f} times",
            f"{-100 * rest['value'] / rest['exact_gradient']:.1f} %",
            *(f"{rare(method) / rare('RP'):.0f} times" for method in ("adaptive", "by state")),
            f"{median:.1f} times",
            *shares("mplp_mnist-paper", [f"784-100-10, {method}" for method in ("MPLP", "Muon", "Adam")]),
        },
        "docs/wings/expectations.md": {f"{1 / error:.0f} times" for error in [*clipped, zero]}
        | {f"{zero / clipped[0]:.1f} times"},
        "docs/wings/memory.md": {samples, ends(better(trained_on), ".0f")},
        "docs/wings/mplp.md": {
            *here,
            *shares("mplp_published-paper", ("mnist, Adam", "mnist, MPLP, 784-100-10")),
            f"{a}, {b} and {c} %",
        },
        "docs/wings/tracing.md": {ends(each, ".0f") for each in (ratios, influence)},
        "docs/new/noise.md": {
            *(f"{100 * off(r):.1f} %" for r in (dense, last_dense, other, *of_layer(convnets, "conv"))),
            f"{100 * max(r['predicted_over_measured'] - 1 for r in convnets):.0f} %",
        },
        "docs/new/objective.md": {
            f"{PUBLISHED['mnist']:.0f} %",
            *here,
            *held,
            *shares("mplp_objective-small", ["at the start"]),
            *(f"{r['accuracy']:.0f} %" for r in rows("mplp_objective-random")),
        },
        "docs/new/paths.md": {
            *("{:.1f} to {:.1f} times".format(*growth(paths, g, draw)) for g in INTERLEAVED for draw in DRAWS),
            f"{noise_of['uniform'] / noise_of['by messages']:.0f} times",
        },
        "Proppo and PIPPS: total propagation": {f"{100 * min(biases):.0f} to {100 * max(biases):.0f} %"},
        "MPLP": {apart},
        "mplp_objective-random": {apart},
        "mplp_settings-paper": {f"{-behind:.1f} points"},
        "mplp_ablation-paper": {
            f"{-part('ahead', rule='gradient alone', training='after'):.0f} points",
            f"{after - before:.0f} points",
            f"{-part('ahead', rule='no whitening', training='before'):.0f} points",
        },
        "benchmarks.accelerator-paper": {f"{100 * (1 - compiled[0] / compiled[1]):.0f} %"},
        "rad_training-mlp": {f"{float(f'{losses[0] / losses[1]:.1g}'):.0f} times"},
        "rad_noise-paper": {samples, f"{few / all_of_them:.1f} times", ends(better(rounded["rad_noise-paper"]), ".0f")},
        "rad_noise-mlp": {ends(better(rounded["rad_noise-mlp"]), ".0f")},
        "rad_prediction-convnets": {f"{100 * stratified:.0f} %"},
        "ways_back-convnet": {f"{100 * (accuracy[0] - accuracy[1]):.0f} points"},
    }


@pytest.mark.quick
def test_measured_figures_of_pages_and_of_texts_of_results_are_the_results():
    """Each "N times", "N %" and "N points" stands in the list, or is a setting, and nothing else does."""
    known, figure = figures_of_results(), r"(?:\d[\d.]*, )*(?:\d[\d.]* (?:to|and) )?\d[\d.,]* (?:times|%)"
    for path in [ROOT / "README.md", *(DOCS / "wings").glob("*.md"), *(DOCS / "new").glob("*.md")]:
        prose = " ".join(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL).split())
        assert set(re.findall(figure, prose)) == known.pop(str(path.relative_to(ROOT)), set()), path.name
    settings = {"95 %", "1 %", "4 times", "4 and 10 times", "60 times", "50 points"}
    texts = [(name, " ".join(text.split())) for name, text in [*NOTES.items(), *((t.run, t.text) for t in TABLES)]]
    figure = figure.replace("%)", "%|points)")
    found = {(name, each) for name, text in texts for each in re.findall(figure, text) if each not in settings}
    assert found == {(name, each) for name, those in known.items() for each in those}


@pytest.mark.quick
def test_what_the_page_of_learned_messages_says_of_points_is_the_results():
    page, rules = words_of(DOCS / "wings" / "mplp.md"), ("image_mlp", "images")
    cards = [{k: v["mean"] for k, v in mplp.pretrained_card(rule)["results"].items()} for rule in rules]
    ahead = max(value - cards[1][name] for name, value in cards[0].items())
    assert f"is better there by up to {ahead:.0f} points" in page
    after = [r["accuracy"] for when in ("trained", "untrained") for r in results("mplp_architectures-digits")["rows"]
             if (r["network"], r["updates"], r["method"]) == ("ConvNet", 100, when)]  # fmt: skip
    assert f"and {after[1] - after[0]:.0f} points behind it on digits" in page
    rows = results("mplp_ablation-paper")["rows"]
    alone = {r["training"]: r for r in rows if (r["rule"], r["updates"]) == ("gradient alone", 20)}
    lost = alone["before"]["accuracy"] - alone["after"]["accuracy"]
    behind = f"is {-alone['after']['ahead']:.0f} points behind after 20 updates, and {lost:.0f} behind its own start"
    assert behind in page


@pytest.mark.quick
def test_the_page_of_the_policy_has_the_figures_of_the_results():
    errors, learnt = (results(name)["rows"] for name in ("gradient_errors-paper", "policy_search_clipped-warm_up"))
    short = lambda x: f"{x:,.0f}" if x >= 10 else f"{x:.2g}".removeprefix("0")
    of = lambda name, key: [r[key] for r in errors if (r["stage"], r["method"]) == (0, name)]
    ends = lambda values, form: " to ".join(form(end(values)) for end in (min, max))
    two, three = (lambda x, n=n: f"{x:.{n}f}".removeprefix("0") for n in (2, 3))
    lines = ["a squared length of " + ends(of("RP", "squared_truth"), short)]
    gradients = {"reparameterization (RP)": "RP", "likelihood ratio": "LR", "lanes clipped at 10": "clipped at 10"}
    for shown, name in {**gradients, "multilevel": "multilevel"}.items():
        lines.append(f"| {shown} | {ends(of(name, 'error'), short)} | {ends(of(name, 'cosine'), two)} |")
    cost = {(r["task"], r["method"]): r for r in learnt}
    for name in dict.fromkeys(r["method"] for r in learnt):
        every, last = (cost[task, name] for task in ("every step", "last step"))
        steps = "none" if every["steps"] is None else f"{every['steps']:.0f}"
        figures = [form(r[k]) for r, form in ((every, two), (last, three)) for k in ("cost", "cost_long")]
        lines.append(f"| {' | '.join([name, steps, *figures])} |")
        lines.append(f"| {name} | {two(every['cost_in_time'])} | {two(every['cost_long_in_time'])} |")
    levels, total = (cost["every step", m] for m in ("multilevel", "TP, lanes clipped"))
    by_levels, by_total = (f"{row['seconds_over_RP']:.1f} times" for row in (levels, total))
    lines.append(f"by levels takes {by_levels} RP's, and one by total propagation {by_total}")
    growth, small = (f"{cost['last step', m]['cost_median']:.4f}"[1:] for m in ("RP, growth clipped", "RP"))
    lines.append(f"median after 240 steps is {growth}, and plain gradients with small updates have one of {small};")
    page = words_of(DOCS / "tasks" / "policy.md")
    assert not [line for line in lines if line not in page]
    seconds = {r["method"]: r["seconds_a_step"] for r in results("policy_search_contacts-warm_up")["rows"]}
    shares = [seconds[f"RP, {which} clipped"] / seconds["SHAC"] for which in ("lanes", "growth")]
    assert 1 / 4 < min(shares) <= max(shares) < 1 / 3 and "(SHAC), in less than a third of its time." in page
    clipped, near, plain = (
        two(cost["every step", m]["cost_in_time"]) for m in ("RP, lanes clipped", "RP, short", "RP")
    )
    wanted = f"a [policy](docs/tasks/policy.md) then reaches a cost of {clipped} "
    wanted += f"in the time in which short horizons reach {near} and plain gradients {plain}."
    assert wanted in words_of(ROOT / "README.md")


@pytest.mark.quick
def test_the_first_study_of_policies_is_told_as_the_results_have_it():
    run = results("policy_search-paper")
    (text,) = [" ".join(table.text.split()) for table in TABLES if table.run == "policy_search-paper"]
    rates, rows = run["config"]["rates"], {r["method"]: r for r in run["rows"]}
    listed = lambda names: " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    at = lambda rate: listed([f"`{name}`" for name, r in rows.items() if r["rate"] == rate])
    assert f"the lowest of the three for {at(min(rates))}, and the highest for {at(max(rates))}. Rates" in text
    short = rows.pop("RP, short")
    near = listed([f"`{name}`" for name, r in rows.items() if r["cost_low"] <= short["cost"] <= r["cost_high"]])
    assert f"(`RP, short`) has the lowest mean, though within the intervals of {near}. * `RP, short` is also" in text
    assert all(short["cost"] < r["cost"] and (r["steps"] or 1e9) > short["steps"] for r in rows.values())


@pytest.mark.quick
def test_the_page_of_tracing_has_the_correlations_of_the_results():
    run, page = results("tracing_ablation-paper"), words_of(DOCS / "wings" / "tracing.md")
    of = lambda kind, how: f"{run[f'correlation {kind} {how}']['value']:.2f}".removeprefix("0")
    assert f"a rank correlation of {of('viterbi', 'ablated')} with" in page
    assert f"and of {of('viterbi', 'retrained')} with" in page
    assert f"widths alone have {of('width', 'ablated')} and {of('width', 'retrained')}." in page
    alike = [of(kind, "ablated at equal width") for kind in ("viterbi", "greedy")]
    assert f"removal from the trained network costs, {alike[0]} (greedy {alike[1]})" in page
    assert "within an error of .10, nothing of what training without them costs" in page
    for kind in tracing_ablation.MEASURES:
        found = run[f"correlation {kind} retrained at equal width"]
        assert abs(found["value"]) < found["standard_error"] < 0.105
    assert f"most gradient, {of('greedy', 'ablated')} and {of('greedy', 'retrained')}." in page
