"""What makes a run of meta-training this run and no other: a description that is the same in every process.

`identity(optimizer=..., theta=...)` describes values part by part, under names that say where the part is, such as
`optimizer.update.learning_rate: 0.1`.

* Numbers, strings and the like are described by what Python prints, arrays and long strings by a digest of their bytes.
* Functions are described by their qualified names and by the values that they close over or have as defaults. A
  function of yours (from no installed package) is also described by its code and by the global values that it reads.
* Containers, dataclasses, Flax modules and other objects are described by their type and their parts.

An object that shows no state to Python is described by its type alone. Meshes and devices are left out, since a run may
go on on other devices.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import sysconfig
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad._ground.closures import closed_over

_INSTALLED = (
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parent.parent),
    "<frozen",
)
_LEFT_OUT = (jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.Sharding, jax.Device)


def identity(**parts: Any) -> dict[str, str]:
    """The description of some values: texts, by the names of all their parts.

    Args:
      **parts: the values, of any types, by their names in the description.
    """
    found: dict[str, str] = {}
    seen: dict[int, tuple[str, Any]] = {}
    for name, part in parts.items():
        _describe(name, part, found, seen)
    return found


def _describe(name: str, x: Any, found: dict[str, str], seen: dict[int, tuple[str, Any]]) -> None:
    if isinstance(x, _LEFT_OUT):
        return
    if (text := _simple(x)) is not None:
        found[name] = text
        return
    if id(x) in seen:
        found[name] = f"as {seen[id(x)][0]}"
        return
    if type(x) is not tuple:  # equal tuples are sometimes one object and sometimes several
        seen[id(x)] = name, x  # kept, so that the id stays its own
    kind, parts = _parts(x)
    found[name] = kind
    for part, value in parts.items():
        _describe(f"{name}.{part}", value, found, seen)


def _simple(x: Any) -> str | None:
    """The text of a value that has no parts."""
    if isinstance(x, str | bytes):
        return repr(x) if len(x) <= 60 else _digest(x if isinstance(x, bytes) else x.encode())
    if x is None or x is Ellipsis or isinstance(x, bool | int | float | complex | np.dtype | enum.Enum | range | slice):
        return repr(x)
    if isinstance(x, type):
        return _name(x)
    if isinstance(x, types.ModuleType):
        return x.__name__
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return f"{x.dtype} {_simple(jax.random.key_data(x))}"
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return f"{x.dtype}{x.shape}"
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        array = np.asarray(x)
        if array.dtype.hasobject:
            return None
        small = f" {array.tolist()!r}" if array.size <= 4 else ""
        return f"{array.dtype}{array.shape}{small} {_digest(np.ascontiguousarray(array).tobytes())}"
    if isinstance(x, jax.ShapeDtypeStruct):
        return f"{x.dtype}{x.shape}"
    if isinstance(x, set | frozenset):
        return f"{type(x).__name__} of {sorted(repr(sorted(identity(_=y).items())) for y in x)}"
    return None


def _parts(x: Any) -> tuple[str, dict[str, Any]]:
    """A text for the kind of the value, and the parts that it has."""
    kind = _name(type(x))
    if isinstance(x, types.FunctionType):
        return _function(x)
    if isinstance(x, types.MethodType):
        return "method", {"function": x.__func__, "of": x.__self__}
    if isinstance(x, types.BuiltinFunctionType):
        return _name(x), {}
    if isinstance(x, functools.partial):
        return kind, {"function": x.func, "arguments": x.args, "keywords": x.keywords}
    if isinstance(x, types.CodeType):
        return _code(x), {}
    if isinstance(x, nnx.Variable):
        return kind, {"value": x.get_value()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return kind, {field: getattr(x, field) for field in x._fields}  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(x, Sequence):
        return f"{kind} of {len(x)}", {str(i): part for i, part in enumerate(x)}
    if isinstance(x, Mapping):
        return f"{kind} of {len(x)}", {k if isinstance(k, str) else repr(k): x[k] for k in sorted(x, key=repr)}
    if dataclasses.is_dataclass(x):
        return kind, {field.name: getattr(x, field.name, None) for field in dataclasses.fields(x)}
    if type(x).__module__.split(".")[0] in ("jax", "jaxlib"):  # a wrapped function; the rest is JAX's own affair
        return kind, {n: getattr(x, n) for n in ("__wrapped__", "fwd", "bwd", "jvp") if getattr(x, n, None) is not None}
    leaves = jax.tree_util.tree_leaves_with_path(x)
    if leaves and leaves[0][0]:  # a registered pytree, such as a Flax module: its arrays, and what else it has
        static = {k: v for k, v in vars(x).items() if not k.startswith("_pytree__")} if hasattr(x, "__dict__") else {}
        return kind, static | {f"at {jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
    try:
        state = x.__getstate__()
    except Exception:  # an object that cannot say what is in it
        return kind, {}
    return kind, state if isinstance(state, dict) else {} if state is None else {"state": state}


def _function(f: types.FunctionType) -> tuple[str, dict[str, Any]]:
    parts = closed_over(f)
    for name, value in inspect.signature(f, follow_wrapped=False).parameters.items():
        if value.default is not inspect.Parameter.empty:
            parts[name] = value.default
    if f.__code__.co_filename.startswith(_INSTALLED):
        return _name(f), parts
    for name in sorted(_globals_read(f.__code__)):
        if name in f.__globals__:
            parts[f"global {name}"] = f.__globals__[name]
    # The module of a script is __main__ when it is run and has its name when it is imported.
    return f"{f.__qualname__} {_code(f.__code__)}", parts


def _name(x: Any) -> str:
    # Where JAX keeps a function within its package changes from version to version.
    module = "jax" if x.__module__ and x.__module__.split(".")[0] in ("jax", "jaxlib") else x.__module__
    return f"{module}.{x.__qualname__}"


def _code(code: types.CodeType) -> str:
    """A digest of what is executed; where it stands, and its comments, do not count."""
    constants = [_code(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    form = (code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants)
    return _digest(repr(form).encode())


def _constant(c: Any) -> str:
    if isinstance(c, frozenset):
        return f"frozenset of {sorted(map(_constant, c))}"
    return f"tuple of {[*map(_constant, c)]}" if isinstance(c, tuple) else repr(c)


def _globals_read(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_read(constant)
    return names


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
