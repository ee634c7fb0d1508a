"""Programs that are compiled once: the text of a program finds its executable, at the next point of equal shapes too.

`jax.jit` keeps an executable by the Python function. But what a traced function closes over may change from point to
point: so here the program decides.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from apgrad._programs import jaxprs


def _bytes(x):
    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


class Compiled:
    """Executables by the text of their programs."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def __call__(self, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """The executable of a function of pytrees of arrays, for arguments of these shapes, dtypes and devices."""
        traced = jax.jit(function, keep_unused=True).trace(*args)
        lowered, (jaxpr, consts) = traced.lower(), jaxprs.opened(traced.jaxpr)
        # A JAX that passes the constants of a program beside it leaves their values out of its text.
        atoms = (v for eqn in jaxprs.all_equations(jaxprs.Program(jaxpr, consts)) for v in eqn.invars)
        values = [*consts, *(v.val for v in atoms if isinstance(v, Literal) and np.ndim(v.val))]
        parts = [lowered.as_text().encode(), *map(_bytes, values)]
        where = tuple(getattr(x, "sharding", None) for x in jax.tree.leaves(args))
        key = hashlib.sha256(b"".join(parts)).digest(), lowered.out_tree, where
        if key not in self._kept:
            self._kept[key] = lowered.compile()
        return self._kept[key]
