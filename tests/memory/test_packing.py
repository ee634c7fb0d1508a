"""Narrow types and packers of one's own, chosen by name; and the inputs of checkpointed blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import apgrad as ap
from tests.memory.unbiased import KEY, assert_unbiased, normal, remembered
from tests.refusals import refused

R = ap.memory
HALF = R.packing(lambda x: x.astype(jnp.bfloat16), lambda memory, like: memory.astype(like.dtype), biased=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_types_keep_the_mean_and_stay_within_a_step(dtype):
    sampler, draws = R.narrow(dtype), 4000
    x = jnp.concatenate([normal(1, 128), 1e-30 * normal(2, 128), 1e37 * normal(3, 100)])
    unit = np.repeat([1.0, 1e-30, 1e37], [128, 128, 100])

    @jax.jit
    def draw(keys):
        return jax.vmap(lambda key: sampler.restore(key, sampler.keep(key, x), x))(keys)

    found = np.asarray(draw(jax.random.split(KEY, draws)), np.float64) / unit
    truth = np.asarray(x, np.float64) / unit
    relative = 2.0 ** -(jnp.finfo(dtype).nmant)
    least = np.abs(truth).max() * float(jnp.finfo(dtype).smallest_subnormal) / float(jnp.finfo(dtype).max) * 4
    step = relative * np.abs(truth) + least
    assert np.all(np.abs(found - truth) <= step)
    assert np.all(np.abs(found.mean(0) - truth) <= 4.5 * step / 2 / np.sqrt(draws) + 1e-6 * np.abs(truth))


def test_a_narrow_memory_of_a_scan_is_narrow_when_compiled():
    """Compilers for CPUs widen arrays of bfloat16 that a loop writes into."""

    def scratch(loss):
        compiled = jax.jit(jax.grad(loss)).lower(0.1 * jnp.eye(32), jnp.ones((64, 32))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    loss = lambda w, x: jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=50)[0])
    for dtype, share in (("bfloat16", 0.7), ("float8_e5m2", 0.5)):
        assert scratch(lambda w, x, d=dtype: ap.randomize(loss, R.narrow(d))(KEY, w, x)) < share * scratch(loss), dtype


def test_the_largest_number_stays_finite_and_what_is_not_disturbs_nothing_else():
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        x = jnp.full((256,), jnp.finfo(dtype).max, dtype).at[3].set(jnp.nan).at[4].set(jnp.inf).at[5].multiply(-0.3)
        for sampler in (*map(R.narrow, ("bfloat16", "float8_e4m3fn", "float8_e5m2")), R.rounding(4, group=16)):
            found = jax.jit(lambda key, x, s=sampler: s.restore(key, s.keep(key, x), x))(KEY, x)
            assert found.dtype == dtype
            np.testing.assert_array_equal(np.isfinite(found), ~np.isin(np.arange(256), [3, 4]))
    refused(ValueError, "narrow takes one of", R.narrow, "int8")


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(checkpoint_name(x @ w, "before"))
    return jnp.mean(x**2)


def test_packers_of_ones_own_by_shape_and_by_the_name_of_a_checkpoint():
    weights, x, seen = [normal(i, 32, 32) for i in range(3)], normal(9, 64, 32), []

    def choose(coefficient):
        seen.append(coefficient.name)
        return HALF if coefficient.shape == (64, 32) else None

    random = ap.randomize(loss, choose)
    full = remembered(loss, weights, x)
    assert remembered(lambda *a: random(KEY, *a), weights, x) < 0.6 * full
    found = jax.jit(jax.grad(random, argnums=1))(KEY, weights, x)
    for a, b in zip(found, jax.jit(jax.grad(loss))(weights, x), strict=True):
        assert 0 < np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)

    def named(weights, x):
        with jax.named_scope("inner"):
            h = checkpoint_name(jnp.tanh(x @ weights[0]), "hidden")
        return jnp.sum(jax.named_scope("outer")(jnp.sin)(h @ weights[1]))

    jax.eval_shape(jax.grad(ap.randomize(named, choose), argnums=1), KEY, weights, x)
    assert all(any(wanted in name for name in seen) for wanted in ("hidden", "inner", "outer"))
    for biased, words in (
        (False, r"pack of packing is called with \(key, x\), and it takes \(x\): too many .*with biased=True"),
        (True, r"unpack of packing is called with \(memory, like\), and it takes \(memory\)"),
    ):
        refused(TypeError, words, R.packing, lambda x: x, lambda memory: memory, biased=biased)


def deep(weights, x):
    block = jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.sin(x @ w) @ w))
    return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)[0] ** 2)


def test_inputs_of_checkpointed_blocks_are_packed():
    weights, x = 0.1 * normal(0, 12, 32, 32), normal(9, 128, 32)
    exact = jax.jit(jax.grad(deep))(weights, x)
    kept = {}
    for bits in (32, 8, 4):
        random = ap.randomize(deep, R.rounding(32), boundaries=R.rounding(bits))
        kept[bits] = remembered(lambda *a, f=random: f(KEY, *a), weights, x)
        value, found = jax.jit(jax.value_and_grad(random, argnums=1))(KEY, weights, x)
        assert value == jax.jit(deep)(weights, x)
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert error < 1e-5 if bits == 32 else 0 < error < {8: 0.01, 4: 0.1}[bits]
    size = 128 * 32  # of an input; a group of 128 has four bytes more
    assert [kept[32] - kept[b] for b in (8, 4)] == [12 * (4 * size - size * b // 8 - size // 32) for b in (8, 4)]


def test_packed_inputs_of_linear_blocks_are_unbiased_and_drawn_apart():
    """A block's inputs are drawn apart from each other, nested blocks from what is around them, and steps from steps.

    Messages for the weights are linear in a block's inputs: what is drawn inside the block, it draws anew.
    """
    c = normal(8, 16, 4)
    product = jax.checkpoint(lambda x, y, w: (x * y) @ w)
    nested = jax.checkpoint(lambda x, w: jax.checkpoint(lambda x, w: x @ w)(2 * x, w))

    def loss(ws, x):
        same = jax.lax.scan(lambda x, w: (x, jax.checkpoint(lambda x, w: x @ w)(x, w)), jnp.sin(x), ws[2])[1]
        return jnp.sum((product(jnp.sin(x), jnp.sin(x), ws[0]) + nested(jnp.cos(x), ws[1]) + jnp.sum(same, 0)) * c)

    ws, x = (normal(0, 32, 4), normal(1, 32, 4), normal(2, 2, 32, 4)), normal(9, 16, 32)
    random = ap.randomize(loss, R.rounding(1), boundaries=R.rounding(2), min_size=8)

    def found(gradient):  # the steps have one input, and one gradient: of independent draws, the mean of the product
        first, second, steps = gradient(ws, x)
        return first, second, steps[0] * steps[1]

    truth = jax.jit(lambda: found(jax.grad(loss)))()
    assert_unbiased(lambda key: found(lambda *args: jax.grad(random, argnums=1)(key, *args)), truth)


def test_packed_inputs_with_every_choice_of_arguments():
    """Exact inside, so that nothing else is drawn: the block's inputs are the same whatever is differentiated."""

    def loss(u, w, x):
        return jnp.sum(jax.checkpoint(lambda x, w, u: jnp.tanh(x @ w) * u)(jnp.sin(x), jnp.cos(w), u) ** 2)

    args = normal(0, 8), normal(1, 32, 8), normal(2, 16, 32)
    random = ap.randomize(loss, boundaries=R.rounding(8), min_size=8)
    subsets = [s for n in (1, 2, 3) for s in itertools.combinations((1, 2, 3), n)]
    ways = {s: jax.grad(random, argnums=s) for s in subsets}
    both = lambda *args: ({s: way(KEY, *args) for s, way in ways.items()}, jax.grad(loss, (0, 1, 2))(*args))
    found, exact = jax.jit(both)(*args)
    for s in subsets:
        for i, g in zip(s, found[s], strict=True):
            np.testing.assert_allclose(g, found[1, 2, 3][i - 1], rtol=1e-4, atol=1e-5, err_msg=str(s))
            assert 0 < np.linalg.norm(g - exact[i - 1]) < 0.05 * np.linalg.norm(exact[i - 1])


def test_empty_arrays_are_kept_as_they_are():
    def loss(w, x, empty):
        block = jax.checkpoint(lambda w, x, empty: jnp.tanh(jnp.sin(x @ w)) * (1 + jnp.sum(jnp.cos(empty) ** 2)))
        return jnp.sum(block(w, jnp.sin(x), 2 * empty) ** 2)

    args, sampler = (normal(0, 6, 8), normal(1, 5, 6), jnp.zeros((0, 4))), R.rounding(8)
    random = ap.randomize(loss, sampler, min_size=0, boundaries=sampler)
    found = jax.eval_shape(jax.grad(random, argnums=(1, 2, 3)), KEY, *args)
    assert [x.shape for x in found] == [x.shape for x in args]
    kept = ap.memory_report(lambda x, empty: jnp.sum(jnp.sin(empty) @ x), args[1], jnp.zeros((0, 5)))
    assert kept.rows["reverse mode"].residual_bytes == R.nbytes(sampler, jnp.zeros((0, 4))) == 0
    assert "0 bytes" in str(kept)
