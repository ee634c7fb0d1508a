"""The ELBO of a NumPyro model and guide, with an estimator for each site.

The loss is E[sum of log q of the guide's sites - sum of log p of the model's sites]: each site is a cost, an array over
the plates that the site is in. A choice with a score pays for the costs that depend on it, as in NumPyro's
`TraceGraph_ELBO` (Schulman et al., 2015): the dependence is read from the program. In a plate that both are in, a
member's choice pays for the member's cost alone if the program shows that no other member's cost depends on it. With l
the zeros with the derivatives of the log-densities of a cost c's choices, the loss is the mean over lanes of the sum of

    c exp(sum of l) - b (exp(sum of l) - 1) ,

with b the mean of c over the other lanes (`dice` of `_ports.py`): derivatives of any order are right in expectation.

The cost log q has a derivative at the fixed sample too, the score, which is zero in expectation. So at choices with a
score, q(z; phi) / q(z) - 1 is taken off the loss: its first derivative is the score, and all its derivatives have mean
0. A `Delta`, whose support moves, keeps the derivative of its `log_density`, a Jacobian in NumPyro's guides.

Plates that subsample draw one minibatch for all lanes, so that a baseline is the mean of the same data's costs.
"""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax import lax
from numpyro.primitives import Messenger

from apgrad._ground.arguments import whole
from apgrad._ground.messages import Static
from apgrad._ground.primitives import zero_with_gradient
from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import nested, trace
from apgrad.expectations import _distributions as distributions
from apgrad.expectations._lanes import mean_of_others
from apgrad.expectations._ports import dice
from apgrad.expectations._programs.dependence import agree, dependence
from apgrad.expectations.estimators import _baselines as baselines
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator, per_lane
from apgrad.expectations.estimators._discrete import base
from apgrad.expectations.estimators._estimator import Estimator, Mixer, require_derivative, surrogate
from apgrad.expectations.estimators._likelihood_ratio import likelihood_ratio
from apgrad.expectations.estimators._reparameterization import reparameterization


def elbo(
    estimators: Mapping[str, Estimator] | None = None,
    lanes: int = 1,
    *,
    default: Estimator | None = None,
    sticking_the_landing: bool = False,
) -> Any:
    """A `numpyro.infer.ELBO` for NumPyro's `SVI`, whose gradient is estimated as each site's estimator says.

    Args:
      estimators: estimators for sites of the guide, by the sites' names.
      lanes: how many independent samples of the guide the estimate is the mean of: NumPyro's particles.
      default: the estimator of all other sites; None is `reparameterization()` where the distribution has a pathwise
        derivative, and else `likelihood_ratio()`, without a baseline where there is one lane.
      sticking_the_landing: take the score of q out of the derivative at sites with a pathwise derivative (Roeder et
        al., 2017). Where the support moves with a differentiated parameter, as a uniform's bounds, this is an error.

    Raises:
      TypeError: for what is no estimator, and at trace time for a distribution without what its estimator needs.
      ValueError: at trace time, for an estimator whose name is no site of the guide, a latent site of the model that
        the guide lacks or that NumPyro's `cond` draws, or a leave-one-out baseline with one lane.

    Example:
      >>> import jax, numpyro, numpyro.distributions as dist, apgrad as ap
      >>> def model(x):
      ...     z = numpyro.sample("z", dist.Bernoulli(0.5))
      ...     numpyro.sample("x", dist.Normal(2.0 * z, 1.0), obs=x)
      >>> guide = lambda x: numpyro.sample("z", dist.Bernoulli(logits=numpyro.param("logit", 0.0)))
      >>> elbo = ap.variational.elbo({"z": ap.likelihood_ratio()}, lanes=1000)
      >>> loss = lambda params: elbo.loss(jax.random.key(0), params, model, guide, 1.5)
      >>> float(jax.jit(jax.grad(loss))({"logit": 0.0})["logit"]).__round__(1)  # the exact value is -0.25
      -0.2
    """
    estimators = dict(estimators or {})
    of_others = [] if default is None else [("default", default)]
    for name, estimator in [*estimators.items(), *of_others]:
        if not isinstance(estimator, Estimator):
            raise TypeError(f"variational.elbo: {name} takes estimators as ap.likelihood_ratio(), {_unfit(estimator)}")
        baselines.require_baseline(f"variational.elbo: {name}", estimator.baseline)
        require_derivative(f"variational.elbo: {name}", estimator)
    return _ELBO(estimators, whole("the lanes of variational.elbo", lanes), default, sticking_the_landing)


class _ELBO(numpyro.infer.ELBO):
    can_infer_discrete = True

    def __init__(self, estimators, lanes, default, sticking_the_landing):
        super().__init__(num_particles=lanes)
        self.estimators, self.default, self.sticking = estimators, default, sticking_the_landing

    def choose(self, name: str, distribution: Any, key: jax.Array) -> Estimator:
        estimator = self.estimators.get(name, self.default)
        if estimator is not None:
            return estimator
        try:
            jax.eval_shape(lambda key: distributions.pathwise_sample(name, distribution, key), key)
        except TypeError:
            return likelihood_ratio("leave_one_out" if self.num_particles > 1 else None)
        return reparameterization()

    def loss(self, rng_key, param_map, model, guide, *args, **kwargs):
        shared_key, lane_key = jax.random.split(rng_key)

        def run(key, given=None, noise=None):
            return _run(self, key, shared_key, param_map, model, guide, args, kwargs, given, noise)

        sites, costs, _ = jax.eval_shape(run, lane_key)
        self._check(sites)
        if looped := sorted(name.partition(" ")[2] for name, cost in costs.items() if cost.looped.value):
            _require_replayed(looped, lambda noise: run(lane_key, noise=noise)[1], lane_key)
        values = {name: site.value for name, site in sites.items() if site.zero is not None}
        causes = _causes(lambda values: run(lane_key, values), values)
        sites, costs, free = jax.vmap(run)(jax.random.split(lane_key, self.num_particles))
        total = sum(_own_baseline(sites[name]) for name in sorted(values) if sites[name].baseline is not None)
        alike: dict[Any, _Cost] = {}  # costs of one shape that the same choices pay for are added up first
        for name, cost in costs.items():
            paying = tuple((cause, frozenset(causes[name][cause])) for cause in sorted(causes[name]))
            of = cost.value.shape, cost.plates.value, paying
            alike[of] = cost._replace(value=alike[of].value + cost.value) if of in alike else cost
        for (*_, paying), cost in alike.items():
            total += _charged(cost, [(sites[cause], members) for cause, members in paying])
        return jnp.mean(total - free)

    def _check(self, sites: dict[str, Any]) -> None:
        if absent := set(self.estimators) - set(sites):
            raise ValueError(f"variational.elbo: the guide has no site {sorted(absent)}; its sites are {sorted(sites)}")
        for name, site in sites.items():
            if self.num_particles == 1 and _leaves_one_out(site):
                alone = f"the baseline of {name} is a mean over other lanes, and there is one lane"
                raise ValueError(f"variational.elbo: {alone}: give lanes=2, or likelihood_ratio(baseline=None)")


def _unfit(estimator: Any) -> str:
    instead = "write the model as a program of ap.expectation"
    if isinstance(estimator, Mixer):
        return f"and {estimator.name} mixes estimators by what all lanes send back: {instead}"
    if isinstance(estimator, ChoiceEstimator):
        return f"and {estimator.name} looks at a choice's alternatives: {instead} and use ap.choose"
    return f"got {type(estimator).__name__}"


def _require_replayed(looped, costs, key):
    """Raises a `ValueError` where a cost of the model depends on noise of the model's own, and not on the guide's."""
    program, _ = trace(costs, key)
    into = lambda eqn, facts: None if nested(eqn) is not None else [any(facts)] * len(eqn.outvars)
    if any(flow(program, [True], into, lambda a, b: a or b, lambda _: False)):
        why = "NumPyro's cond draws it anew, where its scan takes the guide's sample"
        instead = "Write jnp.where in place of the cond, or the model as a program of ap.expectation"
        raise ValueError(f"variational.elbo: the model latent site {looped} is in a branch, and {why}. {instead}")


def _causes(run, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The choices with a score that each cost depends on, also by way of other choices' distributions."""

    def outputs(values):
        sites, costs, _ = run(values)
        return {name: sites[name].zero for name in values}, {name: cost.value for name, cost in costs.items()}

    program, shapes = trace(outputs, values)
    batch = {name: zero.ndim for name, zero in shapes[0].items()}
    # A fact is what an array depends on: choices, and where in the array each axis of a choice's batch is found again.
    inputs = [{name: {axis - batch[name]: axis for axis in range(batch[name])}} for name in sorted(values)]
    leaves, structure = jax.tree.flatten(shapes)
    facts = [
        {name: {dim: dim for dim, axis in axes.items() if axis - x.ndim == dim} for name, axes in fact.items()}
        for fact, x in zip(dependence(program, inputs), leaves, strict=True)
    ]
    direct, of_costs = jax.tree.unflatten(structure, facts)

    def by_way_of(fact, further):
        for near, dims in fact.items():
            far = {name: dict(dims.items() & on.items()) for name, on in further[near].items() if name != near}
            fact = agree(fact, far)
        return fact

    further = direct
    for _ in values:  # a chain of choices is no longer than there are choices
        further = {name: by_way_of(fact, further) for name, fact in direct.items()}
    return {name: by_way_of(fact, further) for name, fact in of_costs.items()}


class _Site(NamedTuple):
    """A site of the guide: its sample, and with a score the zeros of its log-density and a baseline."""

    estimator: Static
    plates: Static
    value: Any
    zero: Any
    baseline: Any


class _Cost(NamedTuple):
    value: Any
    plates: Static
    looped: Static  # whether it is of a latent site of the model in NumPyro's scan or cond


class _Draw(Messenger):
    def __init__(self, function, elbo, given):
        super().__init__(function)
        self.elbo, self.given, self.sites, self.substituted = elbo, given, {}, set()

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        if msg["value"] is not None:
            # NumPyro marks what it has drawn itself, in a loop or branch, which is refused. Any other value is there by
            # `handlers.substitute`: it is a given number, and its density is a cost.
            if not msg.get("_control_flow_done"):
                self.substituted.add(msg["name"])
            return
        name, distribution, key = msg["name"], msg["fn"], msg["kwargs"]["rng_key"]
        several = msg["kwargs"].get("sample_shape")
        if several:
            distribution = distribution.expand((*several, *distribution.batch_shape))
        estimator = self.elbo.choose(name, distribution, key)
        given = None if self.given is None else self.given.get(name)
        try:
            drawn, zero = surrogate(estimator, distribution, key, given)
        except (TypeError, NotImplementedError) as error:
            raise TypeError(f"variational.elbo: the site {name}: {error}") from error
        baseline = None
        if zero is not None:
            zero = distributions.guarded(f"{name} ({estimator.name})", distribution, zero)
            baseline = baselines.evaluate(estimator.baseline, None, (distribution,))["baseline"]
            baseline = None if isinstance(baseline, str) else baseline
        elif not several and estimator == reparameterization() and _keeps_bases(distribution):
            # As in NumPyro: log q of a flow needs no inverse then, and no rounding of the sample is in it.
            drawn, msg["intermediates"] = distribution.sample_with_intermediates(key)
        msg["value"] = drawn if given is None else given
        self.sites[name] = _Site(Static(estimator), _plates(msg), msg["value"], zero, baseline)


def _keeps_bases(distribution: Any) -> bool:
    """Whether samples come with what was transformed to them, which has the derivative of the sample, in float32."""
    transformed = type(base(distribution)).log_prob is numpyro.distributions.TransformedDistribution.log_prob
    return transformed and distribution.has_rsample and distributions.widened(distribution) is distribution


class _OneMinibatch(Messenger):
    def __init__(self, function, key):
        super().__init__(function)
        self.key = key

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["value"] is None:
            key = jax.random.fold_in(self.key, zlib.crc32(msg["name"].encode()))
            msg["value"] = msg["fn"](*msg["args"], rng_key=key)


def _run(elbo, key, shared_key, params, model, guide, args, kwargs, given, noise):
    """One lane: the sites of the guide, the costs of all sites, and what takes scores out of log q."""
    handlers = numpyro.handlers
    guide_key, model_key = jax.random.split(key)
    model_key = model_key if noise is None else noise
    batched = _OneMinibatch(handlers.substitute(guide, data=params), shared_key)
    with distributions.standard_promotion():
        draw = _Draw(handlers.seed(batched, guide_key), elbo, given)
        guide_trace = handlers.trace(draw).get_trace(*args, **kwargs)
        replayed = handlers.replay(handlers.substitute(model, data=params), guide_trace)
        seeded = handlers.seed(_OneMinibatch(replayed, shared_key), model_key)
        model_trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        costs, free = {}, jnp.zeros(())
        for sign, prefix, found in ((1.0, "guide ", guide_trace), (-1.0, "model ", model_trace)):
            for name, site in found.items():
                if site["type"] != "sample":
                    continue
                drawn = draw.sites.get(name)
                if drawn is None and not (site["is_observed"] or name in draw.substituted):
                    why = "is not in the guide: sample it there, or fix it with numpyro.handlers.condition"
                    if prefix == "guide ":
                        why = "was drawn in a scan or cond of NumPyro: write the loop out, or use ap.expectation"
                    raise ValueError(f"variational.elbo: the {prefix}latent site {name} {why}")
                if site["intermediates"]:
                    log_prob = _scaled(site, site["fn"].log_prob(site["value"], site["intermediates"]))
                else:
                    log_prob = _scaled(site, distributions.log_prob(site["fn"], site["value"]))
                fixed = not isinstance(base(site["fn"]), numpyro.distributions.Delta)
                if prefix == "guide " and drawn is not None and (drawn.zero is not None or (elbo.sticking and fixed)):
                    # The derivative of log q at a fixed sample has a variance and no mean; see the module's text.
                    distributions.require_unrounded(name, site["fn"], site["value"])
                    try:
                        score = distributions.score(name, site["fn"], lax.stop_gradient(site["value"]))
                    except NotImplementedError as error:
                        why = f"the score of the site {name} needs what it lacks: {error}"
                        raise TypeError(f"variational.elbo: {why} Leave out sticking_the_landing.") from error
                    score = distributions.guarded(name, site["fn"], score)
                    free = free + jnp.sum(_scaled(site, jnp.expm1(score)))
                looped = prefix == "model " and not site["is_observed"] and site.get("_control_flow_done", False)
                costs[prefix + name] = _Cost(sign * log_prob, _plates(site), Static(looped))
    return draw.sites, costs, free


def _scaled(site, density):
    return density if site["scale"] is None else site["scale"] * density


def _plates(site) -> Static:
    """The plates that a site is in, a set: name, axis from the right, size."""
    return Static(frozenset((frame.name, frame.dim, frame.size) for frame in site["cond_indep_stack"]))


def _learned(site: _Site) -> bool:
    return isinstance(site.estimator.value.baseline, baselines.LearnedBaseline)


def _leaves_one_out(site: _Site) -> bool:
    estimator = site.estimator.value
    return estimator.score is not None and isinstance(estimator.baseline, str)


def _summed_to(x: jax.Array, shared: Any, shape: tuple[int, ...]) -> jax.Array:
    """A choice's array (lanes, *batch), summed over all but the shared axes, so that it broadcasts to the shape."""
    x = jnp.sum(x, axis=tuple(a for a in range(1, x.ndim) if a - x.ndim not in shared), keepdims=True)
    # Axes beyond those of the cost have been summed, and axes that the choice lacks are put in after the lanes.
    return x.reshape(x.shape[0], *[1] * (len(shape) - x.ndim), *x.shape[1:][max(0, x.ndim - len(shape)) :])


def _charged(cost: _Cost, choices: list[tuple[_Site, Any]]) -> jax.Array:
    """A cost of all lanes with the scores of the choices that it depends on, summed to (lanes,)."""
    zeros = others = regression = jnp.zeros(())
    shape = cost.value.shape
    for site, members in choices:
        shared = {dim for _, dim, _ in cost.plates.value & site.plates.value if dim in members}
        zero = _summed_to(site.zero, shared, shape)
        zeros = zeros + zero
        if _leaves_one_out(site):
            others = others + zero
        if _learned(site):
            regression = regression - _summed_to(zero_with_gradient(site.baseline), shared, shape)
    # Axes along which no choice is charged by member are summed first.
    value = jnp.sum(cost.value, tuple(a for a in range(1, zeros.ndim) if zeros.shape[a] == 1), keepdims=True)
    less = dice(0, others, lax.stop_gradient(mean_of_others(value, 1))) if others.ndim else 0
    return per_lane(dice(value, zeros) + less + lax.stop_gradient(value) * regression)


def _own_baseline(site: _Site) -> jax.Array:
    """What a choice's own baseline adds to the loss, (lanes,): zero in value and expectation."""
    zero, baseline = site.zero, site.baseline
    if jnp.shape(baseline) != zero.shape:
        raise ValueError(f"the baseline of a site has shape {jnp.shape(baseline)[1:]}, expected {zero.shape[1:]}")
    term = dice(0, zero, lax.stop_gradient(baseline))
    if _learned(site):
        term = term + zero_with_gradient(baseline**2 / 2)
    return per_lane(term)
