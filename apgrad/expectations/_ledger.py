"""What nodes ask of a tape before its structure is fixed: channels, the plan of a tape, and the ledger of a trace."""

import contextvars
import enum
from typing import Any, NamedTuple


class Kind(enum.StrEnum):
    """What the messages on a channel are."""

    BASELINED = "baselined"  # costs later than a choice, less the mean of the other lanes' costs
    PLAIN = "plain"  # costs later than a choice
    REGRESSION = "regression"  # costs later than a choice, undisturbed by baselines
    SUFFIX = "suffix"  # the gradient that later nodes have gathered, lane by lane


class Channel(NamedTuple):
    """A port of the tape, by which later costs and nodes send messages to earlier nodes.

    Branches of `tape.parallel` all see the messages from after the join, and what the branches send adds up.

    Attributes:
      kind: what the messages are.
      name: which function's nodes gather a suffix; empty for the other kinds.
      shape: of the messages. For the kinds that carry costs it is (lanes,), or (lanes, parts) for parts of a lane that
        are independent of each other.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]


class TapePlan(NamedTuple):
    """The static structure of a tape: the same all through a program, so that `scan` can carry it."""

    lanes: int
    dtype: Any = None
    channels: tuple[Channel, ...] = ()
    folds: int = 1  # groups of lanes that share batch statistics: 2 with cross-fitting
    disturbed: tuple[int, int] | None = None  # lanes whose number has this bit at this value draw other samples
    token: object = None  # distinct for each collecting trace, so that no cached inner `jit` hides a request


class Ledger:
    """What one trace of a program knows, at trace time only: which tape is current, and what nodes ask for."""

    def __init__(self, collecting: bool):
        self.collecting = collecting
        self.rehearsing = False  # branches of `parallel` are traced to see whether they are independent
        self.stamp = 0
        self.arrays: tuple[int, ...] = ()  # the identities of the current tape's arrays
        self.channels: set[Channel] = set()
        self.parts: dict[int, str] = {}
        self.cost_shapes: set[tuple[int, ...]] = set()
        self.cost_dtypes: set[Any] = set()
        self.interacting: str | None = None  # what lets lanes act on each other
        self.scoring: str | None = None  # what charges choices with costs
        self.weighing: str | None = None  # what takes weights from the samples


LEDGER: contextvars.ContextVar[Ledger | None] = contextvars.ContextVar("ledger", default=None)
