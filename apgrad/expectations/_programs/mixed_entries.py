"""Whether entries along an axis, such as the lanes, act on each other in a program.

The fact of an array is `Entries`, which says for each number on which entry it depends; and None where it depends on
none, or that is not known. So something may be missed; what is found is sure, but for what undoes a mixing (masks,
diagonals).
"""

import enum
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from apgrad._programs import kinds
from apgrad._programs.flow import flow, steady
from apgrad._programs.jaxprs import Parameters, Program, nested, opened, run
from apgrad.expectations._programs.leading_axes import ALONG, BY_ELEMENT, OF_MATRICES, REDUCTIONS

# In place of an entry's number: it depends on no entry, or on several. Lower numbers are the entry of a loop's step.
NONE, SEVERAL = -1, -2
_MOST = 2**22  # arrays of more numbers are not written out
_LEAST, _LARGEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


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


def _of(array):
    return None if array is None or not (array != NONE).any() else Entries(array)


def _each(axis, size, ndim):
    return Entries(np.arange(size).reshape([size if a == axis else 1 for a in range(ndim)]))


def _is_long(shape):  # or has a size that is a symbol, as an export may have
    return not all(isinstance(n, int | np.integer) for n in shape) or math.prod(shape) > _MOST


def _everywhere(number, shape):
    return np.full((1,) * len(shape), number)


def _array(fact, shape):
    return fact.of if isinstance(fact, Entries) else _everywhere(NONE, shape)


def _both(one, other):
    if one.shape == other.shape and (one == other).all():
        return one
    shape = np.broadcast_shapes(one.shape, other.shape)
    if math.prod(shape) > max(_MOST, one.size, other.size):  # entries along different axes
        return _everywhere(SEVERAL, shape)
    return np.where((one == other) | (other == NONE), one, np.where(one == NONE, other, SEVERAL))


def _over(of, axes):  # for what is made of all numbers along these axes, which are then of size 1
    if all(of.shape[a] == 1 for a in axes):
        return of
    low = np.where(of == NONE, _LARGEST, of).min(tuple(axes), keepdims=True)
    high = np.where(of == NONE, _LEAST, of).max(tuple(axes), keepdims=True)
    return _one_of(low, high)


def _one_of(low, high):
    return np.where(low > high, NONE, np.where(low == high, low, SEVERAL))


def _along(of, axis):
    return of.shape[axis] > 1


def _put(of, to, ndim):  # moves each axis a to the place to[a]; other axes have size 1, and so have other places
    kept = sorted(to, key=to.__getitem__)
    moved = of.transpose(*kept, *(a for a in range(of.ndim) if a not in to))
    sizes = {to[a]: of.shape[a] for a in kept}
    return moved.reshape([sizes.get(n, 1) for n in range(ndim)])


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


def _entries(fact):
    return fact if isinstance(fact, Entries) else None


def _unsure(fact):  # of what may be something else
    return (ANY_INDICES if fact.varies else None) if isinstance(fact, Indices) else fact


def _shifted(by):
    """What a fact is with one axis more, or less, before the others; None if the axis that goes has several entries."""

    def shifted(fact):
        if isinstance(fact, Indices):
            return _unsure(fact)
        if isinstance(fact, Constant):
            return _constant(shifted(fact.fact))
        if isinstance(fact, Placed):
            return Placed(shifted(fact.fact))
        if not isinstance(fact, Entries) or (by < 0 and _along(fact.of, 0)):
            return None
        return Entries(fact.of[0] if by < 0 else fact.of[None])

    return shifted


def mixes_entries(program: Program, start: enum.Enum, ends: tuple[enum.Enum, ...], axis: int) -> bool:
    """Whether entries along an axis of arrays marked `start` act on other entries of arrays that are marked later.

    A mark counts if its label, a number of axes, is above the axis. What follows on `lax.stop_gradient` counts where it
    says which entries are read; comparisons and integers count, since a score differentiates what they decide.
    """
    found, steps = False, {}

    def transfer(eqn, facts):
        nonlocal found
        name, params = eqn.primitive.name, eqn.params
        moving = [_entries(fact.fact if isinstance(fact, Columns | Placed) else fact) for fact in facts]
        if (inside := nested(eqn)) is not None:
            if inside.kind == "cond" and moving[0] is not None:
                return decided(eqn, moving[0], [walk(branch, facts[1:]) for branch in inside.jaxprs])
            return over_entries(inside, facts) if inside.kind == "scan" else None
        if name == "custom_linear_solve":
            counts, solve = params["const_lengths"], opened(params["jaxprs"].solve)
            first = counts.matvec + counts.vecmat
            return walk(solve, [*facts[first : first + counts.solve], *facts[sum(counts) :]])
        if name == "mark" and params["kind"] in (start, *ends) and params["label"] > axis:
            shape = eqn.invars[0].aval.shape
            each = _each(axis, shape[axis], len(shape))
            found |= moving[0] is not None and bool(((moving[0].of != NONE) & (moving[0].of != each.of)).any())
            if params["kind"] is start:
                return [each]
        if name == "stop_gradient":
            return [fact if moving[0] is None else Constant(fact) for fact in facts]
        made = _made(eqn, moving, facts)
        if name == "concatenate":
            made = [_columns(eqn, facts, made[0])]
        if not any(made):
            constant = [_entries(fact.fact) if isinstance(fact, Constant) else None for fact in facts]
            made = [*map(_constant, _made(eqn, constant, facts))]
        if not all(made) and (places := _indices(eqn, facts)):
            made = [fact or place for fact, place in zip(made, places, strict=True)]
        return [Placed(fact) if _is_placed(eqn, facts, fact) else fact for fact in made]

    def decided(eqn, by, branches):  # what a branch returns depends on the entries that chose it; a key says nothing
        def chosen(var, facts):
            fact, is_key = functools.reduce(join, facts), jnp.issubdtype(var.aval.dtype, jax.dtypes.extended)
            return fact if is_key else Entries(_both(_array(fact, var.aval.shape), by.of))

        return [*map(chosen, eqn.outvars, zip(*branches, strict=True))]

    def over_entries(scan, facts):  # if steps have entries; what a step hands on depends on those before, too
        (same, carried, _), (body,) = scan.counts, scan.jaxprs
        first, arrays = facts[: same + carried], facts[same + carried :]
        over = [isinstance(f, Entries) and f.of.shape[0] == f.of.size > 1 for f in arrays]
        if not any(over):
            return None
        # For each order of entries along the steps, a number that stands for the step's.
        own = [
            steps.setdefault((id(body), f), SEVERAL - 1 - len(steps)) if o else None
            for f, o in zip(arrays, over, strict=True)
        ]
        orders = {number: f.of.ravel() for number, f in zip(own, arrays, strict=True) if number is not None}

        def with_orders(fact, orders):
            if not isinstance(fact, Entries):
                return fact
            of = fact.of
            for number, order in orders.items():
                of = np.where(of == number, order.reshape(-1, *[1] * (of.ndim - 1)) if order.ndim else order, of)
            return Entries(of)

        def step(facts):
            made = walk(body, facts)
            of_several = dict.fromkeys(orders, np.array(SEVERAL))
            return [*(with_orders(fact, of_several) for fact in made[:carried]), *made[carried:]]

        entry = lambda f, number: _shifted(-1)(f) if number is None else Entries(np.full(f.of.shape[1:], number))
        made = steady(step, [*first, *map(entry, arrays, own)], same, carried, join)[1]
        return [*made[:carried], *(with_orders(_shifted(1)(fact), orders) for fact in made[carried:])]

    def walk(program, facts):
        return flow(program, facts, transfer, join, _of_constant, _shifted(-1), _shifted(1))

    def join(a, b):  # what a loop hands on or a branch returns is mixed if it may be
        a, b = (a, b) if a is b else (_unsure(a), _unsure(b))
        if isinstance(a, Entries) and isinstance(b, Entries):
            return Entries(_both(a.of, b.of))
        if isinstance(a, Constant) and isinstance(b, Constant):
            return Constant(join(a.fact, b.fact))
        return a if a is b else max(a, b, key=rank)

    order = {type(None): 0, Indices: 0.5}
    rank = lambda f: rank(f.fact) - 2 if isinstance(f, Constant) else order.get(type(f), 3)
    walk(program, [None] * len(program.jaxpr.invars))
    return found


# These put an entry of one operand together with an entry of another one.
_BY_PLACE = kinds.ELEMENTWISE | kinds.PRODUCT | BY_ELEMENT
_WRITES = {"dynamic_update_slice", *(name for name in kinds.COMBINE if name.startswith("scatter"))}


# The facts of what an equation makes, by those of its operands that are `Entries`; `facts` say which places.
def _made(eqn, given, facts) -> list[Any]:
    name, outs = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    if not any(given) or name == "any_mapped":
        return [None] * len(outs)
    if name in ("concatenate", "stack"):
        return [_of(_in_a_row(eqn, given))]
    if name in kinds.SAME_VALUE:
        return given[: len(outs)]
    if name == "gather":
        return [_of(_read(eqn, given, facts))]
    if name == "dynamic_slice":
        return [_of(_sliced(eqn, given, facts[1:]))]
    if name in _WRITES:
        return [_of((_updated if name == "dynamic_update_slice" else _scattered)(eqn, given, facts))]
    moved = [_moved(eqn, n, fact.of) for n, fact in enumerate(given) if fact is not None]
    known = [each for each in moved if each is not None]
    if not known:
        return [Entries(_everywhere(SEVERAL, out)) if all(map(_is_mixed, given)) else None for out in outs]
    return [_of(functools.reduce(_both, each)) for each in zip(*known, strict=True)]


# For each output the numbers of entries that come from one operand; None where that is not known.
def _moved(eqn, number, of) -> list[Any] | None:
    name, params, outs = eqn.primitive.name, Parameters(eqn), [v.aval.shape for v in eqn.outvars]
    if name == "split":
        starts = np.cumsum([0, *params["sizes"]])
        return [_cut(of, params["axis"], *pair) for pair in itertools.pairwise(starts)]
    if name == "unstack":
        return [_cut(of, params["axis"], n, n + 1).squeeze(params["axis"]) for n in range(len(outs))]
    if name in OF_MATRICES - {"custom_linear_solve", "triangular_solve"}:
        rank = 1 if name == "lu_pivots_to_permutation" or (name, number) == ("householder_product", 1) else 2
        whole = _over(of, range(of.ndim - rank, of.ndim))
        return [whole.reshape(*of.shape[: of.ndim - rank], *[1] * (len(out) - of.ndim + rank)) for out in outs]
    made = _alike(eqn, number, of) if outs else None
    return None if made is None else [made] * len(outs)


def _alike(eqn, number, of):  # of an equation whose outputs are all alike
    name, params, after = eqn.primitive.name, Parameters(eqn), eqn.outvars[0].aval.shape
    before = eqn.invars[number].aval.shape
    if name in kinds.ELEMENTWISE or name in BY_ELEMENT:
        return of.reshape(of.shape or (1,) * len(after))  # a number meets arrays, as in a clamp or a choice of all
    if name == "broadcast_in_dim":
        return _put(of, dict(enumerate(params["broadcast_dimensions"])), len(after))
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
        return _over(of, gone).squeeze(gone)
    if name in ALONG:
        return _over(of, np.ravel(params[ALONG[name]]).tolist())
    if name == "fft":
        return _over(of, range(of.ndim - len(params["fft_lengths"]), of.ndim))
    if name == "triangular_solve":
        rows, columns = of.ndim - 2, of.ndim - 1
        return _over(of, (rows, columns) if number == 0 else (rows,) if params["left_side"] else (columns,))
    if name.startswith("reduce_window"):
        keys = "window_dimensions", "window_strides", "window_dilation", "base_dilation", "padding"
        return _by_windows(of, range(of.ndim), zip(*(params[key] for key in keys), strict=True))
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        free = [a for a in range(of.ndim) if a not in (*contracted[number], *batch[number])]
        ahead = len(batch[0]) if number == 0 else len(after) - len(free)
        to = {a: n for n, a in enumerate(batch[number])} | {a: ahead + n for n, a in enumerate(free)}
        return _put(_over(of, contracted[number]), to, len(after))
    if name == "conv_general_dilated" and params["batch_group_count"] == 1:
        how, one_group = params["dimension_numbers"], params["feature_group_count"] == 1
        spec, out = (how.lhs_spec, how.rhs_spec)[number], how.out_spec
        if number == 1:  # a kernel, (features made, features, *places)
            return _put(_over(of, spec[1:]), {spec[0]: out[1]}, len(after)) if one_group else None
        if not one_group and _along(of, spec[1]):
            return None
        size = [eqn.invars[1].aval.shape[a] for a in how.rhs_spec[2:]]
        keys = "window_strides", "rhs_dilation", "lhs_dilation", "padding"
        of = _by_windows(_over(of, spec[1:2]), spec[2:], zip(size, *(params[key] for key in keys), strict=True))
        return None if of is None else _put(of, dict(zip(spec, out, strict=True)), len(after))
    return None


def _cut(of, axis, first, last):
    return of[(slice(None),) * axis + (slice(first, last),)] if _along(of, axis) else of


def _padded(of, axis, low, high, between=0):
    size = of.shape[axis]
    to = low + np.arange(size) * (between + 1)
    length = low + high + size + between * max(size - 1, 0)
    made, inside = np.full((*of.shape[:axis], length, *of.shape[axis + 1 :]), NONE, np.int32), (to >= 0) & (to < length)
    made[(slice(None),) * axis + (to[inside],)] = np.compress(inside, of, axis)
    return made


def _by_windows(of, axes, windows):
    for axis, (size, stride, apart, base, (low, high)) in zip(axes, windows, strict=True):
        if not _along(of, axis):
            continue
        if base != 1:
            return None
        of = _padded(of, axis, low, high)
        starts = np.arange(0, of.shape[axis] - (size - 1) * apart, stride)
        ahead = (slice(None),) * axis
        of = _over(of[(*ahead, starts[:, None] + apart * np.arange(size))], [axis + 1]).squeeze(axis + 1)
    return of


def _reshaped(of, before, after):
    same = lambda a, b: next((n for n, (i, j) in enumerate(zip(a, b, strict=False)) if i != j), min(len(a), len(b)))
    first = same(before, after)
    last = same(before[first:][::-1], after[first:][::-1])
    lead, within, rest = of.shape[:first], of.shape[first : of.ndim - last], of.shape[of.ndim - last :]
    inner, outer = before[first : of.ndim - last], after[first : len(after) - last]
    if 0 in after:
        return _everywhere(NONE, after)
    if all(n == 1 for n in within):
        return of.reshape(*lead, *[1] * len(outer), *rest)
    if _is_long((*lead, *inner, *rest)):
        return None
    return np.broadcast_to(of, (*lead, *inner, *rest)).reshape(*lead, *outer, *rest)


def _in_a_row(eqn, given):  # of operands that are joined along an axis, or stacked along a new one
    params, stack = Parameters(eqn), eqn.primitive.name == "stack"
    axis, after = params["axis" if stack else "dimension"], eqn.outvars[0].aval.shape
    sizes = [1 if stack else v.aval.shape[axis] for v in eqn.invars]
    of = [np.expand_dims(f.of, axis) if stack and f is not None else _array(f, after) for f in given]
    shape = np.broadcast_shapes(*((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in of))
    if _is_long((*shape, sum(sizes))):
        first, *others = [x for x, fact in zip(of, given, strict=True) if fact is not None]
        return None if _along(first, axis) or any(not np.array_equal(first, x) for x in others) else first
    full = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
    return np.concatenate([np.broadcast_to(x, to) for x, to in zip(of, full, strict=True)], axis)


def _is_mixed(fact):
    fact = getattr(fact, "fact", fact)
    return isinstance(fact, Entries) and bool((fact.of == SEVERAL).any())


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


def _read(eqn, given, facts):  # what is gathered: of the entries that say where, and of those that are there
    how, sizes = Parameters(eqn)["dimension_numbers"], Parameters(eqn)["slice_sizes"]
    (operand, places), after = [v.aval.shape for v in eqn.invars], eqn.outvars[0].aval.shape
    apart, made = [a for a in range(len(after)) if a not in how.offset_dims], _everywhere(NONE, after)
    if given[1] is not None:
        of = _over(given[1].of, [len(places) - 1])
        made = _put(of, dict(enumerate(apart)), len(after))
    if given[0] is None:
        return made
    of = given[0].of
    window = [a for a in range(len(operand)) if a not in (*how.collapsed_slice_dims, *how.operand_batching_dims)]
    to = dict(zip(window, how.offset_dims, strict=True))
    for a, n in zip(how.operand_batching_dims, how.start_indices_batching_dims, strict=True):
        to[a] = apart[n]
    cut = [n for n, a in enumerate(how.start_index_map) if _along(of, a) and sizes[a] < operand[a]]
    if not cut:
        return _both(made, _put(of, to, len(after)))
    columns, axes = [_index(facts[1], n) for n in cut], [how.start_index_map[n] for n in cut]
    if len(cut) == 1 and _is_known(columns[0]) and sizes[axes[0]] == 1:
        (axis,), values = axes, np.clip(np.asarray(columns[0].values)[..., 0], 0, operand[axes[0]] - 1)
        of, ahead = np.moveaxis(of, axis, 0), values.ndim
        if _is_long((*values.shape, *of.shape[1:])):
            return made
        of = of[values]
        rest = {n + ahead: to[a] for n, a in enumerate(a for a in range(len(operand)) if a != axis) if a in to}
        return made if how.operand_batching_dims else _both(made, _put(of, dict(enumerate(apart)) | rest, len(after)))
    for axis, place in zip(axes, columns, strict=True):
        if place is ANY_INDICES or isinstance(place, Placed) or _is_known(place):
            continue
        # Fewer indices may be those of a part that stays by itself.
        if _is_mixed(place) or operand[axis] in places[:-1]:
            return _everywhere(SEVERAL, after)
    return made


def _sliced(eqn, given, indices):  # `dynamic_slice`
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    made = functools.reduce(_both, (fact.of for fact in given[1:] if fact is not None), np.full((), NONE))
    of = None if given[0] is None else given[0].of
    for axis, place in enumerate(indices):
        if of is not None and _along(of, axis) and after[axis] != before[axis]:
            if _is_mixed(place):
                return _everywhere(SEVERAL, after)
            start = np.clip(int(place.values), 0, before[axis] - after[axis]) if _is_known(place) else None
            of = None if start is None else _cut(of, axis, start, start + after[axis])
    return np.broadcast_to(made, (1,) * len(after)) if of is None else _both(of, made)


def _somewhere(of, new, indices):  # what is written, in places that are not known, may be in its own place
    by = [fact.of.reshape((1,) * of.ndim) for fact in indices if fact is not None and fact.of.size == 1]
    return _everywhere(SEVERAL, of.shape) if any(map(_is_mixed, (new, *indices))) else functools.reduce(_both, by, of)


def _updated(eqn, given, facts):  # `dynamic_update_slice`
    shape, part = [v.aval.shape for v in eqn.invars[:2]]
    of, new = _array(given[0], shape), _array(given[1], part)
    partial = [a for a, n in enumerate(shape) if part[a] != n]
    full = [n if a in partial else max(of.shape[a], new.shape[a]) for a, n in enumerate(shape)]
    if not all(_is_known(facts[2 + a]) for a in partial) or _is_long(full):
        return _somewhere(of, given[1], given[2:])
    starts = {a: int(np.clip(int(facts[2 + a].values), 0, shape[a] - part[a])) for a in partial}
    made = np.broadcast_to(of, full).copy()
    made[tuple(slice(starts[a], starts[a] + part[a]) if a in starts else slice(None) for a in range(len(shape)))] = new
    return made


def _scattered(eqn, given, facts):  # `scatter` and its like
    shapes = [v.aval.shape for v in eqn.invars]
    whole = [None if fact is None else _whole(fact.of, shape) for fact, shape in zip(given, shapes, strict=True)]
    sure = all(f is None or w is not None for f, w in zip(given, whole, strict=True))
    axis, of, ndim = _written(eqn, whole, facts[1]), _array(given[0], shapes[0]), len(shapes[0])
    if not _is_known(facts[1]) or any(map(_is_long, shapes)) or (sure and axis not in (None, SEVERAL)):
        if axis is not None:
            of = (
                _everywhere(SEVERAL, shapes[0]) if axis == SEVERAL else _both(of, _each(axis, shapes[0][axis], ndim).of)
            )
        return _somewhere(of, given[2], given[1:2])
    places = Parameters(eqn)["dimension_numbers"]
    replaces, new = eqn.primitive.name == "scatter", _array(given[2], shapes[2])

    def extreme(scatter, start):
        values = np.broadcast_to(new if replaces else np.where(new == NONE, start, new), shapes[2])
        with jax.ensure_compile_time_eval():
            first, values = jnp.full(shapes[0], start, jnp.int32), jnp.asarray(values, jnp.int32)
            return np.asarray(scatter(first, facts[1].values, values, places, mode=eqn.params["mode"]))

    low, high = extreme(lax.scatter_min, _LARGEST), extreme(lax.scatter_max, _LEAST)
    written = _one_of(low, high)
    return np.where(low > high, of, written) if replaces else _both(of, written)


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
        single = any(isinstance(c, Placed) or (_is_known(c) and _is_apart(c, axis)) for c in columns)
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


_CONSTANT = _BY_PLACE | REDUCTIONS | kinds.SAME_VALUE | kinds.VIEW | _WRITES | OF_MATRICES | {*ALONG}
_CONSTANT |= {"dynamic_slice", "fft", "gather", "iota", "pad", "slice", "stack", "tile", "unstack"}
_CONSTANT -= {"pmax", "pmin", "psum"}


def _of_constant(value):
    if isinstance(value, Tracer):
        return ANY_INDICES if np.ndim(value) and _is_integer(value) else None
    return Indices(lambda: value, bool(np.ndim(value)) and _is_integer(value))


def _is_integer(value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.integer)
