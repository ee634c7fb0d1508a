"""What Python functions refer to: traced arrays, which a node then takes as inputs, and the modules of a model.

A `custom_vjp` function may not close over traced arrays: a differentiated array would get no message, and for any other
array JAX fails much later, with "No constant handler for type DynamicJaxprTracer".
"""

import contextlib
import dis
import functools
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

_LIBRARIES = tuple(sysconfig.get_path(path) for path in ("stdlib", "purelib", "platlib"))

_WORLD = ("builtins", "jax", "jaxlib", "numpy", "functools", "types")  # attributes of their objects are not looked into


def reached(*functions: Any, code: bool = False, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """All that closures, defaults, attributes, `partial`s and pytrees hold; with `code` also globals that it names."""
    seen: dict[int, Any] = {}  # keeps the objects: a deleted object's id may come again
    queue = list(functions)
    while queue:
        found = queue.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        yield found
        called, library = callable(found), type(found).__module__.partition(".")[0]
        if isinstance(found, type | types.ModuleType) or (library in ("jaxlib", "numpy") and not called):
            continue
        parts = _parts(found, is_leaf)
        queue += parts
        if called or any(part is found for part in parts):
            queue += _attributes(found) if library not in _WORLD else ()
        if isinstance(found, functools.partial):
            queue += [found.func, *found.args, *found.keywords.values()]
        if called:
            for cell in getattr(found, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # a variable that has no value yet
                    queue.append(cell.cell_contents)
            queue += [getattr(found, f"__{name}__", None) for name in ("defaults", "kwdefaults", "self", "wrapped")]
        own = getattr(found, "__code__", None) if code else None
        if own is not None and not own.co_filename.startswith(_LIBRARIES):
            queue += _globals(own, getattr(found, "__globals__", {}))


def _parts(found: Any, is_leaf: Callable[[Any], bool] | None) -> list[Any]:
    """What a container holds, or the object itself, one level deep. JAX opens no dictionary with unsortable keys."""
    if isinstance(found, Mapping | set | frozenset):
        return [*(found.values() if isinstance(found, Mapping) else found)]
    return jax.tree.leaves(found, is_leaf=lambda x: x is not found or (is_leaf is not None and is_leaf(x)))


def _attributes(found: Any) -> list[Any]:
    slots = [name for cls in type(found).__mro__ for name in getattr(cls, "__slots__", ())]
    own = [*getattr(found, "__dict__", {}).values(), *(getattr(found, name, None) for name in slots)]
    return [*own, vars(type(found)).get("__call__")]


def _globals(code: types.CodeType, known: Mapping[str, Any]) -> list[Any]:
    """The globals that code and its inner functions name, and the attributes that they name of modules among these."""
    found = [known.get(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    found += [getattr(x, name, None) for x in found if isinstance(x, types.ModuleType) for name in code.co_names]
    for inner in code.co_consts:
        found += _globals(inner, known) if isinstance(inner, types.CodeType) else []
    return found
