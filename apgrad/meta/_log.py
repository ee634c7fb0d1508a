"""How a training goes: TensorBoard's files, a progress bar (both are a `log` of `train`), and the file of all steps."""

import os
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from apgrad._ground.files import write_atomically
from apgrad._ground.progress import progress_bar

Log = Callable[[int, dict[str, float]], None]
COLUMNS = ("loss", "gradient_norm")
HEAD = ",".join(["step", *COLUMNS]) + "\n"
ROW = re.compile(r"(\d+)" + r",[\w.+-]+" * len(COLUMNS) + r"\n")


def tensorboard(folder: str | Path) -> Log:
    """A `log` for `train` that writes TensorBoard's event files, by tensorboardX: on disk when a call returns.

    Args:
      folder: where the event files are, one for each start of a run; it is made if it does not exist.
    """
    # tensorboardX's SummaryWriter writes by a thread, whose last events a kill would lose.
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


def show_progress(step: int, steps: int) -> Log:
    bar = progress_bar("meta-training", steps, step)

    def log(step, metrics):
        bar.set_postfix(loss=f"{metrics['loss']:.4g}", skipped=int(metrics["skipped"]), refresh=False)
        bar.update(step - bar.n)
        if step >= steps:
            bar.close()

    return log


def begin_metrics(path: Path, step: int) -> None:
    """The file `metrics.csv` of a run that goes on from a step: its head, and the whole rows up to the step."""
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if (row := ROW.fullmatch(line)) and int(row[1]) <= step]
    write_atomically(path, HEAD + "".join(whole))


def append_metrics(path: Path, step: int, metrics: dict[str, np.ndarray]) -> None:
    """Adds the rows of the last steps, metrics (steps,), up to this step; they are on disk when this returns."""
    rows = np.stack([metrics[name].astype(float) for name in COLUMNS], axis=1).tolist()
    with path.open("a", newline="") as file:
        file.writelines(f"{step - len(rows) + i},{','.join(map(repr, row))}\n" for i, row in enumerate(rows, 1))
        file.flush()
        os.fsync(file.fileno())
