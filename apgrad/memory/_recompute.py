"""Which arrays stay in memory when all others are computed again, exactly, in the reverse pass.

A choice is a set of variables that may be remembered; all else is computed again when its message is there. A choice
costs the bytes that stay, the bytes beyond these at the worst moment, and the work done again. Candidates:

* the products (matrix products, convolutions) that take more than some work for a byte, and with them the variables
  that cross a few cuts, which divide the rest into groups of about equal bytes at places where few bytes cross (Chen,
  Xu, Zhang & Guestrin, "Training deep nets with sublinear memory cost", 2016);
* all coefficients but the n that take least work for a byte, for several n, 0 too;
* in short programs all sets of fewer than six of the six largest coefficients.

Choices that are no better than another in any of the three costs are left out.
"""

import collections
import functools
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from apgrad._programs import jaxprs
from apgrad._programs.kinds import PRODUCT, VIEW, WITHIN_ELEMENTWISE
from apgrad.memory._memory_plan import MemoryPlan
from apgrad.memory._passes import gradients_first, step_inputs
from apgrad.memory._slots import is_control_flow, is_mask, kept_bytes

_GROUPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_FEW, _SHORT = 6, 200  # all sets of so many arrays are candidates in programs of at most so many equations
_FUSED = WITHIN_ELEMENTWISE | VIEW
_PRICES, _MOST, _SMALL, _ELEMENT = 6, 200, 16, 10  # an element's work is that of five multiplications


class Kept(NamedTuple):
    """A choice and its costs: `stays` are numbers of variables by scope; other scopes remember their coefficients."""

    kept: float
    transient: float
    work: float
    stays: Mapping[str, frozenset[int]]
    forward: float = 0.0  # the work of the forward pass

    @property
    def nbytes(self) -> float:
        return self.kept + self.transient

    def beside(self, other: "Kept") -> "Kept":
        sums = self.kept + other.kept, max(self.transient, other.transient), self.work + other.work
        return Kept(*sums, {**self.stays, **other.stays}, self.forward + other.forward)


def work(eqn: Any) -> float:
    size = sum(v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
    if eqn.primitive.name == "dot_general":
        lhs = eqn.invars[0].aval.shape
        return 2.0 * size * math.prod(lhs[i] for i in jaxprs.Parameters(eqn)["dimension_numbers"][0][0])
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        return 2.0 * size * kernel.size / kernel.shape[jaxprs.Parameters(eqn)["dimension_numbers"].rhs_spec[0]]
    return float(_ELEMENT * size)


def choices(plans: Mapping[str, MemoryPlan]) -> list[Kept]:
    """What can stay in all stretches of a function together; the first choice remembers every coefficient."""
    found = [Kept(0.0, 0.0, 0.0, {})]
    for where, plan in plans.items():
        if plan.slots and plan.slots[0].coefficient.count:
            mine = _Stretch(where, plan).choices()
            found = _undominated([a.beside(b) for a, b in itertools.product(found, mine)])
    return found


def _undominated(found: list[Kept]) -> list[Kept]:
    best: list[Kept] = []
    for c in sorted(found, key=lambda c: (c.work, c.nbytes)):
        if not any(b.kept <= c.kept and b.transient <= c.transient for b in best):
            best.append(c)
    step = max(1, math.ceil(len(best) / _MOST))
    return best[::step] if best[-1] in best[::step] else [*best[::step], min(best, key=lambda c: c.nbytes)]


class _Stretch:
    def __init__(self, where: str, plan: MemoryPlan):
        self.where, self.plan, jaxpr = where, plan, plan.forward.jaxpr
        self.bytes = functools.cache(_bytes)
        self.taken = {id(eqn): jaxprs.variables(eqn.invars) for eqn in jaxpr.eqns}
        self.count = plan.slots[0].coefficient.count
        self.number = {v: i for i, v in enumerate(v for eqn in jaxpr.eqns for v in eqn.outvars)}
        maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        # These cost nothing: what somebody else keeps, and what a scan has packed, which the scan's stretch counts.
        self.free = {*jaxpr.constvars, *(slot.var for slot in plan.slots if slot.how in ("live", "nested"))}
        self.wanted = [slot.var for slot in plan.slots if slot.how != "live"]
        self.coefficients = set(self.wanted)
        self.outputs, self.gradients = jaxpr.outvars[: plan.outputs], jaxprs.variables(plan.pullback.jaxpr.outvars)
        self.steps = [
            (
                step.eqn.primitive.name,
                step.eqn.outvars,
                jaxprs.variables(v for i, v in enumerate(step_inputs(step)) if i not in step.uses),
                [plan.slots[slot].var for use in step.uses.values() for slot in use.slots.values()],
            )
            for step in gradients_first(plan.steps)
        ]
        largest = max((self.bytes(v, False) for v in self.wanted), default=0)
        # Control flow and callbacks with effects are never run again.
        once = {v for v, eqn in maker.items() if is_control_flow(eqn) or eqn.effects}
        self.always = {*jaxpr.invars, *jaxpr.constvars, *once}
        # What is small beside the largest array stays; in a scan, which keeps it for all steps, it need not.
        small = {v for v in maker if self.bytes(v, False) * _SMALL <= largest}
        self.bases = [small] if self.count == 1 else [small, set()]

    def choices(self) -> list[Kept]:
        forward = sum(map(work, self.plan.forward.jaxpr.eqns)) * self.count
        kept = self.count * sum(self.bytes(v, True) for v in self.coefficients - self.free)
        every = Kept(float(kept), 0.0, 0.0, {}, forward)
        candidates = [stays for base in self.bases for stays in self._candidates(base)]
        return _undominated([every, *map(self._choice, dict.fromkeys(map(frozenset, candidates)))])

    def _candidates(self, base: set[Any]) -> list[set[Any]]:
        eqns = self._missing(base)
        density = {v: work(e) / max(self.bytes(v, False), 1) for e in eqns for v in e.outvars}
        products = [v for e in eqns if e.primitive.name in PRODUCT for v in e.outvars]
        prices = sorted({density[v] for v in products}, reverse=True)
        prices = [math.inf, *prices[:: max(1, math.ceil(len(prices) / _PRICES))]]
        candidates = []
        for price in prices:
            dear = base | {v for v in products if density[v] >= price}
            candidates += [dear | self._cut(dear, groups) for groups in _GROUPS if groups <= len(self.wanted)]
        spread = {v: int(f"{i:012b}"[::-1], 2) for i, v in enumerate(self.wanted)}  # neighbours come far apart
        cheap = sorted(self.wanted, key=lambda v: (density.get(v, math.inf), spread[v]))
        candidates += [base.union(cheap[i:]) for i in range(0, len(cheap), max(1, len(cheap) // 32))]
        few = sorted(self.wanted, key=lambda v: -self.bytes(v, False))[:_FEW]
        if len(eqns) <= _SHORT:
            candidates += [base.union(s) for n in range(len(few)) for s in itertools.combinations(few, n)]
        return candidates

    def _missing(self, stays: Collection[Any]) -> list[Any]:
        return jaxprs.needed(self.plan.forward.jaxpr.eqns, self.wanted, {*stays, *self.always})

    def _cut(self, stays: set[Any], groups: int) -> set[Any]:
        """The variables that cross `groups - 1` cuts of what is computed again."""
        eqns = self._missing(stays)
        sizes = [sum(self.bytes(v, False) for v in eqn.outvars if v in self.coefficients) for eqn in eqns]
        total = list(itertools.accumulate(sizes))
        last: dict[Any, int] = {}
        for i, eqn in enumerate(eqns):
            last |= dict.fromkeys(jaxprs.variables(eqn.invars), i)
        changes = [0] * (len(eqns) + 1)
        for i, eqn in enumerate(eqns):
            for v in eqn.outvars:
                changes[i] += self.bytes(v, False)
                changes[last.get(v, i)] -= self.bytes(v, False)
        across = list(itertools.accumulate(changes))
        found: set[Any] = set()
        for j in range(1, groups if eqns else 1):
            goal, width = total[-1] * j / groups, total[-1] / (2 * groups)
            near = [i for i, t in enumerate(total) if abs(t - goal) <= width]
            if near:
                at = min(near, key=lambda i: (across[i], abs(total[i] - goal)))
                found |= {v for eqn in eqns[: at + 1] for v in eqn.outvars if last.get(v, -1) > at}
        return found

    def _choice(self, stays: Collection[Any]) -> Kept:
        eqns, known = self._missing(stays), {*stays, *self.always}
        first: dict[Any, int] = {}  # of a variable, the first step that it is computed again for
        for i, (_, _, _, wanted) in enumerate(self.steps):
            for v in wanted:
                first.setdefault(v, i)
        before: list[list[Any]] = [[] for _ in self.steps]
        for eqn in reversed(eqns):
            at = min(first[v] for v in eqn.outvars if v in first)
            before[at].append(eqn)
            first |= {v: min(at, first.get(v, at)) for v in self.taken[id(eqn)]}
        backward = []
        for (name, made, messages, wanted), missing in zip(self.steps, before, strict=True):
            for eqn in reversed(missing):
                backward.append(_Run(eqn.primitive.name, _again(eqn.outvars), _again(self.taken[id(eqn)], known)))
            backward.append(_Run(name, _again(made), _again(messages) + _again(wanted, known)))
        stay = {v for run in backward for again, v in run.taken if not again and v not in self.free}
        kept = sum(self.bytes(v, True) for v in stay)
        needed = jaxprs.needed(self.plan.forward.jaxpr.eqns, [*self.outputs, *stay])
        forward = [_Run(eqn.primitive.name, _first(eqn.outvars), _first(self.taken[id(eqn)])) for eqn in needed]
        return Kept(
            float(kept) * self.count,
            float(self._peak(forward, backward, stay) - (kept if self.count == 1 else 0)),
            sum(map(work, eqns)) * self.count,
            {self.where: frozenset(self.number[v] for v in (*stays, *self.always) if v in self.number)},
        )

    def _peak(self, forward: list["_Run"], backward: list["_Run"], stay: Collection[Any]) -> int:
        """The most bytes that arrays have at any moment of the two passes."""
        runs = forward + backward
        lasting = {*_first(stay), *(v for run in runs if run.name in PRODUCT for v in run.taken)}
        # The memory of a scan's step is there as long as the scan is, and gradients are no scratch memory.
        free = {*_first(self.free), *_again(self.gradients), *(_first(stay) if self.count != 1 else ())}
        size = lambda v: self.bytes(v[1], not v[0] and v[1] in stay)
        roots: dict[Any, frozenset[Any]] = {}  # the arrays that a use of a variable reads
        end: dict[Any, int] = {}
        uses: collections.Counter[Any] = collections.Counter()
        for i, run in enumerate(runs):
            inputs = frozenset().union(*(roots.get(v, ()) for v in run.taken))
            cost = sum(map(size, inputs))
            for v in run.made:
                # A compiler fuses a cheap operation into its uses, unless its output is smaller than its inputs.
                own = v in lasting or run.name not in _FUSED or size(v) < cost
                roots[v] = frozenset() if v in free else frozenset([v]) if own else inputs
            uses.update(inputs)
            end |= dict.fromkeys(inputs.union(*(roots[v] for v in run.made)), i)
        ends: list[list[Any]] = [[] for _ in runs]
        for v, i in end.items():
            ends[i].append(v)
        live = peak = 0
        for i, run in enumerate(runs):
            more = sum(size(v) for v in run.made if v in roots[v])
            less = sum(map(size, ends[i]))
            # Elementwise operations write into an input that is not needed again, products do not; and a convolution of
            # the backward pass sums over other axes, for which its operands are transposed.
            beside = more if run.name in PRODUCT else max(more - sum(size(v) for v in ends[i] if uses[v] == 1), 0)
            if run.name == "conv_general_dilated" and i >= len(forward):
                beside += sum(map(size, run.taken))
            peak = max(peak, live + beside)
            live += more - less
        return peak


class _Run(NamedTuple):
    """An operation on arrays; an array is a pair `(whether it belongs to the backward pass, its variable)`."""

    name: str
    made: list[tuple[bool, Any]]
    taken: list[tuple[bool, Any]]


def _first(variables: Collection[Any]) -> list[tuple[bool, Any]]:
    return [(False, v) for v in variables]


def _again(variables: Collection[Any], known: Collection[Any] = ()) -> list[tuple[bool, Any]]:
    return [(v not in known, v) for v in variables]


def _bytes(var: Any, kept: bool) -> int:
    return kept_bytes("bits" if kept and is_mask(var) else "exact", None, var.aval)
