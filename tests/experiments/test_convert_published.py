"""The authors' checkpoint files: the order of their numbers, and the refusal of every other file."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import convert_published as convert
from tests.refusals import refused

DATA = os.environ.get("APGRAD_DATA")
SMALL = convert.Layout(("dense", "softmax"), "cross_entropy", 2, 1, sizes=(3, 2))


def numbers_of(arrays, layout):
    """What the authors' `save_weights` writes for these arrays."""
    return np.concatenate([arrays[name].ravel() for name, _ in convert.shapes(layout)])


def drawn(layout):
    rng = np.random.default_rng(0)
    draw = lambda name, shape: np.abs(rng.normal(size=shape)) if name.endswith("scale") else rng.normal(size=shape)
    return {name: draw(name, shape).astype(np.float32) for name, shape in convert.shapes(layout)}


GATES = ["W_update_x", "W_update_c", "b_update", "W_reset_x", "W_reset_c", "b_reset", "b_next"]
GRU = [*GATES, *(f"next_{net}_net/{name}" for net in "xc" for name in ("w0", "b0", "w1", "b1", "w2"))]
GRU = [f"gru/{name}" for name in GRU]
STANDARDIZER, OUTPUT = ["standardizer/scale", "standardizer/shift"], ["output/scale", "output/mean"]


def test_the_order_of_the_numbers():
    names = lambda layout: [name for name, _ in convert.shapes(layout)]
    under = lambda place, parts: [f"{place}/{part}" for part in parts]
    own = [*STANDARDIZER, *GRU, *OUTPUT]
    wanted = under("0_dense/weight", own) + under("0_dense/bias", own)
    wanted += under("1_softmax", STANDARDIZER + GRU) + under("loss", STANDARDIZER + GRU)
    assert names(SMALL) == wanted
    f, g = ([f"{net}/{name}" for name in ("w0", "b0", "w1", "b1", "w2", "b2")] for net in "fg")
    stateless = names(SMALL._replace(hidden=None))
    assert stateless[:16] == under("0_dense/weight", STANDARDIZER + f + OUTPUT + g)
    assert stateless[-8:] == under("loss", STANDARDIZER + g)
    shared = names(SMALL._replace(shared=True))
    assert shared[:4] == under("0_dense/weight", STANDARDIZER + OUTPUT)
    assert shared[-2 * len(GRU) :] == under("shared/weight", GRU) + under("shared/bias", GRU)


@pytest.mark.parametrize("layout", [SMALL, SMALL._replace(shared=True), SMALL._replace(hidden=None)])
def test_numbers_become_a_rule(layout):
    given = drawn(layout)
    arrays = convert.convert(numbers_of(given, layout), layout, np.arange(8, dtype=np.float32))
    for name, value in given.items():
        np.testing.assert_array_equal(arrays[name], value)
    rule = convert.load(arrays, layout)
    np.testing.assert_array_equal(rule.standardizers["loss/message"].shift[...], arrays["loss/standardizer/shift"])
    params = {"0_dense": {"kernel": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)}}
    prior = convert.prior(arrays, params)["0_dense"]
    np.testing.assert_array_equal(prior["kernel"], [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(prior["bias"], [6, 7])
    with pytest.raises(ValueError, match=r"prior/W0 has shape \(3, 2\), the network's 0_dense wants \(4, 2\)"):
        convert.prior(arrays, {"0_dense": {"kernel": np.zeros((4, 2)), "bias": np.zeros(2)}})


@pytest.mark.skipif(DATA is None, reason="APGRAD_DATA, the folder with mplp_published/, is not set")
@pytest.mark.parametrize("name", ["sinusoid", "mnist"])
def test_a_published_file_from_the_command_line(name, tmp_path):
    """Its layout is known by the number of its numbers."""
    with np.load(Path(DATA or "") / "mplp_published" / f"{name}.npz") as file:
        arrays = {key: value for key, value in file.items() if not key.startswith("golden/")}
    np.save(tmp_path / "theirs.npy", numbers_of(arrays, convert.LAYOUTS[name]))
    convert.main(tmp_path / "theirs.npy", tmp_path / "ours.npz")
    with np.load(tmp_path / "ours.npz") as file:
        jax.tree.map(np.testing.assert_array_equal, dict(file), arrays)


def test_what_cannot_be_converted_is_refused(tmp_path):
    whole = np.ones(46_829, np.float32)
    made = {"objects": np.array([None]), "double": np.ones(46_829), "short": whole[1:], "nan": whole * np.nan}
    for name, array in (made | {"whole": whole}).items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "half.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:9000])
    for name, match in (
        ("objects", "(?s)not a whole .npy file of numbers.*allow_pickle"),
        ("half", "get the file again"),
        ("double", r"float64\(46829,\).*one array of finite float32, \(n,\)"),
        ("nan", "one array of finite float32"),
        ("none", "No such file"),
        ("short", r"46828 numbers, .*'sinusoid': 115081, 'maml': 64422, 'mnist': 46829.*Layout"),
    ):
        refused(SystemExit, match, convert.main, tmp_path / f"{name}.npy", tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()
    numbers = numbers_of(drawn(SMALL), SMALL)
    for arguments, match in (
        ((np.ones(5, np.float32), SMALL), r"has 5 numbers, its layout has \d+ in 80 arrays"),
        ((numbers, SMALL, np.ones(9, np.float32)), "prior has 9 numbers, .* has 8 in 2 arrays"),
        ((-numbers, SMALL), r"standardizer/scale would be .* scales are positive"),
        ((numbers, SMALL._replace(layers=("conv",))), "layers are of"),
    ):
        refused(ValueError, match, convert.convert, *arguments)
