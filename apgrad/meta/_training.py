"""The outer loop: many outer steps in one jitted function, on one device or many.

All jitted calls run one program, and a checkpoint follows each, so a run that was killed and goes on ends with the same
bits. A progress bar, a file of all steps and a `log`, such as TensorBoard's files, show how a run goes.
"""

import contextlib
import os
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from apgrad._ground.arguments import require_call, whole
from apgrad._ground.files import locked, write_atomically
from apgrad._ground.norms import scaled_norm, widened
from apgrad._ground.progress import progress_bar
from apgrad.meta._checkpoints import Checkpoints, fingerprint
from apgrad.meta._outer import OuterGradient, global_view
from apgrad.meta._partition import merge, partition
from apgrad.meta._tasks import optimizing
from apgrad.mplp._places import strong

__all__ = ["Training", "begin", "normalize_tensors", "outer_steps", "tensorboard", "train"]


Log = Callable[[int, dict[str, float]], None]
COLUMNS = ("loss", "gradient_norm")
HEAD = ",".join(["step", *COLUMNS]) + "\n"
CALL = "an outer optimizer", "init(theta) and update(gradient, state, theta, value=loss, grad=gradient)"
ROW = re.compile(r"(\d+)" + r",[\w.+-]+" * len(COLUMNS) + r"\n")


class Training(NamedTuple):
    """What goes on from step to step: theta, optax's state of what is trained, the outer gradient's carry, the run's
    key (step t uses `fold_in(key, t)`), the steps made, and those skipped because a loss or gradient was not finite.
    """

    theta: Any
    optimizer: Any
    carry: Any
    key: jax.Array
    step: jax.Array
    skipped: jax.Array


def normalize_tensors() -> optax.GradientTransformation:
    """An optax transformation that divides each array of the gradient by its norm plus 1e-8, as published for MPLP.

    Example:
      >>> import jax.numpy as jnp, optax, apgrad as ap
      >>> print(ap.meta.normalize_tensors().update(jnp.array([3.0, 4.0]), optax.EmptyState())[0])
      [0.6 0.8]
    """

    @jax.numpy_dtype_promotion("standard")  # of complex numbers and real lengths
    def one(g):
        size, norm = scaled_norm(g)
        return (widened(g)[0] / size / (norm + 1e-8 / size)).astype(g.dtype)

    return optax.stateless(lambda updates, params: jax.tree.map(one, updates))


def begin(outer: OuterGradient, optimizer: optax.GradientTransformation, theta: Any, key: jax.Array) -> Training:
    """The state of the outer loop before the first step.

    Args:
      outer: the outer gradient.
      optimizer: optax's.
      theta: the meta-parameters at the start.
      key: PRNG key of the whole run.
    """
    carry_key, key = jax.random.split(key)
    zero = jnp.zeros((), int)
    carry = outer.init(theta, carry_key)
    theta = jax.tree.map(strong, theta)
    with optimizing(*CALL):
        state = optimizer.init(partition(theta)[0])
    return Training(theta, state, carry, key, zero, zero)


def _require_same(before: Any, after: Any) -> None:
    kind = lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}"
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if kind(old) != kind(new):
            raise TypeError(
                f"the state of the outer optimizer changes its form in a step: {jax.tree_util.keystr(path)} was "
                f"{kind(old)}, and is {kind(new)}. With theta in float32 optax's optimizers keep the form."
            )


def outer_steps(
    outer: OuterGradient, optimizer: optax.GradientTransformation, every: int
) -> Callable[[Training, jax.Array], tuple[Training, dict[str, jax.Array]]]:
    """What `train` jits: `(training, last) -> (training, metrics)`, up to `every` steps while `training.step < last`.

    Args:
      outer: the outer gradient.
      optimizer: optax's, with clipping and schedules as you like.
      every: how many steps a call makes; metrics are "loss" and "gradient_norm", each (every,).
    """
    every = whole("every", every)

    def one(training):
        key = jax.random.fold_in(training.key, training.step)
        loss, gradient, carry = outer.estimate(training.theta, key, training.carry)
        gradient, _ = partition(gradient)
        trained, fixed = partition(training.theta)
        # Where the norm overflows, so do the squares of the optimizer.
        norm = optax.tree.norm(widened(gradient))
        fine = jnp.isfinite(loss) & jnp.isfinite(norm)
        with optimizing(*CALL):
            update = optax.with_extra_args_support(optimizer).update
            updates, state = update(gradient, training.optimizer, trained, value=loss, grad=gradient)
        _require_same(training.optimizer, state)
        moved = merge(optax.apply_updates(trained, updates), fixed)
        # A carry that is not finite would stay so, so a new one is made.
        carry = lax.cond(fine, lambda: carry, lambda: outer.init(training.theta, jax.random.fold_in(key, 1)))
        theta, state = optax.tree.where(fine, (moved, state), (training.theta, training.optimizer))
        skipped = training.skipped + (~fine).astype(training.skipped.dtype)
        new = Training(theta, state, carry, training.key, training.step + 1, skipped)
        return new, {"loss": loss, "gradient_norm": norm}

    def many(training, last):
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, training)[1])
        body = lambda t, _: lax.cond(t.step < last, one, lambda t: (t, none), t)
        return lax.scan(body, training, length=every)

    return many


def train(
    outer: OuterGradient,
    optimizer: optax.GradientTransformation,
    theta: Any,
    key: jax.Array,
    steps: int,
    *,
    folder: str | Path | None = None,
    version: str | int | None = None,
    every: int = 50,
    mesh: Mesh | None = None,
    log: Log | None = None,
    progress: bool = True,
) -> Training:
    """Meta-trains, and goes on with a run that was begun in the folder; `.theta` of the result is what was trained.

    A run is known by its version, key and theta at the start, which its folder holds. The version stands for your code,
    the outer gradient and the optimizer, with the numbers in them: change it when these change.

    Args:
      outer: the outer gradient, such as `batched(reverse_mode(problem), 8)`.
      optimizer: optax's.
      theta: the meta-parameters at the start: a rule, or any pytree of arrays.
      key: PRNG key of everything random.
      steps: outer steps, with those of earlier starts counted in; a folder's run of more steps is returned as it is.
      folder: where checkpoints, `run` and `metrics.csv` are written, if given.
      version: text or a number, such as "1", which a folder needs.
      every: outer steps between checkpoints; they run in one jitted call.
      mesh: the devices, for `batched(..., mesh=mesh)`; theta is replicated on them.
      log: `(step, metrics)`, called after each jitted call with the means of "loss" and "gradient_norm", and "skipped",
        such as `tensorboard(folder)`.
      progress: whether to show a tqdm bar.

    Raises:
      FloatingPointError: if all steps of a call of two or more, ten steps in a row, or all steps had to be skipped.
      ValueError: for a folder without a version, that is in use, or that holds another run or a damaged checkpoint.

    Example:
      >>> import jax, optax, apgrad as ap
      >>> outer = ap.meta.OuterGradient(lambda theta, key: (), lambda theta, key, carry: (theta**2, 2 * theta, carry))
      >>> done = ap.meta.train(outer, optax.sgd(0.1), jax.numpy.float32(1.0), jax.random.key(0), 10, progress=False)
      >>> int(done.step), int(done.skipped), round(float(done.theta), 2)
      (10, 0, 0.11)
    """
    steps, every = whole("steps", steps, 0), whole("every", every)
    if log is not None:
        require_call("log of meta.train", log, ("step", "metrics"), ", as what meta.tensorboard(folder) returns does")
    with contextlib.ExitStack() as stack:
        checkpoints, latest, table = None, None, None
        if folder is not None:
            if version is None:
                raise ValueError("a folder needs version=..., say '1', which stands for your code and its settings")
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                stack.enter_context(locked(folder / ".lock", f"another run trains in {folder}"))
                table = folder / "metrics.csv"
            checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints"))
            latest = checkpoints.latest()
            run = f"version {version}, key {fingerprint(key)}, theta {fingerprint(theta)}"
            _claim(folder / "run", run, begun=latest is not None)
        # A copy, since the jitted call donates the memory of its argument.
        training = jax.tree.map(jnp.array, begin(outer, optimizer, theta, key))
        if mesh is not None:
            replicated = NamedSharding(global_view(mesh), PartitionSpec())
            training = jax.jit(lambda training: training, out_shardings=replicated)(training)
        if checkpoints is not None and latest is not None:
            training = checkpoints.restore(latest, training)
        step = int(training.step)
        if table is not None:
            begin_metrics(table, step)
        bar = stack.enter_context(progress_bar("meta-training", steps, step, shown=progress and step < steps))

        def record(step, training, metrics):
            if table is not None:
                append_metrics(table, step, metrics)
            if checkpoints is not None:
                checkpoints.save(step, training)
            means = {name: float(np.mean(values)) for name, values in metrics.items()}
            bar.set_postfix(loss=f"{means['loss']:.4g}", skipped=int(training.skipped), refresh=False)
            bar.update(step - bar.n)
            if log is not None:
                log(step, {**means, "skipped": float(training.skipped)})

        return _loop(outer_steps(outer, optimizer, every), training, steps, record)


def _claim(path: Path, run: str, *, begun: bool) -> None:
    """Writes down which run this is or, if the run has begun, compares this run with what is written."""
    if begun and path.exists():
        if (found := path.read_text()) != run:
            raise ValueError(
                f"{path.parent} holds another run: {path} says {found!r}, and this run is {run!r}. Use another folder, "
                f"or the same version, key and start. If both mean the same, delete {path} to go on."
            )
    elif jax.process_index() == 0:
        write_atomically(path, run)


def _loop(many, training, steps, record):
    call = jax.jit(many, donate_argnums=0)
    step, wasted = int(training.step), 0
    while step < steps:
        skipped = int(training.skipped)
        training, metrics = call(training, jnp.asarray(steps))
        made = int(training.step) - step
        step += made
        wasted = wasted + made if int(training.skipped) - skipped == made else 0
        # A single bad step is no proof; many in a row are, and so is a run without a good one.
        if wasted and (made > 1 or wasted >= 10 or int(training.skipped) == steps):
            raise FloatingPointError(
                f"no outer step from {step - wasted} to {step} had a finite loss and gradient. If the first "
                "had none, a derivative may be infinite (of a root at 0: optax.adam wants eps_root=1e-16); else lower "
                "the outer learning rate, clip (optax.clip_by_global_norm), or shorten the unroll."
            )
        record(step, training, {name: np.asarray(values)[:made] for name, values in metrics.items()})
    return training


def tensorboard(folder: str | Path) -> Log:
    """A `log` for `train` that writes TensorBoard's event files by tensorboardX; they are on disk when a call returns.

    Args:
      folder: where the event files are, one for each start of a run; it is made if it does not exist.
    """
    # tensorboardX's SummaryWriter writes by a thread, whose last events a kill would lose.
    try:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise ImportError('TensorBoard files need tensorboardX: pip install "apgrad[meta]"') from error
    Path(folder).mkdir(parents=True, exist_ok=True)
    writer = EventsWriter(str(Path(folder) / "events"), f".{os.getpid()}")

    def log(step, metrics):
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        writer.flush()

    weakref.finalize(log, writer.close)
    return log


def begin_metrics(path: Path, step: int) -> None:
    """Rewrites the file `metrics.csv` of a run that goes on from a step: its head, and complete rows up to the step."""
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if (row := ROW.fullmatch(line)) and int(row[1]) <= step]
    write_atomically(path, HEAD + "".join(whole))


def append_metrics(path: Path, step: int, metrics: dict[str, np.ndarray]) -> None:
    """Adds the rows of the last steps, metrics (steps,), up to this step; they are on disk when this returns."""
    rows = np.stack([metrics[name].astype(float) for name in COLUMNS], axis=1).tolist()
    with path.open("a", newline="") as file:
        file.writelines(f"{step - len(rows) + i},{','.join(map(repr, row))}\n" for i, row in enumerate(rows, 1))
        file.flush()
        os.fsync(file.fileno())
