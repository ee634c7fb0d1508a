import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import apgrad as ap
from tests.cases import cases
from tests.expectations.programs import walk

KEY = jax.random.key(0)

WRAPS = {
    "plain": lambda d: d,
    "expanded": lambda d: d.expand((2, 3)),
    "an event": lambda d: d.expand((3,)).to_event(1).expand((2,)),
    "masked": lambda d: d.mask(False),
}


@cases("wrap", WRAPS)
def test_the_implicit_derivative_equals_that_of_the_inverse_cdf(wrap, x64):
    # Of rates r and 2 r: y = exp(-r x) has q y + p y^2 = 1 - cdf, which is the same at any theta, also in a scan.
    def one(t):
        rates = jnp.exp(t) * jnp.array([1.0, 2.0])
        return wrap(dist.MixtureSameFamily(dist.Categorical(logits=jnp.stack([-t, t])), dist.Exponential(rates)))

    def implicit(tape, t):
        def body(tape, _):
            tape, x = ap.stochastic(ap.reparameterization())(one)(tape, t)
            return tape.cost(jnp.sum(x**3, axis=tuple(range(1, x.ndim)))), x

        return jax.lax.scan(body, tape, length=2)

    estimate = jax.jit(ap.expectation(implicit, 5, has_aux=True))
    t = jnp.array(0.3)
    y, p = jnp.exp(-jnp.exp(t) * estimate(KEY, t)[1]), jax.nn.sigmoid(2 * t)
    above = (1 - p) * y + p * y**2

    def exact(t):
        p = jax.nn.sigmoid(2 * t)
        y = (jnp.sqrt((1 - p) ** 2 + 4 * p * above) - (1 - p)) / (2 * p)
        return jnp.sum((-jnp.log(y) / jnp.exp(t)) ** 3) / 5

    both = lambda f, t: (jax.grad(f)(t), jax.grad(jax.grad(f))(t))  # a Newton step less shows at the second
    found = lambda t: estimate(KEY, t)[0]
    np.testing.assert_allclose(*jax.jit(lambda t: (both(found, t), both(exact, t)))(t), rtol=1e-9)


def test_it_is_the_gradient_of_the_same_program_with_the_same_numbers():
    make = lambda theta, x: dist.Normal(jnp.tanh(theta * x), 0.1)
    program = walk(ap.reparameterization(), make, 5, jnp.square)

    def plain(key, theta):
        x = jnp.ones(8)
        for _ in range(5):
            key, fresh = jax.random.split(key)
            noise = jax.vmap(jax.random.normal)(jax.random.split(fresh, 8))
            x = jnp.tanh(theta * x) + 0.1 * noise
        return jnp.mean(x**2)

    both = [jax.value_and_grad(f, argnums=1) for f in (ap.expectation(program, 8), plain)]
    np.testing.assert_allclose(*jax.jit(lambda: [f(KEY, 1.3) for f in both])(), rtol=1e-5)
