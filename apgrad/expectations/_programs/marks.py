"""How often a program comes past its marks."""

import enum
from collections import Counter
from collections.abc import Hashable

from apgrad._programs.control import Program, inside_of, nested


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
