import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap

pytestmark = pytest.mark.quick


def test_zero_with_gradient_has_every_derivative_of_its_argument(x64):
    f = lambda x: ap.zero_with_gradient(jnp.sin(x) * x**2)
    g = lambda x: jnp.sin(x) * x**2
    assert f(1.3) == 0
    for _ in range(4):
        f, g = jax.grad(f), jax.grad(g)
        np.testing.assert_allclose(f(1.3), g(1.3), rtol=1e-12)
    np.testing.assert_allclose(jax.hessian(lambda x: jnp.exp(ap.zero_with_gradient(x**3)))(2.0), 12.0 + 12.0**2)


def test_zero_with_gradient_is_zero_where_its_argument_is_not_finite():
    x = jnp.array([-jnp.inf, jnp.inf, jnp.nan])
    value, derivative = jax.jvp(ap.zero_with_gradient, (x,), (jnp.ones(3),))
    assert not value.any()
    assert (derivative == 1).all()


def test_a_zero_of_integers_is_an_error():
    with pytest.raises(TypeError, match="got dtype int32, which has no gradient"):
        ap.zero_with_gradient(3)


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
@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_survive_every_transformation(transform, order, x64):
    # As a custom_jvp function the zero loses its second derivative inside a scan.
    wrap = TRANSFORMS[transform]
    f = lambda x: jnp.exp(wrap(lambda x: ap.zero_with_gradient(x**3))(x))
    g = lambda x: jnp.exp(x**3 - 0.7**3)
    for _ in range(order):
        f, g = jax.grad(f), jax.grad(g)
    np.testing.assert_allclose(f(0.7), g(0.7), rtol=1e-12)
    np.testing.assert_allclose(jax.vmap(f)(jnp.array([0.7, 0.7])), [g(0.7)] * 2, rtol=1e-12)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_refused_derivatives_are_refused_everywhere(transform):
    f = TRANSFORMS[transform](lambda x: ap.refuse_derivative({"a": x, "n": 3}, "no derivative here")["a"] * 2)
    assert f(jnp.float32(1.5)) == 3.0
    for derivative in (jax.grad, jax.jacfwd, jax.hessian):
        with pytest.raises(TypeError, match="no derivative here"):
            derivative(f)(1.5)


def test_refusal_passes_where_nothing_is_differentiated():
    assert jax.grad(lambda x: x * ap.refuse_derivative(jnp.float32(3.0), "data"))(2.0) == 3.0
