"""Scopes: modules of NNX models get them, a residual add within one is warned of, and pictures are drawn by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import apgrad as ap
from apgrad.tracing._drawing import folded
from tests.refusals import refused


class Model(nnx.Module):
    def __init__(self, rngs):
        self.block = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), jnp.tanh, nnx.LayerNorm(3, rngs=rngs))
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block(x))


def test_named_modules_compute_the_same_in_scopes():
    model = Model(nnx.Rngs(0))
    named = ap.tracing.name_modules(model)
    x = jnp.arange(6.0).reshape(2, 3)
    assert jnp.array_equal(model(x), named(x))
    assert isinstance(named.head, nnx.Linear) and type(model.head) is nnx.Linear  # a copy
    graph, params = nnx.split(named)
    again = ap.tracing.name_modules(Model(nnx.Rngs(1)))
    assert nnx.split(again)[0] == graph  # jit compiles once for both
    loss = lambda params: jnp.sum(nnx.merge(graph, params)(x) ** 2)
    trace = ap.trace_gradients(loss)(params)
    assert trace.path("head/bias", 1) == trace.path("head/bias/value", (np.int64(1),))
    refused(ValueError, "no parameter 'head/bais'; did you mean 'head/bias' or 'head/kernel'", trace.path, "head/bais")
    found = trace.influence()
    assert set(found.components) == {"block", "block/layers_0", "block/layers_2", "head"}
    table = str(found).splitlines()  # more parameters than fit beside each other: a row for each
    assert len(table) == 1 + len(found.parameters) and max(map(len, table)) < 120
    assert found.to_dict()["head/bias"]["block"] == 0
    refused(TypeError, "takes a Flax NNX module, got function", ap.tracing.name_modules, lambda x: x)


def block(w, x, inside):
    with jax.named_scope("block"):
        branch = jnp.tanh(x @ w)
        if inside:
            return x + branch
    return x + branch


def test_a_residual_add_within_a_scope_is_a_warning_that_names_the_scope_and_another_sum_is_none():
    embed, body = jax.named_scope("embed")(jnp.matmul), jax.named_scope("body")

    def loss(params, x, inside, wrap):
        return jnp.sum(body(wrap(lambda w, x: block(w, x, inside)))(params[1], embed(x, params[0])) + 1.0)

    def in_scan(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (block(w, x, True), None), x @ params[0], params[1][None])[0])

    def influence(loss, depth=None):
        return jax.eval_shape(ap.tracing.influence(loss, depth=depth), [jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        with pytest.warns(UserWarning, match="'body', 'body/block': a scope adds what comes in.* Put the add outside"):
            influence(lambda params, x, wrap=wrap: loss(params, x, True, wrap))
        for depth, read in ((2, "read those of what is inside"), (1, "with depth=2 read those of what is inside")):
            with pytest.warns(UserWarning, match=f"influence: 'body': .* rows: {read}, 'body/block'"):
                influence(lambda params, x, wrap=wrap: loss(params, x, False, wrap), depth)
    with pytest.warns(UserWarning, match="'block': a scope") as found:
        influence(in_scan)
        trace = ap.trace_gradients(in_scan)([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))
        for depth in (1, 2):
            trace.influence(depth=depth)
    assert [w.filename for w in found] == [__file__] * 2  # once for the function, once for the trace
    # Branches, parameters and sums of branches, made there or elsewhere, are no residual adds: warnings are errors.
    dense = jax.named_scope("dense")(lambda params, x: x @ params[0] + params[0] + params[1])
    two = jax.named_scope("two")(lambda h, other: jnp.sin(h) + jnp.cos(h) + other)
    influence(lambda params, x: jnp.sum(block(params[0], two(dense(params, x), x @ params[1]), False)))


def test_the_scopes_of_einsum_are_not_shown():
    attention = jax.named_scope("attention")(lambda w, x: jax.vmap(lambda x: jnp.einsum("ij, kj -> ik", x, w))(x))
    out = jax.named_scope("out")(lambda scores: jnp.einsum("...ij->...", scores)[0])
    loss = lambda w, x: out(attention(w, x))
    trace = ap.trace_gradients(loss)(jnp.ones((3, 2)), jnp.ones((1, 4, 2)))
    assert trace.influence().components == ("attention", "out")
    assert {step.scope for step in trace.path("x", (0, 1))} == {"attention", "out"}


def loss(params):
    body = jax.named_scope("cell")(lambda h, x: (jnp.tanh(params["w"] * h + x), None))
    with jax.named_scope("rnn"):
        h, _ = jax.lax.scan(body, jnp.float32(0.5), jnp.array([0.0, 2.0, 0.3]))
    with jax.named_scope("head"):
        return jax.jit(jax.nn.relu)(params["v"] * h) ** 2


@pytest.fixture(scope="module")
def trace():
    return ap.trace_gradients(loss)({"v": jnp.float32(2.0), "w": jnp.float32(0.9)})


def test_a_path_has_the_steps_of_loops_and_is_folded_by_scopes(trace):
    path = trace.path("w")
    # After the large input tanh is flat: the path of w is by its last use.
    last_use = [(primitive, "rnn/cell", (2,)) for primitive in ("mul", "add", "tanh")]
    assert [(s.primitive, s.scope, s.steps) for s in path[:4]] == [*last_use, ("mul", "head", ())]
    assert [stop.scope for stop in folded(path, 2)] == ["rnn/cell", "head"]
    (stop, last) = folded(path, 1)
    assert stop.scope == "rnn" and {"mul", "tanh"} <= set(stop.primitives)
    np.testing.assert_allclose(last.weight, trace.weights["w"], rtol=1e-5)


def test_a_scope_has_a_row_for_each_visit():
    pytest.importorskip("matplotlib")

    def loss(w, v):
        for _ in range(3):
            w = jax.named_scope("a")(jnp.sin)(w)
            w = jax.named_scope("b")(jnp.multiply)(w, v)
        return w

    trace = ap.trace_gradients(loss, argnums=(0, 1))(0.5, 0.9)
    axes = ap.tracing.draw(trace, trace.parameters[0]).axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == [trace.parameters[0], *"ababab", "loss"]
    assert all(np.all(np.diff(line.get_ydata()) > 0) for line in axes.lines)


def test_figures_have_the_size_of_a_page_and_show_what_was_asked_for(trace):
    figures = pytest.importorskip("matplotlib.figure")
    shown = lambda *args, **options: ap.tracing.draw(trace, *args, **options).axes[0]
    (line,) = shown("v").lines
    assert line.get_label() == "v" and [t.get_text() for t in shown("v").get_yticklabels()] == ["v", "head", "loss"]
    refused(ValueError, "no parameter 'u'; did you mean 'w'", ap.tracing.draw, trace, "u")
    refused(ValueError, "no gradient reaches x", ap.tracing.draw, ap.trace_gradients(lambda x: 0.0 * x)(1.0), "x")
    influence = trace.influence(depth=1)
    assert isinstance(ap.tracing.heat_map(influence), figures.Figure)
    names = lambda what, n: tuple(f"block_{i // 3}/{what}_{i}/a long name" for i in range(n))
    shares = np.random.default_rng(0).random((40, 90))
    large = ap.tracing.Influence(shares, shares, names("at", 40), names("p", 90), "greedy")
    assert max(map(len, str(large).splitlines())) <= 100 and "components more: to_dict() has all" in str(large)
    assert ap.tracing.heat_map(large).axes[0].get_title().endswith("runs through: 12 of 40 components")
    shares[20:] = shares[19]  # alike
    shares[:12] = 1.0  # of these nothing is learned
    alike = ap.tracing.Influence(shares, shares, names("at", 40), names("p", 90), "greedy")
    drawn = ap.tracing.heat_map(alike).axes[0]
    assert alike.top(12).components == names("at", 20)[12:] and alike.top(40) is alike
    assert all(f"at_{i}/" not in str(alike) for i in (0, *range(20, 40)))
    assert [t.get_text().split("/")[1] for t in drawn.get_xticklabels()] == [f"at_{i}" for i in range(12, 20)]
    shares[:39] = 1.0
    assert "at_39" in str(ap.tracing.Influence(shares, shares, names("at", 40), names("p", 90), "greedy"))
    assert trace.influence(top=1).components == ("head",) == influence.top(1).components
    for figure in (ap.tracing.heat_map(large), ap.tracing.draw(trace, "w")):
        assert figure.get_size_inches()[0] <= 8 and figure.get_size_inches()[1] <= 11


def test_a_figure_is_pyplots_where_pyplot_is_loaded(trace):
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot as plt

    plt.close("all")
    figure = ap.tracing.heat_map(trace.influence())
    assert plt.gcf() is figure
    report = ap.memory_report(loss, {"v": jnp.float32(2.0), "w": jnp.float32(0.9)})
    assert report.plot().figure is plt.gcf() is not figure
    plt.close("all")
