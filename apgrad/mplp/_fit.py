"""Training a Flax model by a rule, from minibatches to the trained model."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from apgrad._ground.arguments import whole
from apgrad._ground.progress import progress_bar
from apgrad.mplp._losses import cross_entropy, softmax_cross_entropy
from apgrad.mplp._pretrained import load_pretrained, pretrained_card
from apgrad.mplp._protocol import LearnedRule
from apgrad.mplp._reach import warn_of_updates
from apgrad.mplp._sequential import Names, from_nnx, require_equal, to_nnx
from apgrad.mplp._step import init_state, inner_step
from apgrad.mplp.rules._normalized import Normalized

Batch = tuple[Any, Any]
SLACK = 0.02  # how far probabilities and their sums may be off: bfloat16 rounds by 1/512


class Fitted(NamedTuple):
    """What `fit` returns.

    Attributes:
      model: a copy of the model, with the parameters that were learned.
      losses: (steps,), the loss of each minibatch before the model has learned from it.
      steps: (points,), the numbers of updates after which the held-out batch was measured; empty without such a batch.
      held_out: (points,), the mean loss of the held-out batch after so many updates.
    """

    model: nnx.Sequential
    losses: np.ndarray
    steps: np.ndarray
    held_out: np.ndarray


def fit(
    model: nnx.Sequential,
    data: Iterable[Batch],
    rule: str | LearnedRule,
    steps: int,
    *,
    loss: Callable[..., jax.Array] = softmax_cross_entropy,
    held_out: Batch | None = None,
    every: int = 10,
    names: Names | None = None,
    progress: bool = True,
) -> Fitted:
    """Trains a Flax model by a rule, with one update for each minibatch.

    Args:
      model: what `from_nnx` takes. It stays as it is.
      data: minibatches `(x, y)` of one form, one for each step: x (batch, ...), and y as the loss takes it.
      rule: one of `pretrained_names()`, or a rule; a `Normalized` one is told the number of steps.
      steps: how many updates are made.
      loss: a loss node, such as `mplp.softmax_cross_entropy`, for which y is one-hot, or probabilities.
      held_out: `(x, y)` to measure at the start, after each `every` updates, and at the end, if given.
      every: the number of updates between two checks that losses are finite, and measurements of the held-out batch.
      names: see `from_nnx`; if not given, what a pretrained rule's card says, or "role"; for other rules "number".
      progress: whether to show a tqdm bar.

    Raises:
      ValueError: for fewer minibatches than steps, or of several forms; for inputs or targets that are not standardized
        where a pretrained rule was trained on standardized ones; for targets of a cross-entropy node that are no
        probabilities (JAX arrays are checked in the first minibatch and the held-out batch only); if the network's
        predictions for the first minibatch are not the model's.
      TypeError: for data that are no pairs, and models that `from_nnx` or a pretrained rule does not take.
      FloatingPointError: if a loss or a trained parameter is not finite.

    Example:
      >>> import itertools, jax, jax.numpy as jnp, flax.nnx as nnx, apgrad as ap
      >>> model = nnx.Sequential(nnx.Linear(64, 50, rngs=nnx.Rngs(0)), nnx.sigmoid, nnx.Linear(50, 2, rngs=nnx.Rngs(1)))
      >>> batch = jax.random.normal(jax.random.key(0), (8, 64)), jax.nn.one_hot(jnp.arange(8) % 2, 2)
      >>> fitted = ap.mplp.fit(model, itertools.repeat(batch), "image_mlp", 20, held_out=batch, progress=False)
      >>> fitted.steps.tolist(), bool(fitted.held_out[-1] < fitted.held_out[0])
      ([0, 10, 20], True)
    """
    steps, every = whole("steps", steps), whole("every", every)
    how: Names = names or (pretrained_card(rule).get("names", "role") if isinstance(rule, str) else "number")
    try:
        network, params = from_nnx(model, loss, names=how)
    except TypeError as error:
        if not isinstance(rule, str) or how != "role":
            raise
        raise TypeError(
            f"the rule {rule!r} is for MLPs, an nnx.Sequential of nnx.Linear layers with activations between them. "
            'Take "convnets" for two convolutions and a dense layer, "sequences" for an nnx.RNN and a dense layer, or '
            f'a function of nodes ("A layer of your own" in docs/wings/mplp.md). What was found: {error}'
        ) from error
    batches = _batches(data, steps, loss)
    first = next(batches)
    require_equal(network, params, model, first[0])
    made: Any = load_pretrained(rule, *first) if isinstance(rule, str) else rule
    warn_of_updates(getattr(made, "reach", None), steps)
    made = made.for_steps(steps) if isinstance(made, Normalized) else made
    state = init_state(made, network, params, first)
    judged = None if held_out is None else _pair("the held-out set", held_out, loss)
    losses: list[jax.Array] = []
    curve: dict[int, float] = {}

    @jax.jit
    def step(rule, params, state, batch):
        params, state, metrics = inner_step(rule, network, params, state, batch)
        return params, state, metrics["loss"]

    judge = jax.jit(network.mean_loss)

    def look():
        for i, value in enumerate(jax.device_get(losses[-every:]), max(0, len(losses) - every)):
            if not np.isfinite(value):
                raise FloatingPointError(
                    f"the loss of minibatch {i} is {value}. Standardize the inputs, or see in the rule's card "
                    "(mplp.pretrained_card) whether it was trained for such networks and minibatches."
                )
        if judged is not None:
            curve[len(losses)] = float(judge(params, judged))
            if not np.isfinite(curve[len(losses)]):
                raise FloatingPointError(
                    f"the held-out loss after {len(losses)} updates is {curve[len(losses)]}. Look whether all values "
                    "of the held-out set are finite and standardized as the minibatches are."
                )

    with progress_bar("training", steps, shown=progress) as bar:
        look()
        for batch in itertools.chain([first], batches):
            params, state, value = step(made, params, state, batch)
            losses.append(value)
            bar.update()
            if len(losses) % every == 0 or len(losses) == steps:
                look()
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(params))):
        raise FloatingPointError(f"parameters are not finite after {steps} updates; the loss before the last one was")
    points, measures = np.array(list(curve), int), np.array(list(curve.values()), float)
    return Fitted(to_nnx(model, params, names=how), np.array(jax.device_get(losses)), points, measures)


def _batches(data: Iterable[Batch], steps: int, loss: Any) -> Iterator[Batch]:
    count, form = 0, None
    try:
        some = itertools.islice(data, steps)
    except TypeError as error:
        kind = type(data).__name__
        raise TypeError(f"data are minibatches (x, y), in a list or from an iterator, got {kind}") from error
    for count, given in enumerate(some, 1):
        batch = _pair(f"minibatch {count - 1}", given, loss, wait=count == 1)
        here = ", ".join(f"{x.dtype}{x.shape}" for x in batch)
        form = form or here
        if here != form:
            raise ValueError(
                f"all minibatches have one form, since the step is compiled once: the first has (x, y) of {form}, "
                f"minibatch {count - 1} of {here}. Leave out a smaller one at the end of an epoch, or fill it up."
            )
        yield batch
    if count < steps:
        raise ValueError(f"{steps} steps need as many minibatches, got {count}: itertools.cycle(data) repeats them")


def _pair(what: str, batch: Any, loss: Any, wait: bool = True) -> Batch:
    """Inputs and targets as arrays. Without `wait`, JAX's targets are not checked: a device may still compute them."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(f"{what} is a pair (x, y) of inputs and targets, got {type(batch).__name__}")
    # JAX may read a NumPy array after the loader has written the next minibatch into it, so JAX gets a copy.
    own = lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.array(x))
    try:
        pair = own(batch[0]), own(batch[1])
    except (TypeError, ValueError) as error:
        kinds = [str(getattr(each, "dtype", type(each).__name__)) for each in batch]
        raise TypeError(
            f"x and y of {what} are arrays of numbers, got {' and '.join(kinds)}. If labels are words, number them, "
            "alike in all minibatches, and make them one-hot by jax.nn.one_hot."
        ) from error
    if loss in (cross_entropy, softmax_cross_entropy) and (wait or not isinstance(batch[1], jax.Array)):
        _require_probabilities(what, np.asarray(batch[1]))
    return pair


def _require_probabilities(what: str, y: np.ndarray) -> None:
    if y.ndim < 2 or 0 in y.shape or y.shape[-1] == 1 or not jnp.issubdtype(y.dtype, jnp.floating):
        return  # the loss node raises an error that says which form it takes
    least, sums = float(y.min()), y.sum(-1, dtype=np.float32)
    if not (least >= -SLACK and np.all(abs(sums - 1) <= SLACK)):
        raise ValueError(
            f"the targets of {what} are from {least:.3g} to {float(y.max()):.3g}, with sums from {sums.min():.3g} to "
            f"{sums.max():.3g} over the classes. A cross-entropy takes probabilities, of sum 1, such as "
            f"jax.nn.one_hot(labels, {y.shape[-1]}), which is 0 for labels that are not below {y.shape[-1]}. For other "
            "targets take another loss, such as mplp.squared_error; to leave examples out, weigh losses in your own."
        )
