"""The plus over axes, over elements of one index and in matrix products; fast if it is addition or the maximum."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._programs.jaxprs import is_inexact
from apgrad.tracing._semirings import LOG, Semiring, Value

CHUNK = 16  # maxima taken at once: fewer, and memory traffic costs more (2 to 8: the compiler makes no vectors of them)
SMALL = 4096  # elements below which a step of the loop costs more than its work


def constant(scalars: tuple[float | int, ...], shape: Any, dtype: Any) -> Value:
    """A value that is the same everywhere: a float makes an array of the dtype, an int one of dtype uint32."""
    return tuple(jnp.full(shape, s, form(s, dtype)) for s in scalars)


def form(scalar: float | int, dtype: Any) -> Any:
    """The dtype at a variable: of logarithms float32 at least, as half precision hardly tells them from each other."""
    return np.uint32 if isinstance(scalar, int) else np.promote_types(dtype, LOG) if isinstance(scalar, LOG) else dtype


def zeros(semiring: Semiring, shape: Any, dtype: Any) -> Value:
    return constant(semiring.zero, shape, dtype)


def structs(values: Iterable[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in values]


def filled(
    semiring: Semiring, messages: Sequence[Value | None], like: Sequence[Any], wanted: Sequence[bool] | None = None
) -> list[Any]:
    """The messages to some arrays, with zeros where a floating-point array that wants one has None."""

    def fill(message, x, wanted):
        if not (wanted and is_inexact(x)):
            return None
        return zeros(semiring, jnp.shape(x), jnp.result_type(x)) if message is None else message

    return [fill(*row) for row in zip(messages, like, wanted or [True] * len(like), strict=True)]


def plus_over(semiring: Semiring, value: Value, axes: tuple[int, ...]) -> Value:
    """The plus over axes. Where elements are equal, the first in row-major order wins."""
    if not axes:
        return value
    if semiring.kind == "add":
        return tuple(jnp.sum(x, axis=axes, dtype=x.dtype) for x in value)
    shape = jnp.shape(value[0])
    rest = tuple(i for i in range(len(shape)) if i not in axes)
    count, remaining = math.prod(shape[i] for i in axes), tuple(shape[i] for i in rest)
    if semiring.kind == "max":
        best, lost = jnp.max(value[0], axis=axes), jnp.any(jnp.isnan(value[0]), axis=axes)
        return (jnp.where(lost, jnp.nan, best),)  # XLA's maximum on a CPU may pass over NaN
    value = tuple(jnp.transpose(x, (*sorted(axes), *rest)).reshape(count, *remaining) for x in value)
    if semiring.compared is not None:
        place = jnp.argmax(value[semiring.compared], axis=0)[None]  # the first, and NaN before all
        chosen = jax.lax.broadcasted_iota(place.dtype, value[0].shape, 0) == place
        added = tuple(jnp.sum(x, axis=0) for x in value[: semiring.compared])
        sole = lambda x: jnp.sum(jnp.where(chosen, x, jnp.zeros_like(x)), axis=0, dtype=x.dtype)
        return *added, *map(sole, value[semiring.compared :])
    return _fold(semiring, value)


def plus_of(semiring: Semiring, a: Value, b: Value) -> Value:
    if semiring.kind != "max" and semiring.compared is None:
        return semiring.plus(a, b)
    # Where edges meet, the message is used twice. XLA for CPUs computes a cheap operation again in each of its uses,
    # and so, block by block, all that came before; it computes a reduction once, unless it is of a stack.
    first = lambda x: jax.lax.broadcasted_iota(np.int32, (2, *x.shape), 0) == 0
    return plus_over(semiring, tuple(jnp.where(first(x), x, y) for x, y in zip(a, b, strict=True)), (0,))


def plus_over_copies(semiring: Semiring, value: Value, wide: Any, narrow: Any, shape: Any) -> Value:
    """The messages to an array of a shape, which was reshaped to `narrow`, broadcast to `wide` and reshaped again."""
    if tuple(wide) == shape:
        return value
    axes = tuple(i for i, n in enumerate(narrow) if n == 1 != wide[i])
    value = plus_over(semiring, tuple(x.reshape(wide) for x in value), axes)
    return tuple(x.reshape(shape) for x in value)


def _fold(semiring: Semiring, value: Value) -> Value:
    """The plus over the first axis, in order: over each piece of it, all pieces at once, then over the pieces."""
    count, rest = value[0].shape[0], value[0].shape[1:]
    if count <= 8:
        return functools.reduce(semiring.plus, [tuple(x[i] for x in value) for i in range(count)])
    pieces = min(SMALL // math.prod(rest) + 1, math.isqrt(count))
    length = -(-count // pieces)
    fill = -count % length
    if fill:
        value = _concatenate(value, zeros(semiring, (fill, *rest), dtype_of(value)))
    steps = tuple(jnp.swapaxes(x.reshape(-1, length, *rest), 0, 1) for x in value)
    first, others = tuple(x[0] for x in steps), tuple(x[1:] for x in steps)
    total, _ = jax.lax.scan(lambda total, x: (semiring.plus(total, x), None), first, others)
    return _fold(semiring, total)


def plus_by_index(semiring: Semiring, value: Value, index: jax.Array, size: int) -> Value:
    """For each i below `size`, the plus of the elements whose index is i; other indices are left out."""
    index = jnp.where((index >= 0) & (index < size), index, size).ravel()
    value, dtype = tuple(x.ravel() for x in value), dtype_of(value)
    result = zeros(semiring, (size,), dtype)
    added = lambda n: tuple(r.at[index].add(x, mode="drop") for r, x in zip(result[:n], value[:n], strict=True))
    if semiring.kind == "add":
        return added(len(value))
    if semiring.kind == "max":
        return (_greatest_by_index(value[0], index, result[0]),)
    if (compared := semiring.compared) is not None:
        strength = value[compared]
        best = _greatest_by_index(strength, index, result[compared])
        own = (strength == best.at[index].get(mode="fill", fill_value=-1)) | jnp.isnan(strength)
        place = jnp.arange(index.size)
        later = zip(value[compared:], semiring.zero[compared:], strict=True)
        first = jnp.full(size, index.size).at[index].min(jnp.where(own, place, index.size), mode="drop")
        return *added(compared), *(x.at[first].get(mode="fill", fill_value=z) for x, z in later)
    order = jnp.argsort(index, stable=True)
    index, value = index[order], tuple(x[order] for x in value)

    def double(step, value):  # makes a value the plus of up to 2^(step + 1) elements of its index
        distance = 1 << step
        before = lambda x: jax.lax.dynamic_slice(jnp.concatenate([x, x]), (x.size - distance,), (x.size,))
        inside = (jnp.arange(index.size) >= distance) & (before(index) == index)
        both = semiring.plus(tuple(before(x) for x in value), value)
        return tuple(jnp.where(inside, x, y) for x, y in zip(both, value, strict=True))

    value = jax.lax.fori_loop(0, (index.size - 1).bit_length(), double, value)
    last = jnp.concatenate([index[1:] != index[:-1], jnp.ones(1, bool)])
    target = jnp.where(last, index, size)
    return tuple(r.at[target].set(x, mode="drop") for r, x in zip(result, value, strict=True))


def _greatest_by_index(value, index, start):
    best = start.at[index].max(value, mode="drop")
    lost = jnp.zeros(start.shape, bool).at[index].max(jnp.isnan(value), mode="drop")
    return jnp.where(lost, jnp.nan, best)


def contract(
    semiring: Semiring, weight: jax.Array, message: Value, swapped: bool = False, precision: Any = None
) -> Value:
    """The matrix product with the semiring's plus and times, from (B, J, C) and (B, J, I) to (B, C, I).

    It is the plus over j of weight[b, j, :, None] * message[b, j, None, :], or (B, I, C) if it is wanted `swapped`. The
    largest array made is of the result's size, or small: products are taken one or `CHUNK` at a time.
    """
    weight = weight.astype(dtype_of(message))
    (batch, count, rows), columns = weight.shape, message[0].shape[2]
    if semiring.kind == "add":
        rule = "bjc,bji->bic" if swapped else "bjc,bji->bci"
        product = lambda a, b: jnp.einsum(rule, a, b, precision=precision)
        return bilinear(semiring, semiring.lift(weight), message, product)
    size = (columns, rows) if swapped else (rows, columns)

    def products(left, right):
        along = lambda value, axis: tuple(jnp.expand_dims(x, axis) for x in value)
        return semiring.times(along(left, -2 if swapped else -1), along(right, -1 if swapped else -2))

    # All products at once, which compiles in less time; a maximum over them does not even keep them.
    if batch * count * rows * columns <= SMALL * (CHUNK if semiring.kind == "max" else 1 / 8):
        value = products(semiring.lift(weight), message)
        return plus_over(semiring, tuple(jnp.broadcast_to(x, (batch, count, *size)) for x in value), (1,))
    # If the result is too small for a step of the loop, several are made at once, each from its own piece of axis j.
    chunk = _divisor(count, CHUNK) if semiring.kind == "max" else 1
    parts = _divisor(-(-count // chunk), SMALL // (batch * rows * columns) + 1)
    length = -(-count // (parts * chunk)) * chunk
    fill = parts * length - count
    if fill:
        weight = jnp.pad(weight, ((0, 0), (0, fill), (0, 0)))
        message = _concatenate(message, zeros(semiring, (batch, fill, columns), dtype_of(message)), axis=1)
    weight = weight.reshape(batch, parts, length, rows)
    message = tuple(x.reshape(batch, parts, length, columns) for x in message)
    plus = _select_greater if semiring.kind == "max" else semiring.plus

    def add(step, total):
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, step * chunk, chunk, axis=2)
        # Lifted here, a chunk at a time, and once: without the barrier the compiler would do it for every product.
        left, right = jax.lax.optimization_barrier(semiring.lift(cut(weight))), [cut(x) for x in message]
        for i in range(chunk):
            total = plus(total, products([x[:, :, i] for x in left], [x[:, :, i] for x in right]))
        return total

    total = zeros(semiring, (batch, parts, *size), dtype_of(message))
    if semiring.kind == "max":
        flat = [x.reshape(batch, -1, x.shape[3]) for x in (semiring.lift(weight)[0], message[0])]
        total = (jnp.where(_bad(semiring, *flat[:: -1 if swapped else 1])[:, None], jnp.nan, total[0]),)
    total = add(0, total) if length == chunk else jax.lax.fori_loop(0, length // chunk, add, total)
    return plus_over(semiring, total, (1,))


def _divisor(count: int, wanted: int) -> int:
    """A divisor of count, up to twice what is wanted, if there is one, so that nothing has to be filled up."""
    return next((n for n in range(min(wanted, count), 2 * wanted) if count % n == 0), wanted)


def bilinear(semiring: Semiring, lifted: Value, message: Value, product: Any) -> Value:
    """`semiring.times` with another product of arrays, such as a matrix product, in place of the elementwise product.

    A bilinear times is times(a, b)_k = sum over i, j of c_kij a_i b_j. The times of unit vectors gives the constants c.
    """
    with_units = lambda value: zip(value, map(tuple, np.eye(len(value), dtype=np.float32)), strict=True)
    terms: list[list[Any]] = [[] for _ in semiring.zero]
    for (x, a), (y, b) in itertools.product(with_units(lifted), with_units(message)):
        for term, coefficient in zip(terms, semiring.times(a, b), strict=True):
            if coefficient != 0:
                made = product(x, y)
                term.append(made if coefficient == 1 else made * float(coefficient))
    return tuple(sum(t[1:], t[0]) if t else jnp.zeros_like(product(lifted[0], message[0])) for t in terms)


def _select_greater(a, b):
    # Faster than `greater`, which looks for NaN. So NaN is lost here; but nothing is greater than NaN, and where one
    # may come, the total begins as NaN.
    return (jnp.where(b[0] > a[0], b[0], a[0]),)


def _bad(semiring, first, second):
    """Where a factor is NaN, or may make a NaN (0 times infinity)."""
    limit = jnp.isnan if semiring.zero[0] == -jnp.inf else lambda x: ~jnp.isfinite(x)
    return jnp.any(limit(first), axis=1)[:, :, None] | jnp.any(limit(second), axis=1)[:, None, :]


def _concatenate(a, b, axis=0):
    return tuple(jnp.concatenate(pair, axis) for pair in zip(a, b, strict=True))


def dtype_of(value: Value) -> Any:
    """The dtype of the floating-point components; components of another dtype are masks."""
    return next(x.dtype for x in value if jnp.issubdtype(x.dtype, jnp.inexact))
