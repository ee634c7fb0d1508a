"""Regression: random teachers to train rules on, and data sets to judge them by, which no training sees.

A teacher is a network of tanh units with random weights. What it takes are normal inputs, mixed so that their spectrum
falls off as a power; what it gives is standardized, and then noise is added to what the network learns from. How fast
the spectrum falls, how nonlinear the teacher is and how much noise there is are drawn for each task.

The data sets come with scikit-learn: "diabetes" (442 patients), Friedman's three functions (Friedman, Multivariate
adaptive regression splines, Annals of Statistics 1991) and "halves", the lower half of a digit from its upper half.
Inputs are standardized one by one, targets by their means and one deviation.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apgrad import meta, mplp

SETS = ("diabetes", "friedman1", "friedman2", "friedman3", "halves")
SEEN = 512  # examples that a teacher's outputs are standardized by
UNITS = 24  # of a teacher


def teachers(
    inputs: int, outputs: int, *, hidden: Sequence[int], activation: Any, batch: int, deviation: float | None
) -> meta.Task:
    """Regression on random teachers; the held-out targets have no noise."""
    network, prior = meta.mlp((inputs, *hidden, outputs), activation, mplp.squared_error, deviation=deviation)

    def draw(key):
        a, b, c, d, e = jax.random.split(key, 5)
        power, gain, noise = jax.random.uniform(a, (3,), float) * jnp.array([1.5, 2.5, 0.5]) + jnp.array([0, 0.5, 0])
        spectrum = jnp.arange(1.0, inputs + 1, dtype=float)[:, None] ** -power
        mix = spectrum * jax.random.normal(b, (inputs, inputs), float)
        mix = mix / jnp.linalg.norm(mix, axis=0)
        first = gain * jax.random.normal(c, (inputs + 1, UNITS), float) / inputs**0.5
        task = {"mix": mix, "first": first, "last": jax.random.normal(d, (UNITS, outputs), float), "noise": noise}
        y = _taught(task, sampled(task, e, SEEN))
        return task | {"mean": y.mean(axis=0), "deviation": y.std() + 1e-6}

    def sampled(task, key, size):
        return jax.random.normal(key, (size, inputs), float) @ task["mix"]

    def targets(task, x):
        return (_taught(task, x) - task["mean"]) / task["deviation"]

    def minibatch(task, key):
        of_x, of_noise = jax.random.split(key)
        x = sampled(task, of_x, batch)
        return x, targets(task, x) + task["noise"] * jax.random.normal(of_noise, (batch, outputs), float)

    def held_out(task, key):
        x = sampled(task, key, 128)
        return x, targets(task, x)

    return meta.Task(network, prior, draw, minibatch, held_out, network.mean_loss)


def _taught(task: dict[str, Any], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ task["first"][:-1] + task["first"][-1]) @ task["last"]


@functools.cache
def load(name: str) -> tuple[np.ndarray, ...]:
    """Inputs and targets of one of `SETS` to learn from, three fourths, and those to judge by."""
    from sklearn import datasets

    x: Any
    y: Any
    if name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True)
    elif name == "halves":
        x, y = np.split(datasets.load_digits(return_X_y=True)[0], 2, axis=1)
    else:
        noise = {"noise": 1.0} if name == "friedman1" else {}  # as Friedman has it; the others have none here
        x, y = getattr(datasets, f"make_{name}")(4000, random_state=0, **noise)
    y = y.reshape(len(x), -1) - y.mean(axis=0)
    x, y = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6), y / y.std()
    order = np.random.default_rng(0).permutation(len(x))
    (a, b), (c, d) = ((v[order[: len(x) * 3 // 4]], v[order[len(x) * 3 // 4 :]]) for v in (x, y))
    return a, c, b, d


def task(name: str, *, hidden: Sequence[int], activation: Any, batch: int, deviation: float | None) -> meta.Task:
    """Regression on a data set."""
    x, y, x_test, y_test = (jnp.asarray(v, float) for v in load(name))
    sizes = (x.shape[1], *hidden, y.shape[1])
    network, prior = meta.mlp(sizes, activation, mplp.squared_error, deviation=deviation)

    def minibatch(task, key):
        at = jax.random.randint(key, (batch,), 0, len(x))
        return x[at], y[at]

    return meta.Task(network, prior, lambda key: {}, minibatch, lambda task, key: (x_test, y_test), network.mean_loss)


def explained(task: meta.Task, params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The part of the targets' variance that is explained, 1 - |y - p|² / |y - mean y|², and 0 if that is negative."""
    x, y = batch
    error = jnp.sum((task.network.predict(params, x) - y) ** 2) / jnp.sum((y - y.mean(axis=0)) ** 2)
    return jnp.maximum(1 - error, 0.0)
