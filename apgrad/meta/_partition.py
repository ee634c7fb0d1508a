"""Which parts of a pytree are meta-trained: all but an `nnx.Variable` that is no `nnx.Param`, such as a standardizer.

Weight decay would shrink such a variable, and evolution strategies would perturb it: it is split off everywhere.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from apgrad._ground.arguments import unlike
from apgrad.mplp._sequential import tied


def partition(theta: Any) -> tuple[Any, Any]:
    """Splits a pytree into what is trained and what is fixed: two pytrees of its form, with None for what is missing.

    Args:
      theta: a rule, or any pytree. All of it is trained but an `nnx.Variable` that is not an `nnx.Param`.

    Example:
      >>> import jax, jax.numpy as jnp, flax.nnx as nnx, apgrad as ap
      >>> theta = {"weight": nnx.Param(jnp.ones(2)), "scale": nnx.Variable(jnp.zeros(3)), "rate": jnp.ones(())}
      >>> trained, fixed = ap.meta.partition(theta)
      >>> [len(jax.tree.leaves(part)) for part in (trained, fixed)], trained["scale"]
      ([2, 1], None)
    """
    trained = jax.tree.map(lambda x: None if is_fixed(x) else x, theta, is_leaf=is_fixed)
    fixed = jax.tree.map(lambda x: x if is_fixed(x) else None, theta, is_leaf=is_fixed)
    return trained, fixed


def merge(trained: Any, fixed: Any) -> Any:
    """The pytree that `partition` split.

    Args:
      trained: the first part, or one of its form, such as a gradient.
      fixed: the second part.
    """
    hole = lambda x: x is None or is_fixed(x)
    return jax.tree.map(lambda a, b: a if b is None else b, trained, fixed, is_leaf=hole)


def copied(tree: Any) -> Any:
    """A copy of the pytree, with modules and variables of its own: writing to them does not change the original."""
    return jax.tree.map(lambda x: x, tree)


def value_and_gradient(loss: Callable[[Any], Any], theta: Any, *, has_aux: bool = False) -> tuple[Any, Any]:
    """`jax.value_and_grad` with respect to what is trained."""
    trained, fixed = partition(theta)
    return jax.value_and_grad(lambda trained: loss(merge(trained, fixed)), has_aux=has_aux)(trained)


def require_trainable(theta: Any) -> None:
    if found := unlike(partition(theta)[0]):
        raise TypeError(
            f"what is meta-trained are floating-point numbers, and theta{found}. Write 2 as 2.0, put a number that "
            "stays fixed into an nnx.Variable, and let your functions close over anything else."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(theta):
        if jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key):
            raise TypeError(
                f"theta{jax.tree_util.keystr(path)} is a PRNG key, for which a gradient can have no zeros. Do not "
                "keep the key that made a module as its attribute, and take keys of a step from the problem's key."
            )
    if same := tied(theta):
        raise TypeError(
            f"theta{' and theta'.join(same)} are one nnx.Param, of which a step would make two. Train theta of "
            "`graph, theta = nnx.split(module)`, and in your functions call `nnx.merge(graph, theta)`."
        )


def is_fixed(x: Any) -> bool:
    return isinstance(x, nnx.Variable) and not isinstance(x, nnx.Param)
