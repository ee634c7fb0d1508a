"""Samplers for a budget: those with the least added variance that take at most so many bytes.

`allocate` starts with every coefficient exact. As long as the bytes exceed the budget, it gives one coefficient its
next smaller sampler, by the step that adds the least variance for each byte saved. Only samplers on the convex hull of
a coefficient's (bytes, variance) are used: so all steps but the last one are optimal.

Variances are relative to the mean square of an array of normal entries. Rounding has scale^2 / 6, with scale = range /
(2^bits - 1), and the range of n such entries is about .85 times 2 sqrt(2 log n). A narrow type has step^2 / 6, and with
m mantissa bits the mean of step^2 is .54 * 4^-m.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad.memory._packing import Narrow, Rounding, Rounds, narrow
from apgrad.memory._samplers import Sampler, nbytes, rounding, stratified
from apgrad.memory._slots import Coefficient, SlotForm, fitted, kept_bytes

Found = list[tuple[Coefficient, SlotForm]]
LADDER: tuple[Sampler, ...] = (narrow("bfloat16"), *map(rounding, (8, 4, 2, 1)))
LADDER += tuple(stratified(1 / n) for n in (16, 32, 64))


def relative_variance(sampler: Any) -> float:
    if isinstance(sampler, Rounding):
        span = 0.85 * 2 * math.sqrt(2 * math.log(sampler.group))
        if sampler.bits == 1:
            return span**2 / 4 - 1  # E[(high - x) (x - low)]
        return (span / (2**sampler.bits - 1)) ** 2 / 6 if sampler.bits < 32 else 0.0
    if isinstance(sampler, Narrow):
        return 0.54 / 4 ** jnp.finfo(sampler.dtype).nmant / 6
    return 1 / sampler.fraction - 1


def allocate(found: Found, budget_bytes: float, limit: float = math.inf) -> tuple[Any, float, bool]:
    """`(choice of samplers for a budget, bytes of all that is remembered, whether no smaller samplers are left)`."""
    total, steps = 0.0, []
    for coefficient, how in found:
        like = jax.ShapeDtypeStruct(coefficient.shape, coefficient.dtype)
        size = kept_bytes(how, None, like) * coefficient.count
        total += size
        if how != "sampled" or not size:
            continue
        # Samplers of a fraction are for `last` coefficients only, see `through` of `randomize`.
        ladder = [s for s in LADDER if coefficient.last or isinstance(s, Rounds)]
        ladder = [s for s in ladder if relative_variance(s) <= limit]
        points: list[tuple[float, float, Any]] = [(size, 0.0, None)]
        for sampler in ladder:
            need = nbytes(fitted(sampler, coefficient), like) * coefficient.count
            if need < points[-1][0]:
                points.append((need, relative_variance(sampler), sampler))
        steps += [(cost, saved, coefficient.name, sampler) for cost, saved, sampler in _along_the_hull(points)]
    chosen: dict[str, Any] = {}
    steps.sort(key=lambda step: step[0], reverse=True)
    while steps and total > budget_bytes:
        _, saved, name, sampler = steps.pop()
        total -= saved
        chosen[name] = sampler
    return lambda coefficient: chosen.get(coefficient.name), total, not steps


def _along_the_hull(points: Sequence[tuple[float, float, Any]]) -> Iterator[tuple[float, float, Any]]:
    """The steps between points (bytes, variance, sampler) of the hull: variance for a byte, bytes saved, sampler."""
    (most, least, _), *smaller = points
    if smaller:
        costs = [(variance - least) / (most - size) for size, variance, _ in smaller]
        best = max(i for i, cost in enumerate(costs) if cost == min(costs))
        yield costs[best], most - smaller[best][0], smaller[best][2]
        yield from _along_the_hull(smaller[best:])


def added_variance(found: Found, choose: Any) -> float:
    sampled = [(c, choose(c)) for c, how in found if how == "sampled"]
    entries = sum(c.nbytes * c.count for c, _ in sampled)
    return sum(c.nbytes * c.count * relative_variance(s) for c, s in sampled if s is not None) / max(entries, 1)
