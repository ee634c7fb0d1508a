"""Functions that close over traced arrays, and what a propagator makes of those arrays: inputs.

A `custom_vjp` function may not close over an array that is traced outside it. If the array is differentiated, it
would get no message; if it is not, JAX cannot compile the function inside another `jit`, `scan` or `cond`, and says
so ("No constant handler for type DynamicJaxprTracer") long after, without a word of the function.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from apgrad._programs import jaxprs


def hoist(function: Callable[..., Any], *inputs: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A function without closures over traced arrays: `function(*inputs) == converted(*inputs, *arrays)`.

    A `custom_vjp` function may not close over an array that is to be differentiated; with the arrays as
    inputs they get their messages like any other.

    Args:
      function: any JAX function.
      *inputs: what it will be called with, as arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The converted function, and the list of arrays.
    """
    converted, arrays = jax.closure_convert(function, *inputs)
    return converted, arrays


def separate(function: Callable[..., Any], *inputs: Any) -> tuple[Callable[..., Any], list[Any], Any]:
    """`hoist` for traced arrays of every dtype, `function(*inputs) == separated(arrays, *inputs)`.

    Args:
      function: any JAX function.
      *inputs: what it will be called with, as arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The separated function, the list of traced arrays, and the shapes of the output.
    """
    program, shapes = jaxprs.trace(function, *inputs)
    jaxpr, treedef = program.jaxpr, jax.tree.structure(shapes)
    places = [i for i, c in enumerate(program.consts) if isinstance(c, Tracer)]
    consts = [None if isinstance(c, Tracer) else c for c in program.consts]

    def separated(arrays, *inputs):
        full = list(consts)
        for i, array in zip(places, arrays, strict=True):
            full[i] = array
        values = [jnp.asarray(x) for x in jax.tree.leaves(inputs)]
        outputs = jaxprs.evaluate(jaxprs.Program(jaxpr, tuple(full)), values, lambda eqn, x: jaxprs.caller(eqn)(*x))
        return jax.tree.unflatten(treedef, outputs)

    return separated, [program.consts[i] for i in places], shapes


def may_close_over_a_tracer(*functions: Any) -> bool:
    """Whether a traced array is found in what Python functions close over: a quick look, without calling them.

    Looked at are variables from outside, default arguments, parts of `functools.partial`, the object of a bound method,
    and the same of all functions found on the way. An array in an attribute of some other object is not found.
    """
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
            continue
        queue += [cell.cell_contents for cell in getattr(found, "__closure__", None) or () if _is_full(cell)]
        queue += [getattr(found, "__defaults__", None), getattr(found, "__kwdefaults__", None)]
        queue += [getattr(found, "__self__", None), getattr(found, "__wrapped__", None)]
        queue += jax.tree.leaves(found)  # a callable object that is a pytree, as Flax's modules are
    return False


def _is_full(cell):
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that has no value yet
        return False
    return True
