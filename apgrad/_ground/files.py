"""Files: names for the leaves of a pytree, by which arrays are stored, and writing in one step."""

import os
import tempfile
from pathlib import Path
from typing import Any

import jax


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, in the order of `jax.tree.leaves`.

    Example:
      >>> named_leaves({"dense": {"kernel": 1, "bias": 2}, "rates": [3]})
      {'dense.bias': 2, 'dense.kernel': 1, 'rates.0': 3}
      >>> named_leaves(4)
      {'value': 4}
    """
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") or "value"
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file that is there in full or as it was before, even if the process is killed meanwhile."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
