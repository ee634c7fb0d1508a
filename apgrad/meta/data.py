"""Images for tasks and experiments: scikit-learn's digits, and MNIST, Fashion-MNIST and CIFAR-10.

A data set is a file in the Keras layout (`x_train`, `y_train`, `x_test`, `y_test`) in the given folder or in the one
that APGRAD_DATA names; without it `sklearn.datasets.fetch_openml` downloads it once. Digits come with scikit-learn.
"""

import functools
import io
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import require_one_of, whole


class _Source(NamedTuple):
    """A data set: the pattern of its file's name, its title at OpenML, and what its images are."""

    file: str
    title: str
    side: int
    train: int
    channels: int


SOURCES = {
    "mnist": _Source("mnist.npz", "mnist_784", 28, 60_000, 1),
    "fashion_mnist": _Source("fashion_mnist.npz", "Fashion-MNIST", 28, 60_000, 1),
    "cifar10": _Source("cifar10*.npz", "CIFAR_10", 32, 50_000, 3),
}
DIGITS = 1437  # training images: the first four fifths, by other writers than the last fifth


class Images(NamedTuple):
    """Images, name and description; x (n, height, width, channels) uint8 or (n, features) float32, y (n,) int32."""

    name: str
    description: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def classes(self) -> int:
        """How many labels there are, in both splits."""
        return int(np.concatenate([self.y_train, self.y_test]).max()) + 1


def load(name: str = "digits", *, size: int | None = None, folder: str | Path | None = None) -> Images:
    """Images as read-only rows, scaled to `size` by `size`, standardized by mean and deviation of the training images.

    Args:
      name: "digits" (8x8, comes with scikit-learn), "mnist", "fashion_mnist" or "cifar10".
      size: height and width, if given, after scaling by linear interpolation without antialiasing, as in TensorFlow.
      folder: the folder with the file; the folder that APGRAD_DATA names if not given.

    Raises:
      FileNotFoundError: if the data are neither in the folder nor to be downloaded.

    Example:
      >>> import apgrad as ap
      >>> ap.meta.data.load("digits").x_train.shape
      (1437, 64)
    """
    root = folder or os.environ.get("APGRAD_DATA")
    return _load(name, None if size is None else whole("size", size), Path(root).resolve() if root else None)


@functools.cache
def _load(name, size, folder):
    data = load_bytes(name, folder=folder)
    train, test = (_scale(x, size) for x in (data.x_train, data.x_test))
    mean, deviation = train.mean(), train.std()
    if not deviation > 0:
        raise ValueError(f"the training images of {name} have all the same value, so that they cannot be standardized")
    data = data._replace(x_train=(train - mean) / deviation, x_test=(test - mean) / deviation)
    for array in data[2:]:
        array.setflags(write=False)
    return data


def load_bytes(name: str = "digits", *, folder: str | Path | None = None, or_digits: bool = False) -> Images:
    """Images as bytes.

    Args:
      name: "digits", "mnist", "fashion_mnist" or "cifar10".
      folder: the folder with the file; the folder that APGRAD_DATA names if not given.
      or_digits: whether the digits replace data that have no file; their description then says so.

    Example:
      >>> import apgrad as ap
      >>> ap.meta.data.load_bytes("digits").description
      'digits: 1437 training images of 8 x 8 pixels, 360 test images'
    """
    if name == "digits":
        return _digits("")
    require_one_of(("digits", *SOURCES), name=name)
    source = SOURCES[name]
    arrays = _stored(source, folder)
    if arrays is None and or_digits:
        return _digits(f" IN PLACE OF {name}, since APGRAD_DATA names no folder with {source.file}")
    x_train, y_train, x_test, y_test = arrays or _download(name, source)
    part = "" if len(x_train) == source.train else f" of {source.train}, a subset"
    description = f"{name}: {len(x_train)} training images{part}, {len(x_test)} test images"
    return _images(name, description, x_train, y_train, x_test, y_test)


def _digits(missing: str) -> Images:
    x, y = _datasets().load_digits(return_X_y=True)
    x, n = np.round(x.reshape(-1, 8, 8) * (255 / 16)), DIGITS
    description = f"digits{missing}: {n} training images of 8 x 8 pixels, {len(x) - n} test images"
    return _images("digits", description, x[:n], y[:n], x[n:], y[n:])


def _images(name, description, *arrays):
    x_train, y_train, x_test, y_test = map(np.asarray, arrays)
    pixels = lambda x: (x[..., None] if x.ndim == 3 else x).astype(np.uint8)
    labels = lambda y: y.reshape(-1).astype(np.int32)
    return Images(name, description, pixels(x_train), labels(y_train), pixels(x_test), labels(y_test))


def _stored(source, folder):
    root = folder or os.environ.get("APGRAD_DATA")
    found = sorted(Path(root).glob(source.file)) if root else []
    if not found:
        return None
    keys = ("x_train", "y_train", "x_test", "y_test")
    try:
        with np.load(io.BytesIO(found[0].read_bytes())) as file:
            stored = {key: file[key] for key in keys if key in file.files}
    except Exception as error:  # of NumPy, the archive or the system
        raise ValueError(f"{found[0]} is damaged, or no .npz of arrays ({type(error).__name__}: {error})") from error
    if missing := [key for key in keys if key not in stored]:
        raise ValueError(f"{found[0]} should have the arrays {keys} (the Keras layout); {missing} are missing")
    arrays = tuple(stored.values())
    for x, y in (arrays[:2], arrays[2:]):
        bytes_of = x.ndim in (3, 4) and len(x) and _are(np.uint8, x)
        if not (bytes_of and y.size == len(x) and _are(np.int32, y) and y.min() >= 0):
            raise ValueError(
                f"{found[0]} should have images (n, height, width) or (n, height, width, channels) of bytes, 0 to 255, "
                f"and as many labels (n,) of at least 0; got {x.dtype}{x.shape} and {y.dtype}{y.shape}. Of images in "
                "[0, 1] write np.round(255 * x), of one-hot labels the argmax."
            )
    return arrays


def _are(dtype, x):
    """Whether all numbers of the array are numbers of the dtype."""
    with np.errstate(invalid="ignore"):
        return x.dtype.kind in "biuf" and np.array_equal(x, x.astype(dtype, copy=False))


def _download(name, source):
    datasets = _datasets()
    try:
        x, y = datasets.fetch_openml(source.title, version=1, return_X_y=True, as_frame=False, parser="liac-arff")
    except Exception as error:  # the network, the server, the cache: each its own exceptions
        raise FileNotFoundError(
            f"{name} is neither in the folder that APGRAD_DATA names ({source.file}, Keras layout) nor to be had from "
            f"OpenML ({type(error).__name__}: {error}). Put the file there, or use load('digits')."
        ) from error
    x = np.asarray(x).reshape(-1, source.channels, source.side, source.side).transpose(0, 2, 3, 1)
    y, n = np.asarray(y).astype(np.int32), source.train
    return x[:n], y[:n], x[n:], y[n:]


def _datasets():
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError('images need scikit-learn: pip install scikit-learn, or the extra "meta"') from error
    return datasets


def _scale(images, size):
    x = images.astype(np.float32) / 255
    if size is not None and size != x.shape[1]:
        shrink = jax.jit(lambda x: jax.image.resize(x, (x.shape[0], size, size, x.shape[3]), "linear", antialias=False))
        x = np.concatenate([np.asarray(shrink(jnp.asarray(x[i : i + 10_000]))) for i in range(0, len(x), 10_000)])
    return x.reshape(len(x), -1)
