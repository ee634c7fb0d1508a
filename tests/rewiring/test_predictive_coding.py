"""Predictive coding: gradients of its energy after inference, both written by hand; and what it cannot take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import apgrad as ap
from tests.refusals import refused
from tests.rewiring import test_rules as models
from tests.rewiring.test_rules import close

WS, X, TARGET = [0.7 * w for w in models.WS], models.X, models.TARGET


def loss(ws, x, target):
    for w in ws[:-1]:
        x = jnp.tanh(x @ w)
    return jnp.sum((x @ ws[-1] - target) ** 2) / 2


def energy(values, ws, x, target):
    total = 0.0
    for z, w in zip(values, ws[:-1], strict=True):
        total, x = total + jnp.sum((z - jnp.tanh(x @ w)) ** 2) / 2, z
    return total + jnp.sum((x @ ws[-1] - target) ** 2) / 2


def by_hand(ws, x, target, steps, rate):
    values, h = [], x
    for w in ws[:-1]:
        values.append(h := jnp.tanh(h @ w))
    for _ in range(steps):
        values = [z - rate * g for z, g in zip(values, jax.grad(energy)(values, ws, x, target), strict=True)]
    return jax.grad(energy, argnums=(1, 2, 3))(values, ws, x, target)


@pytest.mark.parametrize("steps, rate", [(1, 0.1), (7, 0.3)])
def test_gradients_of_the_energy_after_inference(steps, rate):
    rewired = ap.rewire(loss, ap.rewiring.predictive_coding("tanh", steps=steps, rate=rate))
    value, gradients = jax.jit(jax.value_and_grad(rewired, argnums=(0, 1, 2)))(WS, X, TARGET)
    np.testing.assert_allclose(value, loss(WS, X, TARGET), rtol=1e-6)
    close(gradients, by_hand(WS, X, TARGET, steps, rate))


def test_message_scales_all_and_examples_are_inferred_apart():
    """The mean outside is the sum divided, and `vmap` over examples gives what the batch gives."""
    rewired = ap.rewire(loss, ap.rewiring.predictive_coding("tanh", steps=5))
    batch = jax.grad(lambda ws: rewired(ws, X, TARGET))(WS)
    mean = lambda ws: jnp.mean(jax.vmap(rewired, (None, 0, 0))(ws, X, TARGET))
    close(jax.tree.map(lambda g: 6 * g, jax.jit(jax.grad(mean))(WS)), batch)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(jax.checkpoint(jax.nn.relu)(self.first(x)))


def test_an_unchanged_module_with_remat_integers_and_cross_entropy():
    labels = jnp.array([0, 1, 1, 0, 1, 0])

    def f(model, x, labels):
        x = jax.lax.cond(labels[0] == 0, lambda x: jnp.sin(x), lambda x: x, x)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(model(x)), labels[:, None], 1))

    model = Net(nnx.Rngs(0))
    rewired = ap.rewire(f, ap.rewiring.predictive_coding(("relu", "sin"), steps=3))
    got = jax.jit(jax.grad(rewired))(model, X, labels)
    exact = jax.grad(f)(model, X, labels)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert jnp.vdot(a, b) > 0.5 * jnp.linalg.norm(a) * jnp.linalg.norm(b)
    assert not jnp.allclose(got.first.kernel[...], exact.first.kernel[...], rtol=1e-3)


def test_dtypes_and_second_derivatives():
    rewired = ap.rewire(loss, ap.rewiring.predictive_coding("tanh", steps=2))
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (WS, X, TARGET))
    gradient = jax.jit(jax.grad(rewired))(*low)
    assert all(g.dtype == jnp.bfloat16 and jnp.all(jnp.isfinite(g)) and jnp.any(g != 0) for g in gradient)
    with pytest.raises(TypeError, match="no second derivative of a rewired function"):
        jax.grad(lambda ws: jnp.sum(jax.grad(rewired)(ws, X, TARGET)[0] ** 2))(WS)


def test_what_it_cannot_take_is_an_error():
    rule = ap.rewiring.predictive_coding("tanh")
    for function, words in (
        (lambda ws, x, t: jnp.tanh(x @ ws[0]), "needs the loss"),
        (lambda ws, x, t: jnp.sum(jax.lax.map(jnp.tanh, x)), "is in a scan"),
        (lambda ws, x, t: jnp.sum(x @ ws[0]), "no site by the name 'tanh'"),
    ):
        refused(ValueError, words, jax.grad(ap.rewire(function, rule)), WS, X, TARGET)
    with pytest.raises(TypeError, match="closes over an array that is differentiated"):
        jax.grad(lambda s: ap.rewire(lambda ws, x: s * loss(ws, x, TARGET), rule)(WS, X))(1.0)
    for options, words in (({"steps": 0}, "must be an integer"), ({"rate": 0.0}, "above 0")):
        refused(ValueError, words, ap.rewiring.predictive_coding, "tanh", **options)
