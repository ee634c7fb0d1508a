"""Levels of clipping weighed by what repeats: the formula in NumPy, and its statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from tests.refusals import refused

KEYS = jax.random.split(jax.random.key(0), 60)


def by_formula(gradients, keep):
    """The estimates of a sequence of calls, from (calls, levels, n) gradients; the first call only begins the state."""
    differences = np.diff(gradients, axis=1)
    count = differences.shape[1]
    square, product, typical = np.zeros(count), np.zeros(count), np.full(count, np.nan)
    before, found = np.zeros_like(differences[0]), []
    for gradient, d in zip(gradients, differences, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            length = np.linalg.norm(d, axis=1)
            d = d * np.fmin(1, np.exp(typical) / length)[:, None]
            weights = np.clip(np.nan_to_num(product / square), 0, 1)
            found.append(gradient[0] + weights @ d)
            typical = np.where(np.isnan(typical), np.log(length), keep * typical + (1 - keep) * np.log(length))
        square = keep * square + (1 - keep) * (d**2).sum(1)
        product = keep * product + (1 - keep) * (d * before).sum(1)
        before = d
    return np.array(found[1:])


def calls(training, *args):
    """The gradients of calls one after the other, and the last state."""

    def call(state, key):
        _, gradient, state = training.value_and_grad(key, state, *args)
        return state, gradient

    return jax.lax.scan(call, training.init(KEYS[0], *args), KEYS[1:])


@pytest.mark.parametrize("size", [1.0, 1e25, 1e-25])
def test_the_estimates_are_those_of_the_formula(size):
    # One bias that repeats and one that does not, in the leaves of a pytree.
    biases, noise = jnp.array([0.0, 1.0, 1.0]), jnp.array([0.1, 0.3, 3.0])

    def gradient(key, level):
        index = level.astype(jnp.int32)
        draw = biases[index] + noise[index] * jax.random.normal(jax.random.fold_in(key, index), (5,))
        return jnp.float32(7), {"a": size * draw[:2], "b": size * draw[2:].reshape(3, 1)}

    training = ap.multilevel(gradient, (0.0, 1.0, 2.0), window=5)
    flat = lambda tree: jnp.concatenate([tree["a"], tree["b"][..., 0]], -1)
    one = jax.vmap(lambda key: jax.vmap(lambda level: flat(gradient(key, level)[1]))(jnp.arange(3.0)))
    given = np.asarray(jax.jit(one)(KEYS), np.float64) / size
    state, found = jax.jit(lambda: calls(training))()
    np.testing.assert_allclose(flat(found) / size, by_formula(given, 0.8), rtol=2e-4, atol=2e-5)
    # |b|^2 is 5, and the noise of the first difference is .1^2 + .3^2 for each of its 5 elements.
    assert state.weights.shape == (2,) and state.weights[0] > 0.7 and state.weights[1] < 0.4


def test_what_is_not_finite_is_left_out_and_what_is_zero_is_no_difference():
    def gradient(key, theta, level):
        worst = jnp.where(jax.random.bernoulli(key), jnp.inf, 1e30 * theta)
        return theta, jnp.where(level < 2, theta, worst) * jnp.ones(2)

    state, found = jax.jit(lambda: calls(ap.multilevel(gradient, (0.0, 1.0, 2.0)), jnp.float32(1)))()
    assert jnp.isfinite(found).all() and state.weights[0] == 0 and 0 < state.weights[1] < 0.6
    # Where all levels agree the gradient is theirs.
    state, found = jax.jit(lambda: calls(ap.multilevel(lambda key, theta, level: (theta, theta)), jnp.float32(3)))()
    assert (found == 3).all() and not state.weights.any()


@pytest.mark.parametrize("window", [1, 2])
def test_a_difference_that_shrinks_by_many_orders_of_magnitude_leaves_numbers(window):
    training = ap.multilevel(lambda key, x, level: (x, level * x), (0.0, 1.0), window=window)
    step = jax.jit(training.value_and_grad)
    state = training.init(KEYS[0], jnp.float32(1e30))
    for x in (1e30, 1e-35, 1e30, 1e-35, 2.0, 2.0, 2.0):
        _, gradient, state = step(KEYS[0], state, jnp.float32(x))
        assert 0 <= gradient <= jnp.float32(x) * (1 + 1e-5), (x, gradient)
    assert gradient > 0.5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_of_different_precision_have_a_common_length(dtype):
    """In float16 a length below 6e-8 is zero and one above 65504 infinite, though each level's gradient is neither."""
    small = [1e-9, 1.0, 1e6]
    sizes = {"float16": [3e4], "bfloat16": small, "float32": small, "float64": [1e-60, 1.0, 1e60]}[dtype]

    def gradient(size):
        half = min(size, 3e4)  # each element of the float16 array is -half at the first level and half at the second

        def of(key, level):
            change = jnp.stack([-half, half]).astype("float16")[level.astype(int)]
            other = level.astype(dtype) * size * jnp.ones(2, dtype)
            return 0.0, {"half": change * jnp.ones(10_000, "float16"), "other": other}

        return of

    with jax.enable_x64(dtype == "float64"):
        trainings = [ap.multilevel(gradient(size), (0.0, 1.0), window=1) for size in sizes]
        for size, (state, found) in zip(sizes, jax.jit(lambda: [calls(t) for t in trainings])(), strict=True):
            assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))
            assert found["half"].dtype == "float16" and found["other"].dtype == dtype
            assert state.log_length.dtype == np.promote_types(jnp.dtype(dtype), np.float32)
            np.testing.assert_allclose(found["half"][-1], np.float16(min(size, 3e4)), rtol=2e-3)
            np.testing.assert_allclose(found["other"][-1], size, rtol=max(1e-5, 2 * float(jnp.finfo(dtype).eps)))


def test_refused():
    refused(ValueError, "needs two levels", ap.multilevel, lambda key, level: (0.0, 0.0), (1.0,))
    for window in (0, np.inf, "20"):
        refused(ValueError, "window", ap.multilevel, lambda key, level: (0.0, 0.0), window=window)
    for levels in ("ab", (1.0, np.nan), ("1", "4"), (1.0, None), (1.0, jnp.exp), 4.0):
        refused(ValueError, "which are numbers", ap.multilevel, lambda key, level: (0.0, 0.0), levels)
    with pytest.raises(TypeError, match="the state is from init"):
        ap.multilevel(lambda key, level: (0.0, 0.0)).value_and_grad(KEYS[0], ())
    training = ap.multilevel(lambda key, theta, level: (0.0, level * theta))
    with pytest.raises(ValueError, match=r"shapes \(3, 2\), and these need \(3, 3\)"):
        training.value_and_grad(KEYS[0], training.init(KEYS[0], jnp.ones(2)), jnp.ones(3))
    init = lambda made: ap.multilevel(made).init(KEYS[0], jnp.ones(2))
    called = r"value_and_grad\(key, \*args, level\).*last argument"
    refused(TypeError, called, init, ap.value_and_grad(lambda tape, theta: tape.cost(theta), 2))
    refused(TypeError, called, init, None)
    refused(TypeError, r"must return \(value, gradient\), got an array", init, lambda key, theta, level: theta)
