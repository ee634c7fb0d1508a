"""Checkpoints of a pytree by orbax: complete or not there, and equal to the last bit.

Orbax writes into a temporary folder and renames it, so a process that is killed leaves the checkpoint before. Leaves
are stored flat, by their path; typed random keys as their data.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Checkpoints:
    """A folder of checkpoints, numbered by step.

    Args:
      folder: where; made if it is not there.
      keep: how many of the last ones.

    Example:
      >>> import tempfile, jax.numpy as jnp, apgrad as ap
      >>> with tempfile.TemporaryDirectory() as folder, ap.meta.Checkpoints(folder) as checkpoints:
      ...     checkpoints.save(3, {"x": jnp.ones(2)})
      ...     checkpoints.latest(), checkpoints.restore(3, {"x": jnp.zeros(2)})["x"].tolist()
      (3, [1.0, 1.0])
    """

    def __init__(self, folder: str | Path, keep: int = 2):
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ImportError('checkpoints need orbax: pip install "apgrad[meta]"') from error
        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options, item_handlers=handler)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def latest(self) -> int | None:
        """The last step saved, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, tree: Any) -> None:
        """Writes a checkpoint, and returns when it is there; on several processes, all of them call it."""
        self._manager.save(step, args=self._args.StandardSave(_flat(tree)))
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """Reads a checkpoint.

        Args:
          step: of the checkpoint.
          like: a pytree of the same structure, shapes and dtypes; the result has its shardings.

        Raises:
          ValueError: if the checkpoint has another form, naming what differs.
        """
        wanted = _flat(like)
        metadata: Any = self._manager.item_metadata(step)
        found = {name: (tuple(m.shape), np.dtype(m.dtype)) for name, m in metadata.items()}
        form = {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in wanted.items()}
        if found != form:
            differing = sorted(n for n in found.keys() | form.keys() if found.get(n) != form.get(n))
            shown = "; ".join(
                f"{n}: {found.get(n, 'nothing')} there, {form.get(n, 'nothing')} wanted" for n in differing[:5]
            )
            raise ValueError(
                f"the checkpoint of step {step} is that of another run ({len(differing)} arrays differ: {shown}). Use "
                "another folder, or the rule, optimizer and estimator that it was written with."
            )
        abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in wanted.items()}
        stored = self._manager.restore(step, args=self._args.StandardRestore(abstract))
        leaves = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(like):
            value = stored[_name(path)]
            leaves.append(jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else value)
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        """Lets go of the folder."""
        self._manager.close()


def _flat(tree):
    values = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        values[_name(path)] = jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)
    return values


def _is_key(leaf):
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(float)), jax.dtypes.prng_key)


def _name(path):
    return jax.tree_util.keystr(path, simple=True, separator=".") or "value"
