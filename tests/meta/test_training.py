"""The outer loop: the same bits after a kill and on many devices; a folder holds one run, for one process at a time."""

import contextlib
import gc
import inspect
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from apgrad import meta
from apgrad.meta import _checkpoints
from tests import devices
from tests.compiled import listening
from tests.refusals import refused

ROOT = Path(__file__).parent.parent.parent

# A run of its own, that kills itself: from a thread, a while after step 4, whatever it is doing then. It waits for that
# at step 8, so that however slow the machine is, the kill comes after step 4 and before the end.
RUN = """
import os, signal, sys, threading
from tests.meta.test_training import trained

kill, after = int(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process that is started in the background ignores
killer = threading.Timer(after, lambda: os.kill(os.getpid(), kill))
def log(step, metrics):
    print("at", step, flush=True)
    if step == 4:
        killer.start()
    if step == 8:
        threading.Event().wait()
trained(sys.argv[1], 10, log=log)
"""


def one_step(loss):
    """The outer gradient of a loss of theta and of a number that is drawn."""
    draw, step = lambda theta, key: jax.random.normal(key), lambda theta, s: (s, loss(theta, s))
    return meta.reverse_mode(meta.Problem(draw, step, lambda th, s: 0.0 * th, 1))


def train(outer, optimizer, theta, steps, **options):
    return meta.train(outer, optimizer, theta, jax.random.key(0), steps, progress=False, **options)


def test_steps_that_are_not_finite_are_skipped_and_counted():
    outer = one_step(lambda theta, s: jnp.where(s > 0, jnp.nan, 1.0) * theta)
    done = train(outer, optax.sgd(1.0), jnp.float32(0.0), 20, every=20)
    assert 0 < int(done.skipped) < 20
    assert done.theta == -(20 - int(done.skipped))


def parabola(theta, key, carry):
    return jnp.sum((theta - 1.0) ** 2), 2 * (theta - 1.0), carry


PARABOLA = meta.OuterGradient(lambda theta, key: (), parabola)


BY_LOSS = [optax.polyak_sgd(f_min=0.0), optax.lbfgs(0.2, linesearch=None), optax.contrib.schedule_free_sgd(0.2)]
BY_LOSS += [optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))]


@pytest.mark.parametrize("optimizer", BY_LOSS)
def test_optimizers_that_need_the_loss_get_it(optimizer):
    with jax.numpy_dtype_promotion("standard"):  # optax's need it
        done = train(PARABOLA, optimizer, jnp.zeros(2), 20, every=20)
    assert int(done.skipped) == 0 and float(parabola(done.theta, None, None)[0]) < 0.2


KEEPS_KEYS = nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # its rngs hold a key, an nnx.Variable
COUNTER = nnx.Dict(n=nnx.Variable(jnp.zeros(())), x=nnx.Param(jnp.ones(())))


def count_uses(theta, state):
    """A loss that would be another one for each perturbation of a pair."""
    theta.n[...] = theta.n[...] + 1.0
    return theta.n[...] * theta.x[...]


COUNTS_USES = meta.Problem(lambda theta, key: jnp.zeros(()), lambda theta, s: (s, s), count_uses, 1)
COUNTS_OWN = COUNTS_USES._replace(step=lambda theta, s: (s, count_uses(COUNTER, s)), final=lambda th, s: th.sum())
CHANGES = "an outer gradient is given a function that changes its arguments in place"
TIED = nnx.List([nnx.Param(jnp.ones(()))] * 2)
ARE_ONE = r"theta\[0\] and theta\[1\] are one nnx.Param.*nnx\.merge\(graph, theta\)"
IS_A_KEY, MORE = r"theta\.rngs\.\S+ is a PRNG key.*as its attribute", r"takes something else: .*lookahead"
LOG = r"log of meta.train is called with \(step, metrics\).*tensorboard\(folder\)"
COUNTS = {"steps": 4.5}, {"steps": -1}, {"every": 0}, {"every": 2.0}, {"steps": True}
REFUSED = [
    *[({"optimizer": o}, TypeError, MORE) for o in (optax.lookahead(optax.sgd(0.1), 2, 0.5), optax.lbfgs())],
    *[({"outer": o, "theta": KEEPS_KEYS}, TypeError, IS_A_KEY) for o in (PARABOLA, meta.batched(PARABOLA, 2))],
    ({"theta": TIED}, TypeError, ARE_ONE),
    ({"outer": meta.evolution(COUNTS_USES), "theta": COUNTER}, ValueError, CHANGES),
    ({"outer": meta.reverse_mode(COUNTS_OWN)}, ValueError, CHANGES),
    ({"log": meta.tensorboard}, TypeError, LOG),
    *[(wrong, ValueError, "must be an integer of at least") for wrong in COUNTS],
]


@pytest.mark.parametrize("options, error, words", REFUSED)
def test_what_cannot_be_trained_is_refused(options, error, words):
    given = {"outer": PARABOLA, "optimizer": optax.sgd(0.1), "theta": jnp.zeros(2), "steps": 2} | options
    with jax.numpy_dtype_promotion("standard"):  # optax's need it
        refused(error, words, train, **given)


def test_an_optimizer_whose_state_changes_its_form_is_named():
    """Injected hyperparameters have the widest dtype of theta, and so has what an optimizer makes of the others."""
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    outer = meta.OuterGradient(lambda theta, key: (), lambda theta, key, carry: (jnp.float32(0.0), theta, carry))
    theta = {"wide": jnp.zeros(2), "half": jnp.zeros(2, jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):
        refused(TypeError, r"\.mu\['half'\] was bfloat16\[2\], and is float32", train, outer, optimizer, theta, 2)
        theta = jax.tree.map(lambda x: x.astype(jnp.float32), theta)
        assert train(outer, optimizer, theta, 2).step == 2


def test_an_inner_optimizer_gets_the_loss_and_its_function():
    """A line search on a quadratic loss finds the minimum in a step, where gradient descent does not."""
    make = lambda theta: optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(20))
    learner = meta.optimizer(make, lambda params, batch: jnp.sum((params - batch) ** 2))
    with jax.numpy_dtype_promotion("standard"):
        state = learner.init(None, jnp.zeros(2), jnp.ones(2))
        params, state = jax.jit(learner.step)(None, jnp.zeros(2), state, jnp.ones(2))
        params, state = jax.jit(learner.step)(None, params, state, jnp.ones(2))
    assert jnp.allclose(params, 1.0, atol=1e-3)


SHARDED = """
task = meta.sinusoid(sizes=(1, 5, 1), batch=4, held_out=8)
learner = meta.optimizer(lambda log_rate: optax.sgd(jnp.exp(log_rate)), task.loss)
problem = meta.inner_problem(task, learner, 4)
theta = jnp.float32(-3.0)
def trained(mesh):
    outers = [meta.truncated(problem, 2), meta.perturbed(problem, unrolls=4), meta.persistent_evolution(problem, 2)]
    outer = meta.batched(meta.average(outers), 8, mesh=mesh)
    return meta.train(outer, optax.sgd(0.1), theta, jax.random.key(1), 6, every=3, mesh=mesh, progress=False)
mesh = jax.make_mesh((jax.device_count(),), ("tasks",))
many = trained(mesh)
assert len(many.carry[0].t.sharding.device_set) == jax.device_count()
one = trained(None)
for a, b in zip(jax.tree.leaves(many.theta), jax.tree.leaves(one.theta), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
print("agree on", jax.device_count(), "devices,", jax.process_count(), "processes")
"""


@pytest.mark.long
@pytest.mark.parametrize(("count", "processes"), [(8, 1), (4, 2)])
def test_many_devices_agree_with_one(count, processes):
    assert devices.run(SHARDED, count, processes) == [f"agree on {count} devices, {processes} processes"] * processes


def test_tensorboard_has_the_metrics_of_every_call_at_once(tmp_path):
    write, logs = meta.tensorboard(tmp_path / "board"), []

    def log(step, metrics):
        write(step, metrics)
        logs.append((step, metrics))
        (path,) = (tmp_path / "board").iterdir()
        for name, value in metrics.items():
            record = name.encode() + b"\x15" + struct.pack("<f", value)  # its field 2, a number of four bytes
            assert path.read_bytes().count(name.encode()) == len(logs) and record in path.read_bytes()

    train(one_step(lambda theta, s: theta**2), optax.sgd(0.1), jnp.float32(1.0), 4, every=2, log=log)
    assert [step for step, _ in logs] == [2, 4]
    assert set(logs[0][1]) == {"loss", "gradient_norm", "skipped"}


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


@pytest.mark.long
@pytest.mark.parametrize("kill, after", [(signal.SIGINT, 0.01), (signal.SIGKILL, 0.01), (signal.SIGKILL, 0.1)])
def test_a_killed_run_ends_with_the_same_bits(tmp_path, kill, after):
    killed, whole, steps = tmp_path / "killed", tmp_path / "whole", []
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(killed), str(kill.value), str(after)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode != 0 and "at 4" in done.stdout and "at 10" not in done.stdout
    assert same(trained(killed, 10, log=lambda step, _: steps.append(step)), trained(whole, 10))
    assert steps and 2 not in steps
    assert (killed / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()


def test_a_folder_holds_one_run(run, tmp_path):
    for change in ({"key": 1}, {"start": 2.0}, {"version": 2}):
        refused(ValueError, "holds another run: .*run says 'version 1, key .*delete", trained, run, 6, **change)
    refused(ValueError, r"a folder needs version=\.\.\., say '1'", trained, tmp_path, version=None)
    assert int(trained(run, 6).step) == 6
    (run / "run").unlink()  # as the error says: whatever is there is taken for this run
    assert int(trained(run, 8, version=2).step) == 8
    other = meta.batched(meta.single_evolution(PROBLEM, 2), 3)
    words = "another run .* arrays differ: carry.* jax_enable_x64 that"
    refused(ValueError, words, trained, run, 10, version=2, outer=other)


def test_checkpoints_hold_every_leaf(tmp_path):
    """Names that join to the same, arrays of size 0, small types, NumPy's wide ones: all come back with all bits."""
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.full(1, 2.0), "": jnp.zeros(1)}, "a\\": {"b": jnp.full(1, 3.0)}}
    tree |= {"none": jnp.zeros((0, 3)), "value": jnp.ones((), bool), "half": jnp.ones(2, jnp.bfloat16)}
    of_numpy = {"wide": np.array([2**40, 3]), "mean": np.float64(1 / 3), "turned": np.arange(6.0).reshape(2, 3).T}
    like = jax.tree.map(jnp.zeros_like, tree) | jax.tree.map(np.zeros_like, of_numpy)
    tree, form = tree | of_numpy, lambda x: (x.shape, x.dtype)
    with meta.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        assert same(checkpoints.restore(1, like), tree)
        assert jax.tree.map(form, checkpoints.restore(1, like)) == jax.tree.map(form, tree)
        other = like | {"none": jnp.zeros((0, 2))}
        refused(ValueError, r"none: float32\(0, 3\) there, float32\(0, 2\) wanted", checkpoints.restore, 1, other)
        for step in (1, 0):
            refused(ValueError, f"of step 1, and steps must grow: got step={step}", checkpoints.save, step, tree)


def test_checkpoints_are_restored_to_shapes_and_name_what_they_do_not_hold(tmp_path):
    tree = {"x": jnp.ones(2), "key": jax.random.key(1), "none": jnp.zeros((0, 3))}
    with meta.Checkpoints(tmp_path) as reader, meta.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, tree | {"other": jax.random.key(1, impl="rbg")})
        tree["other"] = jax.random.key(1, impl="unsafe_rbg")  # which is as many numbers, and draws others
        refused(ValueError, r"key<rbg> other: uint32\(4,\) there, nothing wanted", checkpoints.restore, 3, tree)
        tree["other"] = jax.random.key(1, impl="rbg")
        for each in (reader, checkpoints):  # a reader that was there before, too
            assert each.latest() == 3
            assert same(each.restore(3, jax.eval_shape(lambda: tree)), tree)
        refused(ValueError, r"has no checkpoint of step 2; it has those of \[3\]", checkpoints.restore, 2, tree)
        with pytest.raises(TypeError) as error:
            checkpoints.save(4, {"x": jnp.ones(2), "name": "mine"})
        assert "the leaf name of a checkpoint" in error.value.__notes__[0]


def test_arrays_of_new_shapes_are_saved_and_restored_without_a_program_for_each(tmp_path):
    tree = [jnp.asarray(np.full((3, n), float(n), np.float32)) for n in range(7, 12)]
    with listening() as compiled, meta.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        assert same(checkpoints.restore(1, tree), tree)
    assert not compiled


def test_checksums_added_on_the_host_are_those_of_shards():
    x = jax.random.bits(jax.random.key(0), (70_000,), "uint16").view("bfloat16")
    assert _checkpoints._checksum(x) == int(_checkpoints._checksum_of_shards(x))


def test_arrays_that_are_not_those_that_were_described_are_damage(tmp_path):
    for name in ("mine", "other"):
        with meta.Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(1, {"x": jnp.full(2, float(len(name)))})
    shutil.rmtree(tmp_path / "mine" / "1" / "default")
    shutil.copytree(tmp_path / "other" / "1" / "default", tmp_path / "mine" / "1" / "default")
    with meta.Checkpoints(tmp_path / "mine") as checkpoints:
        refused(ValueError, "damaged.*the bits of x have changed", checkpoints.restore, 1, {"x": jnp.zeros(2)})


def test_two_runs_in_a_folder_are_refused_and_a_lock_ends_with_its_run(tmp_path):
    def log(step, metrics):
        refused(ValueError, f"another run trains in .*process {os.getpid()}", trained, tmp_path, 2)

    trained(tmp_path, 2, log=log)
    assert int(trained(tmp_path, 4).step) == 4


DAMAGES = [
    (lambda text: text[:-4], 1),  # cut in a row
    (lambda text: text + b"5,0.", 0),
    (lambda text: text + b"5,0.5,0.5\n", 0),  # a step whose checkpoint was not written
    (lambda text: b"", 4),
    (lambda text: text[:-4] + bytes(4) + b"\n\n\xff\n", 1),  # what a disk has after a power cut
]


@pytest.mark.parametrize("damage, lost", DAMAGES)
def test_a_log_that_a_kill_cut_goes_on(run, damage, lost):
    path = run / "metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    trained(run, 4)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: 5 - lost])
    trained(run, 6)
    rows = np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))["step"]
    assert rows.tolist() == [*range(1, 5 - lost), 5, 6]


# Orbax leaves coroutines behind when it gives up on a damaged file: collected after the test, perhaps when pytest ends,
# they would be errors.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["halved", "gone", "a bit"])
def test_a_damaged_checkpoint_is_named_or_does_no_harm(run, how):
    """Each file of the newest checkpoint, damaged: what is read is right, or an error says what helps."""
    newest = run / "checkpoints" / "4"
    like, named, words = trained(run, 4), 0, rf"step 4 is damaged; delete {newest} to go on from 2"
    for path in [p for p in newest.rglob("*") if p.is_file() and p.stat().st_size]:
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
            assert words in str(error)
            named += 1
        path.write_bytes(data)
    assert named >= 2
    shutil.rmtree(newest / "default")
    refused(ValueError, words, trained, run, 6)
    shutil.rmtree(newest)
    assert int(trained(run, 6).step) == 6
    for left in filter(inspect.iscoroutine, gc.get_objects()):
        with contextlib.suppress(Exception):
            left.close()


def same(a, b):
    bits = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    return all(np.array_equal(bits(x), bits(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("steps, every", [(1, 1), (40, 1), (5, 2)])
def test_a_run_with_nothing_finite_never_returns(steps, every):
    nothing = meta.OuterGradient(lambda theta, key: (), lambda theta, key, carry: (theta * jnp.nan, theta, carry))
    arguments = nothing, optax.sgd(1.0), jnp.float32(0.0), steps
    refused(FloatingPointError, "no outer step from 0 to", train, *arguments, every=every)
