"""Semiring backpropagation of whole programs: against `jax.grad`, all paths enumerated, and errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from tests.tracing.models import KEY, MODELS

# The gradient's own sum as a user would write it: all rules are used, none of JAX's transposes.
MINE = ap.tracing.Semiring(
    "mine", lambda w: (w,), lambda a, b: (a[0] * b[0],), lambda a, b: (a[0] + b[0],), (0.0,), (1.0,)
)


@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_the_gradient(name):
    loss, params = MODELS[name]()
    together = jax.jit(
        lambda p: (jax.grad(loss)(p), ap.backprop(loss, ap.tracing.ordinary())(p), ap.backprop(loss, MINE)(p))
    )
    wanted, *found = map(jax.tree.leaves, together(params))
    scale = max(float(jnp.max(jnp.abs(g))) for g in wanted)
    for got in found:
        for x, y in zip(got, wanted, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * scale)


def network(seed):
    """A random graph of scalars: its program, and for each of its two inputs the weights of all paths."""
    rng = np.random.default_rng(seed)
    size = 9
    weights = np.zeros((size, size))
    for v in range(2, size):
        for u in rng.choice(v, size=min(v, 1 + rng.integers(3)), replace=False):
            weights[u, v] = np.round(rng.normal(), 1) or 0.5

    def program(x):
        values = [x[0], x[1]]
        for v in range(2, size):
            terms = [float(weights[u, v]) * values[u] for u in range(v) if weights[u, v]]
            values.append(jnp.sum(jnp.stack(terms)))
        return values[-1]

    paths = {0: [], 1: []}
    for start in paths:
        for length in range(size):
            for middle in itertools.combinations(range(start + 1, size - 1), length):
                nodes = (start, *middle, size - 1)
                product = np.prod([weights[u, v] for u, v in itertools.pairwise(nodes)])
                if product:
                    paths[start].append(product)
    return program, [np.array(paths[i] or [0.0]) for i in (0, 1)]


@pytest.mark.parametrize("seed", range(6))
def test_every_semiring_is_its_sum_over_all_paths(seed):
    program, paths = network(seed)
    t, x = ap.tracing, jnp.ones(2)
    names = ("ordinary", "max_product", "absolute_sum", "entropy")
    top = {"top_k": t.top_k(4), "log top_k": t.top_k(4, log=True)}
    semirings = {n: getattr(t, n)() for n in names} | {f"log {n}": getattr(t, n)(log=True) for n in names} | top
    got = jax.jit(lambda x: {n: ap.backprop(program, s)(x) for n, s in semirings.items()})(x)
    for i, products in enumerate(paths):
        sizes = np.abs(products)
        share = sizes[sizes > 0] / max(sizes.sum(), 1e-30)
        best = np.sort(np.pad(sizes, (0, 4)))[::-1][:4]
        wanted = {
            "ordinary": products.sum(),
            "max_product": sizes.max(),
            "absolute_sum": sizes.sum(),
            "entropy": -np.sum(share * np.log(share)),
            "top_k": best,
        }
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name][i], value, rtol=2e-5, atol=1e-5)
            if name == "ordinary":
                sign, size = got["log ordinary"]
                np.testing.assert_allclose(sign[i] * np.exp(size[i]), value, rtol=1e-4, atol=1e-5)
            elif name == "entropy":
                np.testing.assert_allclose(got["log entropy"][i], value, rtol=2e-5, atol=1e-5)
            else:
                np.testing.assert_allclose(np.exp(got[f"log {name}"][i]), value, rtol=2e-5, atol=1e-6)


def test_log_space_goes_where_floats_do_not():
    def loss(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: 1e-3 * y, x) * 2.0

    assert ap.backprop(loss, ap.tracing.max_product())(1.0) == 0
    got = ap.backprop(loss, ap.tracing.max_product(log=True))(1.0)
    np.testing.assert_allclose(got, 60 * np.log(1e-3) + np.log(2), rtol=1e-6)
    sign, size = ap.backprop(loss, ap.tracing.ordinary(log=True))(1.0)
    np.testing.assert_allclose([sign, size], [1.0, 60 * np.log(1e-3) + np.log(2)], rtol=1e-6)


@pytest.mark.parametrize("steps", [0, 1, 5, 200])
def test_while_is_walked_backward(steps):
    def loss(x, w, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(w * c[1] + 0.1)), (0, x))[1]

    got = jax.jit(ap.backprop(loss, ap.tracing.ordinary(), (0, 1)))(0.5, 0.9, steps)
    wanted = jax.grad(lambda x, w: jax.lax.fori_loop(0, steps, lambda _, y: jnp.tanh(w * y + 0.1), x), (0, 1))(0.5, 0.9)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_transformations():
    loss, params = MODELS["mlp"]()
    heavy = jax.jit(ap.backprop(loss, ap.tracing.max_product()))
    scales = jnp.array([0.5, 1.0, 2.0])
    scaled = lambda s: heavy(jax.tree.map(lambda p: s * p, params))
    mapped = jax.jit(jax.vmap(scaled))(scales)
    _, scanned = jax.jit(lambda: jax.lax.scan(lambda c, s: (c, scaled(s)), 0, scales))()
    for a, b, c in zip(*map(jax.tree.leaves, (mapped, scanned, scaled(scales[1]))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(a[1], c, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray([[0.5, -1.0], [2.0, 0.25]], dtype)
        loss = lambda x: jnp.sum(jnp.tanh(x @ x)).astype(jnp.float32)
        for semiring in (ap.tracing.ordinary(), ap.tracing.max_product(), ap.tracing.entropy(log=True)):
            got = ap.backprop(loss, semiring)(x)
            assert got.dtype == x.dtype and jnp.all(jnp.isfinite(got))


def test_arguments():
    f = lambda a, b, *, c: jnp.sum(a["x"] * b * c)
    args = ({"x": jnp.ones(2)}, jnp.full(2, 3.0))
    got = ap.backprop(f, ap.tracing.ordinary(), (1, 0))(*args, c=2.0)
    np.testing.assert_allclose(got[0], [2, 2])
    np.testing.assert_allclose(got[1]["x"], [6, 6])
    assert ap.backprop(lambda x, y: jnp.sum(y), ap.tracing.max_product())(jnp.ones(2), jnp.ones(1)).tolist() == [0, 0]


def test_of_a_randomized_function_the_original_is_traced():
    def randomized(key, x):
        raise AssertionError("traced")

    randomized.original = lambda x: jnp.sum(x**2)
    assert ap.backprop(randomized, ap.tracing.max_product(), 1)(KEY, jnp.ones(2)).tolist() == [2, 2]


def test_errors():
    s = ap.tracing.max_product()
    with pytest.raises(TypeError, match="one floating-point scalar"):
        ap.backprop(lambda x: x, s)(jnp.ones(2))
    with pytest.raises(TypeError, match="got dtype int32"):
        ap.backprop(lambda x: 1.0 * x, s)(1)
    with pytest.raises(ValueError, match="called with 1 positional"):
        ap.backprop(lambda x: x, s, 1)(1.0)
    with pytest.raises(TypeError, match=r"real numbers, got complex ones at the primitive"):
        ap.backprop(lambda x: jnp.sum(jnp.abs(jnp.fft.fft(x))), s)(jnp.ones(4))
    with pytest.raises(TypeError, match="x is data"):
        ap.backprop(lambda x: ap.refuse_derivative(x, "x is data") * 2.0, s)(1.0)
    with pytest.raises(ValueError, match="k of at least 1"):
        ap.tracing.top_k(0)


NODES = {
    "clip": ap.Propagator(lambda x: (x, None), lambda _, m: (jnp.clip(m, -1, 1),)),
    "constant": ap.Propagator(lambda x: (x, x), lambda x, m: (x,)),
    "affine": ap.Propagator(lambda x: (x, x), lambda x, m: (m + x,)),
    "square": ap.Propagator(lambda x: (x, None), lambda _, m: (m * m,)),
}


@pytest.mark.parametrize("name", NODES)
def test_a_backward_pass_that_is_no_sum_over_edges_is_refused(name):
    node = ap.node(NODES[name])
    with pytest.raises(TypeError, match="no sum over edges"):
        ap.backprop(lambda x: jnp.sum(node(x) ** 2), ap.tracing.max_product())(jnp.ones(2))


def test_a_linear_propagator_is_traced_as_it_propagates():
    reverse = ap.node(ap.Propagator(lambda x: (x, None), lambda _, m: (-2.0 * m,)))
    loss = lambda x: jnp.sum(reverse(x) ** 2)
    for semiring, wanted in ((ap.tracing.ordinary(), -4.0), (ap.tracing.max_product(), 4.0)):
        assert ap.backprop(loss, semiring)(jnp.ones(1)).tolist() == [wanted]


@pytest.mark.parametrize("cross_fit", [False, True])
def test_total_propagation_is_refused(cross_fit):
    node = ap.stochastic(ap.total_propagation())(lambda theta, x: dist.Normal(theta * x, 0.3))

    def program(tape, theta):
        tape, x = node(tape, theta, jnp.ones(tape.lanes))
        return tape.cost(x**2)

    objective = ap.expectation(program, lanes=4, cross_fit=cross_fit)
    with pytest.raises(TypeError, match="no sum over edges"):
        ap.backprop(lambda theta: objective(KEY, theta), ap.tracing.max_product())(0.7)
