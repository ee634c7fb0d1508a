"""`semiring_grad`: the gradient of any JAX function with the sum and product of any semiring."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import chosen_numbers, is_single, require_parameters
from apgrad._programs import jaxprs, pure
from apgrad.tracing._interpreter import Context, walk
from apgrad.tracing._semirings import Semiring, Value, require_semiring
from apgrad.tracing._sums import constant, zeros


def semiring_grad(f: Callable[..., Any], semiring: Semiring, argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """Backpropagation with the semiring's sum and product: `jax.grad` with another sum.

    Along every path from an element of an argument to the loss the semiring multiplies the derivatives, and over all
    these paths it adds the products. Paths go through the primitives that JAX traces, element by element.

    Args:
      f: the loss, a function that returns a floating-point scalar. If f comes from `ap.randomize`, the function that
        was randomized is traced in its place (argnums still count the key); inside f, call the original yourself.
      semiring: `ordinary()`, `max_product()`, `absolute_sum()`, `entropy()` or `top_k(k)`, or your own `Semiring`.
      argnums: which positional arguments, as for `jax.grad`. All others reach f as they are, strings and functions too.

    Returns:
      A function of f's arguments: `semiring.finish(value)` for each array of the chosen ones, in the structure of
      `jax.grad`'s result. It works under `jit`, `vmap` and `scan`.

    Raises:
      TypeError: at trace time, if f has a backward pass that is no sum over edges, or writes a mutable reference.
      ValueError: for a semiring that is not of its `kind`; if the Jacobian of a primitive without a rule is too large,
        or f changes its arguments in place.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> f = lambda x: jnp.sum(jnp.array([[1.0, 2.0], [3.0, -4.0]]) @ x)
      >>> [ap.semiring_grad(f, s())(jnp.ones(2)).tolist() for s in (ap.tracing.ordinary, ap.tracing.max_product)]
      [[4.0, -2.0], [3.0, 4.0]]
    """
    f = original(f)
    require_semiring(semiring)

    def backpropagated(*args, **kwargs):
        loss = traced("ap.semiring_grad", f, args, kwargs, argnums)
        return loss.tree(propagated(semiring, loss))

    return backpropagated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as a program of the arrays in its arguments: those of the chosen arguments, then those of all others."""

    program: jaxprs.Program
    inputs: list[Any]
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})  # of the chosen arrays
    # Puts one value for each chosen array in the structure of the arguments.
    tree: Callable[[Sequence[Any]], Any] = dataclasses.field(metadata={"static": True})

    @property
    def active(self) -> tuple[bool, ...]:
        return tuple(i < len(self.names) for i in range(len(self.inputs)))


def traced(who: str, f: Callable[..., Any], args: Any, kwargs: Any, argnums: int | Sequence[int]) -> Loss:
    """The program of a loss; arrays that are not chosen are its constants where Python wants to know their values."""
    numbers = chosen_numbers(argnums, len(args))
    leaves, treedef = jax.tree.flatten((list(args), kwargs))
    owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    chosen = [n for k in numbers for n, owner in enumerate(owners) if owner == k]
    for k in numbers:
        require_parameters(f"argument {k}", args[k], jnp.floating, "and paths end at floating-point arrays")

    jaxprs.require_auto("following paths")

    def program_of(places):
        put = lambda *values: treedef.unflatten(jaxprs.place(values, places, leaves))
        chosen = [leaves[n] for n in places]
        program, shape = pure.trace(who, lambda given: f(*given[0], **given[1]), put, chosen)
        return jaxprs.pruned(program), shape, places

    others = [n for n, leaf in enumerate(leaves) if n not in chosen and _is_array(leaf)]
    try:
        program, shape, places = program_of([*chosen, *others])
    except jax.errors.JAXTypeError:
        program, shape, places = program_of(chosen)
    jaxprs.require_unchecked("paths are followed", (leaves, program.consts))
    output = jax.tree.leaves(shape)
    if len(output) != 1 or output[0].shape or not jnp.issubdtype(output[0].dtype, jnp.floating):
        raise TypeError(f"paths begin at a loss: the function must return one floating-point scalar, not {shape}")
    trees, single = jax.tree.structure(tuple(args[k] for k in numbers)), is_single(argnums)

    def tree(values):
        made = jax.tree.unflatten(trees, values)
        return made[0] if single else made

    inputs = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in (leaves[n] for n in places)]
    return Loss(program, inputs, _names(trees, single), tree)


def _is_array(leaf):
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufV")


def _names(treedef, single) -> tuple[str, ...]:
    """The names of the arrays in a tuple of chosen arguments: their paths, as "embed/kernel"."""
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    keys = [path[single:] for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/") or "x"
    short = [name(p[:-1] if p[1:] and p[-1] == jax.tree_util.GetAttrKey("value") else p) for p in keys]
    return tuple(short if len(set(short)) == len(keys) else map(name, keys))


def values(context: Context, loss: Loss) -> list[Value]:
    """The messages at the active inputs that come from a message at the loss, the semiring's one."""
    semiring, walked = context.semiring, walk(context, loss.program, loss.inputs, loss.active)
    (output,) = walked.outputs
    found = walked.pull([constant(semiring.one, (), output.dtype) if walked.active[0] else None])
    return [
        semiring.settle(m) if m is not None else zeros(semiring, x.shape, x.dtype)
        for m, x, active in zip(found, loss.inputs, loss.active, strict=True)
        if active
    ]


def propagated(semiring: Semiring, loss: Loss) -> list[Any]:
    return [semiring.finish(value) for value in values(Context(semiring), loss)]


def original(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a randomized function randomizes, still called with a key. Other functions stay as they are."""
    inner = getattr(f, "original", None)
    # JAX's transformations copy attributes, but only `jit` returns the same function.
    copied = hasattr(getattr(f, "__wrapped__", None), "original") and not isinstance(f, jax.stages.Wrapped)
    return f if inner is None or copied else lambda key, *args, **kwargs: inner(*args, **kwargs)
