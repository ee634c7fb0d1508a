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
from jax.scipy.special import i0e, i1e
from numpyro.distributions import constraints
from numpyro.distributions.transforms import (
    AbsTransform,
    AffineTransform,
    ComposeTransform,
    ExpTransform,
    IdentityTransform,
    PowerTransform,
    SigmoidTransform,
)

import apgrad as ap
from apgrad.expectations import _distributions as distributions

KEY = jax.random.key(0)
SAMPLES = 4000
THETA = 0.7
EYE = np.eye(2, dtype=np.float32)
REFUSED = "needs a pathwise derivative, and|bounds of the support|not the density of its samples"


def weighted(x):
    """A linear cost, different in each element."""
    x = x.reshape(-1)
    return jnp.sum(x * jnp.linspace(1.0, 2.0, x.size, dtype=x.dtype))


def square(x):
    return weighted(x**2)


def integrate(function, low, high, n=20_000):
    x = low + (high - low) * (jnp.arange(n) + 0.5) / n
    return jnp.sum(function(x)) * (high - low) / n


def expected(density, low, high, cost=lambda x: x):
    """The expectation of a cost under a density that is not normalized."""
    return integrate(lambda x: cost(x) * density(x), low, high) / integrate(density, low, high)


def categorical(logits):
    return jnp.sum(jax.nn.softmax(logits) * jnp.arange(len(logits)))


def normal_above_0(t):
    return t + jnp.exp(-(t**2) / 2) / jnp.sqrt(2 * jnp.pi) / jax.scipy.stats.norm.cdf(t)


def folded_normal(t):
    return jnp.sqrt(2 / jnp.pi) * jnp.exp(-(t**2) / 2) + t * jax.scipy.special.erf(t / jnp.sqrt(2.0))


def logistic(x):
    return jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)


def affine(t):
    return AffineTransform(0.0, t)


def transformed(base, *steps):
    return dist.TransformedDistribution(base, list(steps))


def exact_mixture(t):
    return 0.3 * t - 1.4 * t


def mixture(t, *components):
    return dist.MixtureGeneral(dist.Categorical(probs=jnp.array([0.3, 0.7])), [*components])


def gamma(a, low, high):
    return expected(lambda x: x ** (a - 1) * jnp.exp(-x), low, high)


class Case(NamedTuple):
    """A distribution of t, and an expectation of it."""

    make: Callable[[Any], Any]
    exact: Callable[[Any], Any] | None = None  # of the cost; None: the cost of the distribution's own mean
    cost: Callable[[Any], Any] = weighted


BOTH = {
    "AsymmetricLaplace": Case(lambda t: dist.AsymmetricLaplace(1.0, 1.0, t)),
    "AsymmetricLaplaceQuantile": Case(lambda t: dist.AsymmetricLaplaceQuantile(1.0, 1.0, t)),
    "Beta": Case(lambda t: dist.Beta(t, 3.0)),
    "BetaProportion": Case(lambda t: dist.BetaProportion(t, 5.0)),
    "CAR": Case(lambda t: dist.CAR(t * jnp.ones(2), 0.5, 1.0, jnp.array([[0.0, 1.0], [1.0, 0.0]]))),
    "Cauchy": Case(lambda t: dist.Cauchy(t, 1.0), lambda t: jnp.sin(t) / jnp.e, jnp.sin),
    "Chi2": Case(lambda t: dist.Chi2(5 * t)),
    "CirculantNormal": Case(lambda t: dist.CirculantNormal(t * jnp.ones(3), jnp.array([1.0, 0.2, 0.2]))),
    "Dagum": Case(
        lambda t: dist.Dagum(1.0 + t, 6.0, 1.0),
        lambda t: (1 + t) * jnp.exp(jax.scipy.special.betaln(1 + t + 1 / 6, 1 - 1 / 6)),
    ),
    "Dirichlet": Case(lambda t: dist.Dirichlet(jnp.stack([t, 1.0 + 0 * t]))),
    "DoublyTruncatedPowerLaw": Case(
        lambda t: dist.DoublyTruncatedPowerLaw(t, 1.0, 3.0), lambda t: expected(lambda x: x**t, 1.0, 3.0)
    ),
    "ExpandedDistribution": Case(lambda t: dist.Normal(t, 1.0).expand([2])),
    "Exponential": Case(lambda t: dist.Exponential(t)),
    "FoldedDistribution": Case(lambda t: dist.FoldedDistribution(dist.Normal(t, 1.0)), folded_normal),
    "Gamma": Case(lambda t: dist.Gamma(t, 1.0)),
    "GaussianCopula": Case(
        lambda t: dist.GaussianCopula(dist.Normal(t * jnp.ones(2), 1.0), correlation_cholesky=EYE), lambda t: 3 * t
    ),
    "GaussianRandomWalk": Case(lambda t: dist.GaussianRandomWalk(t, 2), lambda t: 5 * t**2, square),
    "GaussianStateSpace": Case(
        lambda t: dist.GaussianStateSpace(2, 0 * EYE, scale_tril=t * EYE), lambda t: 6 * t**2, square
    ),
    "Gompertz": Case(
        lambda t: dist.Gompertz(t, 1.0), lambda t: expected(lambda x: jnp.exp(x - t * jnp.expm1(x)), 0.0, 5.0)
    ),
    "Gumbel": Case(lambda t: dist.Gumbel(0.0, t)),
    "HalfCauchy": Case(lambda t: dist.HalfCauchy(t), jnp.log, jnp.log),
    "HalfNormal": Case(lambda t: dist.HalfNormal(t)),
    "Independent": Case(lambda t: dist.Normal(t * jnp.ones(2), 1.0).to_event(1)),
    "InverseGamma": Case(lambda t: dist.InverseGamma(t + 6, 1.0)),
    "Kumaraswamy": Case(lambda t: dist.Kumaraswamy(t, 2.0)),
    "LKJ": Case(lambda t: dist.LKJ(2, t), lambda t: 1 / (2 * t + 1), lambda x: x[1, 0] ** 2),
    "LKJCholesky": Case(lambda t: dist.LKJCholesky(2, t), lambda t: 1 / (2 * t + 1), lambda x: x[1, 0] ** 2),
    "Laplace": Case(lambda t: dist.Laplace(t, 1.0)),
    "LeftTruncatedDistribution": Case(
        lambda t: dist.LeftTruncatedDistribution(dist.Normal(t, 1.0), low=0.0), normal_above_0
    ),
    "LeftTruncatedGamma": Case(
        lambda t: dist.LeftTruncatedGamma(dist.Gamma(1 + t, 1.0), low=1.0), lambda t: gamma(1 + t, 1.0, 40.0)
    ),
    "Levy": Case(lambda t: dist.Levy(0.0, t), lambda t: jnp.exp(-jnp.sqrt(2 * t)), lambda x: jnp.exp(-x)),
    "LogNormal": Case(lambda t: dist.LogNormal(t, 0.5)),
    "Logistic": Case(lambda t: dist.Logistic(t, 1.0)),
    "LowRankMultivariateNormal": Case(
        lambda t: dist.LowRankMultivariateNormal(jnp.zeros(2), t * jnp.ones((2, 1)), jnp.ones(2)),
        lambda t: 3 * (t**2 + 1),
        square,
    ),
    "LowerTruncatedPowerLaw": Case(lambda t: dist.LowerTruncatedPowerLaw(-5 - t, 1.0), lambda t: (4 + t) / (3 + t)),
    "MatrixNormal": Case(lambda t: dist.MatrixNormal(jnp.zeros((2, 2)), t * EYE, EYE), lambda t: 6 * t**2, square),
    "MixtureGeneral": Case(lambda t: mixture(t, dist.Normal(t, 1.0), dist.Normal(-2 * t, 1.0)), exact_mixture),
    "MixtureSameFamily": Case(
        lambda t: dist.MixtureSameFamily(
            dist.Categorical(logits=jnp.stack([t, 0 * t])), dist.Normal(jnp.array([-1.0, 2.0]), 1.0)
        ),
        lambda t: 2 - 3 * jax.nn.sigmoid(t),
    ),
    "MultivariateNormal": Case(
        lambda t: dist.MultivariateNormal(jnp.zeros(2), jnp.array([[0.0, 0.5], [0.5, 1.0]]) + t * jnp.diag(EYE[0])),
        lambda t: t + 2,
        square,
    ),
    "MultivariateStudentT": Case(
        lambda t: dist.MultivariateStudentT(9.0 + t, jnp.zeros(2), EYE), lambda t: 3 * (9 + t) / (7 + t), square
    ),
    "Normal": Case(lambda t: dist.Normal(0.0, t), lambda t: t**2, square),
    "ProjectedNormal": Case(
        lambda t: dist.ProjectedNormal(jnp.stack([t, 0 * t])),
        lambda t: jnp.sqrt(jnp.pi / 8) * t * (i0e(t**2 / 4) + i1e(t**2 / 4)),
        lambda x: x[0],
    ),
    "RelaxedBernoulliLogits": Case(
        lambda t: dist.RelaxedBernoulliLogits(1.0, t),
        lambda t: expected(logistic, -30.0, 30.0, lambda x: jax.nn.sigmoid(x + t)),
    ),
    "RightTruncatedDistribution": Case(
        lambda t: dist.RightTruncatedDistribution(dist.Normal(t, 1.0), high=0.0), lambda t: -normal_above_0(-t)
    ),
    "RightTruncatedGamma": Case(
        lambda t: dist.RightTruncatedGamma(dist.Gamma(1 + t, 1.0), high=2.0), lambda t: gamma(1 + t, 0.0, 2.0)
    ),
    "SoftLaplace": Case(lambda t: dist.SoftLaplace(t, 1.0)),
    "StudentT": Case(lambda t: dist.StudentT(9.0 + t), lambda t: (9 + t) / (7 + t), square),
    "TransformedDistribution": Case(
        lambda t: transformed(dist.Normal(t, 1.0), SigmoidTransform()),
        lambda t: expected(lambda z: jnp.exp(-(z**2) / 2), -9.0, 9.0, lambda z: jax.nn.sigmoid(t + z)),
    ),
    "TwoSidedTruncatedDistribution": Case(
        lambda t: dist.TwoSidedTruncatedDistribution(dist.Normal(t, 1.0), 0.0, 1.0),
        lambda t: expected(lambda x: jnp.exp(-((x - t) ** 2) / 2), 0.0, 1.0),
    ),
    "TwoSidedTruncatedGamma": Case(
        lambda t: dist.TwoSidedTruncatedGamma(dist.Gamma(1 + t, 1.0), 1.0, 2.0), lambda t: gamma(1 + t, 1.0, 2.0)
    ),
    "Weibull": Case(lambda t: dist.Weibull(1.0, 1 + t)),
    "ZeroSumNormal": Case(lambda t: dist.ZeroSumNormal(t, (3,)), lambda t: 3 * t**2, square),
    "exponential of a half-line": Case(
        lambda t: transformed(dist.Exponential(1.0), affine(t), ExpTransform(), affine(1.0)), lambda t: t, jnp.log
    ),
    "power of a half-line": Case(
        lambda t: transformed(dist.Exponential(1.0), PowerTransform(t)),
        lambda t: jnp.exp(jax.scipy.special.gammaln(1 + t)),
    ),
    "scaled half-line": Case(lambda t: transformed(dist.Exponential(1.0), affine(t)), lambda t: t),
    "logit of an interval, moved": Case(
        lambda t: transformed(dist.Beta(2.0, 2.0), SigmoidTransform().inv, AffineTransform(t, 1.0)), lambda t: t
    ),
}
SCORE = {
    "BernoulliLogits": Case(lambda t: dist.Bernoulli(logits=t)),
    "BernoulliProbs": Case(lambda t: dist.Bernoulli(probs=t)),
    "BetaBinomial": Case(lambda t: dist.BetaBinomial(t, 3.0, 10)),
    "BetaNegativeBinomial": Case(lambda t: dist.BetaNegativeBinomial(t + 6, 3.0, 5.0)),
    "BinomialLogits": Case(lambda t: dist.Binomial(10, logits=t)),
    "BinomialProbs": Case(lambda t: dist.Binomial(10, probs=t)),
    "CategoricalLogits": Case(
        lambda t: dist.Categorical(logits=t * jnp.arange(3.0)), lambda t: categorical(t * jnp.arange(3.0))
    ),
    "CategoricalProbs": Case(lambda t: dist.Categorical(probs=jnp.stack([1 - t, t])), lambda t: t),
    "DirichletMultinomial": Case(lambda t: dist.DirichletMultinomial(jnp.stack([t, 1.0 + 0 * t]), 10)),
    "DiscreteUniform": Case(lambda t: dist.DiscreteUniform(0, 5), lambda t: 0 * t),
    "EulerMaruyama": Case(
        lambda t: dist.EulerMaruyama(jnp.arange(3.0), lambda x, _: (jnp.zeros_like(x), 1.0), dist.Normal(t, 1.0)),
        lambda t: t * 4.5,
    ),
    "GammaPoisson": Case(lambda t: dist.GammaPoisson(t, 1.0)),
    "GaussianCopulaBeta": Case(
        lambda t: dist.GaussianCopulaBeta(t * jnp.ones(2), 3.0 * jnp.ones(2), correlation_cholesky=EYE),
        lambda t: 3 * t / (t + 3),
    ),
    "GeometricLogits": Case(lambda t: dist.Geometric(logits=t)),
    "GeometricProbs": Case(lambda t: dist.Geometric(probs=t)),
    "HurdleGamma": Case(lambda t: dist.HurdleGamma(t, 2.0, 1.0), lambda t: 2 * (1 - t)),
    "HurdleLogNormal": Case(lambda t: dist.HurdleLogNormal(0.5, t, 0.5), lambda t: jnp.exp(t + 0.125) / 2),
    "HurdleLogits": Case(
        lambda t: dist.HurdleLogits(dist.Gamma(2.0, 1.0), gate_logits=t), lambda t: 2 * jax.nn.sigmoid(-t)
    ),
    "HurdlePoisson": Case(lambda t: dist.HurdlePoisson(t, 2.0), lambda t: (1 - t) * 2 / -jnp.expm1(jnp.asarray(-2.0))),
    "HurdleProbs": Case(lambda t: dist.HurdleProbs(dist.Gamma(2.0, 1.0), t), lambda t: 2 * (1 - t)),
    "InverseWishart": Case(lambda t: dist.InverseWishart(9.0, scale_tril=t * EYE), lambda t: 3 * t**2 / 6),
    "InverseWishartCholesky": Case(
        lambda t: dist.InverseWishartCholesky(9.0, scale_tril=t * EYE), lambda t: 2 * t**2 / 6, lambda x: jnp.sum(x**2)
    ),
    "MultinomialLogits": Case(lambda t: dist.Multinomial(5, logits=jnp.stack([t, 0 * t]))),
    "MultinomialProbs": Case(lambda t: dist.Multinomial(5, probs=jnp.stack([t, 1 - t]))),
    "NegativeBinomial2": Case(lambda t: dist.NegativeBinomial2(t, 2.0)),
    "NegativeBinomialLogits": Case(lambda t: dist.NegativeBinomialLogits(5.0, t)),
    "NegativeBinomialProbs": Case(lambda t: dist.NegativeBinomialProbs(5.0, t)),
    "OrderedLogistic": Case(
        lambda t: dist.OrderedLogistic(t, jnp.array([-0.5, 1.0])),
        lambda t: jax.nn.sigmoid(t + 0.5) + jax.nn.sigmoid(t - 1.0),
    ),
    "SineBivariateVonMises": Case(
        lambda t: dist.SineBivariateVonMises(t, 0.0, 1.0, 1.0, 0.0),
        lambda t: jnp.sin(t) * i1e(1.0) / i0e(1.0),
        lambda x: jnp.sin(x[0]),
    ),
    "SineSkewed": Case(
        lambda t: dist.SineSkewed(dist.VonMises(jnp.zeros(1), 1.0).to_event(1), t[None]),
        lambda t: t * i1e(1.0) / i0e(1.0),
        lambda x: jnp.sin(x[0]),
    ),
    "TruncatedPolyaGamma": Case(lambda t: dist.TruncatedPolyaGamma(), lambda t: 0 * t),
    "VonMises": Case(lambda t: dist.VonMises(t, 1.0), lambda t: jnp.sin(t) * i1e(1.0) / i0e(1.0), jnp.sin),
    "Wishart": Case(lambda t: dist.Wishart(5.0, scale_tril=t * EYE), lambda t: 15 * t**2),
    "WishartCholesky": Case(
        lambda t: dist.WishartCholesky(5.0, scale_tril=t * EYE), lambda t: 10 * t**2, lambda x: jnp.sum(x**2)
    ),
    "ZeroInflatedLogits": Case(
        lambda t: dist.ZeroInflatedDistribution(dist.Poisson(2.0), gate_logits=t), lambda t: 2 * jax.nn.sigmoid(-t)
    ),
    "ZeroInflatedPoisson": Case(lambda t: dist.ZeroInflatedPoisson(t, 2.0), lambda t: 2 * (1 - t)),
    "ZeroInflatedProbs": Case(
        lambda t: dist.ZeroInflatedDistribution(dist.Poisson(2.0), gate=t), lambda t: 2 * (1 - t)
    ),
    "Poisson": Case(lambda t: dist.Poisson(t)),
    "transformed Poisson": Case(lambda t: transformed(dist.Poisson(t), affine(2.0)), lambda t: 2 * t),
    "twice transformed Poisson": Case(
        lambda t: transformed(transformed(dist.Poisson(t), affine(2.0)).expand([2]).to_event(1), affine(3.0)),
        lambda t: 18 * t,
    ),
    "transformed hurdle": Case(
        lambda t: transformed(dist.HurdleGamma(t, 2.0, 1.0), affine(2.0)), lambda t: 4 * (1 - t)
    ),
    "folded mixture": Case(
        lambda t: dist.FoldedDistribution(mixture(t, dist.Normal(t, 1.0), dist.Normal(-2 * t, 1.0))),
        lambda t: 1 + 0.3 * t**2 + 2.8 * t**2,
        square,
    ),
}
PATH = {
    "Delta": Case(lambda t: dist.Delta(t), lambda t: t**2, square),
    "LogUniform": Case(lambda t: dist.LogUniform(1.0, 2 + t), lambda t: (1 + t) / jnp.log(2 + t)),
    "MaskedDistribution": Case(lambda t: dist.Normal(t, 1.0).mask(False)),
    "Pareto": Case(lambda t: dist.Pareto(t, 5.0)),
    "Uniform": Case(lambda t: dist.Uniform(0.0, t)),
    "masked event": Case(
        lambda t: dist.Normal(t * jnp.ones(2), 1.0).mask(np.array([True, False])).to_event(1), lambda t: 3 * t
    ),
    "absolute value": Case(lambda t: transformed(dist.Normal(t, 1.0), AbsTransform()), folded_normal),
    "scaled interval within": Case(
        lambda t: transformed(dist.Normal(), ComposeTransform([SigmoidTransform(), affine(t)]), ExpTransform()),
        lambda t: t / 2,
        jnp.log,
    ),
    "inverse of a composition": Case(
        lambda t: transformed(
            dist.Normal(), SigmoidTransform(), ComposeTransform([IdentityTransform(), affine(1 / t)]).inv
        ),
        lambda t: t / 2,
    ),
    "expanded and scaled interval": Case(
        lambda t: transformed(transformed(dist.Normal(), SigmoidTransform()).expand([2]).to_event(1), affine(t)),
        lambda t: 1.5 * t,
    ),
    "power of an interval": Case(lambda t: transformed(dist.Beta(2.0, 1.0), PowerTransform(t)), lambda t: 2 / (2 + t)),
    "exponential of a moving interval": Case(
        lambda t: transformed(dist.Uniform(0.0, t), ExpTransform()), lambda t: jnp.expm1(t) / t
    ),
    "scaled interval": Case(lambda t: transformed(dist.Uniform(0.0, 1.0), affine(t)), lambda t: t / 2),
    "event of moving intervals": Case(lambda t: dist.Uniform(jnp.zeros(2), t).to_event(1)),
    "shifted log-normal": Case(
        lambda t: transformed(dist.Normal(), ExpTransform(), AffineTransform(t, 1.0)), lambda t: t
    ),
    "shifted half-line": Case(lambda t: transformed(dist.Exponential(1.0), AffineTransform(t, 1.0)), lambda t: t + 1),
    "point with a density": Case(lambda t: dist.Delta(jnp.ones(()), t), lambda t: 0 * t),
}
NEITHER = {
    "IntervalCensoredDistribution": Case(
        lambda t: dist.IntervalCensoredDistribution(dist.Normal(t, 1.0), jnp.zeros(()), jnp.zeros(()))
    ),
    "LeftCensoredDistribution": Case(lambda t: dist.LeftCensoredDistribution(dist.Normal(t, 1.0), True)),
    "RightCensoredDistribution": Case(lambda t: dist.RightCensoredDistribution(dist.Normal(t, 1.0), True)),
    "Unit": Case(lambda t: dist.Unit(t)),
    "masked transformed Poisson": Case(lambda t: transformed(dist.Poisson(t), affine(2.0)).mask(False)),
    "mixture of transformed Poissons": Case(
        lambda t: mixture(t, transformed(dist.Poisson(t), affine(2.0)), transformed(dist.Poisson(2 * t), affine(1.0)))
    ),
    "scaled Poisson": Case(lambda t: transformed(dist.Poisson(2.0), affine(t))),
    "mixture with a gap": Case(
        lambda t: dist.MixtureSameFamily(
            dist.Categorical(probs=jnp.stack([t, 1 - t])),
            transformed(dist.Uniform(0.0, 1.0).expand([2]), AffineTransform(jnp.array([0.0, 5.0]), 1.0)),
        )
    ),
}
RIGHT = {"LR RP": BOTH, "LR": SCORE, "RP": PATH, "": NEITHER}  # which estimators are right; the others are refused
CASES = {name: case for cases in RIGHT.values() for name, case in cases.items()}


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


@pytest.mark.parametrize("case", ["scaled Poisson", "Pareto", "masked event", "shifted log-normal", "Kumaraswamy"])
def test_total_propagation_is_refused_where_one_of_its_estimators_is(case):
    node = ap.stochastic(ap.total_propagation())(CASES[case].make)
    cost = lambda tape, x: tape.cost(jnp.sum(x.reshape(4, -1), axis=-1))
    gradient = jax.grad(ap.expectation(lambda tape, t: cost(*node(tape, t)), 4), argnums=1)
    if case in BOTH:
        assert jax.eval_shape(gradient, KEY, THETA).shape == ()
    else:
        with pytest.raises(TypeError, match=REFUSED):
            jax.eval_shape(gradient, KEY, THETA)


class Counts(dist.Distribution):
    """Declares no parameters, so that NumPyro's `has_rsample` is true."""

    def __init__(self, rate, support, dtype):
        self.rate, self.told, self.dtype = rate, support, dtype
        super().__init__()

    @property
    def support(self):
        return self.told

    def sample(self, key, sample_shape=()):
        return jax.random.poisson(key, self.rate, sample_shape).astype(self.dtype)

    def log_prob(self, value):
        return dist.Poisson(self.rate).log_prob(value)


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: transformed(d, affine(2.0)), lambda d: d.expand([2]).to_event(1)]
)
@pytest.mark.parametrize(
    "support, dtype, words",
    [
        (constraints.nonnegative_integer, jnp.float32, "samples of Counts are discrete"),
        (None, jnp.int32, "samples of Counts are discrete"),
        (None, jnp.float32, "Counts declares no parameters"),
    ],
)
def test_a_claim_that_says_nothing_is_no_pathwise_derivative(support, dtype, words, wrap):
    assert Counts(1.0, support, dtype).has_rsample
    with pytest.raises(TypeError, match=words):
        distributions.pathwise_sample("RP", wrap(Counts(1.0, support, dtype)), KEY)


def test_the_sweep_has_every_distribution_of_numpyro():
    exported = {name for name, value in vars(dist).items() if inspect.isclass(value)}
    wanted = {name for name in exported if issubclass(getattr(dist, name), dist.Distribution)} - {
        "Distribution",
        "ImproperUniform",
    }  # what cannot be sampled
    assert not wanted - set(CASES), "say which estimators are right for these, and with what expectation"


def derivatives(cases):
    """For each case and each estimator that is not refused, samples of the derivative of the expected cost."""

    def or_refused(function):
        try:
            return function()
        except TypeError as error:
            assert re.search(REFUSED, str(error)), error
            return None

    def one(make, cost, t, key):
        def derivative(function):
            return jax.jvp(function, (t,), (jnp.ones_like(t),))

        def score(t):
            return jnp.sum(distributions.guarded("LR", make(t), distributions.score("LR", make(t), x)))

        path = or_refused(lambda: derivative(lambda t: distributions.pathwise_sample("RP", make(t), key)))
        x = distributions.sample(make(t), key) if path is None else path[0]
        to_cost = None if path is None else jax.jvp(cost, *((x,) for x in path))[1]
        return cost(x.astype(jnp.float32)), or_refused(lambda: derivative(score)[1]), to_cost

    def all_of_them(t, keys):
        each = {name: functools.partial(one, case.make, case.cost) for name, case in cases.items()}
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

    def derivative(case, t):
        exact = case.exact or (lambda t: case.cost(case.make(t).mean))
        return jax.jvp(exact, (t,), (jnp.ones_like(t),))[1]

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        known = {name: case for name, case in cases.items() if name not in NEITHER}
        return jax.jit(lambda t: {name: derivative(case, t) for name, case in known.items()})(jnp.float64(THETA))


@pytest.mark.parametrize("group", range(12))  # each group is one compiled program
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
