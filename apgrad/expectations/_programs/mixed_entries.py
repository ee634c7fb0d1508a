"""Whether entries along an axis, such as the lanes, act on each other in a program.

The fact of an array is `Entries`, or what `places.py` knows of indices; None where it depends on no entry, or that is
not known. So something may be missed; what is found is sure, but for what undoes a mixing (masks, diagonals).
"""

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._programs import kinds
from apgrad._programs.flow import flow, steady
from apgrad._programs.jaxprs import Program, nested, opened
from apgrad.expectations._programs import entries, places
from apgrad.expectations._programs.entries import NONE, SEVERAL, Entries


class Constant(NamedTuple):  # the fact of a value that `lax.stop_gradient` holds constant
    fact: Any


def _constant(fact):
    return None if fact is None else Constant(fact)


def _entries(fact):
    return fact if isinstance(fact, Entries) else None


# What a fact is with one axis more, or less, before the others; None if the axis that goes has several entries.
def _shifted(by):
    def shifted(fact):
        if isinstance(fact, places.Indices):
            return places.unsure(fact)
        if isinstance(fact, Constant):
            return _constant(shifted(fact.fact))
        if isinstance(fact, places.Placed):
            return places.Placed(shifted(fact.fact))
        if not isinstance(fact, Entries) or (by < 0 and entries.is_along(fact.of, 0)):
            return None
        return Entries(fact.of[0] if by < 0 else fact.of[None])

    return shifted


def mixes_entries(program: Program, start: enum.Enum, ends: tuple[enum.Enum, ...], axis: int) -> bool:
    """Whether entries along an axis of arrays marked `start` act on other entries of arrays that are marked later.

    A mark counts if its label, a number of axes, is above the axis. What follows on `lax.stop_gradient` counts where it
    says which entries are read; comparisons and integers count, since a score differentiates what they decide.
    """
    found, steps = False, {}

    def transfer(eqn, facts):
        nonlocal found
        name, params = eqn.primitive.name, eqn.params
        moving = [_entries(fact.fact if isinstance(fact, places.Columns | places.Placed) else fact) for fact in facts]
        if (inside := nested(eqn)) is not None:
            if inside.kind == "cond" and moving[0] is not None:
                return decided(eqn, moving[0], [walk(branch, facts[1:]) for branch in inside.jaxprs])
            return over_entries(inside, facts) if inside.kind == "scan" else None
        if name == "custom_linear_solve":
            counts, solve = params["const_lengths"], opened(params["jaxprs"].solve)
            first = counts.matvec + counts.vecmat
            return walk(solve, [*facts[first : first + counts.solve], *facts[sum(counts) :]])
        if name == "mark" and params["kind"] in (start, *ends) and params["label"] > axis:
            shape = eqn.invars[0].aval.shape
            each = entries.each(axis, shape[axis], len(shape))
            found |= moving[0] is not None and bool(((moving[0].of != NONE) & (moving[0].of != each.of)).any())
            if params["kind"] is start:
                return [each]
        if name == "stop_gradient":
            return [fact if moving[0] is None else Constant(fact) for fact in facts]
        made = _made(eqn, moving, facts)
        if name == "concatenate":
            made = [places.columns(eqn, facts, made[0])]
        if not any(made):
            constant = [_entries(fact.fact) if isinstance(fact, Constant) else None for fact in facts]
            made = [*map(_constant, _made(eqn, constant, facts))]
        if not all(made) and (known := places.of_equation(eqn, facts)):
            made = [fact or place for fact, place in zip(made, known, strict=True)]
        return [places.Placed(fact) if places.is_placed(eqn, facts, fact) else fact for fact in made]

    def decided(eqn, by, branches):  # what a branch returns depends on the entries that chose it; a key says nothing
        def chosen(var, facts):
            fact, is_key = functools.reduce(join, facts), jnp.issubdtype(var.aval.dtype, jax.dtypes.extended)
            return fact if is_key else Entries(entries.both(entries.array_of(fact, var.aval.shape), by.of))

        return [*map(chosen, eqn.outvars, zip(*branches, strict=True))]

    def over_entries(scan, facts):  # if steps have entries; what a step hands on depends on those before, too
        (same, carried, _), (body,) = scan.counts, scan.jaxprs
        first, arrays = facts[: same + carried], facts[same + carried :]
        over = [isinstance(f, Entries) and f.of.shape[0] == f.of.size > 1 for f in arrays]
        if not any(over):
            return None
        # For each order of entries along the steps, a number that stands for the step's.
        number = lambda f: steps.setdefault((id(body), f), SEVERAL - 1 - len(steps))
        own = [number(f) if o else None for f, o in zip(arrays, over, strict=True)]
        orders = {number: f.of.ravel() for number, f in zip(own, arrays, strict=True) if number is not None}

        def with_orders(fact, orders):
            if not isinstance(fact, Entries):
                return fact
            of = fact.of
            for number, order in orders.items():
                of = np.where(of == number, order.reshape(-1, *[1] * (of.ndim - 1)) if order.ndim else order, of)
            return Entries(of)

        def step(facts):
            made = walk(body, facts)
            of_several = dict.fromkeys(orders, np.array(SEVERAL))
            return [*(with_orders(fact, of_several) for fact in made[:carried]), *made[carried:]]

        entry = lambda f, number: _shifted(-1)(f) if number is None else Entries(np.full(f.of.shape[1:], number))
        made = steady(step, [*first, *map(entry, arrays, own)], same, carried, join)[1]
        return [*made[:carried], *(with_orders(_shifted(1)(fact), orders) for fact in made[carried:])]

    def walk(program, facts):
        return flow(program, facts, transfer, join, places.of_constant, _shifted(-1), _shifted(1))

    def join(a, b):  # what a loop hands on or a branch returns is mixed if it may be
        a, b = (a, b) if a is b else (places.unsure(a), places.unsure(b))
        if isinstance(a, Entries) and isinstance(b, Entries):
            return Entries(entries.both(a.of, b.of))
        if isinstance(a, Constant) and isinstance(b, Constant):
            return Constant(join(a.fact, b.fact))
        return a if a is b else max(a, b, key=rank)

    order = {type(None): 0, places.Indices: 0.5}
    rank = lambda f: rank(f.fact) - 2 if isinstance(f, Constant) else order.get(type(f), 3)
    walk(program, [None] * len(program.jaxpr.invars))
    return found


# The facts of what an equation makes, by those of its operands that are `Entries`; `facts` say which places.
def _made(eqn, given, facts) -> list[Any]:
    name, outs = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    if not any(given) or name == "any_mapped":
        return [None] * len(outs)
    if name in ("concatenate", "stack"):
        return [entries.from_array(entries.joined(eqn, given))]
    if name in kinds.SAME_VALUE:
        return given[: len(outs)]
    if name == "gather":
        return [entries.from_array(places.gathered(eqn, given, facts))]
    if name == "dynamic_slice":
        return [entries.from_array(places.sliced(eqn, given, facts[1:]))]
    if name in places.WRITES:
        written = places.updated if name == "dynamic_update_slice" else places.scattered
        return [entries.from_array(written(eqn, given, facts))]
    moved = [entries.moved(eqn, n, fact.of) for n, fact in enumerate(given) if fact is not None]
    known = [each for each in moved if each is not None]
    if not known:
        mixed = all(map(entries.is_mixed, given))
        return [Entries(entries.everywhere(SEVERAL, out)) if mixed else None for out in outs]
    return [entries.from_array(functools.reduce(entries.both, each)) for each in zip(*known, strict=True)]
