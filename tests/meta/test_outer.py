"""Outer gradients against closed forms; what is not to be trained comes out of each with the same bits.

The inner problem is gradient descent at rate theta on a s^2 / 2 from s_0: s_t = (1 - theta a) s_{t-1}, with the loss
l_t = s_t^2 / 2. So L = s_0^2 / 2 sum_t (1 - theta a)^{2 t}, a polynomial: its Gaussian smoothings are exact too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import apgrad as ap
from apgrad import meta, mplp
from apgrad._ground.norms import rescaled
from experiments import outer_gradients
from tests.refusals import refused

A, START, T, THETA, SIGMA = 0.8, 1.5, 6, 0.4, 0.1


def quadratic(length=T):
    def step(theta, s):
        s = s * (1 - theta * A)
        return s, s**2 / 2

    init = lambda theta, key: jnp.full((), START, theta.dtype)
    return meta.Problem(init, step, lambda theta, s: jnp.zeros((), theta.dtype), length)


def in_place():
    """The same, of a state that a step writes to."""

    def step(theta, state):
        state[...], loss = quadratic().step(theta, state[...])
        return state, loss

    return quadratic()._replace(init=lambda theta, key: nnx.Variable(quadratic().init(theta, key)), step=step)


def smoothed(theta, segments):
    """dL/dtheta of the objective in which each segment of steps has its own perturbation; segments sum to T."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()

    def value(theta):
        shrink = 1 - (theta + SIGMA * nodes) * A
        total, before = 0.0, 1.0
        for k in segments:
            total += before * sum(weights @ shrink ** (2 * t) for t in range(1, k + 1))
            before *= weights @ shrink ** (2 * k)
        return START**2 / 2 * total

    h = 1e-5
    return (value(theta + h) - value(theta - h)) / (2 * h)


def exact(theta, start=START, steps=T):
    rate = 1 - theta * A
    return start**2 / 2 * sum(-2 * t * A * rate ** (2 * t - 1) for t in range(1, steps + 1))


@pytest.mark.quick
def test_reverse_and_forward_mode_are_the_derivative(x64):
    outers = [meta.forward_mode(quadratic()), *(meta.reverse_mode(quadratic(), remat=r) for r in (False, True, 4))]
    outers += [meta.average((meta.reverse_mode(quadratic(*steps)) for steps in ([], [3])), [3, 1])]
    found = jax.jit(lambda theta: [outer(theta, jax.random.key(0))[1] for outer in outers])(THETA)
    average = 0.75 * exact(THETA) + 0.25 * exact(THETA, steps=3)
    np.testing.assert_allclose(found, [exact(THETA)] * 4 + [average], rtol=1e-12)


def test_forward_mode_of_a_loss_that_is_wider_than_theta():
    step = lambda theta, s: (s * theta.astype(jnp.float32), s**2)
    problem = meta.Problem(lambda theta, key: jnp.ones(()), step, lambda theta, s: s, 3)
    ways = meta.forward_mode, meta.reverse_mode
    both = lambda problem, theta: [way(problem)(theta, jax.random.key(0))[:2] for way in ways]
    forward, reverse = both(problem, jnp.bfloat16(1.5))
    assert forward[1].dtype == jnp.bfloat16 and forward == reverse
    forward, reverse = both(problem._replace(step=lambda theta, s: (s / 2, s**2)), {})
    assert forward == reverse


@pytest.mark.quick
def test_truncation_has_the_bias_of_truncation(x64):
    """Its gradients sum to those of the segments, each from a constant state: not to the gradient of the unroll."""
    estimator = meta.truncated(quadratic(), 2, stagger=False)
    total, carry = jax.jit(lambda theta: unroll_sum(estimator, theta, jax.random.key(0)))(jnp.asarray(THETA))
    starts = START * (1 - THETA * A) ** np.array([0, 2, 4])
    np.testing.assert_allclose(total, sum(exact(THETA, s, 2) for s in starts), rtol=1e-12)
    assert abs(total / exact(THETA) - 1) > 0.25  # short-sighted
    assert carry.t == 0  # and begins anew
    np.testing.assert_allclose(carry.state, START)
    for problem in (quadratic(), in_place()):
        staggered = jax.jit(meta.batched(meta.truncated(problem, 2), 50).init)(THETA, jax.random.key(0))
        assert set(np.asarray(staggered.t).tolist()) == {0, 2, 4}
        np.testing.assert_allclose(staggered.state, START * (1 - THETA * A) ** np.asarray(staggered.t), rtol=1e-5)


def test_a_final_loss_counts_at_the_end_alone_though_it_has_no_derivative_before(x64):
    def step(theta, state):
        s, loss = quadratic().step(theta, state[0])
        return (s, state[1] + 1), loss

    # After 2 and 4 of 6 steps it is the root of zero, whose derivative is NaN.
    final = lambda theta, state: jnp.sqrt(theta * (state[1] - 2.0) * (state[1] - 4.0))
    problem = meta.Problem(lambda theta, key: (jnp.asarray(START), 0.0), step, final, T)
    one = meta.truncated(problem, 2, stagger=False)
    outers = one, meta.batched(one, 2)
    found = jax.jit(lambda theta: [unroll_sum(o, theta, jax.random.key(0))[0] for o in outers])(THETA)
    starts = START * (1 - THETA * A) ** np.array([0, 2, 4])
    np.testing.assert_allclose(found, sum(exact(THETA, s, 2) for s in starts) + np.sqrt(2 / THETA), rtol=1e-12)


def unroll_sum(estimator, theta, key):
    """The sum of an estimator's gradients over one unroll of three segments, and the carry after it."""
    keys = jax.random.split(key, 4)
    carry, total = estimator.init(theta, keys[0]), 0.0
    for k in keys[1:]:
        _, gradient, carry = estimator(theta, k, carry)
        total += gradient
    return total, carry


def test_evolution_strategies_are_unbiased_for_the_smoothed_objective():
    """Each for its own smoothing; the truncated one for the segments, each from a constant state."""
    options = {"sigma": SIGMA, "stagger": False}
    whole, segments = smoothed(THETA, (T,)), smoothed(THETA, (2, 2, 2))
    shrunk = sum((1 - THETA * A) ** (2 * t) * smoothed(THETA, (2,)) for t in (0, 2, 4))
    assert abs(whole - exact(THETA)) > 0.03 * abs(whole)  # the test can tell the smoothed from the plain
    theta, full = jnp.float32(THETA), meta.evolution(quadratic(), sigma=SIGMA)
    makers = meta.single_evolution, meta.persistent_evolution, meta.truncated_evolution
    estimators = [make(quadratic(), 2, **options) for make in makers]
    estimates = lambda key: [full(theta, key)[1], *(unroll_sum(e, theta, key)[0] for e in estimators)]
    ap.testing.assert_unbiased(estimates, [whole, whole, segments, shrunk], jax.random.key(2), 20_000)


def test_total_propagation_over_perturbed_unrolls():
    """With noise of variance v at each step, E[s_t^2] is r^2 E[s_{t-1}^2] + v; a loss sees the state before noise."""
    sigma = 0.2

    def value(theta):
        square, total = START**2, 0.0
        for _ in range(T):
            square = (1 - theta * A) ** 2 * square
            total += square / 2
            square = square + sigma**2
        return total

    truth = (value(THETA + 1e-5) - value(THETA - 1e-5)) / 2e-5
    assert abs(truth / exact(THETA) - 1) > 0.03
    estimator = meta.perturbed(quadratic(), sigma=sigma, unrolls=8, cross_fit=True)
    estimate = lambda key: estimator(jnp.float32(THETA), key)[1]
    ap.testing.assert_unbiased(estimate, jnp.float32(truth), jax.random.key(4), 4_000)


def test_a_few_chaotic_unrolls_vary_no_more_than_by_the_likelihood_ratio():
    problem, keys = outer_gradients.problem(10), jax.random.split(jax.random.key(0), 500)

    def variance(**options):
        outer = meta.perturbed(problem, sigma=0.03, unrolls=16, **options)
        return jnp.var(jax.lax.map(lambda key: outer(jnp.float32(0.9), key)[1], keys))

    mixed, ratio = jax.jit(lambda: (variance(), variance(estimator=ap.likelihood_ratio())))()
    assert mixed < 1.5 * ratio


@pytest.mark.parametrize("name", ["truncated", "truncated_evolution", "persistent_evolution", "single_evolution"])
def test_what_is_kept_from_call_to_call_must_be_handed_on(name):
    """A call without it would begin a new unroll each time, without a word."""
    kept = ALL[name](LINE)
    args, (two, three) = (jnp.float32(1.0), jax.random.key(0)), (meta.batched(kept, n) for n in (2, 3))
    for outer in (kept, meta.clipped(kept), two, meta.average([meta.reverse_mode(LINE), kept])):
        refused(ValueError, r"keeps \d+ arrays .* carry = outer\.init", jax.eval_shape, outer, *args)
    for outer, other in ((two, kept), (kept, two), (two, three)):
        refused(ValueError, r"shapes \[.*, got \[", jax.eval_shape, outer, *args, jax.eval_shape(other.init, *args))


def test_a_start_is_compiled_once_and_has_the_dtypes_of_later_carries():
    """In spite of a theta and a state of weak type, with which a jitted step would compile twice."""
    calls = []
    problem = quadratic()._replace(init=lambda theta, key: calls.append(1) or START * jnp.ones(()))
    outer = meta.batched(meta.persistent_evolution(problem, 2), 2)
    theta = jnp.asarray(THETA)
    carry, _ = outer.init(theta, jax.random.key(0)), outer.init(theta, jax.random.key(1))
    assert len(calls) == 1
    training = meta.begin(outer, optax.sgd(0.1), theta, jax.random.key(0))
    assert theta.weak_type and not any(getattr(x, "weak_type", False) for x in jax.tree.leaves((carry, training)))


def test_clipping_bounds_each_task_and_leaves_small_gradients():
    """Two tasks with gradients 3 and 4 in two arrays, norm 5, and a hundredth of it: clipped to 1 and left alone."""

    def estimate(theta, key, carry):
        scale = jnp.where(carry, 1.0, 0.01)
        return scale, {"a": 3.0 * scale, "b": 4.0 * scale}, carry

    def init(theta, key):
        return jax.random.key_data(key)[-1] == jax.random.key_data(jax.random.split(jax.random.key(0), 2)[0])[-1]

    both, theta = meta.batched(meta.clipped(meta.OuterGradient(init, estimate)), 2), {"a": 0.0, "b": 0.0}
    carry = both.init(theta, jax.random.key(0))
    assert sorted(carry.tolist()) == [False, True]
    loss, gradient, _ = both.estimate(theta, jax.random.key(1), carry)
    np.testing.assert_allclose([loss, *gradient.values()], [0.505, (0.6 + 0.03) / 2, (0.8 + 0.04) / 2], rtol=1e-6)


@pytest.mark.parametrize("dtype, size", [("float32", 5e19), ("float32", 3e38), ("float16", 3e4), ("bfloat16", 1e38)])
def test_a_norm_that_overflows_clips_and_normalizes_all_the_same(dtype, size):
    """Gradients of (3, 4) / 4 times the size, a part of which is in float32."""
    gradient = {"a": jnp.asarray([0.75 * size, 0.0], dtype), "b": jnp.float32(size)}
    outer = meta.clipped(meta.OuterGradient(lambda th, key: (), lambda th, key, carry: (0.0, gradient, carry)))
    _, clipped, _ = outer(gradient, jax.random.key(0))
    assert jax.tree.map(jnp.result_type, clipped) == jax.tree.map(jnp.result_type, gradient)
    np.testing.assert_allclose(np.float32([clipped["a"][0], clipped["b"]]), [0.6, 0.8], rtol=1e-2)
    normalized, _ = meta.normalize_tensors().update(gradient, None)
    np.testing.assert_allclose(np.float32([normalized["a"][0], normalized["b"]]), [1.0, 1.0], rtol=1e-2)


def test_normalized_complex_gradients_keep_their_imaginary_part():
    normalized, _ = meta.normalize_tensors().update(jnp.array([3 + 4j, 0j]), None)
    np.testing.assert_allclose(normalized, [0.6 + 0.8j, 0], rtol=1e-6)
    np.testing.assert_allclose(rescaled(jnp.array([3 + 4j, 0j]), 1.0), normalized, rtol=1e-6)


def first(outer, theta, key):
    return outer(theta, key, outer.init(theta, key))


ALL = {
    "reverse_mode": meta.reverse_mode,
    "truncated": lambda p: meta.truncated(p, 1),
    "forward_mode": meta.forward_mode,
    "evolution": meta.evolution,
    "truncated_evolution": lambda p: meta.truncated_evolution(p, 1),
    "persistent_evolution": lambda p: meta.persistent_evolution(p, 1),
    "single_evolution": lambda p: meta.single_evolution(p, 1),
    "perturbed": lambda p: meta.perturbed(p, unrolls=2),
}
LINE = meta.Problem(lambda th, key: jnp.zeros(()), lambda th, s: (s, th * 3), lambda th, s: 0 * th, 2)

NARROW = LINE._replace(step=lambda th, s: (s, th.astype(jnp.bfloat16)), final=lambda th, s: jnp.zeros((), jnp.bfloat16))


@pytest.mark.parametrize("name", ALL)
def test_losses_that_are_no_scalars_and_theta_that_is_no_number_are_refused(name):
    one, of_pairs = jnp.ones(()), LINE._replace(step=lambda th, s: (s, (s, s)))
    cases = [
        (r"the loss of a step is a real scalar, got float32\(3,\)", LINE, jnp.ones(3)),
        ("the final loss is a real scalar, got complex64", LINE._replace(final=jax.lax.complex), one),
        ("the final loss is a real scalar, got None", LINE._replace(final=lambda th, s: None), one),
        ("the loss of a step is a real scalar, got a tuple of 2", of_pairs, one),
        (r"step returns the pair \(state, loss\), got an array", LINE._replace(step=lambda th, s: s), one),
        (r"theta\['n'\] has dtype int32.*nnx.Variable", LINE, {"x": 1.0, "n": jnp.ones((), int)}),
        (r"theta\['n'\] has dtype int32", LINE, {"x": 1.0, "n": 1}),
        (r"theta\['n'\] is no array but a str", LINE, {"x": 1.0, "n": "relu"}),
        (r"theta has dtype bool", LINE, jnp.ones(2, bool)),
        (r"theta has dtype complex64", LINE, jnp.ones(2, complex)),
    ]
    for message, problem, theta in cases:
        of = lambda key, p=problem, theta=theta: first(ALL[name](p), theta, key)
        refused(TypeError, message, jax.eval_shape, of, jax.random.key(0))


@pytest.mark.filterwarnings("ignore:the loss is b?float16:UserWarning")
def test_perturbations_that_rounding_may_take_away_warn():
    # Of 512, bfloat16 has no neighbour within 1.
    estimate = lambda th, make: first(make(LINE), th, jax.random.key(0))[1]
    with pytest.warns(UserWarning, match=r"theta is bfloat16, which rounds away.*0\.0039.*float32"):
        assert estimate(jnp.bfloat16(512.0), meta.evolution) == 0
    evolution = {name: make for name, make in ALL.items() if "evolution" in name}
    for make in evolution.values():
        with pytest.warns(UserWarning, match="is float16"):
            jax.eval_shape(lambda th, make=make: estimate(th, make), jnp.float16(1.0))
        with pytest.warns(UserWarning, match=r"the loss is bfloat16.*float32"):
            jax.eval_shape(lambda th, make=make: first(make(NARROW), th, jax.random.key(0)), jnp.float32(1.0))
        counts = LINE._replace(step=lambda th, s: (s, th > 1), final=lambda th, s: jnp.zeros((), int))
        found = jax.eval_shape(lambda th, make=make, p=counts: first(make(p), th, jax.random.key(0)), jnp.float32(1.0))
        assert found[1].dtype == jnp.float32


@pytest.mark.filterwarnings("ignore:theta is float16:UserWarning", "ignore:the loss is float16:UserWarning")
def test_an_evolution_gradient_in_half_precision_is_finite_though_its_slope_is_not():
    steep = lambda th, s: (s, 1_500 * th.astype(jnp.float32))
    problem = LINE._replace(step=steep, final=lambda th, s: jnp.zeros(()))
    both = lambda key: [first(meta.evolution(problem), th, key)[1] for th in (jnp.float16(1), jnp.float32(1))]
    half, single = jax.jit(jax.vmap(both))(jax.random.split(jax.random.key(0), 50))
    assert jnp.isfinite(half).all() and jnp.abs(single).max() < 65504


@pytest.mark.filterwarnings("ignore:theta is bfloat16:UserWarning")
def test_perturbations_in_bfloat16_have_the_mean_zero():
    """JAX's own have -.01, by which each parameter would get a part of all others' gradients."""
    total = lambda th, s: jnp.sum(th.astype(jnp.float32))
    outer = meta.evolution(LINE._replace(step=lambda th, s: (s, total(th, s)), final=total))
    of = lambda key: [first(outer, jnp.zeros(64, dtype), key)[1] for dtype in ("bfloat16", "float32")]
    half, single = jax.jit(of)(jax.random.key(0))
    np.testing.assert_allclose(np.asarray(half, "float32"), single, rtol=0, atol=0.02 * np.max(np.abs(single)))


WRAPS = [lambda o: o, meta.clipped, lambda o: meta.average([o, o]), lambda o: meta.batched(o, 2)]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_gradient_of_another_form_than_theta_is_refused(wrap):
    def wrapped(loss, gradient):
        estimate = lambda theta, key, carry: (loss(theta), gradient, carry)
        return wrap(meta.OuterGradient(lambda theta, key: (), estimate))

    ones, key = jnp.ones(3), jax.random.key(0)
    for gradient in (jnp.ones(1), jnp.ones(()), (ones,)):
        refused(TypeError, r"theta has \(3,\), .*returned", wrapped(jnp.sum, gradient), ones, key)
    two = meta.OuterGradient(lambda theta, key: (), lambda theta, key, carry: (jnp.sum(theta), ones))
    refused(TypeError, r"returns \(loss, gradient, carry\), got a tuple of 2", wrap(two), ones, key)
    refused(TypeError, r"is a real scalar, got float32\(3,\)", wrapped(lambda theta: theta, ones), ones, key)


@pytest.mark.parametrize("length, segment", [(5, 2), (3, 6), (0, 1), (-2, 1)])
def test_a_truncation_that_divides_no_unroll_is_refused(length, segment):
    problem = meta.Problem(lambda theta, key: theta, lambda theta, s: (s, s), lambda theta, s: s, length)
    for make in (meta.truncated, meta.truncated_evolution, meta.persistent_evolution):
        refused(ValueError, "must divide the unroll", make(problem, segment).init, 1.0, jax.random.key(0))


def test_noise_is_added_to_floating_point_numbers_alone():
    """A counter in the state would become a float with noise."""
    step = lambda theta, s: ({"x": theta * s["x"], "n": s["n"] + 1}, s["x"] ** 2)
    problem = meta.Problem(lambda th, key: {"x": jnp.ones(()), "n": 0}, step, lambda th, s: s["x"] ** 2, 2)
    args = jnp.float32(1.0), jax.random.key(0)
    refused(TypeError, r"the state\['n'\] has dtype int32", jax.eval_shape, meta.perturbed(problem), *args)
    part = (lambda s: s["x"], lambda s, x: s | {"x": x})
    jax.eval_shape(meta.perturbed(problem._replace(perturb=part), unrolls=2), *args)


def test_message_passing_by_the_exact_rule_is_gradient_descent_in_forward_mode_too():
    """Its nodes have no forward mode, but the inner step differentiates them itself."""
    task, key = meta.sinusoid(sizes=(1, 2, 1), batch=2, held_out=2), jax.random.key(0)
    problem = lambda learner: meta.inner_problem(task, learner, 2)
    passing, descent = problem(meta.message_passing(task.network)), problem(meta.optimizer(optax.sgd, task.loss))
    ways = [(meta.forward_mode(passing), mplp.Exact(0.1)), (meta.reverse_mode(passing), mplp.Exact(0.1))]
    ways += [(meta.reverse_mode(descent), jnp.float32(0.1))]
    forward, reverse, wanted = jax.jit(lambda: [jax.tree.leaves(outer(rate, key)[:2]) for outer, rate in ways])()
    for found in (forward, reverse):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert wanted[1] != 0


def test_forward_mode_says_what_it_cannot_differentiate():
    """While it is traced, in words of its own."""
    halved = ap.node(ap.backpropagation(lambda x: x / 2))
    problem = meta.Problem(lambda theta, key: theta, lambda theta, s: (halved(s), s), lambda theta, s: s, 2)
    args = jnp.float32(1.0), jax.random.key(0)
    refused(TypeError, "forward_mode cannot .*Nodes are", jax.eval_shape, meta.forward_mode(problem), *args)


def test_rematerialised_unrolls_remember_less():
    """Nested remat of 64 steps, each with large residuals: the compiled gradient's temporaries shrink."""

    def step(theta, s):
        for _ in range(4):
            s = jnp.tanh(s * theta)
        return s, jnp.sum(jnp.sin(s))

    problem = meta.Problem(lambda th, key: jnp.ones(64, float), step, lambda th, s: jnp.zeros((), float), 64)

    def temporaries(remat):
        estimate = meta.reverse_mode(problem, remat=remat)
        lowered = jax.jit(lambda theta, key: estimate(theta, key)[1]).lower(jnp.ones(64), jax.random.key(0))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(True) < temporaries(False) / 3


def bits(tree):
    return [(x.dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def test_training_leaves_what_is_fixed_alone():
    """In two steps by an outer gradient that perturbs and an optimizer that decays all that they are given."""
    task, key = meta.sinusoid(sizes=(1, 1), batch=4, held_out=5), jax.random.key(0)
    sites = mplp.sites(task.network, task.prior(key), task.batch(task.draw(key), key))
    rule = mplp.Thesis(sites, message_size=2, hidden=3, learn_rate=False, rngs=nnx.Rngs(0))
    # An addition of zero loses the sign of a negative zero.
    theta = {"rule": rule, "fixed": nnx.BatchStat(jnp.array([-0.0, 3.0])), "none": None, "prior": [jnp.ones(2)]}

    def step(theta, s):  # its losses depend on every number, also on those that are fixed
        s = 0.5 * jnp.sin(s) + sum(jnp.mean(jnp.sin(x + 0.3)) for x in jax.tree.leaves(theta))
        return s, jnp.sum(s**2)

    problem = meta.Problem(lambda theta, key: jnp.ones(2), step, lambda theta, s: jnp.sum(s), 2)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.5))
    with jax.numpy_dtype_promotion("standard"):  # which optax's adamw needs
        done = meta.train(meta.evolution(problem), optimizer, theta, jax.random.key(3), 2, every=2, progress=False)
    (trained, fixed), (moved, stayed) = meta.partition(theta), meta.partition(done.theta)
    assert int(done.skipped) == 0 and bits(stayed) == bits(fixed) and len(bits(fixed)) == 2
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(trained), strict=True):
        assert jnp.any(a != b)
    assert jax.tree.structure(done.theta) == jax.tree.structure(theta)
    assert bits(meta.merge(trained, fixed)) == bits(theta) and len(bits(trained)) + 2 == len(bits(theta))


OUTER = ALL | {
    "batched": lambda p: meta.batched(meta.clipped(meta.truncated(p, 1)), 2),
    "average": lambda p: meta.average([meta.evolution(p), meta.reverse_mode(p)]),
}


@pytest.mark.parametrize("name", OUTER)
def test_the_loss_sees_what_is_fixed_and_the_gradient_has_zeros(name):
    """A recurrence whose loss depends on fixed numbers, an integer too, without a stop_gradient in it."""
    fixed = {"numbers": nnx.BatchStat(jnp.asarray([2.0, 3.0])), "count": nnx.Variable(jnp.ones((), int))}
    seen = []

    def step(theta, s):
        numbers, count = (theta["fixed"][name][...] for name in ("numbers", "count"))
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), numbers)
        s = 0.5 * s * numbers[0] * jnp.mean(theta["w"])
        return s, count.astype(float) * jnp.sum(numbers * s)

    outer = OUTER[name](meta.Problem(lambda theta, key: jnp.ones(2), step, lambda theta, s: jnp.sum(s), 2))
    theta = {"w": jnp.ones(3), "fixed": fixed}
    _, gradient, _ = jax.jit(lambda theta, key: outer(theta, key, outer.init(theta, key)))(theta, jax.random.key(0))
    jax.block_until_ready(gradient)
    jax.effects_barrier()
    assert bits(gradient["fixed"]) == bits(jax.tree.map(jnp.zeros_like, fixed))
    assert jnp.all(gradient["w"] != 0)
    assert seen and all(np.array_equal(x, [2.0, 3.0]) for one in seen for x in one.reshape(-1, 2))
