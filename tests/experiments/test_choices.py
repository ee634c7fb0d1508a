"""The benchmarks of choices: exact variances and the estimators' own, the peers, and what is right or wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from experiments import discrete_vae as vae
from experiments.benchmarks import choice_peers as peers, discrete_choices as bench, peers as single


@pytest.mark.parametrize("problem", ["toy, theta .5", "toy, theta .1", "quadratic, 6"])
def test_the_estimators_have_their_exact_variances(problem):
    logits = bench.logits_of(problem)
    methods = ("reinforce", "rloo, 2", "arm", "disarm")
    gradients = {method: jax.grad(bench.objective(method, 1), argnums=1) for method in methods}

    @jax.jit
    def estimates(keys):
        return jax.lax.map(lambda k: {m: g(k, logits, None) for m, g in gradients.items()}, keys, batch_size=500)

    for method, samples in estimates(jax.random.split(jax.random.key(0), 20_000)).items():
        found, exact = bench.variance_of(samples), bench.exact_variance(method, bench.PROBLEMS[problem])
        # float32 adds the rounding of a cost of .25 to a difference of costs
        assert abs(found["variance"] - exact) < 4 * found["standard_error"] + 1e-4 * exact + 1e-14, method


def test_the_autoencoders_gradients_are_exact_on_average_and_its_divergence_is(monkeypatch):
    x = jnp.array([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
    logits, prior = jnp.array([0.3, -1.2]), jnp.array([-0.4, 0.5])
    coins = dist.Bernoulli(logits=logits).to_event(1), dist.Bernoulli(logits=prior).to_event(1)
    z = jnp.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    with jax.numpy_dtype_promotion("standard"):
        q, p = (c.log_prob(z) for c in coins)
    np.testing.assert_allclose(vae.divergence(logits, prior), jnp.sum(jnp.exp(q) * (q - p)), rtol=1e-5)

    def gradient(method):
        parameters = vae.start(jax.random.key(1), "linear", 4, 2, method)
        of = jax.grad(ap.expectation(vae.program(method), 2), argnums=1)
        return lambda key: [of(key, parameters, x)[name] for name in ("encoder", "decoder", "prior")]

    monkeypatch.setitem(vae.METHODS, "enumeration", lambda control, cost, x: ap.enumeration())
    exact = jax.tree.map(np.asarray, jax.jit(gradient("enumeration"))(jax.random.key(0)))
    each = [gradient(method) for method in ("learned baseline", "RLOO, 2", "DisARM", "REBAR", "RELAX, black box")]
    ap.testing.assert_unbiased(lambda key: [of(key) for of in each], [exact] * len(each), jax.random.key(2), 2_000)


def test_the_peers_gradients_are_exact_on_average():
    problem = peers.toy("quadratic, 6", 2)
    exact = peers.by_apgrad(problem, ap.enumeration())(jax.random.key(0), problem.parameters)
    with jax.numpy_dtype_promotion("standard"):
        for gradient in (peers.by_hand(problem, 1), peers.by_hand(problem, 3), peers.in_numpyro(problem)):
            estimate = lambda key, gradient=gradient: gradient(key, problem.parameters)
            ap.testing.assert_unbiased(estimate, exact, jax.random.key(1), 4_000)


def test_the_best_peer_and_ratios_with_intervals_are_reported():
    row = lambda v, n: {"variance": v, "standard_error": 0.1 * v, "evaluations": n, "seconds_ratio": 1.0}
    found = {name: row(8.0, 1) for name in peers.PEERS} | {"leave-one-out by hand, 2": row(2.0, 2)}
    found |= {"ap.disarm": row(1.0, 2), "ap.enumeration": row(0.0, 2)}
    made = peers.report(peers.Config(), [({"problem": "toy"}, found)])
    ratios = {r["method"]: (r["low"], r["over_best_peer"], r["high"]) for r in made.rows}
    assert ratios["leave-one-out by hand, 2"] == (1.0, 1.0, 1.0) and ratios["ap.enumeration"] == (0.0, 0.0, 0.0)
    wide = np.exp(1.96 * 0.1 * np.sqrt(2))
    np.testing.assert_allclose(ratios["ap.disarm"], (0.5 / wide, 0.5, 0.5 * wide))
    assert made.figures["toy"]["method"] == "ap.enumeration"


JUDGED = [("data", single.surrogate), ("chain", single.surrogate), ("chain in scan", single.program)]


@pytest.mark.parametrize("problem, make", JUDGED)
def test_gradients_are_judged_by_the_exact_one(problem, make):
    theta = single.THETA[problem.removesuffix(" in scan")]
    truth = np.asarray(jax.grad(single.exact(problem))(theta))
    found = ap.testing.moments(lambda key: make(problem, 64)(key, theta), jax.random.key(0), 500)
    assert single.verdict(found, truth) == "right" and single.verdict(found, np.asarray(theta)).startswith("wrong")
    always_zero = ap.testing.Moments(np.zeros(2), np.zeros(2), np.zeros(2), 500)
    assert single.verdict(always_zero, np.zeros(2)) == "right"
