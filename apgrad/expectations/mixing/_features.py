"""Features: what a mixer's weights look at, one short vector for each lane and estimator.

The *target* of a node is a list of arrays: what is differentiated of the arguments that lanes share and of the arrays
that the function closes over; where none of these is differentiated, the lanes' own arguments. The *features* of a lane
are each estimator's gradient of the target, written in a row.

Where lanes times elements is at most 2^23, features are the gradients themselves. Beyond that, gradients are made for
some lanes at a time, and of each array a sketch is kept (Charikar et al., 2002): the array's elements are put into 64
buckets, with random signs, and summed. A sketch keeps inner products on average, and weights need nothing else.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from apgrad.expectations.estimators._estimator import Mixer

HELD = 2**23  # the most elements of per-lane gradients that are held at a time
BUCKETS = 64  # of a sketch


class NodeMemory(NamedTuple):
    """What a mixer's node keeps of its forward pass.

    Attributes:
      mixer: the mixer.
      what: the node's name in errors.
      build: `(shared, lane) -> distribution`, for one lane.
      shared: the arrays that lanes share: the arguments, and the arrays that the function closes over.
      lane: the lanes' own arguments, a pytree of arrays (lanes, ...).
      pullbacks: of each estimator, with arrays (lanes, ...).
      perturbed: for each array among the shared arguments, those closed over, and the lanes' arguments, whether it is
        differentiated.
    """

    mixer: Mixer
    what: str
    build: Callable[..., Any]
    shared: tuple[list[Any], list[Any]]
    lane: Any
    pullbacks: list[Any]
    perturbed: tuple[tuple[bool, ...], ...]


class Target(NamedTuple):
    """What the weights of a node look at.

    Attributes:
      features: one lane's gradients of `(shared, lane)` -> the lane's features, (width,).
      of_shared: whether the target is shared by the lanes; else it is the lanes' own arguments.
    """

    features: Callable[[Any], jax.Array]
    of_shared: bool


def find_target(memory: NodeMemory, lanes: int) -> Target:
    """The target of a node.

    Args:
      memory: of the node.
      lanes: how many lanes there are.

    Raises:
      ValueError: at trace time, for a target without elements.
    """
    arguments, closed = memory.shared
    to_arguments, to_closed, to_lane = memory.perturbed
    of_shared = any((*to_arguments, *to_closed))

    def of_one_lane(answer):
        if not of_shared:
            return features([_chosen(leaves_or_none(answer[1]), to_lane)], lanes)
        explicit = [
            # The same features whatever is differentiated, as the suffix wants them.
            jnp.zeros(jnp.shape(x), jnp.result_type(x)) if g is None or not flag else g
            for g, x, flag in zip(answer[0][0], arguments, to_arguments, strict=True)
            if is_inexact(x)
        ]
        return features([explicit, _chosen(answer[0][1], to_closed)], lanes)

    leaves = [*inexact(arguments), *_chosen(closed, to_closed)]
    if not of_shared:
        leaves = [x[0] for x in _chosen(jax.tree.leaves(memory.lane), to_lane)]
    if not width(leaves, 1):
        raise ValueError(empty_target(memory.what))
    return Target(of_one_lane, of_shared)


def empty_target(what: str) -> str:
    """What an error says of a target without elements.

    Args:
      what: the node's name.
    """
    return (
        f"{what} weighs its estimators by their gradients of a target, and the target is empty: what is "
        "differentiated of the node's arguments has no elements"
    )


def width(leaves: Sequence[Any], lanes: int) -> int:
    """How many features these arrays have.

    Args:
      leaves: arrays, or what has their shapes.
      lanes: how many lanes there are.

    Example:
      >>> import jax.numpy as jnp
      >>> from apgrad.expectations.mixing._features import width
      >>> width([jnp.zeros((1000, 100)), jnp.zeros(5)], lanes=10), width([jnp.zeros((1000, 100))], lanes=1000)
      (100005, 64)
    """
    sizes = [math.prod(jnp.shape(leaf)) for leaf in leaves]
    return sum(min(size, BUCKETS) for size in sizes) if lanes * sum(sizes) > HELD else sum(sizes)


def features(groups: Sequence[Sequence[jax.Array]], lanes: int) -> jax.Array:
    """The features of one lane, (width of the groups,), float32 or wider.

    Args:
      groups: lists of the lane's gradients of some arrays. Each group is sketched or not, as `width` says.
      lanes: how many lanes there are.
    """
    rows = []
    for leaves in groups:
        flat = [leaf.reshape(-1).astype(wide(leaf.dtype)) for leaf in leaves]
        rows += map(sketch, flat) if lanes * sum(x.size for x in flat) > HELD else flat
    return jnp.concatenate(rows)


def _chosen(leaves, flags):
    return [x for x, flag in zip(leaves, flags, strict=True) if flag and x is not None and is_inexact(x)]


def wide(dtype: Any) -> Any:
    """Float32, or the dtype where the dtype is wider.

    Args:
      dtype: of floating-point numbers.
    """
    return max(jnp.dtype(dtype), jnp.dtype(jnp.float32), key=lambda dtype: dtype.itemsize)


def sketch(x: jax.Array) -> jax.Array:
    """A count sketch (64,) of a vector; a vector of at most 64 elements is its own sketch.

    Args:
      x: the vector.

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
      function: takes a pytree of arrays (folds, lanes, ...) and returns `(per_lane, sums)`: arrays (folds, lanes, ...),
        and sums over the lanes.
      inputs: a pytree of arrays (folds, lanes, ...).
      elements: how many elements are held for one lane of a fold.

    Returns:
      What `function` returns.
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
    """Whether an array can have a gradient.

    Args:
      x: an array, or what has its dtype.
    """
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def inexact(tree: Any) -> list[Any]:
    """The leaves that can have a gradient.

    Args:
      tree: a pytree of arrays.
    """
    return [x for x in jax.tree.leaves(tree) if is_inexact(x)]


def leaves_or_none(tree: Any) -> list[Any]:
    """The leaves, where None is a leaf too, which stands for the gradient of an integer.

    Args:
      tree: a pytree of arrays and None.
    """
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def drop_float0(tree: Any) -> Any:
    """Replaces the cotangents of integers and keys, which `vmap` cannot return, by None.

    Args:
      tree: a pytree of cotangents.
    """
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, tree)
