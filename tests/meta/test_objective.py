"""Every outer gradient against the loss that `inner_problem` documents, written out and differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import apgrad as ap
from apgrad import meta
from apgrad.meta import _outer
from tests.cases import cases
from tests.mplp.graphs import close
from tests.refusals import refused

T, HIDDEN, BATCH = 2, 2, 3
WEIGHTS = {"hint": 0.4, "held_out": 0.7}


def family():
    """So narrow a prior that there is a penalty."""
    sizes = {"sizes": (1, HIDDEN, 1), "batch": BATCH, "held_out": 4}
    return meta.sinusoid(**sizes, activation=jnp.tanh, amplitude=(1.0, 2.0), deviation=0.3)


def predict(params, x):
    hidden = jnp.tanh(x @ params["dense_in"]["kernel"] + params["dense_in"]["bias"])
    return hidden, hidden @ params["dense_out"]["kernel"] + params["dense_out"]["bias"]


def error(params, batch):
    return jnp.mean(jnp.sum((predict(params, batch[0])[1] - batch[1]) ** 2, axis=-1)) / 2


def documented(task, theta, key, options, length):
    """The loss at the head of `_unroll.py`, with gradient descent at the rate exp(theta) as the learner."""
    h, v, b = (options.get(name, 0.0) for name in ("hint", "held_out", "batch_entropy"))
    log_rate, params = theta if options.get("learn_prior") else (theta, None)
    keys = jax.random.split(key, 4)
    drawn = task.draw(keys[0])
    params = task.prior(keys[1]) if params is None else params
    total = 0.0
    for t in range(length):
        batch = task.batch(drawn, jax.random.fold_in(keys[2], t))
        variance = jnp.var(predict(params, batch[0])[0], axis=0)
        constant = 1e-5 if options.get("entropy_form") == "paper" else 1.0
        entropy = jnp.mean(jnp.log(2 * jnp.pi * jnp.e * variance + constant) / 2)
        new = jax.tree.map(lambda p, g: p - jnp.exp(log_rate) * g, params, jax.grad(error)(params, batch))
        hint = error(params if options.get("hint_before") else new, batch)
        total += (h + b * jnp.maximum(0.0, 0.5 - entropy)) * hint / length
        params = new
    return total + v * error(params, task.held_out(drawn, jax.random.fold_in(keys[2], T)))


# The first three have all losses. The loss is linear in its weights, so each of the losses alone is enough beside them.
CASES = [
    WEIGHTS | {"hint_before": before, "shortest": shortest, "learn_prior": prior} | entropy
    for before, shortest, prior, entropy in [
        (True, 1, True, {"batch_entropy": 2.0}),
        (False, None, False, {"batch_entropy": 2.0}),
        (False, 1, True, {"batch_entropy": 2.0, "entropy_form": "paper"}),
    ]
]
EACH = (WEIGHTS | {"batch_entropy": 2.0}).items()
CASES += [dict.fromkeys(WEIGHTS, 0.0) | {name: weight, "learn_prior": True} for name, weight in EACH]


def setting(options):
    """The problem of one task, the meta-parameters, the task's key, and its documented loss with the gradient."""
    task = family()._replace(loss=error)
    learner = meta.optimizer(lambda log_rate: optax.sgd(jnp.exp(log_rate)), task.loss)
    problem = meta.inner_problem(task, learner, T, **options)
    theta, key = jnp.asarray(-1.0), jax.random.key(3)
    if options.get("learn_prior"):
        theta = meta.WithPrior(theta, task.prior(jax.random.key(5)))
    length = T
    if options.get("shortest"):
        length = int(jax.random.randint(jax.random.split(key, 4)[3], (), options["shortest"], T + 1))
    fixed = problem._replace(init=lambda theta, _: problem.init(theta, key))
    loss = lambda theta: documented(task, theta, key, options, length)
    return fixed, theta, key, jax.jit(jax.value_and_grad(loss))


def described(options):
    return ",".join(f"{k}={v}" for k, v in options.items() if v) or "none"


def test_a_hint_without_weight_is_not_computed():
    task = family()
    learner = meta.optimizer(lambda rate: optax.sgd(rate), task.loss)

    def products(hint):
        problem = meta.inner_problem(task, learner, T, hint=hint)
        step = lambda: problem.step(0.1, problem.init(0.1, jax.random.key(0)))
        return str(jax.make_jaxpr(step)()).count("dot_general")

    assert products(0.4) - products(0.0) == 2  # the forward pass of two layers


@cases("options", {described(case): case for case in CASES}, long=[described(case) for case in CASES[1:]])
def test_derivatives_are_those_of_the_documented_loss(x64, options):
    """Reverse and forward mode, and a truncation as long as the unroll, which holds the state at its start constant."""
    problem, theta, key, documented_at = setting(options)
    loss, truth = documented_at(theta)
    makers = [meta.reverse_mode, meta.forward_mode, lambda p: meta.truncated(p, T, stagger=False)]

    @jax.jit
    def estimates(theta):
        truncated = _outer.Segments(problem.init(theta, key), jnp.zeros((), int))
        return [make(problem).estimate(theta, key, truncated)[:2] for make in makers]

    assert all(jnp.any(jnp.abs(g) > 1e-4) for g in jax.tree.leaves(truth))
    started = truth._replace(prior=jax.tree.map(jnp.zeros_like, truth.prior)) if options.get("learn_prior") else truth
    close(estimates(theta), [(loss, truth), (loss, truth), (loss, started)], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shortest", [None, 2])
def test_a_loss_that_counts_is_weighed_as_others_are(shortest):
    """A weight of .3 as an integer is 0."""
    count = lambda params, batch: jnp.sum(jnp.abs(predict(params, batch[0])[1] - batch[1]) > 0.1)
    whole = lambda params, batch: count(params, batch).astype(float)
    tasks, learner = [family()._replace(loss=loss) for loss in (count, whole)], meta.optimizer(optax.sgd, error)
    problems = [meta.inner_problem(task, learner, T, shortest=shortest) for task in tasks]
    results = jax.jit(lambda key: [meta.objective(p, 0.1, key) for p in problems])(jax.random.key(0))
    found = [(loss, losses) for loss, (losses, _) in results]
    assert found[1][1][0] > 0
    close(found[0], found[1])


def test_losses_and_measures_are_of_parameters_as_they_are_though_they_are_written_to():
    def step(theta, params, state, batch):
        params[...] = params[...] - theta
        return params, state

    def measure(params, batch):
        found = params[...] + 0.0
        params[...] = -found
        return found

    learner = meta.Learner(lambda theta, params, batch: (), step)
    task = family()._replace(prior=lambda key: nnx.Param(jnp.asarray(1.5)), loss=lambda p, batch: p[...] ** 2)
    problem = lambda before: meta.inner_problem(task, learner, 2, hint=1.0, held_out=0.0, hint_before=before)
    losses = jax.jit(lambda key: [meta.objective(problem(b), 0.5, key)[0] for b in (True, False)])(jax.random.key(0))
    close(losses, [(1.5**2 + 1.0**2) / 2, (1.0**2 + 0.5**2) / 2])
    run = jax.jit(lambda key: meta.evaluate(task, learner, 0.5, key, 2, measure, tasks=None))
    close(run(jax.random.key(0)), jnp.array([1.5, 1.0, 0.5]))


def first(outer, theta, key):
    begin, key = jax.random.split(key)
    return outer(theta, key, outer.init(theta, begin))


@pytest.mark.long
def test_evolution_estimates_the_derivative_of_the_documented_loss(x64):
    """Of a trained prior too, which acts on the start alone. A persistent one of a single segment is `evolution`."""
    problem, theta, _, documented_at = setting(CASES[0])
    _, truth = documented_at(theta)
    makers = meta.persistent_evolution, meta.truncated_evolution
    # So small a sigma that what is smoothed is the loss itself.
    estimators = [make(problem, T, sigma=1e-4, stagger=False) for make in makers]
    # The state that a truncation starts from is a constant, and so is the prior.
    truths = [truth, truth._replace(prior=jax.tree.map(jnp.zeros_like, truth.prior))]
    estimate = lambda key: [first(e, theta, key)[1] for e in estimators]
    ap.testing.assert_unbiased(estimate, truths, jax.random.key(2), 4000)


def test_perturbed_unrolls_without_noise_have_the_derivative_of_the_documented_loss(x64):
    problem, theta, _, documented_at = setting(CASES[0] | {"shortest": None})
    outer = meta.perturbed(problem, sigma=1e-9, unrolls=2, estimator=ap.reparameterization())
    close(jax.jit(outer)(theta, jax.random.key(0))[:2], documented_at(theta), rtol=1e-6)


def make_nothing(problem, **options):
    return meta.inner_problem(family(), meta.optimizer(optax.sgd, family().loss), **{"length": 2, **options})


WRONG = (2.0, 1.0), (jnp.nan, 1.0), (0.0, jnp.inf), (0.1, 0.5, 5.0), ("0", "1"), 1.0
REFUSED = [
    *[("length", value, make_nothing) for value in (0, -1, 2.5, True)],
    *[("shortest", value, make_nothing) for value in (0, 3, 1.5)],
    *[(n, v, make_nothing) for n in ("hint", "held_out", "batch_entropy") for v in (-0.1, jnp.nan, "1")],
    ("entropy_form", "Reference", make_nothing),
    *[("segment", v, meta.truncated) for v in (0, -2, 2.0, 4)],
    *[("segment", v, f) for f in (meta.truncated_evolution, meta.persistent_evolution) for v in (0, 2.0)],
    *[("sigma", v, meta.single_evolution) for v in (0.0, -1.0, jnp.inf, jnp.nan, "1")],
    *[("unrolls", v, meta.perturbed) for v in (0, 2.5)],
    *[("remat", v, meta.reverse_mode) for v in (0, -1, 2.5)],
    *[("remat", v, lambda p, **o: meta.truncated(p, 2, **o)) for v in (-1,)],
    *[("count", v, lambda p, count: meta.batched(meta.reverse_mode(p), count)) for v in (0, 2.5, "2")],
    *[("max_norm", v, lambda p, max_norm: meta.clipped(meta.reverse_mode(p), max_norm)) for v in (0, jnp.nan)],
    *[("weights", v, lambda p, weights: meta.average([meta.reverse_mode(p)] * 2, weights)) for v in ([2, -1], [1])],
    *[(n, v, lambda p, **o: meta.sinusoid(**o)) for n in ("batch", "held_out") for v in (0, 2.5)],
    *[("amplitude", v, lambda p, **o: meta.sinusoid(**o)) for v in WRONG],
    *[("size", v, lambda p, size: meta.data.load("digits", size=size)) for v in (0, -1, True, 4.0)],
    *[("size", v, lambda p, size: meta.pool(family().prior, size, jax.random.key(0))) for v in (0, 1.5)],
    *[("sizes", v, lambda p, **o: meta.sinusoid(**o)) for v in ((1, 0, 1), (1, 2.5, 1), (1,), (1, 5, 2), (2, 5, 1))],
]


def test_a_step_after_the_horizon_does_not_count_though_it_has_no_derivative(x64):
    """Of an unroll of one step that could have two: the second would go from .75 to the root of zero."""
    learner = meta.Learner(lambda theta, params, batch: (), lambda theta, p, state, batch: (p - theta, state))
    task = family()._replace(prior=lambda key: jnp.asarray(1.5), loss=lambda p, batch: jnp.sqrt(p))
    problem = meta.inner_problem(task, learner, 2, held_out=0.0, hint=1.0, shortest=1)
    horizon = jax.jit(lambda key: problem.init(jnp.asarray(0.75), key).horizon)
    key = next(key for key in jax.random.split(jax.random.key(0), 20) if horizon(key) == 1)
    one = lambda key: meta.reverse_mode(problem)(jnp.asarray(0.75), key)[:2]
    for found in jax.jit(lambda key: (one(key), jax.vmap(one)(key[None])))(key):
        np.testing.assert_allclose(jnp.hstack(found), [np.sqrt(0.75), -0.5 / np.sqrt(0.75)], rtol=1e-12)


def test_noise_ends_with_an_unrolls_own_length():
    """Steps that do nothing but carry noise: the held-out square is sigma^2 a step, of two on average."""
    learner = meta.Learner(lambda theta, params, batch: (), lambda theta, p, state, batch: (p + theta, state))
    task = family()._replace(prior=lambda key: jnp.asarray(0.0), loss=lambda p, batch: p**2)
    problem = meta.inner_problem(task, learner, 3, held_out=1.0, hint=0.0, shortest=1)
    outer = meta.perturbed(problem, sigma=0.3, unrolls=8, estimator=ap.reparameterization())
    ap.testing.assert_unbiased(lambda key: outer(jnp.asarray(0.0), key)[0], 2 * 0.3**2, jax.random.key(0), 2_000)


def test_options_that_make_no_sense_are_refused():
    problem, theta, key, _ = setting({"hint": 1.0})
    refused(ValueError, "nothing to minimise", make_nothing, None, hint=0, held_out=0)
    for name, value, make in REFUSED:
        options = {"segment": 2} if make in (meta.persistent_evolution, meta.single_evolution) else {}
        made = lambda options=options | {name: value}, make=make: first(make(problem, **options), theta, key)
        refused(ValueError, "got", jax.eval_shape, made)
