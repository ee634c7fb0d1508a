"""Learned rules: exact where they should be, differentiable, indifferent to the order of a batch, clear in errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import apgrad as ap
from apgrad import mplp
from apgrad.mplp._protocol import Site
from apgrad.mplp.rules import _per_synapse as per_synapse_rule, _thesis as thesis_rule, _whitening as whitening
from tests.cases import cases
from tests.mplp.graphs import GRAPHS, close, first_step, jiggle, jit, mlp_params
from tests.refusals import refused

SMALL = {"message_size": 2, "hidden": 3, "layers": (6, 5)}


def per_synapse(sites, **options):
    return mplp.PerSynapse(sites, rngs=nnx.Rngs(0), **{**SMALL, **options})


def thesis(sites, **options):
    return mplp.Thesis(sites, message_size=2, hidden=6, rngs=nnx.Rngs(0), **options)


def separable(sites, **options):
    return mplp.Separable(sites, rngs=nnx.Rngs(0), **{"message_size": 3, "rank": 2, "hidden": 6, **options})


def normalized(sites, **options):
    small = {"message_size": 3, "rank": 2, "hidden": 6, **options}
    return mplp.Normalized(sites, rngs=nnx.Rngs(0), **small).for_steps(50)


RULES = {
    "exact": lambda sites: mplp.Exact(0.1),
    "gru": per_synapse,
    "gru, shared, gradient": functools.partial(per_synapse, share="all", gradient=True),
    "two grus": functools.partial(per_synapse, cell="two_grus"),
    "mlp": functools.partial(per_synapse, cell="mlp"),
    "thesis": functools.partial(thesis, learning_rate=0.1),
    "thesis, from descent": functools.partial(thesis, learning_rate=0.1, start="gradient_descent", batch_norm=False),
    "separable": separable,
    "separable, neurons": functools.partial(separable, neuron_state=3, share=True),
    "separable, whitening": functools.partial(separable, neuron_state=2, whiten=True),
    "separable, window": functools.partial(separable, whiten=True, full=1, window=8),
    "normalized": normalized,
}


def task(name="softmax, cross_entropy", dtype="float64", steps=5):
    """The network of a graph, its parameters, a batch of it, some batches, and its sites."""
    network, (params, batch) = GRAPHS[name].network, GRAPHS[name].make(dtype)
    grown = lambda x, i: x * (1 + 0.1 * i) if jnp.issubdtype(x.dtype, jnp.floating) else x
    batches = jax.tree.map(lambda x: jnp.stack([grown(x, i) for i in range(steps)]), batch)
    return network, params, batch, batches, mplp.sites(network, params, batch)


def check_meta_gradient(meta, *args, has_aux=False):
    """Along a random direction of all arguments, against central differences of two steps (Richardson)."""
    fitted = lambda path: ".standardizers" in jax.tree_util.keystr(path) and ".factor" not in jax.tree_util.keystr(path)
    rng = np.random.default_rng(0)
    draw = lambda path, x: rng.standard_normal(x.shape) * (not fitted(path) and "horizon" not in str(path))
    direction = jax.tree_util.tree_map_with_path(draw, args)
    norm = np.sqrt(sum(np.sum(d**2) for d in jax.tree.leaves(direction)))
    both = jit(jax.value_and_grad(meta, tuple(range(len(args))), has_aux))  # one program: compiling is dear
    at = lambda t: both(*jax.tree.map(lambda x, d: np.asarray(x) + t / norm * d, args, direction))
    value, gradients = at(0.0)
    assert not any(fitted(p) and np.any(g) for p, g in jax.tree_util.tree_leaves_with_path(gradients))
    gradient = sum(np.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradients, direction)), strict=True)) / norm
    loss = lambda t: at(t)[0][0] if has_aux else at(t)[0]
    difference = lambda h: (loss(h) - loss(-h)) / (2 * h)
    h = 3e-5  # within the distance to the nearest kink of a relu: at 1e-4 one rule has one
    numeric = (4 * difference(h / 2) - difference(h)) / 3
    assert abs(numeric) > 1e-8, "the test says nothing"
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6)
    return value


STARTS_ON = (
    "skip connection, fan-out, weight sharing",
    "convolution, pooling, positions",
    "normalisation, scale, bias",
    "embedding, recurrence through scan",
)
# Every rule on one graph, but "separable, whitening", which is part of "normalized"; and one rule on other graphs.
CHECKED = {name: (make, "softmax, cross_entropy", 5) for name, make in RULES.items() if name != "separable, whitening"}
of_graphs = functools.partial(separable, neuron_state=2, learning_rate=0.05)
OTHERS = ("fork (sum), two losses", "several inputs: a gate", *STARTS_ON[1:])
CHECKED |= {graph: (of_graphs, graph, 2) for graph in OTHERS}
QUICKLY = {"thesis", "normalized", "embedding, recurrence through scan"}


class TestMetaGradients:
    """With respect to the rule, the prior and the hidden state, through 5 steps, in float64."""

    @cases("checked", CHECKED, long=CHECKED.keys() - QUICKLY)
    def test_equal_finite_differences(self, checked, x64):
        make, graph, steps = checked
        network, params, batch, batches, sites = task(graph, steps=steps)
        rule = jiggle(make(sites))
        state = jiggle(mplp.init_state(rule, network, params, batch), 0.01)

        def meta(rule, params, state):
            remat = make is separable  # which makes a program longer
            params, state, metrics = mplp.unroll(rule, network, params, state, batches, remat=remat)
            squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(state))
            return jnp.mean(metrics["loss"]) + GRAPHS[graph].plain(params, batch) + 0.1 * squares

        check_meta_gradient(meta, rule, params, state)

    def test_where_a_state_is_used_twice_or_a_branch_is_not_taken(self, x64):
        """Of two tasks under `vmap`, in one of which the branch is taken now and then."""
        params, batch = mlp_params((3, 3, 3))("float64")

        def network(at, p, batch):
            x, y, which = batch
            twice = lambda s: mplp.dense(at["twice"], s, p["w0"], p["b0"])
            s = twice(mplp.activation(at["a"], jnp.tanh, twice(at.signal(x))))
            left = lambda s: mplp.dense(at["left"], s, p["w1"], p["b1"])
            right = lambda s: mplp.activation(at["right"], jnp.sin, s)
            s = lax.cond(which > 0, left, right, s)
            return mplp.squared_error(at["loss"], s, y)

        batch = (*batch, jnp.asarray(1.0))
        rule = jiggle(per_synapse(mplp.sites(network, params, batch), layers=(3,)))
        state = jiggle(mplp.init_state(rule, network, params, batch), 0.01)

        def steps(rule, params, state, signs):
            batches = (*jax.tree.map(lambda x: jnp.stack([x] * 5), batch[:2]), signs)
            return mplp.unroll(rule, network, params, state, batches, remat=False)[:2]

        def meta(rule, params, state):
            signs = jnp.asarray([[1.0, -1, -1, 1, -1], [-1.0, -1, -1, -1, -1]])
            both = jax.vmap(functools.partial(steps, rule, params, state))(signs)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(both)), jax.tree.map(lambda x: x[1], both[1])

        _, got = check_meta_gradient(meta, rule, params, state, has_aux=True)
        jax.tree.map(np.testing.assert_array_equal, got["left"], state["left"])  # not taken: as it was
        assert jnp.max(jnp.abs(got["right"]["message"]["carry"] - state["right"]["message"]["carry"])) > 1e-4

    def test_a_state_used_twice_is_the_mean_of_both(self, x64):
        params, batch = mlp_params((3, 3, 3))("float64")

        def network(at, p, batch, names):
            x, y = batch
            s = mplp.dense(at[names[0]], at.signal(x), p["w0"], p["b0"])
            s = mplp.dense(at[names[1]], mplp.activation(at["a"], jnp.tanh, s), p["w0"], p["b0"])
            return mplp.squared_error(at["loss"], s, y)

        once, twice = (functools.partial(network, names=names) for names in (("d", "e"), ("d", "d")))
        rule = per_synapse(mplp.sites(once, params, batch), share="all")
        run = lambda network: first_step(rule, network, params, batch)
        (apart, states, _), (together, state, _) = jit(lambda: (run(once), run(twice)))()
        mean = jax.tree.map(lambda a, b: (a + b) / 2, states["d"], states["e"])
        close((together, state["d"]), (apart, mean), rtol=1e-12)


DESCENTS = {
    "thesis": functools.partial(thesis, start="gradient_descent", learning_rate=0.01),
    "separable": functools.partial(separable, learning_rate=0.01, neuron_state=2),
}


class TestStarts:
    @pytest.mark.parametrize("name", DESCENTS)
    @pytest.mark.parametrize("graph", STARTS_ON)
    def test_as_gradient_descent_is_exact(self, name, graph, x64):
        network, params, batch, _, sites = task(graph)
        rule = DESCENTS[name](sites)

        @jit
        def both(params):
            updates, _, _ = first_step(rule, network, params, batch)
            return updates, jax.tree.map(lambda g: -0.01 * g, jax.grad(GRAPHS[graph].plain)(params, batch))

        close(*both(params), rtol=1e-11, atol=1e-11)

    def test_random_of_the_thesis_is_that_of_its_code(self):
        """Kernels and biases uniform within 1 / sqrt(features), as those of `torch.nn.Linear`."""
        *_, sites = task(dtype="float32")
        rule = mplp.Thesis(sites, message_size=3, hidden=2000, rngs=nnx.Rngs(0))
        for network in rule.networks.values():
            for kernel, bias in zip(network.mlp.kernels, network.mlp.biases, strict=True):
                for drawn in (kernel[...], bias[...]):
                    scaled = np.ravel(drawn) * kernel.shape[0] ** 0.5
                    assert np.abs(scaled).max() <= 1
                    assert abs(np.mean(scaled)) < 4 * (1 / 3 / scaled.size) ** 0.5
                    # The variance of a square of U(-1, 1) is 4 / 45.
                    assert abs(np.mean(scaled**2) - 1 / 3) < 4 * (4 / 45 / scaled.size) ** 0.5


def test_ranks_may_be_strict():
    network, params, batch, _, sites = task(dtype="float32")
    signals = functools.partial(jax.tree.map, mplp.parameter)
    with jax.numpy_rank_promotion("raise"):
        for name in ("gru", "thesis", "separable, whitening"):
            jax.eval_shape(functools.partial(first_step, RULES[name](sites), network), params, batch)
        for graph in (GRAPHS["convolution, pooling, positions"], GRAPHS["normalisation, scale, bias"]):
            plain = lambda params, batch, graph=graph: graph.network(mplp.Places(), signals(params), batch)
            jax.eval_shape(plain, *graph.make(float))


ORDERED = ("gru", "mlp", "thesis", "separable, neurons", "separable, whitening", "separable, window")


@pytest.mark.parametrize("make", [RULES[name] for name in ORDERED], ids=ORDERED)
def test_the_order_of_the_batch_does_not_matter(make, x64):
    """An order of each step's own; only a rule that remembers each example has one that is kept."""
    network, params, batch, batches, sites = task()
    rule = jiggle(make(sites))
    state = mplp.init_state(rule, network, params, batch)
    run = jit(lambda batches: mplp.unroll(rule, network, params, state, batches)[0])
    seeds = [0] * 5 if make is per_synapse else range(5)
    orders = np.array([np.random.default_rng(seed).permutation(4) for seed in seeds])
    shuffled = jax.tree.map(lambda x: jax.vmap(lambda row, order: row[order])(x, orders), batches)
    close(run(shuffled), run(batches), rtol=1e-8, atol=1e-9)


def test_a_minibatch_that_is_given_twice_has_the_updates_of_one(x64):
    """An update is a mean over the batch."""
    network, params, batch, _, sites = task()
    rules = [jiggle(RULES[name](sites)) for name in ("thesis, from descent", "separable, neurons")]
    updates = lambda rule, batch: first_step(rule, network, params, batch)[0]
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    one, two = jit(lambda rules: [[updates(rule, b) for rule in rules] for b in (batch, twice)])(rules)
    close(one, two, rtol=1e-8, atol=1e-9)


def test_standardizers_are_of_the_first_steps(x64):
    """On one step by hand, as published with its fault, bounded, and half of it; whatever the places are called."""
    network, params, _, batches, sites = task()
    params |= {"b0": jnp.zeros(5), "b1": jnp.zeros(2)}
    new, first = per_synapse(sites), jax.tree.map(lambda x: x[:1], batches)
    others = [site._replace(name=f"{site.name}, again") for site in sites]
    others = per_synapse(others, share="all", layers=(3,), cell="mlp")

    @jit
    def run(rule):
        def fit(rule, batches, blend, bound):
            return mplp.fit_standardizers(rule, network, params, batches, blend=blend, max_scale=bound)

        each = jnp.asarray([1.0, 1.0, 0.5]), jnp.asarray([30.0, jnp.inf, 30.0])
        found = jax.vmap(fit, (None, None, 0, 0))(rule, batches, *each)
        bounded, published, half = (jax.tree.map(lambda x, i=i: x[i], found) for i in range(3))
        return bounded, published, half, fit(rule, first, 1.0, None), fit(others, batches, 1.0, None)

    bounded, published, half, one, shared = run(new)
    (x, y), w, got = jax.tree.map(lambda x: x[0], batches), params["w0"], one.standardizers["first/weight"]
    close(list(got.shift[1:]), [-jnp.mean(w), -jnp.mean(x)], rtol=1e-6)
    close(list(got.scale[1:]), [1 / jnp.std(w), 1 / jnp.std(x)], rtol=1e-6)
    close(one.standardizers["loss/message"].scale[2], 1 / jnp.std(y), rtol=1e-6)
    assert one.standardizers["first/bias"].scale[1] == 1  # the bias is 0: as published
    assert published.standardizers["first/bias"].scale[1] > 100
    assert max(jnp.max(s.scale[...]) for s in bounded.standardizers.values()) == 30
    scales = [each.standardizers["act/message"].scale[...] for each in (half, bounded)]
    close(scales[0], 0.5 + 0.5 * scales[1], rtol=1e-6)
    means = [each.standardizers["first/weight"].mean[...] for each in (half, bounded)]
    close(means[0], means[1] / 2, rtol=1e-6)
    assert new.standardizers["first/bias"].scale[1] == 1  # the rule that was given is as it was
    assert all(jnp.any(each.shift[...] != 0) for each in shared.standardizers.values())


def test_standardizers_leave_out_places_without_a_message():
    """Of a kind, those of the other places; of a kind without any, as they were. A shared parameter has none."""
    params = {name: jax.random.normal(jax.random.key(i), (3, 3)) for i, name in enumerate("ab")}

    def network(silent):
        def run(places, p, batch):
            s = places.signal(batch[0])
            main = mplp.dense(places["a"], s, mplp.shared(places["kernel"], p["a"]))
            side = mplp.dense(places["b"], s, p["b"])
            side = mplp.activation(places["tanh"], jnp.tanh, side)
            out = mplp.wire(lambda a, b: a + 0 * b, main, side) if silent else main
            return mplp.squared_error(places["loss"], out, batch[1])

        return run

    batches = jax.random.normal(jax.random.key(2), (2, 2, 4, 3))
    rule = per_synapse(mplp.sites(network(True), params, batches[:, 0]), share="all", layers=(3,), cell="mlp")
    fit = lambda rule, silent: mplp.fit_standardizers(rule, network(silent), params, batches)
    got, wanted = jit(lambda rule: [fit(rule, silent).standardizers for silent in (True, False)])(rule)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)
    np.testing.assert_array_equal(got["activation/message"].scale[...], 1.0)

    def masked(order):  # the last of three steps has no message at any place
        weighed = lambda places, p, batch: network(False)(places, p, batch[0]) * batch[1]
        steps = jnp.asarray(order), jnp.array([1.0, 1.0, 0.0])
        return mplp.fit_standardizers(rule, weighed, params, (batches[steps[0] % 2], steps[1][steps[0]])).standardizers

    got, wanted = jit(lambda: [masked([0, 2, 1]), masked([0, 1])])()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


def test_standardizers_are_refused_where_there_are_none_or_by_a_wrong_number():
    network, params, _, batches, sites = task("squared_error", "float32", steps=2)
    fit = lambda rule, **options: mplp.fit_standardizers(rule, network, params, batches, **options)
    refused(TypeError, "PerSynapse has standardizers to fit, got Separable", fit, separable(sites))
    rule = per_synapse(sites, layers=(3,), cell="mlp")
    none = jax.tree.map(lambda x: x[:0], batches)
    refused(ValueError, "stacked along.*at least one", mplp.fit_standardizers, rule, network, params, none)
    for bad in (-1, 3, float("nan")):
        refused(ValueError, r"blend must be in \[0, 1\], got", fit, rule, blend=bad)
    for bad in (-2, 0, float("nan")):
        refused(ValueError, "max_scale must be above 0, or None", fit, rule, max_scale=bad)


def test_batch_norm_is_safe_at_zero_variance():
    norm, varying = thesis_rule.BatchNorm(3), jnp.arange(5.0)

    @jit
    def run(c):
        parts = lambda c: [jnp.full((4, 1, 1), c), jnp.stack([varying, jnp.full(5, c)], axis=-1)]
        gradient = jax.grad(lambda c: sum(jnp.sum(p**2) for p in norm(*parts(c))))(c)
        return norm(*parts(c)), gradient, norm(jnp.ones((1, 3)))

    (constant, pair), gradient, single = run(0.3)
    rows = np.tile(varying, 4)
    np.testing.assert_allclose(pair[:, 0], (np.arange(5.0) - rows.mean()) / np.std(rows, ddof=1), rtol=1e-5)
    np.testing.assert_allclose([jnp.max(jnp.abs(constant)), jnp.max(jnp.abs(pair[:, 1]))], 0, atol=1e-3)
    assert jnp.isfinite(gradient) and jnp.all(jnp.isfinite(single[0]))


class TestWhitening:
    @pytest.mark.parametrize(("rows", "full", "window", "steps"), [(4, 99, 0, 20), (4, 1, 11, 5), (20, 99, 0, 2)])
    def test_is_recursive_least_squares(self, rows, full, window, steps, x64):
        """P = (I + lambda sum x x^T / N)^-1: full exactly, also of more rows than inputs; or of whole minibatches that
        the window has room for.
        """
        state = whitening.init(Site("d", "dense", "dense", 4, (rows, 7, 3)), full, window)
        assert not window or state["rows"].shape == (8, 7)
        grams = []
        for x in jax.random.normal(jax.random.key(0), (steps, rows, 7)):
            grams = [*grams, 0.5 * x.T @ x / (7 * jnp.mean(x**2))][-(window // rows) :]
            got, state = whitening.whiten(x, state, jnp.asarray(0.5), jnp.asarray(0.0))
            np.testing.assert_allclose(got, x @ jnp.linalg.inv(jnp.eye(7) + sum(grams)), rtol=1e-9, atol=1e-12)

    def test_a_window_of_a_minibatch_that_repeats(self):
        """Which makes the Gram matrix singular: as many steps with one minibatch are one with a larger lambda."""
        x = jax.random.normal(jax.random.key(0), (8, 100))
        start = whitening.init(Site("d", "dense", "dense", 8, (8, 100, 3)), 0, 64)
        again = lambda state, _: whitening.whiten(x, state, jnp.float32(30), jnp.float32(0))[::-1]
        _, found = jit(lambda state: lax.scan(again, state, length=8))(start)
        scaled = np.asarray(x, np.float64) / np.sqrt(100 * np.mean(np.square(x, dtype=np.float64)))
        wanted = x @ np.linalg.inv(np.eye(100) + 8 * 30 * scaled.T @ scaled)
        np.testing.assert_allclose(found[-1], wanted, atol=1e-3 * np.abs(wanted).max())

    def test_stays_between_zero_and_the_identity_for_long(self):
        """Symmetric and between 0 and I in float32, and alive, after ten thousand steps of correlated inputs."""
        mix = jax.random.normal(jax.random.key(1), (30, 30)) ** 3

        def step(state, key):
            x = jax.random.normal(key, (8, 30)) @ mix
            return whitening.whiten(x, state, jnp.float32(3.0), jnp.float32(1e-3))[1], None

        start = whitening.init(Site("d", "dense", "dense", 8, (8, 30, 3)), 99, 0)
        state, _ = jit(lambda s, k: lax.scan(step, s, k))(start, jax.random.split(jax.random.key(0), 10_000))
        P = np.asarray(state["P"], np.float64)
        np.testing.assert_allclose(P, P.T, atol=1e-5)
        values = np.linalg.eigvalsh((P + P.T) / 2)
        assert values.min() > -1e-5 and values.max() < 1 + 1e-5 and values.max() > 1e-4


def backward(rule, network):
    """To be called with parameters, a state and a batch, which may be shapes."""
    return functools.partial(jax.eval_shape, functools.partial(mplp.backward, rule, network))


squared = functools.partial(task, "squared_error", "float32")


def test_a_rule_or_a_state_of_another_network_is_refused():
    """Naming both sides."""
    network, params, batch, _, sites = squared()
    other = GRAPHS["fork (sum), two losses"]
    for rule in (per_synapse(sites), separable(sites)):
        words = r"not made for '1' \(dense.* nearest of its 4 places are .*'first' \(dense"
        refused(ValueError, words, mplp.init_state, rule, other.network, *other.make("float32"))
    words = r"made for the loss squared_error, got 'loss' \(absolute_error"
    refused(ValueError, words, mplp.init_state, thesis(sites), GRAPHS["absolute_error"].network, params, batch)
    rule = per_synapse(sites)
    state = jax.eval_shape(functools.partial(mplp.init_state, rule, network), params, batch)
    short = jax.tree.map(lambda x: x[:3], batch)
    without = {name: s for name, s in state.items() if name != "act"}
    for wrong, given, match in (
        (state, short, r"'first' .*batch 3.*\(3, 3, 5, 6\).*got .*\(4, 3, 5, 6\).*init_state"),
        (without, batch, r"the place 'act', of which the state has nothing; did you mean 'first'"),
        (state | {"more": ()}, batch, r"state has the places \['more'\], the network has only"),
    ):
        refused(ValueError, match, backward(rule, network), params, wrong, given)
    refused(TypeError, "state is a dictionary.* got NoneType", backward(rule, network), params, None, batch)


EMPTY = dict.fromkeys(("first", "act", "second", "loss"), ())  # a state of the network of `squared`


def test_a_network_that_does_not_fit_is_refused():
    network, params, batch, *_ = squared()
    right = mplp.Exact(0.1)
    refused(TypeError, "a network returns its loss", backward(right, lambda at, p, b: None), params, {}, batch)
    for metrics in ({"loss": jnp.zeros(())}, jnp.zeros(())):
        other = lambda *args, m=metrics: (network(*args), m)
        refused(ValueError, '"loss", which is the loss itself', backward(right, other), params, EMPTY, batch)
    words, integers = r"are floating point, and params\['w'\] has dtype int32", {"w": jnp.ones(2, jnp.int32)}
    refused(TypeError, words, backward(right, network), integers, {}, batch)


def test_a_rule_of_a_user_that_is_none_is_refused():
    network, params, batch, *_ = squared()
    answers = lambda found: lambda site: jax.tree_util.Partial(lambda site, question, state: found)
    small = answers(mplp.Answer(jnp.ones(4), jnp.ones((3, 5)), jnp.ones(5)))
    more = answers(mplp.Answer(jnp.ones((4, 3, 1)), jnp.ones((3, 5)), jnp.ones(5), jnp.ones(2)))
    for at, words in (
        (answers(None), r"'first' .*an mplp\.Answer\(message, update, bias, state\), got NoneType"),
        (answers((1, 2)), "got a tuple of 2"),
        (more, r"the rule's new state at 'first' .* should be \(\), got"),
        (small, r"'first' .*message must have shape \(4, 3, 1\), got shape \(4,\)"),
        (lambda site: lambda *question: None, r"'first' .*callable pytree of arrays, got <function.*Partial"),
        (lambda site: None, "callable pytree of arrays, got None"),
    ):
        wrong = type("Wrong", (mplp.Exact,), {"at": lambda self, site, at=at: at(site)})(0.1)
        refused((TypeError, ValueError), words, backward(wrong, network), params, EMPTY, batch)

    class Without(nnx.Module):
        message_size = 1

    refused(TypeError, "and Without has no init and no at", mplp.init_state, Without(), network, params, batch)


def test_an_answer_of_another_dtype_is_converted_before_it_is_summed():
    class Half(mplp.Exact):
        def at(self, site):
            half = lambda answer: jax.tree.map(lambda x: x.astype(jnp.float16), answer)
            return jax.tree_util.Partial(lambda local, *question: half(local(*question)), super().at(site))

    def network(at, p, x):
        h = mplp.bias(at["bias"], mplp.conv(at["conv"], at.signal(x), p["w"]), p["b"])
        return mplp.squared_error(at["loss"], h, 0 * x)

    params, x = {"w": jnp.ones((3, 1, 1)), "b": jnp.zeros(1)}, jnp.full((4, 300, 1), 300.0)
    state = dict.fromkeys(("bias", "conv", "loss"), ())
    rules = mplp.Exact(1.0), Half(1.0)
    found = jit(lambda: [mplp.backward(rule, network, params, state, x)[0]["b"] for rule in rules])()
    np.testing.assert_allclose(*found, rtol=1e-3)


X, W = jnp.ones((4, 3)), mplp.parameter(jnp.ones((3, 2)))
S = lambda at, x=X: at.signal(x)
dense = lambda at, s, *parameters: mplp.dense(at["d"], s, *parameters)
embedding = lambda at, n: mplp.embedding(at[f"e{n}"], jnp.zeros(n, int), W)
cross_entropy = lambda at, labels: mplp.softmax_cross_entropy(at["l"], S(at), labels)
tanh = lambda at: mplp.activation(at["d"], jnp.tanh, S(at))
ARRAY = r"takes a signal, got an array of shape \(4, 3\).*places.signal\(x\)"
CLASSES = r"two classes or more.*\(4,\).*squared_error.*two outputs"
NODES = [
    (lambda at: mplp.readout(at["l"], X), ARRAY),
    (lambda at: mplp.squared_error(at["l"], X, X), ARRAY),
    (lambda at: mplp.activation(at["l"], jnp.multiply, S(at), X), ARRAY),
    (lambda at: mplp.wire(jnp.tanh, X), ARRAY),
    (lambda at: mplp.fork(X, 2), ARRAY),
    (lambda at: mplp.conv(at["l"], X, W), ARRAY),
    (lambda at: mplp.mean_pool(at["l"], 2), r"mean_pool takes a signal, got Place.* mplp\.mean_pool take none"),
    (lambda at: mplp.wire(jnp.zeros), "mplp.wire takes at least one signal, got none"),
    (lambda at: S(at, [[1, 2, 3]] * 4), r"floating point.*got int32\(4, 3\).*mplp.embedding"),
    *[(lambda at, x=x: S(at, x), "the batch as its first axis") for x in (jnp.ones((0, 3)), jnp.ones(()))],
    (lambda at: (S(at), S(at, X[:1])), r"its first input has 4 examples, this one, of shape \(1, 3\), has 1"),
    (lambda at: cross_entropy(at, jnp.arange(4)), r"float32\(4, 3\), got int32\(4,\).*one_hot\(labels, 3\)"),
    (lambda at: cross_entropy(at, jnp.ones((4, 3), int)), r"got int32\(4, 3\)\. .*target\.astype\(float\)"),
    (lambda at: mplp.squared_error(at["l"], S(at, X[:, :1]), X[:, 0]), r"\(4, 1\), got .*target\[\.\.\., None\]"),
    (lambda at: mplp.softmax_cross_entropy(at["l"], S(at, X[:, :1]), X), r"\(4, 1\).*two outputs.*mplp.readout"),
    (lambda at: mplp.cross_entropy(at["l"], S(at, X[:, 0]), X[:, 0]), CLASSES),
    (lambda at: mplp.embedding(at["e"], [1.0, 1.0], W), "embedding takes integers"),
    (lambda at: mplp.embedding(at["e"], jnp.zeros(4, int), W.value), "with their ports"),
    (lambda at: mplp.shared(at["w"], W.value), "with their ports"),
    (lambda at: mplp.conv(at["c"], S(at), W), r"one to three space axes, got a signal of shape \(4, 3\)"),
    (lambda at: mplp.scale(at["s"], S(at), W), r"the scale node 's' needs a parameter of 1 axes, got \(3, 2\)"),
    (lambda at: [embedding(at, n) for n in (4, 3)], r"first input has 4 examples, 'e3', of shape \(3,\).*positions"),
    (lambda at: dense(at, ap.Signal.of(X, 3), W), r"messages of size 1, .*\(4, 3, 1\); got \(4, 3, 3\)"),
    (lambda at: dense(at, S(at), W.value), r"with their ports.*mplp.parameter"),
    (lambda at: dense(at, S(at, X[:, :2]), W), r"\(3, 2\), so its input must be \(batch, ..., 3\); got \(4, 2\)"),
    (lambda at: dense(at, S(at), W, mplp.parameter(X[0])), r"bias at 'd' must have shape \(2,\)"),
    (lambda at: mplp.max_pool(at["p"], S(at), (2,)), "the window of pooling needs a positive integer"),
    (lambda at: dense(at, tanh(at), W), r"'d' is used by two nodes that differ: 'd' \(activation.*place\.within"),
    (lambda at: S(at) * X, r"a Signal has no arithmetic.*mplp\.wire\(jnp\.add, a, b\)"),
    (lambda at: S(at) @ X.T, "a Signal has no arithmetic"),
    (lambda at: S(at) + S(at), "a Signal has no arithmetic"),
    (lambda at: W + W, "a Parameter has no arithmetic"),
    (lambda at: X @ W, "a Parameter has no arithmetic"),
    (lambda at: 2.0 * W + W, r"a Parameter has no arithmetic.*mplp\.dense"),
]


def test_nodes_say_what_they_take():
    for call, match in NODES:
        refused((TypeError, ValueError), match, call, mplp.Places(mplp.Exact(0.1)))


def test_a_zero_message_changes_nothing():
    """An example of weight zero, in a rule that would answer silence with something."""
    network, params, batch, _, sites = squared()
    silent, rule = lambda at, p, b: 0.0 * network(at, p, b), per_synapse(sites)
    state = jiggle(jit(lambda: mplp.init_state(rule, silent, params, batch))())
    updates, new, _ = jit(lambda state: mplp.backward(rule, silent, params, state, batch))(state)
    assert all(not jnp.any(u) for u in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, new, state)


CHUNKED = {
    "per synapse": (per_synapse_rule, functools.partial(per_synapse, hidden=1, layers=(3,)), "embedded positions", 24),
    "per synapse, images": (per_synapse_rule, functools.partial(per_synapse, hidden=1, layers=(3,)), STARTS_ON[1], 4),
    # Two rows of 4 x 5 synapses (with a bias) with 6 hidden units, and three of 6 x 2.
    "thesis": (thesis_rule, thesis, "squared_error", 6 * 2 * 4 * 5),
    "thesis, no batch norm": (thesis_rule, functools.partial(thesis, batch_norm=False), "squared_error", 6 * 2 * 4 * 5),
}


@cases("chunked", CHUNKED, long=["per synapse, images", "thesis, no batch norm"])
def test_chunks_are_the_whole(chunked, monkeypatch):
    """Of one row, and of several: updates, states, and the thesis's meta-gradient; batch norm stands over all rows."""
    module, make, graph, several = chunked
    network, params, batch, _, sites = task(graph, "float32")
    rule, found = make(sites), []
    # A recurrent state that is not zero.
    state = jax.tree.map(lambda x: x + 0.3, mplp.init_state(rule, network, params, batch))

    def outer(rule):
        updates, after, _ = mplp.backward(rule, network, params, state, batch)
        return sum(jnp.sum(jnp.sin(100 * u)) for u in jax.tree.leaves(updates)), (updates, after)

    measured = nnx.grad(outer, has_aux=True) if module is thesis_rule else outer
    for chunk in (10**9, 1, several):
        monkeypatch.setattr(module, "CHUNK", chunk)
        found.append(jit(lambda rule: measured(rule))(rule))
    (total, of_one_step), *others = found
    for parts in others:
        close(parts[0], total, rtol=1e-4, atol=1e-5)
        close(parts[1], of_one_step, rtol=1e-4, atol=1e-6)
    assert all(any(jnp.any(x != 0) for x in jax.tree.leaves(tree)) for tree in (total, of_one_step[0]))
