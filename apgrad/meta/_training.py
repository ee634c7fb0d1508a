"""The outer loop: many outer steps in one jitted function, on one device or many; a killed run goes on.

    outer = meta.batched(meta.reverse_mode(problem), 8)
    done = meta.train(outer, optax.adam(1e-3), theta, jax.random.key(0), 10_000, folder="run")

An outer step is

    loss, gradient, carry = outer.estimate(theta, key_t, carry);    theta <- optax

and is skipped, and counted, if the loss or the norm of the gradient is not finite. One call of the jitted function
makes `every` steps. Between calls come metrics, progress and a checkpoint of all that goes on: theta, the optimizer's
state, the carry, the key, the step. Every call runs the same program from the same bits, so a run that was killed and
started again ends with the same bits as a run that was not killed.
"""

import contextlib
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
from apgrad.meta._log import Log, MetricsFile, progress_bar
from apgrad.meta._outer import OuterGradient, global_view, where
from apgrad.meta._partition import combine, partition
from apgrad.meta._require import number, whole


class Training(NamedTuple):
    """All that goes on from one outer step to the next.

    Attributes:
      theta: the meta-parameters.
      optimizer: optax's state for the part of theta that is trained.
      carry: the carry of the outer gradient.
      key: PRNG key of the whole run; step t uses `fold_in(key, t)`.
      step: () integer, outer steps made.
      skipped: () integer, how many of these steps had a loss or gradient that was not finite.
    """

    theta: Any
    optimizer: Any
    carry: Any
    key: jax.Array
    step: jax.Array
    skipped: jax.Array


def normalize_tensors(epsilon: float = 1e-8) -> optax.GradientTransformation:
    """An optax transformation that divides each array of the gradient by its norm plus epsilon, as published for MPLP.

    Args:
      epsilon: what is added to the norm, above 0.

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
    return Training(theta, optimizer.init(partition(theta)[0]), outer.init(theta, carry_key), key, zero, zero)


def outer_steps(
    outer: OuterGradient, optimizer: optax.GradientTransformation, every: int
) -> Callable[[Training, jax.Array], tuple[Training, dict[str, jax.Array]]]:
    """The function that `train` jits: up to `every` outer steps.

    Args:
      outer: the outer gradient.
      optimizer: optax's, with clipping and schedules as you like.
      every: how many steps a call makes.

    Returns:
      `(training, last) -> (training, metrics)`: it makes steps while `training.step < last`; metrics are "loss" and
      "gradient_norm", each (every,).
    """
    every = whole("every", every, 1)

    def one(training):
        key = jax.random.fold_in(training.key, training.step)
        loss, gradient, carry = outer.estimate(training.theta, key, training.carry)
        gradient, _ = partition(gradient)
        trained, fixed = partition(training.theta)
        norm = optax.tree.norm(gradient)
        fine = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, state = optimizer.update(gradient, training.optimizer, trained)
        moved = combine(optax.apply_updates(trained, updates), fixed)
        # A carry that went wrong would stay so: it begins anew.
        carry = lax.cond(fine, lambda: carry, lambda: outer.init(training.theta, jax.random.fold_in(key, 1)))
        theta, state = where(fine, (moved, state), (training.theta, training.optimizer))
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
    every: int = 50,
    mesh: Mesh | None = None,
    log: Log | None = None,
    progress: bool = True,
) -> Training:
    """Meta-trains, and goes on with a run that was begun in the folder.

    A run is known by its outer gradient, optimizer, theta and key. The folder's `run.json` describes them part by part:
    numbers, arrays, functions with what they close over, and the code of functions that are yours. The folder of
    another run is refused, and so is a folder in which a process is training. `steps`, `every`, `mesh`, `log` and
    `progress` may change from start to start.

    Args:
      outer: the outer gradient, such as `batched(reverse_mode(problem), 8)`.
      optimizer: optax's.
      theta: the meta-parameters at the start: a rule, or any pytree of arrays.
      key: PRNG key of everything random.
      steps: outer steps, with the steps of earlier starts counted in.
      folder: where checkpoints, `run.json`, `metrics.csv` and, at the end, `training.png` are written; nothing is
        written if it is not given.
      every: outer steps between checkpoints; they run in one jitted call.
      mesh: the devices, for `batched(..., mesh=mesh)`; theta is replicated on them.
      log: a function that is called after each jitted call with the step and a dictionary: the means of "loss" and
        "gradient_norm", and "skipped". For TensorBoard, `tensorboard(folder)`.
      progress: whether to show a tqdm bar.

    Returns:
      The state of the loop; `.theta` is what was trained.

    Raises:
      FloatingPointError: if all steps of a call (of more than one), ten in a row, or all steps of the run had to be
        skipped.
      ValueError: if the folder is in use, or holds another run or a damaged checkpoint, saying what to do.

    Example:
      >>> import jax, optax, apgrad as ap
      >>> task = ap.meta.sinusoid()
      >>> learner = ap.meta.optimizer(lambda log_rate: optax.sgd(jax.numpy.exp(log_rate)), task.loss)
      >>> outer = ap.meta.batched(ap.meta.reverse_mode(ap.meta.inner_problem(task, learner, 5)), 4)
      >>> done = ap.meta.train(outer, optax.adam(0.1), jax.numpy.float32(-3.0), jax.random.key(0), 10, progress=False)
      >>> int(done.step), int(done.skipped)
      (10, 0)
    """
    steps, every = whole("steps", steps, 0), whole("every", every, 1)
    with contextlib.ExitStack() as stack:
        run, checkpoints = None, None
        if folder is not None:
            run = stack.enter_context(contextlib.closing(RunFolder(folder)))
            checkpoints = stack.enter_context(Checkpoints(run.folder / "checkpoints"))
            which = identity(key=key, theta=theta, optimizer=optimizer, outer=outer)
            run.claim(which, begun=checkpoints.latest() is not None)
        # A copy, since the jitted call gives the memory of its argument away.
        training = jax.tree.map(jnp.array, begin(outer, optimizer, theta, key))
        if mesh is not None:
            training = jax.tree.map(lambda x: _replicate(x, global_view(mesh)), training)
        if checkpoints is not None and (latest := checkpoints.latest()) is not None:
            training = checkpoints.restore(latest, training)
        step = int(training.step)
        rows = MetricsFile(run.folder, step) if run is not None and run.first else None
        bar = progress_bar(step, steps) if progress and step < steps else None

        def record(step, training, metrics):
            if rows is not None:
                rows(step, metrics)
            if checkpoints is not None:
                checkpoints.save(step, training)
            means = {name: float(np.mean(values)) for name, values in metrics.items()}
            for f in (log, bar):
                if f is not None:
                    f(step, {**means, "skipped": float(training.skipped)})

        training = _loop(outer_steps(outer, optimizer, every), training, steps, record)
        if rows is not None:
            rows.draw()
        return training


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
                f"no outer step from {step - wasted} to {step} had a finite loss and gradient. Lower the outer "
                "learning rate, clip (optax.clip_by_global_norm), or shorten the unroll."
            )
        record(step, training, {name: np.asarray(values)[:made] for name, values in metrics.items()})
    return training


def _replicate(x, mesh):
    sharding = NamedSharding(mesh, PartitionSpec())
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_replicate(jax.random.key_data(x), mesh), impl=jax.random.key_impl(x))
    value = np.asarray(x)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
