"""The authors' checkpoint files: the order of their numbers, and the refusal of every other file."""

import math
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import convert_published as convert

DATA = os.environ.get("APGRAD_DATA")
SMALL = convert.Layout(("dense", "softmax"), "cross_entropy", 2, 1, sizes=(3, 2))


def numbers_of(arrays, layout):
    """What the authors' `save_weights` writes for these arrays."""
    return np.concatenate([arrays[name].ravel() for name, _ in convert.shapes(layout)])


def random_numbers(layout, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda name, shape: np.abs(rng.normal(size=shape)) if name.endswith("scale") else rng.normal(size=shape)
    arrays = {name: draw(name, shape).astype(np.float32) for name, shape in convert.shapes(layout)}
    return numbers_of(arrays, layout)


GATES = ["W_update_x", "W_update_c", "b_update", "W_reset_x", "W_reset_c", "b_reset", "b_next"]
GRU = [*GATES, *(f"next_{net}_net/{name}" for net in "xc" for name in ("w0", "b0", "w1", "b1", "w2"))]
STANDARDIZER, OUTPUT = ["standardizer/scale", "standardizer/shift"], ["output/scale", "output/mean"]
MLP = ["w0", "b0", "w1", "b1", "w2", "b2"]


def test_the_order_of_the_numbers():
    gru = [f"gru/{name}" for name in GRU]
    under = lambda place, names: [f"{place}/{name}" for name in names]
    own = [*STANDARDIZER, *gru, *OUTPUT]
    wanted = under("0_dense/weight", own) + under("0_dense/bias", own)
    wanted += under("1_softmax", STANDARDIZER + gru) + under("loss", STANDARDIZER + gru)
    assert [name for name, _ in convert.shapes(SMALL)] == wanted
    f, g = ([f"{net}/{name}" for name in MLP] for net in "fg")
    stateless = [name for name, _ in convert.shapes(SMALL._replace(hidden=None))]
    assert stateless[:16] == under("0_dense/weight", STANDARDIZER + f + OUTPUT + g)
    assert stateless[-8:] == under("loss", STANDARDIZER + g)
    shared = [name for name, _ in convert.shapes(SMALL._replace(shared=True))]
    assert shared[:4] == under("0_dense/weight", STANDARDIZER + OUTPUT)
    assert shared[-2 * len(gru) :] == under("shared/weight", gru) + under("shared/bias", gru)


def test_the_counts_of_the_published_files():
    counts = {name: sum(math.prod(s) for _, s in convert.shapes(known)) for name, known in convert.LAYOUTS.items()}
    assert counts == {"sinusoid": 115_081, "maml": 64_422, "mnist": 46_829}


@pytest.mark.parametrize("layout", [SMALL, SMALL._replace(shared=True), SMALL._replace(hidden=None)])
def test_numbers_become_a_rule(layout):
    numbers, prior = random_numbers(layout), np.arange(8, dtype=np.float32)
    arrays = convert.convert(numbers, layout, prior)
    np.testing.assert_array_equal(numbers_of(arrays, layout), numbers)
    rule = convert.load(arrays, layout)
    np.testing.assert_array_equal(rule.standardizers["loss/message"].shift[...], arrays["loss/standardizer/shift"])
    np.testing.assert_array_equal(arrays["prior/W0"], [[0, 1], [2, 3], [4, 5]])
    params = {"0_dense": {"kernel": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)}}
    np.testing.assert_array_equal(convert.prior(arrays, params)["0_dense"]["bias"], [6, 7])
    with pytest.raises(ValueError, match=r"prior/W0 has shape \(3, 2\), the network's 0_dense wants \(4, 2\)"):
        convert.prior(arrays, {"0_dense": {"kernel": np.zeros((4, 2)), "bias": np.zeros(2)}})
    if layout.hidden is None:
        x = np.random.default_rng(1).normal(size=(1, 4)).astype(np.float32)  # message, weight, input
        for part in "fg":
            w0, b0, w1, b1, w2, b2 = (arrays[f"0_dense/weight/{part}/{name}"] for name in MLP)
            wanted = np.maximum(np.maximum(x @ w0 + b0, 0) @ w1 + b1, 0) @ w2 + b2
            net = getattr(rule.cells["0_dense/weight"], part)
            np.testing.assert_allclose(net(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DATA is None, reason="APGRAD_DATA, the folder with mplp_published/, is not set")
@pytest.mark.parametrize("name", ["sinusoid", "mnist"])
def test_a_published_file_from_the_command_line(name, tmp_path, capsys):
    with np.load(Path(DATA or "") / "mplp_published" / f"{name}.npz") as file:
        arrays = {key: value for key, value in file.items() if not key.startswith("golden/")}
    np.save(tmp_path / "theirs.npy", numbers_of(arrays, convert.LAYOUTS[name]))
    convert.main(tmp_path / "theirs.npy", tmp_path / "ours.npz")
    assert f"{len(arrays)} arrays" in capsys.readouterr().out
    with np.load(tmp_path / "ours.npz") as file:
        jax.tree.map(np.testing.assert_array_equal, dict(file), arrays)


def test_what_cannot_be_converted_is_refused(tmp_path):
    whole = np.ones(46_829, np.float32)
    made = {"objects": np.array([None]), "double": np.ones(46_829), "short": whole[1:], "nan": whole * np.nan}
    for name, array in (made | {"whole": whole}).items():
        np.save(tmp_path / f"{name}.npy", array)
    for name, size in (("header", 40), ("half", 9000)):
        (tmp_path / f"{name}.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:size])
    for name, match in (
        ("objects", "(?s)not a whole .npy file of numbers.*allow_pickle"),
        ("header", "get the file again"),
        ("half", "get the file again"),
        ("double", r"float64\(46829,\).*one array of finite float32, \(n,\)"),
        ("nan", "one array of finite float32"),
        ("none", "No such file"),
        ("short", "46828 numbers, the published ones have .*'mnist': 46829.*Layout"),
    ):
        with pytest.raises(SystemExit, match=match):
            convert.main(tmp_path / f"{name}.npy", tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()
    numbers = random_numbers(SMALL)
    for call, match in (
        (lambda: convert.convert(np.ones(5, np.float32), SMALL), r"has 5 numbers, its layout has \d+ in 80 arrays"),
        (lambda: convert.convert(numbers, SMALL, np.ones(9, np.float32)), "prior has 9 numbers, .* has 8 in 2 arrays"),
        (lambda: convert.convert(-numbers, SMALL), r"standardizer/scale would be .* scales are positive"),
        (lambda: convert.shapes(SMALL._replace(layers=("conv",))), "layers are of"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
