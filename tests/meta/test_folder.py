"""A run's folder: it holds one run, for one process at a time, and says what is wrong with it."""

import collections
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
from flax import nnx

from apgrad import meta, mplp
from apgrad._ground.files import locked
from apgrad.meta._identity import identity

ROOT = Path(__file__).parent.parent.parent


def outer(weight=1.0, sigma=0.1, segment=2):
    def step(theta, s):
        return s - 0.1 * theta[0] * s, weight * 2.0 * s**2

    problem = meta.Problem(lambda theta, key: jax.random.normal(key), step, lambda theta, s: s**2, 4)
    return meta.batched(meta.single_evolution(problem, segment, sigma=sigma), 2)


def trained(folder, steps=2, *, key=0, start=1.0, rate=1e-2, version="1", log=None, **options):
    optimizer = optax.chain(optax.clip(1.0), optax.sgd(rate, momentum=0.9))
    theta, key = jnp.full(3, start), jax.random.key(key)
    where = {"folder": folder, "version": version}
    return meta.train(outer(**options), optimizer, theta, key, steps, **where, every=2, progress=False, log=log)


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


@pytest.mark.parametrize(
    "change, part",
    [
        ({"key": 1}, "key"),
        ({"start": 2.0}, "theta"),
        ({"rate": 1e-3}, "optimizer.*0.01 there, 0.001 here|optimizer.*0.001"),
        ({"sigma": 0.2}, "sigma: 0.1 there, 0.2 here"),
        ({"weight": 3.0}, "weight: 1.0 there, 3.0 here"),
        ({"version": 2}, "version: 1 there, 2 here"),
    ],
)
def test_a_folder_of_another_run_is_refused(run, change, part):
    with pytest.raises(ValueError, match=f"holds another run .*{part}"):
        trained(run, 6, **change)


def test_a_folder_needs_a_version(tmp_path):
    with pytest.raises(ValueError, match=r"a folder needs version=\.\.\., say '1'"):
        trained(tmp_path, version=None)


def test_the_same_run_goes_on(run):
    done = trained(run, 6)
    assert int(done.step) == 6
    (run / "run.json").unlink()  # as the error says: whatever is there is taken for this run
    assert int(trained(run, 8, weight=3.0).step) == 8


@pytest.mark.parametrize("text", ['{"key": ', "[1]", '"run"', "null", ""])
def test_a_damaged_identity_says_what_to_do(run, text):
    (run / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json is damaged.*Delete"):
        trained(run, 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: jax.tree_util.Partial(jnp.add, jnp.float32(n)),
        lambda n: functools.partial(jnp.add, y=n),
        lambda n: jax.ShapeDtypeStruct((n,), jnp.float32),
        lambda n: collections.deque([0, n]),
        lambda n: collections.OrderedDict(a=n),
        lambda n: jax.jit(lambda x: x * n),
        lambda n: nnx.Param(jnp.float32(n)),
        lambda n: range(n),
        lambda n: {(1, n)},
        lambda n: np.dtype(f"float{32 * n}"),
        lambda n: np.random.default_rng(n),
    ],
)
def test_what_a_run_holds_is_compared_wherever_it_stands(make):
    one, two, same = (identity("", x=[make(n)]) for n in (1, 2, 1))
    assert one != two and one == same


def test_checkpoints_hold_every_leaf(tmp_path):
    """Names that join to the same, arrays of size 0, small types: all come back."""
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.full(1, 2.0), "": jnp.zeros(1)}, "a\\": {"b": jnp.full(1, 3.0)}}
    tree |= {"none": jnp.zeros((0, 3)), "value": jnp.ones((), bool), "half": jnp.ones(2, jnp.bfloat16)}
    like = jax.tree.map(jnp.zeros_like, tree)
    with meta.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        assert same(checkpoints.restore(1, like), tree)
        assert jax.tree.map(jnp.shape, checkpoints.restore(1, like)) == jax.tree.map(jnp.shape, tree)
        with pytest.raises(ValueError, match=r"none: float32\(0, 3\) there, float32\(0, 2\) wanted"):
            checkpoints.restore(1, like | {"none": jnp.zeros((0, 2))})


def test_a_checkpoint_is_not_written_twice(tmp_path):
    with meta.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, {"x": jnp.ones(1)})
        for step in (10, 5):
            with pytest.raises(ValueError, match=f"has a checkpoint of step 10, and steps grow: got step={step}"):
                checkpoints.save(step, {"x": jnp.zeros(1)})


IDENTITY = """
import json, sys
import jax, optax
from flax import nnx
from apgrad import meta, mplp
from apgrad.meta._identity import identity

task = meta.sinusoid(sizes=(1, 3, 1))
batch = task.batch(task.draw(jax.random.key(0)), jax.random.key(1))
rule = mplp.Separable(mplp.sites(task.network, task.prior(jax.random.key(2)), batch), rngs=nnx.Rngs(0))
problem = meta.inner_problem(task, meta.message_passing(task.network), 4)
member = lambda x: x in {"a", "b", "c", "d"}
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10)))
print(json.dumps(identity(1, key=jax.random.key(0), theta=rule, optimizer=optimizer, estimator=meta.clipped(
    meta.reverse_mode(problem)), sets=[{"x", "y", "z"}, member])))
"""


@pytest.mark.long
def test_the_identity_is_the_same_in_every_process():
    def described(seed):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", IDENTITY]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    one, two = map(described, "12")
    assert one == two and " at 0x" not in one and len(one) > 1000


def test_every_array_and_option_of_a_start_counts():
    """Rules that differ in one number of one array, or in one static option, are told apart."""
    task = meta.sinusoid(sizes=(1, 3, 1))
    batch = task.batch(task.draw(jax.random.key(0)), jax.random.key(1))
    sites = mplp.sites(task.network, task.prior(jax.random.key(2)), batch)
    make = functools.partial(mplp.Separable, sites, rngs=nnx.Rngs(0))
    rule = make()
    leaves, tree = jax.tree.flatten(rule)
    leaves = [np.asarray(leaf) for leaf in leaves]
    same = identity("", theta=tree.unflatten(leaves))
    for i in range(0, len(leaves), 12):
        changed = [x + np.float32(1e-3) if j == i else x for j, x in enumerate(leaves)]
        assert identity("", theta=tree.unflatten(changed)) != same
    assert identity("", theta=make(normalize=True)) != identity("", theta=make())


def test_two_runs_in_a_folder_are_refused_and_a_lock_ends_with_its_run(tmp_path):
    def log(step, metrics):
        with pytest.raises(ValueError, match=f"another run trains in .*process {os.getpid()}"):
            trained(tmp_path, 2)

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
        with pytest.raises(ValueError, match=f"another run trains in .*process {process.pid}"):
            trained(tmp_path)
        process.kill()
        process.wait()
    with locked(tmp_path / ".lock", "free"):
        pass


@pytest.mark.parametrize(
    "damage, lost",
    [
        (lambda text: b"", 4),
        (lambda text: text[:3], 4),
        (lambda text: text[:-4], 1),
        (lambda text: text + b"5,0.", 0),
        (lambda text: text + b"\x00\xff\x00" * 10, 0),
        (lambda text: text.replace(b"\n2,", b"\nx,"), 1),
        (lambda text: text.split(b"\n", 1)[1], 0),
        (lambda text: text + text, 0),
    ],
)
def test_a_damaged_log_does_not_stop_a_run(run, begun, damage, lost):
    path = run / "metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    if lost:
        with pytest.warns(UserWarning, match=f"has {4 - lost} of the 4 rows"):
            trained(run, 4)
    else:
        trained(run, 4)
        assert path.read_bytes() == whole
    assert len(path.read_text().splitlines()) == 1 + 4 - lost
    assert path.read_text().startswith("step,loss,gradient_norm\n")


def files(run):
    return sorted(p for p in (run / "checkpoints" / "4").rglob("*") if p.is_file() and p.stat().st_size)


# Orbax leaves coroutines behind when it gives up on a damaged file; on a slow machine they outlive its event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["halved", "gone", "a bit"])
def test_a_damaged_checkpoint_is_named_or_does_no_harm(run, begun, how):
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
    with pytest.raises(ValueError, match=r"step 4 is damaged; delete .*checkpoints/4 to go on from 2"):
        trained(run, 6)
    shutil.rmtree(run / "checkpoints" / "4")
    assert int(trained(run, 6).step) == 6


@pytest.mark.parametrize("option", [{"steps": 4.5}, {"steps": -1}, {"every": 0}, {"every": 2.0}, {"steps": True}])
def test_steps_are_whole_numbers(option):
    args = (outer(), optax.sgd(0.1), jnp.ones(3), jax.random.key(0))
    with pytest.raises(ValueError, match="must be an integer of at least"):
        meta.train(*args, **{"steps": 2, "progress": False, **option})


@pytest.mark.parametrize("steps, every", [(1, 1), (3, 1), (40, 1), (5, 2)])
def test_a_run_with_nothing_finite_never_returns(steps, every):
    nothing = meta.OuterGradient(lambda theta, key: (), lambda theta, key, carry: (theta * jnp.nan, theta, carry))
    with pytest.raises(FloatingPointError, match="no outer step from 0 to"):
        meta.train(nothing, optax.sgd(1.0), jnp.float32(0.0), jax.random.key(0), steps, every=every, progress=False)
