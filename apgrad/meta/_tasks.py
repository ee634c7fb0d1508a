"""Tasks, what an inner learner has to learn, as pure functions of random keys; and inner learners."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from apgrad import mplp
from apgrad._ground.arguments import meets, number, require_one_of, whole
from apgrad._programs import pure
from apgrad.meta._partition import copied, merge, partition
from apgrad.meta.data import Images

__all__ = ["Learner", "Task", "accuracy", "images", "message_passing", "mlp", "optimizer", "pool", "sinusoid"]

Batch = tuple[jax.Array, jax.Array]
"""Inputs (batch, ...) and targets (batch, D)."""
Prior = Callable[[jax.Array], Any]
"""`key -> params`."""
Activations = Callable[[jax.Array], jax.Array] | Sequence[Callable[[jax.Array], jax.Array]]


class Task(NamedTuple):
    """A family of tasks, as functions.

    Attributes:
      network: the network that learns.
      prior: `key -> params`, the parameters at the start.
      draw: `key -> what makes one task of the family`, a pytree of arrays.
      batch: `(task, key) -> (x, y)`, a minibatch to learn from.
      held_out: `(task, key) -> (x, y)`, a batch to judge by.
      loss: `(params, (x, y)) -> scalar`, an ordinary function of the parameters: the mean over the batch.
    """

    network: mplp.Sequential
    prior: Prior
    draw: Callable[[jax.Array], Any]
    batch: Callable[[Any, jax.Array], Batch]
    held_out: Callable[[Any, jax.Array], Batch]
    loss: Callable[[Any, Batch], jax.Array]


def mlp(
    sizes: Sequence[int], activation: Activations, loss: Callable[..., jax.Array], *, deviation: float | None = 0.05
) -> tuple[mplp.Sequential, Prior]:
    """A multilayer perceptron whose places are named by role (see `mplp.from_nnx`), and its prior, `key -> params`.

    Args:
      sizes: number of inputs, width of each hidden layer, number of outputs.
      activation: the activation function of the hidden layers, or a sequence of one function for each.
      loss: the loss node: `mplp.squared_error`, `mplp.softmax_cross_entropy`, ...
      deviation: the normal weights' standard deviation, biases 0; None: all uniform in ±1/sqrt(inputs) (thesis).

    Example:
      >>> import jax, apgrad as ap
      >>> network, prior = ap.meta.mlp((4, 3, 2), jax.nn.sigmoid, ap.mplp.softmax_cross_entropy)
      >>> jax.tree.map(lambda x: x.shape, prior(jax.random.key(0)))
      {'dense_in': {'bias': (3,), 'kernel': (4, 3)}, 'dense_out': {'bias': (2,), 'kernel': (3, 2)}}
    """
    if len(sizes) < 2:
        raise ValueError(f"an MLP has at least the sizes of inputs and outputs, got {tuple(sizes)}")
    for size in sizes:
        whole("each of the sizes", size)
    if deviation is not None:
        number("deviation", deviation)
    last = len(sizes) - 2
    functions = list(activation) if isinstance(activation, Sequence) else [activation] * last
    if len(functions) != last:
        raise ValueError(f"{last} hidden layers need as many activations, got {len(functions)}")
    unused = {"kernel_init": nnx.initializers.zeros, "rngs": nnx.Rngs(0)}  # the prior draws the parameters
    linear = [nnx.Linear(n, m, **unused) for n, m in itertools.pairwise(sizes)]
    parts = [part for pair in zip(linear, functions, strict=False) for part in pair]
    network, first = mplp.from_nnx(nnx.Sequential(*parts, linear[-1]), loss, names="role")
    names = list(first)

    def prior(key):
        params = {}
        for name, n, m in zip(names, sizes[:-1], sizes[1:], strict=True):
            key, k, b = jax.random.split(key, 3)
            if deviation is None:
                draw = lambda key, shape, n=n: jax.random.uniform(key, shape, float, -(n**-0.5), n**-0.5)
                params[name] = {"bias": draw(b, (m,)), "kernel": draw(k, (n, m))}
            else:
                kernel = deviation * jax.random.normal(k, (n, m), float)
                params[name] = {"bias": jnp.zeros(m, float), "kernel": kernel}
        return params

    return network, prior


def pool(prior: Prior, size: int, key: jax.Array) -> Prior:
    """A prior that draws from a fixed pool of parameters, as the published training does.

    Args:
      prior: `key -> params`, which draws the members of the pool.
      size: number of members.
      key: PRNG key of the members.
    """
    keys = jax.random.split(key, size := whole("size", size))
    return lambda key: prior(keys[jax.random.randint(key, (), 0, size)])


DOMAIN = -5.0, 5.0  # of a sinusoid


def sinusoid(
    *,
    sizes: Sequence[int] = (1, 20, 20, 1),
    activation: Activations = jax.nn.relu,
    amplitude: tuple[float, float] = (0.1, 0.5),
    batch: int = 10,
    held_out: int = 64,
    deviation: float | None = 0.05,
) -> Task:
    """Regression on a sin(x + p), for x from -5 to 5 and p from 0 to pi.

    The defaults are MPLP's family. The thesis's are `amplitude=(1, 1)` (5.1) or `(1, 5)` (5.2), `deviation=None`, and a
    batch of 32; MAML's `amplitude=(0.1, 5)`.

    Args:
      sizes: number of inputs, width of each hidden layer, number of outputs.
      activation: the activation function of the hidden layers, or a sequence of one function for each.
      amplitude: lowest and highest a.
      batch: number of points in a minibatch.
      held_out: number of points to judge by, on a grid.
      deviation: standard deviation of the prior, or None; see `mlp`.

    Example:
      >>> import jax, apgrad as ap
      >>> task = ap.meta.sinusoid()
      >>> [array.shape for array in task.batch(task.draw(jax.random.key(0)), jax.random.key(1))]
      [(10, 1), (10, 1)]
    """
    whole("batch", batch)
    whole("held_out", held_out)
    if len(sizes) < 2 or sizes[0] != 1 or sizes[-1] != 1:
        raise ValueError(f"a sinusoid has one input and one output: sizes=(1, ..., 1), got {tuple(sizes)}")
    if not meets(amplitude, lambda pair: pair.shape == (2,) and np.isfinite(pair).all() and pair[0] <= pair[1]):
        raise ValueError(f"amplitude must be two finite numbers, the lowest and the highest, got {amplitude!r}")
    network, prior = mlp(sizes, activation, mplp.squared_error, deviation=deviation)

    def draw(key):
        a, p = jax.random.split(key)
        uniform = lambda key, low, high: jax.random.uniform(key, (), float, low, high)
        return {"amplitude": uniform(a, *amplitude), "phase": uniform(p, 0.0, jnp.pi)}

    def target(task, x):
        return task["amplitude"] * jnp.sin(x + task["phase"])

    def minibatch(task, key):
        x = jax.random.uniform(key, (batch, 1), float, *DOMAIN)
        return x, target(task, x)

    def grid(task, key):
        x = jnp.linspace(*DOMAIN, held_out, dtype=float)[:, None]
        return x, target(task, x)

    return Task(network, prior, draw, minibatch, grid, network.mean_loss)


def images(
    data: Images,
    *,
    hidden: Sequence[int] = (50,),
    activation: Activations = jax.nn.sigmoid,
    batch: int = 8,
    held_out: int = 64,
    split: Literal["train", "test"] = "train",
    deviation: float | None = 0.05,
) -> Task:
    """Classification of images by an MLP with logits and softmax cross-entropy.

    Args:
      data: standardized images from `meta.data.load`.
      hidden: width of each hidden layer.
      activation: the activation function of the hidden layers, or a sequence of one function for each.
      batch: number of images in a minibatch.
      held_out: number of images to judge by.
      split: where held-out images are drawn from: "train", as in meta-training, or "test".
      deviation: standard deviation of the prior, or None; see `mlp`.
    """
    require_one_of(("train", "test"), split=split)
    whole("batch", batch)
    whole("held_out", held_out)
    for labels in (data.y_train, data.y_test):
        if not meets(labels, lambda y: (y >= 0) & (y == y // 1)):
            raise ValueError(f"labels must be integers of at least 0, got {np.unique(labels)}")
    pixels, classes = data.x_train.shape[1], data.classes
    network, prior = mlp((pixels, *hidden, classes), activation, mplp.softmax_cross_entropy, deviation=deviation)
    train = jnp.asarray(data.x_train, float), jnp.asarray(data.y_train)
    judge = train if split == "train" else (jnp.asarray(data.x_test, float), jnp.asarray(data.y_test))

    def sample(key, size, source):
        x, y = source
        at = jax.random.randint(key, (size,), 0, x.shape[0])
        return x[at], jax.nn.one_hot(y[at], classes, dtype=float)

    minibatch = lambda task, key: sample(key, batch, train)
    judged = lambda task, key: sample(key, held_out, judge)
    return Task(network, prior, lambda key: {}, minibatch, judged, network.mean_loss)


def accuracy(task: Task, params: Any, batch: Batch) -> jax.Array:
    """The fraction of a minibatch that the network classifies right.

    Args:
      task: the family, whose network classifies.
      params: parameters of the network.
      batch: inputs (batch, ...) and one-hot targets (batch, classes).
    """
    x, y = batch
    prediction = task.network.predict(params, x)
    if jnp.shape(y) != prediction.shape or prediction.ndim < 2 or prediction.shape[-1] == 1:
        raise ValueError(
            "accuracy takes predictions and one-hot targets (batch, classes) of two classes or more, got "
            f"{prediction.shape} and {jnp.shape(y)}. Class labels become targets by jax.nn.one_hot(labels, classes)."
        )
    return jnp.mean(jnp.argmax(prediction, axis=-1) == jnp.argmax(y, axis=-1))


class Learner(NamedTuple):
    """An inner learner.

    Attributes:
      init: `(theta, params, batch) -> state`, the state at the start of a task.
      step: `(theta, params, state, batch) -> (params, state)`, what one minibatch makes of parameters and state.
    """

    init: Callable[[Any, Any, Any], Any]
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def message_passing(network: mplp.Network) -> Learner:
    """A learned message passing protocol; theta is the rule.

    Args:
      network: the network that learns.
    """

    def step(rule, params, state, batch):
        return mplp.inner_step(rule, network, params, state, batch)[:2]

    return Learner(lambda rule, params, batch: mplp.init_state(rule, network, params, batch), step)


def optimizer(make: Callable[[Any], optax.GradientTransformation], loss: Callable[[Any, Any], jax.Array]) -> Learner:
    """An optax optimizer on the true gradient; theta is what it is made of.

    A parameter that is an `nnx.Variable` and no `nnx.Param` is not changed.

    Args:
      make: `theta -> optimizer`, where theta holds hyperparameters or the weights of a learned optimizer. Adam and its
        kin want `eps_root=1e-16` or so: their square root has no derivative at 0, the gradient of a relu that is off.
      loss: `(params, batch) -> scalar`, whose gradient the optimizer gets; a ValueError if it writes to a parameter.

    Example:
      >>> import jax.numpy as jnp, optax, apgrad as ap
      >>> learner = ap.meta.optimizer(lambda log_rate: optax.sgd(jnp.exp(log_rate)), lambda params, batch: params**2)
      >>> theta, params = jnp.log(0.1), jnp.float32(1.0)
      >>> print(learner.step(theta, params, learner.init(theta, params, None), None)[0])
      0.8
    """
    called = "an optimizer of meta.optimizer", "init(params) and update(gradient, state, params, value=loss)"

    def init(theta, params, batch):
        rule = make(theta)
        with optimizing(*called):
            return rule.init(partition(params)[0])

    def step(theta, params, state, batch):
        trained, fixed = partition(params)
        unchanged = pure.unchanged("the loss of meta.optimizer", lambda params: loss(params, batch))
        of = lambda trained: unchanged(merge(trained, copied(fixed)))
        value, gradient = jax.value_and_grad(of)(trained)
        rule = optax.with_extra_args_support(make(theta))
        with optimizing(*called):
            state = _with_hyperparameters(state, lambda: rule.init(trained))
            updates, state = rule.update(gradient, state, trained, value=value, grad=gradient, value_fn=of)
        return merge(optax.apply_updates(trained, updates), fixed), state

    return Learner(init, step)


def _with_hyperparameters(state, fresh):
    """The state with theta's hyperparameters, where `optax.inject_hyperparams` keeps those of the start."""
    injected = lambda s: isinstance(s, optax.InjectHyperparamsState | optax.InjectStatefulHyperparamsState)

    def renewed(old, new):
        if not injected(old):
            return old
        inner = _with_hyperparameters(old.inner_state, lambda: new.inner_state)
        return old._replace(hyperparams=new.hyperparams, inner_state=inner)

    some = any(map(injected, jax.tree.leaves(state, is_leaf=injected)))
    return jax.tree.map(renewed, state, fresh(), is_leaf=injected) if some else state


@contextlib.contextmanager
def optimizing(what: str, call: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{what} is called by {call}, and this one takes something else: {error}. Of optax's, lookahead (pairs of "
            "parameters) and sam cannot train so, nor on an outer gradient a line search (value_fn): give lbfgs a rate "
            "and linesearch=None."
        ) from error
