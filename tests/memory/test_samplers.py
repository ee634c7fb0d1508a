"""Samplers: unbiased, with the variance and the bytes they say; the same key draws the same."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from apgrad.memory import _rounding
from tests.memory.unbiased import KEY
from tests.refusals import refused

R = ap.memory
SAMPLERS = {
    "different": R.different_sample(0.3),
    "different, distinct": R.different_sample(0.3, replacement=False),
    "same": R.same_sample(0.3),
    "same, distinct": R.same_sample(0.3, replacement=False),
    "stratified": R.stratified(0.4),  # in runs of two lengths
    "stratified, even": R.stratified(0.25),
    "projection": R.projection(0.5),
    "rounding 8": R.rounding(8, group=8),
    "rounding 4": R.rounding(4, group=16),
    "rounding 2": R.rounding(2),
    "rounding 1": R.rounding(1),
    "heavy": R.heavy(0.4),
}
X = jax.random.normal(KEY, (3, 12, 2))
DRAWS = 4000


def restored(sampler, key, x, axis=-1):
    return sampler.restore(key, sampler.keep(key, x, axis), jax.ShapeDtypeStruct(x.shape, x.dtype), axis)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def estimates(samplers, x, axis, draws=DRAWS):
    """Of a sampler, or of several in a tuple: one program for all of them, since compiling is what takes long."""
    keys = jax.random.split(jax.random.key(1), draws)
    return jax.tree.map(lambda s: jax.vmap(lambda key: restored(s, key, x, axis))(keys), samplers)


def test_places_are_the_largest_of_floats_of_which_a_compiler_need_not_sort_all():
    places = lambda key: R.different_sample(0.3, replacement=False).draw(key, (3, 12, 2))[0]
    (largest,) = (e for e in jax.make_jaxpr(places)(KEY).eqns if e.primitive.name == "top_k")
    assert largest.invars[0].aval.dtype == jnp.float32
    bits = jax.random.bits(KEY, (3, 12))
    np.testing.assert_array_equal(places(KEY), jax.lax.top_k(bits, 4)[1])


@pytest.mark.parametrize("axis", [1, pytest.param(-1, marks=pytest.mark.long)])
def test_mean_and_variance_are_as_said(axis):
    x = X if axis == 1 else X.reshape(3, 24)
    variances = jax.jit(lambda x: [sampler.variance(x, axis) for sampler in SAMPLERS.values()])(x)
    for name, found, variance in zip(SAMPLERS, estimates(tuple(SAMPLERS.values()), x, axis), variances, strict=True):
        found, variance = np.asarray(found, np.float64), np.asarray(variance, np.float64)
        error = np.sqrt(variance / DRAWS)
        # Rounding: to float error where an entry is on the grid.
        assert np.all(np.abs(found.mean(0) - x) <= 4 * error + 2e-5), name
        # The error of a sample variance is that of the fourth moment; where a draw is rare, at most that of a coin with
        # the largest step (Rounding) or the same variance.
        centred = (found - found.mean(0)) ** 2
        spread = np.maximum(centred.std(0), np.sqrt(4 * variance.max() * variance)) / np.sqrt(DRAWS)
        assert np.all(np.abs(centred.mean(0) - variance) <= 5 * spread + 1e-4 * variance + 1e-8), name


def test_all_of_it_is_exact():
    distinct = {"replacement": False}
    samplers = R.different_sample(1.0, **distinct), R.same_sample(1.0, **distinct), R.stratified(1.0), R.rounding(32)
    for found in estimates((*samplers, R.heavy(1.0)), X, 1, 2):
        np.testing.assert_array_equal(found[0], X)


def test_other_dtypes_and_transformations():
    x, key = X.reshape(3, 24), jax.random.key(5)

    @jax.jit
    def all_of_them(key, x):
        found = {}
        for name, sampler in SAMPLERS.items():
            estimate = functools.partial(restored, sampler)
            mapped = jax.vmap(estimate, (None, 0))(key, jnp.stack([x, jnp.zeros_like(x)]))
            found[name] = estimate(key, x), mapped, estimate(key, x.astype(jnp.bfloat16))
        return found

    for name, (once, (mapped, of_zeros), narrow) in all_of_them(key, x).items():
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_allclose(mapped, once, rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(of_zeros, 0, err_msg=name)
    # Without `jit`, as the loops above compile each sampler within one program.
    stratified = all_of_them(key, x)["stratified"][0]
    chex.assert_trees_all_close(restored(SAMPLERS["stratified"], key, x), stratified, rtol=1e-5)


def test_ranks_may_be_strict():
    w, x = jnp.ones((16, 16)), jnp.ones((64, 16))
    loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    with jax.numpy_rank_promotion("raise"):
        for sampler in [*SAMPLERS.values(), R.narrow("bfloat16"), R.narrow("float8_e5m2")]:
            random = ap.randomize(loss, sampler, through=sampler, min_size=16)
            jax.eval_shape(jax.grad(random, argnums=1), KEY, w, x)


def test_bytes():
    x = jax.ShapeDtypeStruct((100, 128), jnp.float32)
    assert R.nbytes(R.rounding(8), x) == 12800 + 400
    assert R.nbytes(R.rounding(2), x) == 3200 + 400
    assert R.nbytes(R.stratified(0.1), x) == 100 * 13 * 4
    assert R.nbytes(R.heavy(0.1), x) == 100 * 13 * 4 + 100 * 7


def test_rounding_stays_within_a_step():
    """Groups whose entries are of sizes far apart do not disturb each other."""
    large, middle = jnp.linspace(1e37, 1e38, 16), 1e3 + jax.random.normal(jax.random.key(2), (64,))
    x = jnp.concatenate([jnp.full(16, 1e-30), large, middle, jnp.array([1e-30, -4.0, jnp.pi])])
    for bits, sampler in ((b, R.rounding(b, group=16)) for b in (8, 4, 2)):
        found = estimates(sampler, x, -1, 4)
        groups = jnp.pad(x, (0, -x.size % 16), mode="edge").reshape(-1, 16)
        step = (groups.max(1) - groups.min(1) + 2.0**-6 * jnp.abs(groups).max(1)) / (2**bits - 1)
        assert np.all(np.abs(found - x) <= 1.01 * np.repeat(step, 16)[: x.size])


def test_of_two_places_the_numbers_that_round_are_independent():
    """In 16 even cells; of neighbours in a row and a column, and of places that share neither."""
    shape, draws = (32, 8), 4096
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (31, 7), (30, 7)]

    @jax.jit
    def draw(keys):
        numbers = jax.vmap(lambda key: jnp.stack([_rounding.uniform(key, shape, jnp.float32)[p] for p in places]))(keys)
        quarters = (numbers * 4).astype(jnp.int32)
        return numbers, [[jnp.bincount(4 * a + b, length=16) for b in quarters.T] for a in quarters.T]

    numbers, counts = draw(jax.random.split(KEY, draws))
    assert numbers.min() > 0 and numbers.max() < 1
    for i, row in enumerate(counts):
        for j, found in enumerate(row):
            if i != j:  # chi-square of 15 degrees of freedom; 15 pairs
                assert np.sum((np.asarray(found) - draws / 16) ** 2) / (draws / 16) < 45, (places[i], places[j])


def test_sums_of_what_is_rounded_vary_as_sums_of_independent_numbers():
    """Of equal entries halfway between two points; the kurtosis too is near a normal distribution's."""
    x = jnp.full((64, 128), 0.5).at[:, 0].set(0.0).at[:, 1].set(255.0)
    sums = np.asarray(estimates(R.rounding(8), x, -1).sum((1, 2)), np.float64)
    variance = 64 * 126 / 4
    spread = (sums - 64 * (126 * 0.5 + 255)) ** 2 / variance
    assert abs(spread.mean() - 1) < 5 * np.sqrt(2 / DRAWS)
    assert np.mean(spread**2) < 3.6


def test_fractions_bits_and_groups_are_checked():
    group_of_4 = lambda group: R.rounding(4, group=group)
    fractions = [(f, r"in \(0, 1\]") for f in (R.different_sample, R.same_sample, R.stratified, R.projection, R.heavy)]
    for factory, words in (*fractions, (R.rounding, "bits"), (group_of_4, "group of rounding must be")):
        for bad in (0, -1, 1.5, 3, 12, 16.0, float("nan"), True, "0.5", "4"):
            refused(ValueError, words, factory, bad)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_ends_of_every_type(dtype):
    names = ("different", "same", "stratified", "projection", "rounding 8", "rounding 2", "rounding 1", "heavy")
    with jax.enable_x64(dtype == "float64"):
        limits = jnp.finfo(dtype)
        samplers = tuple(SAMPLERS[name] for name in names)
        # Both ends by one compiled program: near the smallest normal number, and near the largest number. Units are
        # powers of two, so that all is as for entries about 1, whose variance does not leave the type.
        for unit in (float(limits.tiny) * 256, 2.0 ** (limits.maxexp - 10)):
            x = jnp.asarray(np.asarray(X.reshape(3, 24), np.float64) * unit, dtype)
            truth = np.asarray(x).astype(np.float64) / unit
            about_one = jnp.asarray(truth, jnp.float64 if dtype == "float64" else jnp.float32)
            variances = jax.jit(lambda x: [sampler.variance(x, -1) for sampler in samplers])(about_one)
            for name, found, variance in zip(names, estimates(samplers, x, -1, 1000), variances, strict=True):
                found = np.asarray(found).astype(np.float64) / unit
                # What is below the smallest normal number is zero to the compiler, and rounding takes quarters.
                zero = float(limits.tiny) * (4 if "rounding" in name else 1)
                least = 4 * float(limits.eps) * np.abs(truth).max() + zero / unit
                error = np.sqrt(np.asarray(variance, np.float64) / len(found))
                assert np.all(np.abs(found.mean(0) - truth) <= 4.5 * error + least), (name, unit)


def test_large_numbers_of_half_precision_are_weighed_in_float32():
    """A product with a small message is in float16 where the sampled coefficient is not; variances are of float32."""
    first, w, x = (jnp.full(n, v, jnp.float16) for n, v in (((4, 64), 1e4), ((64, 2), 1e-3), ((8, 4), 1.0)))
    shared = {R.same_sample(0.3): 40_000, R.projection(1 / 16): 8_000}
    names = [name for name in SAMPLERS if "rounding" not in name] + ["rounding 8"]

    loss = lambda first, w, x: 1e-3 * jnp.sum(jnp.maximum(x @ first, 0) @ w)

    @jax.jit
    def run(keys, first, w, x):
        gradient = lambda s: jax.grad(ap.randomize(loss, s, min_size=0), argnums=2)
        of = lambda key, s, size: gradient(s)(key, first * (size / 40_000), w, x)
        found = [jax.vmap(lambda key, s=s, size=size: of(key, s, size))(keys) for s, size in shared.items()]
        return found, [[SAMPLERS[n].variance(y, -1) for y in (first, first.astype(jnp.float32))] for n in names]

    gradients, variances = run(jax.random.split(KEY, 400), first, w, x)
    for found, size in zip(gradients, shared.values(), strict=True):
        found = np.asarray(found, np.float64)
        assert np.all(found.std(0) > 0)
        assert np.all(np.abs(found.mean(0) - 0.008 * size) <= 5 * found.std(0) / 20 + 1)
    for name, (half, single) in zip(names, variances, strict=True):
        assert half.dtype == jnp.float32, name
        np.testing.assert_array_equal(half, single, err_msg=name)


def test_what_is_not_finite_stays_so_and_disturbs_nothing_else():
    """Entry by entry; but of projections the entries where a row and a column meet that hold one."""
    x = np.asarray(X.reshape(3, 24)).copy()
    truth = x.copy()
    x[0, 3], x[0, 4], x[1, 20] = np.nan, np.inf, -np.inf
    bad = ~np.isfinite(x)
    spread = bad.any(0) & bad.any(1)[:, None]
    names = [name for name in SAMPLERS if name != "rounding 1"]
    made = estimates(tuple(SAMPLERS[name] for name in names), jnp.asarray(x), -1)
    for name, found in zip(names, made, strict=True):
        found = np.asarray(found, np.float64)
        gone = ~np.isfinite(found).all(0)
        if "rounding" in name or name == "projection":
            assert not np.any(np.isfinite(found[:, bad])), name
        if name != "projection":
            np.testing.assert_array_equal(gone, bad, err_msg=name)
        assert not np.any(gone & ~spread), name
        found = np.where(spread, truth, found)
        error = found.std(0) / np.sqrt(DRAWS)
        assert np.all(np.abs(found.mean(0) - truth) <= 4.5 * error + 1e-5), name
    # With 1 bit no code is left to tell which: the group is lost, as it is in its variance.
    lost = estimates(R.rounding(1, group=24), jnp.asarray(x), -1, 2)
    np.testing.assert_array_equal(np.isfinite(lost).all((0, 2)), [False, False, True])


@pytest.mark.parametrize("name", ["rounding 8", "rounding 4", "rounding 2", "projection"])
def test_what_is_masked_afterwards_is_masked(name):
    w, mask = jnp.eye(24), jnp.arange(24) != 5

    def loss(v, y):
        h = jnp.sinh(y @ w) / jnp.where(mask, 1.0, 0.0)  # infinite in one column
        return jnp.sum(jnp.sin(jnp.where(mask, h, 0.0)) @ jnp.where(mask, v, 0.0)) + jnp.sum(h @ v)

    gradient = jax.jit(jax.grad(ap.randomize(loss, SAMPLERS[name], min_size=8), argnums=1))
    np.testing.assert_array_equal(np.isfinite(gradient(KEY, jnp.ones(24), X.reshape(3, 24))), mask)
