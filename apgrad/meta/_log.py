"""How a training goes: TensorBoard's files and a progress bar, which are `log` functions, and the file of all steps.

`train` calls `log(step, metrics)` after each jitted call, with the outer steps made so far, the means of "loss" and
"gradient_norm" over the steps of the call, and "skipped", the number of steps skipped so far.
"""

import os
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from apgrad._ground.files import write_atomically

Log = Callable[[int, dict[str, float]], None]
COLUMNS = ("step", "loss", "gradient_norm")


def tensorboard(folder: str | Path) -> Log:
    """A `log` for `train` that writes TensorBoard's event files, by tensorboardX.

    Each call is on disk when it returns (tensorboardX's SummaryWriter writes by a thread, whose last events a kill
    would lose).

    Args:
      folder: where the event files are; it is made if it does not exist. Each start of a run writes a file of its own.

    Raises:
      ImportError: without tensorboardX, saying what to install.
    """
    try:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise ImportError('TensorBoard files need tensorboardX: pip install "apgrad[meta]"') from error
    Path(folder).mkdir(parents=True, exist_ok=True)
    writer = EventsWriter(str(Path(folder) / "events"), f".{os.getpid()}")

    def log(step, metrics):
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        writer.flush()

    weakref.finalize(log, writer.close)
    return log


def progress_bar(step: int, steps: int) -> Log:
    """A `log` that shows a tqdm bar from the step at which a run goes on to its last one."""
    try:
        import tqdm
    except ImportError as error:
        raise ImportError('progress needs tqdm: pip install "apgrad[meta]", or train(..., progress=False)') from error
    bar = tqdm.tqdm(total=steps, initial=step, unit="step", desc="meta-training")

    def log(step, metrics):
        bar.set_postfix(loss=f"{metrics['loss']:.4g}", skipped=int(metrics["skipped"]), refresh=False)
        bar.update(step - bar.n)
        if step >= steps:
            bar.close()

    return log


class MetricsFile:
    """The file `metrics.csv` of a run, with a row for each outer step.

    Where a run goes on from a checkpoint, rows of later steps, which are made again, and damaged rows are dropped.
    """

    def __init__(self, folder: Path, step: int):
        self._path = folder / "metrics.csv"
        if not self._path.exists():
            return
        rows = [row for row in self._rows() if row[0] <= step]
        if len(rows) < step:
            warnings.warn(
                f"{self._path} has {len(rows)} of the {step} rows before the checkpoint: the others are lost.",
                stacklevel=3,
            )
        write_atomically(self._path, "".join(map(_line, [COLUMNS, *rows])))

    def __call__(self, step: int, metrics: dict[str, np.ndarray]) -> None:
        """Adds the rows of the last steps, metrics (steps,), up to this step; they are on disk when this returns."""
        with self._path.open("a", newline="") as file:
            if file.tell() == 0:
                file.write(_line(COLUMNS))
            rows = list(zip(*(metrics[name].astype(float).tolist() for name in COLUMNS[1:]), strict=True))
            file.writelines(_line((step - len(rows) + i, *row)) for i, row in enumerate(rows, 1))
            file.flush()
            os.fsync(file.fileno())

    def draw(self) -> None:
        """Draws the rows as `training.png` beside the file, if matplotlib is installed."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return
        if not (rows := self._rows()):
            return
        figure = Figure(figsize=(8, 3), layout="constrained")
        steps, *columns = zip(*rows, strict=True)
        for ax, name, values in zip(figure.subplots(1, 2), COLUMNS[1:], columns, strict=True):
            ax.plot(steps, values, linewidth=0.5)
            scale = "log" if all(v > 0 for v in values) else "linear"
            ax.set(xlabel="outer step", ylabel=name.replace("_", " "), yscale=scale)
        temporary = self._path.with_name(".training.png.tmp")
        FigureCanvasAgg(figure).print_png(str(temporary))
        os.replace(temporary, self._path.with_name("training.png"))

    def _rows(self) -> list[tuple[Any, ...]]:
        """The whole rows of the file, each step once, in order; damaged lines are left out."""
        rows = {}
        text = self._path.read_bytes().decode(errors="replace") if self._path.exists() else ""
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
