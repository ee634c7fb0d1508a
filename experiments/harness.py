"""What the experiments share: a command line, a grid of cells that survives being killed, and the results.

An experiment is a module, run by `python -m experiments.NAME`. The first paragraph of its docstring says what it shows,
and it has these names:

* `Config`: extends `harness.Config`, which makes a frozen dataclass of it; its defaults are the preset "quick".
* `PAPER`: the `Config` of the preset "paper".
* `cells(config)`: a list of cells, the points of the experiment's grid, in the order in which they are measured.
* `measure(config, cell, seed)`: a dictionary of numbers, strings and lists.
* `report(config, [(cell, result), ...])`: a `Report`, made of `table`, `panels` and `band`.
* `PARTIAL = True`, if `report` takes any of the cells, not only all of them.

It ends with `if __name__ == "__main__": harness.main()`.

A measured cell is written to a file of its own, in one step. So a run that is killed at any moment goes on where it
stopped when it is started again, and ends with the same figures: a cell's seed depends on the run's seed and on the
cell only. A long cell saves where it is by `checkpoint`. One process at a time measures in a folder. If apgrad's Python
files, the experiment's or the parts' have changed since then, a run with cells left to measure goes on only with
`--mix`.

With `--only-report` nothing is measured: the report is on the cells that are finished, and results.json says how many
of how many they are.
"""

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import importlib.metadata
import io
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import tqdm
import tyro
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

import apgrad as ap
from apgrad._ground.files import locked, named_leaves, write_atomically

Cell = Mapping[str, Any]
"""One point of an experiment's grid: names to strings and numbers."""

STYLE: dict[Any, Any] = {"axes.grid": True, "grid.alpha": 0.25, "axes.titlesize": 10, "legend.fontsize": 7}
STYLE |= {"lines.linewidth": 1.2, "lines.markersize": 4, "legend.frameon": False}


@dataclass_transform(frozen_default=True)
@dataclasses.dataclass(frozen=True)
class Config:
    """The options of every experiment, whose own class, a frozen dataclass like this one, has more.

    Attributes:
      preset: what the other options start from: quick takes minutes, paper has the paper's settings.
      out: where to write; results/NAME-PRESET if not given.
      seed: of all random numbers.
      only_report: measure nothing, and report on the cells that are finished.
      mix: go on beside cells that other code measured; results.json has the commits of all.
    """

    preset: Literal["quick", "paper"] = "quick"
    out: Path | None = None
    seed: int = 0
    only_report: bool = False
    mix: bool = False

    checks: ClassVar[dict[str, Any]] = {"least": {"seed": 0}}

    def __init_subclass__(cls, **checks: Any):
        """A class names options that have a `least` (else above 0), are a `multiple`, or are `among` what is known."""
        dataclasses.dataclass(frozen=True)(cls)
        cls.checks = cls.checks | {kind: cls.checks.get(kind, {}) | of for kind, of in checks.items()}

    def __post_init__(self):
        """Refuses options that are not what the class says. A tuple of numbers or names is empty only by default."""
        for field in dataclasses.fields(self):
            name = field.name
            least, each, default = self.checks["least"].get(name), self._each(name), getattr(type(self), name)
            numbers = [n for n in each if isinstance(n, int | float) and not isinstance(n, bool)]
            if not all(n > 0 if least is None else n >= least for n in numbers):
                words = "positive" if least is None else f"at least {least}"
                raise ValueError(f"{name} must be {words}, got {getattr(self, name)}")
            if not each and default and not isinstance(default[0], tuple):
                raise ValueError(f"{name} must be one at least, got ()")
        for name, unit in self.checks.get("multiple", {}).items():
            if any(n % unit for n in self._each(name)):
                raise ValueError(f"{name} must be multiples of {unit}, got {getattr(self, name)}")
        for name, known in self.checks.get("among", {}).items():
            if unknown := set(self._each(name)) - set(known):
                raise ValueError(f"{name} are of {list(known)}, got {sorted(unknown)}")

    def _each(self, name: str) -> tuple[Any, ...]:
        given = getattr(self, name)
        return given if isinstance(given, tuple) else (given,)


class Report(NamedTuple):
    """What comes of an experiment."""

    figures: dict[str, Any]  # named results for the top level of results.json
    rows: list[dict[str, Any]]  # the table, dictionaries with the same keys
    table: str  # a short form of it to print
    figure: Figure


def main(experiment: ModuleType | None = None, argv: Sequence[str] | None = None) -> Path:
    """Runs an experiment from the command line, and goes on with it if it was begun.

    The experiment is the module that Python was started with, if none is given; the command line is the process's.

    Returns:
      The folder with `results.json`, `NAME.csv` and `NAME.png`. In results.json, `wall_seconds` is the sum over
      the cells of the time since the last start of each: a cell that goes on from its checkpoint leaves out what came
      before. Numbers that are not finite are null.
    """
    experiment = experiment or sys.modules["__main__"]
    name = name_of(experiment)
    config = _parse(experiment, sys.argv[1:] if argv is None else list(argv))
    folder = config.out or Path("results") / f"{name}-{config.preset}"
    config = dataclasses.replace(config, out=folder)
    cells = experiment.cells(config)
    paths = {path: cell for cell in cells for path in [folder / "cells" / f"{cell_name(cell)}.json"]}
    found = [path for path in paths if path.exists()]
    if config.only_report and not (found if getattr(experiment, "PARTIAL", False) else len(found) == len(cells)):
        raise SystemExit(f"{folder} has no finished cells, or {name} reports on all cells only.")
    with contextlib.ExitStack() as stack:
        if not config.only_report:
            (folder / "cells").mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(folder / "cells" / ".lock", f"another process measures in {folder}"))
            except ValueError as error:
                raise SystemExit(str(error)) from error
        _claim(folder, experiment, config)
        code, path = _code(experiment), folder / "cells" / "code"
        begun = [p.name for p in path.parent.iterdir() if p.name not in ("run", "code", ".lock")]
        changed = begun and not (path.exists() and path.read_text() == code)
        if changed and len(found) < len(cells) and not (config.mix or config.only_report):
            words = f"{folder} was begun by other code, which measured {'; '.join(sorted(begun)[:5])}"
            raise SystemExit(f"{words}. Delete what is to be measured again, or go on beside it with --mix.")
        if not config.only_report:
            write_atomically(path, code)
        stored, commit = {path: _read(path, "result", "seconds") for path in found}, _commit()
        left = {} if config.only_report else {path: cell for path, cell in paths.items() if path not in stored}
        for path, cell in tqdm.tqdm(left.items(), desc=name, unit="cell", disable=config.only_report):
            start = time.perf_counter()
            result = experiment.measure(config, cell, cell_seed(config.seed, cell))
            stored[path] = {"result": result, "seconds": time.perf_counter() - start, "commit": commit}
            write_atomically(path, json.dumps(_plain(stored[path], path.stem)))
            stored[path] = _read(path, "result", "seconds")
            checkpoint(config, cell).path.unlink(missing_ok=True)
        for leftover in () if config.only_report else (folder / "cells").glob(".*.*"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
    records = [(cell, stored[path]["result"]) for path, cell in paths.items() if path in stored]
    seconds = sum(record["seconds"] for record in stored.values())

    with matplotlib.rc_context(STYLE):
        report, picture = experiment.report(config, records), io.BytesIO()
        _label_decades(report.figure)
        FigureCanvasAgg(report.figure).print_png(picture)
    header = {**_fingerprint(experiment, config), "setting": _setting(experiment, config), "device": _device()}
    header["commits"] = sorted({c for record in stored.values() if (c := record.get("commit"))})
    header |= {"cells_finished": len(records), "cells": len(cells), "wall_seconds": round(seconds, 1)}
    results = {**header, **report.figures, "rows": report.rows}
    comma_separated = io.StringIO(newline="")
    writer = csv.DictWriter(comma_separated, list(report.rows[0]))
    writer.writeheader()
    writer.writerows(report.rows)
    write_atomically(folder / f"{name}.csv", comma_separated.getvalue())
    write_atomically(folder / f"{name}.png", picture.getvalue())
    text = json.dumps(_plain(results, "results", finite=True), indent=1, allow_nan=False)
    write_atomically(folder / "results.json", text + "\n")
    print(report.table)
    print(f"{len(records)} of {len(cells)} cells, {seconds:.0f} s of measuring; results.json, CSV, PNG are in {folder}")
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


class Checkpoint(NamedTuple):
    """The file where a long cell saves its state, so that a kill loses little of it; deleted when it is finished."""

    path: Path

    def load(self, state: Any) -> Any:
        """The saved state, whose arrays have the given one's names, or the given one where nothing is saved."""
        if not self.path.exists():
            return state
        names = list(named_leaves(state))
        try:
            with np.load(io.BytesIO(self.path.read_bytes())) as file:
                saved = file["names"].tolist()
                stored = [file[f"arr_{i}"] for i in range(len(saved))]
        except (ValueError, OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.path} is damaged; delete it to begin the cell again") from error
        if saved != names:
            raise ValueError(f"{self.path} was saved by other code, with another state; delete it to begin again")
        leaves, tree = jax.tree.flatten(state)
        return jax.tree.unflatten(tree, list(map(_like, leaves, stored)))

    def save(self, state: Any) -> None:
        """Writes the state, a pytree of arrays and keys, in full or not at all."""
        file = io.BytesIO()
        raw = (jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(state))
        np.savez(file, *map(np.asarray, raw), names=np.array(list(named_leaves(state))))
        write_atomically(self.path, file.getvalue())


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(leaf: Any, stored: np.ndarray) -> Any:
    """What was stored of a leaf: a key, JAX's array or NumPy's."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=jax.random.key_impl(leaf))
    return jnp.asarray(stored) if isinstance(leaf, jax.Array) else stored


def checkpoint(config: Config, cell: Cell) -> Checkpoint:
    """The checkpoint of a cell; the config is what `measure` is given, whose `out` is the run's folder."""
    return Checkpoint(_files(config) / f"{cell_name(cell)}.npz")


def finished(config: Config, cell: Cell) -> dict[str, Any]:
    """The result of an earlier cell, for a cell that builds on it."""
    return _read(_files(config) / f"{cell_name(cell)}.json", "result")["result"]


def _files(config: Config) -> Path:
    if config.out is None:
        raise ValueError("cells have files in a run's folder: give config.out, as a run from the command line does")
    return config.out / "cells"


def common(results: Iterable[Mapping[str, Any]], name: str = "data") -> Any:
    """What all results with a name have under it: APGRAD_DATA may have named other data when a run went on."""
    found = {json.dumps(result[name]): result[name] for result in results if name in result}
    if len(found) > 1:
        words = f"cells of this run were measured with unlike {name}: {'; '.join(found)}"
        raise SystemExit(f"{words}. Delete those that are to be measured again, or begin another folder with --out.")
    return next(iter(found.values()), None)


def grid(**axes: Iterable[Any]) -> list[Cell]:
    """A cell for each combination of the values, the last name's fastest."""
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def bootstrap(samples: np.ndarray, statistic: Callable[..., Any], seed: int, resamples: int = 1000) -> np.ndarray:
    """The statistic, which maps (..., n) to (...), of samples (n,) drawn with replacement: (resamples,) values."""
    rng = np.random.default_rng(seed)
    return statistic(samples[rng.integers(len(samples), size=(resamples, len(samples)))])


def interval(values: np.ndarray) -> list[float]:
    """The percentile 95 % interval."""
    return [float(v) for v in np.percentile(values, [2.5, 97.5])]


def standard_error(values: Any) -> float | None:
    """The standard error of the mean of values (n,); None of a single one."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def table(rows: Iterable[Mapping[str, Any]], *columns: str) -> str:
    """The columns of the rows as text, with the interval (NAME_low, NAME_high) or standard error (NAME_se) of a number.

    Example:
      >>> print(table([{"name": "RP", "cost": 0.25, "cost_se": 0.01}, {"name": "LR", "cost": None}], "name", "cost"))
      name  cost
      RP    0.25 ± 0.01
      LR
    """

    def text(row, name):
        value, low, high, error = (row.get(name + end) for end in ("", "_low", "_high", "_se"))
        value = f"{value:.4g}" if isinstance(value, float | np.floating) else "" if value is None else str(value)
        spread = "" if low is None else f" ({low:.3g} to {high:.3g})"
        return value + spread + ("" if error is None else f" ± {error:.2g}")

    lines = [columns, *([text(row, name) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def panels(rows: int = 1, columns: int = 1, size: tuple[float, float] = (5, 3.4)) -> tuple[Figure, np.ndarray]:
    """A figure of a size in inches, and its axes (rows, columns)."""
    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _label_decades(figure: Figure) -> None:
    """Logarithmic axes that show two decades have no labels between them, which can lie on each other."""
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) if axis.get_scale() == "log"):
        low, high = sorted(axis.get_view_interval())
        if sum(low <= place <= high for place in axis.get_majorticklocs()) > 1:
            axis.set_minor_formatter(NullFormatter())


def band(ax: Axes, x: Any, y: Any, low: Any, high: Any, *, fmt: str = "o-", **style: Any) -> None:
    """A line with a band around it, in the same colour."""
    (line,) = ax.plot(x, y, fmt, **style)
    ax.fill_between(x, low, high, color=line.get_color(), alpha=0.2, lw=0)


def bars(ax: Axes, names: Sequence[str], values: Mapping[str, Sequence[float]], **style: Any) -> None:
    """Horizontal bars: for each name, from the top, those of all labels of the values (as many as names) together."""
    places, height = -np.arange(len(names)), 0.8 / len(values)
    for i, (label, lengths) in enumerate(values.items()):
        ax.barh(places - height * (i - (len(values) - 1) / 2), lengths, height, label=label, **style)
    ax.set_yticks(places, names)


def averaged(ax: Axes, x: Any, values: np.ndarray, seed: int, centre: Any = np.mean, **style: Any) -> None:
    """The mean, or another centre, of the rows of values (n, points), with its 95 % bootstrap intervals as a band."""
    draws = (bootstrap(column, lambda v: centre(v, axis=-1), seed) for column in values.T)
    band(ax, x, centre(values, axis=0), *np.transpose([interval(drawn) for drawn in draws]), **style)


def _read(path: Path, *names: str) -> dict[str, Any]:
    """A dictionary that was written as JSON, with the given names."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not set(names) <= set(found):
        raise SystemExit(f"{path} is damaged, or no file of a run. Delete it, so that it is made again.")
    return found


def _commit() -> str | None:
    """The commit of the code that runs, with "+" if files differ from it; nothing outside a repository."""
    try:
        call = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        here = Path(__file__).parent
        return subprocess.run(call, capture_output=True, text=True, check=True, cwd=here).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _code(experiment: ModuleType) -> str:
    """A digest of the Python files that measure: apgrad's, the parts', the harness, the experiment."""
    here, own = Path(__file__), getattr(experiment, "__file__", None)
    files = {*Path(ap.__file__).parent.rglob("*.py"), *here.parent.glob("parts/*.py"), here, Path(own or here)}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:12]


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
        config = tyro.cli(type(default), default=default, args=argv, prog=prog, description=description)
        if not 0 <= config.seed < 2**31:  # JAX takes seeds modulo 2^32, NumPy none below 0
            raise ValueError(f"seed must be at least 0 and less than 2^31, got {config.seed}")
        return config
    except ValueError as error:
        raise SystemExit(f"{prog}: {error}") from error


def _options(config: Config) -> dict[str, Any]:
    """The options that say what is measured."""
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in ("out", "only_report", "mix")}


def _fingerprint(experiment: ModuleType, config: Config) -> dict[str, Any]:
    """What must agree for a run to go on: with another version of a library its figures may not be the same."""
    options = _options(config)
    packages = ("jax", "jaxlib", "numpyro", "numpy", "scipy")
    versions = {"python": platform.python_version(), "apgrad": ap.__version__}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    return {"experiment": name_of(experiment), "config": options, "versions": versions}


def _setting(experiment: ModuleType, config: Config) -> str:
    """What a run is, in words: a preset, or what it has in place of the paper's setting."""
    paper, options = (_options(c) | {"preset": "", "seed": 0} for c in (experiment.PAPER, config))
    changed = [f"{name}={options[name]} (paper: {paper[name]})" for name in paper if options[name] != paper[name]]
    return "the paper preset" if not changed else "not the paper preset: " + ", ".join(changed)


def _claim(folder: Path, experiment: ModuleType, config: Config) -> None:
    wanted = json.loads(json.dumps({**_fingerprint(experiment, config), "device": _device()}))
    path = folder / "cells" / "run"
    if not path.exists():
        if any(path.parent.glob("*.json")):
            raise SystemExit(f"{path.parent} has cells but no 'run'. Delete it, or choose another folder with --out.")
        write_atomically(path, json.dumps(wanted, indent=1))
        return
    found = _read(path)
    if found != wanted:
        different = [f"  {name}: {a!r} there, {b!r} now\n" for name, a, b in _differences(found, wanted)]
        words = "Go on with the same configuration, choose another folder with --out, or delete this to begin again."
        raise SystemExit(f"{folder} holds a run with another configuration:\n{''.join(different)}{words}")


def _differences(found: Any, wanted: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = [*found, *(key for key in wanted if key not in found)]
        return [d for n in names for d in _differences(found.get(n), wanted.get(n), f"{name}.{n}".lstrip("."))]
    return [] if found == wanted else [(name, found, wanted)]


def _device() -> str:
    device = jax.devices()[0]
    kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
    return f"{device.platform}{kind}, {os.cpu_count()} host cores"


def _plain(value: Any, name: str, *, finite: bool = False) -> Any:
    """What JSON has for a value: lists for arrays and, if `finite`, null for numbers that are not."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, dict):
        keys = [k if k is None or isinstance(k, str | int | float) else str(k) for k in value]
        return {k: _plain(v, f"{name}.{k}", finite=finite) for k, v in zip(keys, value.values(), strict=True)}
    if isinstance(value, list | tuple):
        return [_plain(v, name, finite=finite) for v in value]
    if value is None or isinstance(value, str | int | float):
        return None if finite and isinstance(value, float) and not math.isfinite(value) else value
    warnings.warn(f"JSON has nothing for {name}, a {type(value).__name__}: its repr is written", stacklevel=2)
    return repr(value)
