"""The normalized rule against its formulas, in float64: scale does not count, steps have a length and an end."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import apgrad as ap
from apgrad import mplp
from tests.cases import cases
from tests.mplp.graphs import first_step, jiggle
from tests.refusals import refused


def made(batch=6, sizes=(4, 5, 3), activation=jnp.tanh, **options):
    network, prior = ap.meta.mlp(sizes, activation, mplp.softmax_cross_entropy, deviation=None)
    params = prior(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (batch, sizes[0]), float)
    data = x, jax.nn.one_hot(jnp.arange(batch) % sizes[-1], sizes[-1], dtype=float)
    small = {"message_size": 3, "rank": 2, "hidden": 4, **options}
    return network, params, data, mplp.Normalized(mplp.sites(network, params, data), rngs=nnx.Rngs(0), **small)


def alone(loss, x, y, *layers):
    """A network, and a rule that has nothing but its gradient."""
    network, params = mplp.from_nnx(nnx.Sequential(*layers), loss)
    params = jax.tree.map(lambda w: w.astype(float), params)
    return network, params, (x, y), gradient_alone(network, params, (x, y))


def gradient_alone(*network):
    return mplp.Normalized(mplp.sites(*network), message_size=0, whiten=False, rngs=nnx.Rngs(0))


def recurrent(cell):
    """A recurrent network, whose parameters are used at each of four steps."""
    rngs = nnx.Rngs(0)
    layers = nnx.RNN(cell(3, 5, rngs=rngs), rngs=rngs), lambda x: x[:, -1], nnx.Linear(5, 2, rngs=rngs)
    y = jax.nn.one_hot(jnp.arange(6) % 2, 2, dtype=float)
    return alone(mplp.softmax_cross_entropy, jax.random.normal(jax.random.key(1), (6, 4, 3), float), y, *layers)


def positions():
    """A bias and a scale at three positions, after an embedding of tokens that pull both ways."""
    tokens, y = jnp.array([[0, 1, 2], [1, 1, 0]]), jax.random.normal(jax.random.key(0), (2, 3, 3), float)
    layers = nnx.Embed(4, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(3, rngs=nnx.Rngs(0))
    return alone(mplp.squared_error, tokens, y, *layers)


ALONE = {
    "perceptron": lambda: made(message_size=0, whiten=False),
    "embedding, scale, bias": positions,
    "Elman's cell": lambda: recurrent(nnx.SimpleCell),
    "gated units": lambda: recurrent(nnx.GRUCell),
}


@cases("make", ALONE, long=["Elman's cell", "gated units"])
def test_the_gradient_alone_is_averaged_and_normalized(x64, make):
    """Of a parameter that is used in many steps or at many positions, the gradient as a whole."""
    network, params, batch, rule = make()

    @jax.jit
    def run(rule, params):
        state, found = mplp.init_state(rule, network, params, batch), []
        for _ in range(3):
            updates, state, _ = mplp.backward(rule, network, params, state, batch)
            found.append((jax.grad(network.mean_loss)(params, batch), updates))
            params = jax.tree.map(jnp.add, params, updates)
        return found

    average, rate, bias_rate = {}, np.exp(-2.3), np.exp(-2.3 - 1.5)
    for t, (gradient, updates) in enumerate(run(rule.for_steps(10), params)):
        leaves = jax.tree_util.tree_leaves_with_path(gradient)
        for (path, g), update in zip(leaves, jax.tree.leaves(updates), strict=True):
            average[path] = 0.5 * average.get(path, 0.0) + 0.5 * np.asarray(g)
            direction = average[path] / np.sqrt(np.mean(average[path] ** 2))
            length = rate / np.sqrt(g.shape[0]) if g.ndim == 2 else rate if "normalize" in str(path) else bias_rate
            np.testing.assert_allclose(update, -length * (1 - t / 10) * direction, rtol=1e-9, atol=1e-12)


def test_a_step_is_one_however_a_parameter_is_used(x64):
    """Positions that a reshape joins to the batch, and a kernel that is shared, with names of one role."""
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 3, 2), float), jnp.zeros((2, 4, 3, 3), float)
    params = {"kernel": jax.random.normal(jax.random.key(1), (3, 3, 2, 3), float), "gain": jnp.arange(1.0, 4.0)}

    def updates(other):
        def network(places, p, batch):
            share = lambda name, w: mplp.shared(places[name], w) if other else w
            gain, kernel = share("w0", p["gain"]), share("w1", p["kernel"])
            s = mplp.conv(places["conv"], places.signal(batch[0]), kernel)
            s = mplp.wire(lambda x: x.reshape(-1, 3), s) if other else s
            s = mplp.scale(places["scale"], mplp.bias(places["bias"], s, p["shift"]), gain)
            return mplp.squared_error(places["loss"], s, batch[1].reshape(s.value.shape))

        rule = gradient_alone(network, start, (x, y))
        return first_step(rule, network, start, (x, y))[0]

    start = params | {"shift": jnp.zeros(3, float)}
    plain, others = jax.jit(lambda: [updates(other) for other in (False, True)])()
    plain["gain"] *= np.exp(-1.5)  # shared, a vector has the step of a dense node's bias
    chex.assert_trees_all_close(others, plain, rtol=1e-9)


def test_shared_parameters_of_any_node(x64):
    """Bias, scale and embedding in a scan; what is shared is so as a whole, with the batch size of inputs to come."""
    tokens, rate = jnp.array([[0, 2, 1], [1, 1, 0]]), np.exp(-2.3 - 1.5)
    params = {"table": jnp.eye(3, dtype=float), "gain": jnp.ones(3, float), "shift": jnp.zeros(3, float)}

    def network(places, p, batch):
        shared = {name: mplp.shared(places["all"].within(name), w) for name, w in p.items()}

        def step(h, x):
            h = mplp.wire(jnp.add, h, mplp.embedding(places["look"], x, shared["table"]))
            h = mplp.bias(places["shift"], mplp.scale(places["gain"], h, shared["gain"]), shared["shift"])
            return mplp.activation(places["tanh"], jnp.tanh, h), None

        h, _ = jax.lax.scan(step, places.signal(jnp.zeros((2, 3))), batch[0].T)
        return mplp.squared_error(places["loss"], h, batch[1])

    class Told(mplp.Normalized):
        def at(self, site):
            told[site.name] = site.batch
            return super().at(site)

    batch, told = (tokens, jnp.arange(6.0).reshape(2, 3)), {}
    rule = Told(mplp.sites(network, params, batch), message_size=0, rngs=nnx.Rngs(0))
    updates = jax.jit(lambda: first_step(rule, network, params, batch)[0])()
    assert {site.batch for site in mplp.sites(network, params, batch)} == set(told.values()) == {2}
    loss = lambda p: jnp.mean(network(mplp.Places(), jax.tree.map(mplp.parameter, p), batch))
    gradient = jax.jit(jax.grad(loss))(params)
    for name, g in gradient.items():
        length = np.exp(-2.3) / np.sqrt(3) if name == "table" else rate
        np.testing.assert_allclose(updates[name], -length * g / np.sqrt(np.mean(g**2)), rtol=1e-9, atol=1e-12)
    shared = lambda places: mplp.shared(places["w"], mplp.parameter(jnp.eye(3)))
    places = mplp.Places(rule, forward=1)
    with pytest.raises(ValueError, match=r"both come from mplp\.shared or neither"):
        mplp.dense(places["fc"], places.signal(jnp.ones((2, 3))), shared(places), mplp.parameter(jnp.ones(3)))


def asked(place, **options):
    """A rule, a site of its network, and what the layer there asks."""
    network, params, (x, y), rule = made(**options)
    site = next(s for s in mplp.sites(network, params, (x, y)) if s.name == place)
    if place == "dense_out":
        x = jnp.tanh(x @ params["dense_in"]["kernel"])
    kernel, bias = (params[place][name] for name in ("kernel", "bias"))
    message = jax.random.normal(jax.random.key(2), (*x.shape[:1], *bias.shape, 3), float)
    return rule, site, mplp.Dense(message, message[..., 0], x, x @ kernel, weight=kernel, bias=bias)


def test_scales_of_inputs_and_messages_do_not_count(x64):
    rule, site, question = asked("dense_in")
    rule = jiggle(rule, 0.1)

    @jax.jit
    def ask(scale_x, scale_m):
        scaled = question._replace(message=scale_m * question.message, inputs=scale_x * question.inputs)
        return rule.at(site)(site, scaled, rule.init(site))

    one, other = ask(1.0, 1.0), ask(1e3, 1e4)
    chex.assert_trees_all_close((one.update, one.bias), (other.update, other.bias), rtol=1e-9)
    np.testing.assert_allclose(other.message, 1e4 * one.message, rtol=1e-9)


def test_corrections_fade_with_the_examples_seen(x64):
    """After t minibatches of B examples 1 / (1 + t B / 1000) of what the message has beside the exact one is left."""
    rule, site, question = asked("dense_out")
    rule = jiggle(rule, 0.1)
    for local in rule.places.values():
        local.controller.gain[...] *= 0.0  # so that the controllers give the same at every step
    exact = jnp.einsum("bj,ij,k->bik", question.gradient, question.weight, jnp.eye(3)[0])

    @jax.jit
    def corrections(count):
        return rule.at(site)(site, question, rule.init(site) | {"count": count}).message - exact

    first, later = corrections(0.0), corrections(250.0)
    assert float(jnp.abs(first).min()) > 1e-6
    np.testing.assert_allclose(first / later, 1 + 250 * 6 / 1000, rtol=1e-9)


@pytest.mark.parametrize(("settle", "left"), [(None, [1, 1, 1]), (20, [1, 1 / 2, 1 / 100])])
def test_what_a_controllers_network_says_fades_in_a_rule_that_is_made_so(x64, settle, left):
    """Its network says .3, so the logarithm of a step's length is .3 times what is left of that above its constant."""
    rule, site, question = asked("dense_in", settle=settle)
    controller = rule.places["dense_in"].controller
    controller.network.kernels[-1][...] *= 0.0
    controller.network.biases[-1][...] += 0.3

    @jax.jit
    def log_lengths(rule, times):
        steps = [rule.at(site)(site, question, rule.init(site) | {"count": t}).update for t in times]
        return jnp.stack([jnp.log(jnp.linalg.norm(step)) for step in steps])

    times = [jnp.asarray(t, float) for t in (0, 20, 1980)]
    constant = log_lengths(rule, times)
    controller.gain[...] += 1.0
    np.testing.assert_allclose((log_lengths(rule, times) - constant) / 0.3, left, rtol=1e-9)
    refused(ValueError, "settle must be an integer", made, settle=0)


def test_steps_get_shorter_until_the_horizon():
    network, params, data, rule = made(message_size=0)

    @jax.jit
    def lengths(rule):
        def step(carry, _):
            new, state, _ = mplp.inner_step(rule, network, *carry, data)
            return (new, state), jnp.linalg.norm(new["dense_in"]["kernel"] - carry[0]["dense_in"]["kernel"])

        state = mplp.init_state(rule, network, params, data)
        return jax.lax.scan(step, (params, state), None, length=6)[1]

    first = lengths(rule)[0]
    np.testing.assert_allclose(lengths(rule), jnp.full(6, first), rtol=1e-6)
    np.testing.assert_allclose(lengths(rule.for_steps(4)), first * jnp.array([1, 0.75, 0.5, 0.25, 0, 0]), rtol=1e-6)
    np.testing.assert_array_equal(lengths(rule.for_steps(jnp.asarray(4))), lengths(rule.for_steps(4)))


def test_steps_stay_finite_where_messages_are_rounding():
    network, params, (x, _), rule = made(message_size=0)
    p = jax.nn.softmax(network.predict(params, x))  # the loss's message is 0 at these targets
    updates = jax.jit(lambda rule: first_step(rule, network, params, (x, p))[0])(rule)
    assert all(bool(jnp.isfinite(u).all()) for u in jax.tree.leaves(updates))


by_role = functools.partial(mplp.Separable, share="role")


def test_places_of_one_role_that_ask_different_questions_are_refused():
    dense = mplp.Site("1", "dense", "dense", 2, (2, 3, 3))
    act = mplp.Site("1", "gate", "elementwise", 2, (2, 3), ("a",))
    pairs = [(dense, mplp.Site("2", "bias", "diagonal", 2, (2, 3))), (act, act._replace(name="2", features=("b",)))]
    for make, more in ((mplp.Normalized, [(dense, dense._replace(name="2", shared=True))]), (by_role, [])):
        for one, other in pairs + more:
            words = rf"the places '1' \({one.kind}\) and '2' \({other.kind}\) would share networks"
            refused(ValueError, words, make, [one, other], rngs=nnx.Rngs(0))
    table = mplp.Site("table", "embedding", "diagonal", 2, (2, 3))
    refused(ValueError, "'table' .* through mplp.shared", mplp.Normalized, [table], rngs=nnx.Rngs(0))


def test_a_layer_that_is_silent_has_a_finite_meta_gradient():
    """No update and no average: the derivative of their cosine was 0 / 0."""
    network, params, batch, rule = made(batch=2, activation=jax.nn.relu)
    params["dense_in"]["bias"] -= 100.0

    @jax.jit
    @jax.grad
    def gradient(rule):
        state = mplp.init_state(rule, network, params, batch)
        learned, _, _ = mplp.unroll(rule, network, params, state, jax.tree.map(lambda x: jnp.stack([x, x]), batch))
        return jnp.sum(jax.nn.log_softmax(network.predict(learned, batch[0]))[:, 0])

    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient(rule)))


def test_a_meta_gradient_at_predictions_of_zero(x64):
    """Of an output layer that begins at 0: what the loss shows of a prediction has a derivative there too."""
    network, prior = ap.meta.mlp((2, 1), [], mplp.squared_error, deviation=0.0)
    params, batch = prior(jax.random.key(0)), (jnp.arange(8.0).reshape(4, 2), jnp.arange(4.0)[:, None])
    options = {"message_size": 1, "rank": 1, "hidden": 2, "whiten": False}
    rule = jiggle(mplp.Normalized(mplp.sites(network, params, batch), rngs=nnx.Rngs(0), **options), 1.0)

    def after(c):
        moved = {"dense_out": params["dense_out"] | {"bias": c[None]}}
        updates, _, _ = first_step(rule, network, moved, batch)
        return network.mean_loss(jax.tree.map(jnp.add, moved, updates), batch)

    slope, (up, down) = jax.jit(lambda c: (jax.grad(after)(c), [after(c + h) for h in (1e-6, -1e-6)]))(jnp.zeros(()))
    np.testing.assert_allclose(slope, (up - down) / 2e-6, rtol=1e-6)
