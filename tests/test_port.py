import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap


def test_port_is_zeros_of_any_pytree_and_its_cotangent_is_the_message():
    template = {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": (jnp.ones(4, jnp.bfloat16),)}
    p = ap.port(template)
    chex.assert_trees_all_equal_shapes_and_dtypes(p, template)
    assert all(not x.any() for x in jax.tree.leaves(p))
    message = jax.tree.map(lambda x: jnp.full_like(x, 3), p)
    send = ap.node(ap.Propagator(lambda x, p: (x, None), lambda _, m: (m, message)))
    chex.assert_trees_all_equal(jax.grad(send, argnums=1)(1.0, p), message)


def test_a_port_of_integers_is_an_error():
    with pytest.raises(TypeError, match="floating point, got int32"):
        ap.port(jnp.arange(3))


def test_signal():
    signal = ap.Signal.of(jnp.ones((4, 3)), 8)
    assert signal.port.shape == (4, 3, 8)
    assert len(jax.tree.leaves(signal)) == 2
    with pytest.raises(ValueError, match="at least one channel"):
        ap.Signal.of(jnp.ones(3), 0)


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


def test_zero_with_gradient_under_vmap_in_a_scan():
    # With a value that does not depend on x, JAX 0.10 mixes up the batch axes here.
    def f(b):
        def body(c, _):
            return c + jax.vmap(lambda x: ap.zero_with_gradient(b * x))(jnp.ones((3, 2))).sum(-1), None

        return jnp.sum(jnp.exp(jax.lax.scan(body, jnp.zeros(3), length=4)[0]))

    np.testing.assert_allclose(jax.vmap(jax.grad(f))(jnp.arange(5.0)), jnp.full(5, 24.0))
