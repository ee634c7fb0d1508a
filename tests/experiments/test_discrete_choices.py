"""The exact variances of the benchmark of discrete choices, and the estimators' own."""

import jax
import numpy as np
import pytest

from experiments.benchmarks import discrete_choices as bench

# One choice with the cost (b - .499)^2, with respect to the logit.
KNOWN = {
    0.5: {"rloo, 2": 2.5e-7, "reinforce": 1.5625e-2, "disarm": 0.0},
    0.1: {"rloo, 2": 1.476e-7, "reinforce": 5.66e-3, "disarm": 1.296e-7},
}


@pytest.mark.parametrize("theta", KNOWN)
def test_exact_variances_are_the_known_ones(theta):
    for method, wanted in KNOWN[theta].items():
        np.testing.assert_allclose(bench.exact_variance(method, (theta,)), wanted, rtol=2e-3, atol=1e-15)


@pytest.mark.parametrize("problem", ["toy, theta .5", "toy, theta .1", "quadratic, 6"])
def test_the_estimators_have_their_exact_variances(problem):
    logits = bench.logits_of(problem)
    methods = ("reinforce", "rloo, 2", "arm", "disarm")
    gradients = {method: jax.grad(bench.objective(method, 1), argnums=1) for method in methods}

    @jax.jit
    def estimates(keys):
        return jax.lax.map(lambda k: {m: g(k, logits, None) for m, g in gradients.items()}, keys, batch_size=500)

    for method, samples in estimates(jax.random.split(jax.random.key(0), 20_000)).items():
        samples = np.asarray(samples, np.float64)
        squares = np.sum((samples - samples.mean(axis=0)) ** 2, axis=1)
        exact = bench.exact_variance(method, bench.PROBLEMS[problem])
        # float32 adds the rounding of a cost of .25 to a difference of costs
        assert abs(squares.mean() - exact) < 4 * squares.std() / np.sqrt(len(squares)) + 1e-4 * exact + 1e-14, method
