"""Indices in a program, as far as they are known, and the entries of what is read or written at them."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from apgrad._programs import kinds
from apgrad._programs.jaxprs import Parameters, run
from apgrad.expectations._programs import entries
from apgrad.expectations._programs.entries import NONE, SEVERAL, Entries
from apgrad.expectations._programs.leading_axes import ALONG, BY_ELEMENT, OF_MATRICES, REDUCTIONS


class Indices:
    # The fact of what is made of constants alone, or, with no `make`, of integers that may be any places. What is no
    # single number everywhere varies.
    def __init__(self, make: Callable[[], Any] | None = None, varies: bool = True, depth: int = 0):
        self.make, self.varies, self.depth = make, varies, depth

    @functools.cached_property
    def values(self) -> np.ndarray | jax.Array:
        assert self.make is not None
        with jax.ensure_compile_time_eval():
            return self.make()


class Placed(NamedTuple):  # the fact of integers made of places along an axis, as 3 i + j, and of what has this fact
    fact: Any


class Columns(NamedTuple):  # the facts of an array of indices, one for each number along its last axis
    facts: tuple[Any, ...]
    fact: Any  # of the array


ANY_INDICES = Indices()


def is_known(fact):
    return isinstance(fact, Indices) and fact.make is not None


def unsure(fact):  # of what may be something else
    return (ANY_INDICES if fact.varies else None) if isinstance(fact, Indices) else fact


def of_constant(value):
    if isinstance(value, Tracer):
        return ANY_INDICES if np.ndim(value) and _is_integer(value) else None
    return Indices(lambda: value, bool(np.ndim(value)) and _is_integer(value))


def _is_integer(value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.integer)


# These put an entry of one operand together with an entry of another one.
BY_PLACE = kinds.ELEMENTWISE | kinds.PRODUCT | BY_ELEMENT
WRITES = {"dynamic_update_slice", *(name for name in kinds.COMBINE if name.startswith("scatter"))}
_CONSTANT = BY_PLACE | REDUCTIONS | kinds.SAME_VALUE | kinds.VIEW | WRITES | OF_MATRICES | {*ALONG}
_CONSTANT |= {"dynamic_slice", "fft", "gather", "iota", "pad", "slice", "stack", "tile", "unstack"}
_CONSTANT -= {"pmax", "pmin", "psum"}


def of_equation(eqn, facts):  # the facts of what is made of places or of constants, if any
    name, given = eqn.primitive.name, [fact for fact in facts if isinstance(fact, Indices)]
    if name in kinds.SAME_VALUE:
        return facts[: len(eqn.outvars)] if given else None
    depth = 1 + max((fact.depth for fact in given), default=0)
    known = all(map(is_known, facts)) and depth < 99  # evaluated by so many calls in each other
    if known and name in _CONSTANT:
        made = functools.cache(lambda: run(eqn, [fact.values for fact in given]))
        varies = name == "iota" or _has_places(facts)
        return [Indices(lambda n=n: made()[n], varies, depth) for n in range(len(eqn.outvars))]
    # Sums of places and of what is not known, as the number of a step, are no places, nor are those that are shuffled.
    moved = name == "select_n" or name not in BY_PLACE | {"sort"}
    whole = ANY_INDICES in facts or (moved and _has_places(facts))
    whole |= name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
    return [ANY_INDICES if whole and _is_integer(v.aval) else None for v in eqn.outvars]


def _has_places(facts) -> bool:
    of = [fact.facts if isinstance(fact, Columns) else (fact,) for fact in facts]
    return any(isinstance(f, Placed) or (isinstance(f, Indices) and f.varies) for fs in of for f in fs)


def is_placed(eqn, facts, made) -> bool:
    if not (isinstance(made, Entries) and eqn.outvars and _is_integer(eqn.outvars[0].aval)):
        return False
    return _has_places(facts[:1] if eqn.primitive.name in ("gather", "dynamic_slice") else facts)


def columns(eqn, facts, whole):  # of indices for several axes, as in `x[i, 1]`; `whole` of what are no indices
    made = eqn.outvars[0].aval
    if not _is_integer(made) or Parameters(eqn)["dimension"] != made.ndim - 1 or all(map(is_known, facts)):
        return whole
    return Columns(tuple(f for f, v in zip(facts, eqn.invars, strict=True) for _ in range(v.aval.shape[-1])), whole)


def _index(fact, number):  # the fact of the indices for one axis
    if is_known(fact):
        return Indices(lambda: fact.values[..., number : number + 1], fact.varies)
    return fact.facts[number] if isinstance(fact, Columns) else fact


def gathered(eqn, given, facts):  # what is gathered: of the entries that say where, and of those that are there
    how, sizes = Parameters(eqn)["dimension_numbers"], Parameters(eqn)["slice_sizes"]
    (operand, places), after = [v.aval.shape for v in eqn.invars], eqn.outvars[0].aval.shape
    apart, made = [a for a in range(len(after)) if a not in how.offset_dims], entries.everywhere(NONE, after)
    if given[1] is not None:
        of = entries.over(given[1].of, [len(places) - 1])
        made = entries.put(of, dict(enumerate(apart)), len(after))
    if given[0] is None:
        return made
    of = given[0].of
    window = [a for a in range(len(operand)) if a not in (*how.collapsed_slice_dims, *how.operand_batching_dims)]
    to = dict(zip(window, how.offset_dims, strict=True))
    for a, n in zip(how.operand_batching_dims, how.start_indices_batching_dims, strict=True):
        to[a] = apart[n]
    cut = [n for n, a in enumerate(how.start_index_map) if entries.is_along(of, a) and sizes[a] < operand[a]]
    if not cut:
        return entries.both(made, entries.put(of, to, len(after)))
    columns, axes = [_index(facts[1], n) for n in cut], [how.start_index_map[n] for n in cut]
    if len(cut) == 1 and is_known(columns[0]) and sizes[axes[0]] == 1:
        (axis,), values = axes, np.clip(np.asarray(columns[0].values)[..., 0], 0, operand[axes[0]] - 1)
        of, ahead = np.moveaxis(of, axis, 0), values.ndim
        if how.operand_batching_dims or entries.is_long((*values.shape, *of.shape[1:])):
            return made
        rest = {n + ahead: to[a] for n, a in enumerate(a for a in range(len(operand)) if a != axis) if a in to}
        return entries.both(made, entries.put(of[values], dict(enumerate(apart)) | rest, len(after)))
    for axis, place in zip(axes, columns, strict=True):
        if place is ANY_INDICES or isinstance(place, Placed) or is_known(place):
            continue
        # Fewer indices may be those of a part that stays by itself.
        if entries.is_mixed(place) or operand[axis] in places[:-1]:
            return entries.everywhere(SEVERAL, after)
    return made


def sliced(eqn, given, indices):  # `dynamic_slice`
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    made = functools.reduce(entries.both, (fact.of for fact in given[1:] if fact is not None), np.full((), NONE))
    of = None if given[0] is None else given[0].of
    for axis, place in enumerate(indices):
        if of is not None and entries.is_along(of, axis) and after[axis] != before[axis]:
            if entries.is_mixed(place):
                return entries.everywhere(SEVERAL, after)
            start = np.clip(int(place.values), 0, before[axis] - after[axis]) if is_known(place) else None
            of = None if start is None else entries.cut(of, axis, start, start + after[axis])
    return np.broadcast_to(made, (1,) * len(after)) if of is None else entries.both(of, made)


def updated(eqn, given, facts):  # `dynamic_update_slice`
    shape, part = [v.aval.shape for v in eqn.invars[:2]]
    of, new = entries.array_of(given[0], shape), entries.array_of(given[1], part)
    partial = [a for a, n in enumerate(shape) if part[a] != n]
    full = [n if a in partial else max(of.shape[a], new.shape[a]) for a, n in enumerate(shape)]
    if not all(is_known(facts[2 + a]) for a in partial) or entries.is_long(full):
        return _somewhere(of, given[1], given[2:])
    starts = {a: int(np.clip(int(facts[2 + a].values), 0, shape[a] - part[a])) for a in partial}
    made = np.broadcast_to(of, full).copy()
    made[tuple(slice(starts[a], starts[a] + part[a]) if a in starts else slice(None) for a in range(len(shape)))] = new
    return made


def _somewhere(of, new, indices):  # what is written, in places that are not known, may be in its own place
    if any(map(entries.is_mixed, (new, *indices))):
        return entries.everywhere(SEVERAL, of.shape)
    by = [fact.of.reshape((1,) * of.ndim) for fact in indices if fact is not None and fact.of.size == 1]
    return functools.reduce(entries.both, by, of)


def scattered(eqn, given, facts):  # `scatter` and its like
    shapes = [v.aval.shape for v in eqn.invars]
    whole = [None if fact is None else _whole(fact.of, shape) for fact, shape in zip(given, shapes, strict=True)]
    sure = all(f is None or w is not None for f, w in zip(given, whole, strict=True))
    axis, of, ndim = _written(eqn, whole, facts[1]), entries.array_of(given[0], shapes[0]), len(shapes[0])
    if not is_known(facts[1]) or any(map(entries.is_long, shapes)) or (sure and axis not in (None, SEVERAL)):
        if axis == SEVERAL:
            of = entries.everywhere(SEVERAL, shapes[0])
        elif axis is not None:
            of = entries.both(of, entries.each(axis, shapes[0][axis], ndim).of)
        return _somewhere(of, given[2], given[1:2])
    places = Parameters(eqn)["dimension_numbers"]
    replaces, new = eqn.primitive.name == "scatter", entries.array_of(given[2], shapes[2])

    def extreme(scatter, start):
        values = np.broadcast_to(new if replaces else np.where(new == NONE, start, new), shapes[2])
        with jax.ensure_compile_time_eval():
            first, values = jnp.full(shapes[0], start, jnp.int32), jnp.asarray(values, jnp.int32)
            return np.asarray(scatter(first, facts[1].values, values, places, mode=eqn.params["mode"]))

    low, high = extreme(lax.scatter_min, entries.LARGEST), extreme(lax.scatter_max, entries.LEAST)
    written = entries.one_of(low, high)
    return np.where(low > high, of, written) if replaces else entries.both(of, written)


def _whole(of, shape):  # the axis that has all entries, each in its place
    axis = int(np.argmax(of.shape)) if of.ndim else 0
    whole = of.ndim and of.size == of.shape[axis] == shape[axis] > 1 and (of.ravel() == np.arange(of.size)).all()
    return axis if whole else None


def _written(eqn, facts, indices):  # the fact of an array into which updates are written
    how, (operand, places, updates) = Parameters(eqn)["dimension_numbers"], [v.aval for v in eqn.invars]
    apart = [a for a in range(updates.ndim) if a not in how.update_window_dims]
    window = [a for a in range(operand.ndim) if a not in (*how.inserted_window_dims, *how.operand_batching_dims)]

    def to(axis):  # where an axis of the indices comes to lie
        if axis in how.scatter_indices_batching_dims:
            return how.operand_batching_dims[how.scatter_indices_batching_dims.index(axis)]
        size, dims = places.shape[axis], how.scatter_dims_to_operand_dims
        columns = [_index(indices, n) for n in range(len(dims))]
        own = [a for a, place in zip(dims, columns, strict=True) if _own_axis(place, size) == axis]
        if own and operand.shape[own[0]] == size:
            return own[0]
        single = any(isinstance(c, Placed) or (is_known(c) and _is_apart(c, axis)) for c in columns)
        roomy = single and math.prod(operand.shape[a] for a in dims) > size
        return None if own or ANY_INDICES in columns or roomy else SEVERAL

    found = {facts[0], None if facts[1] is None else to(facts[1])}
    if facts[2] in apart:
        found |= {to(apart.index(facts[2]))}
    elif facts[2] is not None:
        axis = window[how.update_window_dims.index(facts[2])]
        found |= {axis} if operand.shape[axis] == updates.shape[facts[2]] else set()
    found -= {None}
    return None if not found else found.pop() if len(found) == 1 else SEVERAL


def _own_axis(place, size):  # the axis along which each index is its own place
    if not is_known(place):
        return None
    values = np.asarray(place.values)
    own = lambda axis: np.all(np.moveaxis(values, axis, -1) == np.arange(size))
    return next((a for a, n in enumerate(values.shape[:-1]) if n == size and own(a)), None)


def _is_apart(place, axis):  # whether no index along the axis is there twice
    values = np.sort(np.asarray(place.values), axis)
    return np.all(np.diff(values, axis=axis) != 0)
