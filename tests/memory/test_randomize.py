"""randomize: any function, the same value, an unbiased gradient; less memory; under every transformation."""

import dataclasses
import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import apgrad as ap
from apgrad.memory import _randomize as randomize_module
from tests.memory import unbiased
from tests.memory.unbiased import KEY, Own, assert_exact, assert_unbiased, computed_again, normal, remembered
from tests.tracing import models

R = ap.memory


def mlp(params, x):
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    return -jnp.mean(jax.nn.log_softmax(x @ params[-1])[:, 0])


def rnn(params, xs):
    w, u = params

    step = lambda h, x: (jax.nn.relu(x @ w + h @ u), None)
    return jnp.mean(jax.lax.scan(step, jnp.zeros((xs.shape[1], u.shape[0])), xs)[0] ** 2)


MLP = [normal(1, 6, 8), normal(2, 8, 8), normal(3, 8, 3)]
RNN = 0.5 * normal(1, 3, 8), 0.4 * normal(2, 8, 8)
# Losses of parameters.
MODELS = {
    "mlp": lambda: (lambda params: mlp(params, normal(0, 5, 6)), MLP),
    "rnn": lambda: (lambda params: rnn(params, normal(0, 5, 4, 3)), RNN),
    "transformer": models.MODELS["transformer"],
}
SAMPLERS = {"rounding": R.rounding(4, group=16), "different": R.different_sample(0.5)}


def assert_randomized(function, sampler, *args, argnums=(0, 1), min_size=16, **options):
    """An unbiased gradient of these arguments."""
    gradient = jax.jit(jax.grad(ap.randomize(function, sampler, min_size=min_size), argnums=[i + 1 for i in argnums]))
    assert_unbiased(lambda key: gradient(key, *args), jax.jit(jax.grad(function, argnums=argnums))(*args), **options)


PAIRS = [(model, sampler) for model in ("mlp", "rnn") for sampler in SAMPLERS]
PAIRS += [pytest.param("transformer", "rounding", marks=pytest.mark.long), ("transformer", "different")]


@pytest.mark.parametrize(("model", "sampler"), PAIRS)
def test_unbiased(model, sampler):
    function, params = MODELS[model]()
    draws = 2000 if model == "transformer" else 4000
    assert_randomized(function, SAMPLERS[sampler], params, argnums=[0], draws=draws)


@pytest.mark.parametrize("model", MODELS)
def test_exact_with_all_bits_and_the_same_value(model):
    function, params = MODELS[model]()
    assert_exact(ap.randomize(function, R.rounding(32), min_size=16), function, params, rtol=2e-5)
    assert jax.jit(ap.randomize(function, R.rounding(2)))(KEY, params) == jax.jit(function)(params)


def control(x, w):
    """Python's integers leave each kind of control flow, and the function."""

    def body(c, t):
        turn = jax.lax.cond(t % 2 == 0, lambda x: jnp.tanh(x @ w), jax.checkpoint(lambda x: jnp.sin(x) @ w), c[1])
        return (c[0] + 1, turn), c[0]

    n, x = jax.lax.cond(x[0, 0] > 0, lambda x: (1, jnp.sin(x @ w)), lambda x: (2, x @ w), x)
    (_, x), steps = jax.lax.scan(body, (0, x), jnp.arange(3))
    m, x = jax.checkpoint(lambda x: (3, jnp.sin(x) @ w))(x)
    limit = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
    return jnp.sum(x**2) * (n * m * limit + jnp.sum(steps)).astype(x.dtype), {"examples": len(x)}


@pytest.mark.quick
def test_control_flow():
    x, w = normal(0, 4, 8), 0.5 * normal(1, 8, 8)
    lean = ap.randomize(control, R.rounding(32), min_size=8)
    exact, _ = jax.jit(jax.grad(control, argnums=(0, 1), has_aux=True))(x, w)
    found, aux = jax.jit(jax.grad(lean, argnums=(1, 2), has_aux=True))(KEY, x, w)
    chex.assert_trees_all_close(found, exact, rtol=1e-5, atol=1e-6)
    assert aux == {"examples": 4}
    assert_randomized(lambda x, w: control(x, w)[0], R.rounding(4, group=8), x, w, min_size=8)


UNUSED = lambda x: (2 * x, jnp.sqrt(x))  # whose second output, which nobody uses, has an infinite derivative at 0


@pytest.mark.quick
@pytest.mark.parametrize("inside", ["block", "loop", "branch"])
def test_an_output_of_a_part_that_nobody_uses_sends_no_message(inside):
    loss = {
        "block": lambda x: jax.checkpoint(UNUSED)(x)[0],
        "loop": lambda x: jax.lax.scan(lambda c, _: (2 * c, jnp.sqrt(c)), x, length=1)[0],
        "branch": lambda x: jax.lax.cond(x < 1, UNUSED, UNUSED, x)[0],
    }[inside]
    assert jax.grad(ap.randomize(loss, R.rounding(4), min_size=0), argnums=1)(KEY, 0.0) == 2
    assert ap.semiring_grad(loss, ap.tracing.ordinary())(0.0) == 2


@pytest.mark.quick
@pytest.mark.parametrize("options", [{"sampler": R.rounding(4)}, {"budget_bytes": 10_000}], ids=str)
def test_a_loop_is_planned_in_time_that_is_linear_in_its_depth(options, monkeypatch):
    planned, make_plan = Counter(), randomize_module.make_plan

    def nested(depth, x, w):
        step = lambda x, _: (nested(depth - 1, x, w), None)
        return jnp.sin(x @ w) @ w if depth == 0 else jax.lax.scan(step, x, length=2)[0]

    count = lambda *args: planned.update([args[-1].keywords["where"]]) or make_plan(*args)
    monkeypatch.setattr(randomize_module, "make_plan", count)
    random = ap.randomize(lambda x, w: jnp.sum(nested(3, x, w)), **options)
    jax.eval_shape(jax.grad(random, argnums=2), KEY, *[jnp.ones((32, 32))] * 2)
    once = planned[""]  # what is differentiated directly; a budget tries several choices of samplers
    assert len(planned) == 4 and max(planned.values()) <= 4 * once
    assert once == 1 or "sampler" not in options


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_gradients_of_different_arguments_do_not_mix(wrap):
    """Residuals of a jaxpr that is differentiated in two ways before either backward pass."""
    random = wrap(ap.randomize(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)), R.rounding(32)))
    w, x = normal(0, 32, 32), normal(1, 32, 32)
    few, some = jax.vjp(lambda w: random(KEY, w, x), w)[1], jax.vjp(lambda *a: random(KEY, *a), w, x)[1]
    chex.assert_trees_all_close(some(1.0)[0], few(1.0)[0], rtol=1e-5)
    few, some = jax.vjp(lambda *a: random(KEY, *a), w, x)[1], jax.vjp(lambda x: random(KEY, w, x), x)[1]
    chex.assert_trees_all_close(few(1.0)[1], some(1.0)[0], rtol=1e-5)


WAYS = {
    "as it is": lambda of, xs: of(xs[0]) + of(xs[1]),
    "jit": lambda of, xs: jax.jit(of)(xs[0]) + of(xs[1]),
    "scan": lambda of, xs: jax.lax.scan(lambda c, x: (c + of(x), None), 0.0, xs)[0],
    "vmap": lambda of, xs: jnp.sum(jax.vmap(of)(xs)),
}
LEAN = {
    "as it is": lambda f: f,
    "sampled": lambda f: functools.partial(ap.randomize(f, R.rounding(32), min_size=8), KEY),
    "computed again": lambda f: functools.partial(computed_again(f, {"": frozenset()}), KEY),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_the_function_closes_over_gets_its_gradient(way):
    """Also the rows, which `jax.vmap` maps, and the weights, which it does not."""

    def loss(lean, w, rows):
        loop = lambda x: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=2)[0]
        return WAYS[way](lambda x: LEAN[lean](lambda y: jnp.sum(loop(y) * x))(jnp.sin(x)), rows)

    gradients = lambda w, rows: [jax.grad(functools.partial(loss, lean), (0, 1))(w, rows) for lean in LEAN]
    exact, *found = jax.jit(gradients)(0.5 * normal(0, 8, 8), normal(1, 2, 4, 8))
    chex.assert_trees_all_close(found, [exact] * 2, rtol=1e-5, atol=1e-6)


def test_rounding_is_compiled_without_threefry():
    """Which takes a compiler longer than the rest of a rounding, once for each array."""
    xs = normal(3, 6, 16, 8)
    gradient = jax.jit(jax.grad(ap.randomize(rnn, R.rounding(4)), argnums=1))
    assert "threefry" not in gradient.lower(KEY, (normal(1, 8, 64), normal(2, 64, 64)), xs).as_text()


def test_steps_and_keys_are_fresh():
    # The carry is no live argument: give the steps something to sample that is the same in each.
    same = lambda w, x: jax.lax.scan(lambda c, _: (c, jnp.sum(c @ w)), jnp.sin(x), length=2)[1]
    w, x = jnp.eye(16), normal(0, 4, 16)
    jacobian = jax.jit(jax.jacrev(ap.randomize(same, R.rounding(2), min_size=8), argnums=1))
    rows = jacobian(KEY, w, x)
    assert np.any(rows[0] != rows[1])
    assert np.any(rows[0] != jacobian(jax.random.key(1), w, x)[0])
    chex.assert_trees_all_equal(rows, jacobian(KEY, w, x))


def test_twice_on_a_path_is_two_draws():
    # The gradient of w has h twice: once as the factor that the message passes, once as the input of the product.
    # Or it multiplies what is drawn in a branch.
    def twice(w, x, in_branch):
        h = jnp.sin(x @ w)
        again = jax.lax.cond(x[0, 0] < 9, lambda: jnp.sin(x @ w), lambda: x @ w) if in_branch else h
        return jnp.sum((h @ w) * again * signs)

    w, x, signs = normal(1, 8, 8), normal(3, 4, 8), jnp.sign(normal(4, 4, 8))
    for in_branch in (False, True):
        function = functools.partial(twice, in_branch=in_branch)
        assert_randomized(function, R.rounding(1, group=8), w, x, min_size=8)


def test_of_an_array_that_divides_the_inverse_is_remembered():
    """A message is linear in the inverse, which may thus be rounded, and not in the array itself, which would stay."""
    x = normal(0, 32, 32)

    loss = lambda w: jnp.sum((x @ w) / jax.lax.optimization_barrier(0.3 + jnp.exp(x)) @ x)
    assert "sampled" in [how for _, how in R.coefficients(loss, normal(1, 32, 32), min_size=16)]
    assert_randomized(loss, R.rounding(2, group=8), normal(1, 32, 32), argnums=(0,))


def test_dropout_masks_are_made_again_from_their_key():
    loss = lambda w, x, key: jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0.0))
    kinds = [how for _, how in R.coefficients(lambda w, x: loss(w, x, KEY), normal(0, 32, 32), normal(1, 64, 32))]
    assert "sampled" not in kinds
    random = functools.partial(ap.randomize(loss, R.rounding(4)), KEY)
    assert all(r.nbytes < 64 * 32 // 8 for r in R.residuals(random, normal(0, 32, 32), normal(1, 64, 32), KEY))


def test_a_sampler_of_ones_own_is_used_everywhere_unless_it_keeps_a_fraction():
    # Messages go on through the derivative of the first sine: a sample there gives way to rounding, a whole copy not.
    loss = lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))

    @dataclasses.dataclass(frozen=True)
    class Fraction(Own):
        fraction: float = 1.0

    w, x = 0.1 * normal(1, 32, 32), normal(2, 64, 32)
    both = [functools.partial(ap.randomize(loss, sampler, min_size=0), KEY) for sampler in (Own(), Fraction())]
    exact, whole, some = jax.jit(lambda: [jax.grad(f)(w, x) for f in (loss, *both)])()
    np.testing.assert_allclose(whole, exact, rtol=1e-5, atol=1e-5)
    assert np.abs(some - exact).max() > 1e-3


def test_data_that_nobody_differentiates_may_go_through_what_has_no_derivative():
    # In a scan or a checkpointed block, inside and around: through a while_loop, and through messages that are clipped.
    halved = lambda x: jax.lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.5, lambda x: x / 2, x)
    clipped = ap.node(ap.Propagator(lambda x: (x, None), lambda _, m: (jnp.clip(m, -1, 1),)))
    w, x = normal(1, 4, 4) / 2, normal(2, 4, 4)

    def ways(of):
        loss = lambda w, x: jnp.sum(jnp.tanh(of(x) @ w) ** 2)
        rows = lambda f: lambda w, x: jax.lax.scan(lambda c, r: (c + f(w, r[None]), None), 0.0, x)[0]
        random = lambda f: lambda *args: ap.randomize(f, R.rounding(32), min_size=0)(KEY, *args)
        for around in (rows, jax.checkpoint):
            yield around(loss), (random(around(loss)), around(random(loss)))

    def all_of_them(w, x):
        pairs = [pair for of in (halved, clipped) for pair in ways(of)]
        return [(jax.grad(plain)(w, x), [jax.grad(f)(w, x) for f in mine]) for plain, mine in pairs]

    for wanted, found in jax.jit(all_of_them)(w, x):
        for gradient in found:
            np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_derivatives_in_a_row_are_one_coefficient_only_where_their_product_is():
    """Not before a conversion to complex numbers; nor in float16, where 1e-8 is zero and 1e-8 times 2^15 is not."""

    def lens(w):  # messages that are complex, and get real
        wave = jnp.sin(jnp.tanh(normal(1, 32, 64) @ w))
        phase = jax.lax.complex(jnp.cos(jnp.arange(64.0)), jnp.sin(jnp.arange(64.0)))
        return jnp.mean(jnp.abs(jnp.fft.fft(wave.astype(phase.dtype) * phase)) ** 2 * jnp.linspace(0, 1, 64))

    def scaled(w):
        u = jax.nn.sigmoid((-9 - jnp.abs(normal(2, 32, 64))).astype(w.dtype) @ w)
        return 2.0**15 * jnp.sum((u * u).astype(jnp.float32))

    @jax.jit
    def found():
        exact = lambda f, w: (jax.grad(f)(w), jax.grad(ap.randomize(f, R.rounding(32), min_size=0), 1)(KEY, w))
        half = jax.grad(ap.randomize(scaled, R.rounding(32), min_size=0), 1)(KEY, jnp.eye(64, dtype=jnp.float16))
        return exact(lens, normal(0, 64, 64) / 5), (jax.grad(scaled)(jnp.eye(64)), half.astype(jnp.float32))

    for (truth, gradient), rtol in zip(found(), (1e-4, 2e-2), strict=True):
        assert np.linalg.norm(gradient - truth) < rtol * np.linalg.norm(truth)


def test_what_is_small_near_the_loss_is_exact():
    # A confident network's messages are small, p - y; with p rounded they would be noise.
    params, x = [normal(i, 32, n) for i, n in enumerate((32, 32, 2))], normal(9, 64, 32)
    gradient = jax.jit(jax.grad(ap.randomize(mlp, R.rounding(4), min_size=16), argnums=1))(KEY, params, x)
    exact = jax.jit(jax.grad(mlp))(params, x)
    for mine, truth in zip(gradient, exact, strict=True):
        assert jnp.linalg.norm(mine - truth) < 0.2 * jnp.linalg.norm(truth)


@pytest.mark.quick
def test_coefficients_are_those_of_a_loop_as_it_is_differentiated():
    """JAX traces a loop first as if states that begin as constants were constants, which remembers other arrays."""
    step = lambda w, h, g, x: (jnp.tanh(h @ w) * jnp.cos(g) + x, jnp.sin(h) + x)
    loop = lambda w, xs: jax.lax.scan(lambda c, x: (step(w, *c, x), None), (0 * xs[0], 0 * xs[0]), xs)[0]
    function, args = lambda w, xs: jnp.sum(loop(w, jax.lax.stop_gradient(xs))[0] ** 2), (MLP[1], normal(0, 3, 4, 8))
    found = [c.nbytes * c.count for c, _ in R.coefficients(function, *args, min_size=16)]
    assert sum(found) <= remembered(function, *args, sampler=R.rounding(32), min_size=16)


@pytest.mark.quick
def test_a_function_of_integers_alone_gets_no_message():
    index = ap.randomize(jnp.argmax, R.rounding(4), min_size=0)
    np.testing.assert_array_equal(jax.grad(lambda x: 3 * x[index(KEY, x)])(jnp.arange(4.0)), [0, 0, 0, 3])


def test_scans_count_for_what_is_small():
    params = normal(1, 8, 64), 0.1 * normal(2, 64, 64)
    for steps, expected in ((6, True), (2, False)):
        found = R.coefficients(rnn, params, normal(3, steps, 16, 8), min_size=4096)
        states = [how for c, how in found if c.shape == (16, 64) and how != "bits"]
        assert ("sampled" in states) == expected


def test_scratch_memory_is_small():
    args = [normal(i, 64, 64) for i in range(6)], normal(9, 512, 64)
    random = functools.partial(ap.randomize(unbiased.mlp, R.same_sample(0.1), through=None), KEY)
    assert R.temp_bytes(random, *args) < R.temp_bytes(unbiased.mlp, *args) / 3


def test_what_parameters_are_expanded_to_waits_for_its_message():
    """A layer's scale stood in memory from the start, broadcast to the batch."""
    made = [nnx.Sequential(nnx.LayerNorm(64, rngs=nnx.Rngs(i)), nnx.Linear(64, 64, rngs=nnx.Rngs(i))) for i in range(6)]
    (graph, *_), parameters = zip(*map(nnx.split, made), strict=True)
    x = normal(9, 8, 32, 64)

    def loss(parameters, x):
        for p in parameters:
            x = x + jnp.tanh(nnx.merge(graph, p)(x))
        return jnp.mean(x**2)

    random = ap.randomize(loss, R.rounding(4))
    few, many = (R.temp_bytes(lambda p: random(KEY, p, x), parameters[:n]) for n in (2, 6))
    assert many - few < 4 * x.nbytes
