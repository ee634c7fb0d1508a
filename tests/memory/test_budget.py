"""A budget is kept or refused, whatever the program and whatever is differentiated; and what takes more is named."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

import apgrad as ap
from apgrad._programs.jaxprs import restrict
from apgrad.memory import _randomize as randomize_module, _report as report_module
from apgrad.memory._budget import LADDER, _along_the_hull, allocate, relative_variance
from apgrad.memory._slots import Coefficient, kept_bytes
from tests.memory.unbiased import KEY, assert_exact, remembered

pytestmark = pytest.mark.quick

R = ap.memory
ARGS = jnp.eye(32), jnp.ones((64, 32))
layers = lambda number: lambda w, x: jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), [w] * number, x))
KINDS = ("dense", "cond", "scan", "scan of cond", "twice")


def step(kind, x, w):
    branch = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: jnp.sin(x @ w) * x, x)
    plain = {"dense": lambda x: jnp.tanh(x @ w), "twice": lambda x: jnp.sin((x @ w) * x) @ w, "cond": branch}
    if kind in plain:
        return plain[kind](x)
    body = branch if kind == "scan of cond" else lambda x: jax.nn.gelu(x @ w)
    return jax.lax.scan(lambda x, _: (body(x), None), x, length=3)[0]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=3), st.integers(2, 12))
def test_a_budget_is_kept_or_refused(program, parts):
    x = jnp.ones((64, 32))
    weights = [0.1 * jax.random.normal(jax.random.key(i), (32, 32)) for i in range(len(program))]

    def loss(*weights):
        h = x
        for (kind, _), w in zip(program, weights, strict=True):
            h = step(kind, h, w)
        return jnp.sum(h**2)

    chosen = [i for i, (_, differentiated) in enumerate(program) if differentiated]
    if not chosen:
        return
    function, some = restrict(loss, weights, chosen)
    budget = remembered(function, *some) // parts
    random, _ = restrict(functools.partial(ap.randomize(loss, budget_bytes=budget), KEY), weights, chosen)
    try:
        used = remembered(random, *some)
    except ValueError as error:
        assert "cannot be kept" in str(error)
    else:
        assert used <= budget


def test_of_samplers_those_on_the_lower_convex_hull_are_taken():
    above, below = [(16, 0.0, None), (8, 5.0, "a"), (4, 6.0, "b")], [(16, 0.0, None), (8, 1.0, "a"), (4, 6.0, "b")]
    assert list(_along_the_hull(above)) == [(0.5, 12, "b")]
    assert list(_along_the_hull(below)) == [(0.125, 8, "a"), (1.25, 4, "b")]


def test_what_is_given_out_is_what_the_samplers_keep():
    found = [(Coefficient(f"{i}", (64, 32 * i), jnp.float32, i, 64 * 32 * i * 4, i == 2), "sampled") for i in (1, 2, 3)]
    choose, total, _ = allocate(found, 20_000)
    bytes_of = lambda c: c.count * kept_bytes("sampled", choose(c), jax.ShapeDtypeStruct(c.shape, c.dtype))
    assert total == sum(bytes_of(c) for c, _ in found) <= 20_000


def test_what_a_budget_expects_of_samplers_is_their_variance_on_normal_entries():
    x = jax.random.normal(KEY, (2**14,))
    error = lambda s, key: jnp.mean((s.restore(key, s.keep(key, x), x) - x) ** 2) / jnp.mean(x**2)
    keys = jax.random.split(KEY, 20)
    found = jax.jit(lambda keys: [jnp.mean(jax.vmap(lambda key, s=s: error(s, key))(keys)) for s in LADDER])(keys)
    for sampler, variance in zip(LADDER, found, strict=True):
        assert abs(float(variance) / relative_variance(sampler) - 1) < 0.1, sampler


def test_half_the_bytes_of_a_budget_cost_half_of_the_mantissa():
    """8 bits of all entries would save more, and have 13 times the noise."""
    coefficients = R.coefficients(layers(3), *ARGS)
    choose, _, _ = allocate(coefficients, sum(c.nbytes for c, _ in coefficients) / 2)
    assert {choose(c) for c, how in coefficients if how == "sampled"} == {R.narrow("bfloat16")}


def test_a_budget_traces_the_pullback_of_a_straight_line_once(monkeypatch):
    made: dict[str, list[int]] = {"linearized": [], "make_plan": []}
    for name, calls in made.items():
        inner = getattr(randomize_module, name)
        monkeypatch.setattr(randomize_module, name, lambda *a, f=inner, calls=calls: calls.append(1) or f(*a))
    jax.eval_shape(jax.grad(ap.randomize(layers(2), budget_bytes=4000), argnums=1), KEY, *ARGS)
    assert len(made["linearized"]) == 1 and len(made["make_plan"]) >= 2


def test_a_budget_of_a_bit_an_entry_is_kept():
    """A bit an entry has less noise than a sample of a sixteenth, and fewer bytes."""
    budget = remembered(layers(3), *ARGS, sampler=R.rounding(1))
    assert remembered(layers(3), *ARGS, budget_bytes=budget) <= budget


def test_a_budget_counts_the_words_of_a_key():
    budget, key = remembered(layers(2), *ARGS, sampler=R.rounding(8)), jax.random.key(0, impl="rbg")
    assert remembered(layers(2), *ARGS, budget_bytes=budget) == budget
    assert remembered(functools.partial(ap.randomize(layers(2), budget_bytes=budget), key), *ARGS) <= budget


def test_what_branches_share_is_given_out():
    args = 0.1 * jax.random.normal(KEY, (32, 32)), jnp.ones((512, 32))

    def loss(w, x):
        for _ in range(2):
            x = jax.lax.switch((x[0, 0] > 0).astype(int), [lambda x, f=f: f(x @ w) @ w for f in (jnp.tanh, jnp.sin)], x)
        return jnp.sum(x**2)

    budget = remembered(loss, *args, sampler=R.rounding(32)) // 2
    assert 0.7 * budget < remembered(loss, *args, budget_bytes=budget) <= budget


@pytest.mark.parametrize("kind", ["cond", "scan of cond"])
def test_operands_that_are_kept_anyway_stay_outside_of_branches(kind):
    w, x = 0.1 * jax.random.normal(KEY, (128, 128)), jnp.ones((4, 128))
    loss = lambda w, x: jnp.sum(step(kind, x, w))
    if jax.__version_info__ < (0, 12):  # later versions keep the weight of a cond in a scan outside by themselves
        assert remembered(loss, w, x) > w.nbytes or kind == "cond"
    assert remembered(loss, w, x, sampler=R.rounding(8)) < w.nbytes / 2
    assert_exact(ap.randomize(loss, R.rounding(32)), loss, w, x, argnums=(0, 1))


def test_a_report_compiles_a_function_once_and_says_where_its_arrays_are_made(monkeypatch):
    compiled, temp_bytes = [], report_module.temp_bytes
    monkeypatch.setattr(report_module, "temp_bytes", lambda *a: compiled.append(a) or temp_bytes(*a))

    def body(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    def loss(weights, x):
        with jax.named_scope("network"):
            x = jax.lax.scan(body, x, weights)[0]
        with jax.named_scope("head"):
            return jnp.sum(jnp.sin(x))

    report = ap.memory_report(loss, jnp.ones((5, 16, 16)), jnp.ones((8, 16)))
    assert len(compiled) == 1 and list(report.rows) == ["reverse mode"]
    stacked = [r for r in report.rows["reverse mode"].residuals if r.count == 5]
    # The states that the steps begin with, and the derivative of the hyperbolic tangent.
    assert {r.name.split("/")[0] for r in stacked} == {"network"} and any("/layer/" in r.name for r in stacked)
    assert all("test_budget.py" in r.source and r.shape[0] == 5 for r in stacked)
    assert sum(report.scopes().values()) == sum(r.nbytes for r in report.rows["reverse mode"].residuals)
    assert report.scopes(1)["network"] == sum(r.nbytes for r in stacked)
    assert all(words in str(report) for words in ("5 steps", "by scope", report_module.compiled_note()))


@pytest.mark.parametrize("more, loud", [(1, False), (2, True)])
def test_a_report_is_silent_of_less_than_a_hundredth(more, loud, monkeypatch):
    """Reverse mode remembers 200 floats; a variant that remembers 201 is not worth a word, one of 202 is."""
    monkeypatch.setattr(report_module, "temp_bytes", lambda *_: 1000)
    sines = lambda x: jnp.sum(jnp.sin(x[:200]))
    variant = lambda x: sines(x) + jnp.sum(jnp.sin(x[200 : 200 + more]))
    warned = pytest.warns(UserWarning, match="more memory than plain reverse mode: 'variant' remembers")
    with warned if loud else contextlib.nullcontext():
        report = ap.memory_report(sines, jnp.ones(300), variants={"variant": variant})
    assert report.rows["variant"].residual_bytes - report.rows["reverse mode"].residual_bytes == 4 * more
    assert ("MORE MEMORY" in str(report)) == loud
