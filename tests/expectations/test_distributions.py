"""Every distribution of NumPyro has the right pathwise derivative and the right score, or is refused."""

import functools
import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax import lax
from jax.scipy import special
from jax.scipy.special import i0e, i1e
from numpyro.distributions import constraints, transforms as to

from apgrad.expectations import _distributions as distributions
from tests.expectations.instruments import KEY
from tests.refusals import refused

SAMPLES = 4000
THETA = 0.7
sigmoid = jax.nn.sigmoid
EYE = np.eye(2, dtype=np.float32)
ONES = np.ones(2, np.float32)
REFUSED = "needs a pathwise derivative, and|bounds of the support|not the density of its samples"


def weighted(x):
    """A linear cost, different in each element."""
    x = x.reshape(-1)
    return jnp.sum(x * jnp.linspace(1.0, 2.0, x.size, dtype=x.dtype))


square = lambda x: weighted(x**2)
squares = lambda x: jnp.sum(x**2)


def integrate(function, low, high, n=20_000):
    x = low + (high - low) * (jnp.arange(n) + 0.5) / n
    return jnp.sum(function(x)) * (high - low) / n


def expected(density, low, high, cost=lambda x: x):
    """The expectation of a cost under a density that is not normalized, to be computed when it is called."""
    return lambda: integrate(lambda x: cost(x) * density(x), low, high) / integrate(density, low, high)


categorical = lambda logits: jnp.sum(jax.nn.softmax(logits) * jnp.arange(len(logits)))
normal_above_0 = lambda t: t + jnp.exp(-(t**2) / 2) / jnp.sqrt(2 * jnp.pi) / jax.scipy.stats.norm.cdf(t)
folded_normal = lambda t: jnp.sqrt(2 / jnp.pi) * jnp.exp(-(t**2) / 2) + t * special.erf(t / jnp.sqrt(2.0))
mean_direction = lambda t: jnp.sqrt(jnp.pi / 8) * t * (i0e(t**2 / 4) + i1e(t**2 / 4))
mean_sine = lambda t: jnp.sin(t) * RESULTANT
mean_of_sigmoids = lambda t: expected(lambda x: sigmoid(x) * sigmoid(-x), -30, 30, lambda x: sigmoid(x + t))
bell = lambda t: lambda x: jnp.exp(-((x - t) ** 2) / 2)
on_01 = lambda t: expected(bell(t), 0, 1)
first_sine = lambda x: jnp.sin(x[0])

SIGMOID, EXP, UNIT = to.SigmoidTransform(), to.ExpTransform(), dist.Exponential(1.0)
RESULTANT = float(i1e(1.0) / i0e(1.0))  # the mean of the cosine of a von Mises distribution of concentration 1

affine = lambda t: to.AffineTransform(0.0, t)
moved = lambda t: to.AffineTransform(t, 1.0)
normal = lambda t: dist.Normal(t, 1.0)
transformed = lambda base, *steps: dist.TransformedDistribution(base, list(steps))
composed = lambda *steps: to.ComposeTransform(list(steps))
inverse = lambda t: composed(to.IdentityTransform(), affine(1 / t)).inv
low_rank = lambda t: dist.LowRankMultivariateNormal(0 * ONES, t * ONES[:, None], ONES)
correlated = lambda t: dist.MultivariateNormal(0 * ONES, jnp.array([[0.0, 0.5], [0.5, 1.0]]) + t * jnp.diag(EYE[0]))
scaled = lambda base, t: transformed(base, affine(t))
pair = lambda base: base.expand([2]).to_event(1)
mixture = lambda *components: dist.MixtureGeneral(dist.Categorical(probs=jnp.array([0.3, 0.7])), [*components])
two_normals = lambda t: mixture(normal(t), normal(-2 * t))
between = lambda t, components: dist.MixtureSameFamily(dist.Categorical(logits=jnp.stack([t, 0 * t])), components)
path_from = lambda first: dist.EulerMaruyama(jnp.arange(3.0), lambda x, _: (jnp.zeros_like(x), 1.0), first)
inflated = functools.partial(dist.ZeroInflatedDistribution, dist.Poisson(2.0))
VON_MISES = dist.VonMises(np.zeros(1), 1.0).to_event(1)
gamma = lambda a, low, high: expected(lambda x: x ** (a - 1) * jnp.exp(-x), low, high)


class Case(NamedTuple):
    """A distribution, and the expectation of a cost of it."""

    distribution: Any
    exact: Any = None  # or a function that computes it; None: the cost of the distribution's own mean
    cost: Callable[[Any], Any] = weighted


def case_of(row, t):
    """A row of the tables makes of t a distribution, or further fields of a case too."""
    made = row(t)
    return Case(*made) if isinstance(made, tuple) else Case(made)


BOTH = {
    "AsymmetricLaplace": lambda t: dist.AsymmetricLaplace(1.0, 1.0, t),
    "AsymmetricLaplaceQuantile": lambda t: dist.AsymmetricLaplaceQuantile(1.0, 1.0, t),
    "Beta": lambda t: dist.Beta(t, 3.0),
    "BetaProportion": lambda t: dist.BetaProportion(t, 5.0),
    "CAR": lambda t: dist.CAR(t * jnp.ones(2), 0.5, 1.0, jnp.array([[0.0, 1.0], [1.0, 0.0]])),
    "Cauchy": lambda t: (dist.Cauchy(t, 1.0), jnp.sin(t) / jnp.e, jnp.sin),
    "Chi2": lambda t: dist.Chi2(5 * t),
    "CirculantNormal": lambda t: dist.CirculantNormal(t * jnp.ones(3), jnp.array([1.0, 0.2, 0.2])),
    "Dagum": lambda t: (dist.Dagum(1.0 + t, 6.0, 1.0), (1 + t) * jnp.exp(special.betaln(1 + t + 1 / 6, 1 - 1 / 6))),
    "Dirichlet": lambda t: dist.Dirichlet(jnp.stack([t, 1.0 + 0 * t])),
    "DoublyTruncatedPowerLaw": lambda t: (dist.DoublyTruncatedPowerLaw(t, 1.0, 3.0), expected(lambda x: x**t, 1, 3)),
    "ExpandedDistribution": lambda t: normal(t).expand([2]),
    "Exponential": lambda t: dist.Exponential(t),
    "FoldedDistribution": lambda t: (dist.FoldedDistribution(normal(t)), folded_normal(t)),
    "Gamma": lambda t: dist.Gamma(t, 1.0),
    "GaussianCopula": lambda t: (dist.GaussianCopula(normal(t * ONES), None, EYE), 3 * t),
    "GaussianRandomWalk": lambda t: (dist.GaussianRandomWalk(t, 2), 5 * t**2, square),
    "GaussianStateSpace": lambda t: (dist.GaussianStateSpace(2, 0 * EYE, scale_tril=t * EYE), 6 * t**2, square),
    "Gompertz": lambda t: (dist.Gompertz(t, 1.0), expected(lambda x: jnp.exp(x - t * jnp.expm1(x)), 0.0, 5.0)),
    "Gumbel": lambda t: dist.Gumbel(0.0, t),
    "HalfCauchy": lambda t: (dist.HalfCauchy(t), jnp.log(t), jnp.log),
    "HalfNormal": lambda t: dist.HalfNormal(t),
    "Independent": lambda t: dist.Normal(t * jnp.ones(2), 1.0).to_event(1),
    "InverseGamma": lambda t: dist.InverseGamma(t + 6, 1.0),
    "Kumaraswamy": lambda t: dist.Kumaraswamy(t, 2.0),
    "LKJ": lambda t: (dist.LKJ(2, t), 1 / (2 * t + 1), lambda x: x[1, 0] ** 2),
    "LKJCholesky": lambda t: (dist.LKJCholesky(2, t), 1 / (2 * t + 1), lambda x: x[1, 0] ** 2),
    "Laplace": lambda t: dist.Laplace(t, 1.0),
    "LeftTruncatedDistribution": lambda t: (dist.LeftTruncatedDistribution(normal(t), low=0.0), normal_above_0(t)),
    "LeftTruncatedGamma": lambda t: (dist.LeftTruncatedGamma(dist.Gamma(1 + t), low=1.0), gamma(1 + t, 1.0, 40.0)),
    "Levy": lambda t: (dist.Levy(0.0, t), jnp.exp(-jnp.sqrt(2 * t)), lambda x: jnp.exp(-x)),
    "LogNormal": lambda t: dist.LogNormal(t, 0.5),
    "Logistic": lambda t: dist.Logistic(t, 1.0),
    "LowRankMultivariateNormal": lambda t: (low_rank(t), 3 * (t**2 + 1), square),
    "LowerTruncatedPowerLaw": lambda t: (dist.LowerTruncatedPowerLaw(-5 - t, 1.0), (4 + t) / (3 + t)),
    "MatrixNormal": lambda t: (dist.MatrixNormal(jnp.zeros((2, 2)), t * EYE, EYE), 6 * t**2, square),
    "MixtureGeneral": lambda t: (two_normals(t), 0.3 * t - 1.4 * t),
    "MixtureSameFamily": lambda t: (between(t, dist.Normal(np.array([-1.0, 2.0]), 1.0)), 2 - 3 * sigmoid(t)),
    "MultivariateNormal": lambda t: (correlated(t), t + 2, square),
    "MultivariateStudentT": lambda t: (dist.MultivariateStudentT(9 + t, 0 * ONES, EYE), 3 * (9 + t) / (7 + t), square),
    "Normal": lambda t: (dist.Normal(0.0, t), t**2, square),
    "ProjectedNormal": lambda t: (dist.ProjectedNormal(jnp.stack([t, 0 * t])), mean_direction(t), lambda x: x[0]),
    "RelaxedBernoulliLogits": lambda t: (dist.RelaxedBernoulliLogits(1.0, t), mean_of_sigmoids(t)),
    "RightTruncatedDistribution": lambda t: (dist.RightTruncatedDistribution(normal(t)), -normal_above_0(-t)),
    "RightTruncatedGamma": lambda t: (dist.RightTruncatedGamma(dist.Gamma(1 + t), high=2.0), gamma(1 + t, 0, 2)),
    "SoftLaplace": lambda t: dist.SoftLaplace(t, 1.0),
    "StudentT": lambda t: (dist.StudentT(9.0 + t), (9 + t) / (7 + t), square),
    "TransformedDistribution": lambda t: (transformed(normal(t), SIGMOID), expected(bell(t), -9, 9, sigmoid)),
    "TwoSidedTruncatedDistribution": lambda t: (dist.TwoSidedTruncatedDistribution(normal(t), 0.0, 1.0), on_01(t)),
    "TwoSidedTruncatedGamma": lambda t: (dist.TwoSidedTruncatedGamma(dist.Gamma(1 + t), 1.0, 2.0), gamma(1 + t, 1, 2)),
    "Weibull": lambda t: dist.Weibull(1.0, 1 + t),
    "ZeroSumNormal": lambda t: (dist.ZeroSumNormal(t, (3,)), 3 * t**2, square),
    "exponential of a half-line": lambda t: (transformed(UNIT, affine(t), EXP, affine(1.0)), t, jnp.log),
    "power of a half-line": lambda t: (transformed(UNIT, to.PowerTransform(t)), jnp.exp(special.gammaln(1 + t))),
    "scaled half-line": lambda t: (transformed(UNIT, affine(t)), t),
    "logit of an interval, moved": lambda t: (transformed(dist.Beta(2.0, 2.0), SIGMOID.inv, moved(t)), t),
}
SCORE = {
    "BernoulliLogits": lambda t: dist.Bernoulli(logits=t),
    "BernoulliProbs": lambda t: dist.Bernoulli(probs=t),
    "BetaBinomial": lambda t: dist.BetaBinomial(t, 3.0, 10),
    "BetaNegativeBinomial": lambda t: dist.BetaNegativeBinomial(t + 6, 3.0, 5.0),
    "BinomialLogits": lambda t: dist.Binomial(10, logits=t),
    "BinomialProbs": lambda t: dist.Binomial(10, probs=t),
    "CategoricalLogits": lambda t: (dist.Categorical(logits=t * jnp.arange(3.0)), categorical(t * jnp.arange(3.0))),
    "CategoricalProbs": lambda t: (dist.Categorical(probs=jnp.stack([1 - t, t])), t),
    "DirichletMultinomial": lambda t: dist.DirichletMultinomial(jnp.stack([t, 1.0 + 0 * t]), 10),
    "DiscreteUniform": lambda t: (dist.DiscreteUniform(0, 5), 0 * t),
    "EulerMaruyama": lambda t: (path_from(normal(t)), t * 4.5),
    "GammaPoisson": lambda t: dist.GammaPoisson(t, 1.0),
    "GaussianCopulaBeta": lambda t: (dist.GaussianCopulaBeta(t * ONES, 3 * ONES, None, EYE), 3 * t / (t + 3)),
    "GeometricLogits": lambda t: dist.Geometric(logits=t),
    "GeometricProbs": lambda t: dist.Geometric(probs=t),
    "HurdleGamma": lambda t: (dist.HurdleGamma(t, 2.0, 1.0), 2 * (1 - t)),
    "HurdleLogNormal": lambda t: (dist.HurdleLogNormal(0.5, t, 0.5), jnp.exp(t + 0.125) / 2),
    "HurdleLogits": lambda t: (dist.HurdleLogits(dist.Gamma(2.0, 1.0), gate_logits=t), 2 * sigmoid(-t)),
    "HurdlePoisson": lambda t: (dist.HurdlePoisson(t, 2.0), (1 - t) * 2 / -jnp.expm1(jnp.asarray(-2.0))),
    "HurdleProbs": lambda t: (dist.HurdleProbs(dist.Gamma(2.0, 1.0), t), 2 * (1 - t)),
    "InverseWishart": lambda t: (dist.InverseWishart(9.0, scale_tril=t * EYE), 3 * t**2 / 6),
    "InverseWishartCholesky": lambda t: (dist.InverseWishartCholesky(9.0, scale_tril=t * EYE), t**2 / 3, squares),
    "MultinomialLogits": lambda t: dist.Multinomial(5, logits=jnp.stack([t, 0 * t])),
    "MultinomialProbs": lambda t: dist.Multinomial(5, probs=jnp.stack([t, 1 - t])),
    "NegativeBinomial2": lambda t: dist.NegativeBinomial2(t, 2.0),
    "NegativeBinomialLogits": lambda t: dist.NegativeBinomialLogits(5.0, t),
    "NegativeBinomialProbs": lambda t: dist.NegativeBinomialProbs(5.0, t),
    "OrderedLogistic": lambda t: (dist.OrderedLogistic(t, np.array([-0.5, 1.0])), sigmoid(t + 0.5) + sigmoid(t - 1)),
    "SineBivariateVonMises": lambda t: (dist.SineBivariateVonMises(t, 0.0, 1.0, 1.0, 0.0), mean_sine(t), first_sine),
    "SineSkewed": lambda t: (dist.SineSkewed(VON_MISES, t[None]), t * RESULTANT, first_sine),
    "TruncatedPolyaGamma": lambda t: (dist.TruncatedPolyaGamma(), 0 * t),
    "VonMises": lambda t: (dist.VonMises(t, 1.0), mean_sine(t), jnp.sin),
    "Wishart": lambda t: (dist.Wishart(5.0, scale_tril=t * EYE), 15 * t**2),
    "WishartCholesky": lambda t: (dist.WishartCholesky(5.0, scale_tril=t * EYE), 10 * t**2, squares),
    "ZeroInflatedLogits": lambda t: (inflated(gate_logits=t), 2 * sigmoid(-t)),
    "ZeroInflatedPoisson": lambda t: (dist.ZeroInflatedPoisson(t, 2.0), 2 * (1 - t)),
    "ZeroInflatedProbs": lambda t: (inflated(gate=t), 2 * (1 - t)),
    "Poisson": lambda t: dist.Poisson(t),
    "transformed Poisson": lambda t: (scaled(dist.Poisson(t), 2.0), 2 * t),
    "twice transformed Poisson": lambda t: (transformed(pair(scaled(dist.Poisson(t), 2.0)), affine(3.0)), 18 * t),
    "transformed hurdle": lambda t: (scaled(dist.HurdleGamma(t, 2.0, 1.0), 2.0), 4 * (1 - t)),
    "folded mixture": lambda t: (dist.FoldedDistribution(two_normals(t)), 1 + 0.3 * t**2 + 2.8 * t**2, square),
}
PATH = {
    "Delta": lambda t: (dist.Delta(t), t**2, square),
    "LogUniform": lambda t: (dist.LogUniform(1.0, 2 + t), (1 + t) / jnp.log(2 + t)),
    "MaskedDistribution": lambda t: normal(t).mask(False),
    "Pareto": lambda t: dist.Pareto(t, 5.0),
    "Uniform": lambda t: dist.Uniform(0.0, t),
    "masked event": lambda t: (dist.Normal(t * jnp.ones(2), 1.0).mask(np.array([True, False])).to_event(1), 3 * t),
    "absolute value": lambda t: (transformed(normal(t), to.AbsTransform()), folded_normal(t)),
    "scaled interval within": lambda t: (transformed(dist.Normal(), composed(SIGMOID, affine(t)), EXP), t / 2, jnp.log),
    "inverse of a composition": lambda t: (transformed(dist.Normal(), SIGMOID, inverse(t)), t / 2),
    "expanded and scaled interval": lambda t: (scaled(pair(transformed(dist.Normal(), SIGMOID)), t), 1.5 * t),
    "power of an interval": lambda t: (transformed(dist.Beta(2.0, 1.0), to.PowerTransform(t)), 2 / (2 + t)),
    "exponential of a moving interval": lambda t: (transformed(dist.Uniform(0.0, t), EXP), jnp.expm1(t) / t),
    "scaled interval": lambda t: (transformed(dist.Uniform(0.0, 1.0), affine(t)), t / 2),
    "event of moving intervals": lambda t: dist.Uniform(jnp.zeros(2), t).to_event(1),
    "shifted log-normal": lambda t: (transformed(dist.Normal(), EXP, moved(t)), t),
    "shifted half-line": lambda t: (transformed(UNIT, moved(t)), t + 1),
    "point with a density": lambda t: (dist.Delta(jnp.ones(()), t), 0 * t),
}
NEITHER = {
    "IntervalCensoredDistribution": lambda t: dist.IntervalCensoredDistribution(normal(t), *jnp.zeros(2)),
    "LeftCensoredDistribution": lambda t: dist.LeftCensoredDistribution(normal(t), True),
    "RightCensoredDistribution": lambda t: dist.RightCensoredDistribution(normal(t), True),
    "Unit": lambda t: dist.Unit(t),
    "masked transformed Poisson": lambda t: scaled(dist.Poisson(t), 2.0).mask(False),
    "mixture of scaled Poissons": lambda t: mixture(scaled(dist.Poisson(t), 2.0), scaled(dist.Poisson(2 * t), 1.0)),
    "scaled Poisson": lambda t: scaled(dist.Poisson(2.0), t),
    "mixture with a gap": lambda t: between(t, transformed(dist.Uniform().expand([2]), moved(np.array([0.0, 5.0])))),
}
RIGHT = {"LR RP": BOTH, "LR": SCORE, "RP": PATH, "": NEITHER}  # which estimators are right; the others are refused
CASES = {name: case for cases in RIGHT.values() for name, case in cases.items()}


@pytest.mark.optimized  # which multiplies and adds in one rounding
def test_the_density_of_logits_is_that_of_the_samples(x64):
    # At logits of 0, where NumPyro's score of x is x for x - n / 2, and at infinite ones, where it is inf * 0.
    logits, x = np.array([-np.inf, -30.0, -1.0, 0.0, 0.5, np.inf]), np.arange(4.0)[:, None]
    p = scipy.special.expit(logits)

    def derivatives(function):
        along = lambda f: lambda u: jax.jvp(f, (u,), (jnp.ones_like(u),))[1]
        return jax.jit(lambda u: (jnp.exp(function(u)), along(function)(u), along(along(function))(u)))(logits)

    for n, make in ((1, dist.Bernoulli), (3, functools.partial(dist.Binomial, 3))):
        density, score, second = derivatives(lambda u, make=make: distributions.log_prob(make(logits=u), x))
        finite = (x <= n) & np.isfinite(logits)
        np.testing.assert_allclose(density[: n + 1], scipy.stats.binom.pmf(x[: n + 1], n, p), rtol=1e-12)
        np.testing.assert_allclose(score[finite], (x - n * p)[finite], rtol=1e-12)
        np.testing.assert_allclose(second[finite], np.broadcast_to(-n * p * (1 - p), (4, 6))[finite], rtol=1e-9)
        assert np.isfinite([score, second]).all()


def test_the_log_density_of_logits_takes_no_more_equations_than_numpyros():
    count = lambda of: str(jax.make_jaxpr(jax.grad(lambda u: of(dist.Bernoulli(logits=u), 1)))(0.0)).count("=")
    with jax.numpy_dtype_promotion("standard"):
        assert count(distributions.log_prob) <= count(lambda coin, x: coin.log_prob(x))


@pytest.mark.optimized
def test_a_constant_in_all_logits_changes_nothing():
    logits, counts = jnp.array([0.0, 1.0, -2.0]), jnp.array([1.0, 2.0, 0.0])
    for make, x in ((dist.Categorical, 1), (functools.partial(dist.Multinomial, total_count=3), counts)):
        function = lambda u, make=make, x=x: distributions.log_prob(make(logits=u), x)
        both = jax.jit(jax.vmap(jax.value_and_grad(function)))(jnp.array([[0.0], [-1e6]]) + logits)
        for plain, shifted in both:
            np.testing.assert_allclose(shifted, plain, rtol=1e-5, atol=1e-7)


MIXED, CHOSEN = 0.7 * np.exp(-0.5), [0, 1, 2]
stack = lambda *x: jnp.stack(jnp.broadcast_arrays(*map(jnp.asarray, x)))
no_first = lambda t: dist.Multinomial(3, logits=stack(t - jnp.inf, t, 1.0))
AT_ZERO = {
    "Poisson": (dist.Poisson, 0, lambda t: -t),
    "event": (lambda t: dist.Poisson(t * jnp.ones(2)).to_event(1), [0, 0], lambda t: -2 * t),
    "moved": (lambda t: transformed(dist.Poisson(t), moved(1.0)), 1.0, lambda t: -t),
    "zero-inflated": (lambda t: dist.ZeroInflatedPoisson(0.3, t), 0, lambda t: jnp.log(0.3 + 0.7 * jnp.exp(-t))),
    "gate": (lambda t: dist.ZeroInflatedLogits(dist.Poisson(t), 0.0), 0, lambda t: jnp.log((1 + jnp.exp(-t)) / 2)),
    "mixture": (lambda t: mixture(dist.Poisson(t), dist.Poisson(0.5)), 0, lambda t: jnp.log(0.3 * jnp.exp(-t) + MIXED)),
    "negative binomial": (lambda t: dist.NegativeBinomialProbs(3, t), 0, lambda t: 3 * jnp.log1p(-t)),
    "multinomial": (lambda t: dist.Multinomial(3, stack(t, 0.4, 0.6)), CHOSEN, lambda t: jnp.log(0.432 / (1 + t) ** 3)),
    "infinite logit": (no_first, CHOSEN, lambda t: jnp.log(3.0) + t + 2 - 3 * jnp.logaddexp(t, 1.0)),
    "above 0": (dist.Poisson, 2, lambda t: jnp.log((t + 0.5) ** 2 / 2) - (t + 0.5)),
}


def test_the_score_of_a_count_of_0_is_right_where_no_other_count_is_possible(x64):
    # The derivative of x log p at x = 0 and p = 0 is 0, and JAX's is 0 / 0.
    orders = lambda f, t: (f(t), jax.grad(f)(t), jax.grad(jax.grad(f))(t))

    def both(name, t):
        make, x, exact = AT_ZERO[name]
        x, start = jnp.asarray(x), 0.5 if name == "above 0" else 0
        return orders(lambda t: distributions.log_prob(make(t + start), x), t), orders(exact, t)

    for name, (found, wanted) in jax.jit(lambda t: {case: both(case, t) for case in AT_ZERO})(0.0).items():
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-14, err_msg=name)


def test_a_gate_that_is_open_or_shut_has_a_finite_score():
    cases = [(dist.ZeroInflatedPoisson, 1.0, 0, 0.0), (dist.ZeroInflatedPoisson, 0.0, 0, np.expm1(2.0))]
    cases += [(dist.HurdlePoisson, 1.0, 0, 0.0), (dist.HurdlePoisson, 0.0, 3, 0.0)]
    of = lambda make, x: jax.grad(lambda gate: distributions.log_prob(make(gate, 2.0), jnp.asarray(x)))
    found = jax.jit(lambda: [of(make, x)(gate) for make, gate, x, _ in cases])()
    np.testing.assert_allclose(found, [case[-1] for case in cases], rtol=1e-5)


def test_a_value_that_a_gate_shuts_out_has_no_density():
    def densities(gate):
        open_, shut = dist.ZeroInflatedPoisson(gate, 2.0), dist.HurdlePoisson(1 - gate, 2.0)
        cases = (open_, 3), (open_, 0), (shut, 0), (shut, 3), (pair(open_), [0, 3]), (dist.HurdlePoisson(1, 2.0), 0)
        return jnp.stack([distributions.log_prob(d, jnp.asarray(x)) for d, x in cases])

    found, slopes = jax.jit(lambda gate: (densities(gate), jax.jacfwd(densities)(gate)))(1.0)
    above_0 = scipy.stats.poisson(2).logpmf(3) - np.log(-np.expm1(-2))
    np.testing.assert_allclose(found, [-np.inf, 0, -np.inf, above_0, -np.inf, 0], rtol=1e-5)
    assert np.isfinite(slopes).all()


def test_the_refusal_of_a_scale_around_a_kink_says_where_to_write_it():
    around = lambda scale: transformed(dist.Laplace(), affine(scale))
    within = lambda scale: dist.Laplace(0.0, scale)
    second = lambda make: jax.grad(jax.grad(lambda s: distributions.score("LR", make(jnp.exp(s)), jnp.float32(2.0))))
    refused(TypeError, r"a scale as the distribution's own, as in Laplace\(0\.0, scale\)", second(around), 0.0)
    np.testing.assert_allclose(jax.jit(second(within))(0.0), -2.0, rtol=1e-6)  # of -s - exp(-s) |x|


@pytest.mark.parametrize("fold", [to.AbsTransform(), to.L1BallTransform()], ids=lambda fold: type(fold).__name__)
def test_a_sampler_with_a_kink_has_no_second_derivative(fold):
    path = lambda t: jnp.sum(distributions.pathwise_sample("RP", transformed(pair(normal(t)), fold), KEY))
    assert np.isfinite(jax.jit(jax.grad(path))(0.3))
    refused(TypeError, f"{type(fold).__name__} bends", jax.eval_shape, jax.grad(jax.grad(path)), 0.3)


MENDED = [
    (dist.BernoulliLogits, "logits", {}),
    (dist.BinomialLogits, "logits", {"total_count": 3}),
    (dist.Beta, "concentration1", {"concentration0": 1.0}),
    (dist.Dirichlet, "concentration", {}),
    (dist.CategoricalProbs, "probs", {}),
    (dist.CategoricalLogits, "logits", {}),
    (dist.MultinomialProbs, "probs", {"total_count": 3}),
    (dist.MultinomialLogits, "logits", {"total_count": 3}),
    (dist.ZeroInflatedProbs, "gate", {"base_dist": dist.Poisson(2.0)}),
    (dist.HurdleProbs, "gate", {"base_dist": dist.Poisson(2.0)}),
    (dist.Poisson, "rate", {}),
    (dist.NegativeBinomialProbs, "probs", {"total_count": 3}),
]


class Doubled(dist.Distribution):
    """A user's, whose density takes a parameter of the distribution inside."""

    pytree_data_fields, pytree_aux_fields = ("base_dist",), ("name",)

    def __init__(self, base_dist, name):
        self.base_dist, self.name = base_dist, name
        super().__init__(base_dist.batch_shape)

    def log_prob(self, value):
        return 2 * self.base_dist.log_prob(value) + getattr(self.base_dist, self.name)


def test_a_users_density_is_taken_as_it_is_also_where_that_of_numpyro_is_mended():
    def made(p):
        # Not the density of a law, so that any mend of NumPyro's shows.
        summed = lambda base, name: type("Own", (base,), {"log_prob": lambda self, value: jnp.sum(getattr(self, name))})
        own = [summed(base, name)(**{name: p[0] if name == "gate" else p}, **given) for base, name, given in MENDED]
        return [*own, Doubled(dist.Poisson(p[0]), "rate"), Doubled(dist.BernoulliLogits(p[0]), "logits")]

    def values(p, log_prob):
        return jnp.stack([jnp.sum(log_prob(d, jnp.float32(0))) for d in made(p)])

    ours, theirs = lambda d, x: distributions.log_prob(d, x, own=True), lambda d, x: d.log_prob(x)
    with jax.numpy_dtype_promotion("standard"):  # NumPyro's promotes
        both = jax.jit(lambda p: [(values(p, of), jax.jacrev(values)(p, of)) for of in (ours, theirs)])
        for found, wanted in zip(*both(jnp.array([0.3, 0.6])), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    log_prob = jax.custom_vjp(lambda rate, x: jnp.log(rate) - rate * x)  # which has no forward mode
    log_prob.defvjp(lambda rate, x: (log_prob(rate, x), 1 / rate - x), lambda slope, m: (m * slope, None))
    one = type("Own", (dist.Exponential,), {"log_prob": lambda self, value: log_prob(self.rate, value)})
    assert jax.grad(lambda rate: distributions.score("LR", one(rate), jnp.float32(0.5)))(0.5) == 1.5


class Sum(dist.Distribution):
    """A user's: the sum of a number and of one of another distribution, under a name that only its pytree knows."""

    pytree_data_fields = ("first", "number")

    def __init__(self, first, number):
        self.first, self.number = first, number
        super().__init__(first.batch_shape)

    def sample(self, key, sample_shape=()):
        return self.first.sample(key, sample_shape) + self.number

    def log_prob(self, value):
        return self.first.log_prob(value - self.number)


def test_what_a_distribution_holds_under_any_name_has_no_score_where_it_has_none_alone():
    def score(t, make):
        d = make(t)
        return jnp.sum(distributions.guarded("LR", d, distributions.score("LR", d, lax.stop_gradient(d.sample(KEY)))))

    def without_score(make):
        refused(TypeError, REFUSED, jax.eval_shape, jax.grad(functools.partial(score, make=make)), THETA)

    without_score(lambda t: path_from(dist.Uniform(0.0, t)))
    without_score(lambda t: pair(path_from(dist.Uniform(0.0, t))))
    without_score(lambda t: path_from(normal(t).mask(False)))
    without_score(lambda t: Sum(dist.Uniform(0.0, t), 1.0))
    without_score(lambda t: Sum(normal(t).mask(False), 1.0))
    moved_path = lambda t: transformed(path_from(dist.Laplace()), to.IndependentTransform(moved(t), 1))
    second = jax.grad(jax.grad(functools.partial(score, make=moved_path)))
    refused(TypeError, "has a kink at its location", jax.eval_shape, second, THETA)


def _at_100(scale):
    """Distributions of such a scale at 100, of 4 lanes."""
    far, one, event = 100 * jnp.ones(4), dist.Normal(jnp.zeros(4), 1.0), 100 * jnp.ones((4, 2))
    move, tril = to.AffineTransform(far, scale), scale * jnp.array([[1.0, 0.0], [1.0, 0.5]])
    half = dist.Categorical(probs=jnp.full((4, 2), 0.5))
    both = jnp.stack([far, 0 * far], axis=-1)
    tied = jnp.array([[1.0, 0.0], [1.0, 1.0]]) * jnp.stack([jnp.float32(1), scale])
    same = jax.custom_vjp(lambda x: 0 * x)  # which has no forward mode
    same.defvjp(lambda x: (0 * x, None), lambda _, m: (0 * m,))
    drift = lambda x, _: (same(x), scale * jnp.ones_like(x))
    return {
        "multivariate": dist.MultivariateNormal(event, scale_tril=tril),
        "Student": dist.MultivariateStudentT(5.0, event, tril),
        "low rank": dist.LowRankMultivariateNormal(event, scale * event[..., None] / 100, scale**2 * event / 100),
        "truncated": dist.TruncatedNormal(far, scale, low=0.0),
        "moved": transformed(one, to.AffineTransform(0.0, 2.0), move),
        "moved mixture": transformed(dist.MixtureGeneral(half, [one, dist.Normal(one.loc, 2.0)]), move),
        "by a matrix": transformed(pair(normal(0.0)).expand([4]), to.LowerCholeskyAffine(event, tril)),
        "of the logarithm": dist.LogNormal(jnp.log(far), scale / 100),
        "skewed": dist.AsymmetricLaplace(far, scale, 1.2),
        "of matrices": dist.MatrixNormal(100 * jnp.ones((4, 2, 2)), scale * EYE, EYE),
        "a path": dist.EulerMaruyama(jnp.arange(2.0), lambda x, _: (0 * x, scale), dist.Normal(far[:2], 1.0)),
        "paths": dist.EulerMaruyama(jnp.arange(3.0), drift, dist.Normal(far[:1], 1.0).to_event(1)),
        "of equal rows": dist.MatrixNormal(100 * jnp.ones((4, 2, 2)), tied, EYE),
        "by a precision": dist.CAR(event, 0.5, scale**-2, 1 - EYE),
        "of gammas": dist.Gamma((far / scale) ** 2, far / scale**2),
        "a walk": transformed(dist.GaussianRandomWalk(scale * one.scale, 2), to.AffineTransform(100.0, 1.0)),
        "mixture": dist.MixtureSameFamily(half, dist.Normal(both, scale)),
        "mixture with a wide one": dist.MixtureGeneral(half, [dist.Normal(far, scale), dist.Normal(far, 9.0)]),
    }


def test_a_sample_that_is_rounded_more_coarsely_than_its_scale_has_no_score():
    def lost(scale):
        made = _at_100(scale)
        # A component of a mixture rounds the samples near it, and those of the wide one are not.
        spike = dist.Normal(jnp.stack([jnp.zeros(4), 100 * jnp.ones(4)], axis=-1), jnp.stack([scale, 9.0]))
        made |= {"fine: mixture": dist.MixtureSameFamily(dist.Categorical(probs=jnp.full((4, 2), 0.5)), spike)}
        score = lambda d: distributions.score("LR", d, jnp.full(d.shape(), 100.0))
        return {name: jnp.any(jnp.isnan(score(d))) for name, d in made.items()}

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        coarse, fine = (jax.jit(lost)(jnp.float32(scale)) for scale in (2e-6, 1e-2))
    assert {name for name, found in coarse.items() if not found} == {"fine: mixture"}
    assert not any(fine.values()), fine
    simplex, eye = to.StickBreakingTransform(), jnp.eye(2)  # of this sample all but 3e-7 is in the first share
    stick = lambda at: transformed(dist.MultivariateNormal(at * jnp.ones(2), eye), simplex)
    left = [distributions.score("LR", stick(at), simplex(at * jnp.ones(2))) for at in (jnp.float32(8), jnp.float32(0))]
    assert np.isnan(left).tolist() == [True, False]


class Counts(dist.Distribution):
    """Declares no parameters, so that NumPyro's `has_rsample` is true."""

    def __init__(self, rate, support, dtype):
        self.rate, self.told, self.dtype = rate, support, dtype
        super().__init__()

    support = property(lambda self: self.told)

    def sample(self, key, sample_shape=()):
        return jax.random.poisson(key, self.rate, sample_shape).astype(self.dtype)

    def log_prob(self, value):
        return dist.Poisson(self.rate).log_prob(value)


WRAPS = [lambda d: d, lambda d: transformed(d, affine(2.0)), lambda d: d.expand([2]).to_event(1)]
COUNTS = [
    (constraints.nonnegative_integer, jnp.float32, "samples of Counts are discrete"),
    (None, jnp.int32, "samples of Counts are discrete"),
    (None, jnp.float32, "Counts declares no parameters"),
]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("support, dtype, words", COUNTS)
def test_a_claim_that_says_nothing_is_no_pathwise_derivative(support, dtype, words, wrap):
    assert Counts(1.0, support, dtype).has_rsample
    refused(TypeError, words, distributions.pathwise_sample, "RP", wrap(Counts(1.0, support, dtype)), KEY)


def test_the_sweep_has_every_distribution_of_numpyro():
    exported = {name for name, value in vars(dist).items() if inspect.isclass(value)}
    wanted = {name for name in exported if issubclass(getattr(dist, name), dist.Distribution)}
    unsaid = wanted - {"Distribution", "ImproperUniform"} - set(CASES)  # which cannot be sampled
    assert not unsaid, "say which estimators are right for these, and with what expectation"


def derivatives(cases):
    """For each case and each estimator that is not refused, samples of the derivative of the expected cost."""

    def or_refused(function):
        try:
            return function()
        except TypeError as error:
            assert re.search(REFUSED, str(error)), error
            return None

    def one(case, t, key):
        make, cost = lambda t: case_of(case, t).distribution, case_of(case, t).cost
        derivative = lambda function: jax.jvp(function, (t,), (jnp.ones_like(t),))

        score = lambda t: jnp.sum(distributions.guarded("LR", make(t), distributions.score("LR", make(t), x)))
        path = or_refused(lambda: derivative(lambda t: distributions.pathwise_sample("RP", make(t), key)))
        x = distributions.sample(make(t), key) if path is None else path[0]
        to_cost = None if path is None else jax.jvp(cost, *((x,) for x in path))[1]
        return cost(x.astype(jnp.float32)), or_refused(lambda: derivative(score)[1]), to_cost

    def all_of_them(t, keys):
        each = {name: functools.partial(one, case) for name, case in cases.items()}
        return {name: jax.vmap(function, (None, 0))(t, keys) for name, function in each.items()}

    # Some of NumPyro's constructors need the standard promotion.
    with jax.numpy_dtype_promotion("standard"):
        found = jax.jit(all_of_them)(jnp.float32(THETA), jax.random.split(KEY, SAMPLES))
    for name, samples in found.items():
        costs, scores, paths = (None if x is None else np.asarray(x, np.float64) for x in samples)
        # The likelihood ratio with the mean of the other lanes as baseline.
        ratios = None if scores is None else (costs - costs.mean()) * SAMPLES / (SAMPLES - 1) * scores
        yield name, {kind: x for kind, x in {"LR": ratios, "RP": paths}.items() if x is not None}


def truths(cases):
    """The exact derivatives, in float64, of the cases for which an estimator is right."""

    def exact(case, t):
        distribution, expectation, cost = case_of(case, t)
        if callable(expectation):
            return expectation()
        return cost(distribution.mean) if expectation is None else expectation

    derivative = lambda case, t: jax.jvp(functools.partial(exact, case), (t,), (jnp.ones_like(t),))[1]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        known = {name: case for name, case in cases.items() if name not in NEITHER}
        return jax.jit(lambda t: {name: derivative(case, t) for name, case in known.items()})(jnp.float64(THETA))


# Each group is one compiled program.
@pytest.mark.parametrize("group", [0, *(pytest.param(group, marks=pytest.mark.long) for group in range(1, 12))])
def test_every_distribution_is_right_or_refused(group):
    names = list(CASES)[group::12]
    if importlib.util.find_spec("tensorflow_probability") is None:  # NumPyro draws it with TensorFlow Probability
        names = [name for name in names if name != "GaussianCopulaBeta"]
    cases = {name: CASES[name] for name in names}
    exact = truths(cases)
    for name, found in derivatives(cases):
        assert name in RIGHT[" ".join(found)], name
        for kind, samples in found.items():
            truth, error = float(exact[name]), samples.std() / np.sqrt(SAMPLES)
            assert abs(samples.mean() - truth) <= 4 * error + 1e-5 * abs(truth), (name, kind, samples.mean(), truth)


def test_the_density_of_a_sample_in_half_precision_is_in_float32():
    density = distributions.log_prob(dist.Normal(0.0, 1.0), jnp.bfloat16(20.0))  # parameters of no dtype
    np.testing.assert_allclose(density, scipy.stats.norm.logpdf(20.0), rtol=1e-6)
    assert density.dtype == jnp.float32


def test_a_mixture_moves_as_its_weights_divided_by_their_sum_say():
    """dx = - dF / f for the distribution function F and density f, also where a weight is 0."""
    weights, locations, cdf = jnp.array([0.0, 0.6, 1.4]), jnp.array([0.0, 1.0, 2.0]), jax.scipy.stats.norm.cdf
    at = lambda w, m: dist.MixtureSameFamily(dist.Categorical(probs=w), dist.Normal(m, 1.0))
    sample = lambda w, m, key: distributions.pathwise_sample("a sample", at(w, m), key)
    keys, total = jax.random.split(KEY, 20), jnp.sum(weights)
    x, slopes = jax.jit(jax.vmap(jax.value_and_grad(sample, (0, 1)), (None, None, 0)))(weights, locations, keys)
    each = dist.Normal(locations, 1.0).log_prob(x[:, None])
    of_component, density = cdf(x[:, None] - locations), jnp.exp(each) @ weights
    expected = (of_component @ weights / total)[:, None] - of_component, weights * jnp.exp(each)
    for found, exact in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(found, exact / density[:, None], rtol=1e-3, atol=1e-4)


def test_the_log_density_of_a_mixture_has_all_derivatives_with_respect_to_weights_of_0():
    weights, x = jnp.array([0.0, 0.6, 1.4]), jnp.array([-1.0, 0.3, 4.0])
    locations = jnp.array([0.0, 1.0, 2.0])

    def exact(weights):
        each = jnp.exp(dist.Normal(locations, 1.0).log_prob(x[:, None]))
        return jnp.log(each @ (weights / jnp.sum(weights)))

    several = [dist.Normal(location, 1.0) for location in locations]
    mixtures = (dist.MixtureSameFamily, dist.Normal(locations, 1.0)), (dist.MixtureGeneral, several)
    of = lambda kind, parts: lambda w: distributions.log_prob(kind(dist.Categorical(probs=w), parts), x)
    orders = lambda f, w: [f(w), jax.jacfwd(f)(w), jax.hessian(f)(w)]
    functions = exact, *(of(*mixture) for mixture in mixtures)
    wanted, *found = jax.jit(lambda w: [orders(f, w) for f in functions])(weights)
    for each in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), each, wanted)


def test_a_mixture_in_half_precision_has_its_pathwise_derivative():
    """A sample moves with both locations. (JAX's distribution functions take no bfloat16.)"""
    ends, even = jnp.array([-1, 1], jnp.bfloat16), dist.Categorical(logits=jnp.zeros(2, jnp.bfloat16))
    make = lambda t: dist.MixtureSameFamily(even, dist.Normal(t + ends, jnp.bfloat16(1)))
    moved = jax.jit(jax.grad(lambda t: distributions.pathwise_sample("a sample", make(t), KEY)))(jnp.bfloat16(0))
    assert moved.dtype == jnp.bfloat16 and abs(moved - 1) < 0.02
