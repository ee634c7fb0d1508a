"""The tape, tested as arithmetic: a probe estimator whose "score" is its own parameter, so that the gradient
of the objective with respect to a lane's parameter *is* the message that its node received, over the lanes.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flax import nnx

import apgrad as ap
from apgrad.expectations import _channels as channels
from apgrad.expectations._ports import Arithmetic, Port
from tests.cases import cases
from tests.expectations.instruments import KEY, probe, refused_program, traced, visit
from tests.expectations.programs import paid
from tests.refusals import refused

ONES = jnp.ones(4)

# The probes' parameters are the lanes' own.
pytestmark = pytest.mark.filterwarnings("ignore:.*the baseline averages over other data")


def messages(program, *shapes, lanes=4, transform=jax.jit):
    """What each node received, for each lane: the gradient with respect to its parameter, times the lanes."""
    gradient = ap.grad(program, lanes, argnums=range(1, 1 + len(shapes)))
    return [lanes * g for g in transform(gradient)(KEY, *map(jnp.zeros, shapes))]


def test_parallel_branches_do_not_pay_for_each_other():
    def program(tape, before, left, right, after):
        branch = lambda tape, parameter, cost: (visit(tape, parameter).cost(cost * ONES), cost)
        tape, costs = visit(tape, before).parallel(lambda t: branch(t, left, 1.0), lambda t: branch(t, right, 4.0))
        assert costs == (1.0, 4.0)
        return visit(tape, after).cost(10 * ONES)

    before, left, right, after = messages(program, (4,), (4,), (4,), (4,))
    # Adding up the branches' ports would charge the node before the fork 1 + 4 + 2 * 10 = 25.
    assert (before == 15).all() and (left == 11).all() and (right == 14).all() and (after == 10).all()


def test_parallel_branches_draw_different_numbers():
    branch = lambda tape: ap.sample(tape, dist.Normal(jnp.zeros(4), 1.0), ap.reparameterization())
    program = paid(lambda tape: tape.parallel(branch, branch), lambda xs: (xs[0] == xs[1]).astype(jnp.float32))
    assert jax.jit(ap.expectation(program, 4))(KEY) == 0


def test_a_node_receives_the_costs_after_it_less_their_baseline_and_none_before():
    first, second = jnp.array([1.0, 2.0, 4.0, 9.0]), jnp.array([3.0, -1.0, 0.0, 5.0])

    def program(tape, a, b, c):
        tape = visit(tape.cost(100 * ONES), a, baseline="leave_one_out")
        tape = visit(tape, b, baseline=lambda d: d.loc + jnp.arange(4.0)).cost(first)
        return visit(tape, c).cost(second)

    centred = lambda c: c - (jnp.sum(c) - c) / 3
    a, b, c = messages(program, (4,), (4,), (4,))
    np.testing.assert_allclose(a, centred(first) + centred(second), rtol=1e-6)  # cost by cost
    np.testing.assert_allclose(b, first + second - jnp.arange(4.0))
    np.testing.assert_array_equal(c, second)  # baseline=None next to it: none is applied
    assert jax.jit(ap.expectation(program, 4))(KEY, *jnp.zeros((3, 4))) == 100 + jnp.mean(first + second)  # exactly


@pytest.mark.parametrize("parts", [False, True])
def test_the_leave_one_out_baseline_of_masked_choices_is_the_mean_over_the_lanes_that_live_at_the_choice(parts):
    alive = np.array([[True, True, False, True, True], [True, False, False, False, False]])
    shape = (5, 2) if parts else (5,)
    mask = [jnp.asarray(np.stack([row, row[::-1]], -1) if parts else row) for row in alive]
    costs = [jnp.arange(10.0).reshape(5, 2)[:, : shape[-1] if parts else 1].reshape(shape) ** k for k in (1, 2)]

    def program(tape, a, b):
        for parameter, m, cost in zip((a, b), mask, costs, strict=True):
            tape = visit(tape, parameter, "leave_one_out", parts=parts, mask=m).cost(cost)
        return tape

    def wanted(m, to_go):
        m, to_go = np.asarray(m, float), np.asarray(to_go)
        count = m.sum(0) - m
        return m * (to_go - np.where(count > 0, ((m * to_go).sum(0) - m * to_go) / np.maximum(count, 1), 0))

    a, b = messages(program, shape, shape, lanes=5)
    np.testing.assert_allclose(a, wanted(mask[0], costs[0] + costs[1]), rtol=1e-5)
    np.testing.assert_allclose(b, wanted(mask[1], costs[1]), rtol=1e-5)


def test_a_learned_baseline_has_the_gradient_of_the_regression_on_the_cost_to_go():
    def program(tape, a, phi):
        tape = visit(tape.cost(1000 * ONES), a, baseline=ap.learned_baseline(lambda d: phi * ONES))
        return tape.cost(jnp.arange(4.0)).cost(10 * ONES)

    objective = ap.expectation(program, 4)
    to_go = jnp.arange(4.0) + 10
    a, phi = jax.jit(jax.grad(objective, argnums=(1, 2)))(KEY, jnp.zeros(4), 2.0)
    np.testing.assert_allclose(4 * a, to_go - 2.0)
    np.testing.assert_allclose(phi, jnp.mean(2.0 - to_go))
    assert objective(KEY, jnp.zeros(4), 2.0) == 1000 + jnp.mean(to_go)
    # The regression's own second derivative; the objective does not depend on phi otherwise.
    np.testing.assert_allclose(jax.jit(jax.hessian(objective, argnums=2))(KEY, jnp.zeros(4), 2.0), 1.0)


def test_parts_are_charged_with_their_own_costs_and_the_lane_with_all():
    costs = jnp.array([[1.0, 5.0], [2.0, 0.0], [6.0, 1.0]])
    b = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def program(tape, lane, w, x, y, z):
        tape = visit(tape, lane)
        baselines = (None, "leave_one_out", lambda d: b, ap.learned_baseline(lambda d: b))
        for parameter, baseline in zip((w, x, y, z), baselines, strict=True):
            tape = visit(tape, parameter, baseline=baseline, parts=True)
        return tape.cost(costs).cost(jnp.full(3, 100.0))

    lane, w, x, y, z = messages(program, (3,), *[(3, 2)] * 4, lanes=3)
    np.testing.assert_allclose(lane, costs.sum(-1) + 100, rtol=1e-6)
    np.testing.assert_allclose(w, costs + 100, rtol=1e-6)
    np.testing.assert_allclose(x, costs - (costs.sum(0) - costs) / 2, rtol=1e-6)
    for found in (y, z):
        np.testing.assert_allclose(found, costs + 100 - b, rtol=1e-6)


def test_an_author_of_nodes_adds_a_port_with_an_arithmetic_of_its_own():
    """The message is the sum of the squares of later costs; it fades with credit, and branches add up."""
    corrects = lambda cost, shaped, p, plan: jax.lax.stop_gradient(cost) ** 2 * p
    squares = Port("squares", (4,), Arithmetic(corrects=corrects, fades=jnp.multiply))

    def listen(tape, parameter):
        p = channels.request(tape, squares, "listener")
        p = None if p is None else p + ap.zero_with_gradient(parameter)
        return channels.put(tape, squares, p, "listener")

    def program(tape, before, within):
        tape = listen(tape.cost(jnp.full(4, 100.0)), before)
        branch = lambda tape: (listen(tape, within).cost(jnp.full(4, 2.0)), None)
        tape, _ = tape.parallel(branch, lambda tape: (tape.cost(jnp.full(4, 3.0)), None))
        return tape.cost(jnp.arange(4.0)).discount(0.5).cost(jnp.full(4, 4.0))

    before, within = messages(program, (4,), (4,))
    np.testing.assert_allclose(before, 4 + 9 + jnp.arange(4.0) ** 2 + 8)
    np.testing.assert_allclose(within, 4 + jnp.arange(4.0) ** 2 + 8)


def test_costs_inside_scan_cond_while_and_remat():
    def program(tape, a, b):
        def body(tape, t):
            tape = jax.checkpoint(lambda tape: visit(tape, a))(tape)
            tape = jax.lax.cond(t > 0, lambda tape: tape.cost(jnp.full(4, 2.0)), lambda tape: tape, tape)
            return tape, None

        tape, _ = jax.lax.scan(body, tape, jnp.arange(3))
        return visit(tape, b).cost(ONES)

    # Three visits of a, at costs-to-go 5, 5 (no cost at t = 0) and 3.
    for transform in (lambda f: f, jax.jit):
        a, b = messages(program, (4,), (4,), transform=transform)
        assert (a == 13).all() and (b == 1).all()

    def looped(tape, a):
        body = lambda state: (state[0] + 1, visit(state[1], a).cost(ONES))
        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, tape))[1]

    assert jax.jit(ap.expectation(looped, 4))(KEY, jnp.zeros(4)) == 3


def test_an_inner_jit_that_is_cached_loses_no_request():
    @jax.jit
    def inner(tape, a):
        return visit(tape, a, baseline="leave_one_out").cost(jnp.arange(4.0))

    for transform in (lambda f: f, jax.jit) * 2:
        (a,) = messages(lambda tape, a: inner(inner(tape, a), a), (4,), transform=transform)
        np.testing.assert_allclose(a, 3 * (jnp.arange(4.0) - (6 - jnp.arange(4.0)) / 3), rtol=1e-6)


def test_costs_in_half_precision_are_summed_in_float32():
    body = lambda tape, _: (tape.cost(jnp.full(2, 0.001, jnp.bfloat16)), None)
    small = ap.expectation(lambda tape: jax.lax.scan(body, tape, length=4096)[0], 2)
    np.testing.assert_allclose(jax.jit(small)(KEY), 4096 * float(jnp.bfloat16(0.001)), rtol=1e-5)


def test_nested_expectations():
    inner = ap.expectation(lambda tape, a: visit(tape, a).cost(jnp.full(4, 2.0)), 4)

    def program(tape, a):
        tape, key = visit(tape, a).next_key()
        return tape.cost(ONES * inner(key, a))

    (a,) = messages(program, (4,))
    np.testing.assert_allclose(a, 4.0)  # 2 from the outer node, and 4 * (2 / 4) from the inner one


# Errors.


# A program that goes on with the tape it began with, whatever was done with it.
after = lambda first, then=lambda tape: tape.cost(ONES): lambda tape, a: (first(tape, a), then(tape))[1]


def closed_over_by_a_scan(tape, a):
    body = lambda x, _: (ap.sample(tape, dist.Normal(a + x, 1.0), probe())[1], None)
    return tape.cost(jax.lax.scan(body, jnp.zeros(4), length=3)[0])


stale_in_a_branch = lambda tape, a: tape.parallel(lambda t: (visit(t, a), (t, None))[1])[0]


JITTED = jax.jit(visit)
PARTS = functools.partial(visit, parts=True)

USED_TWICE = {
    "at once": after(visit),
    "after a compiled function": lambda tape, a: after(JITTED)(JITTED(tape, a), a),
    "in the branches of a cond": lambda tape, a: jax.lax.cond(True, lambda: visit(tape, a), lambda: visit(tape, a)),
    # Accepted, it would lose the first choice and draw the same numbers again: a gradient of zero.
    "by a scan": after(visit, lambda tape: jax.lax.scan(lambda t, _: (t.cost(ONES), None), tape, length=2)[0]),
    "by a jit": after(visit, jax.jit(lambda tape: tape.cost(ONES))),
    "by a cond": after(visit, lambda tape: jax.lax.cond(True, lambda t: t.cost(ONES), lambda t: t.cost(-ONES), tape)),
    "by a checkpoint": after(visit, jax.checkpoint(lambda tape: tape.cost(ONES))),
    "by a scan that closes over it": closed_over_by_a_scan,
}
CLOSED = dict.fromkeys(("in the branches of a cond", "by a scan that closes over it"), "closes over this tape")


@pytest.mark.parametrize("name", USED_TWICE)
def test_a_tape_used_twice_is_refused(name):
    refused_program(CLOSED.get(name, "already used.*carry or operand, do not close over it"), USED_TWICE[name], ONES)


@pytest.mark.parametrize("compiled", [jax.jit, jax.checkpoint])
def test_a_tape_that_a_compiled_function_closes_over_is_refused(compiled):
    """Called a second time it is not traced again: the choices of the first call would be lost, and drawn again."""

    def program(tape):
        flip = compiled(lambda x: visit(tape, x * ONES))
        flip(1.0)
        return flip(2.0).cost(ONES)

    refused_program("closes over this tape. Give it the tape as an argument", program)


def test_a_derivative_within_a_program_may_hand_the_tape_on():
    def program(tape, a):
        def inner(w, tape):
            tape, key = tape.next_key()
            return jnp.sum(w**2) + jax.random.normal(key), tape

        g, tape = jax.grad(inner, has_aux=True)(a, tape)
        return visit(tape, g).cost(ONES)

    assert (messages(program, (4,))[0] == 2).all()  # the derivative of g = 2 a, at a cost of 1


TWO, THREE = jnp.ones((4, 2)), jnp.ones((4, 3))
ONE_A_LANE, OF_BASELINE = r"shape \(4,\), one value a lane, got", r"baseline has shape .*, expected \(4,\)"


CUT = jax.lax.stop_gradient
CUTTING = (
    lambda t, x: CUT((t, x)),
    lambda t, x: (jax.lax.scan(lambda t, _: (CUT(t).cost(ONES), None), t, length=2)[0], x),
    lambda t, x: jax.lax.cond(x[0] > 0, CUT, lambda carry: carry, (t, x)),
    lambda t, x: jax.jit(CUT)((t, x)),
)


def test_a_tape_whose_derivatives_are_cut_is_refused():
    def program(cut):
        def run(tape, a):
            tape, x = cut(visit(tape, a).cost(a), a)
            return visit(tape, x).cost(x)

        return run

    for cut in CUTTING:
        refused_program(r"stop_gradient was called on the tape.*state alone", program(cut), ONES)
    traced(program(lambda t, x: (t, CUT(x))), ONES)


def test_wrong_types_are_refused():
    wrong = functools.partial(refused_program, error=TypeError)
    wrong(r"return its last tape, got .*has_aux", lambda tape: jnp.mean(ONES))
    wrong("got tuple", lambda tape: (tape.cost(ONES), 1))
    wrong(r"branch 1 .*\(tape, output\)", lambda tape: tape.parallel(lambda t: (t, 0), lambda t: t)[0])
    for cost, got in ((None, "NoneType"), ({"a": ONES}, "dict"), ((ONES, ONES[:2]), "tuple")):
        wrong(f"one array of real numbers, got {got}", lambda tape, cost=cost: tape.cost(cost))
    wrong("complex64", lambda tape: tape.cost(jnp.ones(4, jnp.complex64)))
    wrong("takes one array", lambda tape: tape.cost(ONES, ONES))
    wrong("cost function", lambda tape: tape.cost(ONES, shaping=ap.gaussian_shaping()))
    wrong(r"\(tape, aux\)", lambda tape: tape.cost(ONES), has_aux=True)
    wrong("aux holds a tape", lambda tape: (tape.cost(ONES), {"t": tape}), has_aux=True)


def test_wrong_values_are_refused():
    refused_program("returned an earlier tape", after(visit, lambda tape: tape), ONES)
    refused_program("at least one branch", lambda tape: tape.parallel()[0])
    refused_program("end of branch 0", stale_in_a_branch, ONES)
    for size in ((), (3,), (1, 4)):
        refused_program(ONE_A_LANE, lambda tape, size=size: tape.cost(jnp.ones(size)))
    refused_program(ONE_A_LANE, lambda tape: visit(tape, ONES).cost(TWO))
    refused_program(r"never calls tape\.cost", lambda tape: visit(tape, ONES))
    refused_program(r"\(4, 2\), expected \(4, 3\): the lanes", lambda tape: PARTS(tape, THREE).cost(TWO))
    refused_program("different numbers of parts", lambda tape: PARTS(PARTS(tape, THREE), TWO).cost(TWO))
    refused_program(r"shape \(3,\), expected the lanes", lambda tape: tape.cost(jnp.sum, jnp.ones(3)))
    for baseline in (jnp.ones(3), 1.0):
        refused_program(OF_BASELINE, lambda tape, b=baseline: visit(tape, ONES, lambda d: b))
    one = r"needs at least 2, got lanes=1.*baseline=None"
    refused_program(one, lambda tape: visit(tape, jnp.ones(1), "leave_one_out"), lanes=1)
    for make in (ap.likelihood_ratio, ap.total_propagation):
        refused(ValueError, r"'leave_one_out', .*None, a function .*\(in ap.sample: of the", make, False)
    refused(TypeError, "learned_baseline takes a function", ap.learned_baseline, 3.0)
    refused(TypeError, "a program is a function of", ap.expectation, 3, 4)
    for lanes in (0, -1, 2.0, True, None):
        refused(ValueError, "lanes must be an integer", ap.expectation, lambda tape: tape, lanes)


def test_a_tape_outside_its_program_is_refused():
    kept = []

    def program(tape):
        kept.append(tape)
        return tape.cost(ONES)

    outer = lambda tape: tape.cost(ap.expectation(lambda _: tape.cost(ONES), 4)(KEY) * ONES)
    jax.eval_shape(ap.expectation(program, 4), KEY)
    refused(ValueError, r"a tape works inside the program of ap\.expectation", kept[-1].cost, ONES)
    for of_another in (lambda tape: kept[-1].cost(ONES), outer):
        refused_program("already used", of_another)


def test_a_tape_made_of_the_leaves_of_an_earlier_one_is_refused():
    def rebuilt(between):
        def run(tape, a):
            leaves, structure = jax.tree.flatten(tape)
            between(tape, a)
            return jax.tree.unflatten(structure, leaves).cost(ONES)

        return run

    for between in (visit, JITTED, lambda tape, a: JITTED(JITTED(tape, a), a)):
        refused_program("already used", rebuilt(between), ONES)
    jax.eval_shape(ap.expectation(rebuilt(lambda tape, a: tape), 4), KEY, ONES)  # nothing was done


HANDED_ON = (
    lambda tape: jax.lax.cond(True, lambda t: t, lambda t: t, tape),
    lambda tape: jax.lax.switch(1, [lambda t: t] * 3, tape),
    lambda tape: jax.lax.scan(lambda t, _: (t, None), tape, length=2)[0],
    lambda tape: jax.lax.scan(lambda t, _: (ap.clip_lanes(t, ONES)[0], None), tape, length=2)[0],
    lambda tape: jax.lax.fori_loop(0, 2, lambda _, t: jax.checkpoint(jax.jit(lambda t: t))(t), tape),
)


def test_a_tape_that_loops_and_branches_hand_on_as_it_is_goes_on():
    def program(tape, a, handed):
        for on in HANDED_ON:
            tape = visit(tape, a)
            tape = on(tape) if handed else tape
        return tape.cost(a)

    of = lambda handed: ap.value_and_grad(lambda tape, a: program(tape, a, handed), 4)(KEY, ONES)
    chex.assert_trees_all_equal(*jax.jit(lambda: (of(True), of(False)))())


def test_a_transformation_that_looks_at_a_used_tape_again_is_named():
    module = nnx.Dict(a=nnx.Param(jnp.zeros(4)))
    step = nnx.jit(lambda module, tape: visit(tape, module.a[...]))
    refused_program(r"already used.*nnx\.jit.*use jax\.jit", lambda tape: step(module, tape).cost(ONES))

    @jax.custom_jvp
    def ruled(tape, a):
        return visit(tape, a).cost(a)

    def rule(primals, tangents):
        return ruled(*primals), jax.jvp(lambda tape, a: visit(tape, a).cost(a), primals, tangents)[1]

    ruled.defjvp(rule)
    gradient = jax.grad(ap.expectation(ruled, 4), argnums=1)
    refused(ValueError, r"already used.*keep the tape out of custom_jvp", jax.eval_shape, gradient, KEY, ONES)


def test_a_program_that_does_something_else_in_its_second_trace_is_refused():
    def unlike(words, first, second):
        steps = iter([first, second])
        program = lambda tape, a: next(steps)(visit(tape, a), a).cost(ONES)
        refused_program(f"not do the same at each of its two traces.*{words}", program, ONES)

    plain = lambda tape, a: tape
    leave_one_out = lambda tape, a: visit(tape, a, "leave_one_out")
    sampled = lambda estimator: lambda tape, a: ap.sample(tape, dist.Normal(a, 1.0), estimator)[0]
    unlike(r"cost shapes \['\(4,\)'\], then .*\(4, 3\)", plain, lambda tape, a: tape.cost(jnp.ones((4, 3))))
    unlike("charges its choice in another way", plain, leave_one_out)
    unlike("charges its choice in another way", leave_one_out, lambda tape, a: visit(tape, a, "standardized"))
    unlike("charges its choice", plain, lambda tape, a: visit(tape, a, ap.learned_baseline(lambda d: d.loc)))
    unlike("only the second trace was interacting", plain, lambda tape, a: ap.gaussian_resampling(tape, a)[0])
    unlike("only the second trace was discounting", plain, lambda tape, a: tape.discount(0.5))
    scored, mixed = sampled(ap.likelihood_ratio(None)), sampled(ap.total_propagation(None))
    unlike("only the second trace was weighing", scored, mixed)


def test_infinite_costs_have_an_infinite_value_and_no_baseline_of_others():
    costs = jnp.array([jnp.inf, 1.0, 2.0, 3.0])
    value = lambda program: jax.jit(ap.expectation(program, 4))(KEY)
    for baseline in (None, lambda d: ONES):
        assert value(lambda tape, b=baseline: visit(tape, ONES, b).cost(costs)) == jnp.inf
    assert value(lambda tape: tape.cost(costs)) == jnp.inf
    refused(Exception, "NaN \\(or infinite", value, lambda tape: visit(tape, ONES, "leave_one_out").cost(costs))


def test_the_value_of_parts_without_a_score_is_their_sum():
    draw = lambda tape, a: ap.sample(tape, dist.Normal(a, 1.0), ap.reparameterization(), parts=True)
    objective = ap.expectation(paid(draw, jnp.square, aux=True), 4, has_aux=True)
    value, x = jax.jit(objective)(KEY, jnp.zeros((4, 3)))
    np.testing.assert_allclose(value, jnp.mean(jnp.sum(x**2, axis=-1)), rtol=1e-6)
    refused(ValueError, r"\(lanes, parts, ...\), .*got \(4,\)", objective, KEY, jnp.zeros(4))


def test_one_lane_and_costs_that_are_booleans_or_integers():
    (a,) = messages(lambda tape, a: visit(tape, a).cost(jnp.full(1, 3.0)), (1,), lanes=1)
    assert a == 3
    assert jax.jit(ap.expectation(lambda tape: tape.cost(jnp.arange(4) > 0).cost(jnp.arange(4)), 4))(KEY) == 2.25


MAPPED = lambda f: jax.jit(jax.vmap(f, (0, None)))
TRANSFORMS = {"eager": lambda f: f, "jit": jax.jit, "vmap": MAPPED, "checkpoint": lambda f: jax.jit(jax.checkpoint(f))}
DERIVATIVES = [lambda f: f, lambda f: jax.grad(f, argnums=1), lambda f: jax.hessian(f, argnums=1)]


@cases("transform", TRANSFORMS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_nan_costs_are_an_error_at_run_time(transform, derivative):
    def program(tape, a):
        tape = visit(tape, a * ONES)
        return tape.cost(jnp.log(jnp.array([1.0, 2.0, 3.0, -1.0]) * a))

    function = transform(derivative(ap.expectation(program, 4)))
    keys = jax.random.split(KEY, 2) if transform is MAPPED else KEY
    refused(Exception, "cost is NaN", lambda: jax.block_until_ready(function(keys, 1.0)))
    unchecked = transform(derivative(ap.expectation(program, 4, check_nan=False)))
    assert "callback" not in str(jax.make_jaxpr(unchecked)(keys, 1.0))


@pytest.mark.parametrize("mapped", [False, True])
def test_the_error_of_a_nan_says_whether_the_arguments_were_finite(mapped):
    objective = ap.expectation(lambda tape, a: tape.cost(jnp.log(a["w"]) * ONES), 4)
    gradient = jax.grad(lambda key, w: objective(key, {"w": w, "n": 3}), argnums=1)
    gradient = jax.jit(jax.vmap(gradient, (None, 0))) if mapped else gradient
    run = lambda w: jax.block_until_ready(gradient(KEY, jnp.array([1.0, w]) if mapped else w))
    refused(Exception, "All arguments of the program are finite", run, -1.0)
    refused(Exception, "an argument of the program is NaN or infinite", run, jnp.nan)
