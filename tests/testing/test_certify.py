"""Certificates: right gradients get one. The cost is that of the usual toy, (b - .45)^2 for b Bernoulli."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap

THETA = 0.4


def cost(b):
    return (b - 0.45) ** 2


def truth(theta):
    p = jax.nn.sigmoid(theta)
    return p * cost(1.0) + (1 - p) * cost(0.0)


def by_score(key, theta, *, without_the_baselines_own=True):
    """The likelihood ratio of two samples; the mean of both as baseline halves the gradient."""
    p = jax.nn.sigmoid(theta)
    b = jax.random.bernoulli(key, p, (2,)).astype(jnp.float32)
    return jnp.mean((cost(b) - (cost(b[::-1]) if without_the_baselines_own else jnp.mean(cost(b)))) * (b - p))


def test_a_right_gradient_is_certified_and_a_biased_one_is_not():
    certificate = ap.testing.certify(by_score, truth, THETA, num_samples=20_000, resolution=0.2)
    assert certificate.passed and str(certificate).startswith("by_score: certified")
    assert {check.name for check in certificate.checks} == {"bias", "resolution", "jit", "vmap", "scan", "keys"}
    biased = functools.partial(by_score, without_the_baselines_own=False)
    with pytest.raises(ap.testing.NotCertifiedError, match="FAIL  bias        biased: mean") as raised:
        ap.testing.certify(biased, truth, THETA, num_samples=20_000, resolution=0.2)
    assert [check.name for check in raised.value.certificate.checks if not check.passed] == ["bias"]


def test_what_is_no_function_of_its_key_is_named():
    calls = []

    def counting(key, theta):
        calls.append(None)
        return theta * (2 + jax.random.normal(key)) + 0.01 * len(calls)

    def same_noise_twice(key, theta):
        return 2 * theta + jax.random.normal(key) * (1 + jax.random.normal(key) ** 2)

    def other_under_vmap(key, theta):
        noise = jax.custom_batching.custom_vmap(lambda x: x)
        noise.def_vmap(lambda size, batched, x: (-x, True))
        return 2 * theta + noise(jax.random.normal(key))

    for estimate, words in (
        (counting, "FAIL  keys        two calls with one key differ"),
        (same_noise_twice, "FAIL  keys        a key is used twice"),
        (other_under_vmap, "FAIL  vmap        other estimates, by"),
    ):
        with pytest.raises(ap.testing.NotCertifiedError, match=words):
            ap.testing.certify(estimate, jnp.square, 1.0, num_samples=1000, resolution=1.0)


def test_a_surrogate_loss_is_wrong_at_order_two_and_the_exponential_of_the_score_is_right():
    def gradient(right):
        def surrogate(key, theta):
            b = jax.random.bernoulli(key, jax.nn.sigmoid(theta)).astype(jnp.float32)
            score = ap.zero_with_gradient(b * theta - jnp.log1p(jnp.exp(theta)))
            return jax.lax.stop_gradient(cost(b)) * (jnp.exp(score) if right else score)

        return jax.grad(surrogate, argnums=1)

    certificate = ap.testing.certify(gradient(True), truth, THETA, order=2, resolution=0.5)
    assert {"order two", "scan, two"} <= {check.name for check in certificate.checks}
    with pytest.raises(ap.testing.NotCertifiedError, match="FAIL  order two   biased") as raised:
        ap.testing.certify(gradient(False), truth, THETA, order=2, resolution=0.5)
    assert next(check for check in raised.value.certificate.checks if check.name == "bias").passed


def test_a_refused_derivative_is_no_certificate_of_order_two():
    once = ap.node(ap.first_order(ap.backpropagation(lambda theta, noise: theta**2 + noise * theta), "only once"))
    gradient = jax.grad(lambda key, theta: once(theta, jax.random.normal(key)), argnums=1)
    with pytest.raises(ap.testing.NotCertifiedError, match="FAIL  order two   refused: only once"):
        ap.testing.certify(gradient, lambda theta: theta**2, 3.0, order=2, num_samples=1000)


def test_variance_is_held_to_what_is_claimed():
    estimate = lambda key, theta: {"a": 2 * theta["a"] + jax.random.normal(key, (2,)) * jnp.array([1.0, 2.0])}
    square = lambda theta: jnp.sum(theta["a"] ** 2)
    theta = {"a": jnp.array([1.0, 2.0])}
    ap.testing.certify(estimate, square, theta, max_variance={"a": np.array([1.0, 4.0])})
    ap.testing.certify(estimate, square, theta, max_variance=4.0)
    with pytest.raises(ap.testing.NotCertifiedError, match=r"FAIL  variance    .* claimed 3\.5"):
        ap.testing.certify(estimate, square, theta, max_variance={"a": np.array([1.0, 3.5])})


def test_too_few_samples_certify_nothing():
    estimate = lambda key, theta: 2 * theta + jax.random.normal(key)
    with pytest.raises(ap.testing.NotCertifiedError, match=r"open  resolution  only a bias of .* be seen") as raised:
        ap.testing.certify(estimate, jnp.square, 1.0, num_samples=100)
    # The bound of four standard errors is a tenth of the gradient, .2, at 400 samples; it is wider for few samples.
    needed = re.fullmatch(r"<lambda>: undecided: raise num_samples to about (\d+)", str(raised.value).splitlines()[0])
    assert needed and 350 < int(needed[1]) < 600
    assert not raised.value.certificate.passed and "FAIL" not in str(raised.value)
    ap.testing.certify(estimate, jnp.square, 1.0, num_samples=int(needed[1]))
    with pytest.raises(ap.testing.NotCertifiedError, match=r"^<lambda>: not certified"):
        ap.testing.certify(estimate, jnp.square, 1.0, num_samples=100, max_variance=0.1)


NOTHING_TO_TEST = [
    (truth, THETA, {"order": 3}, ValueError, "orders 1 and 2"),
    (0.1, THETA, {"order": 2}, ValueError, "exact expectation as a function"),
    (truth, THETA, {"max_variance": np.inf}, ValueError, "finite max_variance"),
    (truth, {"a": jnp.int32(1)}, {}, TypeError, r"args\[0\]\['a'\] has dtype int32: give it in floating point"),
]
NOTHING_TO_TEST += [
    (truth, THETA, {name: bound}, ValueError, f"{name} must be a finite number above 0")
    for name in ("resolution", "rtol")
    for bound in (np.inf, np.nan, -1.0)
]


@pytest.mark.parametrize("exact, theta, options, error, words", NOTHING_TO_TEST)
def test_what_cannot_be_tested_is_an_error(exact, theta, options, error, words):
    with pytest.raises(error, match=words):
        ap.testing.certify(by_score, exact, theta, **options)


def test_errors_are_short_where_nothing_varies():
    estimate = lambda key, theta: jax.lax.stop_gradient(2 * theta) + jax.random.normal(key)
    with pytest.raises(ap.testing.NotCertifiedError, match=r"FAIL  order two   biased.* never near it") as raised:
        ap.testing.certify(estimate, jnp.square, 1.0, order=2, num_samples=1000, resolution=0.3)
    assert max(map(len, str(raised.value).splitlines())) < 200
    noise = lambda key, theta: 2 * theta + 1e30 * jax.random.normal(key)
    with pytest.raises(ap.testing.NotCertifiedError, match="no number of samples is enough"):
        ap.testing.certify(noise, jnp.square, 1.0, num_samples=1000)


def test_what_does_not_depend_on_its_key_is_certified_as_exact_only():
    estimate = lambda key, theta: 2 * theta
    with pytest.raises(ap.testing.NotCertifiedError, match="FAIL  keys        the same for every key: nothing random"):
        ap.testing.certify(estimate, jnp.square, jnp.array(0.1), num_samples=30)
    certificate = ap.testing.certify(estimate, jnp.square, jnp.array(0.1), num_samples=333, max_variance=0)
    assert certificate.checks[-1].found == "the same for every key"
    noisy = lambda key, theta: 2 * theta + 1e-3 * jax.random.normal(key)
    with pytest.raises(ap.testing.NotCertifiedError, match="FAIL  variance"):
        ap.testing.certify(noisy, jnp.square, jnp.array(0.1), num_samples=300, max_variance=0)


@dataclasses.dataclass(frozen=True)
class Coin:
    """A sampler that is wrong: what it keeps is not divided by the probability."""

    def keep(self, key, x, axis=-1):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    def restore(self, key, memory, like, axis=-1):
        return memory

    def variance(self, x, axis=-1):
        return x**2


@pytest.mark.filterwarnings("ignore:nothing is sampled")
@pytest.mark.parametrize("min_size, words", [(512, "FAIL  keys        the same"), (0, "FAIL  bias        biased")])
def test_a_wrong_sampler_is_not_certified_whether_it_is_called_or_not(min_size, words):
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    w, x = 0.3 * jax.random.normal(jax.random.key(0), (6, 4)), jax.random.normal(jax.random.key(1), (20, 6))
    gradient = jax.grad(ap.randomize(loss, Coin(), min_size=min_size), argnums=1)
    with pytest.raises(ap.testing.NotCertifiedError, match=words):
        ap.testing.certify(gradient, loss, w, x, num_samples=400)


PLUGIN = """
import sys
assert "jax" not in sys.modules                 # the plugin is loaded, and nothing has asked for JAX yet

def test_right(certify):
    import jax
    certificate = certify(lambda key, theta: 2 * theta + jax.random.normal(key), lambda theta: theta**2, 1.0)
    assert certificate.moments.num_samples == 20_000

def test_wrong(certify):
    import jax
    certify(lambda key, theta: theta + jax.random.normal(key), lambda theta: theta**2, 1.0)
"""


def test_the_plugin_makes_certificates_and_lists_them(tmp_path):
    (tmp_path / "test_mine.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-p", "apgrad._pytest_plugin", "--certify-samples=2", "test_mine.py"]
    root = str(Path(ap.__file__).parents[1])
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": root}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "= gradient certificates =" in ran.stdout
    assert "test_mine.py::test_right\n<lambda>: certified\n" in ran.stdout
    assert "FAIL  bias        biased" in ran.stdout
