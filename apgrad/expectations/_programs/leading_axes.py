"""What becomes of one axis in a program: which marks have it from outside, and what is a sum over it.

The walk follows that axis, through elementwise functions, products with a matrix, transpositions, and forgets it where
an equation does something else with it. So something may be missed, and what is found is sure.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any

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
    moved = lambda by: lambda axis: axis + by if axis is not None and axis + by >= 0 else None
    flow(program, [], transfer, either, constant, moved(-1), moved(1))
    return list(dict.fromkeys(found))


REDUCTIONS = {"argmax", "argmin", "pmax", "pmin", "psum"}
REDUCTIONS |= {f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")}
# Some of the functions of matrices (..., m, n).
OF_MATRICES = {"cholesky", "custom_linear_solve", "eig", "eigh", "geqrf", "householder_product", "lu", "svd"}
OF_MATRICES |= {"hessenberg", "lu_pivots_to_permutation", "qr", "schur", "triangular_solve"}
BY_ELEMENT = kinds.NO_DERIVATIVE | {"complex", "conj", "imag", "real", "reduce_precision", "select_n"}
BY_ELEMENT -= {"any_mapped", "argmax", "argmin", "bitcast_convert_type", "iota", "random_bits"}


def moved_axis(eqn: Any, number: int, axis: int) -> int | None:
    """The axis of the output that is this axis of the operand of this number; None where that is not known."""
    name, params = eqn.primitive.name, Parameters(eqn)
    if not eqn.outvars:  # of a callback
        return None
    if name in kinds.ELEMENTWISE or name in kinds.SAME_VALUE or name in BY_ELEMENT:
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
    if name in ALONG:
        return axis if np.all(axis != np.asarray(params[ALONG[name]])) else None
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
    if name in REDUCTIONS:
        gone = [a for a in params["axes"] if not isinstance(a, str)]
        return None if axis in gone else axis - sum(a < axis for a in gone)
    if name in OF_MATRICES:  # the leading axes count matrices
        vectors = name == "lu_pivots_to_permutation"
        return axis if axis < max(v.aval.ndim for v in eqn.invars) - 2 + vectors else None
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
ALONG = {"concatenate": "dimension", "sort": "dimension", "rev": "dimensions", "split": "axis", "top_k": "axis"}
ALONG |= {f"cum{name}": "axis" for name in ("sum", "prod", "max", "min", "logsumexp")}


def _by_windows(name, params, eqn, number, axis) -> bool:
    """Whether an equation that takes or fills slices or windows keeps each entry of an axis at its place."""
    size, after = eqn.invars[number].aval.shape[axis], eqn.outvars[0].aval.shape
    if name in ("slice", "dynamic_slice", "dynamic_update_slice"):
        return size == after[axis]  # all of the axis, which can begin at 0 only
    if name == "pad":
        return params["padding_config"][axis] == (0, 0, 0)
    if name == "tile":
        return params["reps"][axis] == 1 or size == 1
    if name.startswith("reduce_window"):
        of_axis = [params[key][axis] for key in ("window_dimensions", "window_strides", "base_dilation", "padding")]
        return of_axis == [1, 1, 1, (0, 0)]
    return False


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
