"""A run's folder: it holds one run, for one process at a time, and says what is wrong with it."""

import functools
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from apgrad import meta
from apgrad._ground.files import locked
from tests.refusals import refused

ROOT = Path(__file__).parent.parent.parent
step = lambda theta, s: (s - 0.1 * theta[0] * s, 2.0 * s**2)
PROBLEM = meta.Problem(lambda theta, key: jax.random.normal(key), step, lambda theta, s: s**2, 4)
OUTER = meta.batched(meta.single_evolution(PROBLEM, 2, sigma=0.1), 2)


def trained(folder, steps=2, *, key=0, start=1.0, version="1", log=None, outer=OUTER):
    theta, key, options = jnp.full(3, start), jax.random.key(key), {"every": 2, "progress": False, "log": log}
    sgd = optax.sgd(1e-2, momentum=0.9)
    return meta.train(outer, sgd, theta, key, steps, folder=folder, version=version, **options)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder of four steps with two checkpoints."""
    with jax.numpy_dtype_promotion("strict"):
        folder = tmp_path_factory.mktemp("run") / "begun"
        trained(folder, 4)
    return folder


@pytest.fixture
def run(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run")


def test_a_folder_holds_one_run(run, tmp_path):
    words = r"holds another run: .*run says 'version 1, key .*delete .*run to go on"
    for change in ({"key": 1}, {"start": 2.0}, {"version": 2}):
        refused(ValueError, words, trained, run, 6, **change)
    refused(ValueError, r"a folder needs version=\.\.\., say '1'", trained, tmp_path, version=None)
    assert int(trained(run, 6).step) == 6
    (run / "run").unlink()  # as the error says: whatever is there is taken for this run
    assert int(trained(run, 8, version=2).step) == 8
    other = meta.batched(meta.single_evolution(PROBLEM, 2), 3)
    words = r"that of another run \(.* arrays differ: carry"
    refused(ValueError, words, trained, run, 10, version=2, outer=other)


def test_checkpoints_hold_every_leaf(tmp_path):
    """Names that join to the same, arrays of size 0, small types: all come back."""
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.full(1, 2.0), "": jnp.zeros(1)}, "a\\": {"b": jnp.full(1, 3.0)}}
    tree |= {"none": jnp.zeros((0, 3)), "value": jnp.ones((), bool), "half": jnp.ones(2, jnp.bfloat16)}
    like = jax.tree.map(jnp.zeros_like, tree)
    with meta.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        assert same(checkpoints.restore(1, like), tree)
        assert jax.tree.map(jnp.shape, checkpoints.restore(1, like)) == jax.tree.map(jnp.shape, tree)
        words, other = r"none: float32\(0, 3\) there, float32\(0, 2\) wanted", like | {"none": jnp.zeros((0, 2))}
        refused(ValueError, words, checkpoints.restore, 1, other)
        for step in (1, 0):
            words = f"has a checkpoint of step 1, and steps grow: got step={step}"
            refused(ValueError, words, checkpoints.save, step, tree)


def test_two_runs_in_a_folder_are_refused_and_a_lock_ends_with_its_run(tmp_path):
    def log(step, metrics):
        refused(ValueError, f"another run trains in .*process {os.getpid()}", trained, tmp_path, 2)

    trained(tmp_path, 2, log=log)
    assert int(trained(tmp_path, 4).step) == 4


@pytest.mark.long
def test_a_killed_process_leaves_no_lock(tmp_path):
    hold = "import sys, pathlib; from apgrad._ground.files import locked\n"
    hold += "with locked(pathlib.Path(sys.argv[1]), ''): print(1, flush=True); input()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command, pipe = [sys.executable, "-W", "ignore", "-c", hold, str(tmp_path / ".lock")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout.readline()
        refused(ValueError, f"another run trains in .*process {process.pid}", trained, tmp_path)
        process.kill()
        process.wait()
    with locked(tmp_path / ".lock", "free"):
        pass


@pytest.mark.parametrize(
    "damage, lost",
    [
        (lambda text: text[:-4], 1),  # cut in a row
        (lambda text: text + b"5,0.", 0),
        (lambda text: text + b"5,0.5,0.5\n", 0),  # a step whose checkpoint was not written
        (lambda text: b"", 4),
    ],
)
def test_a_log_that_a_kill_cut_goes_on(run, damage, lost):
    path = run / "metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    trained(run, 4)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: 5 - lost])
    trained(run, 6)
    rows = np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))["step"]
    assert rows.tolist() == [*range(1, 5 - lost), 5, 6]


def files(run):
    return sorted(p for p in (run / "checkpoints" / "4").rglob("*") if p.is_file() and p.stat().st_size)


# Orbax leaves coroutines behind when it gives up on a damaged file; on a slow machine they outlive its event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["halved", "gone", "a bit"])
def test_a_damaged_checkpoint_is_named_or_does_no_harm(run, how):
    """Each file of the newest checkpoint, damaged: what is read is right, or an error says what to do."""
    like = trained(run, 4)
    refused = 0
    for path in files(run):
        data = path.read_bytes()
        if how == "gone":
            path.unlink()
        else:
            start, rest = data[: len(data) // 2], data[len(data) // 2 :]
            path.write_bytes(start + (bytes([rest[0] ^ 16]) + rest[1:] if how == "a bit" else b""))
        try:
            with meta.Checkpoints(run / "checkpoints") as checkpoints:
                found = checkpoints.restore(4, like)
            assert same(found, like)
        except ValueError as error:
            assert f"step 4 is damaged; delete {run / 'checkpoints' / '4'} to go on from 2" in str(error)
            refused += 1
        path.write_bytes(data)
    assert refused >= 2
    gc.collect()


def same(a, b):
    bits = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    return all(np.array_equal(bits(x), bits(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_what_the_error_says_works(run):
    shutil.rmtree(run / "checkpoints" / "4" / "default")
    refused(ValueError, r"step 4 is damaged; delete .*checkpoints/4 to go on from 2", trained, run, 6)
    shutil.rmtree(run / "checkpoints" / "4")
    assert int(trained(run, 6).step) == 6


def test_steps_are_whole_numbers():
    train = functools.partial(meta.train, OUTER, optax.sgd(0.1), jnp.ones(3), jax.random.key(0))
    for option in ({"steps": 4.5}, {"steps": -1}, {"every": 0}, {"every": 2.0}, {"steps": True}):
        refused(ValueError, "must be an integer of at least", train, **{"steps": 2, **option})


@pytest.mark.parametrize("steps, every", [(1, 1), (40, 1), (5, 2)])
def test_a_run_with_nothing_finite_never_returns(steps, every):
    nothing = meta.OuterGradient(lambda theta, key: (), lambda theta, key, carry: (theta * jnp.nan, theta, carry))
    with pytest.raises(FloatingPointError, match="no outer step from 0 to"):
        meta.train(nothing, optax.sgd(1.0), jnp.float32(0.0), jax.random.key(0), steps, every=every, progress=False)
