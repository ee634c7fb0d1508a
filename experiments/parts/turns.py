"""Timing: functions take turns, so that what else the machine does falls on all of them."""

import time
from typing import Any

import jax
import numpy as np

KEPT = {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}
BARRIERS: Any = KEPT if jax.default_backend() == "cpu" else None
"""Options with which the CPU's compiler keeps optimization barriers, and so what a checkpoint forgets."""


def take_turns(
    functions: dict[Any, Any], rounds: int, at_least: float = 0.0, arguments: Any = ()
) -> dict[Any, np.ndarray]:
    """Seconds of a call of each function, of these arguments, in each round, (rounds,); two calls before do not count.

    A function that takes less than `at_least` seconds is called several times a round. On a CPU the seconds are the
    processor's, all threads together, so that other work on the machine does not count.
    """
    now = time.process_time if jax.default_backend() == "cpu" else time.perf_counter

    def seconds(function, repeats=1):
        start = now()
        for _ in range(repeats):
            jax.block_until_ready(function(*arguments))
        return (now() - start) / repeats

    repeats = {}
    for name, function in functions.items():
        seconds(function)
        repeats[name] = max(1, min(200, int(at_least / max(seconds(function), 1e-6))))
    turns = [[seconds(function, repeats[name]) for name, function in functions.items()] for _ in range(rounds)]
    return dict(zip(functions, np.array(turns).T, strict=True))
