"""What Python functions reach without a call: traced arrays, which a node then takes as inputs; modules of a model.

A `custom_vjp` function may not close over traced arrays: a differentiated array would get no message, and for others
JAX says much later "No constant handler for type DynamicJaxprTracer".
"""

import contextlib
import dis
import functools
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer

_LIBRARIES = tuple(sysconfig.get_path(path) for path in ("stdlib", "purelib", "platlib"))


def may_close_over_a_tracer(*functions: Any) -> bool:
    """Whether a traced array is found in what functions reach: a quick look."""
    return any(isinstance(found, Tracer) for found in reached(*functions))


def reached(*functions: Any, code: bool = False) -> Iterator[Any]:
    """All that is reached by closures, defaults, parts of `partial`, attributes and containers.

    With `code`, also by the globals that code names, but for the code of libraries.
    """
    seen: dict[int, Any] = {}  # with the objects, since the id of one that is gone may come again
    queue = list(functions)
    while queue:
        found = queue.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        yield found
        queue += jax.tree.leaves(found, is_leaf=lambda x, found=found: x is not found)  # one level
        if isinstance(found, functools.partial):
            queue += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, Mapping | set | frozenset):
            queue += found.values() if isinstance(found, Mapping) else found
        queue += _attributes(found)
        if callable(found):
            for cell in getattr(found, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # a variable that has no value yet
                    queue.append(cell.cell_contents)
            queue += [getattr(found, f"__{name}__", None) for name in ("defaults", "kwdefaults", "self", "wrapped")]
        own = getattr(found, "__code__", None) if code else None
        if own is not None and not own.co_filename.startswith(_LIBRARIES):
            queue += _globals(own, getattr(found, "__globals__", {}))


def _attributes(found: Any) -> list[Any]:
    """The values of an object's attributes; of modules, classes and libraries' objects none, which is the world."""
    library = type(found).__module__.partition(".")[0] in ("builtins", "jax", "jaxlib", "numpy", "functools", "types")
    if library or isinstance(found, type):
        return []
    slots = [name for cls in type(found).__mro__ for name in getattr(cls, "__slots__", ())]
    own = [*getattr(found, "__dict__", {}).values(), *(getattr(found, name, None) for name in slots)]
    return [*own, vars(type(found)).get("__call__")]


def _globals(code: types.CodeType, known: Mapping[str, Any]) -> list[Any]:
    """The globals that code names, of modules among them the attributes that it names, and the same of inner code."""
    found = [known.get(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    found += [getattr(x, name, None) for x in found if isinstance(x, types.ModuleType) for name in code.co_names]
    for inner in code.co_consts:
        found += _globals(inner, known) if isinstance(inner, types.CodeType) else []
    return found
