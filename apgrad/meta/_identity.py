"""Which run a folder holds: a description of the run's values, and a version for its code.

`identity("3", optimizer=..., theta=...)` describes values part by part, under names that say where a part is, such as
`optimizer.update.learning_rate: 0.1`. Numbers, strings and arrays are described by what they are, functions by their
names and by the values that they close over, have as defaults or read as globals, and everything else by its type and
by the parts that pickle would store. The description is the same in every process.
"""

import dis
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.closures import closed_over
from apgrad._ground.files import write_atomically

_INSTALLED = (*{sysconfig.get_paths()[n] for n in ("purelib", "platlib")}, str(Path(__file__).parents[1]))
_LEFT_OUT = (jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.Sharding, jax.Device)


class Identity(NamedTuple):
    """The texts of a run by the names of its parts, and the user's classes and modules whose code nobody compares."""

    parts: dict[str, str]
    unseen: list[str]


def identity(version: str | int | None, **values: Any) -> Identity:
    """The description of some values; the version, if there is one, stands for the code of functions."""
    found, unseen, seen = {} if version is None else {"version": str(version)}, set(), {}

    def describe(name, x):
        if isinstance(x, _LEFT_OUT):
            return
        if (text := _text(x)) is not None:
            found[name] = text
            return
        if id(x) in seen:
            found[name] = f"as {seen[id(x)][0]}"
            return
        if type(x) is not tuple:  # equal tuples are sometimes one object and sometimes several
            seen[id(x)] = name, x  # kept, so that the id stays its own
        found[name], parts, modules = _parts(x, coded=version is None)
        unseen.update(modules)
        for part, value in parts.items():
            describe(f"{name}.{part}", value)

    for name, value in values.items():
        describe(name, value)
    return Identity(found, sorted(unseen))


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
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise ValueError(
            f"{path} is damaged, so nothing says which run this folder holds. Delete the file to go on with what was "
            "trained here as if it were this run, or use another folder."
        )
    if differing := [n for n in {**found, **parts} if found.get(n) != parts.get(n)]:
        shown = "; ".join(
            f"{n}: {found.get(n, 'nothing')} there, {parts.get(n, 'nothing')} here" for n in differing[:5]
        )
        raise ValueError(
            f"{path.parent} holds another run ({len(differing)} parts differ: {shown}). Use another folder, or the "
            f"same version, key, start, optimizer and options. If both mean the same, delete {path} to go on."
        )


def _text(x: Any) -> str | None:
    """The text of a value that has no parts."""
    if isinstance(x, str | bytes):
        return repr(x) if len(x) <= 60 else _digest(x if isinstance(x, bytes) else x.encode())
    if x is None or isinstance(x, bool | int | float | complex):
        return repr(x)
    if isinstance(x, set | frozenset):
        return f"{type(x).__name__} of {sorted(repr(sorted(identity(None, _=y).parts.items())) for y in x)}"
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return f"{x.dtype} {_text(jax.random.key_data(x))}"
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return f"{x.dtype}{x.shape}"
    if isinstance(x, np.ndarray | np.generic | jax.Array) and not (array := np.asarray(x)).dtype.hasobject:
        small = f" {array.tolist()!r}" if array.size <= 4 else ""
        return f"{array.dtype}{array.shape}{small} {_digest(np.ascontiguousarray(array).tobytes())}"
    return None


def _parts(x: Any, *, coded: bool) -> tuple[str, dict[str, Any], list[str]]:
    """A text for the kind of the value, its parts, and the user's classes and modules that it leads to."""
    if isinstance(x, types.FunctionType):
        return _function(x, coded)
    if isinstance(x, types.ModuleType):
        return x.__name__, {}, [] if _is_installed(x.__name__) else [f"the module {x.__name__}"]
    kind = x if isinstance(x, type) else type(x)
    text, unseen = _name(kind), [] if _is_installed(kind.__module__) else [f"the class {kind.__qualname__}"]
    if kind is x:
        return text, {}, unseen
    kept = isinstance(x, functools.partial | jax.ShapeDtypeStruct)
    if hasattr(x, "__wrapped__") or (text.startswith("jax.") and not kept):  # what else JAX has is its own affair
        names = ("__wrapped__", "fwd", "bwd", "jvp")
        return text, {n: getattr(x, n) for n in names if getattr(x, n, None) is not None}, unseen
    if isinstance(x, Mapping):
        return f"{text} of {len(x)}", {k if isinstance(k, str) else repr(k): x[k] for k in sorted(x, key=repr)}, unseen
    if isinstance(x, list | tuple):
        names = getattr(x, "_fields", map(str, range(len(x))))
        return f"{text} of {len(x)}", dict(zip(names, x, strict=True)), unseen
    try:
        stored: Any = x.__reduce_ex__(4)
    except Exception:  # an object that cannot be taken apart, such as a lock
        return text, {}, unseen
    if isinstance(stored, str):
        return f"{text} {stored}", {}, unseen
    _, arguments, state, items, pairs = (*stored, None, None, None)[:5]
    held = [*(arguments or ()), *(items or ()), *(pairs or ())]
    parts = {str(i): part for i, part in enumerate(held) if part is not kind}
    state = state if isinstance(state, dict) else {} if state is None else {"state": state}
    return text, parts | {str(k): v for k, v in state.items() if not str(k).startswith("_pytree__")}, unseen


def _function(f: types.FunctionType, coded: bool) -> tuple[str, dict[str, Any], list[str]]:
    defaults = {n: p.default for n, p in inspect.signature(f, follow_wrapped=False).parameters.items()}
    parts = closed_over(f) | {n: v for n, v in defaults.items() if v is not inspect.Parameter.empty}
    if _is_installed(f.__module__):
        return _name(f), parts, []
    names, imported = _names_read(f.__code__)
    parts |= {f"global {name}": f.__globals__[name] for name in sorted(names) if name in f.__globals__}
    unseen = [f"the module {name}" for name in imported if not _is_installed(name)]
    # The module of a script is __main__ when it is run and has its name when it is imported.
    return f"{f.__qualname__} {_code(f.__code__)}" if coded else f.__qualname__, parts, unseen


@functools.cache
def _is_installed(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None)
    return root != "__main__" and (root in sys.stdlib_module_names or bool(file and file.startswith(_INSTALLED)))


def _name(x: Any) -> str:
    # Where JAX keeps a function within its package changes from version to version.
    module = "jax" if x.__module__ and x.__module__.split(".")[0] in ("jax", "jaxlib") else x.__module__
    return f"{module}.{x.__qualname__}"


def _code(c: Any) -> str:
    """A digest of what is executed, or the text of a constant in it; where the code stands does not count."""
    if isinstance(c, types.CodeType):
        form = (c.co_code.hex(), c.co_names, c.co_varnames, c.co_freevars, c.co_cellvars, [*map(_code, c.co_consts)])
        return _digest(repr(form).encode())
    if isinstance(c, frozenset):
        return f"frozenset of {sorted(map(_code, c))}"
    return f"tuple of {[*map(_code, c)]}" if isinstance(c, tuple) else repr(c)


def _names_read(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The global names that a function and the functions in it read, and the modules that they import."""
    found = [
        {i.argval for i in dis.get_instructions(code) if i.opname in names}
        for names in (("LOAD_GLOBAL", "LOAD_NAME"), ("IMPORT_NAME",))
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found = [a | b for a, b in zip(found, _names_read(constant), strict=True)]
    return found[0], found[1]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
