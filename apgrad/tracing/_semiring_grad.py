"""`semiring_grad`: the gradient of any JAX function with the sum and product of any semiring."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import chosen_numbers, is_single
from apgrad._programs import jaxprs
from apgrad.tracing import _control as control, _windows as windows
from apgrad.tracing._interpreter import Context, walk
from apgrad.tracing._semirings import Semiring, Value, require_semiring
from apgrad.tracing._sums import constant, zeros

NESTED = {**control.CONTROL_RULES, **windows.WINDOW_RULES}


def semiring_grad(f: Callable[..., Any], semiring: Semiring, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """Backpropagation with the semiring's sum and product: `jax.grad` with another sum.

    For each element of an argument: along every path from the element to the loss the semiring multiplies the
    derivatives, and over all these paths it adds the products. The paths go through the primitives that JAX traces,
    element by element: in a matrix product, each input element has an edge to each output element that it goes into.

    Args:
      f: the loss, a function that returns a floating-point scalar. If f comes from `ap.randomize`, the function that
        was randomized is traced in its place (argnums still count the key). A randomized function inside f is traced,
        or refused, as it stands: put the original there.
      semiring: one of `ap.tracing`: `ordinary()`, `max_product()`, `absolute_sum()`, `entropy()`, `top_k(k)`, or your
        own `Semiring`.
      argnums: which positional arguments, as for `jax.grad`; negative numbers count from the end. All other arguments
        reach f as they are: strings, functions and Python's numbers too.

    Returns:
      A function of f's arguments. For each array of the chosen arguments it returns `semiring.finish(value)`, in the
      argument's structure; for a sequence of argnums a tuple. It works under `jit`, `vmap` and `scan`.

    Raises:
      TypeError: for a semiring whose functions return no values; at trace time, if f returns no floating-point scalar,
        a chosen argument is not floating point, f has a backward pass that is no sum over edges, or what is traced
        goes through a mutable reference.
      ValueError: for a semiring that is not of its `kind`; at trace time, for a primitive without a rule whose Jacobian
        is too large, or argnums that name no argument or one twice.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> f = lambda x: jnp.sum(jnp.array([[1.0, 2.0], [3.0, -4.0]]) @ x)
      >>> x = jnp.ones(2)
      >>> [ap.semiring_grad(f, s())(x).tolist() for s in (ap.tracing.ordinary, ap.tracing.max_product)]
      [[4.0, -2.0], [3.0, 4.0]]
    """
    f = original(f)
    require_semiring(semiring)

    def backpropagated(*args, **kwargs):
        program, inputs, treedef, active = traced(f, args, kwargs, argnums)
        context = Context(semiring, NESTED)
        walked = walk(context, program, inputs, active)
        found = [semiring.finish(v) for v in values(context, walked, inputs, active)]
        trees = jax.tree.unflatten(treedef, found)
        return trees[0] if is_single(argnums) else trees

    return backpropagated


def traced(f: Callable[..., Any], args: Any, kwargs: Any, argnums: int | Sequence[int]) -> Any:
    """The program of a loss as a function of the arrays in its chosen arguments.

    Args:
      f: the loss.
      args: its positional arguments.
      kwargs: its keyword arguments.
      argnums: which of the positional arguments are chosen.

    Returns:
      The program; the arrays, which are its inputs; the structure of the tuple of chosen arguments; and a True for each
        array.

    Raises:
      TypeError: if a chosen argument is not floating point, or the loss is no floating-point scalar.
    """
    function, values = jaxprs.restrict(functools.partial(f, **kwargs), args, chosen_numbers(argnums, len(args)))
    chosen = tuple(values)

    for leaf in jax.tree.leaves(chosen):
        try:
            dtype = jnp.result_type(leaf)
        except TypeError:
            dtype = type(leaf).__name__
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"paths end at floating-point arguments, got {dtype}. Choose others with argnums.")
    program, shape = jaxprs.trace(function, *chosen)
    output = jax.tree.leaves(shape)
    if len(output) != 1 or output[0].shape or not jnp.issubdtype(output[0].dtype, jnp.floating):
        raise TypeError(
            f"paths begin at a loss, so the function must return one floating-point scalar; it returns {shape}"
        )
    leaves, treedef = jax.tree.flatten(chosen)
    inputs = [jnp.asarray(x) if not isinstance(x, jax.Array) else x for x in leaves]
    return program, inputs, treedef, (True,) * len(leaves)


def values(context: Context, walked: Any, inputs: Sequence[Any], active: Sequence[bool]) -> list[Value]:
    """The messages at the active inputs that come from a message at the loss, the semiring's one.

    Args:
      context: what is the same for all of the walk.
      walked: the loss's program after its walk forward, a `Walked`.
      inputs: the values of the program's inputs, arrays.
      active: for each input, whether it is active.
    """
    semiring = context.semiring
    (loss,) = walked.outputs
    messages = [constant(semiring.one, (), loss.dtype)] if walked.active[0] else [None]
    found = walked.pull(messages)
    return [
        semiring.settle(m) if m is not None else zeros(semiring, jnp.shape(x), x.dtype)
        for m, x, a in zip(found, inputs, active, strict=True)
        if a
    ]


def original(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a randomized function randomizes, still called with a key. Other functions stay as they are.

    A randomized function names its original by the attribute `original`. Its own backward pass is an estimate, and has
    other edges at each key. JAX's transformations copy attributes, but only `jit` returns the same function.

    Args:
      f: any function.
    """
    inner = getattr(f, "original", None)
    copied = hasattr(getattr(f, "__wrapped__", None), "original") and not isinstance(f, jax.stages.Wrapped)
    return f if inner is None or copied else lambda key, *args, **kwargs: inner(*args, **kwargs)
