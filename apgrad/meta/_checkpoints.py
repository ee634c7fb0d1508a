"""Checkpoints of a pytree: each one is complete or absent, and is restored with the same bits.

    with meta.Checkpoints(folder) as checkpoints:
        checkpoints.save(step, tree)
        tree = checkpoints.restore(checkpoints.latest(), tree)

Orbax renames a finished checkpoint into its place, so that a kill leaves the earlier ones as they were. Orbax stores no
array of size 0, does not notice a changed bit in a file, and joins the names of nested keys: so arrays are stored by
number, and orbax's metadata of the checkpoint holds the name, shape, dtype and checksum of each.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import whole
from apgrad._ground.files import named_leaves


class Checkpoints:
    """A folder of checkpoints, numbered by step, of which the last two stay.

    Args:
      folder: where the checkpoints are; it is made if it does not exist.

    Example:
      >>> import tempfile, jax.numpy as jnp, apgrad as ap
      >>> with tempfile.TemporaryDirectory() as folder, ap.meta.Checkpoints(folder) as checkpoints:
      ...     checkpoints.save(3, {"x": jnp.ones(2)})
      ...     checkpoints.latest(), checkpoints.restore(3, {"x": jnp.zeros(2)})["x"].tolist()
      (3, [1.0, 1.0])
    """

    def __init__(self, folder: str | Path):
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ImportError('checkpoints need orbax: pip install "apgrad[meta]"') from error
        self._args, self._folder = ocp.args, Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handler)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def latest(self) -> int | None:
        """The last step saved, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, tree: Any) -> None:
        """Writes a checkpoint and returns when it is on disk; in a run of several processes all of them call this.

        Args:
          step: the number of the checkpoint, larger than that of every checkpoint in the folder.
          tree: a pytree of arrays and PRNG keys.

        Raises:
          ValueError: if the folder has a checkpoint of this step, or of a later one.
        """
        latest = self.latest()
        if whole("step", step, 0) <= (-1 if latest is None else latest):
            raise ValueError(
                f"{self._folder} has a checkpoint of step {latest}, and steps grow: got step={step}. Save a later "
                "step, or delete the folders of the steps that are to be written again."
            )
        arrays = _arrays(tree)
        form = json.dumps({n: (*_form(x), int(_checksum(x))) for n, x in arrays.items()})
        self._manager.save(
            step,
            args=self._args.StandardSave(_stored(arrays) | {"step": np.asarray(step)}),
            custom_metadata={"arrays": form, "checksum": zlib.crc32(form.encode())},
        )
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """Reads a checkpoint.

        Args:
          step: the number of the checkpoint.
          like: a pytree of the same structure, shapes and dtypes; the arrays that are read get its shardings.

        Raises:
          ValueError: if the checkpoint has another form, naming what differs, or is damaged, saying what to do.
        """
        wanted = _arrays(like)
        try:
            metadata: Any = self._manager.metadata(step).custom_metadata
            if zlib.crc32(metadata["arrays"].encode()) != metadata["checksum"]:
                raise ValueError("its description has changed")
            found = {
                n: (tuple(shape), dtype, sum_) for n, (shape, dtype, sum_) in json.loads(metadata["arrays"]).items()
            }
        except Exception as error:  # orbax raises what its parts raise: of files, JSON, the array store, None
            raise self._damaged(step, f"{type(error).__name__}: {error}") from error
        form = {n: _form(x) for n, x in wanted.items()}
        shown = lambda x: f"{x[1]}{x[0]}" if x else "nothing"
        if differing := sorted(n for n in found.keys() | form.keys() if found.get(n, ())[:2] != form.get(n, ())):
            parts = "; ".join(f"{n}: {shown(found.get(n))} there, {shown(form.get(n))} wanted" for n in differing[:5])
            raise ValueError(
                f"the checkpoint of step {step} is that of another run ({len(differing)} arrays differ: {parts}). Use "
                "another folder, or the rule, optimizer and outer gradient that it was written with."
            )
        wanted = {n: wanted[n] for n in found}  # in the order in which they are numbered
        abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in _stored(wanted).items()}
        try:
            stored = self._manager.restore(step, args=self._args.StandardRestore(abstract | {"step": np.asarray(step)}))
            arrays = {n: stored.get(str(i), x) for i, (n, x) in enumerate(wanted.items())}
        except Exception as error:
            raise self._damaged(step, f"{type(error).__name__}: {error}") from error
        if wrong := [n for n, x in arrays.items() if int(_checksum(x)) != found[n][2]]:
            raise self._damaged(step, f"the bits of {', '.join(wrong)} have changed")
        leaves = [_like(leaf, arrays[name]) for name, leaf in named_leaves(like).items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        """Lets go of the folder."""
        self._manager.close()

    def _damaged(self, step: int, reason: str) -> ValueError:
        before = max((s for s in self._manager.all_steps() if s < step), default=None)
        then = f"to go on from {before}" if before is not None else "to begin again: there is no checkpoint before it"
        reason = " ".join(reason.split())[:300]
        return ValueError(
            f"the checkpoint of step {step} is damaged; delete {self._folder / str(step)} {then} ({reason})"
        )


@jax.jit
def _checksum(x):
    # Integer sums modulo 2^32 do not depend on the order of addition. Weights are odd, so that a change of one word
    # always changes the sum, and differ, so that an exchange of two does.
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    size = min(x.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).reshape(-1).astype(jnp.uint32)
    return jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _arrays(tree):
    """The leaves by name, with typed random keys as their data."""
    data = lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)
    return {name: data(leaf) for name, leaf in named_leaves(tree).items()}


def _stored(arrays):
    """What orbax stores of the arrays, by number: all but those of size 0."""
    return {str(i): x for i, x in enumerate(arrays.values()) if x.size}


def _form(x):
    return tuple(x.shape), str(x.dtype)


def _like(leaf, value):
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else value


def _is_key(leaf):
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(float)), jax.dtypes.prng_key)
