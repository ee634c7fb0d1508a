"""Names of the leaves of a pytree, by which arrays are stored in files."""

from typing import Any

import jax


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, in the order of `jax.tree.leaves`.

    Args:
      tree: any pytree.

    Example:
      >>> named_leaves({"dense": {"kernel": 1, "bias": 2}, "rates": [3]})
      {'dense.bias': 2, 'dense.kernel': 1, 'rates.0': 3}
      >>> named_leaves(4)
      {'value': 4}
    """
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") or "value"
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
