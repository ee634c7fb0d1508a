"""Semiring backpropagation of whole programs: against `jax.grad`, all paths enumerated, and errors."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flax import nnx

import apgrad as ap
from apgrad import mplp
from apgrad._ground.port import port
from experiments.benchmarks.tracing import LOGARITHMS
from tests.cases import cases
from tests.expectations.programs import walk
from tests.refusals import refused
from tests.tracing.models import FUNCTIONS, KEY, MINE, MODELS, derivatives, numbers, plus, run, times


@cases("model", MODELS)
def test_the_sum_is_the_gradient(model):
    loss, params = model()
    gradients = jax.grad(loss), *(ap.semiring_grad(loss, semiring) for semiring in (ap.tracing.ordinary(), MINE))
    wanted, *found = map(jax.tree.leaves, jax.jit(lambda p: [gradient(p) for gradient in gradients])(params))
    scale = max(float(jnp.max(jnp.abs(g))) for g in wanted)
    for got in found:
        for x, y in zip(got, wanted, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * scale)


@st.composite
def networks(draw):
    weights = st.sampled_from([-2.0, -1.0, -0.7, 0.0, 0.3, 1.0, 1.5])  # equal ones make ties
    size = draw(st.integers(3, 9))
    edges = lambda v: st.lists(st.tuples(st.integers(0, v - 1), weights), min_size=1, max_size=4)
    return [(draw(st.sampled_from(sorted(FUNCTIONS))), draw(edges(v))) for v in range(2, size)]


def paths(network, x):
    """For each input the products of derivatives along all its paths."""
    products = [[] for _ in range(len(network) + 1)] + [[1.0]]
    for v, u, derivative in reversed(derivatives(network, x)):
        products[u] += [derivative * product for product in products[v]]
    return [np.array(products[i] or [0.0]) for i in (0, 1)]


@hypothesis.settings(max_examples=25, derandomize=True, deadline=None, database=None)
@hypothesis.given(networks(), st.tuples(*[st.sampled_from([-0.9, 0.4, 1.1])] * 2))
@pytest.mark.quick
def test_every_semiring_is_its_sum_over_all_paths(network, x):
    """Of random graphs, all paths enumerated; nothing is compiled but single operations."""
    t = ap.tracing
    names = ("ordinary", "max_product", "absolute_sum", "entropy")
    semirings = {n: getattr(t, n)() for n in names} | {"top_k": t.top_k(3), "log max_product": LOGARITHMS}
    of = lambda semiring: np.asarray(ap.semiring_grad(lambda x: run(network, x)[-1], semiring)(jnp.array(x)))
    got = {name: of(semiring) for name, semiring in semirings.items()}
    for i, products in enumerate(paths(network, x)):
        sizes = np.abs(products)
        share = sizes[sizes > 0] / max(sizes.sum(), 1e-30)
        top = np.sort(np.pad(sizes, (0, 3)))[::-1][:3]
        wanted = {"max_product": sizes.max(), "absolute_sum": sizes.sum(), "top_k": top}
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name][i], value, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(np.exp(got["log max_product"][i]), sizes.max(), rtol=5e-5, atol=1e-6)
        # A sum that cancels has the rounding of its terms.
        np.testing.assert_allclose(got["ordinary"][i], products.sum(), atol=2e-5 * max(sizes.sum(), 1e-3))
        np.testing.assert_allclose(got["entropy"][i], -np.sum(share * np.log(share)), rtol=5e-5, atol=1e-4)


@pytest.mark.quick
def test_a_semiring_may_hold_a_traced_number():
    """Such as the power of each weight, a temperature; what it says of itself cannot be checked then."""
    X, larger = jnp.array([0.3, -1.0]), ap.tracing.max_product().plus

    def powers(t):
        sums = ap.tracing.absolute_sum()._replace(lift=lambda w: (jnp.abs(w) ** t,))
        semirings = sums, sums._replace(kind=None), sums._replace(plus=larger, kind="max")
        return jnp.stack([ap.semiring_grad(lambda x: jnp.sum(jnp.tanh(x * x) * 2), s)(X) for s in semirings])

    np.testing.assert_allclose(jax.jit(powers)(2.0), powers(2.0), rtol=1e-5)
    numeric = (powers(2.01) - powers(1.99)) / 0.02
    np.testing.assert_allclose(jax.jacrev(powers)(2.0), numeric, rtol=1e-2, atol=1e-3)


def test_while_is_walked_backward():
    """As in forward mode, after so many steps, and under `vmap` where each lane ends by itself."""

    def steps(x, w, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(w * c[1] + c[0])), (0, x))[1]

    def loop(x, w, bound):
        return jax.lax.while_loop(lambda c: c[1] < bound, lambda c: (c[0] + 1, jnp.exp(w) * c[1] + 0.1), (0, x))[1]

    @functools.partial(jax.jit, static_argnums=0)
    def both(loss, *args):
        return ap.semiring_grad(loss, ap.tracing.ordinary(), (0, 1))(*args), jax.jacfwd(loss, (0, 1))(*args)

    of_lanes = lambda each: lambda x, w: jnp.sum(jax.vmap(each, (0, None, None))(x, w, 2.0 + jnp.sum(w) * 0))
    lanes, twice = jnp.array([0.5, 9.0, 0.1]), jax.vmap(loop, (None, 0, None))
    cases = [(steps, 0.5, 0.9, n) for n in (0, 1, 5, 200)]
    cases += [(of_lanes(loop), lanes, 0.3), (of_lanes(twice), lanes, jnp.full(3, 0.3))]
    for case in cases:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *both(*case))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray([[0.5, -1.0], [2.0, 0.25]], dtype)
        loss = lambda x: jnp.sum(jnp.tanh(x @ x)).astype(jnp.float32)
        semirings = ap.tracing.ordinary(), ap.tracing.max_product(), ap.tracing.entropy(), LOGARITHMS
        for got in jax.jit(lambda x: [ap.semiring_grad(loss, s)(x) for s in semirings])(x):
            assert got.dtype == x.dtype and jnp.all(jnp.isfinite(got))


def test_of_a_randomized_function_the_original_is_traced():
    x, w = numbers(40, 30), numbers(30, 30)

    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.tanh(x @ w) ** 2)

    randomized = ap.randomize(loss, ap.memory.rounding(bits=2))
    for f in (randomized, jax.jit(randomized)):
        got = ap.semiring_grad(f, ap.tracing.max_product(), 1)(KEY, w, x)
        np.testing.assert_array_equal(got, ap.semiring_grad(loss, ap.tracing.max_product())(w, x))
    trace, original = ap.trace_gradients(randomized, argnums=1)(KEY, w, x), ap.trace_gradients(loss)(w, x)
    assert trace.path("x", (1, 2)) == original.path("x", (1, 2))
    np.testing.assert_array_equal(trace.gradient, original.gradient)
    np.testing.assert_array_equal(trace.influence().share, original.influence().share)
    heaviest = functools.partial(ap.semiring_grad, semiring=ap.tracing.max_product())
    refused(TypeError, "Leave the argument out of argnums", heaviest(randomized), KEY, w, x)
    # What `jax.vmap` returns has the attributes of what it was given, and is another function.
    mapped = jax.vmap(randomized, in_axes=(0, None, None))
    assert mapped.original
    refused(TypeError, "one floating-point scalar", heaviest(mapped, argnums=1), jax.random.split(KEY, 2), w, x)


semiring = functools.partial(ap.tracing.Semiring, "yours", zero=(0.0,), one=(1.0,))
NO_SEMIRINGS = [
    (ap.tracing.max_product, TypeError, "got function. Call it"),
    (semiring(lambda w: (w,), times, plus, zero=(0,), one=(1,)), TypeError, "at least one is a float"),
    (semiring(lambda w: w, times, plus), TypeError, "a function lift that returns"),
    (semiring(lambda w: (1.0,), times, plus, kind="add"), TypeError, "a function lift that returns"),
    (semiring(lambda w: (w.astype(jnp.float16),), times, plus), TypeError, "a function lift that returns.*float16"),
    (semiring(lambda w: (w,), times, plus, one=(2.0,)), ValueError, "one is the one of times"),
    (semiring(lambda w: (w,), lambda a, b: a[0] * b[0], plus), TypeError, "a function times that returns"),
    (semiring(lambda w: (w,), times, lambda a, b: (jnp.sum(a[0] + b[0]),)), TypeError, "function plus"),
    (semiring(lambda w: (w,), times, lambda a, b: (jnp.minimum(a[0], b[0]),)), ValueError, "zero is the"),
    (semiring(jnp.abs, times, plus)._replace(lift=lambda w: (abs(w),), kind="max"), ValueError, "'max'"),
    (ap.tracing.max_product()._replace(kind="add"), ValueError, "plus adds"),
    (semiring(lambda w: (w,), lambda a, b: (a[0] * b[0] ** 2,), plus, kind="add"), ValueError, "linear"),
    (semiring(lambda w: (w,), times, plus, kind="sum"), ValueError, "got 'sum'"),  # pyright: ignore
]


def test_what_is_no_semiring_is_refused():
    for wrong, error, words in NO_SEMIRINGS:
        refused(error, words, ap.semiring_grad, jnp.sum, wrong)
    masked = semiring(lambda w: (w != 0,), lambda a, b: (jnp.where(a[0], b[0], 0),), plus)  # that is one
    assert jax.eval_shape(ap.semiring_grad(jnp.sum, masked), jnp.ones(2)).shape == (2,)
    refused(ValueError, "k of top_k must be an integer of at least 1", ap.tracing.top_k, 0)


def test_a_rule_of_ones_own_gets_jax_s_arrays_not_numpy_s():
    """A `custom_vjp` may index what it remembers by a traced number, which a constant of NumPy cannot be."""
    function = jax.custom_vjp(lambda x, c: x * c[1])
    at = lambda c, m: jax.lax.fori_loop(0, 1, lambda i, t: t * c[i + 1], m)
    function.defvjp(lambda x, c: (x * c[1], c), lambda c, m: (at(c, m), jnp.zeros_like(c)))
    loss = lambda x: function(x, np.array([1.0, 2.0], np.float32))
    assert ap.semiring_grad(loss, ap.tracing.max_product())(1.0) == 2
    assert ap.trace_gradients(loss)(1.0).path("x")


def test_a_rule_may_differentiate_a_function_with_a_rule_of_its_own():
    inner = jax.custom_vjp(lambda x: jnp.sin(x))
    inner.defvjp(lambda x: (jnp.sin(x), x), lambda x, m: (2 * m,))
    function = jax.custom_jvp(lambda x: inner(x) * x)
    function.defjvp(lambda primals, tangents: jax.jvp(lambda x: inner(x) * x, primals, tangents))
    loss = lambda x: function(x**2)
    found = ap.semiring_grad(loss, ap.tracing.ordinary())(1.5)
    np.testing.assert_allclose(found, jax.grad(loss)(1.5), rtol=1e-6)


def test_a_backward_pass_that_is_no_sum_over_edges_is_refused():
    """Total propagation, and a network of learned messages."""
    program = walk(ap.total_propagation(), lambda theta, x: dist.Normal(theta * x, 0.3), 1, jnp.square)
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.tanh)
    network, params = mplp.from_nnx(model, loss=mplp.squared_error)
    batch = (jnp.ones((4, 3)), jnp.ones((4, 2)))
    rule = mplp.Separable(mplp.sites(network, params, batch), rngs=nnx.Rngs(0))
    state = mplp.init_state(rule, network, params, batch)

    def learned(into):  # what leaves through the ports is what a rule answers, and no derivative of anything
        places = mplp.Places(rule, state, {name: (port(own), jnp.zeros(())) for name, own in state.items()})
        return jnp.mean(network(places, jax.tree.map(mplp.Parameter, params, into), batch)[0])

    losses = [(learned, port(params))]
    for cross_fit in (False, True):
        objective = ap.expectation(program, lanes=4, cross_fit=cross_fit)
        losses.append((lambda theta, f=objective: f(KEY, theta), 0.7))
    for loss, argument in losses:
        heaviest = ap.semiring_grad(loss, ap.tracing.max_product())
        refused(TypeError, "no sum over edges", jax.eval_shape, heaviest, argument)


@pytest.mark.parametrize("argnums", [0, -1, (0, 1), [1, 0], (-1, 0), np.array(1), (jnp.int32(-2),)], ids=repr)
def test_argnums_as_jax_grad_takes_them(argnums):
    f = lambda x, y, z: x * y["a"] ** 2 * jnp.sum(z)
    args = 2.0, {"a": 3.0}, jnp.arange(3.0)
    got, wanted = ap.semiring_grad(f, MINE, argnums)(*args), jax.grad(f, argnums)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, wanted)
    trace = ap.trace_gradients(f, argnums=argnums)(*args)
    assert len(trace.parameters) == len(jax.tree.leaves(got))
    assert jax.tree.structure(trace.weights) == jax.tree.structure(wanted)


def test_errors():
    s, f = ap.tracing.max_product(), lambda x, y: x * y
    of = lambda f, argnums=0, *args: ap.semiring_grad(f, s, argnums)(*(args or (1.0, 2.0)))
    for call, error, words in (
        (lambda: of(lambda x: x, 0, jnp.ones(2)), TypeError, "one floating-point scalar"),
        (lambda: of(lambda x: 1.0 * x, 0, 1), TypeError, "argument 0 has dtype int32, and paths end at"),
        (lambda: of(lambda x: jnp.sum(jnp.abs(jnp.fft.fft(x))), 0, jnp.ones(4)), TypeError, "got complex ones at the"),
        (lambda: of(lambda x: ap.refuse_derivative(x, "x is data") * 2.0, 0, 1.0), TypeError, "x is data"),
        (lambda: of(f, 2), ValueError, "argnums has 2, .* got 2 positional"),
        (lambda: of(f, -3), ValueError, "argnums has -3"),
        (lambda: of(f, (0, -2)), ValueError, "twice"),
        *((lambda n=n: of(f, n), TypeError, "integer") for n in (1.0, "x", None)),
        *((lambda y=y: of(f, 1, 1.0, y), TypeError, "argument 1 .*, and paths end at") for y in ("sin", KEY, 3, 1j)),
    ):
        refused(error, words, jax.eval_shape, call)


def test_other_arguments_reach_the_function_as_they_are():
    """Strings, functions, flags and sizes, by position and by keyword, as with `jax.grad`."""
    assert ap.semiring_grad(lambda x, y: jnp.sum(y), MINE)(jnp.ones(2), jnp.ones(1)).tolist() == [0, 0]

    def f(x, kind, n, act, *, flag, scale):
        y = jnp.sin(x) if kind == "sin" else jnp.cos(x)
        return jnp.sum(act(y) * jnp.ones(n)) * (scale if flag else 1.0)

    for flag, scale in ((True, 2.0), (False, None)):
        args, kwargs = (0.3, "sin", 4, jnp.tanh), {"flag": flag, "scale": scale}
        wanted = jax.grad(f)(*args, **kwargs)
        np.testing.assert_allclose(ap.semiring_grad(f, MINE)(*args, **kwargs), wanted, rtol=1e-6)
        trace = ap.trace_gradients(f)(*args, **kwargs)
        np.testing.assert_allclose(trace.gradient, wanted, rtol=1e-6)
        np.testing.assert_allclose(np.prod([step.weight for step in trace.path("x")]), trace.weights, rtol=1e-5)
        assert trace.parameters == ("x",)


def test_a_mutable_reference_is_read_where_nothing_that_is_traced_goes_into_it():
    def aside(x):
        ref = jax.new_ref(jnp.ones(3))
        ref[1] = 5.0
        return jnp.sum(x * ref[...])

    assert ap.semiring_grad(aside, ap.tracing.max_product())(jnp.ones(3)).tolist() == [1.0, 5.0, 1.0]


HEAVIEST = {"max-product": lambda f: ap.semiring_grad(f, ap.tracing.max_product()), "influence": ap.tracing.influence}


@cases("propagate", HEAVIEST)
def test_a_compiled_program_grows_with_its_residual_blocks_and_not_faster(propagate):
    """Where paths meet nothing before is computed again, for which XLA copies it, block by block."""

    def loss(ws):
        x = jnp.ones((8, 16))
        for w in ws:
            x = x + jax.named_scope("block")(lambda x, w: jnp.tanh(x @ w))(x, w)
        return jnp.sum(x**2)

    small, large = (jax.jit(propagate(loss)).lower([jnp.eye(16)] * n).compile().as_text() for n in (3, 9))
    assert large.count("\n") < 3 * small.count("\n")


def test_the_weight_of_the_heaviest_path_has_a_derivative():
    heaviest = ap.semiring_grad(lambda x: jnp.sum(x**3 + 2 * jnp.sin(x)), ap.tracing.max_product())
    slope = jax.grad(lambda x: jnp.sum(heaviest(x)))(jnp.array([0.1, 2.0]))
    np.testing.assert_allclose(slope, [-2 * np.sin(0.1), 12.0], rtol=1e-5)
