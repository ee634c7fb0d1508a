"""`mplp.fit`: what comes out is what the loop written by hand makes, and what cannot be trained on is refused."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from apgrad import mplp
from tests.cases import cases
from tests.mplp.graphs import close
from tests.refusals import refused

X = jax.random.normal(jax.random.key(0), (6, 8, 3))
Y = jax.nn.one_hot((X[..., 0] > 0).astype(int), 2)
BATCHES = [(np.asarray(x), np.asarray(y)) for x, y in zip(X, Y, strict=True)]
EXPLODES = X[0] * 3e37, Y[0]
RULE = mplp.Exact(0.5)


def model():
    return nnx.Sequential(nnx.Linear(3, 50, rngs=nnx.Rngs(0)), nnx.sigmoid, nnx.Linear(50, 2, rngs=nnx.Rngs(1)))


def fit(data=BATCHES, rule=RULE, steps=6, **options):
    return mplp.fit(model(), data, rule, steps, progress=False, **options)


def test_fit_is_the_loop_of_inner_steps():
    """By the exact rule it is gradient descent; the curve is measured at the start, every so often and at the end."""
    fitted = fit(held_out=(X[0], Y[0]), every=4)
    network, params = mplp.from_nnx(model(), mplp.softmax_cross_entropy)
    loss = lambda p, x, y: jnp.mean(optax.softmax_cross_entropy(network.predict(p, x), y))

    @jax.jit
    def descend(p, batch):
        value, gradient = jax.value_and_grad(loss)(p, *batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, p, gradient), (value, loss(p, X[0], Y[0]))

    expected, (losses, measures) = jax.lax.scan(descend, params, (X, Y))
    np.testing.assert_allclose(fitted.losses, losses, rtol=1e-5)
    close(mplp.from_nnx(fitted.model, mplp.softmax_cross_entropy)[1], expected, rtol=1e-5, atol=1e-6)
    assert fitted.steps.tolist() == [0, 4, 6]
    np.testing.assert_allclose(fitted.held_out[:2], np.asarray(measures)[[0, 4]], rtol=1e-5)


def test_fit_gives_the_same_bits_again_and_leaves_the_model():
    """It carries on the state of a trained rule, which it tells the number of steps."""
    before = jax.tree.map(np.asarray, nnx.state(model()))
    given = model()
    options = {"held_out": BATCHES[0], "progress": False}
    first, second = (mplp.fit(given, itertools.cycle(BATCHES), "images", 8, **options) for _ in range(2))
    for fitted in (first, second):
        assert fitted.steps.tolist() == [0, 8] and fitted.held_out[1] < fitted.held_out[0]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(first.model), nnx.state(second.model))
    network, params = mplp.from_nnx(given, mplp.softmax_cross_entropy, names="role")
    rule, order = mplp.load_pretrained("images").for_steps(8), np.arange(8) % 6
    state = mplp.init_state(rule, network, params, BATCHES[0])
    metrics = jax.jit(lambda rule: mplp.unroll(rule, network, params, state, (X[order], Y[order]))[2])(rule)
    np.testing.assert_allclose(first.losses, metrics["loss"], rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(given), before)


def test_minibatches_that_are_written_into_one_buffer_are_read_before_the_next():
    """JAX reads a large NumPy array after the call has returned, and so what stands there by then."""
    data = np.random.default_rng(0).normal(size=(12, 256, 400)).astype(np.float32)
    y, buffer = np.eye(10, dtype=np.float32)[np.arange(256) % 10], np.empty_like(data[0])
    linear = nnx.Sequential(nnx.Linear(400, 10, rngs=nnx.Rngs(0)))

    def one_buffer():
        for x in data:
            buffer[:] = x
            yield buffer, y

    found = [mplp.fit(linear, each, RULE, 12, progress=False) for each in (one_buffer(), [(x, y) for x in data])]
    np.testing.assert_array_equal(found[0].losses, found[1].losses)


def recurrent(cell):
    rngs = nnx.Rngs(0)
    read = lambda x: x.reshape(x.shape[0], 6, 6)
    rnn = nnx.RNN(cell(6, 32, rngs=rngs), rngs=rngs)
    return nnx.Sequential(read, rnn, lambda x: x[:, -1], nnx.Linear(32, 3, rngs=rngs))


def convnet():
    rngs, pool = nnx.Rngs(0), lambda x: nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))
    first = lambda x: x.reshape(x.shape[0], 6, 6, 1), nnx.Conv(1, 4, (3, 3), rngs=rngs), jax.nn.relu, pool
    second = nnx.Conv(4, 8, (3, 3), rngs=rngs), jax.nn.relu, pool, lambda x: x.reshape(x.shape[0], -1)
    return nnx.Sequential(*first, *second, nnx.Linear(8, 3, rngs=rngs))


LAYERED = {
    "Elman's cell": ("sequences", lambda: recurrent(nnx.SimpleCell)),
    "gated units": ("sequences", lambda: recurrent(nnx.GRUCell)),
    "convolutions": ("convnets", convnet),
}


@cases("named", LAYERED, long=["Elman's cell", "gated units"])
def test_rules_for_other_networks_whose_card_says_how_places_are_named(named):
    name, make = named
    x = jax.random.normal(jax.random.key(0), (16, 36))
    batch = x, jax.nn.one_hot(jnp.argmax(x[:, 3:6], axis=1), 3)
    fitted = mplp.fit(make(), itertools.repeat(batch), name, 20, held_out=batch, every=20, progress=False)
    assert fitted.held_out[1] < 0.5 * fitted.held_out[0]


def test_a_pretrained_rule_says_which_models_it_is_for():
    match = r"the rule 'image_mlp' is for MLPs, an nnx.Sequential of nnx.Linear.*function of"
    for part in (nnx.LayerNorm(2, rngs=nnx.Rngs(0)), nnx.Rngs(0)):
        refused(TypeError, match, mplp.fit, nnx.Sequential(*model().layers, part), BATCHES, "image_mlp", 2)


def test_a_rule_that_is_told_nothing_warns_of_more_updates_than_its_card_has():
    for steps in (20, 21):  # the error comes before anything is compiled
        with pytest.warns(UserWarning, match="at most 20 updates, got 21") if steps > 20 else contextlib.nullcontext():
            refused(TypeError, "the held-out set is a pair", fit, rule="image_mlp", steps=steps, held_out=X[0])


def test_fit_compares_the_network_with_the_model():
    calls = itertools.count()
    drifting = nnx.Sequential(lambda x: x + float(next(calls)), *model().layers)
    refused(ValueError, "something else than the model", mplp.fit, drifting, BATCHES, RULE, 1)


def test_fit_shows_a_bar(capsys):
    assert mplp.fit(model(), BATCHES, RULE, 2).held_out.size == 0
    assert "training: 100%" in capsys.readouterr().err


NO_DATA = [
    ({"steps": 7}, ValueError, "7 steps need as many minibatches, got 6.*cycle"),
    ({"data": []}, ValueError, "need as many minibatches, got 0"),
    ({"data": [BATCHES[0], (X[1, :2], Y[1, :2])]}, ValueError, r"minibatch 1 of float32\(2, 3\), float32\(2, 2\)"),
    ({"data": None}, TypeError, r"data are minibatches \(x, y\), .* got NoneType"),
    ({"data": [X[0]]}, TypeError, r"minibatch 0 is a pair \(x, y\)"),
    ({"held_out": X[0]}, TypeError, r"the held-out set is a pair \(x, y\)"),
    ({"data": [(X[0], np.array(["no", "yes"] * 4))]}, TypeError, r"minibatch 0 are arrays of numbers.*<U3.*one_hot"),
    ({"data": [(X[0], ["no", "yes"] * 4)]}, TypeError, "minibatch 0 are arrays of numbers.*list"),
    ({"data": [(X[0], 2 * Y[0] - 1)]}, ValueError, "minibatch 0 are from -1 to 1, with sums from 0 to 0.*one_hot"),
    ({"data": [BATCHES[0], (BATCHES[1][0], 0 * BATCHES[1][1])]}, ValueError, "minibatch 1 .*sums from 0 to 0"),
    ({"held_out": (X[0], Y[0] * np.nan), "loss": mplp.cross_entropy}, ValueError, "held-out set are from nan"),
    ({"data": [(X[0] * np.nan, Y[0])], "steps": 1}, FloatingPointError, "the loss of minibatch 0 is nan"),
    ({"data": [BATCHES[0], EXPLODES], "rule": "image_mlp", "steps": 2}, FloatingPointError, "parameters"),
    ({"held_out": (X[0] * np.nan, Y[0])}, FloatingPointError, "after 0 updates is nan. Look whether all"),
    ({"data": [(X[0] + 9, Y[0])], "rule": "image_mlp"}, ValueError, "standardized"),
    ({"steps": 0}, ValueError, "steps must be an integer of at least 1"),
    ({"every": 0}, ValueError, "every must be"),
    ({"rule": "image"}, ValueError, "no trained rule 'image'"),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_soft_targets_pass_in_every_precision(dtype):
    """Smoothed over many classes, and a softmax; what is refused comes after them."""
    hot, logits = np.eye(512)[:8], np.random.default_rng(0).normal(size=(8, 512))
    for y in (0.9 * hot + 0.1 / 512, np.exp(logits) / np.exp(logits).sum(1, keepdims=True)):
        refused(ValueError, r"targets of the prediction's shape", fit, [(X[0], jnp.asarray(y, dtype))])
    soft = lambda: jax.nn.softmax(jnp.asarray(logits, dtype))  # rounded thrice
    refused(ValueError, r"targets of the prediction's shape", fit, [(X[0], jax.jit(soft)())])


@pytest.mark.parametrize(("options", "error", "match"), NO_DATA)
def test_what_cannot_be_trained_on_is_refused(options, error, match):
    refused(error, match, fit, **options)
