"""Bounds against exact values, and the ELBO of NumPyro models beside NumPyro's own."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from numpyro.contrib import control_flow
from numpyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO

import apgrad as ap
from tests.expectations.instruments import KEY
from tests.refusals import refused

V = ap.variational
X = 1.3  # the observation of p(z) = N(theta, 1), p(x | z) = N(z, 1)


log_joint = lambda theta: lambda z: -((z - theta) ** 2 + (X - z) ** 2) / 2 - jnp.log(2 * jnp.pi)


@jax.jit
def elbo_of_gaussian(params):
    """The exact ELBO of q = N(m, s^2)."""
    m, s = params["m"], jnp.exp(params["log_s"])
    expected = -((m - params["theta"]) ** 2 + (X - m) ** 2 + 2 * s**2) / 2 - jnp.log(2 * jnp.pi)
    return expected + jnp.log(s) + (1 + jnp.log(2 * jnp.pi)) / 2


GAUSSIAN = {"m": 0.2, "log_s": -0.4, "theta": 0.5}


def gaussian(bound):
    def value(key, params):
        return bound(key, dist.Normal(params["m"], jnp.exp(params["log_s"])), log_joint(params["theta"]))

    return value


@jax.jit
def quadrature(params):
    """The importance-weighted bound of two samples, by Gauss-Hermite quadrature in both."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    s = jnp.exp(params["log_s"])
    z = params["m"] + s * jnp.asarray(nodes)
    log_w = log_joint(params["theta"])(z) + jnp.asarray(nodes) ** 2 / 2 + jnp.log(s) + jnp.log(2 * jnp.pi) / 2
    chance = jnp.asarray(weights / weights.sum())
    return chance @ (jnp.logaddexp(log_w[:, None], log_w[None]) - jnp.log(2.0)) @ chance


EXACT = {
    "sticking_the_landing": (V.sticking_the_landing(), elbo_of_gaussian),
    "importance_weighted": (V.importance_weighted(2), quadrature),
    "doubly_reparameterized": (V.doubly_reparameterized(2), quadrature),
    "vimco": (V.vimco(2), quadrature),
    "leave_one_out": (V.leave_one_out(2), quadrature),
}


def derivatives(function, order, **options):
    """The value and the derivatives of first and second order."""
    return [function, jax.grad(function, **options), jax.hessian(function, **options)][: order + 1]


def assert_unbiased(estimates, truths, params, order, num_estimates):
    """Of one program for all names."""
    exact = jax.jit(lambda: {k: [f(params) for f in derivatives(truth, order)] for k, truth in truths.items()})()
    all_of = {name: derivatives(estimate, order, argnums=1) for name, estimate in estimates.items()}
    estimate = lambda key: {name: [f(key, params) for f in functions] for name, functions in all_of.items()}
    ap.testing.assert_unbiased(estimate, jax.tree.map(np.asarray, exact), KEY, num_estimates)


def test_bounds_of_a_gaussian_are_unbiased_to_order_two():
    estimates = {name: gaussian(bound) for name, (bound, _) in EXACT.items()}
    assert_unbiased(estimates, {name: exact for name, (_, exact) in EXACT.items()}, GAUSSIAN, 2, 20_000)


def test_doubly_reparameterized_is_its_formula():
    """Equation 8 of the paper, written out, for the proposal's parameters, and the plain gradient for the model's."""
    samples, params = 3, GAUSSIAN
    bounds = V.doubly_reparameterized(samples), V.importance_weighted(samples)
    value, plain = jax.jit(lambda: [jax.grad(gaussian(bound), argnums=1)(KEY, params) for bound in bounds])()
    log_q = lambda z: dist.Normal(params["m"], jnp.exp(params["log_s"])).log_prob(z)
    log_w = lambda z: log_joint(params["theta"])(z) - log_q(z)

    @jax.jit
    def by_hand():
        noise = jax.vmap(jax.random.normal)(jax.random.split(KEY, samples))
        z = params["m"] + jnp.exp(params["log_s"]) * noise
        return noise, jax.nn.softmax(log_w(z)) ** 2 * jax.vmap(jax.grad(log_w))(z)

    noise, message = by_hand()
    np.testing.assert_allclose(value["m"], jnp.sum(message), rtol=1e-4)
    np.testing.assert_allclose(value["log_s"], jnp.sum(message * noise * jnp.exp(params["log_s"])), rtol=1e-4)
    np.testing.assert_allclose(value["theta"], plain["theta"], rtol=1e-5)


TABLE = jnp.log(jnp.array([0.1, 0.35, 0.05]))  # log p(x, z) of three outcomes


def test_bounds_of_a_discrete_choice():
    choice = lambda bound: lambda key, logits: bound(key, dist.Categorical(logits=logits), lambda z: TABLE[z])
    estimates = {"vimco": choice(V.vimco(3)), "leave_one_out": choice(V.leave_one_out(3))}

    def exact(logits):
        log_q, z = jax.nn.log_softmax(logits), np.indices((3, 3, 3)).reshape(3, -1)
        bounds = jax.nn.logsumexp((TABLE - log_q)[z], axis=0) - jnp.log(3.0)
        return jnp.exp(jnp.sum(log_q[z], axis=0)) @ bounds

    assert_unbiased(estimates, dict.fromkeys(estimates, exact), jnp.array([0.3, 0.0, -0.5]), 1, 20_000)


def test_an_impossible_sample_does_not_spoil_the_bounds_of_a_discrete_choice():
    table = TABLE.at[0].set(-jnp.inf)

    keys, logits = jax.random.split(KEY, 100), jnp.array([0.5, 0.0, -0.5])

    def of(bound):
        def estimate(logits, key):
            z = []
            return bound(key, dist.Categorical(logits=logits), lambda x: table[z.append(x) or x]), z[0]

        return jax.vmap(jax.value_and_grad(estimate, has_aux=True), (None, 0))(logits, keys)

    bounds = [make(samples) for samples in (2, 3) for make in (V.vimco, V.leave_one_out)]
    for (value, z), gradient in jax.jit(lambda: [of(bound) for bound in bounds])():
        possible = (z != 0).any(1)
        assert 20 < possible.sum() < 100 and (value[~possible] == -jnp.inf).all()
        exact = jax.nn.logmeanexp((table - jax.nn.log_softmax(logits))[z], axis=1)
        np.testing.assert_allclose(value[possible], exact[possible], rtol=1e-5)
        assert jnp.isfinite(gradient[possible]).all()


@pytest.mark.optimized  # in which XLA takes exp(NaN) for 1 where the NaN is a constant that is selected
def test_a_score_at_a_sample_that_is_rounded_more_coarsely_than_its_scale_is_nan():
    def loss(bound, loc):
        return bound(KEY, dist.Normal(loc, 1e-7), lambda z: -(z**2))

    def rounded_to_1(bound, loc):
        flow = dist.TransformedDistribution(dist.Normal(loc, 1.0), dist.transforms.SigmoidTransform())
        return bound(KEY, flow, dist.Beta(2.0, 2.0).log_prob)

    paths = V.sticking_the_landing(), V.doubly_reparameterized(2), V.importance_weighted(2)
    both = [(f, b) for b in (*paths, V.vimco(2), V.leave_one_out(2)) for f in (loss, rounded_to_1)]
    found = jax.jit(lambda loc: [jax.value_and_grad(f, argnums=1)(bound, loc) for f, bound in both])(100.0)
    assert np.isnan(found).all(), found


def test_a_score_at_a_rounded_sample_is_refused():
    def chosen(key, distribution, _):
        return ap.expectation(lambda tape: ap.choose(tape, distribution, lambda x: (0.0, x), ap.rloo(2))[0], 4)(key)

    words = r"samples of Gamma in b?float16 are rounded.*in float32, and round its samples where"
    for dtype, way in itertools.product(("bfloat16", "float16"), (chosen, V.leave_one_out(2), V.vimco(2))):
        ones = jnp.ones(4, dtype)
        of = lambda distribution, way=way: lambda key: way(key, distribution, lambda z: jnp.zeros(z.shape[:2]))
        refused(TypeError, words, jax.eval_shape, of(dist.Gamma(ones, ones)), KEY)
        jax.eval_shape(of(dist.Bernoulli(logits=ones)), KEY)  # no sample of a coin is rounded


def test_bounds_have_a_value_for_each_member_of_the_batch_and_refuse_other_shapes():
    bound = V.doubly_reparameterized(4)
    proposal = dist.Normal(jnp.zeros((5, 2)), 1.0).to_event(1)
    assert jax.eval_shape(lambda: bound(KEY, proposal, lambda z: -jnp.sum(z**2, -1))).shape == (5,)
    words = r"log_joint returned shape \(4, 5, 2\) .* has shape \(4, 5\)"
    refused(ValueError, words, bound, KEY, proposal, lambda z: -(z**2))
    refused(ValueError, "the samples of vimco must be an integer of at least 2", V.vimco, 1)
    coin = dist.Bernoulli(0.5)
    refused(TypeError, r"needs a pathwise derivative.*discrete", V.importance_weighted(2), KEY, coin, lambda z: z)
    masked = dist.HalfNormal(1.0).mask(False)
    refused(TypeError, "is not the density of its samples", V.importance_weighted(2), KEY, masked, lambda z: -z)


def test_bounds_that_charge_samples_with_their_own_weights_refuse_a_joint_density_that_mixes_them():
    def traced(way, joint, events=0):
        proposal = dist.Bernoulli(logits=ones) if way in (V.leave_one_out, V.vimco) else dist.Normal(ones, 1.0)
        return jax.eval_shape(lambda: way(4)(KEY, proposal.to_event(events), joint))

    ones = jnp.ones(3)
    mixing = {
        "samples": lambda z: (z.astype(float) - z.mean(0)) ** 2,
        "members of the batch": lambda z: (z > 0).astype(float) - (z > 0).mean(1, keepdims=True),
    }
    for name, joint in mixing.items():
        for way in (V.leave_one_out, V.vimco, V.doubly_reparameterized):
            refused(ValueError, f"log_joint mixes the {name}", traced, way, joint)
            traced(way, lambda z: z.astype(float) - jax.lax.stop_gradient(z.mean(0)))
            traced(way, lambda z: jnp.var(z, axis=1), 1)
        traced(V.importance_weighted, joint)  # pathwise derivatives go wherever samples go
    noisy = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    for way in (V.leave_one_out, V.vimco, V.doubly_reparameterized):
        refused(ValueError, "as modules with dropout.*copy=True", way(4), KEY, dist.Normal(ones, 1.0), noisy)


# A mixture with two plates: a global location, a discrete class of each datum, and a shift of each datum.
DATA = jnp.array([-1.0, 0.5, 2.0])
PARAMS = {"loc": 0.3, "scale": 0.5, "logits": jnp.array([-0.4, 0.2, 0.6]), "shift": jnp.array([0.1, -0.2, 0.3])}


def model(data, size=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", 3, subsample_size=size) as index:
        c = numpyro.sample("c", dist.Bernoulli(0.3))
        e = numpyro.sample("e", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(mu + 2.0 * c + e, 1.0), obs=data[index])


def guide(data, size=None):
    loc = numpyro.param("loc", 0.0)
    numpyro.sample("mu", dist.Normal(loc, numpyro.param("scale", 1.0)))
    logits, shift = numpyro.param("logits", jnp.zeros(3)), numpyro.param("shift", jnp.zeros(3))
    with numpyro.plate("data", 3, subsample_size=size) as index:
        c = numpyro.sample("c", dist.Bernoulli(logits=logits[index]))
        numpyro.sample("e", dist.Normal(shift[index] + 0.5 * c, 0.7))


@jax.jit
def exact_loss(params):
    """The negative ELBO by hand: all is Gaussian given the classes c."""
    m, s, q, c = params["loc"], params["scale"], jax.nn.sigmoid(params["logits"])[:, None], jnp.arange(2.0)
    of_mean = (m**2 + s**2) / 2 - jnp.log(s) - 0.5
    of_classes = jnp.sum(q * jnp.log(q / 0.3) + (1 - q) * jnp.log((1 - q) / 0.7))
    shift = params["shift"][:, None] + 0.5 * c
    of_shifts = (shift**2 + 0.49) / 2 - jnp.log(0.7) - 0.5
    residuals = jnp.asarray(DATA, c.dtype)[:, None] - m - 2 * c - shift
    of_data = (residuals**2 + s**2 + 0.49 + jnp.log(2 * jnp.pi)) / 2
    return of_mean + of_classes + jnp.sum(jnp.where(c > 0, q, 1 - q) * (of_shifts + of_data))


LOSSES = {
    "default": V.elbo(lanes=2),
    "no baseline": V.elbo({"c": ap.likelihood_ratio(None)}),
    "all scores": V.elbo(default=ap.likelihood_ratio(), lanes=3),
    "own baseline": V.elbo({"c": ap.likelihood_ratio(lambda d: 1.0 + 0 * d.logits)}, sticking_the_landing=True),
}


of = lambda name, size=None: lambda key, params: LOSSES[name].loss(key, params, model, guide, DATA, size=size)


@pytest.mark.long
def test_the_elbo_of_a_model_is_certified():
    gradient = jax.jit(jax.grad(of("default"), argnums=1))
    ap.testing.certify(gradient, exact_loss, PARAMS, num_estimates=10_000, resolution=1.0, order=2)


@pytest.mark.long
def test_elbos_of_all_estimators_and_of_minibatches_are_unbiased():
    estimates = {name: of(name) for name in ("default", "no baseline", "own baseline")}
    estimates |= {f"minibatches, {name}": of(name, 2) for name in ("default", "all scores")}
    assert_unbiased(estimates, dict.fromkeys(estimates, exact_loss), PARAMS, 1, 10_000)


def test_costs_are_added_up_before_choices_pay_for_them():
    def twice(x):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        with numpyro.plate("data", 7):
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x)
            numpyro.sample("y", dist.Normal(z, 2.0), obs=x)

    coin = lambda x: numpyro.sample("z", dist.Bernoulli(logits=numpyro.param("logit", 0.0)))
    program = jax.make_jaxpr(lambda p: V.elbo(lanes=4).loss(KEY, p, twice, coin, jnp.ones(7)))({"logit": 0.0})
    assert str(program).count("= expm1") == 3  # two sums of costs, and log q


def moments(elbo, *args, estimates):
    """Of an ELBO's gradient at the parameters, which come first among the arguments."""
    return ap.testing.moments(lambda key: jax.grad(elbo.loss, argnums=1)(key, *args), KEY, estimates)


def test_a_choice_in_a_plate_pays_for_its_own_datum_and_less_than_without_a_baseline():
    variance = lambda elbo: np.sum(moments(elbo, PARAMS, model, guide, DATA, estimates=4000).variance["logits"])
    with jax.numpy_dtype_promotion("standard"):
        graph = variance(TraceGraph_ELBO(4))
    np.testing.assert_allclose(variance(V.elbo({"c": ap.likelihood_ratio(None)}, lanes=4)), graph, rtol=0.2)
    assert variance(V.elbo(lanes=4)) < 0.5 * graph


def enumerated(model, guide, outcomes):
    """The exact loss of discrete choices: a sum over all of their outcomes, by NumPyro's densities."""

    def term(params, outcome):
        log_q, log_p = (numpyro.infer.util.log_density(f, (), {}, params | outcome)[0] for f in (guide, model))
        return jnp.exp(log_q) * (log_q - log_p)

    return lambda params: jnp.sum(jax.vmap(term, (None, 0))(params, outcomes))


W = jnp.array([0.5, -1.0, 2.0])
TABLES = jnp.array([[0.2, 1.0], [0.7, -0.4], [-0.3, 0.6]])


def guide_of_three():
    with numpyro.plate("N", 3):
        return numpyro.sample("a", dist.Bernoulli(logits=numpyro.param("logits", jnp.zeros(3))))


def reentered_guide():
    numpyro.sample("b", dist.Bernoulli(logits=2.0 * jnp.sum(guide_of_three() * W)))


def reentered_model():
    with numpyro.plate("N", 3):
        numpyro.sample("a", dist.Bernoulli(0.3))
    b = numpyro.sample("b", dist.Bernoulli(0.9))
    with numpyro.plate("N", 3):
        numpyro.sample("x", dist.Normal(2.0 * b, 1.0), obs=DATA)


MIXES = {
    "sum": lambda a: jnp.sum(a.astype(jnp.float32) * W),
    "matrix": lambda a: a.astype(jnp.float32) @ jnp.array([[1.0, 2.0, 0.0], [0.0, -1.0, 0.5], [0.3, 0.0, 1.0]]),
    "neighbour": lambda a: (a + 2 * jnp.roll(a, 1)).astype(jnp.float32),
    "scan": lambda a: jax.lax.scan(lambda c, x: (c + x, c + x), 0, a)[1].astype(jnp.float32),
    "sum and own": lambda a: (jnp.sum(a) + a).astype(jnp.float32),
    "own": lambda a: TABLES[jnp.arange(3), a],
    "looked up": lambda a: TABLES[0][a],
}


@pytest.mark.parametrize("mix", [*MIXES, "a plate entered again"])
def test_a_choice_in_a_plate_pays_for_all_members_and_choices_that_depend_on_it(mix):
    def model():
        with numpyro.plate("N", 3):
            a = numpyro.sample("a", dist.Bernoulli(0.3))
            numpyro.sample("x", dist.Normal(MIXES[mix](a), 1.0), obs=DATA)

    model, guide = (model, guide_of_three) if mix in MIXES else (reentered_model, reentered_guide)
    outcomes = np.array(list(itertools.product([0, 1], repeat=4)))
    outcomes = {"a": outcomes[::2, :3]} if mix in MIXES else {"a": outcomes[:, :3], "b": outcomes[:, 3]}
    with jax.numpy_dtype_promotion("standard"):
        truth = jax.jit(jax.grad(enumerated(model, guide, outcomes)))({"logits": PARAMS["logits"]})
    gradient = lambda key: jax.grad(V.elbo(lanes=10).loss, argnums=1)(key, {"logits": PARAMS["logits"]}, model, guide)
    ap.testing.assert_unbiased(gradient, jax.tree.map(np.asarray, truth), KEY, 2000)


def test_a_member_that_is_found_by_its_number_pays_for_its_own_cost_alone():
    """The variance of a choice's gradient does not grow with what other members cost."""

    def variance(data):
        def model():
            with numpyro.plate("N", 2):
                c = numpyro.sample("c", dist.Categorical(logits=jnp.zeros((2, 2))))
                numpyro.sample("x", dist.Normal(TABLES[0][c], 1.0), obs=data)

        def guide():
            with numpyro.plate("N", 2):
                numpyro.sample("c", dist.Categorical(logits=numpyro.param("logits", jnp.zeros((2, 2)))))

        found = moments(V.elbo(lanes=2), {"logits": jnp.zeros((2, 2))}, model, guide, estimates=200)
        return found.variance["logits"][0, 0]

    np.testing.assert_allclose(variance(jnp.array([1.0, 100.0])), variance(jnp.array([1.0, 1.0])), rtol=1e-3)


@pytest.mark.parametrize("to_event", [False, True])
def test_sticking_the_landing_keeps_the_jacobian_that_a_delta_carries(to_event):
    def model():
        numpyro.sample("z", dist.Gamma(2.0, 1.0).expand([1]).to_event(1) if to_event else dist.Gamma(2.0, 1.0))

    def guide():
        u = numpyro.sample("u", dist.Normal(numpyro.param("a", 0.0), 0.5), infer={"is_auxiliary": True})
        z = jnp.exp(u)[None] if to_event else jnp.exp(u)
        numpyro.sample("z", dist.Delta(z, log_density=-u, event_dim=int(to_event)))

    elbo = V.elbo(lanes=100, sticking_the_landing=True)
    gradient = jax.grad(lambda key, a: elbo.loss(key, {"a": a}, model, guide), argnums=1)
    truth = float(jnp.exp(0.1 + 0.125) - 2.0)  # E[exp(u)] - 2 u
    ap.testing.assert_unbiased(lambda key: gradient(key, 0.1), truth, KEY, 500)


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("Multivariate", "LowRankMultivariate")]


@pytest.mark.parametrize("name", ["Diagonal", *LONG])
def test_sticking_the_landing_has_the_mean_of_the_elbo_with_automatic_guides(name):
    def model():
        z = numpyro.sample("z", dist.Gamma(2.0, 1.0))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=1.5)

    guide = getattr(numpyro.infer.autoguide, f"Auto{name}Normal")(model)
    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    with jax.numpy_dtype_promotion("standard"):
        params = svi.get_params(svi.init(KEY))
    elbos = (V.elbo(lanes=10, sticking_the_landing=flag) for flag in (True, False))
    assert_the_same_gradient(*elbos, params, model, guide)


class WithoutInverse(numpyro.distributions.transforms.AffineTransform):
    def _inverse(self, y):
        raise NotImplementedError("it has no inverse.")


def test_a_flow_needs_no_inverse_and_its_density_knows_what_was_rounded():
    """A sample of a pathwise site comes with what was transformed to it, as in NumPyro's bounds."""
    transforms = numpyro.distributions.transforms

    def loss(m, step, **options):
        flow = lambda m: dist.TransformedDistribution(dist.Normal(m, 0.5), step).expand([2]).to_event(1)
        guide = lambda: numpyro.sample("z", flow(numpyro.param("m", 0.0)))
        model = lambda: numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        return V.elbo(lanes=4, **options).loss(KEY, {"m": m}, model, guide)

    slope = lambda step: jax.jit(jax.value_and_grad(lambda m: loss(m, step)))
    ways = [slope(step(0.3, 2.0))(0.7) for step in (WithoutInverse, transforms.AffineTransform)]
    np.testing.assert_allclose(*ways, rtol=1e-5)
    # log q of sigmoid(x) is that of x, less log sigmoid'(x), which is -x where the sigmoid is rounded to 1.
    assert abs(slope(transforms.SigmoidTransform())(20.0)[1] - 2) < 1e-5
    for options, words in (
        ({"sticking_the_landing": True}, "score of the site z needs .* no inverse. Leave out sticking_the_landing"),
        ({"default": ap.likelihood_ratio()}, "the site z: it has no inverse"),
    ):
        traced = functools.partial(loss, step=WithoutInverse(0.3, 2.0), **options)
        refused(TypeError, words, jax.eval_shape, traced, 0.7)


def test_a_transformed_site_with_a_density_of_its_own():
    """Which takes the sample alone, without what was transformed to it."""
    guide = lambda: numpyro.sample("z", dist.FoldedDistribution(dist.Normal(numpyro.param("m", 0.0), 0.5)))
    model = lambda: numpyro.sample("z", dist.FoldedDistribution(dist.Normal(0.3, 0.5)))
    assert V.elbo(lanes=4).loss(KEY, {"m": 0.3}, model, guide) == 0


def test_sticking_the_landing_refuses_a_support_that_moves():
    model = lambda: numpyro.sample("z", dist.Normal(0.0, 1.0))
    guide = lambda: numpyro.sample("z", dist.Uniform(0.0, numpyro.param("t", 1.0)))

    def run(**options):
        jax.eval_shape(jax.grad(lambda t: V.elbo(lanes=2, **options).loss(KEY, {"t": t}, model, guide)), 2.0)

    words = "bounds of the support of Uniform depend on a differentiated parameter"
    refused(TypeError, words, run, sticking_the_landing=True)
    run()  # without it the derivative of the density is kept, which is right


def assert_the_same_gradient(ours, theirs, params, model, guide, *data):
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = (moments(elbo, params, model, guide, *data, estimates=1000) for elbo in (ours, theirs))
    for name, mean in ours.mean.items():
        errors = np.hypot(ours.standard_error[name], theirs.standard_error[name])
        assert np.all(np.abs(mean - theirs.mean[name]) <= 4.5 * errors + 1e-5), name


@pytest.mark.parametrize("estimator", [ap.reparameterization(), ap.likelihood_ratio()], ids=["RP", "LR"])
def test_a_site_of_several_samples_is_that_of_an_expanded_distribution(estimator):
    def pair(site):
        def model():
            numpyro.sample("x", dist.Normal(site("z", dist.Normal(0.0, 1.0)).sum(), 1.0), obs=1.0)

        return model, lambda: site("z", dist.Normal(numpyro.param("m", 0.0), 0.5))

    several = pair(lambda name, d: numpyro.sample(name, d, sample_shape=(3,)))
    expanded = pair(lambda name, d: numpyro.sample(name, d.expand((3,))))
    loss = jax.value_and_grad(ap.variational.elbo(lanes=4, default=estimator).loss, argnums=1)
    found = jax.jit(lambda params: [loss(KEY, params, *functions) for functions in (several, expanded)])({"m": 0.4})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)


def test_a_site_whose_value_is_substituted_is_a_cost():
    fixed = numpyro.handlers.substitute(guide, {"c": jnp.array([1, 0, 1])})
    assert_the_same_gradient(V.elbo(lanes=4), Trace_ELBO(4), PARAMS, model, fixed, DATA)


def test_a_site_of_the_guide_in_a_loop_or_branch_of_numpyro_is_refused():
    """NumPyro has drawn it by then, as a substituted one is, but of parameters: it would have no score."""
    draw = lambda carry, _: (carry, numpyro.sample("z", dist.Bernoulli(logits=carry)))
    branch = lambda m: draw(m, None)
    scanned = lambda m: control_flow.scan(draw, m, None, length=1)
    branched = lambda m: control_flow.cond(True, branch, branch, m)
    words = "the guide latent site z was drawn in a scan or cond of NumPyro"
    for drawn in (scanned, branched):
        guide = lambda drawn=drawn: drawn(numpyro.param("m", 0.0))
        refused(ValueError, words, V.elbo(lanes=2).loss, KEY, {"m": 0.4}, lambda: None, guide)


def test_a_latent_site_of_the_model_in_a_branch_of_numpyro_is_refused():
    """NumPyro's `scan` replays the guide's sample, its `cond` draws another one: also one in the other."""

    def step(loc, x):
        z = numpyro.sample("z", dist.Normal(loc, 1.0))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x)
        return z, None

    branch = lambda carry, x: control_flow.cond(x > 0, lambda x: step(carry, x), lambda x: step(carry, x), x)
    scanned = lambda step: lambda: control_flow.scan(step, 0.0, jnp.arange(3.0))
    alone = lambda: branch(0.0, jnp.ones(()))
    guide = lambda: numpyro.sample("z", dist.Normal(numpyro.param("m", 0.0), 0.5))

    def loss(model, m, guide=guide):
        return jax.eval_shape(lambda m: V.elbo(lanes=2).loss(KEY, {"m": m}, model, guide), m)

    loss(scanned(step), jnp.zeros(3))
    for model, m in ((alone, 0.0), (scanned(branch), jnp.zeros(3))):
        refused(ValueError, r"the model latent site \['z'\] .* NumPyro's cond draws", loss, model, m)
    loss(numpyro.handlers.condition(alone, {"z": jnp.ones(())}), 0.0, lambda: None)


def test_what_does_not_fit_is_an_error():
    ratio = ap.likelihood_ratio()
    run = lambda estimators, guide, **options: V.elbo(estimators, **options).loss(KEY, PARAMS, model, guide, DATA)
    words = r"the guide has no site \['z'\]; its sites are \['c', 'e', 'mu'\]"
    refused(ValueError, words, run, {"z": ratio}, guide, lanes=2)
    refused(ValueError, "the baseline of c is a mean over other lanes", run, {"c": ratio}, guide)
    pathwise, mixed = {"c": ap.reparameterization()}, {"mu": ap.total_propagation()}
    refused(TypeError, "the site c: reparameterization needs a pathwise derivative", run, pathwise, guide)
    refused(TypeError, r"mixes estimators by what all lanes.*ap\.expectation", run, mixed, guide)
    refused(TypeError, r"disarm looks at a choice's alternatives.*ap\.choose", run, None, guide, default=ap.disarm())
    refused(TypeError, "got function", run, {"c": ap.likelihood_ratio}, guide)
    refused(ValueError, "must be an integer of at least 1", run, None, guide, lanes=0)
    refused(ValueError, r"latent site mu is not in the guide.*handlers\.condition", run, None, lambda data: None)
    masked = numpyro.handlers.mask(guide, mask=DATA > 0)
    words = "the site c: likelihood_ratio: the log_prob of MaskedDistribution"
    refused(TypeError, words, run, None, masked, lanes=2)
