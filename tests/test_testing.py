import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap

KEY = jax.random.key(0)


def noisy(mean):
    return lambda key: {"a": mean + jax.random.normal(key, (2,)), "b": (jnp.float32(3.0),)}


def test_moments_are_those_of_the_samples():
    found = ap.testing.moments(lambda key: 2 * jax.random.normal(key, (3,)), KEY, 5000, batch_size=64)
    np.testing.assert_allclose(found.variance, 4.0, rtol=0.1)
    np.testing.assert_allclose(found.standard_error, np.sqrt(found.variance / 5000))
    assert found.mean.dtype == np.float64 and (np.abs(found.mean) < 4 * found.standard_error).all()
    with pytest.raises(ValueError, match="at least 2 samples"):
        ap.testing.moments(jax.random.normal, KEY, 1)


def test_an_unbiased_estimate_passes_and_says_how_far_off_it_was():
    off = ap.testing.assert_unbiased(noisy(1.0), {"a": np.ones(2), "b": (3.0,)}, KEY, 1000)
    assert 0 < off < 4


@pytest.mark.parametrize(
    "truth, words",
    [
        ({"a": np.array([1.0, 1.3]), "b": (3.0,)}, r"biased at \['a'\]\[1\]: mean .* against 1.3"),
        ({"a": np.ones(2), "b": (3.001,)}, r"biased at \['b'\]\[0\]: mean 3.0 ± 0.0"),
    ],
)
def test_a_biased_estimate_is_named(truth, words):
    with pytest.raises(AssertionError, match=words):
        ap.testing.assert_unbiased(noisy(1.0), truth, KEY, 1000)


def test_an_estimate_that_is_not_finite_is_biased():
    with pytest.raises(AssertionError, match="mean nan"):
        ap.testing.assert_unbiased(lambda key: jax.random.normal(key) * jnp.nan, 0.0, KEY, 10)


def test_estimate_and_truth_must_have_one_form():
    with pytest.raises(ValueError, match="estimate and truth differ"):
        ap.testing.assert_unbiased(noisy(1.0), np.ones(2), KEY, 10)
    with pytest.raises(ValueError, match=r"has shape \(2,\), the truth \(3,\)"):
        ap.testing.assert_unbiased(lambda key: jax.random.normal(key, (2,)), np.ones(3), KEY, 10)


def test_what_a_transformation_changes_is_named():
    calls = []

    def impure(x):
        calls.append(None)
        return x * len(calls)

    with pytest.raises(AssertionError, match="under jit"):
        ap.testing.assert_transformable(impure, jnp.float32(1.0))
