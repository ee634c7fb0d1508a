"""On which entry along an axis, as the lanes', each number of an array depends, and what equations make of that."""

import itertools
import math
from typing import Any

import numpy as np

from apgrad._programs import kinds
from apgrad._programs.jaxprs import Parameters
from apgrad.expectations._programs.leading_axes import ALONG, BY_ELEMENT, OF_MATRICES, REDUCTIONS

# In place of an entry's number: it depends on no entry, or on several. Lower numbers are the entry of a loop's step.
NONE, SEVERAL = -1, -2
_MOST = 2**22  # arrays of more numbers are not written out
LEAST, LARGEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


class Entries:
    """The number of the entry on which each number of an array depends, in an array that broadcasts to its shape."""

    def __init__(self, of: Any):
        of = np.asarray(of, np.int32)
        for axis in range(of.ndim):
            first = of[(slice(None),) * axis + (slice(1),)]
            of = first if of.shape[axis] > 1 and (of == first).all() else of
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entries) and np.array_equal(self.of, other.of)

    def __hash__(self) -> int:
        return hash(self.of.tobytes())


def from_array(array):
    return None if array is None or not (array != NONE).any() else Entries(array)


def each(axis, size, ndim):
    return Entries(np.arange(size).reshape([size if a == axis else 1 for a in range(ndim)]))


def is_long(shape):  # or has a size that is a symbol, as an export may have
    return not all(isinstance(n, int | np.integer) for n in shape) or math.prod(shape) > _MOST


def everywhere(number, shape):
    return np.full((1,) * len(shape), number)


def array_of(fact, shape):
    return fact.of if isinstance(fact, Entries) else everywhere(NONE, shape)


def is_mixed(fact):
    fact = getattr(fact, "fact", fact)
    return isinstance(fact, Entries) and bool((fact.of == SEVERAL).any())


def both(one, other):
    if one.shape == other.shape and (one == other).all():
        return one
    shape = np.broadcast_shapes(one.shape, other.shape)
    if math.prod(shape) > max(_MOST, one.size, other.size):  # entries along different axes
        return everywhere(SEVERAL, shape)
    return np.where((one == other) | (other == NONE), one, np.where(one == NONE, other, SEVERAL))


def over(of, axes):  # for what is made of all numbers along these axes, which are then of size 1
    if all(of.shape[a] == 1 for a in axes):
        return of
    low = np.where(of == NONE, LARGEST, of).min(tuple(axes), keepdims=True)
    high = np.where(of == NONE, LEAST, of).max(tuple(axes), keepdims=True)
    return one_of(low, high)


def one_of(low, high):
    return np.where(low > high, NONE, np.where(low == high, low, SEVERAL))


def is_along(of, axis):
    return of.shape[axis] > 1


def put(of, to, ndim):  # moves each axis a to the place to[a]; other axes have size 1, and so have other places
    kept = sorted(to, key=to.__getitem__)
    moved = of.transpose(*kept, *(a for a in range(of.ndim) if a not in to))
    sizes = {to[a]: of.shape[a] for a in kept}
    return moved.reshape([sizes.get(n, 1) for n in range(ndim)])


# For each output the numbers of entries that come from one operand; None where that is not known.
def moved(eqn, number, of) -> list[Any] | None:
    name, params, outs = eqn.primitive.name, Parameters(eqn), [v.aval.shape for v in eqn.outvars]
    if name == "split":
        starts = np.cumsum([0, *params["sizes"]])
        return [cut(of, params["axis"], *pair) for pair in itertools.pairwise(starts)]
    if name == "unstack":
        return [cut(of, params["axis"], n, n + 1).squeeze(params["axis"]) for n in range(len(outs))]
    if name in OF_MATRICES - {"custom_linear_solve", "triangular_solve"}:
        rank = 1 if name == "lu_pivots_to_permutation" or (name, number) == ("householder_product", 1) else 2
        whole = over(of, range(of.ndim - rank, of.ndim))
        return [whole.reshape(*of.shape[: of.ndim - rank], *[1] * (len(out) - of.ndim + rank)) for out in outs]
    made = _alike(eqn, number, of) if outs else None
    return None if made is None else [made] * len(outs)


def _alike(eqn, number, of):  # of an equation whose outputs are all alike
    name, params, after = eqn.primitive.name, Parameters(eqn), eqn.outvars[0].aval.shape
    before = eqn.invars[number].aval.shape
    if name in kinds.ELEMENTWISE or name in BY_ELEMENT:
        return of.reshape(of.shape or (1,) * len(after))  # a number meets arrays, as in a clamp or a choice of all
    if name == "broadcast_in_dim":
        return put(of, dict(enumerate(params["broadcast_dimensions"])), len(after))
    if name == "transpose":
        return of.transpose(params["permutation"])
    if name == "reshape" and params["dimensions"] is None:
        return _reshaped(of, before, after)
    if name == "squeeze":
        return of.squeeze(tuple(params["dimensions"]))
    if name == "slice":
        strides = params["strides"] or [1] * of.ndim
        cut = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return of[tuple(slice(*c) if n > 1 else slice(None) for c, n in zip(cut, of.shape, strict=True))]
    if name == "rev":
        return np.flip(of, params["dimensions"])
    if name == "tile":
        return np.tile(of, [reps if n > 1 else 1 for reps, n in zip(params["reps"], of.shape, strict=True)])
    if name == "pad":
        for axis, config in enumerate(params["padding_config"]):
            of = of if config == (0, 0, 0) or (of.shape[axis] == 1 != before[axis]) else _padded(of, axis, *config)
        return of
    if name in REDUCTIONS:
        gone = tuple(a for a in params["axes"] if not isinstance(a, str))
        return over(of, gone).squeeze(gone)
    if name in ALONG:
        return over(of, np.ravel(params[ALONG[name]]).tolist())
    if name == "fft":
        return over(of, range(of.ndim - len(params["fft_lengths"]), of.ndim))
    if name == "triangular_solve":
        rows, columns = of.ndim - 2, of.ndim - 1
        return over(of, (rows, columns) if number == 0 else (rows,) if params["left_side"] else (columns,))
    if name.startswith("reduce_window"):
        keys = "window_dimensions", "window_strides", "window_dilation", "base_dilation", "padding"
        return _by_windows(of, range(of.ndim), zip(*(params[key] for key in keys), strict=True))
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        free = [a for a in range(of.ndim) if a not in (*contracted[number], *batch[number])]
        ahead = len(batch[0]) if number == 0 else len(after) - len(free)
        to = {a: n for n, a in enumerate(batch[number])} | {a: ahead + n for n, a in enumerate(free)}
        return put(over(of, contracted[number]), to, len(after))
    if name == "conv_general_dilated" and params["batch_group_count"] == 1:
        how, one_group = params["dimension_numbers"], params["feature_group_count"] == 1
        spec, out = (how.lhs_spec, how.rhs_spec)[number], how.out_spec
        if number == 1:  # a kernel, (features made, features, *places)
            return put(over(of, spec[1:]), {spec[0]: out[1]}, len(after)) if one_group else None
        if not one_group and is_along(of, spec[1]):
            return None
        size = [eqn.invars[1].aval.shape[a] for a in how.rhs_spec[2:]]
        keys = "window_strides", "rhs_dilation", "lhs_dilation", "padding"
        of = _by_windows(over(of, spec[1:2]), spec[2:], zip(size, *(params[key] for key in keys), strict=True))
        return None if of is None else put(of, dict(zip(spec, out, strict=True)), len(after))
    return None


def cut(of, axis, first, last):
    return of[(slice(None),) * axis + (slice(first, last),)] if is_along(of, axis) else of


def _padded(of, axis, low, high, between=0):
    size = of.shape[axis]
    to = low + np.arange(size) * (between + 1)
    length = low + high + size + between * max(size - 1, 0)
    made, inside = np.full((*of.shape[:axis], length, *of.shape[axis + 1 :]), NONE, np.int32), (to >= 0) & (to < length)
    made[(slice(None),) * axis + (to[inside],)] = np.compress(inside, of, axis)
    return made


def _by_windows(of, axes, windows):
    for axis, (size, stride, apart, base, (low, high)) in zip(axes, windows, strict=True):
        if not is_along(of, axis):
            continue
        if base != 1:
            return None
        of = _padded(of, axis, low, high)
        starts = np.arange(0, of.shape[axis] - (size - 1) * apart, stride)
        ahead = (slice(None),) * axis
        of = over(of[(*ahead, starts[:, None] + apart * np.arange(size))], [axis + 1]).squeeze(axis + 1)
    return of


def _reshaped(of, before, after):
    same = lambda a, b: next((n for n, (i, j) in enumerate(zip(a, b, strict=False)) if i != j), min(len(a), len(b)))
    first = same(before, after)
    last = same(before[first:][::-1], after[first:][::-1])
    lead, within, rest = of.shape[:first], of.shape[first : of.ndim - last], of.shape[of.ndim - last :]
    inner, outer = before[first : of.ndim - last], after[first : len(after) - last]
    if 0 in after:
        return everywhere(NONE, after)
    if all(n == 1 for n in within):
        return of.reshape(*lead, *[1] * len(outer), *rest)
    if is_long((*lead, *inner, *rest)):
        return None
    return np.broadcast_to(of, (*lead, *inner, *rest)).reshape(*lead, *outer, *rest)


def joined(eqn, given):  # of operands that are joined along an axis, or stacked along a new one
    params, stack = Parameters(eqn), eqn.primitive.name == "stack"
    axis, after = params["axis" if stack else "dimension"], eqn.outvars[0].aval.shape
    sizes = [1 if stack else v.aval.shape[axis] for v in eqn.invars]
    of = [np.expand_dims(f.of, axis) if stack and f is not None else array_of(f, after) for f in given]
    shape = np.broadcast_shapes(*((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in of))
    if is_long((*shape, sum(sizes))):
        first, *others = [x for x, fact in zip(of, given, strict=True) if fact is not None]
        return None if is_along(first, axis) or any(not np.array_equal(first, x) for x in others) else first
    full = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
    return np.concatenate([np.broadcast_to(x, to) for x, to in zip(of, full, strict=True)], axis)
