"""MNIST for the experiments: from the folder that the environment variable APGRAD_DATA names.

`mnist.npz` there has the Keras layout: `x_train` (60000, 28, 28) uint8, `y_train`, `x_test`, `y_test`.
"""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Images(NamedTuple):
    """Images as rows, standardized by the training images' mean and deviation, with labels.

    Attributes:
      x_train: (60000, pixels) float32.
      y_train: (60000,) int32.
      x_test: (10000, pixels).
      y_test: (10000,).
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def folder() -> Path:
    """The data folder.

    Raises:
      SystemExit: if there is none.
    """
    path = os.environ.get("APGRAD_DATA")
    if path is None:
        raise SystemExit(
            "this experiment needs data: set APGRAD_DATA to a folder with mnist.npz (Keras layout: x_train, y_train, "
            "x_test, y_test) and, for the published checkpoints, mplp_published/sinusoid.npz and mnist.npz"
        )
    return Path(path)


@functools.cache
def load(size: int) -> Images:
    """The images, scaled to `size` by `size` pixels by linear interpolation without antialiasing (as TensorFlow)."""
    with np.load(folder() / "mnist.npz") as file:
        arrays = {name: file[name] for name in file.files}

    def scale(images):
        x = images.astype(np.float32) / 255
        if size != 28:
            shrink = jax.jit(lambda x: jax.image.resize(x, (x.shape[0], size, size), "linear", antialias=False))
            x = np.concatenate([np.asarray(shrink(jnp.asarray(x[i : i + 10_000]))) for i in range(0, len(x), 10_000)])
        return x.reshape(len(x), -1)

    train, test = scale(arrays["x_train"]), scale(arrays["x_test"])
    mean, deviation = train.mean(), train.std()
    labels = [arrays[name].astype(np.int32) for name in ("y_train", "y_test")]
    return Images((train - mean) / deviation, labels[0], (test - mean) / deviation, labels[1])
