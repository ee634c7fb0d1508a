"""The folder of a run: it holds one run for ever, and one process at a time trains in it.

* `run.json` says which run this is, see `_identity.py`.
* `.lock` is locked by the process that trains here; the system lets go of the lock when the process ends.

Beside them stand the checkpoints (`_checkpoints.py`), and `metrics.csv` and `training.png` (`_log.py`).
"""

import json
import os
from pathlib import Path

import jax

from apgrad._ground.files import write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class RunFolder:
    """The folder of a run that this process trains.

    Args:
      folder: its path; the folder is made if it does not exist.

    Raises:
      ValueError: if another process, or another call of `train`, trains in the folder. A system without flock
        (Windows) does not notice. If a run has several processes, only the first of them holds the lock.
    """

    def __init__(self, folder: str | Path):
        self.folder, self._lock = Path(folder), None
        self.first = jax.process_index() == 0
        self.folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None or not self.first:
            return
        lock = (self.folder / ".lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ValueError(
                f"another run trains in {self.folder} (process {holder}). Use another folder, or wait until it ends."
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        """Lets another process train here."""
        if self._lock is not None:
            self._lock.close()

    def claim(self, identity: dict[str, str], *, begun: bool) -> None:
        """Writes down which run this is or, if the run has begun, compares this run with what is written.

        Args:
          identity: which run this is: texts by names, as `_identity.py` makes them.
          begun: whether the folder has a checkpoint already.

        Raises:
          ValueError: if the folder holds another run, saying what differs.
        """
        path = self.folder / "run.json"
        if begun and path.exists():
            try:
                found = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(
                    f"{path} is damaged, so nothing says which run this folder holds. Delete the file to go on with "
                    "what was trained here as if it were this run, or use another folder."
                ) from error
            if differing := [n for n in {**found, **identity} if found.get(n) != identity.get(n)]:
                shown = "; ".join(
                    f"{n}: {found.get(n, 'nothing')} there, {identity.get(n, 'nothing')} here" for n in differing[:5]
                )
                raise ValueError(
                    f"{self.folder} holds another run ({len(differing)} parts differ: {shown}). Use another folder, or "
                    f"the same key, start, optimizer and options. If both mean the same, delete {path} to go on."
                )
        elif self.first:
            write_atomically(path, json.dumps(identity, indent=1))
