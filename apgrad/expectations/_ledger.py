"""What nodes ask of a tape before its structure is fixed: the plan of a tape, and the ledger of a trace."""

import contextvars
import enum
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, Literal, NamedTuple

import jax

from apgrad._ground.primitives import mark
from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import Program, inside_of, nested, variables
from apgrad.expectations._ports import Port


class Mark(enum.Enum):
    """What nodes leave marks for in the first trace of a program."""

    # At a score whose baseline is the mean over other lanes; the label: the node's name, and whether it is a `choose`.
    LEAVES_ONE_OUT = enum.auto()
    # At samples that pay for later costs, at log-densities of choices, and at costs; the label: 1 for those of lanes, 2
    # for those of their parts.
    DRAWN = enum.auto()
    MOVED = enum.auto()  # at samples with a pathwise derivative
    CHOSEN = enum.auto()  # at costs of `choose`, whose estimators know where their samples jump
    SCORE = enum.auto()
    COST = enum.auto()
    TOTAL = enum.auto()  # at what stands for the sum of costs when the program begins
    VISIT = enum.auto()  # at each visit of a mixer's site; the label is the site's number
    # Where a branch of `parallel` begins, or all have ended; the label: the fork, and the branch's number or None.
    BRANCH = enum.auto()


def marked(key: jax.Array, kind: Mark, label: Hashable) -> jax.Array:
    data = mark(jax.random.key_data(key), kind, label)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


# What a program does, in this order: lanes act on each other, so that none can have credit alone; choices are charged
# with costs; choices of a part are charged with the part's costs; a baseline is made of other lanes; credit fades; a
# mixer has weights, so that cross-fitting needs two streams; costs are weighed by `ap.score`; a cost is shaped; samples
# have pathwise derivatives.
Doing = Literal[
    "interacting", "scoring", "scoring parts", "baselined", "discounting", "weighing", "weighed", "shaping", "moving"
]


class TapePlan(NamedTuple):
    """The static structure of a tape: the same all through a program, so that `scan` can carry it.

    A tape does what its plan says: a compiled function that two programs share is traced once for equal plans.
    """

    lanes: int  # how many lanes there are
    dtype: Any = None  # the dtype in which costs are summed; None in the first trace
    ports: tuple[Port, ...] = ()  # the ports that the tape has
    fades: bool = False  # whether credit fades somewhere in the program
    weighs: bool = False  # whether `ap.score` weighs costs somewhere in the program
    folds: int = 1  # groups of lanes that share batch statistics: 2 with cross-fitting, else 1
    # `(bit, value)`: lanes whose number has this bit at this value draw other samples.
    disturbed: tuple[int, int] | None = None
    sites: tuple[int, ...] | None = None  # with `ap.adaptive`, how often each site of a mixer is visited; else None
    cells: int = 1  # with `ap.adaptive`, how many cells of its inputs a mixer has weights for
    data: int | None = None  # how many data the minibatch has, which are then the parts of a lane
    token: object = None  # distinct for each trace that counts: no cached `jit` hides a site or request

    def per_lane(self, term: jax.Array) -> jax.Array:
        """What a term adds to its lane's total, (lanes,): the mean over data, or the sum over other parts."""
        if term.ndim == 1:
            return term
        return term.mean(-1) if self.data is not None else term.sum(-1)


class Ledger:
    """What one trace of a program knows: the current tape, what nodes ask for, and the ledger of the trace before."""

    def __init__(self, first: "Ledger | None" = None):
        self.first, self.collecting = first, first is None
        self.branches = 0  # how many branches of `parallel`, one in the other, are being traced
        self.stamp = 0
        self.flattened: dict[Any, Any] = {}  # weak references to the arrays of flattened tapes, by identities
        self.arrays: tuple[int, ...] = ()  # the identities of the current tape's arrays
        self.unchanged: set[Any] = set()  # identities of flattened tapes that no use has followed
        self.trace: Any = None  # JAX's trace in which a tape was flattened last
        self.ports: set[Port] = set()
        self.parts: dict[int, str] = {}
        self.cost_shapes: set[tuple[int, ...]] = set()
        self.cost_dtypes: set[Any] = set()
        self.declared: dict[Doing, str] = {}  # what is done, and by whom
        self.sites: list[str] = []  # the mixers met in this trace, for `ap.adaptive`

    def require_as_before(self) -> None:
        """Raises a `ValueError` if the second trace did what the first did not. A cached `jit` may hide it."""
        if self.first is None:
            return
        for name in ("parts", "cost_shapes", "cost_dtypes"):
            before, now = getattr(self.first, name), getattr(self, name)
            if not set(now) <= set(before):
                raise differs(f"{name.replace('_', ' ')} {sorted(map(str, before))}, then {sorted(map(str, now))}")
        for doing, name in self.declared.items():
            if doing not in self.first.declared:
                raise differs(f"only the second trace was {doing}, at {name}")


def differs(what: str) -> ValueError:
    return ValueError(
        f"the program did not do the same at each of its two traces: {what}. It must be a pure function, without "
        "counters, caches, or random numbers of Python's or NumPy's: ap.expectation traces it once to learn what its "
        "nodes need, and once more to run it."
    )


LEDGER: contextvars.ContextVar[Ledger | None] = contextvars.ContextVar("ledger", default=None)


def count_marks(program: Program, kind: Mark) -> Counter[Hashable]:
    """How often each mark is passed in one run of a program; marks in branches of `cond` as if all branches ran."""
    found: Counter[Hashable] = Counter()
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "mark" and eqn.params["kind"] is kind:
            found[eqn.params["label"]] += 1
        for label, number in [pair for inner in inside_of(eqn) for pair in count_marks(inner, kind).items()]:
            if (inside := nested(eqn)) is None:
                raise ValueError(f"a mark inside {eqn.primitive.name!r} cannot be counted: call the node outside of it")
            if inside.kind == "while":
                raise ValueError("a while_loop makes a number of steps that is not known in advance: use lax.scan")
            found[label] += number * (inside.length if inside.kind == "scan" else 1)
    return found


def followed(program: Program, kind: Mark, by: Mark) -> set[Hashable]:
    """The labels of marks of a kind after which a mark of the other kind comes, or may come, in one run."""
    last: dict[Hashable, bool] = {}
    for found, label in _in_order(program, kind, by):
        last = dict.fromkeys(last, True) if found is by else last | {label: last.get(label, False)}
    return {label for label, is_followed in last.items() if is_followed}


def _in_order(program: Program, *kinds: Mark) -> Iterator[tuple[Mark, Hashable]]:
    """The marks of two kinds, in order; of a loop or a `cond` first those of the first kind, then the others."""
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "mark" and eqn.params["kind"] in kinds:
            yield eqn.params["kind"], eqn.params["label"]
        inside = nested(eqn)
        found = [mark for inner in inside_of(eqn) for mark in _in_order(inner, *kinds)]
        if inside is None or inside.kind != "call":
            found.sort(key=lambda mark: kinds.index(mark[0]))
        yield from found


def require_apart(program: Program) -> None:
    """Raises a `ValueError` where an equation of one branch reads what an equation of another branch made."""
    here: dict[Any, int] = {}  # for each fork that has begun and not ended, the number of the branch
    made: dict[Any, dict[Any, int]] = {}  # for each variable, the branches in which it was made
    elsewhere = lambda v: any(here.get(fork, index) != index for fork, index in made.get(v, {}).items())
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "mark" and eqn.params["kind"] is Mark.BRANCH:
            fork, index = eqn.params["label"]
            here = {other: number for other, number in here.items() if other is not fork}
            here |= {} if index is None else {fork: index}
        elif any(map(elsewhere, variables(eqn.invars))):
            raise ValueError(
                "a branch of tape.parallel uses a value made inside another branch, whose choices do not pay for it: "
                "return it as the branch's output and use it after the join, or make it before the fork"
            )
        made |= dict.fromkeys(eqn.outvars, here)
        # What a program inside closes over is an operand of its equation.
        for inner in inside_of(eqn):
            require_apart(inner)


def require_threaded(program: Program) -> None:
    """`require_apart`, and an error for `lax.stop_gradient` on the tape, whose total is the last output."""
    require_apart(program)

    def transfer(eqn, facts):
        if eqn.primitive.name == "mark" and eqn.params["kind"] is Mark.TOTAL:
            return [True]
        if any(facts) and nested(eqn) is not None:
            return None
        return [any(facts) and eqn.primitive.name != "stop_gradient"] * len(eqn.outvars)

    if not flow(program, [], transfer, lambda a, b: a and b, lambda _: False)[-1]:
        raise ValueError(
            "jax.lax.stop_gradient was called on the tape, say in a carry: costs before have no derivative then, and "
            "choices no credit. Call it on the state alone: (tape, jax.lax.stop_gradient(state))."
        )
