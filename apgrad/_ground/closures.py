"""Whether a Python function closes over traced arrays, which a node then takes as inputs.

A `custom_vjp` function may not: a differentiated array would get no message, and for others JAX says much later "No
constant handler for type DynamicJaxprTracer".
"""

import contextlib
import functools
from typing import Any

import jax
from jax.core import Tracer


def may_close_over_a_tracer(*functions: Any) -> bool:
    """Whether a traced array is found in what Python functions close over: a quick look, without calling them."""
    seen, queue = set(), list(functions)
    while queue:
        found = queue.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, functools.partial):
            queue += [found.func, *found.args, *found.keywords.values()]
            continue
        if not callable(found):
            leaves = jax.tree.leaves(found)
            if any(isinstance(leaf, Tracer) for leaf in leaves):
                return True
            queue += [leaf for leaf in leaves if callable(leaf)]
            queue += [value for leaf in leaves for value in _attributes(leaf)]
            continue
        queue += closed_over(found).values()
        queue += [getattr(found, f"__{name}__", None) for name in ("defaults", "kwdefaults", "self", "wrapped")]
        queue += jax.tree.leaves(found)  # a callable object that is a pytree, as Flax's modules are
        queue += _attributes(found)
    return False


def _attributes(found: Any) -> list[Any]:
    """The values of an object's attributes; of modules, classes and libraries' objects none, which is the world."""
    library = type(found).__module__.partition(".")[0] in ("builtins", "jax", "jaxlib", "numpy", "functools", "types")
    if library or isinstance(found, type):
        return []
    slots = [name for cls in type(found).__mro__ for name in getattr(cls, "__slots__", ())]
    return [*getattr(found, "__dict__", {}).values(), *(getattr(found, name, None) for name in slots)]


def closed_over(function: Any) -> dict[str, Any]:
    """What a Python function closes over, by the names of the variables; other callables close over nothing."""
    found = {}
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            found[name] = cell.cell_contents
    return found
