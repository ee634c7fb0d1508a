"""Which run a folder holds: the version that the user gives for the code, and a description of the run's values.

`identity("3", optimizer=..., theta=...)` describes values part by part, under names that say where a part is, such as
`optimizer.update.learning_rate: 0.1`: numbers, strings and arrays by what they are, functions by their names, defaults
and the values that they close over, and everything else by its type and by the parts that pickle would store. The
description is the same in every process.
"""

import functools
import hashlib
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.closures import closed_over
from apgrad._ground.files import write_atomically

_LEFT_OUT = (jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.Sharding, jax.Device)


def identity(version: str | int, **values: Any) -> dict[str, str]:
    """The version, and the texts of the values by the names of their parts."""
    found, seen = {"version": str(version)}, {}

    def describe(name, x):
        if isinstance(x, _LEFT_OUT):
            return
        if id(x) in seen:
            found[name] = f"as {seen[id(x)][0]}"
            return
        found[name], parts = _described(x)
        if parts and type(x) is not tuple:  # equal tuples are sometimes one object and sometimes several
            seen[id(x)] = name, x  # kept, so that the id stays its own
        for part, value in parts.items():
            describe(f"{name}.{part}", value)

    for name, value in values.items():
        describe(name, value)
    return found


def claim(path: Path, parts: dict[str, str], *, begun: bool) -> None:
    """Writes down which run this is or, if the run has begun, compares this run with what is written.

    Raises:
      ValueError: if something else is written there, saying what differs.
    """
    if not (begun and path.exists()):
        if jax.process_index() == 0:
            write_atomically(path, json.dumps(parts, indent=1))
        return
    try:
        found = dict(json.loads(path.read_text()))
    except (TypeError, ValueError):
        raise ValueError(
            f"{path} is damaged, so nothing says which run this folder holds. Delete the file to go on with what was "
            "trained here as if it were this run, or use another folder."
        ) from None
    if differing := [n for n in {**found, **parts} if found.get(n) != parts.get(n)]:
        shown = "; ".join(
            f"{n}: {found.get(n, 'nothing')} there, {parts.get(n, 'nothing')} here" for n in differing[:5]
        )
        raise ValueError(
            f"{path.parent} holds another run ({len(differing)} parts differ: {shown}). Use another folder, or the "
            f"same version, key, start, optimizer and options. If both mean the same, delete {path} to go on."
        )


def _described(x: Any) -> tuple[str, dict[str, Any]]:
    """What a value is, as a text, and its parts by name."""
    kind = type(x)
    text = kind.__qualname__
    if x is None or isinstance(x, bool | int | float | complex):
        return repr(x), {}
    if isinstance(x, str | bytes):
        return repr(x) if len(x) <= 60 else _digest(x if isinstance(x, bytes) else x.encode()), {}
    if isinstance(x, set | frozenset):
        return f"{text} of {sorted(repr(sorted(identity('', _=y).items())) for y in x)}", {}
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(x.dtype), {"data": jax.random.key_data(x)}
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return f"{x.dtype}{x.shape}", {}
    if isinstance(x, np.ndarray | np.generic | jax.Array) and not (array := np.asarray(x)).dtype.hasobject:
        small = f" {array.tolist()!r}" if array.size <= 4 else ""
        return f"{array.dtype}{array.shape}{small} {_digest(np.ascontiguousarray(array).tobytes())}", {}
    if isinstance(x, type | types.ModuleType):
        return x.__name__, {}
    if isinstance(x, types.FunctionType):
        return x.__qualname__, closed_over(x) | {"defaults": x.__defaults__} | (x.__kwdefaults__ or {})
    jaxs = kind.__module__.partition(".")[0] in ("jax", "jaxlib")
    if hasattr(x, "__wrapped__") or (jaxs and not isinstance(x, functools.partial | jax.ShapeDtypeStruct)):
        names = ("__wrapped__", "fwd", "bwd", "jvp")  # what else an object of JAX's holds is JAX's affair
        return text, {n: getattr(x, n) for n in names if getattr(x, n, None) is not None}
    if isinstance(x, Mapping):
        return f"{text} of {len(x)}", {k if isinstance(k, str) else repr(k): x[k] for k in sorted(x, key=repr)}
    if isinstance(x, list | tuple):
        return f"{text} of {len(x)}", dict(zip(getattr(x, "_fields", map(str, range(len(x)))), x, strict=True))
    try:
        stored: Any = x.__reduce_ex__(4)
    except Exception:  # an object that cannot be taken apart, such as a lock
        return text, {}
    if isinstance(stored, str):
        return f"{text} {stored}", {}
    _, arguments, state, items, pairs = (*stored, None, None, None)[:5]
    parts = {str(i): part for i, part in enumerate([*(arguments or ()), *(items or ()), *(pairs or ())])}
    state = state if isinstance(state, dict) else {"state": state}
    return text, parts | {str(k): v for k, v in state.items() if not str(k).startswith("_pytree__")}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
