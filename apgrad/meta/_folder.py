"""A run's folder: one process at a time, one run for ever, and a log that never stands in the way.

* `run.json`: what makes this run this one, see `_identity.py`.
* `.lock`: locked by the process that trains here; the system lets go of the lock when the process ends.
* `metrics.csv`: a row for each outer step.
* `training.png`: the rows, drawn at the end.
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

COLUMNS = ("step", "loss", "gradient_norm")


class RunFolder:
    """The folder of a run that is being trained by this process.

    Args:
      folder: made if it is not there.

    Raises:
      ValueError: if another process, or another call of `train`, trains in it. On a system without flock (Windows)
        nobody notices. Of several processes of one run only the first holds the lock.
    """

    def __init__(self, folder: str | Path):
        self.folder, self._lock = Path(folder), None
        self.first = jax.process_index() == 0
        self.folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None or not self.first:
            return
        lock = (self.folder / ".lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ValueError(
                f"another run trains in {self.folder} (process {holder}). Use another folder, or wait until it ends."
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        """Lets another process train here."""
        if self._lock is not None:
            self._lock.close()

    def claim(self, identity: dict[str, str], *, begun: bool) -> None:
        """Writes down which run this is, or compares.

        Args:
          identity: of `_identity.identity`.
          begun: whether there is a checkpoint to go on from.

        Raises:
          ValueError: if there is one, of another run, saying what differs.
        """
        path = self.folder / "run.json"
        if begun and path.exists():
            try:
                found = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(
                    f"{path} is damaged, so nothing says which run this folder holds. Delete the file to go on with "
                    "what was trained here as if it were this run, or use another folder."
                ) from error
            if differing := [n for n in {**found, **identity} if found.get(n) != identity.get(n)]:
                shown = "; ".join(
                    f"{n}: {found.get(n, 'nothing')} there, {identity.get(n, 'nothing')} here" for n in differing[:5]
                )
                raise ValueError(
                    f"{self.folder} holds another run ({len(differing)} parts differ: {shown}). Use another folder, or "
                    f"the same key, start, optimizer and options. If both mean the same, delete {path} to go on."
                )
        elif self.first:
            _write(path, json.dumps(identity, indent=1))

    def trim(self, step: int) -> None:
        """Drops rows of steps after the checkpoint, which are made again, and what is no row."""
        path = self.folder / "metrics.csv"
        if not self.first or not path.exists():
            return
        rows = [row for row in self._rows() if row[0] <= step]
        if len(rows) < step:
            warnings.warn(
                f"{path} has {len(rows)} of the {step} rows before the checkpoint: the others are lost.", stacklevel=3
            )
        _write(path, "".join(map(_line, [COLUMNS, *rows])))

    def append(self, first: int, metrics: dict[str, np.ndarray]) -> None:
        """Adds the rows of steps first + 1, ...; they are on disk when this returns."""
        if not self.first:
            return
        path = self.folder / "metrics.csv"
        with path.open("a", newline="") as file:
            if file.tell() == 0:
                file.write(_line(COLUMNS))
            values = zip(*(metrics[name].astype(float).tolist() for name in COLUMNS[1:]), strict=True)
            file.writelines(_line((first + i, *row)) for i, row in enumerate(values, 1))
            file.flush()
            os.fsync(file.fileno())

    def draw(self) -> None:
        """Draws the rows, if matplotlib is there."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return
        if not self.first or not (rows := self._rows()):
            return
        figure = Figure(figsize=(8, 3), layout="constrained")
        steps, *columns = zip(*rows, strict=True)
        for ax, name, values in zip(figure.subplots(1, 2), COLUMNS[1:], columns, strict=True):
            ax.plot(steps, values, linewidth=0.5)
            scale = "log" if all(v > 0 for v in values) else "linear"
            ax.set(xlabel="outer step", ylabel=name.replace("_", " "), yscale=scale)
        temporary = self.folder / ".training.png.tmp"
        FigureCanvasAgg(figure).print_png(str(temporary))
        os.replace(temporary, self.folder / "training.png")

    def _rows(self) -> list[tuple[Any, ...]]:
        """The whole rows of the file, each step once, in order; damaged lines are left out."""
        path, rows = self.folder / "metrics.csv", {}
        text = path.read_bytes().decode(errors="replace") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            step, *values = line.rstrip("\r\n").split(",")
            try:
                if line.endswith("\n") and len(values) == len(COLUMNS) - 1 and step.isdecimal():
                    rows[int(step)] = (int(step), *map(float, values))
            except ValueError:
                continue
        return [rows[step] for step in sorted(rows)]


def _line(row):
    text = (x if isinstance(x, str) else repr(x) for x in row)
    return ",".join(text) + "\n"


def _write(path, text):
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
