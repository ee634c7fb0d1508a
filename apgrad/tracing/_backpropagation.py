"""Backpropagation of any JAX function in any semiring."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad.tracing import _control as control, _windows as windows
from apgrad.tracing._interpreter import Context, walk
from apgrad.tracing._semirings import Semiring, Value
from apgrad.tracing._sums import constant, zeros

NESTED = {**control.NESTED, **windows.NESTED}


def backprop(f: Callable[..., Any], semiring: Semiring, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """Backpropagation with the semiring's sum and product: `jax.grad` with the sum made replaceable.

    For each element of an argument, the plus over all paths from it to the loss of the times of the derivatives along
    the path. The graph is that of the primitives that JAX traces, element by element: inside a matrix product, each
    input element has an edge to each output element that it goes into.

    Args:
      f: returns a floating-point scalar, the loss. If it comes from `ap.randomize`, the function that was randomized is
        traced in its place (argnums still count the key). Inside another function a randomized one is traced, or
        refused, as it stands: put the original there.
      semiring: of `ap.tracing`: `ordinary()`, `max_product()`, `absolute_sum()`, `entropy()`, `top_k(k)`, or your own.
      argnums: which positional arguments, as for `jax.grad`; negative ones count from the end. As there, all other
        arguments reach f as they are: strings, functions and Python's numbers too.

    Returns:
      A function of f's arguments that returns, for each array of the chosen ones, what `semiring.finish` makes of its
      value, in the argument's structure; a tuple for a sequence of argnums. It works under `jit`, `vmap` and `scan`.

    Raises:
      TypeError: at trace time, if f returns no floating-point scalar, a chosen argument is not floating point, or f
        has a backward pass that is no sum over edges, or what is traced goes through a mutable reference.
      ValueError: at trace time, for a primitive without a rule whose Jacobian is too large, or argnums that name no
        argument or one twice.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> f = lambda x: jnp.sum(jnp.array([[1.0, 2.0], [3.0, -4.0]]) @ x)
      >>> x = jnp.ones(2)
      >>> [ap.backprop(f, s())(x).tolist() for s in (ap.tracing.ordinary, ap.tracing.max_product)]
      [[4.0, -2.0], [3.0, 4.0]]
    """
    f = original(f)

    def backpropagated(*args, **kwargs):
        program, inputs, treedef, active = traced(f, args, kwargs, argnums)
        context = Context(semiring, NESTED)
        walked = walk(context, program, inputs, active)
        found = [semiring.finish(v) for v in values(context, walked, inputs, active)]
        trees = jax.tree.unflatten(treedef, found)
        return trees[0] if is_single(argnums) else trees

    return backpropagated


def traced(f: Callable[..., Any], args: Any, kwargs: Any, argnums: int | Sequence[int]) -> Any:
    """The program of f, whose inputs are the chosen arguments: `((jaxpr, consts), inputs, their tree, active)`."""
    numbers = chosen_numbers(argnums, len(args))
    chosen = tuple(args[n] for n in numbers)

    def function(chosen):
        full = list(args)
        for n, value in zip(numbers, chosen, strict=True):
            full[n] = value
        return f(*full, **kwargs)

    for leaf in jax.tree.leaves(chosen):
        try:
            dtype = jnp.result_type(leaf)
        except TypeError:
            dtype = type(leaf).__name__
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"paths end at floating-point arguments, got {dtype}. Choose others with argnums.")
    closed, shape = jax.make_jaxpr(function, return_shape=True)(chosen)
    output = jax.tree.leaves(shape)
    if len(output) != 1 or output[0].shape or not jnp.issubdtype(output[0].dtype, jnp.floating):
        raise TypeError(
            f"paths begin at a loss, so the function must return one floating-point scalar; it returns {shape}"
        )
    leaves, treedef = jax.tree.flatten(chosen)
    inputs = [jnp.asarray(x) if not isinstance(x, jax.Array) else x for x in leaves]
    return (closed.jaxpr, tuple(closed.consts)), inputs, treedef, (True,) * len(leaves)


def is_single(argnums: int | Sequence[int]) -> bool:
    """Whether argnums are one number, of Python, NumPy or JAX, and no sequence."""
    return hasattr(argnums, "__index__") and not getattr(argnums, "shape", ())


def chosen_numbers(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Which of `count` positional arguments are chosen, counted from 0."""
    try:
        given = [operator.index(n) for n in ([argnums] if is_single(argnums) else argnums)]  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
    except TypeError as error:
        raise TypeError(f"argnums must be an integer or a sequence of integers, got {argnums!r}") from error
    for n in given:
        if not -count <= n < count:
            raise ValueError(
                f"argnums has {n}, but the function is called with {count} positional arguments. Keyword arguments "
                "are not counted: give what is to be traced by position."
            )
    numbers = tuple(n % count for n in given)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"argnums {argnums} name an argument twice, of {count}. Give each once.")
    return numbers


def values(context: Context, walked: Any, inputs: Sequence[Any], active: Sequence[bool]) -> list[Value]:
    """The messages at the active inputs, started with one at the loss."""
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
    """Of a randomized function the one that it randomizes, still called with a key; of any other, itself.

    A function says what it randomizes by an attribute `original`. Its own backward pass is an estimate, with other
    edges at each key. JAX's transformations copy attributes, but only what `jit` returns is the same function.
    """
    inner = getattr(f, "original", None)
    copied = hasattr(getattr(f, "__wrapped__", None), "original") and not isinstance(f, jax.stages.Wrapped)
    return f if inner is None or copied else lambda key, *args, **kwargs: inner(*args, **kwargs)
