"""How often a program comes past its marks, and in which order."""

import enum
from collections import Counter
from collections.abc import Hashable, Iterator

from apgrad._programs.jaxprs import Program, inside_of, nested


def count_marks(program: Program, kind: enum.Enum) -> Counter[Hashable]:
    """How often each mark is passed in one run of a program; marks in branches of `cond` as if all branches ran."""
    found: Counter[Hashable] = Counter()
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "mark" and eqn.params["kind"] is kind:
            found[eqn.params["label"]] += 1
        inside = nested(eqn)
        if inside is None:
            if any(count_marks(inner, kind) for inner in inside_of(eqn)):
                raise ValueError(f"a mark inside {eqn.primitive.name!r} cannot be counted: put that inside the program")
            continue
        for inner in inside.jaxprs:
            for label, number in count_marks(inner, kind).items():
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
