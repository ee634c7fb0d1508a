"""A plan keeps its budget of compiled memory or refuses it, and is exact where that can be."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback, pallas as pl

import apgrad as ap
from apgrad.memory._randomize import recorded
from apgrad.memory._recompute import choices
from experiments.parts.turns import BARRIERS
from tests.memory.unbiased import KEY, assert_exact, assert_unbiased, computed_again, mlp, normal
from tests.refusals import refused
from tests.tracing.models import control

R = ap.memory
WS, X = [normal(i, 16, 16) / 4 for i in range(8)], normal(99, 256, 16)
ARRAY = 4 * X.size


def peak(function, *args):
    """Of the gradient by the second argument, as users compile it: every argument is an input."""
    gradient = jax.jit(jax.grad(function, argnums=1)).lower(KEY, *args)
    return gradient.compile(compiler_options=BARRIERS).memory_analysis().temp_size_in_bytes


@pytest.mark.quick
def test_what_is_computed_again_is_exact_and_in_the_budget():
    plan = R.plan(mlp, WS, X, budget_bytes=12 * ARRAY)
    assert plan.chosen.method == "recompute" and 0 < plan.chosen.work < 1 and plan.chosen.variance == 0
    assert peak(plan.function, WS, X) == plan.chosen.peak_bytes <= 12 * ARRAY < plan.trials[0].peak_bytes
    assert_exact(plan.function, mlp, WS, X, atol=1e-7)
    assert "recompute" in str(plan) and "chosen" in str(plan)
    shapes = jax.eval_shape(lambda *args: args, WS, X)
    assert R.plan(mlp, *shapes, budget_bytes=12 * ARRAY).chosen[:3] == plan.chosen[:3]
    roomy = R.plan(mlp, WS, X, budget_bytes=100 * ARRAY)
    assert roomy.chosen.method == "keep" and len(roomy.trials) == 1


def test_what_is_auxiliary_is_returned_and_costs_no_message():
    def loss(ws, x):
        found = [jnp.mean(jnp.exp(jax.nn.relu(x @ w))) for w in ws]
        return mlp(ws, x), {"means": jnp.stack(found), "number": jnp.int32(len(ws)), "key": KEY}

    plan = R.plan(loss, WS, X, budget_bytes=13 * ARRAY, has_aux=True)
    assert plan.chosen.method == "recompute" and plan.chosen.peak_bytes <= 13 * ARRAY
    ways = jax.value_and_grad(plan.function, 1, has_aux=True), jax.value_and_grad(mlp)
    ((value, aux), gradient), truth = jax.jit(lambda *args: (ways[0](KEY, *args), ways[1](*args)))(WS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), (value, gradient), truth)
    np.testing.assert_allclose(aux["means"], loss(WS, X)[1]["means"], rtol=1e-5)
    assert aux["number"] == 8 and aux["key"] == KEY
    refused(TypeError, "has no derivative", jax.grad(lambda ws: plan.function(KEY, ws, X)[1]["means"][0]), WS)
    words = r"must return \(loss, aux\), got an array"
    refused(TypeError, words, R.plan, mlp, WS, X, budget_bytes=100, has_aux=True)
    refused(TypeError, "or give ap.memory.plan has_aux=True", R.plan, loss, WS, X, budget_bytes=100)


def test_every_choice_of_what_stays_is_exact():
    """In scans, branches, calls and checkpointed blocks, and with dropout."""
    function, params = control()

    def loss(params, x):
        x = jnp.where(jax.random.bernoulli(jax.random.key(5), 0.8, x.shape), jax.nn.softmax(x @ params[0]), 0)
        return jnp.tanh(function(params)) + jnp.sum(jnp.sin(jnp.tanh(x) @ params[0]))

    args = params, normal(2, 32, 3)
    found = choices(recorded(loss, args, [0], 1))
    assert len(found) > 4 and found[0].work == 0
    for choice in (found[len(found) // 2], found[-1]):
        assert_exact(computed_again(loss, choice.stays), loss, *args, rtol=1e-4)


def test_noise_only_where_the_budget_demands_it():
    plan = R.plan(mlp, WS, X, budget_bytes=5 * ARRAY)
    assert [t.method for t in plan.trials[:2]] == ["keep", "recompute"]
    assert plan.chosen.method == "pack" and 0 < plan.chosen.variance < 1 and peak(plan.function, WS, X) <= 5 * ARRAY
    gradient = jax.jit(jax.grad(plan.function, argnums=1))
    assert_unbiased(lambda key: gradient(key, WS, X), jax.jit(jax.grad(mlp))(WS, X), draws=1000)


def test_blocks_in_a_loop_need_no_checkpoint_by_hand():
    """GELU's derivative comes at a program's end: as long as it stood there, no cut between blocks was small."""

    def block(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        x = x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2)) @ v
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss(ps, x, wrap=lambda f: f):
        for p in ps:
            x = wrap(block)(p, x)
        return jnp.mean(x**2)

    sizes = {"qkv": (16, 48), "up": (16, 64), "down": (64, 16)}
    ps = [{k: normal(i, *size) / 16 for k, size in sizes.items()} for i in range(4)]
    x = normal(99, 8, 32, 16)
    by_hand = R.temp_bytes(lambda ps, x: loss(ps, x, jax.checkpoint), ps, x, argnums=0)
    plan = R.plan(loss, ps, x, budget_bytes=by_hand)
    assert plan.chosen.method == "recompute" and plan.chosen.work < 0.8
    assert_exact(plan.function, loss, ps, x, rtol=1e-4)


def test_small_arrays_of_a_scan_are_computed_again_too():
    """They stayed, since they are small beside its largest array; for all steps they are most of what is kept."""

    def step(w, state, _):
        angle, speed = state
        torque = jnp.tanh(jnp.stack([jnp.sin(angle), jnp.cos(angle), speed], -1) @ w[0]) @ w[1]
        speed = speed + 0.05 * (9.8 * jnp.sin(angle) + torque[:, 0] - 0.1 * speed)
        return (angle + 0.05 * speed, speed), angle**2 + 0.1 * speed**2

    def loss(w, state):
        return jnp.mean(jax.lax.scan(functools.partial(step, w), state, length=50)[1])

    args = (normal(1, 3, 32) / 4, normal(2, 32, 1) / 4), (jnp.ones(32), jnp.zeros(32))
    plan = R.plan(loss, *args, budget_bytes=R.temp_bytes(loss, *args) // 10)  # the smallest was a seventh
    assert plan.chosen.method == "recompute"
    assert_exact(plan.function, loss, *args, rtol=1e-4)


@pytest.mark.quick
def test_what_is_made_of_arguments_that_are_not_differentiated_counts():
    """Features of a batch, frozen weights and a mask of dropout: they were constants, and a plan kept too much."""

    def loss(w, frozen, x, key, scale):
        features = jnp.concatenate([jnp.cos(k * x @ frozen) for k in range(1, 9)], -1)
        return jnp.mean((jnp.where(jax.random.bernoulli(key, 0.5, features.shape), features, 0) @ w * scale) ** 2)

    args = normal(1, 128, 4), normal(2, 16, 16), X, KEY
    shapes = jax.eval_shape(lambda *args: args, *args)
    found, true = (R.plan(loss, *some, 0.5, budget_bytes=10**9).chosen for some in (shapes, args))
    needed = peak(lambda _, *args: loss(*args), *args, 0.5)
    assert found.peak_bytes == true.peak_bytes == needed > 4 * X.shape[0] * 128
    rows = ap.memory_report(mlp, WS[:2], X, key=KEY).rows
    random = ap.randomize(mlp, R.rounding(4))
    assert rows["rounding, 4 bits"].temp_bytes == peak(lambda key, args: random(key, *args), (WS[:2], X))


def test_arguments_that_are_sharded_are_measured_so():
    """The gradient's sum over devices needs memory, and a budget of 100,000 bytes was said to be kept."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = lambda x, *names: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*names)))
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    args = placed(normal(1, 256, 256), None), placed(normal(2, 64, 256), "data")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in args]
    found = [R.plan(loss, *some, budget_bytes=10**9).chosen.peak_bytes for some in (args, shapes)]
    assert found == [peak(lambda _, *args: loss(*args), *args)] * 2 and found[0] >= 4 * args[0].size


def test_a_budget_is_refused_with_the_smallest_that_is_kept():
    plan = lambda budget: R.plan(mlp, WS, X, budget_bytes=budget, variance=0)
    said = str(refused(ValueError, r"cannot be kept: the smallest that was found is (\d+)", plan, 100))
    assert "a smaller batch" in said and "\nrecompute  " in said and "\npack" not in said
    smallest = int(said.split("that was found is ")[1].split()[0])
    assert plan(smallest).chosen.peak_bytes == smallest


def test_kernels_and_clipped_messages_are_kept_or_computed_again_and_never_rounded():
    def kernel(f, *args):
        write = lambda *refs: refs[-1].__setitem__(..., f(*(ref[...] for ref in refs[:-1])))
        return pl.pallas_call(write, jax.ShapeDtypeStruct(args[0].shape, args[0].dtype), interpret=True)(*args)

    tanh = jax.custom_vjp(lambda x: kernel(jnp.tanh, x))
    back = lambda x, m: (kernel(lambda x, m: jnp.clip(m, -1e-3, 1e-3) * (1 - jnp.tanh(x) ** 2), x, m),)
    tanh.defvjp(lambda x: (kernel(jnp.tanh, x), x), back)
    loss = lambda ws, x: jnp.mean(functools.reduce(lambda x, w: tanh(x @ w), ws, x) ** 2)
    plan = R.plan(loss, WS, X, budget_bytes=8 * ARRAY)
    assert plan.chosen.method == "recompute" and plan.chosen.peak_bytes <= 8 * ARRAY
    assert_exact(plan.function, loss, WS, X, rtol=1e-5)
    said = refused(ValueError, "a budget of 100 bytes cannot be kept", R.plan, loss, WS, X, budget_bytes=100)
    assert "\npack" not in str(said)


def test_a_callback_with_an_effect_is_called_once():
    seen = []

    def draw():
        seen.append(1.0 + len(seen))
        return np.full(X.shape, seen[-1], np.float32)

    def loss(ws, x):
        noise = io_callback(draw, jax.ShapeDtypeStruct(x.shape, jnp.float32))
        return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w) * noise, ws, x) ** 2)

    gradient = jax.grad(computed_again(loss, choices(recorded(loss, (WS, X), [0]))[-1].stays), 1)
    jax.block_until_ready(jax.jit(gradient)(KEY, WS, X))
    assert len(seen) == 1


def test_a_small_loop_is_measured():
    """XLA hoists it into a call, and died of the barriers there."""
    loop = lambda x: jnp.sum(jax.lax.fori_loop(0, 5, lambda i, c: jnp.sin(c) * 1.1 + i, x))
    refused(ValueError, "a budget of 100 bytes cannot be kept", R.plan, loop, jnp.ones(6), budget_bytes=100)


@pytest.mark.parametrize("option", ["budget_bytes", "variance"])
def test_wrong_options_are_named(option):
    refused(ValueError, f"{option} must be a finite", R.plan, mlp, WS, X, **{"budget_bytes": 100} | {option: "1 MB"})


@pytest.mark.long
def test_what_an_exhaustive_search_keeps_the_planner_keeps():
    """All sets of hidden layers that stay, of five layers of unequal widths."""
    sizes = (16, 64, 16, 128, 16, 16)
    ws, x = [normal(i, *pair) / 4 for i, pair in enumerate(itertools.pairwise(sizes))], normal(99, 256, 16)
    [(where, plan)] = recorded(mlp, (ws, x), range(2), 16).items()
    number = {v: i for i, v in enumerate(v for eqn in plan.forward.jaxpr.eqns for v in eqn.outvars)}
    hidden = [number[s.var] for s in plan.slots if s.how == "sampled" and s.var in number]
    assert len(hidden) == 5
    peaks = {}
    for stays in itertools.chain.from_iterable(itertools.combinations(hidden, n) for n in range(6)):
        peaks[stays] = peak(computed_again(mlp, {where: frozenset(stays)}), ws, x)
    budget = 1.001 * min(peaks.values())  # the compiler pads arrays
    assert R.plan(mlp, ws, x, budget_bytes=int(budget), variance=0).chosen.peak_bytes <= budget
