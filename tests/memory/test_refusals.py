"""What cannot be randomized rightly is refused: backward passes that are not linear. Keys of both kinds are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap

pytestmark = pytest.mark.quick

R = ap.memory
KEY = jax.random.key(0)
W, X = 0.3 * jax.random.normal(KEY, (8, 8)), jax.random.normal(jax.random.key(1), (16, 8))


def rule(backward):
    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, m: (backward(x, m),))
    return function


def looped(x, m):
    return jax.lax.scan(lambda c, _: (c * m, None), m, length=2)[0]


NOT_LINEAR = {
    "clip": lambda x, m: jnp.clip(m, -1, 1),
    "normalise": lambda x, m: m / jnp.linalg.norm(m),
    "branch": lambda x, m: jax.lax.cond(jnp.sum(m) > 1, lambda m: m / 2, lambda m: m, m),
    "constant": lambda x, m: m + x,
    "replaced": lambda x, m: jnp.where(x > 0, m, x),
    "relu": lambda x, m: jax.nn.relu(m),
    "square": lambda x, m: m * m,
    "integers": lambda x, m: m.astype(jnp.int32).astype(m.dtype),
    "scan": looped,
}
LINEAR = {
    "scaled": lambda x, m: jnp.cos(x) * m,
    "masked": lambda x, m: jnp.where(x > 0, m, 0.0),
    "scan": lambda x, m: jax.lax.scan(lambda c, _: (c * x, None), m, length=2)[0],
    "branch": lambda x, m: jax.lax.cond(jnp.sum(x) > 1, lambda m: m / 2, lambda m: m, m),
    "sum": lambda x, m: jnp.broadcast_to(jnp.sum(m, 0), m.shape) / x.shape[0],
}


def loss(backward):
    return lambda w, x: jnp.sum(rule(backward)(x @ w) @ w)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_backward_pass_that_is_not_linear_is_refused(name):
    function = loss(NOT_LINEAR[name])
    with pytest.raises(TypeError, match="not linear in the message"):
        jax.grad(ap.randomize(function, R.rounding(4), min_size=16), argnums=1)(KEY, W, X)
    with pytest.raises(TypeError, match="not linear in the message"):
        ap.semiring_grad(lambda w: function(w, X), ap.tracing.ordinary)(W)


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_one_is_not(name):
    function = loss(LINEAR[name])
    found = jax.grad(ap.randomize(function, R.rounding(32), min_size=16), argnums=1)(KEY, W, X)
    np.testing.assert_allclose(found, jax.grad(function)(W, X), rtol=1e-4, atol=1e-5)


def test_a_randomized_part_is_linear():
    part = ap.randomize(lambda w, x: jax.nn.relu(x @ w), R.same_sample(0.5), min_size=16)

    def network(w, x):
        return jnp.sum(part(KEY, w, x) @ w)

    jax.grad(ap.randomize(network, R.rounding(4), min_size=16), argnums=1)(KEY, W, X)


def test_raw_keys_are_keys():
    random = ap.randomize(loss(LINEAR["scaled"]), R.rounding(4), min_size=16)
    typed, raw = (jax.grad(random, argnums=1)(key, W, X) for key in (KEY, jax.random.PRNGKey(0)))
    np.testing.assert_array_equal(typed, raw)
