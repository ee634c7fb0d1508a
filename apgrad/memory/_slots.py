"""In which form a coefficient is remembered, and how it is made again from slots, one for each array to remember."""

import dataclasses
import functools
import typing
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.kinds import CHEAP_TO_REPEAT, VIEW
from apgrad.memory._packing import Packing, Rounds
from apgrad.memory._samplers import Sampler, array_bytes, kept, nbytes, restored

SlotForm = typing.Literal["live", "exact", "bits", "sampled", "nested"]
_DEEPEST, _SMALL = 64, 16


def is_view(eqn: Any) -> bool:
    """Whether an equation is linear in its first input and rounds none of its values, which would be a bias."""
    if eqn.primitive.name != "convert_element_type":
        return eqn.primitive.name in VIEW
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
        return False
    a, b = jnp.finfo(old), jnp.finfo(new)
    return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp


def is_mask(var: Any) -> bool:
    return var.aval.dtype == jnp.bool_ and var.aval.size >= 1024


def is_control_flow(eqn: Any) -> bool:
    """Whether an equation runs programs of its own, and what it gives to the backward pass is packed already."""
    inside = jaxprs.nested(eqn)
    return inside is not None and inside.kind not in ("call", "custom")


class Coefficient(NamedTuple):
    """An array that a reverse pass remembers, as `apgrad.randomize` shows it to a choice of samplers.

    Attributes:
      name: the named scopes around the coefficient, its `checkpoint_name` if it has one, the primitive that uses it and
        a number; unique in the program. Of an input of a checkpointed block it ends in "inputs[number]".
      count: how often an array is remembered here: the product of the lengths of the scans around it.
      nbytes: the bytes of one array.
      last: whether the coefficient's messages go to arguments only, and meet no other sampled coefficient. An input in
        the gradient of a weight is such a coefficient: much noise there does no harm to other gradients.
      order: for an image that a convolution takes, its axes as (example, positions ..., channels); else None. Samplers
        draw positions of an image, each with all its channels (Fig. 4 of the RAD paper).
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    count: int
    nbytes: int
    last: bool
    order: tuple[int, ...] | None = None


class CoefficientUse(NamedTuple):
    """A coefficient that a backward equation takes, and the memory that it is made of."""

    var: Any
    slots: dict[Any, int]  # the numbers of the slots that are needed, by their arrays
    eqns: list[Any]  # the equations that make the coefficient of these arrays
    again: bool = False  # whether what the equations compute stays for other coefficients


class Slot(NamedTuple):
    var: Any
    how: SlotForm  # "live": somebody else keeps it; "bits": of a Boolean array; "nested": a scan or cond has packed it
    sampler: Any
    coefficient: Coefficient

    @property
    def nbytes(self) -> int:
        return kept_bytes(self.how, self.sampler, self.var.aval)


class SlotMaker:
    """Chooses how coefficients of a forward program are remembered, and numbers the slots."""

    def __init__(
        self,
        forward: jaxprs.Program,
        live: Sequence[bool],  # of each input, whether somebody else keeps it
        own: Collection[Any],  # the coefficients of equations without programs inside
        choose: Any,
        where: str,  # the scope around the program
        count: int,  # how often it runs
        stays: Collection[int] | None = None,  # numbers of the variables from which all others are computed again
    ):
        jaxpr = forward.jaxpr
        self.live = {v for v, flag in zip(jaxpr.invars, live, strict=True) if flag} | set(jaxpr.constvars)
        self.eqns, self.maker = jaxpr.eqns, {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.choose, self.where, self.count = choose, where, count
        self.slots: list[Slot] = []
        self.samplers: dict[Any, Any] = {}
        self.shared: dict[Any, dict[int, int]] = {}
        self.exact: dict[Any, int] = {}
        self.bytes = functools.cache(lambda v: kept_bytes(self._how(v), None, v.aval))  # of what is kept exactly
        self._leaves = functools.cache(self._cheapest)
        self.largest = max((array_bytes(v.aval) for v in own if self.is_large(v)), default=0)
        made = (v for eqn in self.eqns for v in eqn.outvars)
        self.stays = None if stays is None else {v for i, v in enumerate(made) if i in stays}

    def is_large(self, var: Any) -> bool:
        """Whether a floating-point array costs more than a quarter of its bytes unless it is sampled."""
        if isinstance(var, Literal) or not jnp.issubdtype(var.aval.dtype, jnp.floating):
            return False
        return self._leaves(var)[0] * 4 > array_bytes(var.aval)

    def use(
        self, var: Any, linear: bool, last: bool, ancestors: int, step: int, name: str, eqn: Any, number: int
    ) -> CoefficientUse:
        """Opens slots for a coefficient, or finds open ones.

        The backward equation `eqn`, at this step, takes it as the input of this number, after the steps in the bit set
        `ancestors`. It may be `linear` in the coefficient, and `last`: its messages go to arguments only.
        """
        if isinstance(var, Literal):
            return CoefficientUse(var, {}, [])
        if self.stays is not None:
            eqns = jaxprs.needed(self.eqns, [var], self.stays)
            inside = {v for e in eqns for v in e.outvars}
            needed = [v for e in eqns for v in jaxprs.variables(e.invars)] or [var]
            return CoefficientUse(var, {v: self._exact(v) for v in needed if v not in inside}, eqns, again=bool(eqns))
        (cost, leaves), source = self._leaves(var), self._source(var)
        order = _image_order(eqn, number) if source.aval.shape == var.aval.shape else None
        size = array_bytes(source.aval)
        may = linear and jnp.issubdtype(source.aval.dtype, jnp.floating) and cost * 4 > size
        # Noise here reaches all messages that follow. A cross-entropy's messages p - y shrink as a network learns, and
        # the noise of a rounded p does not: so what is small beside the largest coefficient is kept exactly.
        may = may and (last or _SMALL * size > self.largest)
        found = self._sampler(source, last, name, eqn, order) if may else None
        if found is None or found[0] is None:
            return CoefficientUse(var, {v: self._exact(v) for v in leaves}, jaxprs.needed(self.eqns, [var], leaves))
        drawn = self.shared.setdefault((source, found[0]), {})  # for each slot the steps that take it, as a bit set
        slot = next((slot for slot, used in drawn.items() if not used & ancestors), len(self.slots))
        if slot == len(self.slots):
            self.slots.append(Slot(source, "sampled", *found))
        drawn[slot] = drawn.get(slot, 0) | (1 << step)
        return CoefficientUse(var, {source: slot}, jaxprs.needed(self.eqns, [var], [source]))

    def _sampler(self, var: Any, last: bool, name: str, eqn: Any, order: Any) -> tuple[Any, Coefficient]:
        index = (var, last, order)
        if index not in self.samplers:
            maker = self.maker.get(var)
            given = jaxprs.Parameters(maker)["name"] if maker is not None and maker.primitive.name == "name" else ""
            label = jaxprs.join(self.where, jaxprs.plain_scope(jaxprs.scope(eqn)), given, name)
            found = self._coefficient(f"{label}[{len(self.samplers)}]", var, last, order)
            self.samplers[index] = (fitted(self.choose(found), found), found)
        return self.samplers[index]

    def _coefficient(self, name, var, last=False, order=None) -> Coefficient:
        return Coefficient(name, var.aval.shape, var.aval.dtype, self.count, array_bytes(var.aval), last, order)

    def _source(self, var: Any) -> Any:
        """The smallest array that a coefficient is a view of."""
        chain = [var]
        while chain[-1] in self.maker and is_view(self.maker[chain[-1]]):
            if isinstance(before := self.maker[chain[-1]].invars[0], Literal):
                break
            chain.append(before)
        return min(chain, key=lambda v: array_bytes(v.aval))

    def _cheapest(self, var: Any) -> tuple[float, list[Any]]:
        """The cheapest set of arrays to remember exactly, to compute a variable again from: (bytes, variables)."""
        seen: dict[Any, tuple[float, list[Any]]] = {}
        visited = 0

        def visit(v):
            nonlocal visited
            if v in seen:
                return seen[v]
            best = (self.bytes(v), [v])
            eqn = self.maker.get(v)
            if best[0] and eqn is not None and eqn.primitive.name in CHEAP_TO_REPEAT and visited < _DEEPEST:
                visited += 1
                parts = list(dict.fromkeys(leaf for u in jaxprs.variables(eqn.invars) for leaf in visit(u)[1]))
                cost = sum(map(self.bytes, parts))
                if cost < best[0]:
                    best = (cost, parts)
            seen[v] = best
            return best

        return visit(var)

    def _exact(self, var: Any) -> int:
        if var not in self.exact:
            self.exact[var] = len(self.slots)
            self.slots.append(Slot(var, self._how(var), None, self._coefficient("", var)))
        return self.exact[var]

    def _how(self, var: Any) -> SlotForm:
        if var in self.live:
            return "live"
        if is_mask(var):
            return "bits"
        return "nested" if var in self.maker and is_control_flow(self.maker[var]) else "exact"


def kept_bytes(how: SlotForm, sampler: Any, like: Any) -> int:
    if how == "live":
        return 0
    if how == "bits":
        return -(-like.size // 8)
    return array_bytes(like) if sampler is None else nbytes(sampler, like)


def fitted(sampler: Any, coefficient: Coefficient) -> Any:
    """The sampler in the form in which it remembers a coefficient: positions of an image, entries of other arrays."""
    if coefficient.order is None or sampler is None or isinstance(sampler, Rounds | Packing):
        return sampler
    return OfPositions(sampler, coefficient.order)


@dataclasses.dataclass(frozen=True)
class OfPositions:
    """A sampler of an image's positions, each with all its channels (Fig. 4 of the RAD paper)."""

    sampler: Sampler
    order: tuple[int, ...]  # the image's axes as (example, positions ..., channels)

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Any:
        return kept(self.sampler, key, self._rows(x), 1)

    def restore(self, key: jax.Array, memory: Any, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        rows = restored(self.sampler, key, memory, jax.eval_shape(self._rows, like), 1)
        ordered = rows.reshape([like.shape[i] for i in self.order])
        return jnp.transpose(ordered, [self.order.index(i) for i in range(len(self.order))])

    def _rows(self, x: jax.Array) -> jax.Array:
        ordered = jnp.transpose(x, self.order)
        return ordered.reshape(ordered.shape[0], -1, ordered.shape[-1])


def _image_order(eqn: Any, number: int) -> tuple[int, ...] | None:
    """The image's axes (example, positions ..., channels); a kernel's gradient has examples and channels swapped."""
    if eqn.primitive.name != "conv_general_dilated" or number != 0:
        return None
    channels, examples, *positions = jaxprs.Parameters(eqn)["dimension_numbers"].lhs_spec
    return (examples, *positions, channels)
