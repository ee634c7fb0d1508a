"""Tests of the meta-training experiments: a tiny run, and what their cells are."""

import os
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.metrics import r2_score

from apgrad import meta, mplp
from experiments import (
    harness,
    mplp_ablation,
    mplp_batch_entropy,
    mplp_from_random,
    mplp_maml,
    mplp_objective,
    mplp_settings,
    mplp_sgd,
    mplp_sinusoid,
    outer_gradients,
    outer_training,
)
from experiments.parts import influence_balancing, meta_curves, regression
from tests.refusals import refused


def test_outer_gradients(run):
    rows = run(outer_gradients, "--rates 0.1 --lengths 5 --estimates 20 --reference 2000")["rows"]
    assert {row["estimator"] for row in rows} == set(outer_gradients.ESTIMATORS)
    # One truncation is the whole unroll here: no estimator of the gradient is biased, but for the smoothing.
    assert all(abs(row["bias"]) < 5 * row["bias_standard_error"] + 0.02 for row in rows)


METHODS = ("reverse mode", "forward mode", "ES", "PES, K = 10", "ES-Single, K = 10")


@pytest.mark.parametrize("method", [*METHODS, "truncated, K = 1", "truncated, K = 10"])
def test_influence_balancing_has_the_closed_forms_derivative_and_short_truncations_the_wrong_sign(method):
    found = outer_training.bias(outer_training.Config(), {"method": method, "sigma": 0.1}, 0)
    wanted, rounding = 24.0, 24e-6
    if method not in METHODS:
        # From a fixed state every step adds theta to s_1 for the first ten: ds_1/dtheta after t steps is t.
        wanted = (influence_balancing.REACH * influence_balancing.START - 1) * (int(method.split()[-1]) + 1) / 2
        rounding = -1e-4 * wanted
    assert abs(found["bias"] + 24 - wanted) <= 4 * found["bias_standard_error"] + rounding


def test_clipped_tasks_are_reverse_mode_without_a_limit_and_forget_by_a_factor_below_one():
    # A state grows by theta, and is the loss before each of three steps: the derivative is 0 + 1 + 2. All tasks are
    # alike, so a factor of .5 halves each message, m_t = (1 + m_{t+1}) / 2: the sum is 0 + .5 + .75.
    class State(NamedTuple):
        params: jax.Array
        learner: jax.Array

    step = lambda theta, s: (s._replace(params=s.params + theta), s.params)
    init = lambda theta, key: State(jnp.zeros(()), jnp.zeros(()))
    problem = meta.Problem(init, step, lambda theta, s: jnp.zeros(()), 3)
    outers = {None: meta.reverse_mode(problem)} | {f: outer_training.clipped(problem, 4, f) for f in (jnp.inf, 0.5)}
    found = jax.jit(lambda: {str(f): o(jnp.float32(2.0), jax.random.key(0))[:2] for f, o in outers.items()})()
    wanted = {"None": (6, 3), "inf": (6, 3), "0.5": (6, 1.25)}
    assert {name: tuple(map(float, x)) for name, x in found.items()} == wanted


def test_settings_are_those_that_were_drawn_before_any_rule_was_trained():
    drawn = [mplp_settings.draw_setting(number) for number in range(40)]
    assert drawn[0] == ("mnist", 12, (451, 24, 52, 117, 211), "sigmoid", 15, None) and len(set(drawn)) == 40
    assert drawn[39] == ("mnist", 12, (21, 331, 156), "gelu", 62, 0.02)
    assert all(16 <= width <= 512 for setting in drawn for width in setting.hidden)
    assert all(1 <= len(setting.hidden) <= 5 and 2 <= setting.batch <= 256 for setting in drawn)


def test_a_surrogate_step_is_a_step_with_the_sigmoids_derivative():
    z = jnp.array([-2.0, -0.1, 0.3, 4.0])
    value, pullback = jax.vjp(mplp_settings.surrogate_step, z)
    np.testing.assert_allclose(value, [0, 0, 1, 1], atol=1e-7)
    np.testing.assert_allclose(pullback(jnp.ones(4))[0], jax.vmap(jax.grad(jax.nn.sigmoid))(z), rtol=1e-6)
    cells, chosen = mplp_settings.cells(mplp_settings.PAPER), mplp_settings.PAPER.surrogate
    given = [cell["setting"] for cell in cells if cell["method"] == chosen]
    assert [number for number in range(40) if mplp_settings.draw_setting(number).activation == "step"] == given


def test_a_rule_without_averages_forgets_the_last_update():
    task = meta.images(meta.data.load("digits"), hidden=(5,), activation=jnp.tanh, batch=4)
    network, batch = task.network, task.batch({}, jax.random.key(1))
    rule = mplp_ablation.made("no averages", mplp.sites(network, task.prior(jax.random.key(0)), batch))

    @jax.jit
    def step(params, scale):
        state = mplp.init_state(rule, network, params, batch)
        state = {k: v | ({"average": v["average"] + scale} if "average" in v else {}) for k, v in state.items()}
        return mplp.backward(rule, network, params, state, batch)[0]

    params = task.prior(jax.random.key(0))
    jax.tree.map(np.testing.assert_allclose, step(params, 0.0), step(params, 1e-6))


def test_a_prior_and_rule_that_are_trained_together_have_fitted_standardizers():
    _, _, theta = mplp_maml.outer_gradient(mplp_maml.PAPER, "MPLP", 0)
    scales = [np.asarray(s.scale[...]) for s in theta.learner.standardizers.values()]
    assert all(np.all(scale > 0) for scale in scales) and any(np.any(scale != 1) for scale in scales)


def test_the_rule_from_a_random_start_has_the_published_places_and_fitted_standardizers():
    task = mplp_from_random.task_of("sinusoid")
    dense = [f"{i}_dense/{part}" for i in (0, 2, 4) for part in ("bias", "weight")]
    rule = mplp_from_random.new_rule("sinusoid", task, 0)
    messages = [f"{name}/message" for name in ("1_activation", "3_activation", "loss")]
    assert sorted(rule.standardizers) == sorted([*dense, *messages])
    all_of = lambda name: np.concatenate([np.ravel(vars(s)[name]) for s in rule.standardizers.values()])
    assert np.all(np.isfinite([*all_of("shift"), *all_of("scale")])) and np.max(all_of("scale")) > 30
    # Inputs are uniform in [-5, 5]; the published checkpoint has 1000 for a bias as well, and no bound.
    fitted = rule.standardizers["0_dense/weight"]
    assert fitted.scale[-1] == pytest.approx(1 / 2.89, rel=0.3) and abs(fitted.shift[-1]) < 1.5


WEIGHED = {"published": 0.7 * 10 + 0.3 * 5 * 10, "weight": 0.3 * 10 + 0.7 * 5 * 10}
WEIGHED |= {"data": 0.7 * 10 + 0.3 * 64, "held-out": 0.3 * 10 + 0.7 * 64}


@pytest.mark.parametrize(("objective", "expected"), WEIGHED.items())
def test_the_outer_loss_weighs_hint_and_held_out_data_as_the_published_code(objective, expected):
    # Losses are numbers of points here: a minibatch has 10, the published held-out data are five minibatches.
    points = lambda params, batch: jnp.asarray(batch[0].shape[0], float)
    task = mplp_from_random.task_of("sinusoid")._replace(loss=points)
    small = {"message_size": 1, "hidden": 1, "layers": ()}
    outer, _, rule = mplp_from_random.training("sinusoid", task, 0, objective, **small)
    loss, *_ = jax.jit(lambda rule, key: outer.estimate(rule, key, outer.init(rule, key)))(rule, jax.random.key(0))
    assert loss == pytest.approx(expected)


def test_held_out_minibatches_are_drawn_from_the_task():
    task = meta_curves.held_out_minibatches(mplp_from_random.task_of("sinusoid"), 5)
    drawn = task.draw(jax.random.key(0))
    (x, y), (other, _) = (task.held_out(drawn, jax.random.key(i)) for i in (1, 2))
    assert x.shape == y.shape == (50, 1) and len(np.unique(x)) == 50 and not np.any(x == other)
    np.testing.assert_allclose(y, drawn["amplitude"] * np.sin(x + drawn["phase"]), rtol=1e-5, atol=1e-6)


def test_bad_options_are_refused():
    for module, options, words in (
        (outer_gradients, {"lengths": (7,)}, "multiples of 5"),
        (outer_training, {"seeds": 1}, "seeds must be at least 2, got 1"),
        (outer_training, {"rule": ("BPTT",)}, r"rule are of \['reverse mode', .*got \['BPTT'\]"),
        (mplp_sinusoid, {"runs": 1}, "runs must be at least 2"),
        (mplp_sinusoid, {"sizes": ()}, r"sizes must be one at least, got \(\)"),
        (mplp_sinusoid, {"rate": float("nan")}, "rate must be positive, got nan"),
        (outer_training, {"rates": (0.1, 0.0)}, r"rates must be positive, got \(0.1, 0.0\)"),
        (mplp_sinusoid, {"sharing": ("some",)}, r"sharing are of \['none', 'networks', 'all'\], got \['some'\]"),
    ):
        refused(ValueError, words, module.Config, **options)


def toy():
    """An outer gradient with a carry that has a key: the mean over tasks of half a step towards a random number."""
    step = lambda theta, s: ((s[0] - theta * (s[0] - jax.random.normal(s[1])), jax.random.split(s[1])[0]), s[0] ** 2)
    init = lambda theta, key: (jnp.ones((), theta.dtype), key)
    problem = meta.Problem(init, step, lambda theta, s: jnp.zeros((), theta.dtype), 4)
    return meta.batched(meta.truncated(problem, 2), 3)


def test_a_judged_training_goes_on_where_it_was_killed(tmp_path):
    arguments = (toy(), optax.sgd(0.1, momentum=0.9), jnp.float32(0.5), 0, 6, 3)
    judge = lambda theta: np.array([abs(theta - 0.3)])
    whole = meta_curves.judged_training(*arguments, judge, harness.Checkpoint(tmp_path / "whole.npz"))
    assert whole.judgements.shape == (4, 1) and whole.losses.shape == (3,) and whole.skipped == 0
    assert abs(float(whole.best) - 0.3) == pytest.approx(whole.judgements.min())
    calls = []

    def killed(theta):
        calls.append(theta)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return judge(theta)

    checkpoint = harness.Checkpoint(tmp_path / "killed.npz")
    with pytest.raises(KeyboardInterrupt):
        meta_curves.judged_training(*arguments, killed, checkpoint)
    again = meta_curves.judged_training(*arguments, killed, checkpoint)
    assert len(calls) == 3 + 2  # one stretch was lost
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    with pytest.raises(ValueError, match="a multiple of the points of a curve, got 5 and 3"):
        meta_curves.judged_training(*arguments[:4], 5, 3, killed, checkpoint)


def test_trainings_side_by_side_are_each_alone(tmp_path):
    outer, optimizer, thetas = toy(), optax.sgd(0.1, momentum=0.9), jnp.array([0.5, 0.1])
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    saved = harness.Checkpoint(tmp_path / "together.npz")
    together, losses, skipped = meta_curves.train_together(outer, optimizer, thetas, keys, 6, 3, saved)
    alone = lambda theta, key: meta.train(outer, optimizer, theta, key, 6, progress=False).theta
    np.testing.assert_allclose(together, jnp.stack([*map(alone, thetas, keys)]), rtol=1e-5)
    assert losses.shape == (2, 3) and not skipped.any()
    again, same, _ = meta_curves.train_together(outer, optimizer, thetas, keys, 6, 3, saved)
    np.testing.assert_array_equal(together, again)
    np.testing.assert_array_equal(losses, same)


@pytest.mark.skipif("APGRAD_DATA" not in os.environ, reason="APGRAD_DATA, the folder with mnist.npz, is not set")
def test_objectives_side_by_side_are_each_alone():
    """The weight and the number of held-out images, as numbers, give the outer gradient of `mplp_from_random`."""
    task = mplp_from_random.task_of("mnist", transfer="16-5-10")
    first = lambda drawn, key: jax.tree.map(lambda x: x[:8], task.held_out(drawn, key))
    pairs = {"data": task, "held-out": task, "published": task._replace(held_out=first)}
    rule = mplp_from_random.new_rule("mnist", task, 0)
    side = mplp_objective.outer_gradient(mplp_from_random.pooled_task("mnist", task, 0))
    estimate = lambda outer, theta: outer.estimate(theta, jax.random.key(1), outer.init(theta, jax.random.key(2)))[:2]
    for name, alone in pairs.items():
        outer = mplp_from_random.training("mnist", alone, 0, "data" if name == "published" else name)[0]
        loss, gradient = jax.jit(lambda rule, outer=outer: estimate(outer, rule))(rule)
        numbered = meta_curves.Numbered(rule, jnp.array(mplp_objective.OBJECTIVES[name]))
        same, found = jax.jit(lambda theta: estimate(side, theta))(numbered)
        np.testing.assert_allclose(same, loss, rtol=1e-5)
        chex.assert_trees_all_close(found.rule, gradient, rtol=2e-3, atol=1e-6)


def test_the_rule_of_section_5_1_sees_prediction_and_target_alone():
    rule = mplp_sgd.new_rule(mplp_sgd.PAPER, 0)
    kernels = {name: net.mlp.kernels[0].shape for name, net in rule.networks.items()}
    assert kernels == dict.fromkeys(("dense/f", "dense/g", "activation/g", "squared_error/g"), (2, 80))
    trained = jax.tree_util.tree_leaves_with_path(nnx.state(rule, nnx.Param))
    assert not any("rate" in jax.tree_util.keystr(path) for path, _ in trained)


def test_the_penalty_is_that_of_algorithm_2():
    task = meta.sinusoid(sizes=(1, 4, 1), activation=jnp.tanh, batch=5, amplitude=(1.0, 1.0))
    learner = meta.optimizer(lambda log_rate: optax.sgd(jnp.exp(log_rate)), task.loss)
    plain = meta.inner_problem(task, learner, 6, hint=6.0, held_out=0.0, hint_before=True)
    outer = meta.truncated(mplp_batch_entropy.algorithm_2(plain, task, 3, 2.0), 3, stagger=False)

    def written(log_rate, inner, first, last_loss=None):
        """The loss of a segment, where a given last loss is the constant; and the last loss."""
        params, losses, penalties = inner.params, [], []
        for t in range(first, first + 3):
            batch = task.batch(inner.task, jax.random.fold_in(inner.key, t))
            losses.append(task.loss(params, batch))
            penalties.append(meta.entropy_penalty(task.network, params, batch[0]))
            gradient = jax.grad(task.loss)(params, batch)
            params = jax.tree.map(lambda p, g: p - jnp.exp(log_rate) * g, params, gradient)
        scale = losses[-1] if last_loss is None else last_loss
        return sum(losses) + 2 * sum(penalties) / 3 * scale, losses[-1]

    @jax.jit
    def both(theta, key):
        carry, found = outer.init(theta, key), []
        for first in (0, 3):
            inner = carry.state.inner
            _, last = written(theta, inner, first)
            wanted = jax.value_and_grad(lambda x, i=inner, f=first, c=last: written(x, i, f, c)[0])(theta)
            *got, carry = outer.estimate(theta, key, carry)
            found.append((got, wanted, jax.grad(lambda x, i=inner, f=first: written(x, i, f)[0])(theta)))
        return found

    for got, wanted, whole in both(jnp.float32(-1.0), jax.random.key(3)):
        np.testing.assert_allclose(got, wanted, rtol=2e-5)
        assert abs(whole - wanted[1]) > 1e-3 * abs(whole)  # what is held constant matters


def test_regression_is_standardized_and_scored_by_the_variance_that_is_explained():
    options = {"hidden": (5,), "activation": jnp.tanh, "batch": 4, "deviation": None}
    task = regression.teachers(6, 2, **options)
    drawn = jax.jit(jax.vmap(task.draw))(jax.random.split(jax.random.key(0), 40))
    x, y = jax.jit(jax.vmap(task.held_out))(drawn, jax.random.split(jax.random.key(1), 40))
    np.testing.assert_allclose([jnp.std(x), jnp.mean(y), jnp.std(y)], [1, 0, 1], atol=0.05)
    for name in regression.SETS:
        x, y, x_test, y_test = regression.load(name)
        np.testing.assert_allclose([np.std(y), np.mean(y)], [1, 0], atol=0.1)
        assert len(x) == len(y) and len(x_test) == len(y_test) and abs(len(x) - 3 * len(x_test)) < 4
        assert not {row.tobytes() for row in x} & {row.tobytes() for row in x_test}
    task = regression.task("halves", **options)
    params, batch = task.prior(jax.random.key(2)), task.held_out({}, jax.random.key(3))
    given = batch[0], task.network.predict(params, batch[0]) + 0.3 * batch[1]
    score = r2_score(given[1], task.network.predict(params, batch[0]), multioutput="variance_weighted")
    np.testing.assert_allclose(regression.explained(task, params, given), score, rtol=1e-4)
    assert regression.explained(task, params, (batch[0], 1e-3 * batch[1])) == 0
