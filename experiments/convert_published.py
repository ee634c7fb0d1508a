"""The MPLP authors' checkpoint files, turned into files of named arrays that `mplp.load_published` reads.

    python -m experiments.convert_published sinusoid_weights_00035869.npy sinusoid.npz
    python -m experiments.convert_published maml_sin_net_weights_00258202.npy maml.npz --prior PRIOR.npy

The authors publish their checkpoints in the folder `mplp/savedmodels` of the repository
google-research/self-organising-systems. Such a file is a NumPy array of float32, (n,): all numbers of all layers in
turn, without names or shapes. (It has no pickle in it, and a file that has one is refused unread.) Which number is what
follows from the network alone, which is known by the number of numbers:

    sinusoid  115,081   1-20-20-1 relu, squared error; GRUs, message size 8, hidden size 15
    maml       64,422   the same network; stateless networks; its learned prior is a file of its own, of 481 numbers
    mnist      46,829   sigmoid and softmax, cross-entropy; GRUs that dense layers share, message size 4, hidden size 7

The order is that of the authors' `save_weights`: the layers from the input to the loss, and at the end what layers
share. A dense layer has its weight, then its bias. Each of these has the scales of its standardizer, the shifts, the
network, and the scale and mean of the update; without a state f, the scale and mean, then g.

A file that the authors' code has saved for another network is converted by `convert` with a `Layout` of that network.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from apgrad import mplp

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Arrays = dict[str, np.ndarray]


class Layout(NamedTuple):
    """What the authors' code was told of a network, and so what a file of its numbers means.

    Dense layers may share their GRUs, `W_net` and `b_net` of the authors' `shared_params`, in this order.
    """

    layers: tuple[str, ...]  # "dense", "activation" or "softmax", from the input to the output
    loss: Literal["squared_error", "cross_entropy"]
    message_size: int
    hidden: int | None  # size of the recurrent state besides update and message; None if networks are stateless
    shared: bool = False
    sizes: tuple[int, ...] = ()  # of the input and of each dense layer's output; only a learned prior depends on them


RELU = ("dense", "activation", "dense", "activation", "dense")
LAYOUTS = {
    "sinusoid": Layout(RELU, "squared_error", 8, 15, sizes=(1, 20, 20, 1)),
    "maml": Layout(RELU, "squared_error", 8, None, sizes=(1, 20, 20, 1)),
    "mnist": Layout(("dense", "activation", "dense", "softmax"), "cross_entropy", 4, 7, True, (144, 50, 10)),
}
# What a place sees besides the message: parameter and input; the argument; and z, z - max z, exp(z - max z), their sum.
FEATURES = {"dense": 2, "activation": 1, "softmax": 4}
LAYERS = (80, 40)


def shapes(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a file's arrays, in the order of the file."""
    if bad := set(layout.layers) - set(FEATURES):
        raise ValueError(f"layers are of {list(FEATURES)}, got {sorted(bad)}")
    if layout.shared and layout.hidden is None:
        raise ValueError("the authors' stateless networks are not shared; got shared=True with hidden=None")
    found: list[tuple[str, tuple[int, ...]]] = []
    for i, kind in enumerate(layout.layers):
        for part in ("/weight", "/bias") if kind == "dense" else ("",):
            name, size = f"{i}_{kind}{part}", layout.message_size
            found += _place(name, layout, FEATURES[kind], message=size, updates=bool(part))
    found += _place("loss", layout, 3, message=1, updates=False)
    if layout.shared:
        for part in ("weight", "bias"):
            found += _gru(f"shared/{part}/gru", layout, layout.message_size + FEATURES["dense"], updates=True)
    return found


def _place(name: str, layout: Layout, features: int, *, message: int, updates: bool) -> Shapes:
    yield f"{name}/standardizer/scale", (1 + features,)
    yield f"{name}/standardizer/shift", (1 + features,)
    output = [(f"{name}/output/{what}", ()) for what in ("scale", "mean")] if updates else []
    if layout.hidden is None:
        if updates:
            yield from _mlp(f"{name}/f", (message + features, *LAYERS, 1))
        yield from output
        yield from _mlp(f"{name}/g", (message + features, *LAYERS, layout.message_size))
        return
    if not (layout.shared and updates):
        yield from _gru(f"{name}/gru", layout, message + features, updates=updates)
    yield from output


def _gru(name: str, layout: Layout, features: int, *, updates: bool) -> Shapes:
    state = updates + (layout.hidden or 0) + layout.message_size
    for gate in ("update", "reset"):
        yield f"{name}/W_{gate}_x", (features, state)
        yield f"{name}/W_{gate}_c", (state, state)
        yield f"{name}/b_{gate}", (state,)
    yield f"{name}/b_next", (state,)
    yield from _mlp(f"{name}/next_x_net", (features, *LAYERS, state), last_bias=False)
    yield from _mlp(f"{name}/next_c_net", (state, *LAYERS, state), last_bias=False)


def _mlp(name: str, sizes: tuple[int, ...], *, last_bias: bool = True) -> Shapes:
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        yield f"{name}/w{i}", (n, m)
        if last_bias or i < len(sizes) - 2:
            yield f"{name}/b{i}", (m,)


def read(path: Path) -> np.ndarray:
    """The numbers of one of the authors' files, float32, (n,). Nothing in it is ever unpickled."""
    try:
        numbers = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        words = "The authors' checkpoints are the files mplp/savedmodels/*.npy of their repository; get the file again."
        raise ValueError(f"{path} is not a whole .npy file of numbers ({error}). {words}") from error
    if numbers.ndim != 1 or numbers.dtype.newbyteorder("=") != np.float32 or not np.all(np.isfinite(numbers)):
        got = f"an array of {numbers.dtype}{numbers.shape}"
        raise ValueError(f"{path} has {got}; the authors' checkpoints are one array of finite float32, (n,)")
    return numbers.astype(np.float32)


def convert(numbers: np.ndarray, layout: Layout | None = None, prior: np.ndarray | None = None) -> Arrays:
    """The arrays by name, as `mplp.load_published` takes them; a learned prior's are "prior/W0", "prior/b0" and so on.

    If no layout is given, it is that of the published network with as many numbers.
    """
    counts = {name: sum(math.prod(shape) for _, shape in shapes(known)) for name, known in LAYOUTS.items()}
    if layout is None:
        layout = next((known for name, known in LAYOUTS.items() if counts[name] == numbers.size), None)
        if layout is None:
            words = "If it is of another network, call convert with its Layout; if not, get the file again."
            raise ValueError(f"the checkpoint has {numbers.size} numbers, the published ones have {counts}. {words}")
    arrays = _split(numbers, shapes(layout), "checkpoint")
    for name, value in arrays.items():
        if name.endswith("standardizer/scale") and not np.all(value > 0):
            raise ValueError(f"{name} would be {value}, and scales are positive: the file has not the layout {layout}")
    if prior is not None:
        pairs = list(enumerate(itertools.pairwise(layout.sizes)))
        wanted = [(f"prior/{p}{j}", (n, m) if p == "W" else (m,)) for j, (n, m) in pairs for p in ("W", "b")]
        arrays |= _split(prior, wanted, "prior")
    load(arrays, layout)  # refuses what cannot be loaded
    return arrays


def load(arrays: Arrays, layout: Layout) -> mplp.PerSynapse:
    """The rule, for a network of the layout, whose dense layers have two inputs and outputs if it has no sizes."""
    sizes = itertools.pairwise(layout.sizes or [2] * (1 + layout.layers.count("dense")))
    functions = {"softmax": nnx.softmax, "activation": nnx.relu}
    make = lambda kind: functions[kind] if kind in functions else nnx.Linear(*next(sizes), rngs=nnx.Rngs(0))
    parts = [make(kind) for kind in layout.layers]
    network, params = mplp.from_nnx(nnx.Sequential(*parts), getattr(mplp, layout.loss))
    kernels = [p["kernel"] for p in params.values()]
    batch = jnp.ones((2, kernels[0].shape[0])), jnp.ones((2, kernels[-1].shape[1]))
    return mplp.load_published(arrays, mplp.sites(network, params, batch))


def prior(arrays: Arrays, params: Any) -> Any:
    """The learned prior in a converted file, as parameters of a network like the given ones."""
    found = {}
    for j, (name, like) in enumerate(params.items()):
        for part, key in (("kernel", f"prior/W{j}"), ("bias", f"prior/b{j}")):
            got = arrays[key].shape if key in arrays else "none"
            if got != like[part].shape:
                raise ValueError(f"the file's {key} has shape {got}, the network's {name} wants {like[part].shape}")
            found.setdefault(name, {})[part] = jnp.asarray(arrays[key], like[part].dtype)
    return found


def _split(numbers: np.ndarray, wanted: list[tuple[str, tuple[int, ...]]], what: str) -> Arrays:
    sizes = [math.prod(shape) for _, shape in wanted]
    if numbers.shape != (sum(sizes),):
        raise ValueError(f"the {what} has {numbers.size} numbers, its layout has {sum(sizes)} in {len(sizes)} arrays")
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, wanted, strict=True)}


def main(file: Path, out: Path, /, prior: Path | None = None) -> None:
    """Turns a checkpoint file of the MPLP authors into a file that `mplp.load_published` reads.

    Args:
      file: a checkpoint of the authors, .npy.
      out: the file to write, .npz.
      prior: the learned prior that belongs to the checkpoint, .npy.
    """
    try:
        if out.suffix != ".npz":
            raise ValueError(f"the file to write ends in .npz, got {out}")
        arrays = convert(read(file), prior=None if prior is None else read(prior))
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    np.savez(out, **arrays)  # pyright: ignore[reportArgumentType]
    print(f"{out}: {len(arrays)} arrays, {sum(a.size for a in arrays.values())} numbers")


if __name__ == "__main__":
    tyro.cli(main)
