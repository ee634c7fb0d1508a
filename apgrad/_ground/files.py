"""Files: names under which the leaves of a pytree are stored, atomic writing, and locks."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def named_leaves(tree: Any) -> dict[str, Any]:
    r"""The leaves of a pytree by their paths, as "dense.kernel" or "rates.0"; a dot in a key is written as "\."."""
    part = lambda key: jax.tree_util.keystr((key,), simple=True).replace("\\", "\\\\").replace(".", "\\.")
    name = lambda path: ".".join(map(part, path)) if path else "value"
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file so that it is complete or as it was before, even if the process is killed meanwhile."""
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


@contextlib.contextmanager
def locked(path: Path, problem: str) -> Iterator[None]:
    """Holds a lock on the file, if the system has locks; a ValueError names the process that holds it already."""
    with path.open("a+") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise ValueError(f"{problem} (process {holder}). Use another folder, or wait until it ends.") from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield
