"""Tests of each row of a table, in which rows that exercise the same lines as others can be marked `long`."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest


def cases(name: str, table: Mapping[str, Any], long: Collection[str] = ()) -> pytest.MarkDecorator:
    """The argument `name` of a test is each value of the table in turn; those of the keys in `long` are long tests."""
    assert set(long) <= set(table), f"no rows: {set(long) - set(table)}"
    marks = lambda key: [pytest.mark.long] if key in long else []
    return pytest.mark.parametrize(name, [pytest.param(row, id=key, marks=marks(key)) for key, row in table.items()])


def in_scan(f):
    return lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), jnp.zeros_like(x), length=3)[0] / 3


# Each makes of a function of an array a function that is the same for positive numbers.
TRANSFORMS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "jit of scan": lambda f: jax.jit(in_scan(f)),
    "checkpoint in scan": lambda f: in_scan(jax.checkpoint(f)),
    "vmap in scan": lambda f: in_scan(lambda x: jax.vmap(f)(jnp.stack([x, x]))[1]),
    "cond": lambda f: lambda x: jax.lax.cond(jnp.all(x > 0), f, lambda x: x, x),
}
