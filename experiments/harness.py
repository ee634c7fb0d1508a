"""What the experiments share: a command line, a grid of cells that survives being killed, and the results.

An experiment is a module, run by `python -m experiments.NAME`. The first paragraph of its docstring says what it shows,
and it has these names:

* `Config`: a frozen dataclass that extends `harness.Config`; its defaults are the preset "quick".
* `PAPER`: the `Config` of the preset "paper".
* `cells(config)`: a list of cells, the points of the experiment's grid, in the order in which they are measured.
* `measure(config, cell, seed)`: a dictionary of numbers, strings and lists.
* `report(config, [(cell, result), ...])`: a `Report`.
* `PARTIAL = True`, if `report` takes any of the cells, not only all of them.

It ends with `if __name__ == "__main__": harness.main()`.

A measured cell is written to a file of its own, in one step (a temporary file, then `os.replace`). So a run that is
killed at any moment goes on where it stopped when it is started again, and ends with the same figures: a cell's seed
depends on the run's seed and on the cell only. A long cell saves where it is by `checkpoint`.
With `--only-report` nothing is measured: the report is on the cells that are finished, and results.json says how many
of how many they are.
"""

import argparse
import csv
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tqdm
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import apgrad as ap

Cell = Mapping[str, Any]
"""One point of an experiment's grid: names to strings and numbers."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of every experiment.

    Attributes:
      preset: what the other options start from: quick takes minutes, paper has the paper's settings.
      out: where to write; results/NAME-PRESET if not given.
      seed: of all random numbers.
      only_report: measure nothing, and report on the cells that are finished.
    """

    preset: Literal["quick", "paper"] = "quick"
    out: Path | None = None
    seed: int = 0
    only_report: bool = False


class Report(NamedTuple):
    """What comes of an experiment.

    Attributes:
      figures: named results for the top level of results.json.
      rows: the table, as dictionaries with the same keys.
      table: a short form of it to print.
      figure: the picture.
    """

    figures: dict[str, Any]
    rows: list[dict[str, Any]]
    table: str
    figure: Figure


def main(experiment: ModuleType | None = None, argv: Sequence[str] | None = None) -> Path:
    """Runs an experiment from the command line, and goes on with it if it was begun.

    Args:
      experiment: the module to run; the one that Python was started with if not given.
      argv: the command line; that of the process if not given.

    Returns:
      The folder with `results.json`, `NAME.csv` and `NAME.png`. In results.json, `wall_seconds` is the sum over
      the cells of the time since the last start of each: a cell that goes on from its checkpoint leaves out what came
      before. Numbers that are not finite are null.

    Raises:
      SystemExit: for a wrong command line, or a folder that holds another run.
    """
    experiment = experiment or sys.modules["__main__"]
    name = name_of(experiment)
    config = _parse(experiment, sys.argv[1:] if argv is None else list(argv))
    folder = _folder(name, config)
    if config.only_report and not (getattr(experiment, "PARTIAL", False) and any((folder / "cells").glob("*.json"))):
        raise SystemExit(f"{folder} has no finished cells, or {name} reports on all cells only.")
    _claim(folder, experiment, config)
    cells = experiment.cells(config)
    records, seconds, commits, commit = [], 0.0, [], _commit()
    for cell in tqdm.tqdm(cells, desc=name, unit="cell", disable=config.only_report):
        path = folder / "cells" / f"{cell_name(cell)}.json"
        if not path.exists():
            if config.only_report:
                continue
            start = time.perf_counter()
            result = experiment.measure(config, cell, cell_seed(config.seed, cell))
            measured = {"result": result, "seconds": time.perf_counter() - start, "commit": commit}
            write_atomically(path, json.dumps(measured))
            checkpoint(name, config, cell).path.unlink(missing_ok=True)
        stored = json.loads(path.read_text())
        records.append((cell, stored["result"]))
        seconds += stored["seconds"]
        commits.append(stored.get("commit"))
    # While a run may be under way, its temporary files are left alone.
    for leftover in () if config.only_report else (folder / "cells").glob("*.tmp"):
        leftover.unlink(missing_ok=True)

    report = experiment.report(config, records)
    header = {
        **_fingerprint(experiment, config),
        "setting": _setting(experiment, config),
        "device": _device(),
        "commits": sorted({c for c in commits if c}),
        "cells_finished": len(records),
        "cells": len(cells),
        "wall_seconds": round(seconds, 1),
    }
    results = {**header, **report.figures, "rows": report.rows}
    _write_csv(folder / f"{name}.csv", report.rows)
    FigureCanvasAgg(report.figure).print_png(str(folder / f".{name}.png.tmp"))
    os.replace(folder / f".{name}.png.tmp", folder / f"{name}.png")
    write_atomically(folder / "results.json", json.dumps(_strict(results), indent=1, allow_nan=False) + "\n")
    print(report.table)
    print(
        f"{len(records)} of {len(cells)} cells, {seconds:.0f} s of measuring; results.json, CSV and PNG are in {folder}"
    )
    return folder


def name_of(experiment: ModuleType) -> str:
    """The experiment's name, as in `python -m experiments.NAME`."""
    if experiment.__spec__ is None:  # a file that Python was started with
        return Path(getattr(experiment, "__file__", experiment.__name__)).stem
    return experiment.__spec__.name.removeprefix("experiments.")


def cell_name(cell: Cell) -> str:
    """The cell's file name.

    Example:
      >>> cell_name({"method": "TP", "beta": 2.5})
      'method=TP,beta=2.5'
    """
    return ",".join(f"{name}={value}" for name, value in cell.items())


def cell_seed(seed: int, cell: Cell) -> int:
    """A seed for a cell, of 31 bits: the same in every grid that has the cell."""
    digest = hashlib.sha256(f"{seed},{cell_name(cell)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is there in full or not at all, even if the process is killed meanwhile."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


class Checkpoint(NamedTuple):
    """Where a long cell saves its state, so that a kill loses little of it; deleted when the cell is finished.

    Attributes:
      path: of the file.
    """

    path: Path

    def load(self, state: Any) -> Any:
        """The saved state, or the given one where nothing is saved.

        Args:
          state: a pytree of arrays with the names of the saved one's; their shapes may differ.

        Raises:
          ValueError: if the file was saved by code whose state has other names.
        """
        if not self.path.exists():
            return state
        names = _names(state)
        with np.load(self.path) as file:
            if "names" not in file or file["names"].tolist() != names:
                raise ValueError(f"{self.path} was saved by other code, with another state; delete it to begin again")
            leaves = [file[f"arr_{i}"] for i in range(len(names))]
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    def save(self, state: Any) -> None:
        """Writes the state, a pytree of arrays, in full or not at all."""
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            np.savez(file, *(np.asarray(leaf) for leaf in jax.tree.leaves(state)), names=np.array(_names(state)))
        os.replace(temporary, self.path)


def _names(state: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def checkpoint(name: str, config: Config, cell: Cell) -> Checkpoint:
    """The checkpoint of a cell of the experiment with the given name."""
    return Checkpoint(_folder(name, config) / "cells" / f"{cell_name(cell)}.npz")


def finished(name: str, config: Config, cell: Cell) -> dict[str, Any]:
    """The result of an earlier cell of the experiment with the given name, for a cell that builds on it."""
    return json.loads((_folder(name, config) / "cells" / f"{cell_name(cell)}.json").read_text())["result"]


def bootstrap(
    samples: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], resamples: int, seed: int
) -> np.ndarray:
    """The statistic of samples drawn with replacement from the given ones (Efron, 1979).

    Args:
      samples: (n,).
      statistic: maps (..., n) to (...).
      resamples: how many.
      seed: of the draws.

    Returns:
      (resamples,) values; `interval` makes a confidence interval of them.
    """
    rng = np.random.default_rng(seed)
    return statistic(samples[rng.integers(len(samples), size=(resamples, len(samples)))])


def interval(values: np.ndarray) -> list[float]:
    """The percentile 95 % interval."""
    return [float(v) for v in np.percentile(values, [2.5, 97.5])]


def _folder(name: str, config: Config) -> Path:
    return config.out or Path("results") / f"{name}-{config.preset}"


def _commit() -> str | None:
    """The commit of the code that runs, with "+" if files differ from it; nothing outside a repository."""
    try:
        call = [
            "git",
            "-C",
            str(Path(__file__).parent),
            "describe",
            "--always",
            "--abbrev=12",
            "--dirty=+",
            "--exclude=*",
        ]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _parse(experiment: ModuleType, argv: list[str]) -> Any:
    """The configuration: the preset's, with what the command line says otherwise."""
    choose = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    presets = {"quick": experiment.Config(), "paper": experiment.PAPER}
    choose.add_argument("--preset", choices=list(presets), default="quick")
    preset = choose.parse_known_args(argv)[0].preset
    default = dataclasses.replace(presets[preset], preset=preset)
    prog = f"python -m experiments.{name_of(experiment)}"
    description = (experiment.__doc__ or "").split("\n\n")[0]
    try:
        return tyro.cli(type(default), default=default, args=argv, prog=prog, description=description)
    except ValueError as error:
        raise SystemExit(f"{prog}: {error}") from error


def _fingerprint(experiment: ModuleType, config: Config) -> dict[str, Any]:
    """What must agree for a run to go on: with another version of a library its figures may not be the same."""
    options = dataclasses.asdict(config)
    del options["out"], options["only_report"]
    packages = ("jax", "jaxlib", "numpyro", "numpy", "scipy")
    versions = {"python": platform.python_version(), "apgrad": ap.__version__}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    return {"experiment": name_of(experiment), "config": options, "versions": versions}


def _setting(experiment: ModuleType, config: Config) -> str:
    """What a run is, in words: a preset, or what it has in place of the paper's setting."""
    paper = dataclasses.asdict(experiment.PAPER)
    options = dataclasses.asdict(config)
    changed = [
        f"{name}={options[name]} (paper: {paper[name]})"
        for name in paper
        if name not in ("out", "preset", "seed", "only_report") and options[name] != paper[name]
    ]
    return "the paper preset" if not changed else "not the paper preset: " + ", ".join(changed)


def _claim(folder: Path, experiment: ModuleType, config: Config) -> None:
    wanted = json.loads(json.dumps({**_fingerprint(experiment, config), "device": _device()}))
    path = folder / "cells" / "run"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        if any(path.parent.glob("*.json")):
            raise SystemExit(
                f"{path.parent} has cells but no file 'run'. Delete it, or choose another folder with --out."
            )
        write_atomically(path, json.dumps(wanted, indent=1))
        return
    found = json.loads(path.read_text())
    if found != wanted:
        different = [f"  {name}: {a!r} there, {b!r} now" for name, a, b in _differences(found, wanted)]
        raise SystemExit(
            f"{folder} holds a run with another configuration:\n" + "\n".join(different) + "\n"
            "Start it with the same configuration to go on with it, choose another folder with --out, or delete "
            "the folder to begin again."
        )


def _differences(found: Any, wanted: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = [*found, *(key for key in wanted if key not in found)]
        return [d for n in names for d in _differences(found.get(n), wanted.get(n), f"{name}.{n}".lstrip("."))]
    return [] if found == wanted else [(name, found, wanted)]


def _device() -> str:
    device = jax.devices()[0]
    kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
    return f"{device.platform}{kind}, {os.cpu_count()} host cores"


def _strict(value: Any) -> Any:
    """Null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _strict(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)
