"""Images for experiments: MNIST and CIFAR-10 from the folder that APGRAD_DATA names, else scikit-learn's digits.

An experiment writes `Images.description` at the top of its results, so that a run on the digits cannot be taken for one
on the data that it was asked for.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Images(NamedTuple):
    """Images as bytes, (n, height, width, channels), and labels (n,).

    Attributes:
      name: of what is there: "digits" where those are in place of what was asked for.
      description: the name, in place of what it is, and how many images there are.
      train: images.
      train_labels: their classes, int32.
      test: images.
      test_labels: their classes, int32.
    """

    name: str
    description: str
    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray


FILES = {"mnist": ("mnist.npz", 60_000), "cifar10": ("cifar10_subset.npz", 50_000), "digits": ("", 1500)}


def load(name: str) -> Images:
    """The data set "mnist", "cifar10" or "digits"; digits where APGRAD_DATA is unset or has no such file.

    Raises:
      ValueError: for another name.
    """
    if name not in FILES:
        raise ValueError(f"data sets are {sorted(FILES)}, got {name!r}")
    file, full = FILES[name]
    path = Path(os.environ.get("APGRAD_DATA", "")) / file
    if name != "digits" and "APGRAD_DATA" in os.environ and path.exists():
        with np.load(path) as data:
            x, y, xt, yt = (data[key] for key in ("x_train", "y_train", "x_test", "y_test"))
        if x.ndim == 3:
            x, xt = x[..., None], xt[..., None]
        part = "" if len(x) == full else f" of {full}, a subset"
        description = f"{name}: {len(x)} training images{part}, {len(xt)} test images"
        return Images(name, description, x, y.astype(np.int32), xt, yt.astype(np.int32))
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    x = np.round(bunch.images[..., None] * (255 / 16)).astype(np.uint8)
    y = bunch.target.astype(np.int32)
    missing = "" if name == "digits" else f" IN PLACE OF {name}, since APGRAD_DATA names no folder with {file}"
    description = f"digits{missing}: 1500 training images of 8 x 8 pixels, {len(x) - 1500} test images"
    return Images("digits", description, x[:1500], y[:1500], x[1500:], y[1500:])
