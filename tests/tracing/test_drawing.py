"""Pictures of a trace: what is in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from apgrad.tracing._drawing import folded
from tests.refusals import refused


def loss(params):
    body = jax.named_scope("cell")(lambda h, x: (jnp.tanh(params["w"] * h + x), None))
    with jax.named_scope("rnn"):
        h, _ = jax.lax.scan(body, jnp.float32(0.5), jnp.array([0.0, 0.3]))
    with jax.named_scope("head"):
        return jax.jit(jax.nn.relu)(params["v"] * h) ** 2


@pytest.fixture(scope="module")
def trace():
    return ap.trace_gradients(loss)({"v": jnp.float32(2.0), "w": jnp.float32(0.9)})


def test_a_path_is_folded_by_scopes(trace):
    path = trace.path("w")
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
    with pytest.raises(ValueError, match="no gradient reaches x"):
        ap.tracing.draw(ap.trace_gradients(lambda x: 0.0 * x)(1.0), "x")
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
