"""What stands on the pages, as `pages.toml` has it."""

import functools
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.report import readers, rows as table_rows
from experiments.report.verdicts import Claim, Value

HERE = Path(__file__).parent
PAGES = tomllib.loads((HERE / "pages.toml").read_text())
# Figures of published code that was run for this project, and not printed in a paper; the file says how.
PUBLISHED = {row["what"]: row["value"] for row in json.loads((HERE / "published.json").read_text())}


class Table(NamedTuple):
    """A table of a single run: its heading, the folder of the results, its rows, and what a reader must know."""

    title: str
    run: str
    rows: Callable[[dict[str, Any]], list[list[str]]]
    text: str


def claim(source: str, what: str, run: str, published: Any, reads: list[Any], options: Any = None) -> Claim:
    """A line of `papers`."""
    name, *arguments = reads
    published = PUBLISHED[published["code"]] if isinstance(published, dict) else published
    value = Value(*published) if isinstance(published, list) else published or None
    ours = lambda results: getattr(readers, name)(results, *arguments)
    return Claim(source, what, run, value, ours, **(options or {}))


def table(title: str, run: str, text: str, rows: str = "listed", **options: Any) -> Table:
    """An entry of `tables`: the name of its rows' function, and that one's options."""
    return Table(title, run, functools.partial(getattr(table_rows, rows), **options), text)


QUESTIONS: dict[str, list[str]] = PAGES["questions"]
NOTES = {name: paper["note"] for name, paper in PAGES["papers"].items()}
CLAIMS = {name: [claim(*line) for line in paper["claims"]] for name, paper in PAGES["papers"].items()}
TABLES = [table(**entry) for entry in PAGES["tables"]]
