import chex
import jax
import jax.numpy as jnp
import pytest

import apgrad as ap
from tests.refusals import refused

pytestmark = pytest.mark.quick


def test_port_is_zeros_of_any_pytree_and_its_cotangent_is_the_message():
    template = {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": (jnp.ones(4, jnp.bfloat16),)}
    p = ap.port(template)
    chex.assert_trees_all_equal_shapes_and_dtypes(p, template)
    assert all(not x.any() for x in jax.tree.leaves(p))
    message = jax.tree.map(lambda x: jnp.full_like(x, 3), p)
    send = ap.node(ap.Propagator(lambda x, p: (x, None), lambda _, m: (m, message)))
    chex.assert_trees_all_equal(jax.grad(send, argnums=1)(1.0, p), message)


def test_a_port_is_of_floating_point_numbers_pythons_too():
    chex.assert_trees_all_equal(ap.port({"a": 1.0, "n": None}), {"a": jnp.zeros(()), "n": None})
    for template in (jnp.arange(3), 3):
        refused(TypeError, "floating point, got int32", ap.port, template)


def test_signal():
    signal = ap.Signal.of(jnp.ones((4, 3)), 8)
    assert signal.port.shape == (4, 3, 8)
    assert len(jax.tree.leaves(signal)) == 2
    assert not jax.vmap(lambda x: ap.Signal.of(x, 2).port)(jnp.array([jnp.inf, jnp.nan])).any()
    refused(ValueError, "message_size must be an integer of at least 1", ap.Signal.of, jnp.ones(3), 0)
