import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from apgrad._ground.keys import require_key
from tests.refusals import refused

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "make", [jax.random.key, jax.random.PRNGKey, lambda seed: np.asarray(jax.random.PRNGKey(seed))]
)
def test_typed_and_raw_keys_are_the_same_key(make):
    draw = lambda key: jax.random.normal(require_key("the key", key))
    assert draw(make(3)) == jax.jit(draw)(make(3)) == jax.random.normal(jax.random.key(3))
    typed = jax.random.split(jax.random.key(0), 3)
    np.testing.assert_array_equal(jax.vmap(draw)(jax.random.key_data(typed)), jax.vmap(draw)(typed))


def test_a_key_of_another_implementation_stays_what_it_is():
    key = jax.random.key(0, impl="rbg")
    assert require_key("the key", key) is key


@pytest.mark.parametrize(
    "key",
    [0, None, jnp.zeros(2), *(jnp.zeros(s, jnp.uint32) for s in (3, (3, 2))), jax.random.split(jax.random.key(0))],
)
def test_what_is_no_key_is_refused(key):
    refused(TypeError, "the key is one PRNG key", require_key, "the key", key)
    refused(TypeError, "first argument is one PRNG key", ap.expectation(lambda tape: tape, 4), key)


def test_an_objective_takes_both():
    def program(tape, a):
        tape, key = tape.next_key()
        return tape.cost(a * jax.random.normal(key, (tape.lanes,)))

    objective = ap.expectation(program, 4)
    keys = jax.random.split(jax.random.key(1), 3)
    each = [objective(key, 2.0) for key in keys]
    np.testing.assert_allclose(jax.vmap(objective, (0, None))(keys, 2.0), each, rtol=1e-6)
    np.testing.assert_array_equal([objective(raw, 2.0) for raw in jax.random.key_data(keys)], each)
