"""Which arrays stay in memory when all others are computed again, exactly, in the reverse pass.

A choice is a set of variables that may be remembered; every other coefficient is computed from these when its message
is there. Its costs are the bytes that stay, those of the largest group of variables that are computed together, and
the work of computing them. Candidates are

* the products (matrix products, convolutions) that take most work for a byte, for each number of them, and with them
  the variables that cross a few cuts, which divide the rest into groups of about equal bytes at places where few bytes
  cross (Chen, Xu, Zhang & Guestrin, "Training deep nets with sublinear memory cost", 2016);
* all coefficients but those that take least work for a byte, for each number of these;
* in short programs all sets of the six largest coefficients.

Choices that are no better than another in any of the three are left out.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from apgrad._programs import jaxprs
from apgrad._programs.kinds import PRODUCT
from apgrad.memory._plan import MemoryPlan
from apgrad.memory._samplers import array_bytes

_GROUPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_FEW, _SHORT = 6, 200  # of how many arrays all sets are candidates, in a program of so many equations
_PRICES, _MOST, _SMALL, _ELEMENT = 6, 200, 16, 10  # an element's work is that of five multiplications


class Choice(NamedTuple):
    """What stays, by scope: numbers of variables; a scope that is not there remembers its coefficients."""

    kept: float
    transient: float
    work: float
    stays: Mapping[str, frozenset[int]]
    forward: float = 0.0  # the work of the forward pass

    @property
    def nbytes(self) -> float:
        return self.kept + self.transient


def work(eqn: Any) -> float:
    size = sum(v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
    if eqn.primitive.name == "dot_general":
        lhs = eqn.invars[0].aval.shape
        return 2.0 * size * math.prod(lhs[i] for i in jaxprs.Parameters(eqn)["dimension_numbers"][0][0])
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        return 2.0 * size * kernel.size / kernel.shape[jaxprs.Parameters(eqn)["dimension_numbers"].rhs_spec[0]]
    return float(_ELEMENT * size)


def choices(plans: Sequence[tuple[str, MemoryPlan]]) -> list[Choice]:
    """What can stay in all stretches of a function together; the first choice remembers every coefficient."""
    found = [Choice(0.0, 0.0, 0.0, {})]
    for where, plan in dict(plans).items():
        mine = _Stretch(where, plan).choices() if plan.slots and plan.slots[0].coefficient.count else []
        if mine:
            both = [
                Choice(
                    a.kept + b.kept,
                    max(a.transient, b.transient),
                    a.work + b.work,
                    {**a.stays, **b.stays},
                    a.forward + b.forward,
                )
                for a, b in itertools.product(found, mine)
            ]
            found = _undominated(both)
    return found


def _undominated(found: list[Choice]) -> list[Choice]:
    best: list[Choice] = []
    for c in sorted(found, key=lambda c: (c.work, c.nbytes)):
        if not any(b.kept <= c.kept and b.transient <= c.transient for b in best):
            best.append(c)
    step = max(1, math.ceil(len(best) / _MOST))
    return best[::step] if best[-1] in best[::step] else [*best[::step], min(best, key=lambda c: c.nbytes)]


class _Stretch:
    """A stretch's forward program, with what its coefficients are made of."""

    def __init__(self, where: str, plan: MemoryPlan):
        self.where, self.plan, jaxpr = where, plan, plan.forward.jaxpr
        self.count = plan.slots[0].coefficient.count
        self.number = {v: i for i, v in enumerate(v for eqn in jaxpr.eqns for v in eqn.outvars)}
        self.maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        live = {slot.var for slot in plan.slots if slot.how == "live"}
        self.free = {*jaxpr.constvars, *live}
        self.inputs = {*jaxpr.invars, *jaxpr.constvars}
        self.wanted = [slot.var for slot in plan.slots if slot.how != "live"]
        self.coefficients = set(self.wanted)
        largest = max((array_bytes(v.aval) for v in self.wanted), default=0)
        # Control flow is never run again; what is small beside the largest array stays.
        self.always = {
            v for v, e in self.maker.items() if array_bytes(v.aval) * _SMALL <= largest or _is_control_flow(e)
        }

    def choices(self) -> list[Choice]:
        """The candidates, of which the first remembers every coefficient."""
        forward = sum(map(work, self.plan.forward.jaxpr.eqns)) * self.count
        every = Choice(float(sum(slot.nbytes for slot in self.plan.slots)) * self.count, 0.0, 0.0, {}, forward)
        eqns = jaxprs.needed(self.plan.forward.jaxpr.eqns, self.wanted, self.always | self.inputs)
        density = {v: work(e) / max(array_bytes(v.aval), 1) for e in eqns for v in e.outvars}
        products = [v for e in eqns if e.primitive.name in PRODUCT for v in e.outvars]
        prices = sorted({density[v] for v in products}, reverse=True)
        prices = [math.inf, *prices[:: max(1, math.ceil(len(prices) / _PRICES))]]
        found = [every]
        for price in prices:
            dear = {v for v in products if density[v] >= price}
            for groups in _GROUPS:
                if groups > len(self.wanted):
                    break
                found.append(self._choice(dear | self._cut(dear, groups)))
        spread = {v: int(f"{i:012b}"[::-1], 2) for i, v in enumerate(self.wanted)}  # neighbours far apart
        cheap = sorted(self.wanted, key=lambda v: (density.get(v, math.inf), spread[v]))
        found += [self._choice(set(cheap[i:])) for i in range(1, len(cheap), max(1, len(cheap) // 32))]
        few = sorted(self.wanted, key=lambda v: -array_bytes(v.aval))[:_FEW]
        if len(eqns) <= _SHORT:
            found += [self._choice(set(s)) for n in range(len(few)) for s in itertools.combinations(few, n)]
        return _undominated(found)

    def _again(self, stays: Collection[Any]) -> list[Any]:
        return jaxprs.needed(self.plan.forward.jaxpr.eqns, self.wanted, {*stays, *self.always, *self.inputs})

    def _bytes(self, eqn: Any) -> int:
        """The bytes of an equation's outputs that wait for their message: of coefficients."""
        return sum(array_bytes(v.aval) for v in eqn.outvars if v in self.coefficients)

    def _cut(self, stays: set[Any], groups: int) -> set[Any]:
        """The variables that cross `groups - 1` cuts of what is computed again."""
        eqns = self._again(stays)
        total = list(itertools.accumulate(map(self._bytes, eqns)))
        last: dict[Any, int] = {}
        for i, eqn in enumerate(eqns):
            last |= dict.fromkeys(jaxprs.variables(eqn.invars), i)
        changes = [0] * (len(eqns) + 1)
        for i, eqn in enumerate(eqns):
            for v in eqn.outvars:
                changes[i] += array_bytes(v.aval)
                changes[last.get(v, i)] -= array_bytes(v.aval)
        across = list(itertools.accumulate(changes))
        found: set[Any] = set()
        for j in range(1, groups if eqns else 1):
            goal, width = total[-1] * j / groups, total[-1] / (2 * groups)
            near = [i for i, t in enumerate(total) if abs(t - goal) <= width]
            if near:
                at = min(near, key=lambda i: (across[i], abs(total[i] - goal)))
                found |= {v for eqn in eqns[: at + 1] for v in eqn.outvars if last.get(v, -1) > at}
        return found

    def _choice(self, stays: set[Any]) -> Choice:
        eqns = self._again(stays)
        made = {v for eqn in eqns for v in eqn.outvars}
        taken = {v for eqn in eqns for v in jaxprs.variables(eqn.invars)} | set(self.wanted)
        kept = sum(array_bytes(v.aval) for v in taken if v not in made and v not in self.free)
        group: dict[Any, int] = {}  # of a variable, a group of variables that are computed together
        size: dict[int, int] = {}
        joined = list(range(len(eqns)))  # the group that a group has become part of

        def root(g):
            while joined[g] != g:
                joined[g] = joined[joined[g]]
                g = joined[g]
            return g

        for number, eqn in enumerate(eqns):
            size[number] = self._bytes(eqn)
            for old in {root(group[v]) for v in jaxprs.variables(eqn.invars) if v in group}:
                size[number] += size.pop(old)
                joined[old] = number
            group |= dict.fromkeys(eqn.outvars, number)
        numbers = frozenset(self.number[v] for v in (*stays, *self.always) if v in self.number)
        return Choice(
            float(kept) * self.count,
            float(max(size.values(), default=0)),
            sum(map(work, eqns)) * self.count,
            {self.where: numbers},
        )


def _is_control_flow(eqn: Any) -> bool:
    inside = jaxprs.nested(eqn)
    return inside is not None and inside.kind not in ("call", "custom")
