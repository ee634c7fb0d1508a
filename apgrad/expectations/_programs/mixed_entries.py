"""Whether entries along an axis, such as the lanes, act on each other in a program.

The fact of an array is `Entries` where each number depends on one entry, MIXED where each depends on several, and None
where none does or it is not known. So something may be missed; what is found is sure, but for what undoes a mixing
(masks, diagonals).
"""

import enum
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from apgrad._programs import kinds
from apgrad._programs.flow import flow, steady
from apgrad._programs.jaxprs import Parameters, Program, nested, run
from apgrad.expectations._programs.leading_axes import ALONG, BY_ELEMENT, MIXED, OF_MATRICES, REDUCTIONS, moved_axis


class Entries(NamedTuple):
    """Entries in a row along an axis, which may be one with other axes (then it is longer), or one entry everywhere."""

    axis: int | None
    start: int  # the place of the first one
    of: int  # how many there were
    before: int = 1  # in an axis that is one with others, how many numbers of an entry's place are before it


class Constant(NamedTuple):  # the fact of a value that `lax.stop_gradient` holds constant
    fact: Any


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


def _constant(fact):
    return None if fact is None else Constant(fact)


def _is_known(fact):
    return isinstance(fact, Indices) and fact.make is not None


def _unsure(fact):  # of what may be something else
    return (ANY_INDICES if fact.varies else None) if isinstance(fact, Indices) else fact


def _shifted(by):
    """What a fact is with so many axes more, or fewer, before the others; None if the fact is of the axis that goes."""

    def shifted(fact):
        if isinstance(fact, Indices):
            return _unsure(fact)
        if isinstance(fact, Constant):
            return _constant(shifted(fact.fact))
        if isinstance(fact, Placed):
            return Placed(shifted(fact.fact))
        axis = getattr(fact, "axis", None)
        return fact if axis is None else fact._replace(axis=axis + by) if axis + by >= 0 else None

    return shifted


def mixes_entries(program: Program, start: enum.Enum, ends: tuple[enum.Enum, ...], axis: int) -> bool:
    """Whether entries along an axis of arrays marked `start` act on other entries of arrays that are marked later.

    A mark counts if its label, a number of axes, is above the axis. What follows on `lax.stop_gradient` counts where it
    says which entries are read; comparisons and integers count, since a score differentiates what they decide.
    """
    found = False

    def transfer(eqn, facts):
        nonlocal found
        name, params, shapes = eqn.primitive.name, eqn.params, [v.aval.shape for v in eqn.invars]
        if (inside := nested(eqn)) is not None:
            return over_entries(inside, facts, shapes) if inside.kind == "scan" else None
        if name in ("split", "unstack") and (pieces := _pieces(eqn, facts[0])):
            return pieces
        moving = [fact.fact if isinstance(fact, Columns | Placed) else fact for fact in facts]
        moving = [None if isinstance(fact, Constant | Indices) else fact for fact in moving]
        constant = [fact.fact if isinstance(fact, Constant) else None for fact in facts]
        if name == "mark" and params["kind"] in (start, *ends) and params["label"] > axis:
            each = Entries(axis, 0, shapes[0][axis])
            found |= moving[0] not in (None, each)
            if params["kind"] is start:
                return [each]
        if name == "stop_gradient":
            return [fact if moving[0] is None else Constant(fact) for fact in facts]
        made, wholes = _made(eqn, moving), [*map(_whole, moving, shapes)]
        if name == "concatenate":
            made = _columns(eqn, facts, made)
        elif name in ("gather", "dynamic_slice") and made is None and wholes[0] is not None:
            made = _at(_read(eqn, wholes[0], facts[1:]), moving)
        elif name.startswith("scatter") and MIXED not in moving and any(fact is not None for fact in wholes):
            made = _at(_written(eqn, wholes, facts[1]), moving)
        if made is None and name in _WRITES and wholes[0] is not None:  # what is written may be in its own place
            made = moving[0]
        made = made or _constant(_made(eqn, constant))
        if made is None and (places := _indices(eqn, facts)):
            return places
        return [Placed(made) if _is_placed(eqn, facts, made) else made] * len(eqn.outvars)

    def over_entries(scan, facts, shapes):  # if each step has an entry; what it hands on depends on those before, too
        (same, carried, _), (body,) = scan.counts, scan.jaxprs
        first, arrays, of = facts[: same + carried], facts[same + carried :], shapes[same + carried :]
        over, own = [_whole(*each) == 0 for each in zip(arrays, of, strict=True)], Entries(None, id(body), 0)
        if not any(over):
            return None

        def step(facts):
            made = walk(body, facts)
            return [*(MIXED if fact == own else fact for fact in made[:carried]), *made[carried:]]

        arrays = [own if here else _shifted(-1)(fact) for fact, here in zip(arrays, over, strict=True)]
        made = steady(step, [*first, *arrays], same, carried, join)[1]
        each = Entries(0, 0, scan.length)
        return [*made[:carried], *(each if fact == own else _shifted(1)(fact) for fact in made[carried:])]

    def walk(program, facts):
        return flow(program, facts, transfer, join, _of_constant, _shifted(-1), _shifted(1))

    # What a loop hands on or a branch returns is mixed if it may be.
    order = {type(None): 0, Indices: 0.5, str: 5}
    everywhere = lambda f: isinstance(f, Entries) and f.axis is None
    rank = lambda f: rank(f.fact) - 2 if isinstance(f, Constant) else order.get(type(f), 3) + everywhere(f)
    join = lambda a, b: a if a is b else max(_unsure(a), _unsure(b), key=rank)
    walk(program, [None] * len(program.jaxpr.invars))
    return found


_WRITES = {"dynamic_update_slice", *(name for name in kinds.COMBINE if name.startswith("scatter"))}
# These put an entry of one operand together with an entry of another one.
_BY_PLACE = kinds.ELEMENTWISE | kinds.PRODUCT | BY_ELEMENT
# Each number of an output of these depends on numbers of the input, whichever they are.
_OF_EVERY_ENTRY = _BY_PLACE | REDUCTIONS | kinds.SAME_VALUE | kinds.VIEW
_OF_EVERY_ENTRY |= {"dynamic_slice", "fft", "gather", "pad", "slice", "tile", "unstack", *OF_MATRICES}
_OF_EVERY_ENTRY |= ALONG.keys() - {"concatenate"}


def _whole(fact, shape):  # the axis that has all entries
    kept = isinstance(fact, Entries) and fact.axis is not None and shape[fact.axis] == fact.of
    return fact.axis if kept else None


def _at(axis, facts):
    fact = next(fact for fact in facts if fact is not None)
    return axis if axis in (None, MIXED) else fact._replace(axis=axis)


def _made(eqn, facts):
    name, found = eqn.primitive.name, {fact for fact in facts if fact is not None}
    if not found or name == "any_mapped":
        return None
    joined = _joined(eqn, facts) if name in ("concatenate", "stack") else None
    if MIXED in found:
        return MIXED if name in _OF_EVERY_ENTRY | _WRITES or found == {*facts} or joined is not None else None
    if joined is not None:
        return joined
    moved = {_moved(eqn, n, fact) for n, fact in enumerate(facts) if fact is not None}
    if len(moved) == 1:
        return moved.pop()
    return MIXED if MIXED in moved or (name in _BY_PLACE and None not in moved) else None


def _moved(eqn, number, fact):
    name, params, axis = eqn.primitive.name, Parameters(eqn), fact.axis
    if axis is None:
        return fact if name in _OF_EVERY_ENTRY else None
    before, after = eqn.invars[number].aval.shape, eqn.outvars[0].aval.shape if eqn.outvars else ()
    one = before[axis] == 1
    if name == "slice" and before[axis] != after[axis]:
        in_a_row = before[axis] <= fact.of and (params["strides"] is None or params["strides"][axis] == 1)
        return fact._replace(start=fact.start + params["start_indices"][axis]) if in_a_row else None
    if name == "pad" and after[axis] == fact.of:
        return fact._replace(start=0) if params["padding_config"][axis][0] == fact.start else MIXED
    if before[axis] > fact.of and name.startswith(("conv", "reduce_window")):  # a window may be in one entry
        return None
    if _is_of_others(eqn, number, axis):
        return MIXED if not one else fact._replace(axis=None) if name in REDUCTIONS else None
    if one and (name == "reshape" or (name == "squeeze" and axis in params["dimensions"])):
        return fact._replace(axis=None)
    if name == "reshape":
        return _reshaped(fact, before, after)
    to = moved_axis(eqn, number, axis)
    return None if to is None else fact._replace(axis=None if one and after[to] != 1 else to)


# Whether an equation makes its numbers of all or of other entries along the axis of an operand.
def _is_of_others(eqn, number, axis) -> bool:
    name, params = eqn.primitive.name, Parameters(eqn)
    if name == "dot_general":
        return axis in params["dimension_numbers"][0][number]
    if name in REDUCTIONS:
        return axis in params["axes"]
    if name == "fft" or (name in OF_MATRICES and len(eqn.invars) == 1):
        return moved_axis(eqn, number, axis) is None
    if name.startswith("reduce_window"):
        return params["window_dimensions"][axis] > 1
    if name == "conv_general_dilated" and number == 0:
        how, groups = params["dimension_numbers"], params["feature_group_count"]
        place = how.lhs_spec.index(axis)  # that of the examples, of the features, or one along the kernel
        return groups == 1 if place == 1 else place > 1 and eqn.invars[1].aval.shape[how.rhs_spec[place]] > 1
    return (name in ("rev", "sort", "top_k") or name.startswith("cum")) and axis in np.ravel(params[ALONG[name]])


def _reshaped(fact, before, after):
    many, ahead = min(before[fact.axis], fact.of), math.prod(before[: fact.axis]) * fact.before
    for axis, size in enumerate(after):
        within, rest = divmod(ahead, math.prod(after[:axis]) or 1)
        if not rest and size and not size % (within * many):
            return fact._replace(axis=axis, before=within) if many in (size, fact.of) else None
    return None


def _pieces(eqn, fact):  # the facts of what the axis is cut into that is the fact; none where another one is cut
    if isinstance(fact, Constant):
        return [Constant(piece) for piece in _pieces(eqn, fact.fact)]
    params, shape = eqn.params, eqn.invars[0].aval.shape
    if not isinstance(fact, Entries) or fact.axis != params["axis"] or shape[fact.axis] > fact.of:
        return []
    sizes = params.get("sizes", [1] * len(eqn.outvars))
    starts = np.cumsum([fact.start, *sizes[:-1]]).tolist()
    return [fact._replace(axis=fact.axis if "sizes" in params else None, start=start) for start in starts]


# The fact of operands that are joined along an axis, or stacked along a new one; None if they are not in a row.
def _joined(eqn, facts):
    stack = eqn.primitive.name == "stack"
    new = Parameters(eqn)["axis" if stack else "dimension"]
    sizes = [1 if stack else v.aval.shape[new] for v in eqn.invars]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    given = [(f, n, start) for f, n, start in zip(facts, sizes, starts, strict=True) if f not in (None, MIXED) and n]
    if not all(f.axis in (None, None if stack else new) and f.of == sum(sizes) for f, _, _ in given):
        return None
    in_place = all(f.start == start and (f.axis is not None or n == 1) for f, n, start in given)
    parts = {f for f, _, _ in given}
    if len(parts) == 1 and (fact := parts.pop()).axis is None:  # numbers of one entry, on an axis that is as long
        return None if in_place else fact
    return Entries(new, 0, sum(sizes)) if in_place else MIXED


def _is_mixed(fact):
    return MIXED in (fact, getattr(fact, "fact", None))


def _columns(eqn, facts, whole):  # of indices for several axes, as in `x[i, 1]`; `whole` of what are no indices
    made = eqn.outvars[0].aval
    if not _is_integer(made) or Parameters(eqn)["dimension"] != made.ndim - 1 or all(map(_is_known, facts)):
        return whole
    return Columns(tuple(f for f, v in zip(facts, eqn.invars, strict=True) for _ in range(v.aval.shape[-1])), whole)


def _index(fact, number):  # the fact of the indices for one axis
    if _is_known(fact):
        return Indices(lambda: fact.values[..., number : number + 1], fact.varies)
    return fact.facts[number] if isinstance(fact, Columns) else fact


def _own_axis(place, size):  # the axis along which each index is its own place
    if not _is_known(place):
        return None
    values = np.asarray(place.values)
    own = lambda axis: np.all(np.moveaxis(values, axis, -1) == np.arange(size))
    return next((a for a, n in enumerate(values.shape[:-1]) if n == size and own(a)), None)


def _is_apart(place, axis):  # whether no index along the axis is there twice
    values = np.sort(np.asarray(place.values), axis)
    return np.all(np.diff(values, axis=axis) != 0)


def _read(eqn, axis, indices):  # the fact of what is read along an axis; None where it is not known, as at one index
    if eqn.primitive.name == "dynamic_slice":
        return MIXED if _is_mixed(indices[axis]) else None
    how, size, indexed = Parameters(eqn)["dimension_numbers"], eqn.invars[0].aval.shape[axis], eqn.invars[1].aval.shape
    if axis not in how.start_index_map:
        return None
    place = _index(indices[0], how.start_index_map.index(axis))
    if place is ANY_INDICES or isinstance(place, Placed) or (_is_known(place) and np.ptp(place.values) == 0):
        return None
    if (own := _own_axis(place, size)) is not None:
        return moved_axis(eqn, 1, own)
    # Fewer indices may be those of a part that stays by itself.
    return MIXED if _is_mixed(place) or size in indexed[:-1] else None


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
        single = any(isinstance(c, Placed) or (_is_known(c) and _is_apart(c, axis)) for c in columns)
        roomy = single and math.prod(operand.shape[a] for a in dims) > size
        return None if own or ANY_INDICES in columns or roomy else MIXED

    found = {facts[0], None if facts[1] is None else to(facts[1])}
    if facts[2] in apart:
        found |= {to(apart.index(facts[2]))}
    elif facts[2] is not None:
        axis = window[how.update_window_dims.index(facts[2])]
        found |= {axis} if operand.shape[axis] == updates.shape[facts[2]] else set()
    found -= {None}
    return None if not found else found.pop() if len(found) == 1 else MIXED


def _has_places(facts) -> bool:
    of = [fact.facts if isinstance(fact, Columns) else (fact,) for fact in facts]
    return any(isinstance(f, Placed) or (isinstance(f, Indices) and f.varies) for fs in of for f in fs)


def _is_placed(eqn, facts, made) -> bool:
    if not (isinstance(made, Entries) and eqn.outvars and _is_integer(eqn.outvars[0].aval)):
        return False
    return _has_places(facts[:1] if eqn.primitive.name in ("gather", "dynamic_slice") else facts)


def _indices(eqn, facts):  # the facts of what is made of places or of constants, if any
    name, given = eqn.primitive.name, [fact for fact in facts if isinstance(fact, Indices)]
    if name in kinds.SAME_VALUE:
        return facts[: len(eqn.outvars)] if given else None
    depth = 1 + max((fact.depth for fact in given), default=0)
    known = all(map(_is_known, facts)) and depth < 99  # evaluated by so many calls in each other
    if known and name in _CONSTANT:
        made = functools.cache(lambda: run(eqn, [fact.values for fact in given]))
        varies = name == "iota" or _has_places(facts)
        return [Indices(lambda n=n: made()[n], varies, depth) for n in range(len(eqn.outvars))]
    # Sums of places and of what is not known, as the number of a step, are no places, nor are those that are shuffled.
    moved = name == "select_n" or name not in _BY_PLACE | {"sort"}
    whole = ANY_INDICES in facts or (moved and _has_places(facts))
    whole |= name == "broadcast_in_dim" and not eqn.invars[0].aval.shape
    return [ANY_INDICES if whole and _is_integer(v.aval) else None for v in eqn.outvars]


_CONSTANT = _OF_EVERY_ENTRY - {"pmax", "pmin", "psum"} | _WRITES | {"concatenate", "iota", "split", "stack"}


def _of_constant(value):
    if isinstance(value, Tracer):
        return ANY_INDICES if np.ndim(value) and _is_integer(value) else None
    return Indices(lambda: value, bool(np.ndim(value)) and _is_integer(value))


def _is_integer(value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.integer)
