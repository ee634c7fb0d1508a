"""The outer loop: many outer steps in one jitted function, on one device or many, that goes on where it was killed.

    carry, key: of the estimator        gradient = estimate(theta, key_t, carry)
    skipped if the loss or the gradient is not finite (and counted), else theta <- optax

One call of the jitted function makes `every` steps; between calls come progress, metrics and a checkpoint of
everything: theta, the optimizer, the estimator's carry, the key, the step. Every call runs the same program from the
same bits, so a run that was killed and started again ends with the same bits as one that was not.
"""

import os
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

from apgrad.meta._checkpoints import Checkpoints
from apgrad.meta._folder import RunFolder
from apgrad.meta._identity import identity
from apgrad.meta._outer import OuterGradient, global_view
from apgrad.meta._partition import combine, partition
from apgrad.meta._require import number, whole


class Training(NamedTuple):
    """All that the outer loop carries.

    Attributes:
      theta: meta-parameters.
      optimizer: optax's state, of what of theta is trained.
      carry: the estimator's.
      key: of the whole run; step t uses `fold_in(key, t)`.
      step: outer steps made.
      skipped: those of them whose loss or gradient was not finite.
    """

    theta: Any
    optimizer: Any
    carry: Any
    key: jax.Array
    step: jax.Array
    skipped: jax.Array


def normalize_tensors(epsilon: float = 1e-8) -> optax.GradientTransformation:
    """Divides each array of the gradient by its norm plus epsilon, as published for MPLP.

    Example:
      >>> import jax.numpy as jnp, optax, apgrad as ap
      >>> optimizer = optax.chain(ap.meta.normalize_tensors(), optax.adam(1e-3))
      >>> normalize, state = ap.meta.normalize_tensors(), ap.meta.normalize_tensors().init(None)
      >>> normalize.update(jnp.array([3.0, 4.0]), state)[0].round(3).tolist()
      [0.6000000238418579, 0.800000011920929]
    """
    number("epsilon", epsilon, positive=True)
    one = lambda g: g / (jnp.sqrt(jnp.sum(g**2)) + epsilon)
    return optax.stateless(lambda updates, params: jax.tree.map(one, updates))


def begin(estimator: OuterGradient, optimizer: optax.GradientTransformation, theta: Any, key: jax.Array) -> Training:
    """The loop's state before the first step."""
    carry_key, key = jax.random.split(key)
    zero = jnp.zeros((), int)
    return Training(theta, optimizer.init(partition(theta)[0]), estimator.init(theta, carry_key), key, zero, zero)


def outer_steps(
    estimator: OuterGradient, optimizer: optax.GradientTransformation, every: int
) -> Callable[[Training, jax.Array], tuple[Training, dict[str, jax.Array]]]:
    """The function that is jitted: up to `every` outer steps.

    Args:
      estimator: of the outer gradient.
      optimizer: optax's, with clipping and schedules as you like.
      every: steps of a call.

    Returns:
      `(training, last) -> (training, metrics)`: steps while `training.step < last`; metrics are "loss" and
      "gradient_norm", (every,).
    """
    every = whole("every", every, 1)

    def one(training):
        key = jax.random.fold_in(training.key, training.step)
        loss, gradient, carry = estimator.estimate(training.theta, key, training.carry)
        gradient, _ = partition(gradient)
        trained, fixed = partition(training.theta)
        norm = optax.tree.norm(gradient)
        fine = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, state = optimizer.update(gradient, training.optimizer, trained)
        theta = combine(optax.apply_updates(trained, updates), fixed)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)
        # A carry that went wrong would stay so: it begins anew.
        fresh = lambda: estimator.init(training.theta, jax.random.fold_in(key, 1))
        carry = lax.cond(fine, lambda: carry, fresh)
        new = Training(
            keep(theta, training.theta),
            keep(state, training.optimizer),
            carry,
            training.key,
            training.step + 1,
            training.skipped + jnp.where(fine, 0, 1).astype(training.skipped.dtype),
        )
        return new, {"loss": loss, "gradient_norm": norm}

    def many(training, last):
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, training)[1])
        body = lambda t, _: lax.cond(t.step < last, one, lambda t: (t, none), t)
        return lax.scan(body, training, length=every)

    return many


def train(
    estimator: OuterGradient,
    optimizer: optax.GradientTransformation,
    theta: Any,
    key: jax.Array,
    steps: int,
    *,
    folder: str | Path | None = None,
    every: int = 50,
    mesh: Mesh | None = None,
    log: Callable[[int, dict[str, float]], None] | None = None,
    progress: bool = True,
) -> Training:
    """Meta-trains, and goes on with a run that was begun in the folder.

    A run is known by its estimator, optimizer, theta and key. They are described part by part in the folder's
    `run.json`: numbers, arrays, functions with what they close over, and the code of functions that are yours. A folder
    of another run is refused, and so is one in which a process is training. `steps`, `every`, `mesh`, `log` and
    `progress` may change from start to start.

    Args:
      estimator: of the outer gradient: `lanes(backpropagation(problem), 8)`, say.
      optimizer: optax's.
      theta: meta-parameters at the start: a rule, or any pytree of arrays.
      key: of everything random.
      steps: outer steps, those of earlier starts counted in.
      folder: for checkpoints, `run.json`, `metrics.csv` and, at the end, `training.png`; nothing is written if not
        given.
      every: outer steps between checkpoints; they run in one jitted call.
      mesh: of devices, for `lanes(..., mesh=mesh)`; theta is replicated on it.
      log: called with the step and means of the metrics, after each call: for TensorBoard, `tensorboard(folder)`.
      progress: whether to show a tqdm bar.

    Returns:
      The loop's state; `.theta` is what was trained.

    Raises:
      FloatingPointError: if all steps of a call (of more than one), ten in a row, or all steps of the run had to be
        skipped.
      ValueError: if the folder is in use, or holds another run or a damaged checkpoint, saying what to do.

    Example:
      >>> import jax, optax, apgrad as ap
      >>> task = ap.meta.sinusoid()
      >>> learner = ap.meta.optimizer(lambda log_rate: optax.sgd(jax.numpy.exp(log_rate)), task.loss)
      >>> outer = ap.meta.lanes(ap.meta.backpropagation(ap.meta.inner_problem(task, learner, 5)), 4)
      >>> done = ap.meta.train(outer, optax.adam(0.1), jax.numpy.float32(-3.0), jax.random.key(0), 10, progress=False)
      >>> int(done.step), int(done.skipped)
      (10, 0)
    """
    steps, every = whole("steps", steps, 0), whole("every", every, 1)
    run, checkpoints = None, None
    try:
        if folder is not None:
            run = RunFolder(folder)
            checkpoints = Checkpoints(Path(folder) / "checkpoints")
            which = identity(key=key, theta=theta, optimizer=optimizer, estimator=estimator)
            run.claim(which, begun=checkpoints.latest() is not None)
        # A copy: the jitted call gives its argument's memory away.
        training = jax.tree.map(jnp.array, begin(estimator, optimizer, theta, key))
        if mesh is not None:
            training = jax.tree.map(lambda x: _replicate(x, global_view(mesh)), training)
        if checkpoints is not None and (latest := checkpoints.latest()) is not None:
            training = checkpoints.restore(latest, training)
        return _loop(outer_steps(estimator, optimizer, every), training, steps, every, run, checkpoints, log, progress)
    finally:
        if checkpoints is not None:
            checkpoints.close()
        if run is not None:
            run.close()


def _loop(many, training, steps, every, run, checkpoints, log, progress):
    call = jax.jit(many, donate_argnums=0)
    step, wasted = int(training.step), 0
    bar = _bar(steps, step, progress)
    if run is not None:
        run.trim(step)
    while step < steps:
        skipped = int(training.skipped)
        training, metrics = call(training, jnp.asarray(steps))
        made = int(training.step) - step
        metrics = {name: np.asarray(values)[:made] for name, values in metrics.items()}
        step += made
        wasted = wasted + made if int(training.skipped) - skipped == made else 0
        # A single bad step is no proof; many in a row are, and so is a run without a good one.
        if wasted and (made > 1 or wasted >= 10 or int(training.skipped) == steps):
            raise FloatingPointError(
                f"no outer step from {step - wasted} to {step} had a finite loss and gradient. Lower the outer "
                "learning rate, clip (optax.clip_by_global_norm), or shorten the unroll."
            )
        if run is not None:
            run.append(step - made, metrics)
            checkpoints.save(step, training)
        means = {name: float(np.mean(values)) for name, values in metrics.items()}
        if log is not None:
            log(step, {**means, "skipped": float(training.skipped)})
        bar.set_postfix(loss=f"{means['loss']:.4g}", skipped=int(training.skipped), refresh=False)
        bar.update(made)
    bar.close()
    if run is not None:
        run.draw()
    return training


def tensorboard(folder: str | Path) -> Callable[[int, dict[str, float]], None]:
    """A `log` for `train` that writes TensorBoard's event files, by tensorboardX.

    Each call is on disk when it returns (tensorboardX's SummaryWriter writes by a thread, whose last events a kill
    would lose).

    Args:
      folder: made if it is not there; each start of a run writes a file of its own.

    Raises:
      ImportError: without tensorboardX, saying what to install.
    """
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


def _replicate(x, mesh):
    sharding = NamedSharding(mesh, PartitionSpec())
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_replicate(jax.random.key_data(x), mesh), impl=jax.random.key_impl(x))
    value = np.asarray(x)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _bar(steps, step, progress):
    try:
        import tqdm
    except ImportError as error:
        if progress:
            raise ImportError(
                'progress needs tqdm: pip install "apgrad[meta]", or train(..., progress=False)'
            ) from error
        return _Silent()
    return tqdm.tqdm(total=steps, initial=step, unit="step", desc="meta-training", disable=not progress)


class _Silent:
    def set_postfix(self, **_):
        pass

    def update(self, _):
        pass

    def close(self):
        pass
