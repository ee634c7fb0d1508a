"""Writes docs/results.md and docs/gallery.md, or checks them: see the package's docstring."""

import argparse
import importlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.report.contents import CLAIMS, NOTES, QUESTIONS, TABLES
from experiments.report.rows import told
from experiments.report.verdicts import Value, figure, is_small, verdict

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "experiments" / "results"
COMMAND = "python -m experiments.report"


def load() -> dict[str, dict[str, Any]]:
    """The results by the name of their folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/results.json"))}


def table(rows: list[list[str]]) -> str:
    """A table in Markdown, the first row its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def link(run: str) -> str:
    """The name of a run, as a link to its file."""
    return f"[{run}](../experiments/results/{run}/results.json)"


def summary(results: dict[str, Any]) -> str:
    """The first paragraph of the docstring of a run's experiment."""
    module = importlib.import_module(f"experiments.{results['experiment']}")
    return " ".join((module.__doc__ or "").split("\n\n")[0].split())


def age(results: dict[str, Any]) -> str:
    """The commits whose code a run measured, with a "+" where the tree had changes that were not committed."""
    return ", ".join(c[:7] + "+" * c.endswith("+") for c in results.get("commits") or []) or "not recorded"


def setting(results: dict[str, Any]) -> str:
    """What a run is, as it recorded it."""
    recorded = results.get("setting") or "not recorded"
    return f"{recorded}; {results['data']}" if recorded == "the paper preset" and is_small(results) else recorded


def in_short(runs: dict[str, dict[str, Any]]) -> str:
    """How many rows of each paper have which verdict."""
    verdicts = ("matches", "beats", "not reproduced", "small", "new")
    rows = [["paper", *verdicts]]
    for paper, claims in CLAIMS.items():
        found = Counter(verdict(claim, runs[claim.run]) for claim in claims)
        address = re.sub(r"[^\w\- ]", "", paper.lower()).replace(" ", "-")  # within the page
        rows.append([f"[{paper}](#{address})", *(str(found[each] or "") for each in verdicts)])
    return table(rows)


def results_page(runs: dict[str, dict[str, Any]]) -> str:
    """The page *Results*."""
    parts = [
        "# Results\n",
        f"This page is written by `{COMMAND}` from the files in `experiments/results/`, and a test holds it to them. "
        "Figures are means ± standard errors. The papers' figures stand beside ours with a verdict that is computed: "
        "*matches* (within two standard errors, or 10 % where there is none), *beats*, *not reproduced*, *small* "
        "for a run that has not the paper's setting and so settles nothing, and *new* for a finding of ours that no "
        "paper has. The pictures are in the [gallery](gallery.md).\n",
        "## In short\n",
        in_short(runs),
        "## Beside the papers\n",
    ]
    for paper, claims in CLAIMS.items():
        rows = [["paper", "what", "published", "ours", "run", "verdict"]]
        for claim in claims:
            ours = claim.ours(runs[claim.run])
            published = figure(claim.published) if isinstance(claim.published, Value) else claim.published or ""
            shown = figure(ours) if isinstance(ours, Value) else ours[0]
            judged = verdict(claim, runs[claim.run])
            rows.append([claim.source, claim.what, published, shown, link(claim.run), f"**{judged}**"])
        parts += [f"### {paper}\n", table(rows), told(NOTES[paper], runs) + "\n"]
    parts.append("## What was measured\n")
    for entry in TABLES:
        text = f"{told(entry.text, runs, entry.run)}\n\nRun: {link(entry.run)}.\n"
        parts += [f"### {entry.title}\n", text, table(entry.rows(runs[entry.run]))]
    parts += [
        "## All runs\n",
        'The last column has the commits of the code that was measured, with a "+" where it had changes that were '
        "not committed. A run without commits is older than their recording, and the code has changed since. Seconds "
        "are those of the finished cells; of a training that was resumed they are those since its last start. Start "
        "any of them again with `python -m experiments.NAME --preset paper`.\n",
    ]
    rows = [["run", "setting", "cells", "seconds", "device", "commits"]]
    for name, results in runs.items():
        cells = f"{results['cells_finished']} of {results['cells']}" if results.get("cells") else ""
        seconds = f"{results['wall_seconds']:,.0f}"
        rows.append([link(name), setting(results), cells, seconds, results["device"], age(results)])
    parts.append(table(rows))
    return "\n".join(parts)


def gallery_page(runs: dict[str, dict[str, Any]]) -> str:
    """The page *Gallery*."""
    parts = ["# Gallery\n", f"Every figure that the experiments have drawn, by the question that it answers. Written "
             f"by `{COMMAND}`. [Results](results.md) has the numbers.\n"]  # fmt: skip
    left = dict(runs)
    for question, experiments in QUESTIONS.items():
        parts.append(f"## {question}\n")
        for name in [n for e in experiments for n in runs if runs[n]["experiment"] == e]:
            results = left.pop(name)
            picture = f"../experiments/results/{name}/{results['experiment']}.png"
            command = f"`python -m experiments.{results['experiment']}`"
            parts += [f"### {name}\n", f"{summary(results)}\n", f"{command}; {link(name)}\n", f"![{name}]({picture})\n"]
    if left:
        raise ValueError(f"results without a question in experiments/report/pages.toml: {', '.join(left)}")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Writes docs/results.md and docs/gallery.md.")
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 if a page differs")
    check = parser.parse_args(arguments).check
    runs = load()
    stale = []
    for name, page in (("results.md", results_page(runs)), ("gallery.md", gallery_page(runs))):
        path = ROOT / "docs" / name
        if not path.exists() or path.read_text() != page:
            stale.append(name)
            if not check:
                path.write_text(page)
    if stale:
        print(f"docs/{', docs/'.join(stale)} {'differ from the results: run ' + COMMAND if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
