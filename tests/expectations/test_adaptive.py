"""`ap.adaptive`: moments from the mathematics, gradients against truths in closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax

import apgrad as ap
from apgrad.expectations import _adaptive
from apgrad.expectations.mixing import _moments as moments
from apgrad.expectations.weights import least_variance
from experiments.parts import chaotic_network
from tests.expectations.instruments import KEY
from tests.expectations.programs import PUBLISHED, THETA, linear, linear_rollout, linear_truth, paid, rollout, walk
from tests.refusals import refused


@jax.jit
def one_cell(features, suffix):
    """The row of lanes that are all in one cell."""
    return moments.row(features, suffix, jnp.zeros(len(suffix), int), 1)[0]


@jax.jit
def weights_of(row):
    """The weights by one row."""
    return moments.weights(row[None, None], jnp.int32(1))[0, 0]


centred = lambda x: x - x.mean(0)


def plain(rows):
    """The inner products that rows stand for, in double precision."""
    rows = np.asarray(rows, np.float64)
    return rows[..., :4] * 2.0 ** rows[..., 4:]


def test_weights_of_rows_are_those_of_least_variance(x64):
    first, second, suffix = (np.asarray(jax.random.normal(jax.random.key(i), (40, 3))) for i in range(3))
    first, second = centred(first), centred(2 * second + 0.5 * first)
    row = one_cell(jnp.array([first, second]), jnp.array(suffix))
    for found, gathered in zip(np.split(np.asarray(weights_of(row)), 2), (0 * suffix, suffix), strict=True):
        rule = least_variance()(jnp.array([first, second]), jnp.array(gathered))
        np.testing.assert_allclose(found, rule, rtol=1e-6)


def test_each_cell_has_the_moments_of_its_lanes():
    first, second, suffix = jax.random.normal(KEY, (3, 60, 2))
    cell = jnp.arange(60) % 3
    first, second = (centred(x.reshape(20, 3, 2)).reshape(60, 2) for x in (first, second))  # in each cell
    sizes = jnp.array([1.0, 1e12, 1e24])[cell][:, None]  # a cell that explodes says nothing of the others
    features = jnp.stack([sizes * first, second])
    rows = jax.jit(moments.row, static_argnums=3)(features, suffix, cell, moments.CELLS)
    for c in range(3):
        alone = one_cell(features[:, c::3], suffix[c::3])
        np.testing.assert_allclose(plain(rows[c]), plain(alone) / 3, rtol=1e-4)
    assert not np.any(rows[3:, :4])
    by_cell = jax.jit(lambda lanes: moments.weights(rows[None], lanes)[0])
    found = by_cell(jnp.int32(moments.ENOUGH * moments.CELLS))
    np.testing.assert_allclose(found[:3], [weights_of(row) for row in rows[:3]], rtol=1e-5)
    # What was never seen has the weights of all lanes, as all cells have until enough lanes were seen.
    whole = weights_of(one_cell(features, suffix))
    np.testing.assert_allclose(found[5], whole, rtol=1e-4)
    np.testing.assert_allclose(by_cell(jnp.int32(10)), jnp.tile(whole, (moments.CELLS, 1)), rtol=1e-4)


def test_cells_are_of_the_inputs_place_among_the_lanes():
    keys = jax.random.split(KEY, 3)
    x = {"a": jax.random.normal(keys[0], (500, 2)), "b": jax.random.normal(keys[1], (500,)), "n": jnp.arange(500)}
    cells = jax.jit(lambda inputs, lanes: moments.cells(inputs, lanes, moments.CELLS), static_argnums=1)
    found = cells(x, 500)
    assert len(np.unique(found)) > moments.CELLS / 2
    assert np.mean(cells({"a": 1e3 * x["a"] + 7, "b": 0.01 * x["b"], "n": -x["n"]}, 500) == found) > 0.98
    wide = cells([jax.random.normal(keys[2], (500, 3, 5)), jnp.full((500, 2), 3.0)], 500)
    assert len(np.unique(wide)) > moments.CELLS / 2
    assert not np.any(moments.cells(x, 500, 1))
    assert not np.any(cells([jnp.arange(500)], 500)) and not np.any(cells([], 500))


def test_rows_of_any_size_keep_small_weights():
    first, second, suffix = jax.random.normal(KEY, (3, 50, 2))
    first, second = centred(first), centred(second - first)  # in opposite directions, so that both have a weight
    for scale in (1e-30, 1e15, 1e37):
        row = one_cell(jnp.stack([scale * first, scale * second]), scale * suffix)
        plain = one_cell(jnp.stack([first, second]), suffix)
        np.testing.assert_allclose(weights_of(row), weights_of(plain), rtol=1e-4)
    # <c_2, c_2 - c_1> / <D, D> where c_1 is 1e15 times c_2: the weight of the first is 1e-15 of a ratio, not 0.
    weights = weights_of(one_cell(jnp.stack([1e15 * first, second]), 0 * suffix))
    np.testing.assert_allclose(weights[0], -jnp.sum(second * first) / jnp.sum(first**2) * 1e-15, rtol=1e-3)
    np.testing.assert_allclose(weights[1], 1, rtol=1e-6)
    for bad, other, weight in ((jnp.inf, 1, 0), (1, jnp.nan, 1), (jnp.inf, jnp.inf, 1)):
        row = one_cell(jnp.stack([first * bad, second * other]), suffix)
        np.testing.assert_array_equal(weights_of(row), [weight, 1 - weight] * 2)
    np.testing.assert_array_equal(weights_of(jnp.zeros(5)), [1, 0, 1, 0])  # never visited


def test_a_window_is_the_mean_of_its_calls_and_forgets():
    rows = jax.vmap(lambda k: one_cell(jax.random.normal(k, (2, 9, 2)), jnp.ones((9, 2))))(jax.random.split(KEY, 11))
    rows = rows.at[1, 4].add(200.0)  # an explosion in the second call
    # A slot of two cells, of which the second has no lanes in every second call: it has seen a zero then.
    rows = jnp.stack([rows, rows.at[1::2].set(0)], axis=1)
    blocks = jnp.stack([jnp.zeros((2, 2, 5)), jnp.stack([rows[0], rows[0]])])  # of two slots
    remember = jax.jit(moments.remember)
    for count in range(1, 11):
        seen = jnp.stack([rows[count], 0 * rows[count] if count > 3 else rows[count]])
        blocks = remember(blocks, seen, jnp.int32(count % 4))
        if count in (6, 9):  # blocks of calls (0..3), (4..7), (8..11)
            start, middle = (0, 4) if count == 6 else (4, 8)
            np.testing.assert_allclose(plain(blocks[0, 0]), plain(rows[start:middle]).mean(0), rtol=1e-4)
            np.testing.assert_allclose(plain(blocks[1, 0]), plain(rows[middle : count + 1]).mean(0), rtol=1e-4)
    # What is not visited any more stays as it was.
    np.testing.assert_allclose(plain(blocks[0, 1]), plain(rows[:4]).mean(0), rtol=1e-4)
    np.testing.assert_array_equal(blocks[1, 1], 0)
    # What was never visited takes the first row.
    np.testing.assert_array_equal(moments.average(0 * blocks[0], blocks[0], jnp.float32(0.5)), blocks[0])


def test_the_mean_of_a_window_is_over_the_calls_of_both_blocks():
    blocks = jnp.zeros((2, 1, 1, 5)).at[:, 0, 0, :4].set(jnp.array([[-1.0, 1, -1, 1], [-3, 3, -3, 3]]))
    state = ap.AdaptiveState(jnp.stack([blocks, blocks]), jnp.int32(6))
    means, lanes = jax.jit(lambda state: _adaptive._means(state, np.array([3, 4]), 10))(state)
    # Six calls: blocks of 3 and 3, and of 4 and 2.
    np.testing.assert_allclose(plain(means)[:, 0, 0, 1], [2, 10 / 6], rtol=1e-6)
    np.testing.assert_array_equal(lanes, 60)


def test_the_second_estimator_gets_the_larger_of_its_weights():
    short, long = jnp.array([[0.9, 0.1, 0.2, 0.8]]), jnp.array([[0.7, 0.3, 0.5, 0.5]])
    np.testing.assert_array_equal(moments.cautious(short, long), jnp.array([[0.7, 0.3, 0.2, 0.8]]))


TP = ap.total_propagation()
step = ap.stochastic(TP)(linear)
program_of_steps = linear_rollout(TP)


def test_unbiased_with_any_weights_that_depend_on_the_inputs():
    # A weight of its own for each visit, cell and purpose; and what the guard takes.
    objective = ap.adaptive(program_of_steps, lanes=6, by_state=True)
    state = jax.jit(objective.init)(KEY, THETA)
    k = np.random.default_rng(2).uniform(size=(2, *state.moments.shape[2:4]))
    rows = np.stack([-k[0], 1 - k[0], -k[1], 1 - k[1], 0 * k[0]], axis=-1).astype("float32")
    state = state._replace(moments=jnp.asarray(np.broadcast_to(rows, state.moments.shape)), count=jnp.int32(10_000))
    pathwise = state._replace(changes=jnp.asarray(np.tile(np.float32([0, 1]), (200, 1))))
    assert pathwise.guarded and not state.guarded
    of = lambda state: lambda key: objective.value_and_grad(key, state, THETA)[1]
    ap.testing.assert_unbiased(of(state), linear_truth(THETA), KEY, 20_000)
    by_path = ap.grad(linear_rollout(ap.reparameterization()), 6)
    both = jax.jit(lambda key: (of(pathwise)(key), by_path(key, THETA)))(KEY)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), *both)
    # What nodes see is what comes back by the weights, whichever gradient is taken.
    others = state._replace(moments=state.moments.at[..., :4].set(jnp.array([-1.0, 0, -1, 0])))
    rows = lambda state: objective.value_and_grad(KEY, state, THETA)[2].moments[0, 1]
    first, second, third = jax.jit(jax.vmap(rows))(jax.tree.map(lambda *x: jnp.stack(x), state, pathwise, others))
    np.testing.assert_array_equal(first, second)
    own = [plain(x)[:-1, :, :2] for x in (first, third)]  # without the gradient that later nodes have gathered
    assert not np.allclose(*own)


def test_the_guard_leaves_out_what_is_rare():
    guarded = lambda changes: bool(ap.AdaptiveState(jnp.zeros(0), jnp.int32(0), changes=changes).guarded)

    def of(first, second, calls=200, rare=()):
        changes = np.full((200, 2), _adaptive.NONE, np.float32)
        changes[:calls] = first, second
        changes[7 : 7 + len(rare), 0] = rare
        return changes

    assert guarded(of(0.0, 1.0)) and not guarded(of(1.0, 0.0))
    assert guarded(of(0.0, 1.0, rare=[300.0])) and not guarded(of(0.0, 1.0, 199, rare=[300.0]))
    assert not guarded(of(0.0, 1.0, rare=[np.inf]))  # not finite, and the next such gradient would stay
    assert not guarded(of(0.0, 1.0, rare=[8.0] * 2))
    assert guarded(of(-np.inf, 1.0, 3)) and not guarded(of(0.0, 1.0, 0))


def test_the_changes_are_those_of_both_gradients():
    objective = ap.adaptive(program_of_steps, lanes=6, window=3, by_state=True)
    keys = jax.random.split(KEY, 4)
    states = [jax.jit(objective.init)(keys[0], THETA)]
    for key in keys[1:]:
        states.append(jax.jit(objective.value_and_grad)(key, states[-1], THETA)[2])
    # No NaN, at which `jax_debug_nans` would stop.
    assert np.all(states[1].changes == _adaptive.NONE) and states[3].changes[0, 0] == _adaptive.NONE
    rows = [np.concatenate([np.reshape(x, (2, -1)) for x in jax.tree.leaves(s.last)], 1) for s in states]
    for n in (2, 3):
        square = np.sum((rows[n] - rows[n - 1]) ** 2, 1)
        np.testing.assert_allclose(states[3].changes[n - 1], np.log(square), rtol=1e-4)


def test_a_key_that_is_used_twice_biases():
    objective = ap.adaptive(program_of_steps, lanes=6)
    estimate = lambda key: objective.value_and_grad(key, objective.init(key, THETA), THETA)[1]["a"]
    refused(AssertionError, "biased", ap.testing.assert_unbiased, estimate, linear_truth(THETA)["a"], KEY, 10_000)


def test_every_visit_has_a_row():
    def program(tape, theta, up):
        x = jnp.ones(tape.lanes)
        inner = jax.checkpoint(jax.jit(lambda tape, x: step(tape, theta, x)))
        tape, x = inner(tape, x)
        tape, x = rollout(TP, linear, tape, theta, x, 3)
        tape, x = inner(tape, x)
        tape, x = lax.cond(up, lambda t: step(*step(t, theta, x)[:1], theta, x), lambda t: step(t, theta, x), tape)
        tape, (y, z) = tape.parallel(lambda t: inner(t, x), lambda t: inner(t, 2 * x))
        return tape.cost(x**2 + y + z)

    objective = ap.adaptive(program, lanes=8)
    init = jax.jit(objective.init)
    for up, empty in ((True, [7]), (False, [5, 6])):
        state = init(KEY, THETA, up)
        assert state.moments.shape == (2, 2, 10, 1, 5)
        assert np.flatnonzero(~np.any(state.moments[0, 1], axis=(1, 2))).tolist() == empty
    _, gradient, after = jax.jit(objective.value_and_grad)(jax.random.key(1), state, THETA, True)
    assert np.isfinite(gradient["a"]) and not np.any(np.all(after.moments[:, 1] == 0, axis=(2, 3)))


def test_jit_scan_and_vmap_agree_and_a_state_is_a_pytree():
    objective = ap.adaptive(program_of_steps, lanes=8, window=2, by_state=True)

    def train(state, key):
        value, gradient, state = objective.value_and_grad(key, state, THETA)
        return state, (value, gradient["a"])

    keys = jax.random.split(KEY, (5, 2))
    states = jax.jit(jax.vmap(objective.init, (0, None)))(keys[0], THETA)
    last, found = jax.jit(lambda states: lax.scan(jax.vmap(train), states, keys[1:]))(states)
    second = lambda tree: jax.tree.map(lambda x: x[1], tree)
    single, train = second(states), jax.jit(train)
    for key in keys[1:, 1]:
        single, expected = train(single, key)
    np.testing.assert_allclose([x[-1, 1] for x in found], expected, rtol=1e-3)
    np.testing.assert_allclose(second(last).moments, single.moments, rtol=1e-3, atol=1e-6)
    assert single.count == 5


def test_argnums_aux_integers_and_keywords():
    def program(tape, theta, n, scale, *, shift=0.0):
        tape, x = step(tape, theta, jnp.ones(tape.lanes) * scale)
        return tape.cost(x**2 + shift), {"n": n + 1}

    objective = ap.adaptive(program, lanes=50, argnums=(3, 1), has_aux=True)
    state = jax.eval_shape(objective.init, KEY, THETA, 3, 2.0, shift=1.0)
    state = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)
    call = jax.jit(objective.value_and_grad)
    (value, aux), (to_scale, to_theta), _ = call(jax.random.key(1), state, THETA, 3, 2.0, shift=1.0)
    assert aux["n"] == 4 and value > 1 and jnp.shape(to_scale) == () and set(to_theta) == {"a", "b"}


@pytest.mark.long
def test_at_the_edge_of_chaos_mixtures_better_both_by_their_own_weights_and_by_those_of_one_earlier_call():
    program = lambda method: chaotic_network.program(method, horizon=50)
    found = lambda estimate: ap.testing.moments(estimate, KEY, 60, batch_size=6)
    by = lambda method: found(lambda key: ap.grad(program(method), 300)(key, 2.5))
    rp, lr, tp = map(by, ("RP", "LR", "decoupled"))
    best = min(rp.variance, lr.variance)
    assert tp.variance < best / 20 and abs(tp.mean - lr.mean) < 4 * np.hypot(tp.standard_error, lr.standard_error)
    objective = ap.adaptive(program("decoupled"), 300)
    state = jax.jit(objective.init)(jax.random.key(5), 2.5)
    assert found(lambda key: objective.value_and_grad(key, state, 2.5)[1]).variance < best / 20


scaled = lambda theta, x, deviation=1.0: dist.Normal(theta * x, deviation)


def test_an_exploding_pathwise_gradient_leaves_nothing_behind():
    make = functools.partial(scaled, deviation=0.1)
    cost = lambda x: jnp.sin(jnp.exp(60 * x)) + jnp.where(x > 1, jnp.inf, 1 + 0 * x) * 0
    program = walk(TP, make, 2, cost)
    assert np.all(np.isfinite(jax.jit(ap.adaptive(program, 20, check_nan=False).init)(KEY, 1.5).moments))


def test_errors():
    objective = ap.adaptive(program_of_steps, lanes=8)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(objective.init, KEY, THETA))
    words, other = r"shapes \(3, 5\), and these need \(2, 2, 4, 1, 5\)", state._replace(moments=jnp.zeros((3, 5)))
    refused(ValueError, words, objective.value_and_grad, KEY, other, THETA)
    refused(TypeError, "the state is from init", objective.value_and_grad, KEY, THETA, THETA)
    refused(ValueError, "is without by_state", lambda: state.guarded)
    other, mine = (ap.adaptive(program_of_steps, lanes=8, by_state=True, window=n) for n in (7, 8))
    other = jax.eval_shape(other.init, KEY, THETA)
    refused(ValueError, "another window", jax.eval_shape, mine.value_and_grad, KEY, other, THETA)
    refused(TypeError, "dtype int32, which has no gradient", objective.init, KEY, {"a": 1, "b": (2,)})
    second = jax.grad(lambda theta: objective.value_and_grad(KEY, state, theta)[1]["a"])
    refused(TypeError, "no second derivative", jax.eval_shape, second, THETA)
    wrong = lambda words, **options: refused(ValueError, words, ap.adaptive, program_of_steps, **{"lanes": 8} | options)
    wrong("must be an integer of at least 1, got 0", window=0)
    wrong("argnums=0: 0 is the key", argnums=0)
    for lanes in (8.0, True):
        wrong("lanes must be an integer of at least 1", lanes=lanes)


drawn_by = lambda estimator: paid(ap.stochastic(estimator)(lambda theta: dist.Normal(theta, 1.0)))


def looped(tape, theta):
    node = ap.stochastic(TP)(scaled)
    return lax.while_loop(lambda c: c[1][0] < 0, lambda c: node(c[0], theta, c[1]), (tape, jnp.zeros(8)))


never = lambda tape, theta: rollout(TP, linear, tape, THETA, jnp.full(8, theta), 0)


def test_programs_that_are_refused():
    def unadapted(words, program):
        refused(ValueError, words, jax.eval_shape, ap.adaptive(program, 8).init, KEY, 0.5)

    unadapted("no node of the program has a mixer", drawn_by(ap.reparameterization()))
    unadapted("a weight for each coordinate", drawn_by(ap.total_propagation(target="parameters")))
    three = ap.Mixer("three", (ap.reparameterization(),) * 3, PUBLISHED.weights)
    unadapted("this mixer has 3 estimators", drawn_by(three))
    # It would not be asked, and where it guards against a bias that would be silent.
    unadapted("a rule of its own, which would not", drawn_by(PUBLISHED))
    unadapted("is never visited", paid(never))
    unadapted("use lax.scan", paid(looped))


def test_float64_of_any_size(x64):
    program = lambda tape, theta, scale: walk(TP, scaled, 1, lambda x: jnp.sin(scale * x))(tape, theta)
    objective = ap.adaptive(program, 8)
    init, step = jax.jit(objective.init), jax.jit(objective.value_and_grad)
    for scale in (1e60, 1e-60):
        state = init(KEY, 0.5, scale)
        _, gradient, state = step(jax.random.key(1), state, 0.5, scale)
        assert np.isfinite(gradient) and np.all(np.isfinite(state.moments)) and np.any(state.moments != 0)


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_nodes_of_constants_let_messages_by(first, x64):
    # The other node's target is empty, and it is reached since the suffix or the moments come past it.
    def program(tape, theta):
        pair = (theta, jnp.float64(1.0)) if first else (jnp.float64(1.0), theta)
        node = ap.stochastic(TP)(scaled)
        tape, x = node(tape, pair[0], jnp.ones(tape.lanes))
        tape, y = node(tape, pair[1], jnp.ones(tape.lanes))
        return tape.cost(x**2 + y**2)

    objective = ap.adaptive(program, 10)
    state = jax.jit(objective.init)(KEY, jnp.float64(0.7))
    both = lambda key: (objective.value_and_grad(key, state, 0.7)[1], ap.grad(program, 10, cross_fit=True)(key, 0.7))
    ap.testing.assert_unbiased(both, (1.4, 1.4), jax.random.key(3), 2_000)
