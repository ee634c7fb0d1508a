"""Samplers: a smaller, random memory of an array whose expectation is the array.

Where a remembered coefficient x enters a reverse pass linearly, an unbiased estimate of it, drawn independently of all
others, gives an unbiased gradient (Oktay, McGreivy, Aduol, Beatson & Adams, "Randomized automatic differentiation",
ICLR 2021, section 3.2). `keep` draws the memory; `restore` makes the estimate, drawing indices again from the same key.

An array has a sampled axis of size d. The axes before this axis are examples, and the axes after it go along, as the
channels at a position of an image do. With k of d entries kept, the variance of an element x_i (method `variance`) is:

* different sample, k indices for each example, or same sample, one set for all, entries times d/k (a factor that the
  paper's P lacks): (d-1)/k x_i^2, or (d-k)/k x_i^2 without replacement;
* stratified, one entry of each of k runs of s neighbours, times s: (s-1) x_i^2;
* projection (Appendix A), x R R^T, R of independent signs over sqrt(k), (d, k): (sum_{j != i} x_j^2)/k;
* rounding (Chen et al., "ActNN", ICML 2021) to a grid, up with the probability p: scale^2 p (1-p) <= scale^2 / 4;
* heavy (Liu et al., "Winner-take-all column row sampling", NeurIPS 2023): none for the largest, the rest is sampled.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from apgrad._ground.arguments import meets, require_call
from apgrad._ground.messages import describe
from apgrad._programs.jaxprs import trace
from apgrad.memory._packing import Packing as Packing, narrow as narrow, packing as packing
from apgrad.memory._rounding import Memory, Rounding as Rounding, rounding as rounding, wide

__all__ = ["Sampler", "different_sample", "heavy", "nbytes", "projection", "same_sample", "stratified"]


@runtime_checkable
class Sampler(Protocol):
    """What `apgrad.randomize` asks of a sampler; a frozen dataclass, so that it is hashable.

    The estimate must be unbiased, E restore(key, keep(key, x, axis), like, axis) = x over the key. A sampler with an
    attribute `shared` that is true draws the same for all examples: its memory is an array, or a tuple or list that
    begins with one, and `restore` maps this array linearly, by one map along the axis for all examples. So a product
    that sums over examples is taken of this small array, and `restore` is given the product in place of the array. In
    place of a tuple or list it is given a tuple of the product and of the second entry, if there is one. A sampler with
    an attribute `fraction` keeps so much of the entries; where noise would multiply, `through` takes its place.
    """

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Any:
        """The memory of an array, a pytree of arrays: all that the backward pass has of the array, besides the key.

        Args:
          key: a typed PRNG key.
          x: an array of any shape and floating-point dtype.
          axis: the sampled axis.
        """
        ...

    def restore(self, key: jax.Array, memory: Any, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        """The estimate of an array.

        Args:
          key: the key of `keep`.
          memory: what `keep` returned.
          like: the array's shape and dtype.
          axis: the sampled axis.
        """
        ...


def require_sampler(what: str, sampler: Any) -> Any:
    if isinstance(sampler, type) or sampler in FACTORIES:
        raise TypeError(f"{what} is {sampler.__name__} itself: call it, as in ap.memory.rounding(bits=4)")
    if sampler is not None and not isinstance(sampler, Sampler):
        without = " and ".join(name for name in ("keep", "restore") if not hasattr(sampler, name))
        wanted = f"{what} must have keep and restore, or be None, or be a function that returns a sampler"
        raise TypeError(f"{wanted}; got {sampler!r}, without {without}")
    try:
        hash(sampler)
    except TypeError as error:
        raise TypeError(f"{what} is not hashable, {sampler!r}: make its class a frozen dataclass") from error
    if sampler is not None:
        require_call(f"keep of {what}", sampler.keep, ("key", "x", "axis"))
        require_call(f"restore of {what}", sampler.restore, ("key", "memory", "like", "axis"))
    return sampler


@jax.numpy_rank_promotion("allow")
def kept(sampler: Sampler, key: jax.Array, x: jax.Array, axis: int = -1) -> Any:
    memory = sampler.keep(key, x, axis)
    for leaf in jax.tree.leaves(memory):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise TypeError(f"keep of the sampler {sampler!r} is to return a pytree of arrays, got {leaf!r} in it")
    if getattr(sampler, "shared", False) and axis % x.ndim == x.ndim - 1:
        first = next(iter(memory), None) if isinstance(memory, tuple | list) else memory
        if not isinstance(first, jax.Array) or first.shape[:-1] != x.shape[:-1] or first.ndim != x.ndim:
            axes = ", ".join([*map(str, x.shape[:-1]), "..."])
            raise TypeError(
                f"the memory of the sampler {sampler!r} is to be, or to begin with, an array of the shape of x but for "
                f"its last axis, {x.dtype}[{axes}], since the sampler is `shared`; got {describe(memory)}"
            )
    return memory


@jax.numpy_rank_promotion("allow")
def restored(sampler: Sampler, key: jax.Array, memory: Any, like: Any, axis: int = -1) -> jax.Array:
    found = sampler.restore(key, memory, like, axis)
    if (jnp.shape(found), jnp.result_type(found)) != (like.shape, like.dtype):
        raise ValueError(
            f"restore of the sampler {sampler!r} is to give an estimate in the shape and dtype of `like`, "
            f"{like.dtype.name}{list(like.shape)}, got {jnp.result_type(found).name}{list(jnp.shape(found))}"
        )
    return found


def array_bytes(like: Any) -> int:
    aval = jax.ShapeDtypeStruct(like.shape, like.dtype)
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        aval = jax.eval_shape(jax.random.key_data, aval)
    return math.prod(aval.shape) * aval.dtype.itemsize


def nbytes(sampler: Sampler, like: Any) -> int:
    """The bytes of a sampler's memory of an array.

    Args:
      sampler: any sampler.
      like: has the array's shape and dtype.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> ap.memory.nbytes(ap.memory.rounding(bits=4), jax.ShapeDtypeStruct((100, 128), jnp.float32))  # of 51,200
      6800
    """
    return _nbytes(sampler, like.shape, like.dtype)


# A plan asks for each coefficient of a function, many of which have one shape, and tracing `keep` takes milliseconds.
@functools.lru_cache(1024)
def _nbytes(sampler: Sampler, shape: tuple[int, ...], dtype: Any) -> int:
    if not math.prod(shape):
        return 0
    like = jax.ShapeDtypeStruct(shape, dtype)

    def both(x):
        memory = kept(sampler, key := jax.random.key(0), x)
        return memory, restored(sampler, key, memory, like) if isinstance(sampler, Packing) else None

    program, (memory, _) = trace(both, like)
    if any(isinstance(value, Tracer) for value in program.consts):
        raise TypeError(
            f"the sampler {sampler!r} closes over an array that JAX traces, which the reverse pass does not have. Give "
            "it numbers that are known, or let it make them of x and put them into the memory."
        )
    return sum(array_bytes(leaf) for leaf in jax.tree.leaves(memory))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Keeps a fraction of the entries, `shared` by all examples or not; see `different_sample` and its like."""

    fraction: float
    shared: bool
    scheme: Literal["replacement", "distinct", "stratified"]

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> jax.Array:
        rows = _rows(x, axis)
        index, _ = self.draw(key, rows.shape)
        take = jnp.take if self.shared else jnp.take_along_axis
        kept = take(rows, index if self.shared else index[..., None], axis=1)
        return kept.reshape(_with(x.shape, axis, kept.shape[1]))

    def restore(self, key: jax.Array, memory: jax.Array, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        rows = jax.eval_shape(lambda x: _rows(x, axis), like).shape
        index, weight = self.draw(key, rows)
        zeros, memory = _zeros_after(rows, memory.reshape(rows[0], index.shape[-1], rows[2]))
        memory = _weighed(memory, weight)
        if self.shared:
            return zeros.at[:, index].add(memory).reshape(like.shape)
        if self.scheme == "stratified" and rows[1] % index.shape[-1] == 0:
            # The run is known, only the place in it is drawn: a comparison in place of a scatter.
            run = rows[1] // index.shape[-1]
            hit = (index % run)[..., None] == jnp.arange(run, dtype=index.dtype)
            spread = jnp.where(hit[..., None], memory[:, :, None, :], 0)
            return spread.reshape(like.shape)
        return jax.vmap(lambda z, i, m: z.at[i].add(m))(zeros, index, memory).reshape(like.shape)

    def draw(self, key: jax.Array, rows: tuple[int, ...]) -> tuple[jax.Array, np.ndarray]:
        """Indices (examples, k), or (k,) if shared, int32, and the weights (k,) of what is kept, float64."""
        count, size, _ = rows
        k = _kept(self.fraction, size)
        shape = (k,) if self.shared else (count, k)
        if self.scheme == "stratified":
            starts, runs = _runs(size, k)
            place = (jax.random.uniform(key, shape, jnp.float32) * runs.astype(np.float32)).astype(jnp.int32)
            return jnp.minimum(place, runs - 1) + starts, runs.astype(np.float64)
        weight = np.full((k,), size / k)
        if self.scheme == "replacement":
            return jax.random.randint(key, shape, 0, size), weight
        if k == size:
            return jnp.broadcast_to(jnp.arange(size), shape), weight
        # Without replacement: the places of the k largest of d independent numbers. As floats, since XLA finds the k
        # largest floats without sorting all; the 30 random bits begin at the smallest normal number.
        bits = (jax.random.bits(key, (*shape[:-1], size)) >> 2) + np.uint32(0x00800000)
        return jax.lax.top_k(jax.lax.bitcast_convert_type(bits, jnp.float32), k)[1], weight

    def variance(self, x: jax.Array, axis: int = -1) -> jax.Array:
        size, x = x.shape[axis], x.astype(wide(x.dtype))
        k = _kept(self.fraction, size)
        if self.scheme == "stratified":
            _, runs = _runs(size, k)
            others = np.repeat(runs - 1, runs).reshape((size,) + (1,) * (x.ndim - 1 - axis % x.ndim))
            return x**2 * jnp.asarray(others, x.dtype)
        return x**2 * ((size - 1) / k if self.scheme == "replacement" else (size - k) / k)


@dataclasses.dataclass(frozen=True)
class Projection:
    fraction: float
    shared = True

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Memory:
        """X R sqrt(k/d), (..., k, ...), with 0 where X is not finite; as bits, the columns and rows where it is not."""
        bad = ~jnp.isfinite(x)
        product = self._product(jnp.where(bad, 0, x), key, axis, 0, x.shape[axis], max(x.shape[axis], 1) ** -0.5)
        columns = jnp.any(jnp.moveaxis(bad, axis, -1), range(x.ndim - 1))
        return jnp.moveaxis(product, -1, axis), jnp.packbits(columns), jnp.packbits(jnp.any(bad, axis).reshape(-1))

    def restore(self, key: jax.Array, memory: Memory, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        """(x R) R^T, NaN where a row and a column that are not finite meet; after a sum over rows, in such columns."""
        product, columns, *rows = memory
        size = like.shape[axis]
        found = self._product(product, key, axis, 1, size, size**0.5 / _kept(self.fraction, size))
        bad = jnp.unpackbits(columns)[:size].astype(bool)
        for packed in rows:
            shape = found.shape[:-1]
            bad &= jnp.unpackbits(packed)[: math.prod(shape)].reshape(*shape, 1).astype(bool)
        return jnp.moveaxis(jnp.where(bad, jnp.nan, found), -1, axis)

    def _product(self, x: jax.Array, key: jax.Array, axis: int, side: int, size: int, scale: float) -> jax.Array:
        """The product with the signs (size, k) along their axis number `side`, times the scale."""
        signs = jax.random.rademacher(key, (size, _kept(self.fraction, size)), x.dtype)
        product = jnp.tensordot(x, signs, (axis, side), precision="highest", preferred_element_type=wide(x.dtype))
        return (product * scale).astype(x.dtype)

    def variance(self, x: jax.Array, axis: int = -1) -> jax.Array:
        square = x.astype(wide(x.dtype)) ** 2
        return (jnp.sum(square, axis, keepdims=True) - square) / _kept(self.fraction, x.shape[axis])


@dataclasses.dataclass(frozen=True)
class Heavy:
    fraction: float

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Memory:
        """The kept values (..., k, ...) and the places of the largest, (examples, winners)."""
        rows = _rows(x, axis)
        order = _largest(rows, self._counts(rows.shape[1])[0])
        index = jnp.concatenate([order, self._tail(key, order, rows.shape)], 1)
        values = jnp.take_along_axis(rows, index[..., None], 1)
        small = np.min_scalar_type(rows.shape[1] - 1)
        return values.reshape(_with(x.shape, axis, index.shape[1])), order.astype(small)

    def restore(self, key: jax.Array, memory: Memory, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        values, order = memory
        rows = jax.eval_shape(lambda x: _rows(x, axis), like).shape
        order = order.astype(jnp.int32)
        index = jnp.concatenate([order, self._tail(key, order, rows)], 1)
        zeros, values = _zeros_after(rows, values.reshape(rows[0], index.shape[1], rows[2]))
        winners, losers = self._counts(rows[1])
        values = _weighed(values, np.array([1.0] * winners + [(rows[1] - winners) / max(losers, 1)] * losers))
        return jax.vmap(lambda z, i, m: z.at[i].add(m))(zeros, index, values).reshape(like.shape)

    def _counts(self, size: int) -> tuple[int, int]:
        k = _kept(self.fraction, size)
        # At least one entry is sampled, unless all are kept: else the others would never be kept, which is a bias.
        winners = size if k == size else min(math.ceil(k / 2), k - 1)
        return winners, k - winners

    def _tail(self, key: jax.Array, order: jax.Array, rows: tuple[int, ...]) -> jax.Array:
        """Places of the sampled losers: each is the r-th entry that is no winner, with r uniform."""
        winners, losers = self._counts(rows[1])
        if losers == 0:
            return jnp.zeros((rows[0], 0), order.dtype)
        rank = jax.random.randint(key, (rows[0], losers), 0, rows[1] - winners, jnp.int32)
        # The r-th loser is at r plus the number of winners before it: order'[j] - j <= r counts them.
        gaps = jnp.sort(order, 1) - jnp.arange(winners, dtype=order.dtype)
        return (rank + jax.vmap(lambda g, r: jnp.searchsorted(g, r, side="right"))(gaps, rank)).astype(order.dtype)

    def variance(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """Zero for the winners, ((n - 1) / k) x^2 for n losers of which k are drawn."""
        rows = _rows(x.astype(wide(x.dtype)), axis)
        winners, losers = self._counts(rows.shape[1])
        order = _largest(rows, winners)
        won = jax.vmap(lambda i: jnp.zeros(rows.shape[1], bool).at[i].set(True))(order)
        return jnp.where(won[..., None], 0, rows**2 * ((rows.shape[1] - winners - 1) / max(losers, 1))).reshape(x.shape)


def different_sample(fraction: float, *, replacement: bool = True) -> Sampling:
    """Keeps a fraction of the entries of each example, drawn anew for each ("different sample", section 4.3).

    Args:
      fraction: the fraction of the entries that are kept, in (0, 1]; at least one is kept. An entry that is kept stands
        for those that are not, about 1 / fraction times itself: in float16 it is infinite if that is above 65,504.
      replacement: whether to draw with replacement, as in the paper; without, noise is less, and a fraction of 1 exact.
    """
    return Sampling(_fraction(fraction), False, "replacement" if replacement else "distinct")


def same_sample(fraction: float, *, replacement: bool = True) -> Sampling:
    """Keeps the same entries of all examples ("same sample", section 4.3): the cheapest in time, with the most noise.

    Args:
      fraction: as in `different_sample`.
      replacement: as in `different_sample`.
    """
    return Sampling(_fraction(fraction), True, "replacement" if replacement else "distinct")


def stratified(fraction: float) -> Sampling:
    """Keeps one entry of each run of neighbours: the fastest sample that differs between examples.

    Args:
      fraction: as in `different_sample`; 1 is exact.
    """
    return Sampling(_fraction(fraction), False, "stratified")


def projection(fraction: float) -> Projection:
    """Keeps x R with R (d, k) of independent signs over sqrt(k), one for all examples ("project", Appendix A).

    Args:
      fraction: k / d, in (0, 1]. Entries are restored with noise of sqrt(d / k) times the size of their row: in
        float16, what is above 65,504 is infinite.
    """
    return Projection(_fraction(fraction))


def heavy(fraction: float) -> Heavy:
    """Keeps the largest entries exactly, with their places, and a sample of the others, half and half (WTA-CRS).

    Args:
      fraction: as in `different_sample`.
    """
    return Heavy(_fraction(fraction))


FACTORIES = (rounding, narrow, packing, different_sample, same_sample, stratified, projection, heavy)


def _kept(fraction: float, size: int) -> int:
    return max(1, math.ceil(fraction * size - 1e-9))


def _fraction(fraction: float) -> float:
    if isinstance(fraction, bool | str) or not meets(fraction, lambda x: (x > 0) & (x <= 1)):
        raise ValueError(f"the fraction of entries that are kept must be in (0, 1], got {fraction!r}")
    return float(fraction)


def _largest(rows: jax.Array, count: int) -> jax.Array:
    """Places of the rows of largest norm; squares of entries relative to the largest neither vanish nor overflow."""
    top = jnp.max(jnp.abs(rows), (1, 2), keepdims=True)
    relative = (rows / jnp.where(top > 0, top, 1)).astype(wide(rows.dtype))
    return jax.lax.top_k(jnp.sum(relative**2, -1), count)[1]


def _zeros_after(shape: tuple[int, ...], memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zeros that a compiler cannot make before the memory is there, and the memory."""
    zero, memory = jax.lax.optimization_barrier((jnp.zeros((), memory.dtype), memory))
    return jnp.broadcast_to(zero, shape), memory


def _rows(x: jax.Array, axis: int) -> jax.Array:
    """(examples, the sampled axis, what goes along)."""
    axis %= x.ndim
    return x.reshape(math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))


def _weighed(kept: jax.Array, weight: np.ndarray) -> jax.Array:
    """Entries (examples, k, ...) times weights (k,), rounded once, to the type that they have."""
    return (kept.astype(wide(kept.dtype)) * jnp.asarray(weight[:, None], wide(kept.dtype))).astype(kept.dtype)


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    axis %= len(shape)
    return (*shape[:axis], size, *shape[axis + 1 :])


def _runs(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    edges = np.arange(count + 1) * size // count
    return edges[:-1].astype(np.int32), np.diff(edges).astype(np.int32)
