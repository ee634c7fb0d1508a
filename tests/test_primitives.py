import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from apgrad._ground.primitives import refuse_batching, refuse_message
from tests.refusals import refused

pytestmark = pytest.mark.quick


def test_zero_with_gradient_is_zero_where_its_argument_is_not_finite_and_no_integer():
    x = jnp.array([-jnp.inf, jnp.inf, jnp.nan])
    value, derivative = jax.jvp(ap.zero_with_gradient, (x,), (jnp.ones(3),))
    assert not value.any() and (derivative == 1).all()
    refused(TypeError, "got dtype int32, which has no gradient", ap.zero_with_gradient, 3)


def in_scan(f):
    def looped(x):
        return jax.lax.scan(lambda c, _: (c + f(x), None), jnp.zeros_like(x), length=3)[0] / 3

    return looped


TRANSFORMS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": in_scan,
    "jit of scan": lambda f: jax.jit(in_scan(f)),
    "checkpoint in scan": lambda f: in_scan(jax.checkpoint(f)),
    "vmap in scan": lambda f: in_scan(lambda x: jax.vmap(f)(jnp.stack([x, x]))[1]),
    "cond": lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_survive_every_transformation(transform, x64):
    # As a custom_jvp function the zero loses its second derivative inside a scan.
    def derivatives(f):
        first, second = jax.grad(f), jax.grad(jax.grad(f))
        return lambda x: jnp.stack([first(x), second(x), jax.grad(second)(x)])

    wrap = TRANSFORMS[transform]
    got = derivatives(lambda x: jnp.exp(wrap(lambda x: ap.zero_with_gradient(x**3))(x)))
    wanted = jax.jit(derivatives(lambda x: jnp.exp(x**3 - 0.7**3)))(0.7)
    alone, mapped = jax.jit(lambda x: (got(x), jax.vmap(got)(jnp.stack([x, x]))))(0.7)
    for found in (alone, *mapped):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_refused_derivatives_are_refused_everywhere(transform):
    f = TRANSFORMS[transform](lambda x: ap.refuse_derivative({"a": x, "n": 3}, "no derivative here")["a"] * 2)
    assert f(jnp.float32(1.5)) == 3.0
    assert jax.grad(lambda x: x * f(jnp.float32(1.5)))(2.0) == 3.0  # nothing in there is differentiated
    for derivative in (jax.grad, jax.jacfwd, jax.hessian):
        refused(TypeError, "no derivative here", jax.eval_shape, derivative(f), 1.5)


def test_a_message_that_comes_back_is_refused_and_one_that_nobody_wants_is_not():
    f = lambda x: (x**2, refuse_message(x, "no message"))
    assert jax.grad(f, has_aux=True)(3.0)[0] == 6
    refused(TypeError, "no message", jax.grad(lambda x: f(x)[1]), 3.0)
    assert jnp.isnan(jax.jvp(f, (3.0,), (1.0,))[1][1])


def test_what_refuses_to_be_mapped_is_not_mapped():
    with pytest.raises(ValueError, match="not mapped"):
        jax.vmap(lambda x: x + refuse_batching(jnp.float32(1), "not mapped"))(jnp.ones(3))
