"""What becomes of one axis in a program: which marks have it from outside, and what is a sum over it.

The walk follows that axis, through elementwise functions, products with a matrix, transpositions, and forgets it where
an equation does something else with it. So something may be missed, and what is found is sure, apart from what undoes a
mixing (masks, diagonals) in `mixes_entries`.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from apgrad._programs import kinds
from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import Parameters, Program, nested


def marks_with_outer_axis(program: Program, kind: enum.Enum, size: int) -> list[Any]:
    """The marks whose operand has, as its leading axis, the leading axis of an array that the program closes over."""
    found: list[Any] = []

    def constant(value):
        # The axis is the fact. None: the value does not have it, or is known to be the same all along it.
        if np.ndim(value) == 0 or np.shape(value)[0] != size:
            return None
        known = not isinstance(value, Tracer) and jnp.issubdtype(getattr(value, "dtype", object), np.number)
        return None if known and bool(np.all(np.asarray(value) == np.asarray(value)[:1])) else 0

    def transfer(eqn, facts):
        if eqn.primitive.name == "mark" and facts[0] == 0 and eqn.params["kind"] is kind:
            found.append(eqn.params["label"])
        if nested(eqn) is not None:
            return None
        # What comes of a comparison says nothing of where a derivative goes.
        mute = eqn.primitive.name in kinds.NO_DERIVATIVE
        axes = {moved_axis(eqn, n, fact) for n, fact in enumerate(facts) if fact is not None and not mute} - {None}
        axis = axes.pop() if len(axes) == 1 else None
        fits = lambda v: axis is not None and np.shape(v.aval)[axis : axis + 1] == (size,)
        return [axis if fits(v) else None for v in eqn.outvars]

    if all(constant(value) is None for value in program.consts):
        return []
    either = lambda a, b: b if a is None else a
    flow(program, [], transfer, either, constant, _of_a_step, _of_all_steps)
    return list(dict.fromkeys(found))


def _of_a_step(fact):
    """The fact for one step's part of an array, which lacks the first axis; None if the fact is that axis."""
    if isinstance(fact, Constant):
        return _constant(_of_a_step(fact.fact))
    if isinstance(fact, Part):
        return fact if fact.axis is None else None if fact.axis == 0 else fact._replace(axis=fact.axis - 1)
    return fact if not isinstance(fact, _WHOLE) else fact - 1 if fact else None


def _of_all_steps(fact):
    if isinstance(fact, Constant):
        return _constant(_of_all_steps(fact.fact))
    if isinstance(fact, Part):
        return fact if fact.axis is None else fact._replace(axis=fact.axis + 1)
    return fact + 1 if isinstance(fact, _WHOLE) else fact


_WHOLE = (int, np.integer)  # `jax.vmap` gives reductions axes of NumPy


_BY_ELEMENT = kinds.NO_DERIVATIVE | {"complex", "conj", "imag", "real", "select_n"}
_BY_ELEMENT -= {"any_mapped", "argmax", "argmin", "bitcast_convert_type", "iota", "random_bits"}


def moved_axis(eqn: Any, number: int, axis: int) -> int | None:
    """The axis of the output that is this axis of the operand of this number; None where that is not known."""
    name, params = eqn.primitive.name, Parameters(eqn)
    if not eqn.outvars:  # of a callback
        return None
    if name in kinds.ELEMENTWISE or name in kinds.SAME_VALUE or name in _BY_ELEMENT:
        # An operand of `select_n` may be a scalar, which has no axis.
        return axis
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][axis]
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "reshape" and params["dimensions"] is None:
        # The axis stays whole where as many elements come before it, and it is as long.
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        same = [a for a in range(len(after)) if math.prod(after[:a]) == math.prod(before[:axis])]
        return next((a for a in same if after[a] == before[axis]), None)
    if name in _ALONG:
        return axis if np.all(axis != np.asarray(params[_ALONG[name]])) else None
    if name == "fft":  # along the last axes
        return axis if axis < eqn.outvars[0].aval.ndim - len(params["fft_lengths"]) else None
    if name in ("stack", "unstack"):
        if name == "stack":
            return axis + (axis >= params["axis"])
        return None if axis == params["axis"] else axis - (axis > params["axis"])
    if name == "gather":
        how = params["dimension_numbers"]
        if number == 0:
            if axis not in how.operand_batching_dims:
                taken = {*how.collapsed_slice_dims, *how.operand_batching_dims}
                if axis in taken or params["slice_sizes"][axis] != eqn.invars[0].aval.shape[axis]:
                    return None  # else the slices hold all of the axis
                return how.offset_dims[axis - sum(a < axis for a in taken)]
            axis = how.start_indices_batching_dims[how.operand_batching_dims.index(axis)]
        batch = [a for a in range(eqn.outvars[0].aval.ndim) if a not in how.offset_dims]
        return batch[axis] if axis < len(batch) else None  # the last axis of the indices says where, not which
    if (name.startswith("reduce_") or name in ("argmax", "argmin")) and axis not in params.get("axes", (axis,)):
        return axis - sum(a < axis for a in params["axes"])
    if name == "squeeze":
        return axis - sum(a < axis for a in params["dimensions"])
    if name == "dot_general":
        (contracted, batch) = params["dimension_numbers"]
        if axis in batch[number]:
            return batch[number].index(axis)
        if axis in contracted[number]:
            return None
        taken = {*contracted[number], *batch[number]}
        free = [a for a in range(eqn.invars[number].aval.ndim) if a not in taken]
        before = len(batch[0]) if number == 0 else eqn.invars[0].aval.ndim - len(contracted[0])
        return before + free.index(axis)
    if name == "conv_general_dilated":
        how = params["dimension_numbers"]
        one = number == 0 and axis == how.lhs_spec[0] and params["batch_group_count"] == 1
        return how.out_spec[0] if one else None
    return axis if _by_windows(name, params, eqn, number, axis) else None


# Functions along one axis or some, by the parameter that names them: the other axes stay as they are.
_ALONG = {"concatenate": "dimension", "sort": "dimension", "rev": "dimensions", "split": "axis", "top_k": "axis"}
_ALONG |= {f"cum{name}": "axis" for name in ("sum", "prod", "max", "min", "logsumexp")}


def _by_windows(name, params, eqn, number, axis) -> bool:
    """Whether an equation that takes or fills slices or windows keeps each entry of an axis at its place."""
    size, after = eqn.invars[number].aval.shape[axis], eqn.outvars[0].aval.shape
    if name in ("slice", "dynamic_slice", "dynamic_update_slice"):
        return size == after[axis]  # all of the axis, which can begin at 0 only
    if name == "pad":
        return params["padding_config"][axis] == (0, 0, 0)
    if name == "tile":
        return params["reps"][axis] == 1
    if name.startswith("reduce_window"):
        of_axis = [params[key][axis] for key in ("window_dimensions", "window_strides", "base_dilation", "padding")]
        return of_axis == [1, 1, 1, (0, 0)]
    return False


class Constant(NamedTuple):  # the fact of a value that `lax.stop_gradient` holds constant
    fact: Any


class Part(NamedTuple):
    """The fact of some entries in a row of an axis, or of one of them without an axis."""

    axis: int | None
    start: int  # the place of the first one
    of: int  # how many the axis had


class Columns(NamedTuple):  # the facts of an array of indices, one for each number along its last axis
    facts: tuple[Any, ...]


def _constant(fact):
    return None if fact is None else Constant(fact)


# A fact is the axis along which entries are still apart, None for what depends on no entry, or one of these.
SUM, MIXED = "sum", "mixed"  # a sum over the entries of terms of one entry each; anything else of several entries


def is_sum_over(program: Program, axes: Sequence[int | None]) -> bool:
    """Whether the first output is a sum of terms that see one entry each along `axes`, one (or None) for each input."""

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
        linear = kinds.is_linear_in(name, numbers)
        if fact == SUM:
            return SUM if linear else MIXED
        axes = {moved_axis(eqn, n, fact) for n in numbers}
        if len(axes) == 1 and None not in axes:
            return axes.pop()
        return SUM if name in ("reduce_sum", "dot_general") and linear else MIXED

    join = lambda a, b: a if a == b or b is None else b if a is None else MIXED
    return flow(program, list(axes), transfer, join, lambda _: None)[0] == SUM


def mixes_entries(program: Program, start: enum.Enum, ends: tuple[enum.Enum, ...], axis: int) -> bool:
    """Whether entries along an axis of arrays marked `start` act on other entries of arrays that are marked later.

    A mark counts if its label, a number of axes, is above the axis. What follows on `lax.stop_gradient` counts where it
    says which entries are read; comparisons and integers count, since a score differentiates what they decide. None is
    the fact of what is not known, and MIXED of what is made of all entries, as a sum over the axis, or of two operands
    with different axes. What takes the mixing away, such as a mask or a diagonal, is not seen.
    """
    found = False

    def transfer(eqn, facts):
        nonlocal found
        name, params = eqn.primitive.name, eqn.params
        if nested(eqn) is not None:
            return None
        moving = [None if isinstance(fact, Constant | Columns) else fact for fact in facts]
        constant = [fact.fact if isinstance(fact, Constant) else None for fact in facts]
        if name == "mark" and params["kind"] in (start, *ends) and params["label"] > axis:
            found |= moving[0] not in (None, axis)
            if params["kind"] is start:
                return [axis]
        if name == "stop_gradient":
            return [fact if moving[0] is None else Constant(fact) for fact in facts]
        if (made := one(eqn, name, moving)) is None:
            if name in ("gather", "dynamic_slice") and moving[0] is not None and _is_mixed(_reader(eqn, facts)):
                made = MIXED
            elif name == "concatenate" and any(map(_is_mixed, facts)) and not all(map(_is_mixed, facts)):
                made = _columns(eqn, facts)
            else:
                made = _constant(one(eqn, name, constant))
        return [made] * len(eqn.outvars)

    def one(eqn, name, facts):
        along = [n for n, fact in enumerate(facts) if fact not in (None, MIXED)]
        if name == "any_mapped":
            return None
        if MIXED in facts:
            if name == "concatenate" and _of_parts(eqn, name, [None if f == MIXED else f for f in facts]) is not None:
                return MIXED  # beside parts of the axis, or what has none
            return MIXED if name in _OF_EVERY_ENTRY or set(facts) == {MIXED} else None
        if name == "slice" or any(isinstance(fact, Part) for fact in facts):
            return _of_parts(eqn, name, facts)
        if _of_all(eqn, facts):
            return MIXED
        axes = {moved_axis(eqn, n, facts[n]) for n in along}
        mixes = name in _BY_PLACE and None not in axes
        return axes.pop() if len(axes) == 1 else MIXED if axes and mixes else None

    # What a loop hands on or a branch returns is mixed if it may be.
    order = {None: 0, MIXED: 5}
    rank = lambda f: rank(f.fact) - 2 if isinstance(f, Constant) else order.get(f, 3 + isinstance(f, Part))
    join = lambda a, b: max(a, b, key=rank)
    flow(program, [None] * len(program.jaxpr.invars), transfer, join, lambda _: None, _of_a_step, _of_all_steps)
    return found


_REDUCTIONS = {"argmax", "argmin", *(f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum"))}
# These put an entry of one operand together with an entry of another one.
_BY_PLACE = kinds.ELEMENTWISE | kinds.PRODUCT | _BY_ELEMENT
# Each entry of an output of these is a function of entries of the input, whichever they are.
_OF_EVERY_ENTRY = _BY_PLACE | _REDUCTIONS | kinds.SAME_VALUE | kinds.VIEW
_OF_EVERY_ENTRY |= {"gather", "dynamic_slice", "slice", "sort", "split"}


def _of_parts(eqn, name, facts):
    """The fact of what an equation makes of parts of an axis, or of an axis that it cuts."""
    parts = {fact for fact in facts if fact is not None}
    if len(parts) > 1 and name in _BY_PLACE:
        return MIXED
    params, before, after = Parameters(eqn), [v.aval.shape for v in eqn.invars], eqn.outvars[0].aval.shape
    if name in ("concatenate", "stack"):
        along = params["dimension"] if name == "concatenate" else params["axis"]
        sizes = [shape[along] if name == "concatenate" else 1 for shape in before]
        return _joined(facts, sizes, along if name == "concatenate" else None, along)
    fact = next(iter(parts), None)
    if fact is None or len(parts) > 1:
        return None
    if name == "slice":
        whole = fact if isinstance(fact, Part) else Part(fact, 0, before[0][fact])
        axis = whole.axis
        if axis is None or before[0][axis] == after[axis]:
            return fact
        steps = params["strides"] or [1] * len(after)
        return whole._replace(start=whole.start + params["start_indices"][axis]) if steps[axis] == 1 else None
    number = facts.index(fact)
    if fact.axis is None:
        return fact if name in _OF_EVERY_ENTRY else None
    one = before[number][fact.axis] == 1
    if name == "pad" and after[fact.axis] == fact.of:
        return fact.axis if params["padding_config"][fact.axis][0] == fact.start else MIXED
    if _of_all(eqn, [f and f.axis for f in facts]):
        return MIXED if not one else fact._replace(axis=None) if name in _REDUCTIONS else None
    if one and (name == "reshape" or (name == "squeeze" and fact.axis in params["dimensions"])):
        return fact._replace(axis=None)
    axis = moved_axis(eqn, number, fact.axis)
    if axis is None:
        return None
    return fact._replace(axis=None if one and after[axis] != 1 else axis)


def _joined(facts, sizes, old, new):
    """The fact of operands joined along the axis `new`, which each has as `old`, or lacks where that is None."""
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    given = [(f, n, start) for f, n, start in zip(facts, sizes, starts, strict=True) if f is not None and n]
    if not all(isinstance(f, Part) and f.axis in (None, old) and f.of == sum(sizes) for f, _, _ in given):
        return None
    in_place = all(f.start == start and (f.axis is not None or n == 1) for f, n, start in given)
    parts = {f for f, _, _ in given}
    if len(parts) == 1 and (fact := parts.pop()).axis is None:  # numbers of one entry, on an axis that is as long
        return None if in_place else fact
    return new if in_place else MIXED


def _is_mixed(fact):
    return MIXED in (fact, getattr(fact, "fact", None))


def _columns(eqn, facts):  # of indices for several axes, as in `x[i, 1]`; None for what are no indices
    shape, made = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype
    if Parameters(eqn)["dimension"] != len(shape) - 1 or not jnp.issubdtype(made, jnp.integer):
        return None
    return Columns(tuple(f for f, v in zip(facts, eqn.invars, strict=True) for _ in range(v.aval.shape[-1])))


def _reader(eqn, facts):  # the fact of the index that says what is read along the axis that is the first fact
    axis, *indices = facts
    if eqn.primitive.name == "dynamic_slice":
        return indices[axis]
    read = Parameters(eqn)["dimension_numbers"].start_index_map
    if axis not in read:
        return None
    return indices[0].facts[read.index(axis)] if isinstance(indices[0], Columns) else indices[0]


def _of_all(eqn, facts) -> bool:
    """Whether an equation makes its numbers of all or of other entries along the axes that are its operands' facts."""
    name, params = eqn.primitive.name, Parameters(eqn)
    if name == "dot_general":
        return any(fact in axes for fact, axes in zip(facts, params["dimension_numbers"][0], strict=True))
    if name in _REDUCTIONS:
        return facts[0] in params["axes"]
    along = name in ("rev", "sort", "top_k") or name.startswith("cum")
    return along and not {*facts}.isdisjoint(np.ravel(params[_ALONG[name]]).tolist())
