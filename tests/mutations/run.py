"""Whether the tests find broken places: each mutation of `mutations.toml`, by itself, in a copy of the tree.

    python tests/mutations/run.py                        # what is not in results.csv yet, with every test
    python tests/mutations/run.py --only GRU -- -m "not long"
    python tests/mutations/run.py --check                # only whether each mutation's text is in its file once

A mutation is caught where pytest fails on it: first in the test files that it names, then, file by file, in the rest of
its wing's tests and in the contract. What passes them all is missed. Results are written after each mutation, and a
mutation that has a row for the same `--label` is left out, so that an interrupted run goes on where it was. `--first`
tries the named files alone; delete the rows of what they miss, and run it without.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COLUMNS = ("label", "file", "name", "result", "by", "seconds")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression of names and files")
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    parser.add_argument("--label", default="whole suite", help="the run's name in the results, say a commit")
    parser.add_argument("--with", dest="prefix", default="", help="a command that runs pytest's command")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    mutations = tomllib.loads((HERE / "mutations.toml").read_text())["mutation"]
    stale = [m for m in mutations if text(ROOT, m).count(m["old"]) != 1 or not all(f.exists() for f in first(ROOT, m))]
    for m in stale:
        what = f"{m['old']} in apgrad/{m['file']} once, and {m['first']} for its folder in tests"
        print(f"NOT FOUND, of {m['name']}: {what}", file=sys.stderr)
    if not options.check:
        chosen = [m for m in mutations if m not in stale and re.search(options.only, f"{m['name']} {m['file']}")]
        run(options, chosen)
    sys.exit(bool(stale))


def run(options, mutations):
    done = set()
    if options.results.exists():
        with options.results.open(newline="") as file:
            done = {(row["label"], row["file"], row["name"]) for row in csv.DictReader(file)}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "build"))
        for m in mutations:
            if (options.label, m["file"], m["name"]) in done:
                continue
            source, path = text(copy, m), copy / "apgrad" / m["file"]
            path.write_text(source.replace(m["old"], m["new"]))
            begin = time.monotonic()
            groups = files(copy, m)[: 1 if options.first else None]
            result, by = next((x for paths in groups if (x := judged(options, copy, paths))), ("missed", ""))
            seconds = time.monotonic() - begin
            path.write_text(source)
            if options.first and result == "missed":
                result = "missed by the first"
            row = (options.label, m["file"], m["name"], result, by, f"{seconds:.0f}")
            print(*row, sep=" | ", flush=True)
            new = not options.results.exists()
            with options.results.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, row] if new else [row])


def text(tree, mutation):
    path = tree / "apgrad" / mutation["file"]
    return path.read_text() if path.exists() else ""


def folder(tree, mutation):
    """The wing's tests."""
    return tree / "tests" / mutation["file"].split("/")[0]


def first(tree, mutation):
    """The test files that the mutation names, from the wing's tests."""
    return [(folder(tree, mutation) / name).resolve() for name in mutation["first"]]


def files(tree, mutation):
    """The test files in groups: those that the mutation names, then each of the others."""
    named = first(tree, mutation)
    rest = sorted(folder(tree, mutation).glob("test_*.py")) or sorted((tree / "tests").glob("test_*.py"))
    rest = [tree / "tests" / "test_contract.py", *rest, tree / "tests" / "test_composition.py"]
    rest = dict.fromkeys(f.resolve() for f in rest if f.resolve() not in named)
    return [[str(f.relative_to(tree)) for f in group] for group in [named, *([f] for f in rest)] if group]


def judged(options, copy, paths):
    """`(result, by)` where a test fails, else None."""
    command = [*options.prefix.split(), sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", *paths]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([*command, *options.pytest], cwd=copy, capture_output=True, text=True, env=environment)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)  # no line of a log
    if done.returncode == 1 and failed:
        return "caught", failed[1]
    if done.returncode in (124, 137):  # as `timeout` ends a command
        return "did not end", " ".join(paths)
    if done.returncode in (0, 5):  # all passed, or nothing was chosen
        return None
    raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
