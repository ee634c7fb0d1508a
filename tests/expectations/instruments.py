"""What tests of programs share: an estimator that shows the messages of its node, and checks."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

import apgrad as ap
from tests.refusals import refused

KEY = jax.random.key(0)


def fixed(*weights):
    """Weights that are always these."""
    return ap.weights.Weights(ap.weights.Weighting(lambda gradients, suffix: jnp.array(weights, gradients.dtype)))


def probe(baseline=None):
    """An estimator whose "score" is the parameter: the gradient with respect to a lane's is what its node received."""
    score = lambda d, x: ap.zero_with_gradient(d.loc)
    return ap.Estimator("probe", score=score, baseline=baseline, every_order=True)


def visit(tape, parameter, baseline=None, **options):
    return ap.sample(tape, dist.Normal(parameter, 1.0), probe(baseline), **options)[0]


def assert_gradient(program, theta, truth, lanes, estimates, **options):
    """The gradient of the program's expectation is unbiased."""
    ap.testing.assert_unbiased(lambda key: ap.grad(program, lanes, **options)(key, theta), truth, KEY, estimates)


def traced(program, *args, lanes=4, **options):
    """The shapes of the program's expectation."""
    return jax.eval_shape(ap.expectation(program, lanes, **options), KEY, *args)


def refused_program(words, program, *args, error=ValueError, **options):
    """The program is refused in such words when its expectation is traced."""
    return refused(error, words, traced, program, *args, **options)
