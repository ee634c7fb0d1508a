"""How often a program comes past its marks, in which order, and whether branches keep apart."""

import enum
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

from apgrad._programs.jaxprs import Program, inside_of, nested, variables
from apgrad.expectations._ledger import Mark


def count_marks(program: Program, kind: enum.Enum) -> Counter[Hashable]:
    """How often each mark is passed in one run of a program; marks in branches of `cond` as if all branches ran."""
    found: Counter[Hashable] = Counter()
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "mark" and eqn.params["kind"] is kind:
            found[eqn.params["label"]] += 1
        for label, number in [pair for inner in inside_of(eqn) for pair in count_marks(inner, kind).items()]:
            if (inside := nested(eqn)) is None:
                raise ValueError(f"a mark inside {eqn.primitive.name!r} cannot be counted: put that inside the program")
            if inside.kind == "while":
                raise ValueError("a while_loop makes a number of steps that is not known in advance: use lax.scan")
            found[label] += number * (inside.length if inside.kind == "scan" else 1)
    return found


def followed(program: Program, kind: enum.Enum, by: enum.Enum) -> set[Hashable]:
    """The labels of marks of a kind after which a mark of the other kind comes, or may come, in one run."""
    last: dict[Hashable, bool] = {}
    for found, label in _in_order(program, kind, by):
        last = dict.fromkeys(last, True) if found is by else last | {label: last.get(label, False)}
    return {label for label, is_followed in last.items() if is_followed}


def _in_order(program: Program, *kinds: enum.Enum) -> Iterator[tuple[enum.Enum, Hashable]]:
    """The marks of two kinds; of a loop or a `cond` those of the first kind, and then those of the second."""
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
