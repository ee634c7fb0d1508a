"""What a newcomer meets first: figures where pyplot finds them, tables that fit, messages that name what is missing."""

import inspect
import sys

import jax
import jax.numpy as jnp
import pytest

import apgrad as ap
from tests.refusals import refused

pytest.importorskip("matplotlib", reason="figures are matplotlib's (the extra meta)")


def loss(params, x):
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params)
    return jnp.sum(h**2)


def test_a_figure_is_pyplots_where_pyplot_is_loaded(tmp_path):
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    plt.close("all")
    influence = ap.trace_gradients(loss)(jnp.ones((2, 2)), jnp.ones(2)).influence()
    figure = ap.tracing.heat_map(influence)
    assert plt.gcf() is figure
    assert influence.to_dict() == {"x": {"hidden": 1.0}}
    report = ap.memory_report(loss, jnp.ones((2, 2)), jnp.ones(2))
    assert report.plot().figure is plt.gcf() is not figure
    plt.close("all")


def test_a_report_names_what_is_kept_and_has_no_ratio_to_nothing():
    shapes = jnp.ones((64, 64)), jnp.ones((32, 64))
    report = ap.memory_report(loss, *shapes, variants={"checkpoint": jax.checkpoint(loss)})
    # Reverse mode keeps the value of tanh, and in newer versions of JAX 1 less its square.
    kept = "one_minus_square" if "one_minus_square" in str(jax.make_jaxpr(jax.grad(jnp.tanh))(0.5)) else "tanh"
    assert f"hidden/{kept}  float32[32, 64]  test_pictures.py:" in str(report)
    assert report.rows["checkpoint"].residual_bytes == 0
    row = next(line for line in str(report).splitlines() if line.startswith("checkpoint"))
    assert "-" in row and "e+" not in row and len(row) < 60


def test_the_signature_of_total_propagation_has_no_address():
    assert "0x" not in str(inspect.signature(ap.total_propagation))


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    ap.meta.data._load.cache_clear()  # other tests may have loaded the digits
    monkeypatch.setitem(sys.modules, "sklearn", None)
    refused(ImportError, 'the extra "meta"', ap.meta.data.load, "digits")
