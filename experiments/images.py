"""Images for experiments: MNIST and CIFAR-10 from the folder that APGRAD_DATA names, else scikit-learn's digits."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Images(NamedTuple):
    """Images as bytes, (n, height, width, channels), and labels (n,)."""

    name: str
    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray


def load(name: str) -> Images:
    """The data set "mnist", "cifar10" or "digits"; digits where APGRAD_DATA is unset or has no such file.

    Raises:
      ValueError: for another name.
    """
    files = {"mnist": "mnist.npz", "cifar10": "cifar10_subset.npz", "digits": ""}
    if name not in files:
        raise ValueError(f"data sets are {sorted(files)}, got {name!r}")
    path = Path(os.environ.get("APGRAD_DATA", "")) / files[name]
    if name != "digits" and "APGRAD_DATA" in os.environ and path.exists():
        with np.load(path) as data:
            x, y, xt, yt = (data[key] for key in ("x_train", "y_train", "x_test", "y_test"))
        if x.ndim == 3:
            x, xt = x[..., None], xt[..., None]
        return Images(name, x, y.astype(np.int32), xt, yt.astype(np.int32))
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    x = np.round(bunch.images[..., None] * (255 / 16)).astype(np.uint8)
    y = bunch.target.astype(np.int32)
    return Images("digits", x[:1500], y[:1500], x[1500:], y[1500:])
