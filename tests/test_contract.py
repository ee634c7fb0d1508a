"""One contract for every estimator and rule: JAX's transformations, dtypes, pytrees, closures, modules.

To add an estimator, add a row to ESTIMATORS. `second` says what its second derivative is: right, or refused. To add an
estimator of `ap.choose`, add a row to CHOICES, and one to ROWS of `expectations/test_choose.py`, which compares it with
exact sums. To add a rule of `ap.rewire`, add a row to RULES; a memory, to MEMORIES. All that read
programs (READERS) refuse what they cannot see into.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flax import nnx

import apgrad as ap
from apgrad.memory._randomize import recorded
from apgrad.memory._recompute import choices
from tests.cases import TRANSFORMS, cases
from tests.memory.unbiased import computed_again
from tests.refusals import refused

KEY = jax.random.key(0)


class Row(NamedTuple):
    estimator: ap.Estimator | ap.Mixer
    second: str = "right"
    needs_two_lanes: bool = True
    discrete: bool = False
    cost: Mapping[str, Any] = MappingProxyType({})
    after: Callable[..., Any] | None = None  # done to the state after each choice


by_function = lambda theta, *inputs: jnp.asarray(0.5, jax.tree.leaves(theta)[0].dtype)


LR, RP, TP = ap.likelihood_ratio, ap.reparameterization, ap.total_propagation
SHAPED, RAW = ({"shaping": ap.gaussian_shaping(pathwise)} for pathwise in ("shaped", "raw"))
LEARNED = ap.learned_baseline(by_function)
ESTIMATORS = {
    "reparameterization": Row(RP(), needs_two_lanes=False),
    "likelihood_ratio": Row(LR(), discrete=True),
    "likelihood_ratio, no baseline": Row(LR(None), needs_two_lanes=False, discrete=True),
    "likelihood_ratio, function": Row(LR(by_function), needs_two_lanes=False, discrete=True),
    "likelihood_ratio, learned": Row(LR(LEARNED), needs_two_lanes=False, discrete=True),
    "total_propagation": Row(TP(), second="refused"),
    "total_propagation, no baseline": Row(TP(None), second="refused"),
    "total_propagation, learned": Row(TP(LEARNED), second="refused"),
    "total_propagation, published": Row(TP(weights=ap.weights.inverse_variance()), second="refused"),
    "total_propagation, per step": Row(TP(weights=ap.weights.per_step_inverse_variance()), second="refused"),
    "gaussian_shaping, LR": Row(LR(), "refused", cost=SHAPED),
    "gaussian_shaping, RP": Row(RP(), "refused", cost=SHAPED),
    "gaussian_shaping, TP": Row(TP(), "refused", cost=RAW),
    "gaussian_resampling": Row(RP(), after=ap.gaussian_resampling),
    "clip_lanes": Row(RP(), second="refused", after=ap.clip_lanes),
    "clip_lanes, growth": Row(RP(), second="refused", after=functools.partial(ap.clip_lanes, growth_only=True)),
}

# A transformation treats a weight rule as any function of arrays, so one rule stands for all; around a whole objective
# one baseline stands for all, too.
ALIKE = {"likelihood_ratio, no baseline", "likelihood_ratio, function", "total_propagation, no baseline"}
ALIKE |= {"total_propagation, learned", "gaussian_shaping, RP", "gaussian_shaping, TP"}
ALIKE |= {"total_propagation, published", "total_propagation, per step"}
unlike = cases("row", {name: row for name, row in ESTIMATORS.items() if name not in ALIKE})
# Where they may differ all are tested, those that are alike in the long tests.
rows = cases("row", ESTIMATORS, long=ALIKE)
dtypes = cases("dtype", {"float64": "float64", "bfloat16": "bfloat16"}, long=["float64"])


in_scan = lambda body, carry: jax.lax.scan(lambda carry, _: (body(carry), None), carry, length=2)[0]


once = lambda body, carry: body(carry)


def sampled_by(row, make, tape, *args):
    tape, x = ap.stochastic(row.estimator)(make)(tape, *args)
    return row.after(tape, x) if row.after else (tape, x)


def rollout(row, make, size=(), loop=in_scan):
    """A program of two steps x <- sample of make(theta, x), with a cost a step."""

    def program(tape, theta):
        def body(carry):
            tape, x = sampled_by(row, make, carry[0], theta, carry[1])
            assert x.dtype == carry[1].dtype
            return tape.cost(lambda x: jnp.sum(x**2 + x), x, **row.cost), x

        return loop(body, (tape, jnp.ones((tape.lanes, *size), jax.tree.leaves(theta)[0].dtype)))[0]

    return program


step = lambda theta, x: dist.Normal(jnp.sin(theta * x), 0.3)


@unlike
def test_transformations(row):
    objective = jax.jit(ap.expectation(rollout(row, step), lanes=4))
    ap.testing.assert_transformable(lambda theta: objective(KEY, theta), jnp.float32(0.7), rtol=2e-5, atol=1e-5)


def nested(body, carry):
    """Two steps in a scan of `remat` of a `cond` of `jit`, which does not take the third."""
    step = lambda carry, i: (jax.lax.cond(i < 2, jax.jit(body), lambda carry: carry, carry), None)
    return jax.lax.scan(jax.checkpoint(step), carry, jnp.arange(3))[0]


@rows
def test_nodes_inside_transformations_of_the_program(row):
    programs = [rollout(row, step, loop=loop) for loop in (nested, lambda body, carry: body(body(carry)))]
    both = [jax.value_and_grad(ap.expectation(program, 6), argnums=1) for program in programs]
    np.testing.assert_allclose(*jax.jit(lambda: [gradient(KEY, 0.7) for gradient in both])(), rtol=2e-5, atol=1e-6)


def assert_gradient_of(theta, gradient):
    """It has the structure, shapes and dtypes of the parameters, and its arrays are finite and not zero."""
    assert jax.tree.structure(gradient) == jax.tree.structure(theta)
    for g, x in zip(jax.tree.leaves(gradient), jax.tree.leaves(theta), strict=True):
        assert (g.shape, g.dtype) == (x.shape, x.dtype)
        assert jnp.all(jnp.isfinite(g)) and (g.size == 0 or jnp.any(g != 0))


def assert_dtypes(made, dtype):
    """Of a program and its parameters: the gradient has their dtype, and the value the sum's."""
    with jax.enable_x64(dtype == "float64"):
        program, theta = made()
        value, gradient = jax.jit(jax.value_and_grad(ap.expectation(program, 4), argnums=1))(KEY, theta)
        assert value.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
        assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(dtype)}
        assert_gradient_of(theta, gradient)


@rows
@dtypes
def test_dtypes(row, dtype):
    with jax.numpy_rank_promotion("raise"):
        assert_dtypes(lambda: (rollout(row, step), jnp.asarray(0.7, dtype)), dtype)


@rows
@pytest.mark.quick
def test_pytrees_empty_arrays_closures_modules_and_one_lane(row):
    explicit, w = row, jnp.float32(0.7)
    if isinstance(row.estimator, ap.Mixer):  # the default's suffix is gathered over explicit arguments alone
        explicit = row._replace(estimator=row.estimator._replace(weights=ap.weights.local_covariance()))
    linen = nn.Dense(2)

    def make_of_dict(theta, x):
        return dist.Normal(jnp.tanh(theta["layer"]["w"] @ x["h"] + theta["b"][0]), 0.3).to_event(1)

    make_of_modules = lambda theta, x: dist.Normal(jnp.tanh(linen.apply(theta[1], theta[0](x))), 0.3).to_event(1)

    def of_dict(tape, theta):
        inputs = {"h": jnp.ones((tape.lanes, 3)), "none": jnp.zeros((tape.lanes, 0))}
        tape, x = sampled_by(row, make_of_dict, tape, theta, inputs)
        return tape.cost(lambda x: jnp.sum(x**2), x, **row.cost)

    modules = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), linen.init(KEY, jnp.ones(2))
    programs = {  # with lanes and parameters
        "dict": (of_dict, 6, {"layer": {"w": jnp.eye(3)[:2]}, "b": (jnp.ones(2), jnp.zeros((0, 2)))}),
        "closed": (lambda tape, theta: rollout(explicit, lambda _, x: step(theta, x))(tape, w), 6, w),
        "explicit": (rollout(explicit, step), 6, w),
        "modules": (rollout(row, make_of_modules, size=(2,)), 6, modules),
        "one lane": (rollout(row, step), 1, w),
    }
    gradients = {name: jax.grad(ap.expectation(*made), argnums=1) for name, (*made, _) in programs.items()}
    if row.needs_two_lanes or row.cost or row.after:
        refused(ValueError, "at least 2, got lanes=1", jax.eval_shape, gradients.pop("one lane"), KEY, w)
    thetas = {name: programs[name][-1] for name in gradients}
    of_all = lambda key, thetas: {name: gradient(key, thetas[name]) for name, gradient in gradients.items()}
    found = jax.jit(of_all)(KEY, thetas)
    assert_gradient_of(thetas, found)
    np.testing.assert_allclose(found["closed"], found["explicit"], rtol=2e-5, atol=1e-6)


@rows
def test_expectations_are_exact_and_what_has_none_is_refused(row):
    estimator, theta = row.estimator, 0.7
    of = lambda program, lanes, **options: jax.grad(ap.expectation(program, lanes, **options), argnums=1)
    # E[x^2 + x] for x ~ N(theta, .3): the one case where all are unbiased (shaping and mixing up to O(1 / lanes)).
    one_step = rollout(row, lambda theta, x: dist.Normal(theta + 0 * x, 0.3), loop=once)
    estimates, truths = {"one step": of(one_step, 2_000)}, {"one step": 2 * theta + 1}

    second = jax.grad(of(one_step, 100), argnums=1)
    if row.second == "refused":
        for twice in (second, jax.hessian(ap.expectation(one_step, 100), argnums=1)):
            refused(TypeError, r"no second derivative.*(Use|use)", jax.eval_shape, twice, KEY, theta)
    else:
        estimates["second"], truths["second"] = second, 2.0

    def coin(tape, theta):
        tape, x = sampled_by(row, lambda theta: dist.Bernoulli(logits=theta), tape, theta)
        return tape.cost(lambda x: (x**2 + x).astype(jnp.float32), x, **row.cost)

    if row.discrete:
        p = 1 / (1 + np.exp(-theta))
        estimates["coin"], truths["coin"] = of(coin, 50), 2 * p * (1 - p)
    else:
        refused(TypeError, "pathwise derivative|fits a Gaussian", jax.eval_shape, of(coin, 50), KEY, theta)

    # Two steps of a linear system, 10 lanes: weights from the samples that they weigh lose a part of the gradient.
    assert estimator.bias in ("none", "unless cross-fitted") and estimator.assumptions.endswith(".")
    linear = rollout(row, lambda theta, x: dist.Normal(theta * x, 0.3))
    wanted = 2 * theta + 1 + 4 * theta**3 + 2 * theta * 0.09 + 2 * theta
    if not (row.cost or row.after or (estimator.bias != "none" and estimator.name != "total_propagation")):
        estimates["linear"], truths["linear"] = of(linear, 10, cross_fit=estimator.bias != "none"), wanted
    estimate = lambda key: {name: gradient(key, theta) for name, gradient in estimates.items()}
    ap.testing.assert_unbiased(estimate, truths, KEY, 1_000)
    if row is ESTIMATORS["total_propagation, published"]:
        with pytest.raises(AssertionError, match="biased"):
            ap.testing.assert_unbiased(lambda key: of(linear, 10)(key, theta), wanted, KEY, 2_000)


@unlike
def test_lanes_sharded_over_devices_give_the_same_numbers(row):
    # Global-view sharding: statistics over all lanes are JAX's business.
    if jax.device_count() < 2:
        pytest.skip("two devices are needed")
    lanes = jax.NamedSharding(jax.make_mesh((2,), ("lanes",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("lanes"))
    after = row.after or (lambda tape, x: (tape, x))
    sharded = row._replace(after=lambda tape, x: after(tape, jax.lax.with_sharding_constraint(x, lanes)))
    gradient = lambda row: jax.value_and_grad(ap.expectation(rollout(row, step, loop=once), 6), argnums=1)
    got, expected = (jax.jit(gradient(way))(KEY, 0.7) for way in (sharded, row))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


class Choice(NamedTuple):
    estimator: ap.Estimator | ap.ChoiceEstimator
    make: Any
    bias: str = "none"


coins = lambda u: dist.Bernoulli(logits=u)


outcomes = lambda u: dist.Categorical(logits=jnp.stack([u, -u, 0 * u], axis=-1))


CHOICES = {
    "enumeration": Choice(ap.enumeration(), coins),
    "rao_blackwellized": Choice(ap.rao_blackwellized(2), outcomes),
    "rloo": Choice(ap.rloo(2), lambda u: dist.Normal(u, 0.3)),
    "arm": Choice(ap.arm(), coins),
    "arms": Choice(ap.arms(3), coins),
    "disarm": Choice(ap.disarm(), coins),
    "disarm_stick_breaking": Choice(ap.disarm_stick_breaking(), outcomes),
    "rebar": Choice(ap.rebar(), outcomes),
    "relax": Choice(ap.relax(lambda z: jnp.sum(jnp.sin(z))), coins),
    "double_control_variates": Choice(ap.double_control_variates(), coins),
    "measure_valued": Choice(ap.measure_valued(), lambda u: dist.Normal(u, 0.3)),
    "straight_through": Choice(ap.straight_through(), outcomes, "yes"),
    "gumbel_softmax": Choice(ap.gumbel_softmax(0.5), outcomes, "yes"),
    "reinmax": Choice(ap.reinmax(), coins, "yes"),
}
every_choice = cases("row", CHOICES)


def sampled(row, tape, distribution, continuation, *state):
    """The tape after a choice and its cost, and what the continuation returns beside the cost."""
    if isinstance(row.estimator, ap.ChoiceEstimator):
        return ap.choose(tape, distribution, continuation, row.estimator, *state)
    tape, x = ap.sample(tape, distribution, row.estimator)
    cost, state = jax.vmap(continuation)(x, *state)
    return tape.cost(cost), state


def chosen(row, loop):
    """Two choices, with a module, closures, arguments in a pytree and empty arrays."""

    def program(tape, theta):
        module, shift = theta["module"], theta["nested"][0]

        def continuation(x, state):
            x = x.astype(shift.dtype).reshape(2, -1)
            h = jnp.tanh(module(x[:, 0] + state["h"]) + shift) + jnp.sum(state["none"])
            return jnp.sum(h**2), {"h": h, "none": state["none"]}

        body = lambda carry: sampled(row, carry[0], row.make(carry[1]["h"] + shift), continuation, carry[1])
        state = {"h": jnp.full((tape.lanes, 2), 0.5, shift.dtype), "none": jnp.zeros((tape.lanes, 0), shift.dtype)}
        return loop(body, (tape, state))[0]

    return program


def parameters_of_choices(dtype):
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0), param_dtype=dtype, dtype=dtype)
    return {"module": module, "nested": (jnp.asarray([0.3, -0.2], dtype), jnp.zeros((0, 2), dtype))}


@every_choice
def test_choices_claim_their_bias_and_pass_transformations(row):
    def program(tape, shift):
        cost = lambda x: (jnp.sum(jnp.sin(x.astype(shift.dtype) + shift)), None)
        return sampled(row, tape, row.make(shift * jnp.ones((tape.lanes, 1))), cost)[0]

    assert row.estimator.bias == row.bias and row.estimator.assumptions.endswith(".")
    objective = jax.jit(ap.expectation(program, 4))
    with jax.numpy_rank_promotion("raise"):
        ap.testing.assert_transformable(lambda shift: objective(KEY, shift), jnp.float32(0.3), rtol=5e-5, atol=1e-5)


@every_choice
def test_choices_in_remat_and_jit_with_modules_closures_and_empty_arrays(row):
    theta = parameters_of_choices(jnp.float32)
    loops = in_scan, lambda body, carry: in_scan(jax.checkpoint(jax.jit(body)), carry)
    ways = [jax.grad(ap.expectation(chosen(row, loop), 4), argnums=1) for loop in loops]
    plain, inside = jax.jit(lambda key, theta: [way(key, theta) for way in ways])(KEY, theta)
    assert_gradient_of(theta, plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=1e-5), inside, plain)


@every_choice
@dtypes
def test_dtypes_of_choices(row, dtype):
    assert_dtypes(lambda: (chosen(row, once), parameters_of_choices(jnp.dtype(dtype))), dtype)


# Every estimator, of choices whose outcomes can be impossible. Costs are linear, so that the biased ones are right.
DISCRETE = CHOICES | {
    "likelihood_ratio": Choice(ap.likelihood_ratio(), coins),
    "rloo": Choice(ap.rloo(2), outcomes),
    "measure_valued": Choice(ap.measure_valued(), coins),
}
every_discrete = cases("row", DISCRETE)


def gradient_of_one_choice(row, distribution, lanes):
    """Value and gradient of the expectation of a weighed sum of outcomes, a categorical one as its one-hot vector."""

    def cost(x):
        x = x if row.make is coins or x.ndim else jax.nn.one_hot(x, 3)
        return jnp.sum(x.reshape(-1).astype(jnp.float32) * jnp.arange(1.0, x.size + 1))

    def program(tape, theta):
        made = distribution(jnp.broadcast_to(theta, (tape.lanes,)))
        return sampled(row, tape, made, lambda x: (cost(x), None))[0]

    return jax.value_and_grad(ap.expectation(program, lanes), argnums=1)


@every_discrete
def test_logits_in_half_precision_are_drawn_in_float32(row):
    # Probabilities of .0067 and less: the same key draws the same samples, whatever the logits' dtype.
    of = lambda dtype: gradient_of_one_choice(row, lambda u: row.make(u.astype(dtype)), 5_000)
    ways = {dtype: of(dtype) for dtype in ("float32", "bfloat16", "float16")}
    found = jax.jit(lambda key, theta: {dtype: way(key, theta) for dtype, way in ways.items()})(KEY, -5.0)
    assert found["float32"][0] > 0 and found["float32"][1] != 0
    for dtype in ("bfloat16", "float16"):
        np.testing.assert_allclose(found[dtype], found["float32"], rtol=2e-2, err_msg=dtype)


@pytest.mark.filterwarnings("ignore:.*terms that see one of them each")  # the coins' sum, whose truth is plain
@every_discrete
def test_impossible_outcomes_beside_possible_ones_are_no_nan(row):
    p = jax.nn.sigmoid(0.3)
    if row.make is coins:
        logits = lambda u: jnp.stack([u, jnp.inf * jnp.ones_like(u), -jnp.inf * jnp.ones_like(u)], axis=-1)
        forms, truth = (lambda u: dist.Bernoulli(logits=logits(u)),), (p + 2, p * (1 - p))
    else:
        logits = lambda u: jnp.stack([u, -jnp.inf * jnp.ones_like(u), 0 * u], axis=-1)
        probs = lambda u: dist.Categorical(probs=jax.nn.softmax(logits(u)))
        forms, truth = (lambda u: dist.Categorical(logits=logits(u)), probs), (p + 3 * (1 - p), -2 * p * (1 - p))
    ways = [gradient_of_one_choice(row, form, 20) for form in forms]
    estimate = lambda key: [way(key, jnp.float32(0.3)) for way in ways]
    if row.estimator.name == "gumbel_softmax":  # the value is another one
        assert np.isfinite(jax.jit(estimate)(KEY)).all()
    else:
        ap.testing.assert_unbiased(estimate, [truth] * len(forms), KEY, 500)


RULES = {
    "feedback_alignment": ap.rewiring.feedback_alignment(KEY),
    "direct_feedback_alignment": ap.rewiring.direct_feedback_alignment(KEY),
    "kolen_pollack": ap.rewiring.kolen_pollack(KEY),
    "sign_symmetry": ap.rewiring.sign_symmetry(),
    "synthetic_gradients": ap.rewiring.synthetic_gradients(),
    "difference_target_propagation": ap.rewiring.difference_target_propagation(KEY, "layer"),
    "surrogate_gradient": ap.rewiring.surrogate_gradient(where="tanh"),
    "skip": ap.rewiring.skip(where="tanh"),
    "gradient_reversal": ap.rewiring.gradient_reversal("tanh"),
    "clip_messages": ap.rewiring.clip_messages(0.1),
    "normalize_messages": ap.rewiring.normalize_messages(),
    "forward_gradient": ap.rewiring.forward_gradient(),
    "first_of": ap.rewiring.first_of(ap.rewiring.clip_messages(0.1, where="tanh"), ap.rewiring.kolen_pollack(KEY)),
}
rewired = cases("rule", RULES)


@jax.jit
def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][0][None])


def stacked(p, x):
    """Three uses of one layer: plain, in a scan of `remat`, and in a branch. `p` has integers and empty arrays too."""
    x = layer(p, x)
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, _: (layer(p, x), None)), x, length=1)
    return jax.lax.cond(p["n"] > 0, lambda x: layer(p, x), lambda x: x, x)


unrolled = lambda p, x: layer(p, layer(p, layer(p, x)))


def parameters(dtype):
    w = 0.5 * jax.random.normal(KEY, (3, 3), dtype)
    return {"w": w, "b": (jnp.full(3, 0.1, dtype),), "empty": jnp.zeros((0, 2), dtype), "n": jnp.int32(1)}


def updates(rule, f, args):
    """`args -> (value, updates of the rule's parameters and gradients of all arguments)`, and the arguments."""
    transformed = ap.rewire(f, rule)
    given = ([KEY] if rule.random else []) + ([transformed.init(*args)] if rule.init else []) + list(args)
    numbers = tuple(range(rule.random, len(given)))
    return jax.value_and_grad(lambda *a: jnp.sum(transformed(*a) ** 2), argnums=numbers, allow_int=True), given


def assert_finite(tree):
    assert all(x.dtype == jax.dtypes.float0 or jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree))


def assert_near(found, truth):
    """As near as memories of eight bits make them."""
    assert_finite(found)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        if a.dtype != jax.dtypes.float0:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(b)


@rewired
def test_rules_in_control_flow_with_pytrees_integers_and_empty_arrays(rule):
    value_and_updates, args = updates(rule, stacked, (parameters(jnp.float32), jnp.ones((2, 3))))
    value, gradients = jax.jit(value_and_updates)(*args)
    np.testing.assert_allclose(value, jnp.sum(stacked(*args[-2:]) ** 2), rtol=1e-6)
    assert_finite(gradients)
    assert jnp.any(gradients[-2]["w"] != 0)
    if rule.random or rule.init is not None:
        return
    plain, args = updates(rule, unrolled, args)
    np.testing.assert_allclose(gradients[-2]["w"], jax.jit(plain)(*args)[1][-2]["w"], rtol=2e-5, atol=1e-6)


@rewired
@dtypes
def test_dtypes_of_rules(rule, dtype):
    with jax.enable_x64(dtype == "float64"), jax.numpy_rank_promotion("raise"):
        value_and_updates, args = updates(rule, layer, (parameters(dtype), jnp.ones((2, 3), dtype)))
        _, gradients = jax.jit(value_and_updates)(*args)
        assert_finite(gradients)
        assert gradients[-2]["w"].dtype == dtype and jnp.any(gradients[-2]["w"] != 0)


@rewired
def test_rules_under_vmap_closures_and_second_derivatives(rule):
    args = (parameters(jnp.float32), jnp.ones((2, 3)))
    value_and_updates, given = updates(rule, layer, args)
    scales = jnp.array([1.0, 0.5])
    by_scale = lambda scale: value_and_updates(*given[:-1], scale * given[-1])[1][-2]["w"]
    each = jnp.stack([jax.jit(by_scale)(s) for s in scales])
    np.testing.assert_allclose(jax.jit(jax.vmap(by_scale))(scales), each, rtol=2e-5, atol=1e-6)

    def closed(scale):  # an array that the function closes over has its derivative too
        return jnp.sum(ap.rewire(lambda p, x: layer(p, x) * scale, rule)(*given))

    if rule is RULES["forward_gradient"]:  # the function as a whole is one node
        refused(TypeError, "closes over an array that is differentiated", jax.grad(closed), 1.0)
    elif not rule.direct:
        np.testing.assert_allclose(jax.jit(jax.grad(closed))(1.0), jnp.sum(layer(*args)), rtol=1e-5)
    refused(TypeError, "no second derivative of a rewired function", jax.grad(lambda s: jnp.sum(by_scale(s))), 1.0)


HALF = ap.memory.packing(lambda x: x.astype(jnp.bfloat16), lambda memory, like: memory.astype(like.dtype), biased=True)
EIGHT = ap.memory.rounding(bits=8)


MEMORIES = {
    "rounding": lambda f, *args: ap.randomize(f, EIGHT, min_size=1),
    "narrow": lambda f, *args: ap.randomize(f, ap.memory.narrow("float8_e4m3fn"), min_size=1),
    "packing": lambda f, *args: ap.randomize(f, HALF, min_size=1),
    "boundaries": lambda f, *args: ap.randomize(f, ap.memory.rounding(32), boundaries=EIGHT, min_size=1),
    # As a plan computes most arrays again.
    "plan": lambda f, *args: computed_again(f, choices(recorded(f, args, range(len(args)), 1))[-1].stays),
}
remembering = cases("memory", MEMORIES)


squares = lambda p, x: jnp.sum(stacked(p, x) ** 2)


@remembering
def test_memories_in_control_flow_with_pytrees_closures_and_vmap(memory):
    p, x = parameters(jnp.float32), jax.random.normal(KEY, (128, 3))
    random = memory(squares, p, x)

    def ways(f, p, x):
        """Of the pytree; of an array that the function closes over, of two copies."""
        gradient = jax.value_and_grad(f, argnums=(0, 1), allow_int=True)
        scaled = lambda s: f({**p, "w": s * p["w"]}, x)
        return gradient(p, x), jax.vmap(jax.grad(scaled))(jnp.array([1.0, 0.5]))

    both = jax.jit(lambda key, *args: (ways(lambda *args: random(key, *args), *args), ways(squares, *args)))
    found, truth = both(KEY, p, x)
    (value, gradients), scales = found
    np.testing.assert_allclose(value, truth[0][0], rtol=1e-6)
    assert_near(found, truth)
    np.testing.assert_allclose(scales[0], jnp.sum(gradients[0]["w"] * p["w"]), rtol=1e-3)
    twice = jax.grad(jax.grad(lambda s: random(KEY, {**p, "w": s * p["w"]}, x)))
    refused(TypeError, "no second derivative", jax.eval_shape, twice, 1.0)


@remembering
@dtypes
def test_dtypes_of_memories(memory, dtype):
    with jax.enable_x64(dtype == "float64"):
        p, x = parameters(dtype), jax.random.normal(KEY, (128, 3), dtype)
        ours, plain = jax.grad(memory(squares, p, x), argnums=1, allow_int=True), jax.grad(squares, allow_int=True)
        found, truth = jax.jit(lambda key, *args: (ours(key, *args), plain(*args)))(KEY, p, x)
        assert found["w"].dtype == dtype
        assert_near(found["w"], truth["w"])
        assert_finite(found)


own_rule = lambda x, w: own_rule_of(x @ w)


own_rule_of = jax.custom_vjp(jnp.tanh)
own_rule_of.defvjp(lambda x: (jnp.tanh(x), x), lambda _, m: (jnp.clip(m, -1, 1),))


def mapped(f):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())


solve = functools.partial(jax.lax.custom_linear_solve, symmetric=True)
CLIPPED = lambda w, x: x @ w, lambda w, m: jnp.clip(m, -1, 1) @ w.T  # a function linear in x, and a false transpose
# Functions of (x, w), square matrices, with a program inside that nobody reads.
UNSEEN = {
    "a rule in shard_map": mapped(own_rule),
    "linear_call": lambda x, w: jax.custom_derivatives.linear_call(*CLIPPED, jnp.ones_like(x), x),
    "a rule in a linear solve": lambda x, w: solve(lambda v: own_rule(x, w) * v, x, lambda _, b: b),
}
# Read as what they are, or one function to all who read programs, though there are programs inside.
SEEN = {
    "shard_map": mapped(lambda x, w: jnp.sin(x @ w)),
    "solve": lambda x, w: solve(lambda v: (1 + w) * v, x, lambda _, b: b / (1 + w)),
    "scatter": lambda x, w: x.at[jnp.array([0, 0, 1])].add(w[:3]),
    "windows": lambda x, w: jax.lax.reduce_window(x @ w, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME"),
}
EXACT = functools.partial(ap.randomize, sampler=ap.memory.rounding(32), min_size=1)
# What is traced of `loss(w)`.
READERS = {
    "memory": lambda loss: lambda w: jax.grad(EXACT(loss), argnums=1)(KEY, w),
    "tracing": lambda loss: ap.semiring_grad(loss, ap.tracing.ordinary()),
    "rewiring": lambda loss: jax.grad(ap.rewire(loss, ap.rewiring.gradient_reversal("tan", strength=-1.0))),
}
read = cases("reader", READERS)
W = 0.1 * np.arange(16, dtype=np.float32).reshape(4, 4) / 16


@read
@pytest.mark.quick
@pytest.mark.parametrize("unseen", UNSEEN)
def test_programs_that_nobody_reads_are_refused_wherever_they_stand(reader, unseen):
    words = r"cannot see into the primitive '(shard_map|linear_call|custom_)|(map|solve)'\) whose .* not linear"
    for around in (around for name, around in TRANSFORMS.items() if "vmap" not in name):
        loss = lambda w, around=around: jnp.sum(around(lambda x: UNSEEN[unseen](x, w))(jnp.tan(w)))
        refused((NotImplementedError, TypeError), words, jax.eval_shape, reader(loss), W)


@read
@pytest.mark.quick
def test_programs_that_stand_for_one_function_are_read(reader):
    loss = lambda w: sum(jnp.sum(jnp.sin(f(jnp.tan(w), w))) for f in SEEN.values())
    found, truth = jax.jit(lambda w: (reader(loss)(w), jax.grad(loss)(w)))(W)
    np.testing.assert_allclose(found[0] if isinstance(found, tuple) else found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.quick
def test_programs_without_a_message_may_hold_anything():
    loss = lambda w: jnp.sum(jnp.tan(w) * mapped(own_rule)(jnp.ones((4, 4)), jnp.ones((4, 4))))
    for name in ("memory", "tracing"):
        jax.eval_shape(READERS[name](loss), W)


@read
@pytest.mark.quick
def test_modules_that_write_back_what_was_there_are_read(reader):
    """As `nnx.jit` and `nnx.remat` do; one that changes itself is refused below."""
    plain = lambda model: jnp.sum(jnp.tan(model(jnp.ones((4, 3)))) ** 2)
    losses = nnx.jit(plain), nnx.remat(plain)
    both = jax.jit(lambda model: [(reader(loss)(model), jax.grad(loss)(model)) for loss in losses])
    for found, truth in both(nnx.Linear(3, 3, rngs=nnx.Rngs(0))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, truth)


def referred(w):
    ref = jax.new_ref(jnp.zeros_like(w))
    ref[...] = jnp.sin(w @ w.T) @ w
    return jnp.sum(ref[...] @ w.T)


@pytest.mark.parametrize("reader", ["memory", "tracing"])
def test_mutable_references_are_refused(reader):
    for function in (referred, jax.jit(referred), jax.checkpoint(referred)):
        refused(TypeError, "mutable reference", jax.eval_shape, READERS[reader](function), W)


def of_lanes(function):
    """A program whose distribution is made by the function."""

    def program(tape, layer, x):
        d = lambda layer, x: dist.Normal(function(layer, x), 1.0)
        tape, y = ap.stochastic(RP(), in_axes=(None, None))(d)(tape, layer, x)
        return tape.cost(y)

    return functools.partial(ap.expectation(program, 4), KEY)


ROWS = jnp.ones((4, 3))
# What is made of a function of a module and of data.
GIVEN_MODULES = {
    "ap.stochastic": of_lanes,
    "ap.randomize": lambda f: functools.partial(EXACT(f), KEY),
    "ap.rewire": lambda f: ap.rewire(f, ap.rewiring.gradient_reversal("tanh")),
    "ap.with_taps": lambda f: ap.with_taps(nnx.grad(lambda layer, x: ap.tap(f(layer, x), "value"), argnums=(0, 1))),
    "ap.semiring_grad": lambda f: ap.semiring_grad(f, ap.tracing.ordinary(), 1),
    "ap.tracing.influence": lambda f: ap.tracing.influence(jax.named_scope("f")(f), argnums=1),
    "ap.trace_gradients": lambda f: lambda layer, _: len(ap.trace_gradients(f, argnums=1)(layer, ROWS).parameters),
    "ap.backpropagation": lambda f: ap.node(ap.backpropagation(f)),
    "ap.node": lambda f: ap.node(ap.Propagator(lambda *inputs: (f(*inputs), None), lambda memory, message: message)),
}


class Counting(nnx.Linear):
    """It changes what is no array: how often it was called."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)


@pytest.mark.parametrize("name", GIVEN_MODULES)
def test_a_module_that_changes_itself_is_refused(name):
    """The changes would be lost: statistics stayed as they were, and each step had the dropout mask of the first."""
    of = lambda layer, x: jnp.sum(jnp.tanh(layer(x)))
    made, inside = GIVEN_MODULES[name](of), GIVEN_MODULES[name](nnx.jit(of))
    changing = nnx.Dropout(0.5, rngs=nnx.Rngs(1)), nnx.BatchNorm(3, rngs=nnx.Rngs(1)), Counting(3, 3, rngs=nnx.Rngs(1))
    for function, layer in (*((made, layer) for layer in changing), (inside, changing[2])):
        refused(ValueError, f"{name} is given a function that .*in place", function, layer, ROWS)
    for layer in changing[:2]:
        layer.set_attributes(deterministic=True, use_running_average=True, raise_if_not_found=False)
        jax.eval_shape(lambda x, layer=layer: made(layer, x), ROWS)


def test_values_drawn_elsewhere_with_a_module_in_a_branch_and_empty():
    # `ap.score` stands outside of ESTIMATORS, since it samples nothing; all else is in expectations/test_score.py.
    x, inputs = jnp.array([[0, 2], [1, 1], [2, 0], [0, 1]]), jax.random.normal(KEY, (4, 2, 3))
    b = jnp.full(x.shape, -np.log(3.0), jnp.float32)

    def program(tape, model, x, b, inside):
        choices = dist.Categorical(logits=model(inputs))
        scored = lambda tape: ap.score(tape, choices, x, behaviour_log_prob=b, mask=jnp.ones(4, bool))
        tape = jax.lax.cond(x[0, 0] == 0, scored, lambda tape: tape, tape) if inside else scored(tape)
        tape = ap.score(tape, dist.Bernoulli(probs=0.3 * jnp.ones((4, 0))), x[:, :0], behaviour_log_prob=b[:, :0])
        return tape.cost(jnp.sum(x, axis=1).astype(jnp.float32))

    gradients = [ap.grad(functools.partial(program, inside=inside), 4) for inside in (False, True)]
    both = jax.jit(lambda *args: [gradient(KEY, *args) for gradient in gradients])
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    plain, branch = both(model, x, b)
    assert_gradient_of(model, plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), branch, plain)
