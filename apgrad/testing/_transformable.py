"""A test of functions: JAX's transformations must leave value and gradient as they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import noted
from apgrad._ground.bias import largest_size


def assert_transformable(function: Callable[..., Any], *args: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Asserts that value and gradient stay the same under `jit`, `checkpoint`, `scan`, `cond`, `while_loop`, `vmap`.

    Under `vmap` it tests the gradient of each copy, and of the sum over copies. The second copy's floats are 63/64 of
    the first's (1/64 for 0), and it counts by half, so that what mixes copies or their messages is found. A NaN fails.

    Args:
      function: `(*args) -> scalar`, deterministic (bind its key), differentiated with respect to the first argument.
      *args: its arguments.
      rtol: relative tolerance, for float differences between compilations.
      atol: absolute tolerance; it is relative to the largest number of value and gradient where that is below 1.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> ap.testing.assert_transformable(ap.node(ap.backpropagation(jnp.sin)), jnp.array(1.0))
    """
    both = jax.value_and_grad(function)
    own = jax.tree.map(jnp.asarray, both(*args))  # JAX gives a Python number back as it came
    if any(np.isnan(x).any() for x in jax.tree.leaves(own)):
        raise AssertionError(f"value or gradient is NaN, so that a change cannot be seen: {own}")
    copies = [nearby(args, number) for number in range(2)]
    weights, zero = jnp.array([1, 0.5], own[0].dtype), jnp.zeros_like(own[0])
    weighted = jax.value_and_grad(lambda weight, *args: weight * function(*args), argnums=1)
    lanes = stacked([own, weighted(weights[1], *copies[1])])

    def scanned(*args):
        return jax.lax.scan(lambda total, _: (total + function(*args), None), zero, length=3)[0] / 3

    def looped(*args):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, function(*args)), (0, zero))[1]

    def branched(*args):
        return jax.lax.cond(jnp.array(True), function, lambda *a: 2 * function(*a), *args)

    def summed(*batch):
        return jnp.sum(weights * jax.vmap(function)(*batch))

    variants = {
        "jit": both,
        "checkpoint": jax.value_and_grad(jax.checkpoint(function)),
        "scan": jax.value_and_grad(scanned),
        "cond": jax.value_and_grad(branched),
        "while_loop": lambda *args: (looped(*args), own[1]),
        "vmap": lambda *batch: jax.vmap(weighted)(weights, *batch),
        "the gradient of a sum over vmap": jax.value_and_grad(summed),
    }
    expected = dict.fromkeys(variants, own)
    expected |= {"vmap": lanes, "the gradient of a sum over vmap": (jnp.sum(lanes[0]), lanes[1])}

    def each(args, batch):
        found = {}
        for name, variant in variants.items():
            with noted(f"under {name}"):
                found[name] = variant(*(batch if "vmap" in name else args))
        return found

    # One program for all, since compiling is what takes long.
    got = jax.jit(each)(args, stacked(copies))
    atol *= min(1.0, largest_size((own, lanes)))
    for name in variants:
        for pair in zip(jax.tree.leaves(got[name]), jax.tree.leaves(expected[name]), strict=True):
            a, b = (np.asarray(x, np.promote_types(x.dtype, np.float64)) for x in pair)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=f"under {name}")


def nearby(tree: Any, number: int) -> Any:
    """The tree for the copy `number`, so that copies differ: floats times 1 - number / 64, and number / 64 for 0."""
    kind = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    moved = lambda x: jnp.where(x == 0, number / 64, x * (1 - number / 64))
    return jax.tree.map(lambda x: moved(x) if number and kind(x) else x, tree)


def stacked(trees: list) -> Any:
    return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(leaf) for leaf in x]), *trees)
