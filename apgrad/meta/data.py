"""Images for tasks: scikit-learn's digits at once, the others from a file or by scikit-learn's OpenML loader.

A data set is looked for, in this order: as `NAME.npz` (the Keras layout: `x_train`, `y_train`, `x_test`, `y_test`) in
the given folder or the one that the environment variable APGRAD_DATA names; then by `sklearn.datasets.fetch_openml`,
which downloads it once, checks it, and keeps it in scikit-learn's cache. "digits" comes with scikit-learn.
"""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

OPENML = {"mnist": ("mnist_784", 28), "fashion_mnist": ("Fashion-MNIST", 28), "cifar10": ("CIFAR_10", 32)}
FILES = {"mnist": "mnist.npz", "fashion_mnist": "fashion_mnist.npz", "cifar10": "cifar10*.npz"}


class Images(NamedTuple):
    """Images as rows, standardized by the training images' mean and deviation, with labels.

    Attributes:
      x_train: (images, features) float32.
      y_train: (images,) int32.
      x_test: (images, features).
      y_test: (images,).
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return int(self.y_train.max()) + 1


@functools.cache
def load(
    name: str = "digits", *, size: int | None = None, antialias: bool = False, folder: str | Path | None = None
) -> Images:
    """Images, scaled to `size` by `size`.

    Args:
      name: "digits" (8x8, comes with scikit-learn), "mnist", "fashion_mnist", "cifar10".
      size: of the scaled images; as they are if not given. Colours stay.
      antialias: whether scaling averages over what it leaves out. Without it, it is as TensorFlow does.
      folder: with NAME.npz; APGRAD_DATA if not given.

    Raises:
      ValueError: for another name, or a file without the Keras layout.
      FileNotFoundError: if the data are neither there nor to be had, saying what to do.

    Example:
      >>> import apgrad as ap
      >>> digits = ap.meta.data.load("digits")
      >>> digits.x_train.shape, digits.classes
      ((1437, 64), 10)
    """
    if name == "digits":
        arrays = _digits()
    elif name in OPENML:
        arrays = _stored(name, folder) or _download(name)
    else:
        raise ValueError(f"there are the data sets {['digits', *OPENML]}, got {name!r}")
    x_train, y_train, x_test, y_test = arrays
    train, test = (_scale(x, size, antialias) for x in (x_train, x_test))
    mean, deviation = train.mean(), train.std()
    labels = [np.asarray(y).reshape(-1).astype(np.int32) for y in (y_train, y_test)]
    return Images((train - mean) / deviation, labels[0], (test - mean) / deviation, labels[1])


def _digits():
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    x = (x * (255 / 16)).reshape(-1, 8, 8)
    return x[:1437], y[:1437], x[1437:], y[1437:]  # the first four fifths: other writers than the last


def _stored(name, folder):
    root = folder or os.environ.get("APGRAD_DATA")
    found = sorted(Path(root).glob(FILES[name])) if root else []
    if not found:
        return None
    with np.load(found[0]) as file:
        keys = ("x_train", "y_train", "x_test", "y_test")
        if missing := [key for key in keys if key not in file.files]:
            raise ValueError(f"{found[0]} should have the arrays {keys} (the Keras layout); {missing} are missing")
        arrays = tuple(file[key] for key in keys)
    for x, y in (arrays[:2], arrays[2:]):
        if len(x) != len(y) or not len(x):
            raise ValueError(f"{found[0]} has {len(x)} images and {len(y)} labels")
    return arrays


def _download(name):
    from sklearn import datasets

    title, side = OPENML[name]
    try:
        x, y = datasets.fetch_openml(title, version=1, return_X_y=True, as_frame=False, parser="liac-arff")
    except Exception as error:  # the network, the server, the cache: each its own exceptions
        raise FileNotFoundError(
            f"{name} is neither in the folder that APGRAD_DATA names ({FILES[name]}, Keras layout) nor to be had from "
            f"OpenML ({type(error).__name__}: {error}). Put the file there, or use load('digits'), which comes with "
            "scikit-learn."
        ) from error
    shape = (-1, 3, side, side) if name == "cifar10" else (-1, side, side)
    x = np.asarray(x).reshape(shape)
    x = x.transpose(0, 2, 3, 1) if name == "cifar10" else x
    y, cut = np.asarray(y).astype(np.int32), len(x) * 6 // 7 if name != "cifar10" else len(x) * 5 // 6
    return x[:cut], y[:cut], x[cut:], y[cut:]


def _scale(images, size, antialias):
    x = np.asarray(images).astype(np.float32) / 255
    if size is not None and size != x.shape[1]:
        shape = (size, size, *x.shape[3:])
        shrink = jax.jit(lambda x: jax.image.resize(x, (x.shape[0], *shape), "linear", antialias=antialias))
        x = np.concatenate([np.asarray(shrink(jnp.asarray(x[i : i + 10_000]))) for i in range(0, len(x), 10_000)])
    return x.reshape(len(x), -1)
