"""Whether a cost is a sum of terms, each of which sees one entry of an axis alone."""

from collections.abc import Sequence

from apgrad._programs import kinds
from apgrad._programs.control import Program, nested
from apgrad._programs.flow import flow
from apgrad.expectations._programs.leading_axes import moved_axis

# A fact is the axis along which entries are still apart, or one of these; None: it does not depend on the input.
SUM, MIXED = "sum", "mixed"  # a sum over the entries of terms of one entry each; entries that act on each other


def is_sum_over(program: Program, axes: Sequence[int | None]) -> bool:
    """Whether the program's first output is a sum over an axis of its inputs of terms that see one entry each.

    `axes` has the axis in each input; None where it has no such axis. What is found is sure, and some may be missed.
    """

    def transfer(eqn, facts):
        inside, name = nested(eqn), eqn.primitive.name
        if inside is not None and inside.kind in ("call", "remat", "custom"):
            return None
        numbers = [n for n, fact in enumerate(facts) if fact is not None]
        if not numbers:
            return [None] * len(eqn.outvars)
        made = MIXED if inside is not None else one(eqn, name, facts, numbers)
        return [made] * len(eqn.outvars)

    def one(eqn, name, facts, numbers):
        found = {facts[n] for n in numbers}
        if MIXED in found or len(found) > 1:
            return MIXED
        (fact,) = found
        linear = (
            name in kinds.LINEAR_IN_ALL
            or (name in kinds.LINEAR_IN_EACH and len(numbers) == 1)
            or set(numbers) <= set(kinds.LINEAR_IN.get(name, ()))
        )
        if fact == SUM:
            return SUM if linear and not (name == "select_n" and 0 in numbers) else MIXED
        axes = {moved_axis(eqn, n, fact) for n in numbers}
        if len(axes) == 1 and None not in axes:
            return axes.pop()
        return SUM if name in ("reduce_sum", "dot_general") and linear else MIXED

    join = lambda a, b: a if a == b or b is None else b if a is None else MIXED
    return flow(program, list(axes), transfer, join, lambda _: None)[0] == SUM
