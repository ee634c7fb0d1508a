"""Messages clipped lane by lane, and levels of clipping weighed by what repeats, against the formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from tests.cases import cases
from tests.expectations.instruments import KEY, refused_program
from tests.expectations.programs import paid
from tests.refusals import refused

LANES = 8


def formula(messages, living=True, factor=2.0, folds=1, axes=1):
    """What is sent back, in long doubles: each lane's message, cut to `factor` times the geometric mean of its fold."""
    leaves = [np.asarray(m).astype(np.longdouble) for m in jax.tree.leaves(messages)]
    flat = np.concatenate([m.reshape(*m.shape[:axes], -1) for m in leaves], -1)
    length = np.linalg.norm(flat, axis=-1)
    counted = np.broadcast_to(living, length.shape) & np.isfinite(length) & (length > 0)
    limit = np.full(length.shape, np.inf)
    for rows in np.split(np.arange(len(length)), folds):
        limit[rows] = factor * np.exp(np.mean(np.log(length[rows][counted[rows]])))
    infinite = np.isinf(length)
    direction = np.where(np.isinf(flat), np.sign(flat), 0) / np.sqrt(np.maximum(np.isinf(flat).sum(-1), 1))[..., None]
    with np.errstate(invalid="ignore"):
        kept = flat * np.minimum(1, limit / np.where(length > 0, length, 1))[..., None]
    return np.where(infinite[..., None], direction * limit[..., None], kept), int(np.sum(length > limit))


def sent_back(messages, factor=2.0, parts=None, mask=None, **options):
    """What `clip_lanes` answers to these messages, the leaves in a row, and its counts."""
    axes = 2 if options.get("data") else 1

    def program(tape, x, counts):
        tape, x = ap.clip_lanes(tape, x, factor, parts=parts, mask=mask, counts=counts)
        terms = jax.tree.map(lambda m, x: jnp.sum((m * x).reshape(*m.shape[:axes], -1), -1), messages, x)
        return tape.cost(sum(t.astype(jnp.float32) for t in jax.tree.leaves(terms)))

    both = ap.grad(program, LANES, argnums=(1, 2), check_nan=False, **options)
    back, counts = jax.jit(both)(KEY, jax.tree.map(jnp.zeros_like, messages), jnp.zeros(2))
    assert jax.tree.map(lambda m: m.dtype, back) == jax.tree.map(lambda m: m.dtype, messages)
    units = LANES * (options.get("data") or 1)  # the objective is a mean over lanes and data
    rows = [np.asarray(m, np.float64).reshape(*m.shape[:axes], -1) for m in jax.tree.leaves(back)]
    return np.concatenate(rows, -1) * units, counts


def lognormal(*shape, seed=0, spread=2.0):
    """Messages of very different lengths, float32."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(spread * draw.normal(size=(*shape[:1], *[1] * (len(shape) - 1))))
    return jnp.asarray(sizes * draw.normal(size=shape), jnp.float32)


PYTREE = {"a": lognormal(LANES), "b": (lognormal(LANES, 2, 3, seed=1), lognormal(LANES, 0, seed=2))}
HALVES = {name: (1 + jnp.arange(LANES, dtype=name) ** 2)[:, None] for name in ("bfloat16", "float16")}
OF_DATA = lognormal(LANES, 5, 2) * lognormal(1, 5, 1, seed=3, spread=0)
# Messages, of which a pytree is one, the options, and how precise the answer is.
MESSAGES = {
    "a pytree": (PYTREE, {}, 2e-6),
    "both half types": (HALVES, {}, 1e-2),
    "two folds": (lognormal(LANES, 3), {"cross_fit": True}, 2e-6),
    "data": (OF_DATA, {"parts": True, "mask": jnp.arange(5 * LANES).reshape(LANES, 5) % 3 > 0, "data": 5}, 2e-6),
}


@pytest.mark.quick
@cases("row", MESSAGES)
def test_messages_are_cut_by_the_lanes_of_their_own_fold_and_datum(row):
    messages, options, rtol = row
    got, counts = sent_back(messages, **options)
    folds, axes = 1 + options.get("cross_fit", False), 1 + options.get("parts", False)
    expected, cut = formula(messages, options.get("mask", True), folds=folds, axes=axes)
    np.testing.assert_allclose(got, expected, rtol=rtol)
    assert 0 < cut < expected.size and counts.tolist() == [cut, 0]


def test_whole_numbers_pass():
    def program(tape, theta):
        tape, x = ap.clip_lanes(tape, {"step": jnp.arange(LANES), "x": theta * jnp.ones(LANES)})
        tape, n = ap.clip_lanes(tape, x["step"])
        return tape.cost(x["x"] * n.astype(jnp.float32))

    assert jax.jit(ap.grad(program, LANES))(KEY, 1.0) == 3.5


def test_what_does_not_count_for_the_typical_lane():
    # More than half the lanes have no message, one is over, one is infinite: the limit is that of the other two.
    some = jnp.array([[3.0, 4.0], [1e6, 0.0], [-jnp.inf, jnp.inf], [20.0, 0.0], [0, 1e9]])
    m = jnp.zeros((LANES, 2)).at[3:].set(some)
    alive = jnp.arange(LANES) != LANES - 1
    got, counts = sent_back(m, mask=alive)
    limit = 2 * (5 * 1e6 * 20) ** (1 / 3)
    expected = np.array(m).clip(-1e30, 1e30)
    expected[4], expected[5], expected[7] = [limit, 0], [-limit / 2**0.5, limit / 2**0.5], [0, limit]
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    np.testing.assert_allclose(got, formula(m, alive)[0], rtol=2e-6)
    assert counts.tolist() == [3, 1]
    # A message with NaN has no direction: it is seen, not made zero. Without a typical lane nothing is cut.
    got, counts = sent_back(m.at[0, 0].set(jnp.nan), mask=alive)
    assert np.isnan(got[0, 0]) and np.isfinite(got[1:]).all() and counts.tolist() == [3, 2]
    got, counts = sent_back(jnp.zeros((LANES, 2)).at[0, 0].set(jnp.inf))
    assert np.isposinf(got[0, 0]) and not got[1:].any() and counts.tolist() == [0, 1]


def test_a_complex_number_is_cut_as_two_real_ones():
    m = lognormal(LANES, 2).at[0, 0].set(jnp.inf)

    def program(tape, x):
        tape, z = ap.clip_lanes(tape, jax.lax.complex(x[:, 0], x[:, 1]), 2.0)
        return tape.cost(m[:, 0] * z.real + m[:, 1] * z.imag)

    got = jax.jit(ap.grad(program, LANES, check_nan=False))(KEY, jnp.zeros_like(m)) * LANES
    np.testing.assert_allclose(got, formula(m)[0], rtol=2e-6)


@pytest.mark.parametrize("options", [{}, {"cross_fit": True}, {"data": 5}], ids=str)
def test_only_growth_is_cut(options):
    """A chain of four calls of random gains: the lengths at the last call, or T, bound those at the earlier ones."""
    shape = (LANES, 5) if "data" in options else (LANES,)
    gains, cost = abs(lognormal(4, *shape)), lognormal(*shape, seed=1)
    alive = jnp.arange(cost.size).reshape(shape) % 3 > 0

    def program(tape, x):
        def body(carry, gain):
            tape, x = carry
            tape, x = ap.clip_lanes(tape, x, 2.0, mask=alive, growth_only=True, parts="data" in options)
            return (tape, x * gain), None

        (tape, x), _ = jax.lax.scan(body, (tape, x), gains)
        return tape.cost(x * cost)

    expected, last, cut = np.array(cost, np.longdouble), np.zeros(shape), 0
    for gain in np.array(gains)[::-1]:
        sent = expected * gain
        limited, _ = formula(sent[..., None], alive, 2.0, 2 if "cross_fit" in options else 1, axes=len(shape))
        last = np.where(last > 0, last, np.abs(sent))
        limit = np.maximum(np.abs(limited[..., 0]), last)
        expected, cut = np.sign(sent) * np.minimum(np.abs(sent), limit), cut + np.sum(limit < np.abs(sent))
    got = jax.jit(ap.grad(program, LANES, **options))(KEY, jnp.zeros(shape))
    assert cut > 3
    np.testing.assert_allclose(got * cost.size, expected, rtol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e60, 1e-60])
def test_growth_of_messages_that_overflow_or_that_costs_have_no_numbers_for(size):
    """Of the two calls the later gets 1e6 in lane 0 and infinity in lane 2, and lanes 1 and 2 grow before it."""
    gains = np.ones((2, LANES))
    gains[0, 1:3], gains[1, 0], gains[1, 2] = 1e3, 1e6, np.inf

    def program(tape, x):
        for gain in gains:
            tape, x = ap.clip_lanes(tape, x, 2.0, growth_only=True)
            x = x * gain
        return tape.cost((x * size).astype(jnp.float32))

    with jax.enable_x64(True):
        got = jax.jit(ap.grad(program, LANES, check_nan=False))(KEY, jnp.zeros(LANES)) * LANES / size
    overflowed = 2 * 1e6 ** (1 / 7)
    limit = 2 * (1e6 * 1e3 * 1e3 * overflowed) ** (1 / 8)
    np.testing.assert_allclose(got, [1e6, limit, limit, *[1.0] * (LANES - 3)], rtol=1e-5)


SIZES = [("float32", 1e30, 1e-5), ("bfloat16", 1e30, 1e-2), ("float64", 1e200, 1e-12)]


@pytest.mark.parametrize("dtype, size, rtol", SIZES)
def test_no_length_overflows_or_vanishes(dtype, size, rtol):
    with jax.enable_x64(dtype == "float64"):
        m = jnp.ones((LANES, 3), dtype) * jnp.asarray([size] + [1 / size] * (LANES - 1), dtype)[:, None]
        got, counts = sent_back({"m": m, "single": jnp.ones((LANES, 0), jnp.float32)})
        np.testing.assert_allclose(got, formula(m)[0], rtol=rtol)
        assert counts.tolist() == [1, 0] and got.all()


def test_a_traced_factor_that_is_not_positive_is_seen():
    def program(tape, x, factor):
        tape, x = ap.clip_lanes(tape, x, factor)
        return tape.cost(x * jnp.array([1.0, jnp.inf, *[2.0] * (LANES - 2)]))

    back = jax.jit(ap.grad(program, LANES, check_nan=False))
    for factor, seen in ((-1.0, True), (0.0, True), (1.0, False), (jnp.inf, False)):
        assert np.isnan(back(KEY, jnp.zeros(LANES), factor)).all() == seen


def test_two_streams_of_total_propagation():
    # Each stream's messages are cut by themselves; the factor may be traced, and infinity is no cut.
    step = ap.stochastic(ap.total_propagation())(lambda theta, x: dist.Normal(jnp.sin(3 * theta * x), 0.1))

    def draw(tape, theta, factor):
        def body(carry, _):
            carry = step(carry[0], theta, carry[1])
            return (carry if factor is None else ap.clip_lanes(*carry, factor)), None

        return jax.lax.scan(body, (tape, jnp.ones(tape.lanes)), length=6)[0]

    gradient = ap.grad(paid(draw, jnp.square), LANES, cross_fit=True)
    found = jax.jit(lambda f: [gradient(KEY, 1.0, factor) for factor in (f, jnp.inf, None)])(0.5)
    assert found[1] == found[2] != found[0] and np.isfinite(found).all()


ROWS = jnp.ones(LANES)
REFUSED = {
    "expected the lanes as leading axis": lambda tape: ap.clip_lanes(tape, jnp.ones((3, LANES))),
    "a tape cannot have a batch axis": lambda tape: jax.vmap(lambda x: ap.clip_lanes(tape, x)[1])(jnp.ones((3, LANES))),
    "factor is a positive number": lambda tape: ap.clip_lanes(tape, ROWS, 0.0),
    "for all lanes the same, got -1": lambda tape: ap.clip_lanes(tape, ROWS, np.float32(-1)),
    "for all lanes the same, got nan": lambda tape: ap.clip_lanes(tape, ROWS, np.float32("nan")),
    "all lanes the same": lambda tape: ap.clip_lanes(tape, ROWS, ROWS),
    "port of two": lambda tape: ap.clip_lanes(tape, ROWS, counts=jnp.zeros(3)),
    "the mask has shape": lambda tape: ap.clip_lanes(tape, ROWS, mask=ROWS),
    "the same axes": lambda tape: ap.clip_lanes(tape, [jnp.ones((LANES, n)) for n in (2, 3)], parts=True),
    "was already used": lambda tape: (ap.clip_lanes(tape, ROWS), tape.next_key()),
}


@pytest.mark.quick
def test_refused_when_traced():
    for message, call in REFUSED.items():
        refused_program(message, lambda tape, call=call: (call(tape), tape)[1], lanes=LANES)
    refused_program("got lanes=1", lambda tape: ap.clip_lanes(tape, jnp.ones(1))[0], lanes=1)
    refused_program("Say parts=True", lambda tape: ap.clip_lanes(tape, jnp.ones((LANES, 5)))[0], lanes=LANES, data=5)
    refused(TypeError, "first argument is the tape", ap.clip_lanes, jnp.ones(3), jnp.ones(3))


KEYS = jax.random.split(jax.random.key(0), 60)


def by_formula(gradients, keep):
    """The estimates of a sequence of calls, from (calls, levels, n) gradients; the first call only begins the state."""
    differences = np.diff(gradients, axis=1)
    count = differences.shape[1]
    square, product, typical = np.zeros(count), np.zeros(count), np.full(count, np.nan)
    before, found = np.zeros_like(differences[0]), []
    for gradient, d in zip(gradients, differences, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            length = np.linalg.norm(d, axis=1)
            d = d * np.fmin(1, np.exp(typical) / length)[:, None]
            weights = np.clip(np.nan_to_num(product / square), 0, 1)
            found.append(gradient[0] + weights @ d)
            typical = np.where(np.isnan(typical), np.log(length), keep * typical + (1 - keep) * np.log(length))
        square = keep * square + (1 - keep) * (d**2).sum(1)
        product = keep * product + (1 - keep) * (d * before).sum(1)
        before = d
    return np.array(found[1:])


def calls(training, *args):
    """The gradients of calls one after the other, and the last state."""

    def call(state, key):
        _, gradient, state = training.value_and_grad(key, state, *args)
        return state, gradient

    return jax.lax.scan(call, training.init(KEYS[0], *args), KEYS[1:])


@pytest.mark.parametrize("size", [1.0, 1e25, 1e-25])
def test_the_estimates_are_those_of_the_formula(size):
    # One bias that repeats and one that does not, in the leaves of a pytree.
    biases, noise = jnp.array([0.0, 1.0, 1.0]), jnp.array([0.1, 0.3, 3.0])

    def gradient(key, level):
        index = level.astype(jnp.int32)
        draw = biases[index] + noise[index] * jax.random.normal(jax.random.fold_in(key, index), (5,))
        return jnp.float32(7), {"a": size * draw[:2], "b": size * draw[2:].reshape(3, 1)}

    training = ap.multilevel(gradient, (0.0, 1.0, 2.0), window=5)
    flat = lambda tree: jnp.concatenate([tree["a"], tree["b"][..., 0]], -1)
    one = jax.vmap(lambda key: jax.vmap(lambda level: flat(gradient(key, level)[1]))(jnp.arange(3.0)))
    given = np.asarray(jax.jit(one)(KEYS), np.float64) / size
    state, found = jax.jit(lambda: calls(training))()
    np.testing.assert_allclose(flat(found) / size, by_formula(given, 0.8), rtol=2e-4, atol=2e-5)
    # |b|^2 is 5, and the noise of the first difference is .1^2 + .3^2 for each of its 5 elements.
    assert state.weights.shape == (2,) and state.weights[0] > 0.7 and state.weights[1] < 0.4


def test_what_is_not_finite_is_left_out_and_what_is_zero_is_no_difference():
    def gradient(key, theta, level):
        worst = jnp.where(jax.random.bernoulli(key), jnp.inf, 1e30 * theta)
        return theta, jnp.where(level < 2, theta, worst) * jnp.ones(2)

    state, found = jax.jit(lambda: calls(ap.multilevel(gradient, (0.0, 1.0, 2.0)), jnp.float32(1)))()
    assert jnp.isfinite(found).all() and state.weights[0] == 0 and 0 < state.weights[1] < 0.6
    # Where all levels agree the gradient is theirs.
    state, found = jax.jit(lambda: calls(ap.multilevel(lambda key, theta, level: (theta, theta)), jnp.float32(3)))()
    assert (found == 3).all() and not state.weights.any()


@pytest.mark.parametrize("window", [1, 2])
def test_a_difference_that_shrinks_by_many_orders_of_magnitude_leaves_numbers(window):
    training = ap.multilevel(lambda key, x, level: (x, level * x), (0.0, 1.0), window=window)
    step = jax.jit(training.value_and_grad)
    state = training.init(KEYS[0], jnp.float32(1e30))
    for x in (1e30, 1e-35, 1e30, 1e-35, 2.0, 2.0, 2.0):
        _, gradient, state = step(KEYS[0], state, jnp.float32(x))
        assert 0 <= gradient <= jnp.float32(x) * (1 + 1e-5), (x, gradient)
    assert gradient > 0.5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_of_different_precision_have_a_common_length(dtype):
    """In float16 a length below 6e-8 is zero and one above 65504 infinite, though each level's gradient is neither."""
    small = [1e-9, 1.0, 1e6]
    sizes = {"float16": [3e4], "bfloat16": small, "float32": small, "float64": [1e-60, 1.0, 1e60]}[dtype]

    def gradient(size):
        half = min(size, 3e4)  # each element of the float16 array is -half at the first level and half at the second

        def of(key, level):
            change = jnp.stack([-half, half]).astype("float16")[level.astype(int)]
            other = level.astype(dtype) * size * jnp.ones(2, dtype)
            return 0.0, {"half": change * jnp.ones(10_000, "float16"), "other": other}

        return of

    with jax.enable_x64(dtype == "float64"):
        trainings = [ap.multilevel(gradient(size), (0.0, 1.0), window=1) for size in sizes]
        for size, (state, found) in zip(sizes, jax.jit(lambda: [calls(t) for t in trainings])(), strict=True):
            assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))
            assert found["half"].dtype == "float16" and found["other"].dtype == dtype
            assert state.log_length.dtype == np.promote_types(jnp.dtype(dtype), np.float32)
            np.testing.assert_allclose(found["half"][-1], np.float16(min(size, 3e4)), rtol=2e-3)
            np.testing.assert_allclose(found["other"][-1], size, rtol=max(1e-5, 2 * float(jnp.finfo(dtype).eps)))


def test_refused():
    flat = lambda key, level: (0.0, 0.0)
    refused(ValueError, "needs two levels", ap.multilevel, flat, (1.0,))
    for window in (0, np.inf, "20"):
        refused(ValueError, "window", ap.multilevel, flat, window=window)
    for levels in ("ab", (1.0, np.nan), ("1", "4"), (1.0, None), (1.0, jnp.exp), 4.0):
        refused(ValueError, "which are numbers", ap.multilevel, flat, levels)
    refused(TypeError, "the state is from init", ap.multilevel(flat).value_and_grad, KEYS[0], ())
    training = ap.multilevel(lambda key, theta, level: (0.0, level * theta))
    state, words = training.init(KEYS[0], jnp.ones(2)), r"shapes \(3, 2\), and these need \(3, 3\)"
    refused(ValueError, words, training.value_and_grad, KEYS[0], state, jnp.ones(3))
    init = lambda made: ap.multilevel(made).init(KEYS[0], jnp.ones(2))
    called = r"value_and_grad\(key, \*args, level\).*last argument"
    refused(TypeError, called, init, ap.value_and_grad(lambda tape, theta: tape.cost(theta), 2))
    refused(TypeError, called, init, None)
    refused(TypeError, r"must return \(value, gradient\), got an array", init, lambda key, theta, level: theta)
