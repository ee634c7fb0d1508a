"""A test of functions: JAX's transformations must leave value and gradient as they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_transformable(function: Callable[..., Any], *args: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Asserts that value and gradient stay the same under `jit`, `checkpoint`, `scan`, `cond`, `while_loop`, `vmap`.

    Under `vmap` both the gradient of each copy, and the gradient of the mean over the copies.

    Args:
      function: `(*args) -> scalar`, deterministic (bind its key), differentiated with respect to the first argument.
      *args: its arguments.
      rtol: relative tolerance, for float differences between compilations.
      atol: absolute tolerance.

    Raises:
      AssertionError: naming the transformation.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> ap.testing.assert_transformable(ap.node(ap.backpropagation(jnp.sin)), jnp.array(1.0))
    """
    both = jax.value_and_grad(function)
    expected = both(*args)
    zero = jnp.zeros_like(expected[0])

    def scanned(*args):
        return jax.lax.scan(lambda total, _: (total + function(*args), None), zero, length=3)[0] / 3

    def looped(*args):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, function(*args)), (0, zero))[1]

    def branched(*args):
        return jax.lax.cond(jnp.array(True), function, lambda *a: 2 * function(*a), *args)

    def twice(args):
        return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), args)

    def batched(*args):
        return jax.tree.map(lambda x: x[1], jax.vmap(both)(*twice(args)))

    def summed(*args):
        return jnp.mean(jax.vmap(function)(*twice(args)))

    variants = {
        "jit": both,
        "checkpoint": jax.value_and_grad(jax.checkpoint(function)),
        "scan": jax.value_and_grad(scanned),
        "cond": jax.value_and_grad(branched),
        "vmap": batched,
        "the gradient of a sum over vmap": jax.value_and_grad(summed),
        "while_loop": lambda *args: (looped(*args), expected[1]),
    }

    def each(*args):
        found = {}
        for name, variant in variants.items():
            try:
                found[name] = variant(*args)
            except Exception as error:
                error.add_note(f"under {name}")
                raise
        return found

    # One program for all, since compiling is what takes long.
    got = jax.jit(each)(*args)
    for name in variants:
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol, err_msg=f"under {name}"
            )
