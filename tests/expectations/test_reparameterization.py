import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap

KEY = jax.random.key(0)


def objective(make, cost, lanes=1000):
    node = ap.stochastic(ap.reparameterization())(make)

    def program(tape, theta):
        tape, x = node(tape, theta)
        return tape.cost(cost(x))

    return ap.expectation(program, lanes)


def derivatives(orders, estimate, exact):
    """The first derivatives of both, in lists."""
    estimates, truths = [], []
    for _ in range(orders):
        estimate, exact = jax.grad(estimate, argnums=1), jax.grad(exact)
        estimates, truths = [*estimates, estimate], [*truths, exact]
    return lambda key, t: [e(key, t) for e in estimates], lambda t: [e(t) for e in truths]


def test_a_normal_at_any_order():
    # E[(m + s z)^3], m = sin t, s = exp t: m^3 + 3 m s^2.
    def exact(t):
        return jnp.sin(t) ** 3 + 3 * jnp.sin(t) * jnp.exp(2 * t)

    estimate = objective(lambda t: dist.Normal(jnp.sin(t), jnp.exp(t)), lambda x: x**3)
    found, wanted = derivatives(3, estimate, exact)
    ap.testing.assert_unbiased(lambda key: found(key, 0.3), jax.jit(wanted)(0.3), KEY, 1000)


def mixture(t):
    return dist.MixtureSameFamily(
        dist.Categorical(logits=jnp.stack([t, -t])), dist.Normal(jnp.stack([t, -2 * t]), jnp.array([0.5, 1.0]))
    )


def exact_mixture(t):
    p = jax.nn.sigmoid(2 * t)
    return p * (t**2 + 0.25) + (1 - p) * (4 * t**2 + 1.0)


def test_a_mixture_has_an_implicit_derivative_by_its_cdf_at_any_order():
    assert not mixture(0.3).has_rsample
    found, wanted = derivatives(2, objective(mixture, lambda x: x**2), exact_mixture)
    ap.testing.assert_unbiased(lambda key: found(key, 0.3), jax.jit(wanted)(0.3), KEY, 1000)


def test_the_implicit_derivative_equals_that_of_the_inverse_cdf(x64):
    # A mixture of one component is a normal: x = m + s z with the same z at any theta, also in a scan.
    def one(t):
        return dist.MixtureSameFamily(
            dist.Categorical(logits=jnp.zeros(1)), dist.Normal(jnp.sin(t)[None], jnp.exp(t)[None])
        )

    node = ap.stochastic(ap.reparameterization())(one)

    def implicit(tape, t):
        def body(tape, _):
            tape, x = node(tape, t)
            return tape.cost(x**3), x

        tape, x = jax.lax.scan(body, tape, length=2)
        return tape, x

    estimate = jax.jit(ap.expectation(implicit, 5, has_aux=True))
    t = jnp.array(0.3)
    z = (estimate(KEY, t)[1] - jnp.sin(t)) / jnp.exp(t)

    def exact(t):
        return jnp.sum((jnp.sin(t) + jnp.exp(t) * z) ** 3) / 5

    found, wanted = derivatives(2, lambda key, t: estimate(key, t)[0], exact)  # a Newton step less shows at the second
    np.testing.assert_allclose(*jax.jit(lambda t: (found(KEY, t), wanted(t)))(t), rtol=1e-9)


def test_a_second_derivative_that_jax_has_not_is_an_error():
    # JAX differentiates its gamma sampler once.
    estimate = objective(lambda a: dist.Gamma(a, 1.0), lambda x: x**2, lanes=4)
    with pytest.raises(Exception, match=r"[Dd]ifferentiation"):
        jax.grad(jax.grad(estimate, argnums=1), argnums=1)(KEY, 2.0)


def test_it_is_the_gradient_of_the_same_program_with_the_same_numbers():
    def step(theta, x):
        return dist.Normal(jnp.tanh(theta * x), 0.1)

    node = ap.stochastic(ap.reparameterization())(step)

    def program(tape, theta):
        x = jnp.ones(tape.lanes)
        (tape, x), _ = jax.lax.scan(lambda c, _: (node(c[0], theta, c[1]), None), (tape, x), length=5)
        return tape.cost(x**2)

    def plain(key, theta):
        x = jnp.ones(8)
        for _ in range(5):
            key, fresh = jax.random.split(key)
            noise = jax.vmap(jax.random.normal)(jax.random.split(fresh, 8))
            x = jnp.tanh(theta * x) + 0.1 * noise
        return jnp.mean(x**2)

    both = [jax.value_and_grad(f, argnums=1) for f in (ap.expectation(program, 8), plain)]
    np.testing.assert_allclose(*jax.jit(lambda: [f(KEY, 1.3) for f in both])(), rtol=1e-5)
