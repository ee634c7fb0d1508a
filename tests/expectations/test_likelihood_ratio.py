"""Reparameterization and likelihood ratio: right at any order, refused where they would be wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad.expectations import _distributions as distributions
from experiments import second_derivatives
from tests.cases import cases
from tests.expectations.instruments import KEY
from tests.expectations.programs import paid
from tests.refusals import refused

Affine, _moved = dist.transforms.AffineTransform, dist.TransformedDistribution


PROGRAMS = {f"{f}, {g}": (f, g) for f in second_derivatives.FAMILIES for g in second_derivatives.GRAPHS}


@cases("program", PROGRAMS, long=["normal, two nodes, scan", "bernoulli, two nodes, unrolled"])
def test_derivatives_are_unbiased_at_any_order(program):
    family, graph = program
    estimates = [second_derivatives.estimate(family, graph, order, ap.likelihood_ratio()) for order in range(3)]
    truths = [second_derivatives.exact(family, graph, order) for order in range(3)]
    ap.testing.assert_unbiased(lambda key: [estimate(key) for estimate in estimates], truths, KEY, 1000)


def test_a_transformed_distribution_that_is_folded_is_refused():
    # NumPyro's density of it folds what the transforms had before.
    def folded(t, *lanes):
        moved = _moved(dist.Normal(), Affine(t, 1.0))
        made = dist.FoldedDistribution(moved.expand(lanes) if lanes else moved)
        return jnp.sum(distributions.score("LR", made, jnp.ones(4)))

    refused(TypeError, "AbsTransform: it has no right score", jax.eval_shape, folded, 0.7)
    score = jax.jit(jax.grad(lambda t: folded(t, 4)))  # NumPyro does not take an expanded one apart
    np.testing.assert_allclose(score(0.7), 4 * (np.tanh(0.7) - 0.7), rtol=1e-5)


EVEN, CENTRED = dist.Categorical(logits=jnp.zeros((4, 2))), dist.Laplace(jnp.zeros(4))
_mixture_of_laplaces = lambda loc: dist.MixtureSameFamily(EVEN, dist.Laplace(loc[:, None] * jnp.ones(2)))


KINKED = {
    "Laplace": lambda loc: dist.Laplace(loc, 1.0),
    "AsymmetricLaplace": lambda loc: dist.AsymmetricLaplace(loc, 1.0, 1.2),
    "its quantiles": lambda loc: dist.AsymmetricLaplaceQuantile(loc, 1.0, 0.3),
    "transformed": lambda loc: _moved(dist.Laplace(loc), dist.transforms.ExpTransform()),
    "mixture": _mixture_of_laplaces,
    "moved": lambda loc: _moved(CENTRED, Affine(loc, 1.0)),
    "scaled": lambda scale: _moved(dist.AsymmetricLaplace(0.5 * jnp.ones(4)), Affine(0.0, scale)),
    "expanded, moved back": lambda loc: _moved(dist.Laplace().expand([4]), Affine(loc, 1).inv),
    "moved mixture": lambda loc: _moved(_mixture_of_laplaces(jnp.zeros(4)), Affine(loc, 1.0)),
    "mixture of moved": lambda loc: dist.MixtureGeneral(EVEN, [CENTRED, _moved(CENTRED, Affine(loc, 1.0))]),
}


@pytest.mark.parametrize("make", KINKED.values(), ids=KINKED)
def test_a_second_derivative_where_the_density_has_a_kink_is_refused(make):
    # Of x^2 under Laplace(m, 1) it is 2, and the score's derivative at the samples gives 0.
    ones = jnp.ones(4)
    draw = lambda tape, loc: ap.sample(tape, make(loc * ones), ap.likelihood_ratio())
    given = lambda tape, loc: (ap.score(tape, make(loc * ones), ones, behaviour_log_prob=0 * ones), ones)
    twice = lambda f, argnums: jax.grad(jax.jit(jax.grad(f, argnums)), argnums)
    for program in (draw, given):
        objective = ap.expectation(paid(program), 4)
        jax.eval_shape(jax.grad(objective, argnums=1), KEY, 0.7)
        for second in (jax.hessian, twice):
            refused(TypeError, "has a kink at its location", jax.eval_shape, second(objective, argnums=1), KEY, 0.7)


# The expectation of a cost after `draw(tape, distribution)`.
taken = lambda draw: lambda d: ap.expectation(lambda tape: draw(tape, d)[0].cost(jnp.ones(4)), 4)(KEY)


sampled = lambda estimator: taken(lambda tape, d: ap.sample(tape, d, estimator))
node = lambda estimator: taken(lambda tape, d: ap.stochastic(estimator)(lambda _: d.to_event(1))(tape, 1.0))


bound = lambda made: lambda d: jnp.sum(made(KEY, d, lambda z: -(z**2)))


SCORES = {
    "likelihood_ratio": sampled(ap.likelihood_ratio(None)),
    "an estimator of one's own": sampled(ap.Estimator("own", score=lambda d, x: d.log_prob(x))),
    "total_propagation": sampled(ap.total_propagation(None)),
    "likelihood_ratio, a node": node(ap.likelihood_ratio(None)),
    "total_propagation, a node": node(ap.total_propagation(None)),
    "rloo": taken(lambda tape, d: ap.choose(tape, d, lambda z: (z, None), ap.rloo(2))),
    "a branch": taken(lambda tape, d: tape.parallel(lambda t: ap.sample(t, d, ap.likelihood_ratio(None)))),
    "sticking_the_landing": bound(ap.variational.sticking_the_landing()),
    "doubly_reparameterized": bound(ap.variational.doubly_reparameterized(2)),
    "vimco": bound(ap.variational.vimco(2)),
    "leave_one_out": bound(ap.variational.leave_one_out(2)),
}


@cases("score", SCORES)
def test_all_that_take_scores_refuse_moving_supports_and_second_derivatives_at_kinks(score):
    # The score of U(0, theta) is -1 / theta: by likelihood ratio E[x] would fall with theta.
    def derivative(make, order=1):
        f = jax.jit(lambda theta: jax.lax.scan(lambda c, _: (c + score(make(theta)), None), 0.0, length=2)[0])
        return jax.eval_shape(jax.grad(f) if order == 1 else jax.grad(jax.grad(f)), 0.7)

    ones = jnp.ones(4)
    for moving in (lambda theta: dist.Uniform(0 * ones, theta), lambda theta: dist.Uniform(theta * ones, 2.0)):
        refused(TypeError, "bounds of the support of .* depend on a diff", derivative, moving)
    with jax.numpy_dtype_promotion("standard"):  # NumPyro's density promotes
        derivative(lambda theta: dist.TruncatedNormal(theta * ones, 1.0, low=-1.0, high=2.0))
    kinked = lambda theta: dist.Laplace(theta * ones)
    refused(TypeError, "has a kink at|no second derivative", derivative, kinked, order=2)


def test_derivatives_of_a_laplace_distribution_that_exist_are_right():
    # E[x^2] = m^2 + 2 s^2.
    node = ap.stochastic(ap.likelihood_ratio(), in_axes=(None, None))(lambda loc, scale: dist.Laplace(loc, scale))
    first = ap.grad(paid(node, jnp.square), 1000, argnums=(1, 2))
    estimate = lambda key: (first(key, 0.7, 0.5), jax.jacfwd(first, argnums=2)(key, 0.7, 0.5))
    ap.testing.assert_unbiased(estimate, ((1.4, 2.0), (0.0, 4.0)), KEY, 300)


@pytest.mark.parametrize("estimator", [ap.likelihood_ratio(), ap.total_propagation()], ids=["LR", "TP"])
def test_a_sample_that_is_rounded_to_where_the_density_is_infinite_is_an_error(estimator, x64):
    # Of Gamma(.05, 1), one sample in a hundred is below what float32 has.
    node = ap.stochastic(estimator)(lambda shape: dist.Gamma(shape, 1.0))
    gradient = jax.jit(ap.grad(paid(node), 1000))
    at = lambda shape: jax.block_until_ready(gradient(KEY, shape))
    refused(Exception, "rounded to where its density is", at, jnp.float32(0.05))
    assert jnp.isfinite(at(jnp.float64(0.05)))


def test_clipped_and_rounded_samples_have_a_right_score():
    # Of Beta(.1, .1) a tenth of the samples is clipped to 1, of the shares with a concentration of .01 a quarter to 0.
    lanes = lambda x: jnp.broadcast_to(x, (100, *jnp.shape(x)))
    beta = lambda b, a=0.1: dist.Beta(a, lanes(b))
    shares = lambda a: dist.Dirichlet(lanes(jnp.stack([a, 0.01, 0.01])))
    shifted = lambda b: _moved(beta(b, 2.0), Affine(-1.0, 2.0))
    # In bfloat16 numbers near 3 are 1/64 apart.
    half = lambda mean: dist.Normal(lanes(mean).astype(jnp.bfloat16), jnp.bfloat16(0.01))
    square = lambda x: (x.astype(jnp.float32) - 2) ** 2

    def gradient(make, cost=lambda x: x, estimator=ap.likelihood_ratio()):  # noqa: B008 (a tuple)
        return ap.grad(paid(lambda tape, theta: ap.sample(tape, make(theta), estimator), cost), 100, cross_fit=True)

    by_choice = lambda tape, mean: ap.choose(tape, half(mean), lambda x: (square(x), None), ap.rloo())[0]
    found = {  # gradients at a number, and the truth
        "beta": (gradient(beta), 0.1, -2.5),
        "beta, TP": (gradient(beta, estimator=ap.total_propagation()), 0.1, -2.5),
        "within [-1, 1]": (gradient(shifted), 0.1, -4 / 2.1**2),
        "shares": (gradient(shares, lambda x: x[:, 0]), 0.01, 200 / 9),
        "bfloat16": (gradient(half, square), 3.0, 2.0),
        "bfloat16, rloo": (ap.grad(by_choice, 100), 3.0, 2.0),
    }
    estimate = lambda key: {name: gradient(key, theta) for name, (gradient, theta, _) in found.items()}
    ap.testing.assert_unbiased(estimate, {name: truth for name, (*_, truth) in found.items()}, KEY, 500)


TO_INTERVAL = [dist.transforms.SigmoidTransform(), Affine(-1.0, 2.0)]
COARSE = {
    "scale": (lambda t: dist.Normal(100.0, t), 1e-6),
    "kumaraswamy": (lambda t: dist.Kumaraswamy(0.1, t), 0.1),
    "relaxed": (lambda t: dist.RelaxedBernoulli(0.1, logits=t), 0.0),
    "within [-1, 1]": (lambda t: _moved(dist.Normal(t, 1.0), TO_INTERVAL), 20.0),
    "an end of a scaled beta": (lambda t: _moved(dist.Beta(1.0, t), Affine(0.0, 1.7)), 0.05),
    "an end of a beta's power": (lambda t: _moved(dist.Beta(t, 1.0), dist.transforms.PowerTransform(0.7)), 0.02),
}


@pytest.mark.parametrize(("make", "theta"), COARSE.values(), ids=COARSE.keys())
def test_a_sample_that_lost_what_its_score_depends_on_is_an_error(make, theta):
    gradient = jax.jit(ap.grad(paid(ap.stochastic(ap.likelihood_ratio())(make)), 100))
    refused(Exception, "more coarsely than its scale", lambda: jax.block_until_ready(gradient(KEY, theta)))


@pytest.mark.optimized
def test_the_gradient_at_such_a_sample_is_nan_where_nobody_checks():
    normal = ap.stochastic(ap.likelihood_ratio())(COARSE["scale"][0])
    found = jax.jit(ap.value_and_grad(paid(normal), 4, check_nan=False))(KEY, COARSE["scale"][1])
    assert np.isnan(found).all(), found


WRAPS = {
    "plain": lambda d: d,
    "expanded": lambda d: d.expand((2, 3)),
    "an event": lambda d: d.expand((3,)).to_event(1).expand((2,)),
    "masked": lambda d: d.mask(False),
}


@cases("wrap", WRAPS)
def test_the_implicit_derivative_equals_that_of_the_inverse_cdf(wrap, x64):
    # Of rates r and 2 r: y = exp(-r x) has q y + p y^2 = 1 - cdf, which is the same at any theta, also in a scan.
    def one(t):
        rates = jnp.exp(t) * jnp.array([1.0, 2.0])
        return wrap(dist.MixtureSameFamily(dist.Categorical(logits=jnp.stack([-t, t])), dist.Exponential(rates)))

    def implicit(tape, t):
        def body(tape, _):
            tape, x = ap.stochastic(ap.reparameterization())(one)(tape, t)
            return tape.cost(jnp.sum(x**3, axis=tuple(range(1, x.ndim)))), x

        return jax.lax.scan(body, tape, length=2)

    estimate = jax.jit(ap.expectation(implicit, 5, has_aux=True))
    t = jnp.array(0.3)
    y, p = jnp.exp(-jnp.exp(t) * estimate(KEY, t)[1]), jax.nn.sigmoid(2 * t)
    above = (1 - p) * y + p * y**2

    def exact(t):
        p = jax.nn.sigmoid(2 * t)
        y = (jnp.sqrt((1 - p) ** 2 + 4 * p * above) - (1 - p)) / (2 * p)
        return jnp.sum((-jnp.log(y) / jnp.exp(t)) ** 3) / 5

    both = lambda f, t: (jax.grad(f)(t), jax.grad(jax.grad(f))(t))  # a Newton step less shows at the second
    found = lambda t: estimate(KEY, t)[0]
    np.testing.assert_allclose(*jax.jit(lambda t: (both(found, t), both(exact, t)))(t), rtol=1e-9)
