"""The lanes: independent repetitions of a program, the leading axis of its arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def require_lanes(what: str, lanes: int, tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != lanes:
            instead = "Broadcast it"
            if jnp.ndim(leaf):
                as_lanes = f"If rows are examples that are lanes, give ap.expectation lanes={len(leaf)}, and no data="
                instead = f"{as_lanes}; if the lanes share it, close over it, or broadcast it"
            raise ValueError(
                f"{what}: argument {jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}, expected the lanes as "
                f"leading axis, ({lanes}, ...). {instead} with jnp.broadcast_to(x, (tape.lanes, *x.shape))."
            )


def require_batch(what: str, lanes: int, *shapes: tuple[int, ...]) -> None:
    if any(shape[:1] != (lanes,) for shape in shapes):
        raise ValueError(
            f"{what}: the distribution has batch shape {shapes[0]}, which must start with the lanes, ({lanes}, ...): "
            "else lanes would share one sample. Broadcast a parameter with jnp.broadcast_to. (A distribution that "
            "jax.vmap made has the batch shape of one lane: use ap.stochastic, or parameters of all lanes.)"
        )


def require_mask(what: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """The mask, Booleans (lanes,) up to this shape, with as many axes as the shape; a `ValueError` if it is none."""
    mask = jnp.asarray(mask)
    if not mask.ndim or mask.shape != shape[: mask.ndim] or mask.dtype != jnp.bool_:
        raise ValueError(f"{what}: the mask has shape {mask.shape} and dtype {mask.dtype}, expected Booleans {shape}")
    return over(mask, len(shape))


def over(x: jax.Array, ndim: int) -> jax.Array:
    """The array with axes of one element appended, `ndim` axes in all, so that it broadcasts over later axes."""
    return x.reshape(*x.shape, *[1] * (ndim - x.ndim))


def donors(lanes: int, bit: int, value: int) -> np.ndarray:
    """The lane whose sample each lane gets: itself, but another one where its number has `bit` at `value`."""
    lane = np.arange(lanes)
    partner = lane ^ (1 << bit)
    return np.where(lane >> bit & 1 == value, np.where(partner < lanes, partner, 1 << bit), lane)


def fold(tree: Any, folds: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(folds, x.shape[0] // folds, *x.shape[1:]), tree)


# The array by folds, and the axis of lanes in it. One fold has no axis: XLA of jaxlib 0.10 takes on CPUs wrong sums
# over the second axis of (1, k, more than 2^15) where they are spread over that axis again.
def _by_fold(x: jax.Array, folds: int) -> tuple[jax.Array, int]:
    return (x, 0) if folds == 1 else (fold(x, folds), 1)


def mean_of_others(x: jax.Array, folds: int, mask: jax.Array | None = None) -> jax.Array:
    """For each lane, or sample, the mean over the others of its fold whose mask is True; 0 if there are none."""
    # A sum overflows float16 where no mean does.
    each, axis = _by_fold(x.astype(np.promote_types(x.dtype, np.float32)), folds)
    if mask is None:
        count = each.shape[axis] - 1
    else:
        alive, _ = _by_fold(jnp.broadcast_to(mask, x.shape), folds)
        count = jnp.sum(alive, axis=axis, keepdims=True) - alive.astype(int)
        count = jnp.maximum(count, 1).astype(each.dtype)
        each = jnp.where(alive, each, 0)
    return ((jnp.sum(each, axis=axis, keepdims=True) - each) / count).reshape(x.shape).astype(x.dtype)


def weighed_mean_of_others(x: jax.Array, log_weight: Any, folds: int, mask: Any = True) -> jax.Array:
    """`mean_of_others`, where a lane counts by its squared weight: the m with the least sum of (weight (x - m))^2."""
    shown = lambda a: _by_fold(jnp.broadcast_to(a, x.shape), folds)[0]
    (each, axis), alive = _by_fold(x.astype(np.promote_types(x.dtype, np.float32)), folds), shown(mask)
    log = jnp.where(alive, shown(log_weight), -1e30)
    first = jnp.argmax(log, axis=axis, keepdims=True)
    top = lax.broadcasted_iota(first.dtype, log.shape, axis) == first
    others, each = alive & ~top, jnp.where(alive, each, 0)

    def squared(among, log):  # in units of the largest, so that they have a sum of at least 1, or there are none
        largest = jnp.max(jnp.where(among, log, -1e30), axis=axis, keepdims=True)
        return jnp.where(among, jnp.exp(2 * (log - largest)), 0).astype(each.dtype)

    # A lane's own weight says nothing of the others': for the top lane, in units of the largest of these.
    weight, beside_top = squared(alive, log), squared(others, log)

    def summed(a):
        weighed = a * weight
        of_top = jnp.sum(a * beside_top, axis=axis, keepdims=True)
        return jnp.where(top, of_top, jnp.sum(weighed, axis=axis, keepdims=True) - weighed)

    total = summed(jnp.ones_like(each))
    some = total > 0
    return jnp.where(some, summed(each) / jnp.where(some, total, 1), 0).reshape(x.shape).astype(x.dtype)


def standard_score(x: jax.Array, folds: int) -> jax.Array:
    each, axis = _by_fold(x, folds)
    away = each - jnp.mean(each, axis=axis, keepdims=True)
    scale = jnp.maximum(jnp.max(jnp.abs(away), axis=axis, keepdims=True), 1)  # squares of large numbers overflow
    deviation = scale * jnp.sqrt(jnp.mean((away / scale) ** 2, axis=axis, keepdims=True))
    return (away / (deviation + 1e-4)).reshape(x.shape)


def cost_shape_error(lanes: int, shape: tuple[int, ...]) -> str:
    found = f"a cost must have shape ({lanes},), one value a lane, got {shape}"
    if len(shape) > 1 and shape[0] == shape[1] == lanes:
        return (
            f"{found}: two axes of the lanes. A function of ap.stochastic may have got all lanes' values: its first "
            "argument is shared by the lanes, as parameters are. Where it is not, say so, as in in_axes=(0, 0). If the "
            "second axis is another one, sum over it."
        )
    instead = "Sum over the other axes, and leave the mean over lanes to ap.expectation"
    return f"{found}. {instead}; for costs of independent parts, (lanes, parts), make the nodes with parts=True."
