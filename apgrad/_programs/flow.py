"""The data-flow walk: facts about a program's inputs become facts about its outputs.

A fact is any value that can be compared: "is linear in the message", "depends on a parameter". `transfer` says what an
equation makes of the facts at its inputs. Where it has no answer for an equation with programs inside, the walk goes
inside: branches are joined, and the body of a loop is walked until the facts at its carry no longer change.
"""

from collections.abc import Callable, Sequence
from typing import Any

from apgrad._programs.control import Nested, Program, nested
from apgrad._programs.jaxprs import evaluate

Transfer = Callable[[Any, list[Any]], Sequence[Any] | None]
Join = Callable[[Any, Any], Any]


def flow(
    program: Program,
    inputs: Sequence[Any],
    transfer: Transfer,
    join: Join,
    constant: Callable[[Any], Any],
    entry: Callable[[Any], Any] = lambda fact: fact,
    stack: Callable[[Any], Any] = lambda fact: fact,
    held: Callable[[Any], Any] = lambda fact: fact,
) -> list[Any]:
    """The facts at a program's outputs.

    At a scan, `entry` turns an array's fact into that of a step's entry, `stack` undoes it; `held` is for constants.
    """

    def enter(inner, facts):
        return flow(inner, facts, transfer, join, constant, entry, stack, held)

    def apply(eqn, facts):
        made = transfer(eqn, facts)
        if made is not None:
            return made
        inside: Any = nested(eqn)  # not None: a transfer answers for equations without programs
        if inside.kind != "scan":
            return _inside(inside, facts, enter, join)
        same, carried, _ = inside.counts
        first, arrays = facts[: same + carried], facts[same + carried :]
        made = _inside(inside, [*map(held, first[:same]), *first[same:], *map(entry, arrays)], enter, join)
        return [*made[:carried], *map(stack, made[carried:])]

    return evaluate(program, inputs, apply, constant)


def steady(
    walk: Callable[[list[Any]], Sequence[Any]], inputs: Sequence[Any], first: int, carried: int, join: Join
) -> tuple[list[Any], Sequence[Any]]:
    facts = list(inputs)
    while True:
        made = walk(facts)
        before = facts[first : first + carried]
        after = [join(*pair) for pair in zip(before, made[:carried], strict=True)]
        if after == before:
            return facts, made
        facts[first : first + carried] = after


def _inside(inside: Nested, facts: list[Any], enter: Callable[..., Any], join: Join) -> Sequence[Any]:
    if inside.kind == "cond":
        first, *others = [enter(branch, facts[1:]) for branch in inside.jaxprs]
        for other in others:
            first = [join(*pair) for pair in zip(first, other, strict=True)]
        return first
    if inside.kind not in ("scan", "while"):
        return enter(inside.jaxprs[0], facts)
    body, (skipped, first, carried) = inside.jaxprs[-1], inside.loop
    found, made = steady(lambda facts: enter(body, facts), facts[skipped:], first, carried, join)
    # A loop that may make no step at all hands on what it was given.
    never = inside.kind == "while" or inside.length == 0
    return [*(found[first : first + carried] if never else made[:carried]), *made[carried:]]
