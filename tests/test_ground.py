"""The ground floor: primitives, keys and ports."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad._ground.keys import require_key
from apgrad._ground.norms import rescaled
from apgrad._ground.primitives import refuse_batching, refuse_message
from tests.cases import TRANSFORMS, cases
from tests.refusals import refused

pytestmark = pytest.mark.quick


def test_zero_with_gradient_is_zero_where_its_argument_is_not_finite_and_no_integer():
    x = jnp.array([-jnp.inf, jnp.inf, jnp.nan])
    value, derivative = jax.jvp(ap.zero_with_gradient, (x,), (jnp.ones(3),))
    assert not value.any() and (derivative == 1).all()
    refused(TypeError, "got dtype int32, which has no gradient", ap.zero_with_gradient, 3)


def a_program_of_leaves(tape, leaves, factor=4.0):
    lanes = jax.tree.map(lambda x: x * jnp.ones((tape.lanes, 4)), leaves)
    tape, clipped = ap.clip_lanes(tape, lanes, factor)
    return tape.cost(sum(jnp.sum(x**3, axis=1) for x in clipped))


def of_levels(leaves):
    estimator = ap.multilevel(ap.value_and_grad(a_program_of_leaves, lanes=20))
    key = jax.random.key(0)
    return estimator.value_and_grad(key, estimator.init(key, leaves), leaves)


OF_LEAVES = {
    "rescaled": lambda leaves: rescaled(leaves, 1.0, shorten=True),
    "clip_lanes": lambda leaves: ap.grad(a_program_of_leaves, lanes=20)(jax.random.key(0), leaves),
    "multilevel": of_levels,
}


@cases("function", OF_LEAVES)
def test_a_compiled_program_is_as_long_as_its_leaves_are_many(function):
    few, many = (len(jax.jit(function).lower([jnp.ones(4)] * n).compile().as_text().splitlines()) for n in (5, 50))
    assert many < 12 * few


@cases("wrap", TRANSFORMS)
def test_derivatives_survive_every_transformation(wrap, x64):
    # As a custom_jvp function the zero loses its second derivative inside a scan.
    def derivatives(f):
        first, second = jax.grad(f), jax.grad(jax.grad(f))
        return lambda x: jnp.stack([first(x), second(x), jax.grad(second)(x)])

    got = derivatives(lambda x: jnp.exp(wrap(lambda x: ap.zero_with_gradient(x**3))(x)))
    wanted = jax.jit(derivatives(lambda x: jnp.exp(x**3 - 0.7**3)))(0.7)
    alone, mapped = jax.jit(lambda x: (got(x), jax.vmap(got)(jnp.stack([x, x]))))(0.7)
    for found in (alone, *mapped):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


@cases("wrap", TRANSFORMS)
def test_refused_derivatives_are_refused_everywhere(wrap):
    f = wrap(lambda x: ap.refuse_derivative({"a": x, "n": 3}, "no derivative here")["a"] * 2)
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


MAKERS = [jax.random.key, jax.random.PRNGKey, lambda seed: np.asarray(jax.random.PRNGKey(seed))]


@pytest.mark.parametrize("make", MAKERS)
def test_typed_and_raw_keys_are_the_same_key(make):
    draw = lambda key: jax.random.normal(require_key("the key", key))
    assert draw(make(3)) == jax.jit(draw)(make(3)) == jax.random.normal(jax.random.key(3))
    typed = jax.random.split(jax.random.key(0), 3)
    np.testing.assert_array_equal(jax.vmap(draw)(jax.random.key_data(typed)), jax.vmap(draw)(typed))
    other = jax.random.key(0, impl="rbg")
    assert require_key("the key", other) is other


NO_KEYS = [0, None, jnp.zeros(2), *(jnp.zeros(s, jnp.uint32) for s in (3, (3, 2))), jax.random.split(jax.random.key(0))]


@pytest.mark.parametrize("key", NO_KEYS)
def test_what_is_no_key_is_refused(key):
    refused(TypeError, "the key is one PRNG key", require_key, "the key", key)
    refused(TypeError, "first argument is one PRNG key", ap.expectation(lambda tape: tape, 4), key)


def by_total_propagation(tape, x):
    tape, x = ap.sample(tape, dist.Normal(x * jnp.ones(tape.lanes), 1.0), ap.total_propagation())
    return tape.cost(x**2)


KEYED = {
    "node": jax.grad(ap.node(ap.backpropagation(lambda key, x: jnp.sum(x * jax.random.normal(key)))), 1),
    "total_propagation": ap.grad(by_total_propagation, lanes=4),
    "randomize": ap.randomize(jnp.sin, ap.memory.rounding(bits=4), min_size=0),
    "rewire": ap.rewire(jnp.sin, ap.rewiring.forward_gradient(where="sin")),
}


@cases("function", KEYED)
def test_a_key_that_is_given_twice_is_seen_and_one_that_is_given_once_is_right(function):
    @functools.partial(jax.jit, static_argnums=1)
    def drawn(data, times):
        key = jax.random.wrap_key_data(data)
        return [function(key, jnp.ones(1)) for _ in range(times)]

    data = jax.random.key_data(jax.random.key(0))
    with jax.debug_key_reuse(True):
        drawn(data, 1)
        refused(jax.errors.KeyReuseError, "already consumed", drawn, data, 2)


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
        refused(TypeError, "floating point, and the template has dtype int32", ap.port, template)


def test_signal():
    signal = ap.Signal.of(jnp.ones((4, 3)), 8)
    assert signal.port.shape == (4, 3, 8)
    assert len(jax.tree.leaves(signal)) == 2
    assert not jax.vmap(lambda x: ap.Signal.of(x, 2).port)(jnp.array([jnp.inf, jnp.nan])).any()
    refused(ValueError, "message_size must be an integer of at least 1", ap.Signal.of, jnp.ones(3), 0)
