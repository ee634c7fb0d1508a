"""Objectives: what is differentiated, tapes with a batch axis, branches, and the data axis with its warning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flax import nnx

import apgrad as ap
from apgrad._programs.jaxprs import trace
from apgrad.expectations._programs.leading_axes import is_sum_over
from tests.cases import cases
from tests.compiled import listening
from tests.expectations.instruments import KEY, assert_gradient, refused_program, traced, visit
from tests.expectations.programs import coins, paid
from tests.refusals import refused

ESTIMATORS = {"rp": ap.reparameterization, "lr": ap.likelihood_ratio, "tp": ap.total_propagation}


stepper = lambda estimator: ap.stochastic(ESTIMATORS[estimator]())(lambda theta, x: dist.Normal(theta + x, 1.0))


def squared(estimator):
    """A program of one step, which costs the square of the sample, its aux."""
    return paid(lambda tape, theta: stepper(estimator)(tape, theta, jnp.zeros(4)), jnp.square, aux=True)


@pytest.mark.parametrize("estimator", ["lr", pytest.param("tp", marks=pytest.mark.long)])
def test_calls_without_jit_compile_nothing_again(estimator):
    gradient = jax.grad(ap.expectation(squared(estimator), 4, has_aux=True), argnums=1, has_aux=True)
    calls = lambda *seeds: [gradient(jax.random.key(seed), 1.0) for seed in seeds]
    with listening() as first:
        calls(0, 1)
    with listening() as later:  # what is compiled again at each call JAX keeps each time: memory would grow
        calls(2, 3, 4)
    assert first and not later


THREE = jnp.arange(3.0)
# Programs of a tape and of a step(tape, a), in which a tape gets a batch axis.
MAPPED = {
    "an argument": lambda step, tape: jax.vmap(step, (None, 0), (None, 0))(tape, THREE)[0],
    "an argument that comes back mapped": lambda step, tape: jax.vmap(step, (None, 0))(tape, THREE)[0],
    "closed over": lambda step, tape: jax.vmap(lambda a: step(tape, a), out_axes=(None, 0))(THREE)[0],
    "scanned inside": lambda step, tape: jax.vmap(
        lambda tape, a: jax.lax.scan(lambda tape, _: step(tape, a), tape, length=2), (None, 0), (None, 0)
    )(tape, THREE)[0],
    "stacked": lambda step, tape: jax.lax.scan(lambda tape, a: (step(tape, a)[0],) * 2, tape, THREE)[1],
    "cost": lambda step, tape: jax.vmap(lambda a: tape.cost(a * jnp.ones(4)))(THREE),
    "compiled cost": lambda step, tape: jax.vmap(jax.jit(lambda a: tape.cost(a * jnp.ones(4))))(THREE),
    "key": lambda step, tape: jax.vmap(lambda _: tape.next_key()[0], out_axes=None)(THREE),
    "made by hand": lambda step, tape: jax.tree.map(lambda x: jnp.stack([x, x]), tape),
}


@pytest.mark.parametrize("estimator", ["rp", "tp"])
@pytest.mark.parametrize("form", MAPPED)
def test_a_tape_with_a_batch_axis_is_refused(estimator, form):
    def program(tape, theta):
        step = lambda tape, a: stepper(estimator)(tape, theta, jnp.zeros(4) + a)
        return MAPPED[form](step, tape.cost(theta * jnp.ones(4))).cost(jnp.ones(4))

    gradient = ap.grad(program, 4)
    for call, theta in ((gradient, 1.0), (jax.vmap(gradient, (None, 0)), jnp.ones(2))):
        refused(ValueError, "cannot have a batch axis", jax.eval_shape, call, KEY, theta)


def test_a_branch_of_parallel_that_uses_another_ones_sample_is_refused():
    flip = ap.stochastic(ap.likelihood_ratio())(lambda theta: dist.Bernoulli(probs=theta))

    def program(tape, theta, within=lambda f: f):
        found = []
        draw = lambda tape: (lambda tape, x: (tape, found.append(x)))(*flip(tape, theta))
        pay = lambda tape: (within(lambda tape: tape.cost(found[0].astype(jnp.float32)))(tape), None)
        return tape.parallel(draw, pay)[0]

    nested = lambda tape, theta: tape.parallel(lambda t: (program(t, theta), None), lambda t: (t, None))[0]
    in_scan = lambda tape, theta: jax.lax.scan(lambda t, _: (program(t, theta), None), tape, length=2)[0]
    for wrong in (program, lambda t, theta: program(t, theta, jax.jit), nested, in_scan):
        refused_program("made inside another branch", wrong, 0.3)

    def right(tape, theta):
        branch = lambda tape: (lambda tape, x: (tape.cost(jnp.arange(4.0) * x.astype(float)), x))(*flip(tape, theta))
        tape, (x, y) = tape.parallel(branch, lambda tape: tape.parallel(branch, branch))
        return tape.cost((x + y[0] + y[1]).astype(jnp.float32))

    assert_gradient(right, 0.3, 7.5, 4, 2000)  # of three branches' E[1.5 x], and of E[3 x]


@pytest.mark.parametrize("estimator, options", [("rp", {}), ("lr", {}), ("tp", {}), ("tp", {"cross_fit": True})])
def test_a_derivative_of_aux_is_refused_where_it_would_lack_the_choices(estimator, options):
    def program(tape, theta):
        tape, x = squared(estimator)(tape, theta)
        return tape, {"x": x, "count": 3, "found": jnp.arange(3)}

    objective = ap.expectation(program, 4, has_aux=True, **options)
    both = ap.value_and_grad(program, 4, has_aux=True, **options)
    alone = jax.grad(lambda theta: objective(KEY, theta)[0])
    (value, gradient), found = jax.jit(lambda theta: (both(KEY, theta), alone(theta)))(1.0)
    assert value[1]["count"] == 3 and jnp.isfinite(gradient)
    np.testing.assert_allclose(found, gradient, rtol=1e-5)
    for call in (objective, jax.jit(objective)):
        of_aux = jax.grad(lambda theta, call=call: call(KEY, theta)[1]["x"].mean())
        if estimator == "rp":
            assert jax.jit(of_aux)(1.0) == 1
            continue
        refused(TypeError, "aux has no derivative", jax.eval_shape, of_aux, 1.0)


@pytest.mark.parametrize("estimator", ["rp", "lr"])
def test_a_forward_mode_derivative_of_aux_is_nan_where_it_would_lack_the_choices(estimator):
    objective = ap.expectation(squared(estimator), 4, has_aux=True)

    def derivatives(theta):
        means = lambda theta: jax.tree.map(jnp.mean, objective(KEY, theta))
        # Where aux is put aside nothing is refused, at any order.
        first, second = (d(objective, argnums=1, has_aux=True) for d in (jax.jacfwd, jax.hessian))
        return jax.jvp(means, (theta,), (1.0,))[1], first(KEY, theta), second(KEY, theta)

    (to_value, to_aux), (gradient, x), (second, _) = jax.jit(derivatives)(1.0)
    assert jnp.isfinite(to_value) and (to_aux == 1 if estimator == "rp" else jnp.isnan(to_aux))
    np.testing.assert_allclose(gradient, to_value, rtol=1e-5)
    assert jnp.isfinite(second) and jnp.isfinite(x).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_python_integers_and_bools_of_shared_arguments_are_not_traced(estimator):
    make = lambda p, x: dist.Normal(p["w"] * x if p["flag"] else 0 * x, float(range(1, 4)[p["n"]]))
    step = ap.stochastic(ESTIMATORS[estimator]())(make)
    traced(paid(lambda tape, w: step(tape, {"w": w, "flag": True, "n": 0}, jnp.ones(4))), 2.0)


@pytest.mark.filterwarnings("ignore:.*the baseline averages over other data")
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_keyword_arguments_of_a_stochastic_function(estimator):
    step = stepper(estimator)

    found = lambda call: jax.jit(ap.value_and_grad(paid(call), 4, check_nan=False)).lower(KEY, 2.0).as_text()
    z = jnp.arange(4.0)
    by_position = found(lambda t, theta: step(t, theta, z))
    for by_name in (lambda t, theta: step(t, theta, x=z), lambda t, theta: step(t, x=z, theta=theta)):
        assert found(by_name) == by_position
    alone = ap.stochastic(ap.reparameterization())(lambda theta, *, x: dist.Normal(theta + x, 1.0))
    refused(TypeError, "unexpected keyword argument 'y'", found, lambda t, theta: step(t, theta, x=z, y=z))
    refused(TypeError, r"by position, and \['x'\] have none", found, lambda t, theta: alone(t, theta, x=z))


def test_argnums_are_any_integers_and_name_what_has_a_gradient():
    program = lambda tape, a, b: tape.cost(a * b * jnp.ones(4))
    for one in (np.int64(2), 2):
        assert jax.jit(ap.value_and_grad(program, 4, argnums=one))(KEY, 3.0, 5.0) == (15, 3)
    assert jax.jit(ap.value_and_grad(program, 4, argnums=[np.int32(2), 1]))(KEY, 3.0, 5.0)[1] == (3, 5)
    refused(TypeError, "argnums must be an integer or a sequence", ap.value_and_grad, program, 4, argnums=1.0)
    refused(ValueError, "names an argument twice", ap.grad, program, 4, argnums=(1, 2, 1))
    refused(ValueError, r"argnums=3, .* the key and 2 argument", ap.grad(program, 4, argnums=3), KEY, 3.0, 5.0)
    refused(ValueError, "0 is the key", ap.grad, program, 4, argnums=0)
    step, module = ap.value_and_grad(program, 4), nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # with a key and a count
    refused(TypeError, r"argument 1\['f'\] is no array but", step, KEY, {"f": jnp.tanh}, 5.0)
    refused(TypeError, r"dtype uint32, which has no gradient.*nnx.split", step, KEY, module, 5.0)
    refused(TypeError, r"argument 1\['n'\] has dtype int32.*no gradient", step, KEY, {"w": 1.0, "n": jnp.int32(2)}, 5.0)
    for wrong in (3, jnp.arange(3)):
        found = refused(TypeError, "argument 1 has dtype int32.*as floating point, such as 1.0", step, KEY, wrong, 5.0)
        assert "nnx" not in str(found)
    for key in (KEY, jax.random.key_data(KEY)):
        refused(TypeError, r"argument 1 is a PRNG key.*The key comes first: \(key, \*args\)", step, 1.0, key, 5.0)
    refused(TypeError, "first argument is one PRNG key.*got float.* The key comes first", step, 1.0, 1.0, 5.0)
    refused(TypeError, "int", jax.grad(ap.expectation(program, 4), argnums=1), KEY, 3, 5.0)


@pytest.mark.parametrize("estimator", ["lr", "tp"])
def test_no_tracer_is_kept(estimator):
    with jax.checking_leaks():
        jax.eval_shape(ap.grad(squared(estimator), 4, has_aux=True), KEY, 1.0)


THETA = 0.3


@pytest.mark.filterwarnings("ignore:.*averages over other data")  # the parameters are the lanes' own
def test_value_and_lane_wide_choices():
    """The objective is the mean over data; a choice that data share pays for that mean and for its own cost."""
    shared, to_go = jnp.array([[1.0, 2.0, 6.0], [0.0, 3.0, 0.0]]), jnp.array([10.0, 20.0])

    def program(tape, a, b, c):
        tape = visit(visit(tape, a), b, parts=True)
        return visit(tape, c, "leave_one_out", parts=True).cost(to_go).cost(shared)

    differentiated = ap.value_and_grad(program, lanes=2, data=3, argnums=(1, 2, 3))
    value, (a, b, c) = jax.jit(differentiated)(KEY, jnp.zeros(2), *[jnp.zeros((2, 3))] * 2)
    assert value == pytest.approx(float(jnp.mean(shared)) + 15)
    np.testing.assert_allclose(a, (to_go + shared.mean(-1)) / 2, rtol=1e-6)
    total = to_go[:, None] + shared / 3
    np.testing.assert_allclose(b, total / 2, rtol=1e-6)
    np.testing.assert_allclose(c, (total - total[::-1]) / 2, rtol=1e-6)  # the other lane's, of the same datum


def test_derivatives_are_unbiased_to_second_order():
    offsets, p = jnp.array([5.0, -1.0, 2.0]), 1 / (1 + np.exp(-THETA))  # of the costs, by datum

    logits = lambda tape, theta: jnp.broadcast_to(theta, (tape.lanes, tape.data))
    program = coins(logits, cost=lambda b: offsets + jnp.where(b > 0, 2.0, 0.5 * offsets), parts=True)
    first = ap.grad(program, lanes=2, data=3)
    slope = p * (1 - p) * float(jnp.mean(2.0 - 0.5 * offsets))
    both = lambda key: (first(key, THETA), jax.grad(first, argnums=1)(key, THETA))
    ap.testing.assert_unbiased(both, (slope, slope * (1 - 2 * p)), KEY, 10_000)


def of_axes(cost=lambda b: b, parts=True, data=3, size=3):
    logits = lambda tape, theta: jnp.broadcast_to(theta, (tape.lanes, size))
    traced(coins(logits, cost=cost, parts=parts), THETA, lanes=2, data=data)


def test_axes_that_do_not_fit_are_errors():
    summed = r"summed or averaged to \(2,\) before.*costs of shape \(2, 3\)"
    refused(ValueError, summed, of_axes, lambda b: b.mean(-1))
    refused(ValueError, r"summed or averaged .*for each lane and a part", of_axes, lambda b: b.mean(-1), data=None)
    refused(ValueError, "has 4 parts, and data=3 is given", of_axes, lambda b: b[:, :3], size=4)
    refused(ValueError, r"a cost of shape \(2, 2\), expected \(2, 3\)", of_axes, lambda b: b[:, :2])
    refused(ValueError, "Say parts=True if it is one choice for each datum", of_axes, parts=None)
    refused(ValueError, "data, the size of the minibatch, must be an integer of at least 1, got 0", of_axes, data=0)
    of_axes(parts=False)


def test_a_baseline_that_mixes_data_is_named():
    @ap.stochastic(ap.likelihood_ratio())
    def choose_action(theta, x):
        return dist.Bernoulli(logits=theta * x)

    words = r"choose_action \(likelihood_ratio\): the leave-one-out baseline .* other data\. Let lanes be samples"
    for transform in (lambda f: f, jax.jit):
        with pytest.warns(UserWarning, match=words):
            jax.eval_shape(transform(ap.expectation(paid(choose_action), 6)), KEY, THETA, jnp.arange(6.0))


def test_a_choice_that_hands_something_on_is_charged_where_a_cost_follows():
    """Warnings are errors here."""

    def program(tape, theta, x, after):
        coin, costs = dist.Bernoulli(logits=x * theta), lambda b: (b, b.astype(jnp.float32))
        tape = tape if after else tape.cost(x)
        tape, b = jax.jit(lambda tape: ap.choose(tape, coin, costs, ap.enumeration()))(tape)
        if after:
            tape, _ = jax.lax.scan(lambda tape, _: (tape.cost(x), None), tape, length=2)
        return tape, jnp.mean(b)

    run = lambda after: traced(functools.partial(program, after=after), 0.5, jnp.arange(4.0), has_aux=True)
    run(False)
    with pytest.warns(UserWarning, match=r"choose \(enumeration\).*other data\. These are costs after the choice: put"):
        run(True)


@pytest.mark.quick
def test_what_mixes_no_data_is_not_warned_of():
    """Warnings are errors here."""
    step = ap.stochastic(ap.likelihood_ratio())(lambda theta: dist.Bernoulli(logits=theta))
    traced(paid(lambda tape, theta, mask: step(tape, theta, mask=mask)), THETA, jnp.arange(4) < 2)  # given
    # A typed key for each lane.
    draws = lambda keys: jax.vmap(jax.random.normal)(keys)
    keyed = lambda tape, theta, keys: coins(lambda *_: jnp.full(4, theta), cost=lambda b: b * draws(keys))(tape)
    traced(keyed, THETA, jax.random.split(KEY, 4))

    def scanned(tape, theta, x):  # the axis of the steps is not the lanes', though it is as long
        pay = coins(lambda _, x: theta * jnp.broadcast_to(x, (4,)))
        return jax.lax.scan(lambda tape, x: (pay(tape, x), x), tape, x)[0]

    traced(scanned, THETA, jnp.arange(4.0))


def network(tape, theta, x, baseline="leave_one_out"):
    logits = jnp.tanh(x @ theta["a"]) @ theta["b"]
    return coins(lambda _: logits[:, 0], ap.likelihood_ratio(baseline))(tape)


def test_data_are_followed_through_a_network_and_parameters_are_not():
    theta = {"a": jnp.eye(6) + 0.1, "b": jnp.ones((6, 1)).at[0].set(2.0)}
    given = lambda x, **options: traced(lambda tape, theta: network(tape, theta, x, **options), theta, lanes=6)
    x = jnp.arange(36.0).reshape(6, 6) / 36
    with pytest.warns(UserWarning, match="other data"):
        given(x)
    # Warnings are errors here.
    given(jnp.ones((6, 6)))  # the same for all lanes
    given(x, baseline=None)


def convolved(x, pad):
    """Two windows of three columns, or with `pad` of three rows and three columns."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    x, w = (x[None, ..., None], jnp.ones((3, 3, 1, 1))) if pad else (x[:, None, :, None], jnp.ones((1, 3, 1, 1)))
    return jax.lax.conv_general_dilated(x, w, (1, 1), pad or "VALID", dimension_numbers=dimensions)


pooled = lambda x, window, padding="VALID": jax.lax.reduce_window(x, 0.0, jax.lax.add, window, (1, 1), padding)


def recurrent(x):
    return jax.lax.scan(lambda h, x: (jnp.tanh(h + jnp.split(x, 2, axis=-1)[0]), None), jnp.zeros((6, 2)), x[None])[0]


# Functions of an array (6, 4), a row an example. In the first ones row i of what is returned depends on row i alone.
BY_ROW = {
    "column": lambda x: x[:, 0],
    "columns": lambda x: x[:, jnp.array([3, 1])],
    "traced column": lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.argmin(jnp.zeros(3)), 2, axis=1),
    "set columns": lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:, :2], 2, axis=1),
    "reversed": lambda x: x[:, ::-1],
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
    "differences": lambda x: jnp.diff(x, axis=1),
    "transformed": lambda x: jnp.fft.fft(x).real,
    "cumulative sum": lambda x: jnp.cumsum(x, axis=1),
    "sorted": lambda x: jnp.sort(x, axis=1),
    "rolled": lambda x: jnp.roll(x, 1, axis=1),
    "best": lambda x: jax.lax.top_k(x, 2)[0],
    "stacked": lambda x: jnp.stack([x, 2 * x], axis=1),
    "unstacked": lambda x: jnp.unstack(x, axis=1)[1],
    "tiled": lambda x: jnp.tile(x, (1, 2)),
    "convolved": lambda x: convolved(x, ()),
    "pooled": lambda x: pooled(x, (1, 2)),
    "printed": lambda x: jax.debug.callback(print, x) or x,
}
ACROSS_ROWS = {
    "columns": lambda x: x.T[:, jnp.array([3, 1])],
    "set columns": lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:2], 4, axis=0),
    "reversed": lambda x: x * x[::-1],
    "padded": lambda x: x * jax.lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))),
    "differences": lambda x: jnp.diff(x, axis=0),
    "cumulative sum": lambda x: jnp.cumsum(x, axis=0),
    "sorted": lambda x: x * jnp.sort(x, axis=0),
    "rolled": lambda x: x * jnp.roll(x, 1, axis=0),
    "best": lambda x: jax.lax.top_k(x.T, 2)[0],
    "tiled": lambda x: x[0] * jnp.tile(x[:2], (3, 1)),
    "convolved": lambda x: convolved(x, "SAME"),
    "pooled": lambda x: pooled(x, (3, 1), "SAME"),
}


@cases("function", BY_ROW | {"recurrent": recurrent})
def test_data_are_followed_where_each_row_stays_by_itself(function):
    program = coins(lambda _, theta, x: theta * jnp.sum(function(x).reshape(6, -1), axis=1))
    with pytest.warns(UserWarning, match="other data"):
        traced(program, THETA, jnp.arange(24.0).reshape(6, 4), lanes=6)


def test_rows_are_apart_where_they_do_not_act_on_each_other_and_only_there():
    summed = lambda f: trace(lambda x: jnp.sum(jnp.tanh(f(x))), jnp.ones((6, 4)))[0]
    for wanted, functions in ((True, BY_ROW), (False, ACROSS_ROWS)):
        assert {name for name, f in functions.items() if is_sum_over(summed(f), [0]) != wanted} == set()


held = jax.lax.stop_gradient
less_mean = lambda x: x - x.mean(0)
constant_shares = lambda x: jnp.cumsum(jax.nn.softmax(jax.lax.stop_gradient(x[:, 0])))
redrawn = lambda x: jax.random.categorical(KEY, jax.lax.stop_gradient(x[:, 0]), shape=(4,))
next_place = lambda: (jnp.arange(4) + 1) % 4
# Functions of samples (4, 4), a lane a row: costs (4,) that depend on a sum over the lanes, and such that do not.
OF_ALL_LANES = {
    "another axis": lambda x: jnp.sum(x**2, axis=0),
    "the mean for all": lambda x: jnp.full(4, jnp.mean(x)),
    "less the mean": lambda x: jnp.sum((x - x.mean(0)) ** 2, axis=1),
    "normalised": lambda x: jnp.sum(jax.nn.standardize(x, axis=0), axis=1),
    "softmax": lambda x: jax.nn.softmax(x, axis=0)[:, 0],
    "cumulative": lambda x: jnp.cumsum(x[:, 0]),
    "covariance": lambda x: jnp.sum(x @ (x.T @ x), axis=1),
    "norm": lambda x: x[:, 0] / jnp.linalg.norm(x[:, 0]),
    "broadcast": lambda x: ((x[:, :1] - x[:, 1]) ** 2).mean(1),
    "in a loop": lambda x: jax.lax.scan(lambda x, _: (x - x.mean(0), x[:, 0]), x, length=3)[1].sum(0),
    "in a branch": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x - x.mean(0), jnp.sin, x)[:, 0],
    "largest": lambda x: x[:, 0] / x.max(),
    "less the median": lambda x: x[:, 0] - jnp.median(x[:, 0]),
    "statistics": lambda x: x @ jnp.concatenate([x.mean(0), x.std(0)])[2:6],
    "how many": lambda x: x[:, 0] * (x > 0).sum().astype(x.dtype),
    "frequencies": lambda x: jnp.full(4, jnp.sum(jax.nn.one_hot(jnp.argmax(x, axis=1), 4).mean(0) ** 2)),
    "ranks": lambda x: jnp.argsort(jnp.argsort(x[:, 0])),
    "larger ones": lambda x: jnp.sum(x[:, :1] < x[:, 0], axis=1),
    "the best": lambda x: jnp.where(jnp.arange(4) == jnp.argmax(x[:, 0]), x[:, 1], 0),
    "one of them": lambda x: jnp.full(4, (x[:, 0] > 1).any()),
    "drawn again": lambda x: x[jax.random.categorical(KEY, -x[:, 0], shape=(4,))][:, 1],
    "drawn again at once": lambda x: x[jax.random.categorical(KEY, -x[:, 0], shape=(4,)), 1],
    "drawn by constants": lambda x: x[redrawn(x)][:, 1],
    "two drawn by constants": lambda x: jnp.tile(x[redrawn(x)[:2], 1], 2),
    "drawn by constants at once": lambda x: x[redrawn(x), 1],
    "drawn one by one": lambda x: jax.vmap(lambda i: x[i])(redrawn(x))[:, 1],
    "drawn step by step": lambda x: jax.lax.scan(lambda _, i: (None, x[i, 1]), None, redrawn(x))[1],
    "drawn by a product": lambda x: (jax.nn.one_hot(redrawn(x), 4) @ x)[:, 1],
    "a product": lambda x: jnp.sum(jnp.ones((4, 4)) @ x, axis=1),
    "drawn evenly": lambda x: x[jnp.searchsorted(constant_shares(x), jnp.linspace(0.1, 0.9, 4))][:, 1],
    "sorted by constants": lambda x: x[jnp.argsort(jax.lax.stop_gradient(x[:, 0]))][:, 1],
    "the best by constants": lambda x: jnp.full(4, x[jnp.argmax(jax.lax.stop_gradient(x[:, 0]))][1]),
    "mirrored": lambda x: x[::-1, 0],
    "the elite": lambda x: x[jax.lax.top_k(x[:, 0], 4)[1]][:, 1],
    "kernels": lambda x: jnp.sum(jnp.tanh(x @ x.T), axis=1),
    "rolled": lambda x: x[:, 0] - jnp.roll(x, 1, axis=0)[:, 1],
    "less the first's": lambda x: x[:, 0] - x[0, 0],
    "the last's": lambda x: jnp.full(4, jnp.sum(x[-1:])),
    "of those before": lambda x: jnp.concatenate([jnp.zeros(1), jnp.cumsum(x[:-1, 0])]),
    "the second's, four times": lambda x: jnp.stack([x[1, 0]] * 4),
    "in another order": lambda x: jnp.stack([jnp.sum(x[i]) for i in (1, 0, 2, 3)]),
    "less the one before": lambda x: jnp.concatenate([x[:1], x[1:] - x[:-1]])[:, 0],
    "the one before": lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0)))[:, 0],
    "halves in each other's place": lambda x: jnp.concatenate([x[2:] ** 2, x[:2]])[:, 0],
    "rolled in a branch": lambda x: jax.lax.cond(True, jnp.sin, lambda x: jnp.roll(x, 1), x[:, 1]),
    "shuffled": lambda x: x[:, 0] - jax.random.permutation(KEY, x)[:, 1],
    "at shuffled places": lambda x: x[jax.random.permutation(KEY, 4), 1],
    "at given places": lambda x: x[np.array([1, 0, 2, 3])][:, 1],
    "at the next place": lambda x: jax.vmap(lambda i: x[i, 0])(next_place()),
    "at the next place in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c + x[next_place(), 0], x[:, 0]),
    "where it chose": lambda x: x[jnp.argmax(x, axis=1)][:, 0],
    "along its columns": lambda x: jnp.take_along_axis(x, jnp.argsort(jax.lax.stop_gradient(x), axis=0), axis=0)[:, 0],
    "repeated": lambda x: jnp.repeat(x[:, 0], np.array([2, 0, 1, 1]), total_repeat_length=4),
    "counted": lambda x: jnp.zeros(4).at[jnp.argmax(x, axis=1)].add(1.0)[jnp.argmax(x, axis=1)],
    "added where others are": lambda x: jax.ops.segment_sum(x[:, 0], np.array([0, 0, 1, 1]), 4),
    "the mean over mapped lanes": lambda x: jax.vmap(lambda x: x[0] - jax.lax.pmean(x[1], "lane"), axis_name="lane")(x),
    "less the mean, one with another axis": lambda x: jnp.reshape(x.reshape(-1) - x.reshape(-1).mean(), (4, 4))[:, 0],
    "less the mean, after a loop over lanes": lambda x: (lambda y: y - y.mean())(jax.lax.map(jnp.sum, x)),
    "summed in a loop over lanes": lambda x: jax.lax.scan(lambda c, x: (c + x[0], c), 0.0, x)[1],
    "summed in a loop within a loop": lambda x: jax.lax.map(
        lambda y: jax.lax.scan(lambda c, y: (c + y, c), 0.0, y)[1], x.T
    )[0],
    "less the others in a loop over lanes": lambda x: jax.lax.map(lambda y: jnp.sum(y - x), x),
    "the mean, solved": lambda x: jax.vmap(jnp.linalg.solve)(jnp.ones((4, 4, 4)) + jnp.eye(4), less_mean(x))[:, 0],
    "less the mean, padded": lambda x: jnp.pad(x - x.mean(0), ((0, 0), (1, 0)))[:, 2],
    "a matrix of lanes": lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(4))[:, 0],
    "transformed over lanes": lambda x: jnp.fft.fft(x, axis=0).real[:, 0],
    "convolved over lanes": lambda x: jnp.convolve(x[:, 0], jnp.ones(3), mode="same"),
    "the largest in a window of lanes": lambda x: pooled(x, (3, 1), "SAME")[:, 0],
    "the first, tiled": lambda x: x[:, 0] * jnp.tile(x[:1, 0], 4),
    "less the mean, the first written": lambda x: (lambda y: y - y.mean(0))(x.at[0].set(x[0] ** 2))[:, 0],
    "less the mean, after a loop of steps": lambda x: (lambda y: y[0] - y[0].mean())(jax.lax.map(jnp.sin, x.T)),
    "less the mean, the first replaced": lambda x: less_mean(jax.lax.dynamic_update_slice(x, x[:1] ** 2, (0, 0)))[:, 0],
    "less the mean, the lanes second": lambda x: less_mean(x.T.reshape(2, 8).reshape(4, 4).T)[:, 0],
    "the mean of chosen columns": lambda x: less_mean(jnp.zeros((4, 4)).at[:, np.array([2, 0])].set(x[:, :2]))[:, 0],
    "lanes as features": lambda x: jax.lax.conv(x[None, ..., None], jnp.ones((4, 4, 1, 1)), (1, 1), "SAME")[0, :, 0, 0],
    "written where others are": lambda x: x.at[np.array([1, 0, 2, 3])].set(x**2)[:, 0],
    "written in another order": lambda x: x.at[::-1].set(x**2)[:, 0],
    "the best is written": lambda x: jnp.zeros(4).at[jnp.argmax(x[:, 0])].set(1.0),
    "halves that are split": lambda x: jnp.concatenate([jnp.subtract(*jnp.split(x, 2)), jnp.split(x, 2)[1]])[:, 0],
    "halves that are split and joined again": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1])[:, 0],
    "unstacked": lambda x: jnp.stack(jnp.unstack(x)[::-1])[:, 0],
    "at reversed indices": lambda x: x[jnp.arange(4)[::-1], 0],
    "a histogram": lambda x: jnp.histogram(x[:, 0], bins=4, range=(-2.0, 2.0))[0],
    "sums of groups by turns": lambda x: jax.ops.segment_sum(x[:, 0], jnp.arange(4) % 2, 4),
    "the first in a branch": lambda x: jax.lax.cond(True, lambda x: jnp.tile(x[:1], (4, 1)), lambda x: x, x)[:, 0],
    "less the mean of what was rounded": lambda x: x[:, 0] - jax.lax.reduce_precision(x[:, 0], 8, 3).mean(),
    "each twice": lambda x: jnp.repeat(x[:, 0], 2)[:4],
    "doubled, from the second on": lambda x: jnp.tile(x[:, 0], 2)[1:5],
    "columns as rows": lambda x: x.T.reshape(-1).reshape(4, 4)[:, 0],
    "rolled in one axis": lambda x: jnp.roll(x.reshape(-1), 1).reshape(4, 4)[:, 0],
    "added up in a tree": lambda x: jax.lax.associative_scan(jnp.add, x[:, 0]),
    "less the one before, with a first": lambda x: jnp.diff(x[:, 0], prepend=0.0),
    "less the first's by its index": lambda x: x[:, 0] - jax.lax.dynamic_index_in_dim(x, 0, keepdims=False)[0],
    "the first in the second's place": lambda x: jax.lax.dynamic_update_slice(x, x[:1], (1, 0))[:, 0],
    "added to the next in a loop": lambda x: jax.lax.fori_loop(1, 4, lambda i, x: x.at[i].add(x[i - 1]), x)[:, 0],
    "solved over lanes": lambda x: jnp.linalg.solve(jnp.eye(4) + 0.1, x)[:, 0],
    "solved by triangles": lambda x: jax.scipy.linalg.solve_triangular(jnp.tri(4), x, lower=True)[:, 0],
    "written where all chose": lambda x: x.T.at[jnp.arange(4), jnp.argmax(x.T, axis=1)].set(2.0)[0],
    "written where the first chose": lambda x: x.at[:, jnp.argmax(x[0])].set(2.0)[:, 0],
    "a branch that all choose": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)[:, 0],
    "a branch that one chooses": lambda x: jax.lax.switch(jnp.argmax(x[0]), [jnp.sin, jnp.cos], x)[:, 0],
    "less the mean, cut in groups": lambda x: less_mean(jnp.sin(x.reshape(2, 2, 4)).reshape(4, 4))[:, 0],
    "less the other of two": lambda x: jnp.subtract(*x.reshape(2, 2, 4).swapaxes(0, 1)).repeat(2, 0)[:, 0],
}
of_lanes = lambda f: lambda x: jnp.sum(f(jnp.vstack([x, x[:2]]))[:4].reshape(4, -1), axis=1)
in_row = lambda x: 4 * jnp.arange(4) + jnp.argmax(x, 1)
OF_ONE_LANE = {name: of_lanes(f) for name, f in BY_ROW.items()}
OF_ONE_LANE |= {
    "a constant baseline": lambda x: x[:, 0] - jax.lax.stop_gradient(x[:, 0].mean()),
    "all are done": lambda x: jax.lax.while_loop(lambda x: (x < 9).all(), lambda x: x + 1, x)[:, 0],
    "row by row": lambda x: jax.lax.map(jnp.sum, x),
    "sums step by step": lambda x: jax.vmap(lambda x: jax.lax.map(jnp.sum, x))(x[..., None]).mean(1),
    "in a loop of Python": lambda x: jnp.stack([jnp.sum(row) for row in x]),
    "in a loop of Python, row by row": lambda x: jnp.concatenate([jnp.sum(x[i : i + 1], axis=1) for i in range(4)]),
    "a Python loop of four numbers": lambda x: jnp.stack([jnp.sum(jnp.stack([r[0], 1.0, r[1], r[1]])) for r in x]),
    "in a loop of Python, of joined rows": lambda x: jnp.stack([jnp.max(jnp.concatenate([r[:2], r[:2]])) for r in x]),
    "in halves": lambda x: jnp.concatenate([jnp.sin(x[:2]), x[2:4]])[:, 0],
    "all but the last": lambda x: jnp.pad(x[:-1], ((0, 1), (0, 0)))[:, 0],
    "all but the first": lambda x: jnp.concatenate([jnp.zeros(1), x[1:, 0] ** 2]),
    "the first by itself": lambda x: x.at[0].set(jnp.sin(x[0]))[:, 0],
    "less the first's held constant": lambda x: x[:, 0] - jax.lax.stop_gradient(x[0, 0]),
    "of its own choice": lambda x: (x**2)[jnp.arange(4), jnp.argmax(x, axis=1)],
    "of its own choice held constant": lambda x: x[jnp.arange(4), jnp.argmax(jax.lax.stop_gradient(x), axis=1)],
    "of choices of all lanes": lambda x: x[jnp.arange(4), jnp.argmax(jax.lax.stop_gradient(x - x.mean(0)), axis=1)],
    "of a choice of all lanes": lambda x: x[:, jnp.argmax(jax.lax.stop_gradient(x).mean(0))],
    "constants sorted": lambda x: x[:, 0] - jnp.sort(jax.lax.stop_gradient(x[:, 0])),
    "by constants in a loop": lambda x: jax.lax.scan(lambda c, y: (c + y, y), x[:, 0], jax.lax.stop_gradient(x.T))[0],
    "with others in one axis": lambda x: jnp.sin(x.reshape(-1)).reshape(4, 2, 2).sum((1, 2)),
    "loops within the lane": lambda x: jax.lax.map(lambda y: jax.lax.scan(lambda c, y: (c + y, c), 0.0, y)[1][2], x),
    "solved": lambda x: jax.vmap(lambda x: jnp.linalg.solve(jnp.outer(x, x) + jnp.eye(4), x))(x)[:, 0],
    "convolved beside lanes": lambda x: jax.lax.conv(x[None, None], jnp.ones((1, 1, 1, 3)), (1, 1), "SAME")[0, 0, :, 0],
    "the lanes second in one axis": lambda x: jnp.sin(x.T.reshape(2, 8)).reshape(4, 4).sum(0),
    "at their own places": lambda x: x[np.arange(4)][:, 0] + x.at[jnp.arange(4)].get()[:, 1],
    "at their own places, one by one": lambda x: jax.vmap(lambda i: x[i, 0])(jnp.arange(4)),
    "at two places of each": lambda x: x[jnp.arange(4)[:, None], np.array([[2, 1]])].sum(1),
    "at places of each": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1)[:, 0],
    "in a loop of Python, at places": lambda x: jnp.stack([x[i, np.array([2, 1, 3, 0])].sum() for i in range(4)]),
    "at two places": lambda x: jnp.concatenate([x[jnp.array([0, 1]), 0], x[2:4, 0]]),
    "one-hot": lambda x: jnp.zeros((4, 4)).at[jnp.arange(4), jnp.argmax(x, axis=1)].set(1.0) @ jnp.arange(4.0),
    "counted in each": lambda x: jax.vmap(lambda x: jnp.zeros(3).at[jnp.argmax(x[:3])].add(x[0]))(x).max(1),
    "written into a longer array": lambda x: jnp.zeros(9).at[jnp.arange(4)].set(x[:, 0])[:4],
    "a column written": lambda x: x.at[:, 1].set(x[:, 0]).at[:, np.array([2, 0])].add(x[:, :2]).sum(1),
    "added within each": lambda x: jax.vmap(lambda x: jax.ops.segment_sum(x, np.array([0, 0, 1, 1]), 2))(x)[:, 1],
    "row by row at places": lambda x: jax.lax.map(lambda i: x[i, 0], jnp.arange(4)),
    "until it is done": jax.vmap(lambda x: jax.lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x)[0]),
    "a node of two arrays": lambda x: jax.vmap(ap.node(ap.backpropagation(jnp.multiply)))(x[:, 0], x[:, 1]),
    "attention within the lane": lambda x: jnp.einsum("lij,lkj->l", x[:, None] * jnp.ones((4, 3, 1)), x[:, :, None]),
    "in halves that are split": lambda x: jnp.concatenate([jnp.sin(jnp.split(x, 2)[0]), jnp.split(x, 2)[1]])[:, 0],
    "in parts split again": lambda x: jnp.concatenate([y for z in jnp.split(x, 2) for y in jnp.split(z, 2)])[:, 0],
    "unstacked": lambda x: jnp.stack([jnp.sum(row) for row in jnp.unstack(x)]),
    "split along another axis": lambda x: jnp.subtract(*jnp.split(x, 2, axis=1))[:, 0],
    "in a row of its own": lambda x: jax.ops.segment_sum(x[:, 0], in_row(x), 16)[::4],
    "at a place of its own row": lambda x: jnp.zeros(16).at[in_row(x)].set(x[:, 0]).reshape(4, 4).sum(1),
    "at places that are computed": lambda x: sum(
        x[places(jnp.arange(4)), 1]
        for places in (
            lambda i: i - 4,
            lambda i: i % 4,
            lambda i: jnp.clip(i, 0, 3),
            lambda i: jnp.where(i < 2, i, i),
            lambda i: i.astype(jnp.uint8),
            lambda i: jnp.cumsum(jnp.ones_like(i)) - 1,
            lambda i: jnp.linspace(0, 3, 4).astype(int),
            lambda i: jnp.stack([i, jnp.argmax(x, 1)])[0],
            lambda i: (4 * i + jnp.argmax(x, 1)) // 4,
            lambda i: jax.lax.broadcasted_iota(int, (4, 2), 0)[:, 0],
        )
    ),
    "no numbers": lambda x: (
        x[:, 0] + jnp.repeat(x, 0).sum() + x[:0].sum() + x[:, :0].sum(1) + x[:, jnp.arange(0)].sum(1)
    ),
    "within its own numbers": lambda x: jax.lax.map(
        lambda x: jax.lax.clamp(x[0], jnp.arange(4.0), x[1])[:, None].sum(), x
    ),
    "at tuples of places": lambda x: (
        x[tuple(jnp.stack([jnp.arange(4), jnp.argmax(x, 1)]))]
        + jnp.zeros((4, 4)).at[tuple(jnp.stack([jnp.arange(4), jnp.argmax(x, 1)], 1).T)].set(x[:, 0]).sum(1)
        + x[tuple(jnp.indices((4, 4)))].sum(1)
        + x[tuple(jax.lax.split(jnp.concatenate([jnp.arange(4), jnp.argmax(x, 1)]), (4, 4)))]
    ),
    "in windows of its own": lambda x: jax.lax.reduce_window(x.reshape(-1), 0.0, jax.lax.add, (4,), (4,), "VALID"),
    "each twice, and every other": lambda x: jnp.sin(jnp.repeat(x, 2, 0))[::2, 0] + jnp.tile(x, (2, 1))[4:, 1],
    "in groups": lambda x: jnp.sin(x.reshape(2, 2, 4)).swapaxes(0, 1).swapaxes(0, 1).reshape(4, 4)[:, 0],
    "reversed twice": lambda x: jnp.sin(x[::-1])[::-1, 0],
    "solved, the lanes second": lambda x: jnp.linalg.solve(jnp.eye(4) + 0.1, x.T)[0],
    "a branch that all choose held constant": lambda x: jax.lax.cond(held(x).sum() > 0, jnp.sin, jnp.cos, x)[:, 0],
    "no columns": lambda x: x[:, 0] + jnp.concatenate([x[:, :0], x], 1)[:, :0].sum(1),
    "at every other place": lambda x: jnp.zeros(8).at[2 * jnp.arange(4)].set(x[:, 0])[::2],
}


@pytest.mark.quick
def test_a_sum_over_lanes_that_a_scored_choice_would_pay_for_is_refused():
    def trace_costs(cost, estimator=ap.likelihood_ratio, lanes=4):
        draw = lambda tape, theta: ap.sample(tape, dist.Normal(jnp.full((lanes, 4), theta), 1.0), estimator())
        traced(paid(draw, cost), THETA, lanes=lanes)

    for number, (name, cost) in enumerate(OF_ALL_LANES.items()):
        estimator = (ap.likelihood_ratio, ap.total_propagation)[number % 2]
        words = rf"drawn for the 4 lanes, .* and sample \({estimator().name}\) charges"
        assert refused(ValueError, words, trace_costs, cost, estimator), name
    trace_costs(OF_ALL_LANES["less the mean"], ap.reparameterization)
    for cost in OF_ONE_LANE.values():
        trace_costs(cost)
    # Places from outside of the program may be each lane's own.
    given = lambda places: trace_costs(
        lambda x: x[places, 1] + x[(places + 1) % 4, 0] + jnp.zeros(4).at[places].set(x[:, 0])
    )
    jax.eval_shape(given, jnp.arange(4))
    trace_costs(lambda x: jnp.sum(x, axis=0)[:1], lambda: ap.likelihood_ratio(None), lanes=1)


TABLE = jnp.array([0.2, 1.0, 0.5])
# Costs of a sample x (4,). A pathwise derivative has none of the derivative of what they are on average, or not all.
JUMPING = {
    "indicator": lambda x: (x > 0).astype(x.dtype),
    "two constants": lambda x: jnp.where(x > 0, TABLE[0], TABLE[1]),
    "rounded": lambda x: (jnp.round(x) - 1) ** 2,
    "integers": lambda x: TABLE[jnp.clip(x.astype(int), 0, 2)],
    "the largest": lambda x: TABLE[jnp.argmax(jnp.stack([x, -x, x**2]), axis=0)],
    "sign": lambda x: x + jnp.sign(x),
    "while it lives": lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c * jnp.astype(c + x < 1, x.dtype), jnp.ones(4)),
    "mapped": jax.vmap(lambda x: jax.lax.cond(x > 0, lambda: 1.0, lambda: 0.0)),
    "in a branch": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.cond(i > 1, jnp.round, jnp.sin, x), x),
    "in functions": jax.checkpoint(jax.jit(lambda x: jnp.ceil(x) ** 2)),
    "where one of two jumps": lambda x: jnp.where(x > 0, jnp.floor(x), x),
    "counted": lambda x: jnp.sum(x[:, None] > TABLE, axis=1).astype(x.dtype),
}
surrogate_step = ap.node(ap.Propagator(lambda x: (jnp.sign(x), x), lambda x, m: (m * jax.nn.sigmoid(x),)))
between = lambda x, i: TABLE[i] + (x - i.astype(x.dtype)) * (TABLE[i + 1] - TABLE[i])
densities = (
    dist.AsymmetricLaplace(),
    dist.Normal(),
    dist.Cauchy(),
    dist.StudentT(3.0),
    dist.Laplace(),
    dist.Gumbel(),
    dist.Logistic(),
)
NOT_JUMPING = {
    "smooth": lambda x: jnp.tanh(x) ** 2 + jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.linalg.norm(x),
    "kinks": lambda x: jax.nn.relu(x) + jnp.clip(x, -1, 1) + jax.nn.leaky_relu(x) + jax.nn.elu(x) + jnp.maximum(x, 0.2),
    "two formulas": lambda x: jnp.where(x > 0, x, 0.1 * x) + jnp.where(x > 1, 2 * x - 1, x),
    "at a point": lambda x: jnp.where(x == 0, 1.0, x) + jax.scipy.special.xlogy(x**2, x**2) + (x != 0).astype(x.dtype),
    "periodic": lambda x: ((x + jnp.pi) % (2 * jnp.pi) - jnp.pi) ** 2,
    "straight through": lambda x: x + held(jnp.round(x) - x),
    "its own derivative": surrogate_step,
    "interpolation": lambda x: jnp.interp(x, jnp.arange(3.0), TABLE),
    "interpolation by hand": lambda x: between(x, jnp.clip(held(x).astype(int), 0, 1)),
    "at the largest": lambda x: x[jnp.argmax(x)] + jnp.take_along_axis(x, jnp.argsort(x), axis=0),
    "branches one by one": lambda x: jax.lax.map(lambda x: jax.lax.cond(x > 0, jnp.sin, lambda x: 0.0, x), x),
    "of an image": lambda x: jax.scipy.ndimage.map_coordinates(TABLE, [x], order=1),
    "sorted": lambda x: jnp.sort(x) + jnp.median(x) + jax.lax.top_k(x, 2)[0][0],
    "no number": lambda x: jnp.where(jnp.isfinite(x) & ~jnp.isnan(x), x, 0.0) + jnp.nan_to_num(x),
    "drawn": lambda x: x * jax.random.rademacher(KEY, (4,), x.dtype) + TABLE[jax.random.randint(KEY, (4,), 0, 3)],
    "by the number of the step": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.where(i > 1, x, TABLE[i]) + x, x),
    "until it is near": lambda x: jax.lax.while_loop(lambda x: jnp.any(x > 1e-3), lambda x: x / 2, x),
    "a quantile's loss": lambda x: x * jnp.where(x > 0, 0.9, -0.1),
    "clipped by its norm": lambda x: x * jnp.where(jnp.linalg.norm(x) > 1, 1 / jnp.linalg.norm(x), 1.0),
    "densities": lambda x: sum((d.log_prob(x) for d in densities), jnp.zeros(4)),
}


def test_a_cost_that_jumps_as_a_sample_with_a_pathwise_derivative_moves_is_warned_of():
    """Warnings are errors here. The derivative of P(x > 0) came out as 0 without a word."""

    def trace_costs(cost, estimator):
        def program(tape, theta):
            tape, x = ap.sample(tape, dist.TruncatedNormal(jnp.full(4, theta), low=-2.0), estimator)
            tape, y = ap.sample(tape, dist.TruncatedNormal(x, low=-3.0), ap.reparameterization())
            tape, z = ap.sample(tape, dist.Bernoulli(logits=y), ap.likelihood_ratio())
            coin, outcome = dist.Bernoulli(logits=y), lambda b: (b, b.astype(y.dtype))
            tape, b = ap.choose(tape, coin, outcome, ap.disarm())
            return tape.cost(cost(x) + y + z.astype(y.dtype) + b)

        traced(program, THETA)

    pathwise, words = ap.reparameterization(), r"a cost jumps as what sample \({}\) drew moves"
    for cost in JUMPING.values():
        with pytest.warns(UserWarning, match=words.format("reparameterization")):
            trace_costs(cost, pathwise)
    with pytest.warns(UserWarning, match=words.format("total_propagation")):
        trace_costs(JUMPING["indicator"], ap.total_propagation())
    for cost in NOT_JUMPING.values():
        trace_costs(cost, pathwise)
    for cost in ("indicator", "integers"):
        trace_costs(JUMPING[cost], ap.likelihood_ratio())


def test_a_sum_over_lanes_is_refused_where_the_choice_was_made_long_before_and_only_of_what_is_scored():
    step = lambda estimator: ap.stochastic(estimator())(lambda theta, x: dist.Normal(theta * x, 1.0))
    scored, pathwise = ap.likelihood_ratio, ap.reparameterization

    def late_cost(first, second, lanes_act):
        def program(tape, theta):
            tape, x = step(first)(tape, theta, jnp.ones(4))
            tape, y = jax.checkpoint(lambda tape, x: step(second)(tape, theta, jnp.sin(x)))(tape, x)
            return tape.cost((y - lanes_act(y, x)) ** 2)

        return program

    for first, second in ((scored, scored), (scored, pathwise), (pathwise, scored)):
        refused_program("drawn for the 4 lanes", late_cost(first, second, lambda y, x: y.mean()), THETA)
    traced(late_cost(pathwise, scored, lambda y, x: x.mean()), THETA)  # which the scored choice does not change

    def mean_field(first, second, of_lanes=jnp.mean):
        def draw(tape, theta):
            tape, x = step(first)(tape, theta, jnp.ones(4))
            return step(second)(tape, theta, jnp.full(4, of_lanes(x)))

        return paid(draw)

    for second in (scored, pathwise, ap.total_propagation):
        refused_program("log-density of a later", mean_field(scored, second), THETA)
        traced(mean_field(pathwise, second), THETA)
    traced(mean_field(scored, scored, lambda x: jax.lax.stop_gradient(x.mean())), THETA)

    def chosen(tape, theta):
        flips = dist.Bernoulli(logits=jnp.full(4, theta))
        return ap.choose(tape, flips, lambda b: (jnp.float32(0), b.astype(jnp.float32)), ap.enumeration())

    refused_program("drawn for the 4 lanes", paid(chosen, lambda y: (y - y.mean()) ** 2), THETA)


def test_lanes_are_followed_where_a_size_is_not_known_before_an_export_is_called():
    def program(tape, theta, x):
        draws = dist.Normal(theta * jnp.broadcast_to(x, (4, *x.shape)), 1.0).to_event(1)
        tape, y = ap.sample(tape, draws, ap.likelihood_ratio())
        y = jnp.concatenate([y, jnp.pad(jnp.sin(y.reshape(-1)).reshape(y.shape), ((0, 0), (1, 2)))], axis=1)
        return tape.cost(jnp.sum(jnp.roll(y.at[:, 0].set(0.0), 1, axis=1), axis=1))

    given = jax.eval_shape(lambda: KEY), THETA, jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)
    exported = jax.export.export(jax.jit(ap.grad(program, lanes=4, check_nan=False)))(*given)
    assert jnp.isfinite(exported.call(KEY, THETA, jnp.ones(3)))


def test_a_sum_over_parts_that_are_charged_apart_is_refused():
    less_mean = lambda b: b - b.mean(1, keepdims=True)
    refused(ValueError, "for the 3 data, .* of a datum with its own", of_axes, less_mean)
    refused(ValueError, "for the 3 parts, .* of a part with its own", of_axes, less_mean, data=None)
    refused(ValueError, "for the 2 lanes, .* of a lane with its own", of_axes, lambda b: b - b.mean(0))
    refused(ValueError, "broadcasting along another axis; and", of_axes, lambda b: b.T, data=2, size=2)
    of_axes(lambda b: less_mean(b).mean(1), parts=False)  # a choice of the lane, which pays for all of it
