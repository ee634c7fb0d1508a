"""Targets: what a mixer's weights look at, and how much of it is held.

The target of a node is a list of arrays, and its *features* are, lane by lane, each estimator's gradient of them. Where
lanes x elements is at most 2^23, features are the gradients themselves. Beyond, gradients are made for some lanes at a
time, and what is kept of each array is a sketch (Charikar et al., 2002): its elements are put into 64 buckets, with
random signs, and summed, which keeps inner products on average, and all that weights need are inner products.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from apgrad.expectations.estimators._estimator import Mixer
from apgrad.expectations.weights import Weighting

HELD = 2**23  # the most elements of per-lane gradients that are held at a time
BUCKETS = 64  # of a sketch


class Layout(NamedTuple):
    """How a target's arrays lie in the features of a lane.

    Attributes:
      sizes: of the arrays.
      sketched: for each, whether its features are a sketch.
    """

    sizes: tuple[int, ...]
    sketched: tuple[bool, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], lanes: int) -> "Layout":
        """The layout of a target of these arrays."""
        sizes = tuple(int(math.prod(jnp.shape(leaf))) for leaf in leaves)
        return cls(sizes, (lanes * sum(sizes) > HELD,) * len(sizes))

    @property
    def widths(self) -> list[int]:
        """How many features an array has."""
        return [min(n, BUCKETS) if sketched else n for n, sketched in zip(self.sizes, self.sketched, strict=True)]

    @property
    def width(self) -> int:
        """How many features a lane has."""
        return sum(self.widths)

    def features(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The features (width,) of one lane, from its gradient of each array."""
        flat = [leaf.reshape(-1).astype(wide(leaf.dtype)) for leaf in leaves]
        return jnp.concatenate([sketch(x) if sketched else x for x, sketched in zip(flat, self.sketched, strict=True)])

    def split(self, features: jax.Array) -> list[jax.Array]:
        """The parts (..., width of the array) of each array."""
        ends = list(itertools.accumulate(self.widths))
        return [features[..., end - width : end] for end, width in zip(ends, self.widths, strict=True)]

    def weigh(self, what: str, weighting: Weighting, features: jax.Array, suffix: jax.Array) -> jax.Array:
        """The weights of one fold, for each feature.

        Args:
          what: for errors.
          weighting: the rule, and whether it weighs nodes, leaves or elements.
          features: (estimators, lanes of the fold, width).
          suffix: (lanes of the fold, width).

        Returns:
          (estimators, width).

        Raises:
          ValueError: at trace time, for an empty target, or elements of one that is too large.
        """
        if not self.width:
            raise ValueError(
                f"{what} weighs its estimators by their gradients of a target, and the target is empty: what is "
                "differentiated of the node's arguments has no elements"
            )

        def rule(gradients, suffix):
            weights = weighting.rule(gradients, suffix)
            if jnp.shape(weights) != gradients.shape[:1]:
                raise ValueError(
                    f"{what}: a weight rule must return one weight for each of the {len(gradients)} estimators, got "
                    f"shape {jnp.shape(weights)}"
                )
            return weights

        def broadcast(weights, width):
            return jnp.broadcast_to(weights[:, None], (len(features), width))

        if weighting.per == "node":
            return broadcast(rule(features, suffix), self.width)
        parts = []
        for size, sketched, g, s in zip(
            self.sizes, self.sketched, self.split(features), self.split(suffix), strict=True
        ):
            if weighting.per == "element" and sketched:
                lanes = features.shape[1]
                raise ValueError(
                    f"{what}: weights for each element need the target's gradients lane by lane: an array of {size} "
                    f"elements and others, {sum(self.sizes)} in all, on {lanes} lanes a fold; the limit for all lanes "
                    f"is {HELD} numbers. Use per='leaf', one weight for each array, or per='auto'."
                )
            if weighting.per == "leaf" or sketched:
                parts.append(broadcast(rule(g, s), g.shape[-1]) if g.shape[-1] else g[:, 0])
            else:
                parts.append(
                    jax.vmap(lambda g, s: rule(g[..., None], s[..., None]), (0, 0), 1)(jnp.moveaxis(g, 2, 0), s.T)
                )
        return jnp.concatenate(parts, axis=1)


class Memory(NamedTuple):
    """What a node knows of its forward pass. Arrays of `lane` and `pullbacks` have the lanes first."""

    mixer: Mixer
    what: str
    build: Callable[..., Any]  # (shared, lane) -> the distribution of one lane
    restore: Callable[..., Any]  # the shared arrays -> the shared arguments
    shared: tuple[list[Any], list[Any]]  # arguments, arrays closed over
    lane: Any
    pullbacks: list[Any]
    perturbed: tuple[tuple[bool, ...], ...]  # of the arguments, of what is closed over, of the lanes' arguments
    row: jax.Array | None = None  # the weights that the objective was given for this node


class Target(NamedTuple):
    """What the weights of a node look at.

    Attributes:
      select: a lane's gradients of (shared, lane) -> those in the target.
      layout: of those.
      of_shared: they are of the shared arguments, or of what is closed over.
      flags: for each shared array, whether its gradients are needed lane by lane.
      slots: for each shared array, its place in the layout, if it has one.
    """

    select: Callable[[Any], list[jax.Array]]
    layout: Layout
    of_shared: bool
    flags: list[bool]
    slots: list[int | None]


def find_target(memory: Memory, lanes: int) -> Target:
    """The target of a node."""
    arguments, closed = memory.shared
    to_arguments, to_closed, to_lane = memory.perturbed
    flags = [*to_arguments, *to_closed]
    nowhere: list[int | None] = [None] * len(flags)
    if not any(flags):

        def select_lane(answer):
            return [g for g, flag in zip(leaves_or_none(answer[1]), to_lane, strict=True) if flag and g is not None]

        leaves = [x[0] for x, flag in zip(jax.tree.leaves(memory.lane), to_lane, strict=True) if flag]
        return Target(select_lane, Layout.of([x for x in leaves if is_inexact(x)], lanes), False, flags, nowhere)

    def explicit(gradients):
        # The same arrays whatever is differentiated, as the suffix wants them.
        return [
            jnp.zeros(jnp.shape(x), jnp.result_type(x)) if g is None or not flag else g
            for g, x, flag in zip(gradients, arguments, to_arguments, strict=True)
        ]

    mapping = memory.mixer.target
    if callable(mapping):

        def select_mapped(answer):
            return inexact(mapping(memory.restore(explicit(answer[0][0]))))

        shapes = jax.eval_shape(lambda: mapping(memory.restore(arguments)))
        return Target(select_mapped, Layout.of(inexact(shapes), lanes), True, flags, nowhere)

    def select(answer):
        more = [g for g, flag in zip(answer[0][1], to_closed, strict=True) if flag and g is not None]
        return inexact(explicit(answer[0][0])) + more

    parts = [is_inexact(x) for x in arguments] + [f and is_inexact(x) for x, f in zip(closed, to_closed, strict=True)]
    numbers = itertools.count()
    slots = [next(numbers) if part else None for part in parts]
    own = Layout.of(inexact(arguments), lanes)
    more = Layout.of([x for x, flag in zip(closed, to_closed, strict=True) if flag and is_inexact(x)], lanes)
    return Target(select, Layout(own.sizes + more.sizes, own.sketched + more.sketched), True, flags, slots)


def wide(dtype: Any) -> Any:
    """Float32, or the dtype where that is wider."""
    return max(jnp.dtype(dtype), jnp.dtype(jnp.float32), key=lambda dtype: dtype.itemsize)


def sketch(x: jax.Array) -> jax.Array:
    """A count sketch (64,) of a vector; of at most 64 elements, the vector itself.

    Example:
      >>> import jax.numpy as jnp
      >>> from apgrad.expectations.mixing._features import sketch
      >>> sketch(jnp.ones(1000)).shape
      (64,)
    """
    if x.size <= BUCKETS:
        return x
    # Signs by a hash of the index (the finalizer of MurmurHash3): made where they are used, never stored.
    h = lax.iota(jnp.uint32, x.size)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        h = (h ^ (h >> 16)) * jnp.uint32(factor)
    signed = jnp.where((h ^ (h >> 16)) & 1 == 1, x, -x)
    return jnp.pad(signed, (0, -x.size % BUCKETS)).reshape(-1, BUCKETS).sum(0)


def by_chunks(function: Callable[[Any], Any], inputs: Any, elements: int) -> Any:
    """`function` of all lanes, evaluated for some of them at a time.

    Args:
      function: of arrays (folds, lanes, ...); returns `(per_lane, sums)`, arrays (folds, lanes, ...) and sums over
        lanes.
      inputs: arrays (folds, lanes, ...).
      elements: how many a lane holds in a fold.

    Returns:
      As `function`.
    """
    folds, lanes = jax.tree.leaves(inputs)[0].shape[:2]
    most = max(HELD // max(folds * elements, 1), 1)
    chunk = next(c for c in range(min(most, lanes), 0, -1) if lanes % c == 0)
    if chunk == lanes:
        return function(inputs)

    def split(x):
        return jnp.moveaxis(x.reshape(folds, lanes // chunk, chunk, *x.shape[2:]), 1, 0)

    chunks = jax.tree.map(split, inputs)
    _, shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], chunks))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def body(total, inputs):
        per_lane, sums = function(inputs)
        return jax.tree.map(jnp.add, total, sums), per_lane

    sums, per_lane = lax.scan(body, zeros, chunks)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(folds, lanes, *x.shape[3:]), per_lane), sums


def is_inexact(x: Any) -> bool:
    """Whether an array can have a gradient."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def inexact(tree: Any) -> list[Any]:
    """The leaves that can have a gradient."""
    return [x for x in jax.tree.leaves(tree) if is_inexact(x)]


def leaves_or_none(tree: Any) -> list[Any]:
    """The leaves, None being one: it stands for the gradient of an integer."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)
