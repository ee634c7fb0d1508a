"""An experiment of random numbers, as a program of its own, that kills itself in the middle if it is told to."""

import os
import signal

import numpy as np
from matplotlib.figure import Figure

from experiments import harness


class Config(harness.Config):
    cells: int = 6

    def __post_init__(self):
        if self.cells < 1:
            raise ValueError("no cells")


PAPER = Config(cells=9)


def cells(config):
    return [{"i": i} for i in range(config.cells)]


def measure(config, cell, seed):
    if str(cell["i"]) == os.environ.get("KILL_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"values": np.random.default_rng(seed).standard_normal(3).tolist(), "nan": float("nan")}


def report(config, records):
    rows = [{**cell, "mean": float(np.mean(result["values"])), "nan": result["nan"]} for cell, result in records]
    return harness.Report({"sum": sum(row["mean"] for row in rows)}, rows, "the table", Figure())


if __name__ == "__main__":
    harness.main()
