"""The plan of a tape, and the ledger of a trace: what nodes ask for before the tape's structure is fixed."""

import contextvars
from typing import Any, NamedTuple


class Plan(NamedTuple):
    """The static structure of a tape: the same all through a program, so that `scan` can carry it."""

    lanes: int
    dtype: Any = None
    ports: tuple[tuple[str, tuple[int, ...]], ...] = ()
    folds: int = 1  # groups of lanes that share batch statistics: 2 with cross-fitting
    keeps: bool = False  # weights come from the objective's argument, and its gradient makes new ones
    disturbed: tuple[int, int] | None = None  # lanes whose number has this bit at this value draw other samples
    token: object = None  # distinct for each collecting trace, so that no cached inner `jit` hides a request


class Ledger:
    """What one trace of a program knows, at trace time only: which tape is current, what nodes ask for."""

    def __init__(self, collecting: bool):
        self.collecting = collecting
        self.rehearsing = False  # branches of `parallel` are traced to see whether they are independent
        self.stamp = 0
        self.arrays: tuple[int, ...] = ()  # the identities of the current tape's arrays
        self.ports: dict[str, tuple[int, ...]] = {}
        self.parts: dict[int, str] = {}
        self.cost_shapes: set[tuple[int, ...]] = set()
        self.cost_dtypes: set[Any] = set()
        self.mixing: str | None = None
        self.scoring: str | None = None
        self.weighing: str | None = None
        self.tables: dict[str, int] = {}


LEDGER: contextvars.ContextVar[Ledger | None] = contextvars.ContextVar("ledger", default=None)
