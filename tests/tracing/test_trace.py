"""Paths and influence: against Algorithm 1 transcribed, each other, and small cases by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from tests.compiled import listening
from tests.refusals import refused
from tests.tracing.models import FUNCTIONS, MODELS, derivatives, run


def algorithm_1(network, x):
    """The paper's Algorithm 1 on a graph of scalars: what gradient reaches each vertex, and over which edge most of it.

    Returns:
      For each input the product of the weights of the edges on its path, 0 where there is none.
    """
    root, edges = len(network) + 1, derivatives(network, x)
    g, most, path = [0.0] * root + [1.0], [0.0] * root + [1.0], [0.0] * root + [1.0]
    for v in range(root - 1, -1, -1):  # every vertex after those it feeds
        for end, start, w in edges:
            if start == v:
                g[v] += w * g[end]
                if abs(w * g[end]) > most[v]:  # of edges that bring the same, the first
                    most[v], path[v] = abs(w * g[end]), w * path[end]
    return path[:2]


@pytest.mark.parametrize("seed", [3, 13, 19])
def test_greedy_is_algorithm_1(seed):
    """On graphs on which both heaviest paths are others."""
    rng = np.random.default_rng(seed)
    drawn = lambda v: [(int(rng.integers(v)), float(rng.choice([-2.0, -1.0, 0.7, 1.5]))) for _ in range(3)]
    network, x = [(str(rng.choice(sorted(FUNCTIONS))), drawn(v)) for v in range(2, 9)], (0.4, -0.9)
    trace = ap.trace_gradients(lambda x: run(network, x)[-1])(jnp.array(x))
    weights = lambda kind: [np.prod([step.weight for step in trace.path("x", i, kind)]) for i in (0, 1)]
    np.testing.assert_allclose(weights("greedy"), algorithm_1(network, x), rtol=1e-5)
    assert np.all(1.1 * np.abs(weights("greedy")) < np.abs(weights("viterbi")))


def test_the_heaviest_paths_are_different_and_have_the_weights_of_top_k():
    loss, params = MODELS["control"]()
    trace = ap.trace_gradients(loss)(params)
    number = len(trace.parameters) - 1
    weights = jax.tree.leaves(jax.jit(ap.semiring_grad(loss, ap.tracing.top_k(3)))(params))[number]
    index = (1,) * (weights.ndim - 1)
    found = trace.paths(trace.parameters[number], index, 3)
    assert len(found) == 3 and len({str([s[:5] for s in path]) for path in found}) == 3
    np.testing.assert_allclose([np.prod([abs(s.weight) for s in path]) for path in found], weights[index], rtol=1e-4)
    assert found[0] == trace.path(trace.parameters[number], index) and found[0][-1].message == 1


@pytest.fixture(scope="module")
def mlp():
    loss, params = MODELS["mlp"]()
    return loss, params, ap.trace_gradients(loss)(params)


@pytest.mark.parametrize("kind", ["greedy", "viterbi"])
def test_influence_counts_the_paths(mlp, kind):
    _, params, trace = mlp
    found = trace.influence(kind)
    number = 0  # to which many paths lead, so that the heaviest one's weight is not the gradient
    leaf = jax.tree.leaves(params)[number]
    gradient = np.abs(jax.tree.leaves(trace.gradient)[number])
    paths = {index: trace.path(trace.parameters[number], index, kind) for index in np.ndindex(leaf.shape)}
    for i, component in enumerate(found.components):
        within = lambda s, component=component: s.scope == component or s.scope.startswith(component + "/")
        through = [index for index, path in paths.items() if any(map(within, path))]
        share = len(through) / sum(map(bool, paths.values()))
        np.testing.assert_allclose(found.share[i, number], share, atol=1e-6)
        weight = sum(gradient[index] for index in through) / gradient.sum()
        np.testing.assert_allclose(found.gradient[i, number], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "first"), [("greedy", "c"), ("viterbi", "a")])
@pytest.mark.quick
def test_ties_go_to_the_first_and_what_cancels_is_heavy_for_viterbi_alone(kind, first):
    summed = lambda x: jnp.sum(jnp.ones((20, 3)) @ x)
    cancelling = lambda x: (lambda s: 2.0 * s - 1.9 * s)(summed(x))
    scopes = {name: jax.named_scope(name)(cancelling if name in "ab" else summed) for name in "abcd"}
    trace = ap.trace_gradients(lambda x: sum(f(x) for f in scopes.values()))(jnp.ones((3, 2)))
    path = trace.path("x", (1, 1), kind)
    assert path[0].scope == first and path[0].index == (0, 1)
    assert path[0].message == pytest.approx({"greedy": 1, "viterbi": 2}[kind])
    assert trace.influence(kind).to_dict()["x"] == {name: name == first for name in scopes}


def test_influence_counts_more_elements_than_float16_has_numbers():
    def loss(w):
        parts = [jax.named_scope(name)(jnp.square)(x) for name, x in (("a", w[:42_000]), ("b", w[42_000:]))]
        return sum(jnp.sum(x, dtype=jnp.float32) for x in parts)

    found = jax.jit(lambda w: ap.tracing.influence(loss)(w))(jnp.ones(70_000, jnp.float16))
    np.testing.assert_allclose([found.share[:, 0], found.gradient[:, 0]], [[0.6, 0.4]] * 2, rtol=1e-6)


@pytest.mark.parametrize("kind", ["greedy", "viterbi"])
def test_influence_on_parameters_of_float64_and_float32(kind, x64):
    def loss(w, v):
        with jax.named_scope("sine"):
            s = jnp.sin(w)
        return jnp.sum(s * v.astype(s.dtype)) + 0.1 * jnp.sum(w)

    args = jnp.array([0.1, 1.5]), jnp.ones(2, jnp.float32)  # cos(1.5) < 0.1
    found = jax.jit(ap.tracing.influence(loss, kind, argnums=(0, 1)))(*args)
    assert found.share.dtype == jnp.float64 and found.share.tolist() == [[0.5, 0]]


@pytest.mark.quick
def test_influence_at_each_depth_is_folded_from_one_computation():
    scope = jax.named_scope

    def loss(w):
        with scope("a"):
            with scope("b"), scope("c"):
                deep = 3.0 * w
            with scope("b"):
                middle = jnp.array([4.0, 0.0, 0.0, 0.0]) * w
            shallow = jnp.array([0.0, 5.0, 0.0, 0.0]) * w
        with scope("d"):
            return jnp.sum(deep + middle + shallow + jnp.array([0.0, 0.0, 6.0, 0.0]) * w)

    trace = ap.trace_gradients(loss)(jnp.ones(4))
    wanted = {
        None: {"a": 0.75, "a/b": 0.5, "a/b/c": 0.25, "d": 1.0},
        1: {"a": 0.75, "d": 1.0},
        2: {"a/b": 0.5, "a": 0.25, "d": 1.0},
        3: {"a/b/c": 0.25, "a/b": 0.25, "a": 0.25, "d": 1.0},
        9: {"a/b/c": 0.25, "a/b": 0.25, "a": 0.25, "d": 1.0},
    }
    for depth, shares in wanted.items():
        found = trace.influence(depth=depth)
        assert found.to_dict()["x"] == shares and list(found.components) == list(shares)
    alone = ap.tracing.influence(loss, depth=3)(jnp.ones(4))
    assert alone.to_dict() == trace.influence(depth=3).to_dict() and alone.components == found.components


def test_influence_under_vmap_is_that_of_each_example():
    left, right = (jax.named_scope(name)(jnp.multiply) for name in ("left", "right"))
    loss = lambda w, x: jnp.sum(left(w, x[0]) + right(w, x[1]))
    x = jnp.array([[1.0, 2.0], [3.0, 1.0], [0.0, 0.0]])
    found = jax.vmap(ap.tracing.influence(loss), in_axes=(None, 0))(jnp.ones(2), x)
    np.testing.assert_array_equal(found.share[:, :, 0], [[0, 1], [1, 0], [np.nan, np.nan]])


def test_in_a_jitted_training_loop(mlp):
    loss, params, trace = mlp
    look = ap.tracing.every(3, ap.tracing.influence(loss, depth=2))

    @jax.jit
    def train(params):
        def step(params, i):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params)), look(i, params)

        return jax.lax.scan(step, params, jnp.arange(6))

    _, seen = train(params)
    traced = ~jnp.all(jnp.isnan(seen.share), axis=(1, 2))
    assert traced.tolist() == [True, False, False, True, False, False]
    both = jax.tree.map(lambda x: x[jnp.array([0, 3])], seen)  # means leave out what was not traced
    assert seen.to_dict() == both.to_dict() and str(seen) == str(both)
    alone = trace.influence(depth=2)
    np.testing.assert_allclose(seen.share[0], alone.share)
    assert seen.components == alone.components and "MLP/Dense_0" in seen.components


def test_errors():
    t, trace = ap.tracing, ap.trace_gradients(lambda x: jnp.sum(x))(jnp.ones(2))
    for called, error, words in (
        (lambda: t.influence(lambda x: x**2)(1.0), ValueError, "no named scopes"),
        (lambda: t.influence(sum, kind="best"), ValueError, "got 'best'"),  # pyright: ignore
        (lambda: t.influence(sum, depth=1.5), ValueError, "number of names.*got 1.5"),  # pyright: ignore
        (lambda: t.every(0, lambda: None), ValueError, "n of every must be"),
        (lambda: t.every(2, lambda x: jnp.argmax(x))(0, jnp.ones(2)), TypeError, "must return floats, got int32"),
        (lambda: trace.path("y"), ValueError, "no parameter 'y'; did you mean 'x'"),
        (lambda: trace.path("x", 2), IndexError, "no element"),
        (lambda: trace.path("x", 1.5), TypeError, "index must be an integer"),  # pyright: ignore
        (lambda: trace.paths("x", 0, 2.5), ValueError, "must be an integer"),  # pyright: ignore
        (lambda: jax.jit(ap.trace_gradients(lambda x: jnp.sum(x)))(1.0), TypeError, r"tracing.influence"),
    ):
        refused(error, words, called)


def test_an_element_whose_weight_is_no_number_has_no_path_that_is_the_heaviest():
    loss = lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))  # 0 times infinite at 0, a root of -1
    trace = ap.trace_gradients(jax.named_scope("root")(loss))(jnp.array([4.0, -1.0, 1.0]))
    for read in (lambda: trace.path("x", 1), lambda: trace.path("x", 1, "greedy"), lambda: trace.paths("x", 1)):
        refused(ValueError, "no heaviest path, because a derivative", read)
    for found in map(trace.influence, ("viterbi", "greedy")):
        assert jnp.isnan(found.share).all() and jnp.isnan(found.gradient).all()
    assert trace.path("x", np.int64(2)) == trace.path("x", (jnp.int32(-1),))


def test_the_paths_of_an_index_out_of_bounds_are_those_of_the_gradient():
    """An index is promised to be in bounds; where it is not, JAX clamps it on the way there or on the way back."""
    taken = lambda x: jnp.sum(x[jnp.array([5, 2, 0])] * jnp.array([7.0, 3.0, 5.0]))
    added = lambda x: jnp.zeros(2).at[jnp.array([0, 9, 9])].add(x, mode="promise_in_bounds")[1]
    for loss in (taken, added):
        trace = ap.trace_gradients(loss)(jnp.ones(3))
        np.testing.assert_array_equal(trace.weights, trace.gradient)
        for i, weight in enumerate(trace.weights.tolist()):
            assert [np.prod([s.weight for s in path]) for path in trace.paths("x", i, 3)] == [weight] * (weight > 0)


def test_there_may_be_fewer_paths_and_the_loss_itself_has_one_without_edges():
    traced = ap.trace_gradients(lambda x: 2.0 * x[0] + 0.0 * x[1])
    trace = traced(jnp.ones(2))
    assert len(trace.paths("x", 0)) == 1 and trace.paths("x", 1) == []
    with jax.disable_jit():
        assert traced(2 * jnp.ones(2)).paths("x", 0) == trace.paths("x", 0)
    assert ap.trace_gradients(lambda x, y: x)(1.0, 2.0).paths("x") == [[]]
    assert ap.trace_gradients(lambda x, y: x, argnums=1)(1.0, 2.0).paths("x") == []
    assert ap.trace_gradients(lambda x, y: y)({}, 2.0).gradient == {}


def test_a_second_point_of_equal_shapes_compiles_nothing_and_closures_may_change():
    scale = jnp.array([1.0, 2.0])

    def loss(params, x, labels):
        def step(h, w):
            with jax.named_scope("cell"):
                return jax.nn.relu(h @ w) * scale, None

        with jax.named_scope("rnn"):
            h, _ = jax.lax.scan(step, x, params["w"])
            h = h * 0.5
        return jnp.sum(jnp.take_along_axis(h, labels[:, None], 1))

    def seen(trace):
        paths = [trace.path("w", (0, 1, 1)), trace.path("w", (0, 1, 1), "greedy")]
        return trace.influence(), trace.influence(), trace.weights, trace.gradient, paths

    traces = ap.trace_gradients(loss)
    points = [({"w": jnp.full((2, 2, 2), s)}, jnp.full((3, 2), 0.3 * s), np.arange(3) % 2) for s in (0.5, 0.6)]
    seen(traces(*points[0]))
    with listening() as compiled:
        found = seen(traces(*points[1]))
        again = ap.trace_gradients(loss)(*points[0])  # nor does another tracer of the function
        shallow, deep = (again.influence(depth=depth) for depth in (1, 2))  # nor another depth
    assert not compiled
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found[3], jax.grad(loss)(*points[1]))
    np.testing.assert_array_equal(found[0].share, jax.jit(ap.tracing.influence(loss))(*points[1]).share)
    assert shallow.components == ("rnn",) and deep.components == ("rnn/cell", "rnn")
    np.testing.assert_allclose(np.prod([s.weight for s in found[4][0]]), found[2]["w"][0, 1, 1], rtol=1e-5)
    scale = jnp.array([3.0, 5.0])  # read again at each point
    np.testing.assert_allclose(traces(*points[1]).gradient["w"], jax.grad(loss)(*points[1])["w"], rtol=1e-5)


def test_an_array_that_python_looks_at_is_a_constant_of_the_program():
    def loss(w, times, x):
        for _ in range(int(times[0])):
            w = w * 2.0
        return jnp.sum(w * x)

    trace = ap.trace_gradients(loss)(jnp.ones(2), np.array([3]), 2.0)
    assert trace.weights.tolist() == [16, 16] and len(trace.path("x", 0)) == 5


def chain(x, m):
    """Three ways into 20 matrices [[a, b], [b, a]]: with a > b > 0 the heaviest path is by `second`, and in one row."""
    ways = {"first": 1.0, "second": 1.0625, "dead": 0.0}
    h = x[jnp.array([0, 1])]  # x[2] has no path
    h = sum(jax.named_scope(name)(jnp.multiply)(h, jnp.asarray(s, h.dtype)) for name, s in ways.items())
    with jax.named_scope("chain"):
        return jnp.sum(jax.lax.scan(lambda h, _: (m @ h, None), h, None, length=20)[0])


def test_influence_compares_weights_beyond_the_range_of_their_dtype():
    entries = {
        jnp.float32: [(1e-3, 5e-4), (1e-20, 1e-30), (1e3, 5e2), (0.7, 0.1), (0.0, 0.0)],
        jnp.bfloat16: [(1e-3, 5e-4), (0.2, 0.1), (1e3, 5e2)],
        jnp.float16: [(1e-3, 5e-4), (0.7, 0.5), (1e3, 5e2)],
    }
    matrices = [jnp.array([[[a, b], [b, a]] for a, b in pairs], dtype) for dtype, pairs in entries.items()]
    of_each = lambda m: jax.vmap(ap.tracing.influence(chain), (None, 0))(jnp.ones(3, m.dtype), m).share[:, :, 0]
    for pairs, found in zip(entries.values(), jax.jit(lambda ms: [of_each(m) for m in ms])(matrices), strict=True):
        np.testing.assert_array_equal(found, [[0, 1, 0, 1] if a else [np.nan] * 4 for a, _ in pairs])


def test_paths_compare_weights_beyond_the_range_of_their_dtype():
    traced = ap.trace_gradients(chain)
    for a, b in ((1e20, 1e19), (1e-3, 5e-4)):
        trace = traced(jnp.ones(3), jnp.array([[a, b], [b, a]]))
        found = trace.paths("x", 0, 3)
        logs = [sum(math.log(s.weight) for s in path) for path in found]
        heaviest = 20 * math.log(a) + math.log(1.0625)
        np.testing.assert_allclose(logs, [heaviest, 20 * math.log(a), heaviest + math.log(b / a)], rtol=1e-6)
        assert found[0] == trace.path("x", 0) and trace.paths("x", 2) == []
        assert [s.steps for s in found[0] if s.steps] == [(i,) for i in range(20)] and found[0][1].scope == "second"
        for path in found:  # the weight of the rest, as far as Python's numbers go
            rests = [math.prod(s.weight for s in path[i + 1 :]) for i in (0, 5, 20)]
            np.testing.assert_allclose([path[i].message for i in (0, 5, 20)], rests, rtol=1e-3)
    assert ap.tracing.draw(trace, "x", 1).axes[0].lines[0].get_xdata()[-1] == pytest.approx(1.0625e-60, rel=1e-5)


def test_a_path_through_a_vmapped_while_has_its_lanes_steps():
    loop = lambda x, bound: jax.lax.while_loop(lambda c: c < bound, lambda c: c * 1.5, x)
    loss = lambda x: jnp.sum(jax.vmap(loop, (0, None))(x, 4.0 + 0 * jnp.sum(x)))
    trace = ap.trace_gradients(loss)(jnp.array([0.5, 5.0, 2.0]))
    for lane, steps in enumerate((6, 0, 2)):
        path = trace.path("x", (lane,))
        assert [e.weight for e in path if e.primitive == "mul"] == [1.5] * steps
        np.testing.assert_allclose(np.prod([e.weight for e in path]), 1.5**steps, rtol=1e-6)
