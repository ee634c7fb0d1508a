"""What reverse mode remembers: the arrays that `jax.vjp` leaves behind, without the arguments and their views.

They are found in the program of `jax.vjp`: what makes each, on which line, and what in the reverse pass takes it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.kinds import LINEAR_IN_EACH, SAME_VALUE
from apgrad.memory._budget import relative_variance
from apgrad.memory._randomize import shapes_in
from apgrad.memory._recompute import work as work_of
from apgrad.memory._samplers import array_bytes, nbytes, rounding, stratified
from apgrad.memory._slots import is_view

__all__ = ["Residual", "residuals"]


class Residual(NamedTuple):
    """An array that the reverse pass remembers.

    Attributes:
      name: its scopes and the primitive that computes it.
      shape: of all steps, if a scan's body computes it.
      nbytes: the bytes of all steps.
      source: the user's line that computes it.
      count: how many steps there are.
      consumers: the scopes and primitives of the reverse pass that take it.
      linear: whether all these are linear in it, so that it may be rounded or sampled without bias.
      work: about how many operations compute it again from what else is remembered.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    source: str = ""
    count: int = 1
    consumers: tuple[str, ...] = ()
    linear: bool = False
    work: float = 0.0

    def remedies(self) -> dict[str, tuple[int, str]]:
        """What each remedy would save of the bytes, and what it costs, predicted without compiling.

        The compiled peak may fall by less, see `ap.memory.plan`. Variances are over mean squares, for normal entries.
        """
        found = {"recompute": (self.nbytes, f"{self.work:.2g} operations")}
        if self.linear and self.shape and jnp.issubdtype(self.dtype, jnp.floating):
            for name, sampler in _REMEDIES.items():
                saved = self.nbytes - nbytes(sampler, self)
                if saved > 0:
                    found[name] = saved, f"variance {relative_variance(sampler):.2g}"
        return found | {"offload": (self.nbytes, f"{2 * self.nbytes} bytes moved")}


_REMEDIES = {"round to 8 bits": rounding(8), "round to 4 bits": rounding(4), "sample a tenth": stratified(0.1)}


def residuals(function: Callable[..., Any], *args: Any) -> tuple[Residual, ...]:
    """What reverse mode of `function(*args)` remembers on the device, for all its floating-point arguments.

    Args:
      function: any JAX function.
      *args: pytrees of arrays, keys or `jax.ShapeDtypeStruct`s.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> [(r.shape, r.nbytes) for r in ap.memory.residuals(lambda x: jnp.sum(jnp.sin(x) * 2), jnp.ones((3, 5)))]
      [((3, 5), 60)]
    """
    flat, inexact, put = shapes_in(args)

    def linearize(*values):
        with_messages = lambda *values: [x for x in jax.tree.leaves(function(*put(*values))) if jaxprs.is_inexact(x)]
        restricted, some = jaxprs.restrict(with_messages, values, inexact)
        return jax.vjp(restricted, *some)

    traced, (outputs, pullback) = jaxprs.trace(linearize, *flat)
    leaves, tree = jax.tree.flatten(pullback)
    back = jaxprs.inlined(lambda leaves, messages: tree.unflatten(leaves)(messages), leaves, outputs)
    jaxpr = jaxprs.inlined(lambda *values: jaxprs.inline(traced, values)[len(outputs) :], *flat).jaxpr
    free = {*jaxpr.invars, *jaxpr.constvars}
    index = functools.cache(_Index)  # a program may stand in several equations

    found = {}
    for v, taken in zip(jaxpr.outvars, back.jaxpr.invars, strict=False):
        origin = _origin(v, index(jaxpr))
        host = v.aval.memory_space == jax.memory.Space.Host  # where a checkpoint policy has moved it
        if host or isinstance(origin, Literal) or origin in free or v in found or origin in found:
            continue
        keep = min(origin, v, key=lambda v: array_bytes(v.aval))
        name, line, count, work = _maker_of(keep, jaxpr, index)
        users = _consumers(back.jaxpr, taken, index)
        linear = all(is_linear for _, is_linear in users)
        names, aval = tuple(dict.fromkeys(name for name, _ in users)), keep.aval
        found[keep] = Residual(name, aval.shape, aval.dtype, array_bytes(aval), line, count, names, linear, work)
    return tuple(found.values())


class _Index:
    """For each variable of a jaxpr, what makes it and what takes it: found in one pass, however many are asked for."""

    def __init__(self, jaxpr: Any):
        self.maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.takers: dict[Any, list[tuple[Any, int]]] = {}
        self.needs: dict[Any, int] = {}  # the equations that compute a variable again from the outputs, as a bit set
        kept = set(jaxprs.variables(jaxpr.outvars))
        for number, eqn in enumerate(jaxpr.eqns):
            bits = 1 << number
            for i, v in enumerate(eqn.invars):
                if not isinstance(v, Literal):
                    self.takers.setdefault(v, []).append((eqn, i))
                    bits |= self.needs.get(v, 0) if v not in kept else 0
            self.needs |= dict.fromkeys(eqn.outvars, bits)
        self.costs = np.array(list(map(work_of, jaxpr.eqns)))

    def work(self, var: Any) -> float:
        octets = np.frombuffer(self.needs[var].to_bytes(len(self.costs) // 8 + 1, "little"), np.uint8)
        return float(self.costs @ np.unpackbits(octets, count=len(self.costs), bitorder="little"))


def _origin(v: Any, index: _Index) -> Any:
    while not isinstance(v, Literal) and v in index.maker and _same(eqn := index.maker[v]):
        v = eqn.invars[eqn.outvars.index(v)]
    return v


def _consumers(jaxpr: Any, var: Any, index: Callable[[Any], _Index]) -> list[tuple[str, bool]]:
    """The equations that take a variable or a view of it, in programs inside too, and whether they are linear in it."""
    found = []
    for eqn, i in index(jaxpr).takers.get(var, ()):
        here, inside = jaxprs.plain_scope(jaxprs.scope(eqn)), jaxprs.nested(eqn)
        if inside is not None and inside.kind in ("call", "cond", "remat", "scan"):
            at = i - (inside.kind == "cond")
            inner = [_consumers(p.jaxpr, p.jaxpr.invars[at], index) for p in inside.jaxprs if at >= 0]
            found += [(jaxprs.join(here, name), flag) for users in inner for name, flag in users]
        elif _same(eqn):
            found += _consumers(jaxpr, eqn.outvars[eqn.invars.index(var)], index)
        else:
            name = eqn.primitive.name
            found.append((jaxprs.join(here, name), name in LINEAR_IN_EACH))
    return found


def _maker_of(var: Any, jaxpr: Any, index: Callable[[Any], _Index]) -> tuple[str, str, int, float]:
    """Of a variable: scopes and primitive, line, steps, work; in a program inside, those of what makes it."""
    eqn = index(jaxpr).maker[var]
    inside, here = jaxprs.nested(eqn), jaxprs.plain_scope(jaxprs.scope(eqn))
    steps, work = 1, index(jaxpr).work(var)
    if inside is not None and inside.kind in ("call", "cond", "remat", "scan"):
        number, work = eqn.outvars.index(var), work_of(eqn)
        steps = inside.length if inside.kind == "scan" and number >= inside.counts[1] else 1
        for program in inside.jaxprs:
            # In place of an array that only another branch makes, a branch has zeros.
            v = _origin(program.jaxpr.outvars[number], index(program.jaxpr))
            if not isinstance(v, Literal) and v in index(program.jaxpr).maker:
                name, line, count, work = _maker_of(v, program.jaxpr, index)
                return jaxprs.join(here, name), line, steps * count, steps * work
    return jaxprs.join(here, eqn.primitive.name), jaxprs.source_line(eqn), steps, steps * work


def _same(eqn: Any) -> bool:
    return is_view(eqn) or eqn.primitive.name in SAME_VALUE
