"""Random signs in factors: tensors of +1 and -1, made of one factor for each axis.

    signs = random_signs(seed, number, array)      # z_k[i, j, ...] = s_k u_k[i] v_k[j] ..., for k = 1 .. NUMBER
    products = inner([array], [signs])             # <array, z_k>, (NUMBER,)

The z_k are uncorrelated, as sketches need (`uses.py`), and <a (x) b, z_k> is two short products, (a . u_k)(b . v_k).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from apgrad._programs.jaxprs import Parameters
from apgrad.expectations._programs.leading_axes import moved_axis

NUMBER = 8  # signs of a sketch: weights made from them add a per cent to a variance
_K = -1  # the label of the axis of signs


class Factors(NamedTuple):
    """Tensors z_k = scale_k times the product over axes of one factor each."""

    scale: jax.Array  # (NUMBER,)
    axes: tuple[Any, ...]  # for each axis the factors, (NUMBER, size of the axis), or None for ones


def random_signs(seed: jax.Array, number: int, like: Any) -> Factors:
    """Signs for one array of parameters: the same for the same seed and number, uncorrelated with all others.

    Arrays share the factors of axes of equal size, so that products are made once; each has a sign of its own. Every
    other sign for complex numbers is imaginary, so that half of the products are of real parts, and half of imaginary.
    """
    shape = jnp.shape(like)
    axes = [_signs(seed, 2**16 + 16 * size + len(shape) - axis, size) for axis, size in enumerate(shape)]
    scale = _signs(seed, number + 1, 1)[:, 0]
    if jnp.iscomplexobj(like):
        scale = scale * jnp.array([2**0.5, 2**0.5 * 1j] * (NUMBER // 2), like.dtype)
    return Factors(scale, tuple(axes))


def inner(arrays: Sequence[jax.Array], signs: Sequence[Any]) -> jax.Array:
    """The real part of the products, as JAX pairs messages and derivatives."""
    return sum((jnp.real(_inner(x, z)) for x, z in zip(arrays, signs, strict=True)), jnp.zeros(NUMBER, jnp.float32))


# Jitted, so that nodes of one shape trace it once.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _signs(seed, name, size):
    # The bits of a hash (the finalizer of MurmurHash3): made where they are used, never stored.
    start = _hash(seed + jnp.uint32(name * 0x9E3779B9 % 2**32))
    bits = _hash(lax.iota(jnp.uint32, size) * jnp.uint32(0x9E3779B1) ^ start)
    return 1 - 2 * (bits[None] >> lax.broadcasted_iota(jnp.uint32, (NUMBER, size), 0) & 1).astype(jnp.float32)


def _hash(x):
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def of_steps(signs: Any, length: int) -> Any:
    """What differs from step to step in tensors of arrays that are stacked over the steps; see `of_step`."""
    if not isinstance(signs, Factors):
        return None if signs is None else jnp.moveaxis(signs, 1, 0)
    lead = signs.axes[0]
    return jnp.broadcast_to(signs.scale, (length, NUMBER)) * (1 if lead is None else lead.T)


def of_step(signs: Any, scale: Any) -> Any:
    """The tensors of one step, from the stacked ones and this step's entry of what `of_steps` returns."""
    return Factors(scale, signs.axes[1:]) if isinstance(signs, Factors) else scale


_MOVES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")


def moved(eqn: Any, signs: Factors, old: Sequence[int], shape: Sequence[int], by: Any) -> Factors | None:
    """The factors of an output where the equation only moves or scales the elements of its input; else None."""
    (scale, axes), name, params = signs, eqn.primitive.name, Parameters(eqn)
    if name in ("mul", "div") and by is not None:
        by = jnp.asarray(by, scale.dtype)
        return Factors(scale * by if name == "mul" else scale / by, axes)
    if name == "neg":
        return Factors(-scale, axes)
    if name == "slice":
        strides = params["strides"] or (1,) * len(axes)
        cut = zip(axes, params["start_indices"], params["limit_indices"], strides, strict=True)
        return Factors(scale, tuple(None if x is None else x[:, a:b:s] for x, a, b, s in cut))
    if name not in _MOVES:
        return None
    made: list[Any] = [None] * len(shape)
    for axis, (x, size) in enumerate(zip(axes, old, strict=True)):
        place = moved_axis(eqn, 0, axis)
        if size == 1:  # such an axis is a factor of the whole
            scale = scale if x is None else scale * x[:, 0]
        elif place is None:
            return None
        else:
            made[place] = x
    return Factors(scale, tuple(made))


def thin(eqn: Any, arrays: Sequence[Any], view: int, signs: Any, messages: Sequence[jax.Array]) -> jax.Array | None:
    """The inner products of messages with derivatives along factors, (NUMBER,); None for what is no product or sum."""
    name = eqn.primitive.name
    if not isinstance(signs, Factors) or name not in ("dot_general", "add", "add_any", "sub", "mul"):
        return None
    (message,) = messages  # Other operations may have several messages, and a comparison has none.
    shapes, ndim = [jnp.shape(x) for x in arrays], jnp.ndim(message)
    if name == "dot_general":
        contracted, batched = Parameters(eqn)["dimension_numbers"]
        labels = [[-1] * len(shape) for shape in shapes]
        for pairs, start in ((batched, 0), (contracted, 100)):
            for n, axes in enumerate(zip(*pairs, strict=True)):
                for side, axis in enumerate(axes):
                    labels[side][axis] = start + n
        free = iter(range(len(batched[0]), ndim))
        labels = [[next(free) if label < 0 else label for label in side] for side in labels]
        terms = [(message, list(range(ndim))), (arrays[1 - view], labels[1 - view])]
    elif shapes[0] == shapes[1]:
        labels = [list(range(ndim))] * 2
        terms = [(message, labels[0])] + [(arrays[1 - view], labels[0])] * (name == "mul")
    else:
        return None
    sign = -1 if name == "sub" and view == 1 else 1
    return sign * product(terms, signs, labels[view])


def product(terms: Sequence[tuple[jax.Array, list[int]]], factors: Factors, labels: Sequence[int]) -> jax.Array:
    """The products of arrays with tensors in factors, summed over all labels of axes, (NUMBER,): an einsum."""
    dtype = np.promote_types(jnp.result_type(*(x for x, _ in terms)), np.float32)
    shared = [label for label in labels if sum(label in axes for _, axes in terms) != 1]
    whole = [([_K, label], x.astype(dtype)) for x, label in zip(factors.axes, labels, strict=True) if x is not None]
    # A factor of one array alone first, always in the same way: a layer and its bias have such products in common.
    made = []
    for x, axes in terms:
        mine = [factor for factor in whole if factor[0][1] in axes and factor[0][1] not in shared]
        left = [label for label in axes if all(label not in pair for pair, _ in mine)] + [_K] * bool(mine)
        made.append((left, _einsum([(axes, x.astype(dtype)), *mine], left)))
    made += [factor for factor in whole if factor[0][1] in shared]
    total = _einsum(made, [_K] if any(_K in axes for axes, _ in made) else [])
    return total * factors.scale.astype(dtype)


def _einsum(terms, output):
    names = {label: chr(97 + n) for n, label in enumerate(dict.fromkeys(x for axes, _ in terms for x in axes))}
    formula = ",".join("".join(names[x] for x in axes) for axes, _ in terms) + "->" + "".join(names[x] for x in output)
    return jnp.einsum(formula, *(x for _, x in terms), optimize="optimal")


def _inner(array, signs):
    labels = list(range(jnp.ndim(array)))
    if isinstance(signs, Factors):
        return product([(array, labels)], signs, labels)
    dtype = np.promote_types(array.dtype, np.float32)
    return _einsum([(labels, array.astype(dtype)), ([_K, *labels], signs.astype(dtype))], [_K])


def dense(signs: Any, shape: Sequence[int]) -> jax.Array:
    if not isinstance(signs, Factors):
        return signs
    made = signs.scale.reshape(NUMBER, *[1] * len(shape))
    for axis, (factor, size) in enumerate(zip(signs.axes, shape, strict=True)):
        if factor is not None:
            made = made * factor.reshape(NUMBER, *[size if i == axis else 1 for i in range(len(shape))])
    return jnp.broadcast_to(made, (NUMBER, *shape))
