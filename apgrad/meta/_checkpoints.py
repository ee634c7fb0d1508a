"""Checkpoints of a pytree: each one is complete or absent, and is restored with the same bits.

Orbax renames a finished checkpoint into its place. It stores no array of size 0, does not notice a changed bit, and
joins the names of nested keys: so arrays are stored by number, with a name, shape, dtype and checksum of each beside.
"""

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import noted, whole
from apgrad._ground.files import named_leaves

_WEIGHTS = 2 * np.arange(2**16, dtype=np.uint32) + 1


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
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
        import orbax.checkpoint as ocp  # it comes with Flax, and takes most of a second

        self._args, self._folder = ocp.args, Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handler)

    def __exit__(self, *_: Any) -> None:
        self.close()

    def latest(self) -> int | None:
        """The last step that any process has saved, or None."""
        self._manager.reload()
        return self._manager.latest_step()

    def save(self, step: int, tree: Any) -> None:
        """Writes a checkpoint and returns when it is on disk; all processes of a run call this.

        Args:
          step: the number of the checkpoint; a ValueError if it is not larger than all in the folder.
          tree: a pytree of arrays and PRNG keys. NumPy arrays are stored as NumPy arrays.
        """
        latest = self.latest()
        if whole("step", step, 0) <= (-1 if latest is None else latest):
            raise ValueError(
                f"{self._folder} has a checkpoint of step {latest}, and steps must grow: got step={step}. Save a later "
                "step, or delete the folders of the steps that are to be written again."
            )
        arrays = _arrays(tree)
        text = json.dumps(_described(arrays))
        metadata = {"arrays": text, "checksum": zlib.crc32(text.encode())}
        self._manager.save(step, args=self._args.StandardSave(_stored(arrays, step)), custom_metadata=metadata)
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """Reads a checkpoint. A ValueError names arrays that are not as in `like`, or says what to do about damage.

        Args:
          step: the number of the checkpoint.
          like: a pytree of the same structure, shapes, dtypes and shardings; ShapeDtypeStructs may stand for arrays.
        """
        self._manager.reload()  # what another process has saved
        if step not in (steps := self._manager.all_steps()):
            raise ValueError(f"{self._folder} has no checkpoint of step {step}; it has those of {sorted(steps)}")
        shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
        like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding) if shape(x) else x, like)
        wanted = _arrays(like)
        try:
            metadata: Any = self._manager.metadata(step).custom_metadata
            if zlib.crc32(metadata["arrays"].encode()) != metadata["checksum"]:
                raise ValueError("its description has changed")
            described = json.loads(metadata["arrays"])
        except Exception as error:  # orbax raises what its parts raise: of files, JSON, the array store, None
            raise self._damaged(step, f"{type(error).__name__}: {error}") from error
        there, here = {n: form for n, (form, _) in described.items()}, {n: _form(x) for n, x in wanted.items()}
        if differing := sorted(n for n in {**there, **here} if there.get(n) != here.get(n)):
            shown = [f"{n}: {there.get(n, 'nothing')} there, {here.get(n, 'nothing')} wanted" for n in differing[:5]]
            raise ValueError(
                f"the checkpoint of step {step} is that of another run ({len(differing)} arrays differ: "
                f"{'; '.join(shown)}). Use another folder, or the rule, optimizer, outer gradient and "
                "jax_enable_x64 that it was written with."
            )
        try:
            stored = self._manager.restore(step, args=self._args.StandardRestore(_stored(wanted, step)))
        except Exception as error:
            raise self._damaged(step, f"{type(error).__name__}: {error}") from error
        arrays = {name: stored.get(str(i), x) for i, (name, x) in enumerate(wanted.items())}
        if wrong := [name for name, (_, checksum) in _described(arrays).items() if checksum != described[name][1]]:
            raise self._damaged(step, f"the bits of {', '.join(wrong)} have changed")
        wrap = lambda x, leaf: jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else x
        leaves = [wrap(arrays[name], leaf) for name, leaf in _named(like).items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        """Closes the folder."""
        self._manager.close()

    def _damaged(self, step: int, reason: str) -> ValueError:
        before = max((s for s in self._manager.all_steps() if s < step), default=None)
        then = f"to go on from {before}" if before is not None else "to begin again: there is no checkpoint before it"
        where, reason = self._folder / str(step), " ".join(reason.split())[:300]
        return ValueError(f"the checkpoint of step {step} is damaged; delete {where} {then} ({reason})")


def _checksum(x):
    # Integer sums modulo 2^32 do not depend on the order of addition. Weights are odd, so that a change of one byte
    # always changes the sum, and all different, so that an exchange of two unequal bytes does. The host adds, since
    # a jitted sum is compiled for each shape; only what no single process has whole is added where it is.
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return int(_checksum_of_shards(x))
    data, total = np.ravel(x).view(np.uint8), 0
    for i in range(0, data.size, _WEIGHTS.size):
        part = data[i : i + _WEIGHTS.size].astype(np.uint32)
        total += int(part @ _WEIGHTS[: part.size]) + 2 * i * int(part.sum())
    return total % 2**32


@jax.jit
def _checksum_of_shards(x):
    data = jnp.ravel(x).view(jnp.uint8).astype(jnp.uint32)
    return jnp.sum(data * (2 * jnp.arange(data.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _arrays(tree):
    """The leaves by name, in the order of their names, with random keys as their data."""

    def data(name, leaf):
        with noted(f"This is the leaf {name} of a checkpoint, which holds arrays and PRNG keys."):
            array = jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)
        # JAX would make 32 bits of NumPy's 64.
        return np.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else array

    return {name: data(name, leaf) for name, leaf in sorted(_named(tree).items())}


def _named(tree):  # the dtype of a key says which implementation draws: keys of two of them may have equal data
    return {f"{leaf.dtype} {name}" if _is_key(leaf) else name: leaf for name, leaf in named_leaves(tree).items()}


def _described(arrays):
    return {name: [_form(x), _checksum(x)] for name, x in arrays.items()}


def _form(x):
    return f"{x.dtype}{x.shape}"


def fingerprint(tree: Any) -> str:
    return f"{zlib.crc32(json.dumps(_described(_arrays(tree))).encode()):08x}"


def _stored(arrays, step):
    """What orbax stores: the arrays by number, without those of size 0, and the step, so that it is never nothing."""
    return {str(i): x for i, x in enumerate(arrays.values()) if x.size} | {"step": np.asarray(step)}


def _is_key(leaf):
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(float)), jax.dtypes.prng_key)
