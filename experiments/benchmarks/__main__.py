"""All benchmarks in one command: a table of ratios against named baselines, beside the committed ones.

    python -m experiments.benchmarks                  # the quick presets
    python -m experiments.benchmarks --preset paper

Each benchmark runs in a process of its own, one after another, and resumes if it was begun; results/benchmarks.json
then has every ratio, the committed one, and whether it moved by more than a quarter. The committed ratios are those of
the paper presets: a ratio of a quick preset has none where its sizes differ.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = ("estimators", "mplp", "randomized", "tracing")
RATIOS = ("ratio", "time_ratio", "memory_ratio", "over_published", "over_sgd", "over_separable")
COMMITTED = Path(__file__).parent.parent / "results"
MOVED = 1.25  # two runs on a busy machine differ by a tenth or so


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """The ratios of a benchmark by the words that name them.

    Example:
      >>> ratios({"rows": [{"network": "rnn", "method": "same", "time_ratio": 0.9, "temp_MB": 7.2}]})
      {'rnn, same: time_ratio': 0.9}
    """
    found = {}
    for row in results["rows"]:
        words = [str(v) for k, v in row.items() if isinstance(v, str) or k == "size"]
        found |= {f"{', '.join(words)}: {k}": row[k] for k in RATIOS if row.get(k) is not None}
    return found


def compared(now: dict[str, float], before: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each ratio: its value now, the committed one or None, and whether it moved.

    Example:
      >>> [row["moved"] for row in compared({"a": 1.0, "b": 2.0, "c": 1.0}, {"a": 1.1, "b": 1.0})]
      [False, True, None]
    """
    rows = []
    for name, value in now.items():
        old = before.get(name)
        factor = None if not old or value <= 0 else max(value / old, old / value)
        rows.append({"name": name, "now": value, "committed": old, "moved": None if factor is None else factor > MOVED})
    return rows


def main() -> None:
    """Runs, compares, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--preset", choices=("quick", "paper"), default="quick")
    preset = parser.parse_args().preset
    rows = []
    for name in BENCHMARKS:
        folder = Path("results") / f"benchmarks.{name}-{preset}"
        command = [sys.executable, "-m", f"experiments.benchmarks.{name}", "--preset", preset, "--out", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        now = ratios(json.loads((folder / "results.json").read_text()))
        before = ratios(json.loads((COMMITTED / f"benchmarks.{name}-paper" / "results.json").read_text()))
        rows += [{"benchmark": name, **row} for row in compared(now, before)]
    for row in rows:
        old = "" if row["committed"] is None else f"{row['committed']:8.2f}"
        print(f"{row['benchmark']:10} {row['now']:8.2f} {old:8} {'MOVED ' if row['moved'] else '      '}{row['name']}")
    moved = [row for row in rows if row["moved"]]
    Path("results/benchmarks.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(
        f"{len(rows)} ratios (now, committed), {len(moved)} moved by more than {MOVED - 1:.0%}: results/benchmarks.json"
    )


if __name__ == "__main__":
    main()
