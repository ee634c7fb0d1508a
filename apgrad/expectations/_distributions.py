"""What estimators ask of a distribution.

A distribution is a pytree with `sample(key)` and `log_prob(x)`, as NumPyro's are. A distribution with a pathwise
derivative says so by `has_rsample` and has `rsample(key)`; if it has a `cdf(x)` instead, the derivative follows from
the implicit function theorem. Besides, `batch_shape` and `support` are used if they exist.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import lax
from jax.scipy.special import gammaln
from numpyro.distributions import constraints, transforms as to

from apgrad._ground.primitives import refuse_derivative, refuse_second_derivative, zero_with_gradient
from apgrad.expectations import _supports as supports


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Lets distribution libraries mix dtypes and ranks, as they do, where users' code runs in JAX's strict modes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


_unvalidated = jax.make_user_context(False)  # functions jitted or checkpointed within are traced anew


@contextlib.contextmanager
def without_validation() -> Iterator[None]:
    """In this context NumPyro's `log_prob` is its formula outside of the support, too; else it may be -inf there."""
    with numpyro.validation_enabled(False), _unvalidated(True):
        yield


def require_distribution(what: str, distribution: Any) -> None:
    name = type(distribution).__name__
    if not (callable(getattr(distribution, "sample", None)) and callable(getattr(distribution, "log_prob", None))):
        raise TypeError(f"{what} needs a distribution, with sample and log_prob as NumPyro's, got {name}")
    if jax.tree_util.all_leaves([distribution]):
        leaf = f"{name} is a leaf: its parameters would get no gradient. Use jax.tree_util.register_dataclass."
        raise TypeError(f"{what} needs a distribution that is a pytree, and {leaf}")


def widened(distribution: Any) -> Any:
    """The distribution with parameters of float32 at least: uniform numbers in bfloat16 are multiples of 1/128."""
    if not any(map(_is_half, jax.tree.leaves(distribution))):
        return distribution
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) if _is_half(x) else x, distribution)


def _is_half(x) -> bool:
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def sample(distribution: Any, key: jax.Array) -> jax.Array:
    """A sample without derivative, in the dtype of the distribution's parameters."""
    return lax.stop_gradient(_draw(distribution, "sample", key))


def before_rounding(distribution: Any, key: jax.Array, x: jax.Array) -> jax.Array:
    """What `x`, the sample of this key, was before it was rounded to half precision: the score is taken there.

    E[f(round(y)) score(y)] is the derivative of E[f(round(y))]. With score(round(y)) it would be too large by the
    fraction d^2 / (12 s^2) for a normal of scale s, d being the distance between neighbouring numbers. The result is
    NaN where `x` is not this key's sample, since an estimator may draw its own. A relaxed choice counts as not rounded.
    """
    if not _is_half(x):
        return x
    with standard_promotion():
        wide = lax.stop_gradient(widened(distribution).sample(key))
        if not jnp.issubdtype(wide.dtype, jnp.floating):
            return x
        of_key = jnp.abs(wide - x) <= float(jnp.finfo(x.dtype).eps) * jnp.abs(wide)
        return jnp.where(of_key | (wide.astype(x.dtype) == x), wide, jnp.nan)


def require_unrounded(what: str, distribution: Any, x: jax.Array) -> None:
    """Refuses rounded samples where the score is at the sample itself: see `before_rounding`."""
    if _is_half(x) and not any(supports.is_discrete(p, jax.random.key(0)) for p in supports.parts_of(distribution)):
        raise TypeError(
            f"{what}: samples of {type(distribution).__name__} in {x.dtype} are rounded, and the score at a rounded "
            "sample is biased. Give the distribution parameters in float32, and round its samples where they are used."
        )


def pathwise_sample(what: str, distribution: Any, key: jax.Array) -> jax.Array:
    """A sample x whose derivative is the pathwise one, in the dtype of the distribution's parameters.

    The derivative is that of `rsample`, or for a continuous univariate distribution with a `cdf` F and density f the
    implicit one, dx = - (dF / dtheta) / f dtheta (Figurnov et al., 2018). It is made by Newton steps for F(x; theta) =
    F(x_0; theta_0) from the sample x_0. They do not move x_0, and three of them give seven right derivatives.
    """

    def refuse(reason):
        name = type(distribution).__name__
        raise TypeError(f"{what} needs a pathwise derivative, and {name} has none: {reason}. Use likelihood_ratio().")

    parts = supports.parts_of(distribution)[::-1]  # the innermost first, so that errors name what is at fault
    has_rsample = getattr(distribution, "has_rsample", hasattr(distribution, "rsample"))
    for part in parts:
        if supports.is_discrete(part, key):
            refuse(f"samples of {type(part).__name__} are discrete, or no floating-point numbers")
        if has_rsample and _claims_rsample_by_default(part):
            instead = "declare arg_constraints and reparametrized_params, or define rsample"
            refuse(f"{type(part).__name__} declares no parameters, so that its has_rsample says nothing; {instead}")
    x = _draw(distribution, "rsample" if has_rsample else "sample", key)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        refuse(f"its samples have dtype {x.dtype}")
    if has_rsample:
        for bend in (bend for part in parts for bend in supports.transforms_of(part) if isinstance(bend, _BENDING)):
            why = f"{type(bend).__name__} bends the way of a sample, and no sample shows the second derivative there"
            x = refuse_second_derivative(x, f"{what}: {why}. Use likelihood_ratio(), as of a FoldedDistribution")
        return x
    x, univariate = lax.stop_gradient(x), widened(distribution)  # JAX's cdfs take no bfloat16
    while isinstance(univariate, supports.WRAPPERS):  # they have no cdf, and their samples are those of what they wrap
        univariate = univariate.base_dist
    if not _has_cdf(univariate, x):
        refuse("it has neither rsample nor, as a continuous univariate distribution, a cdf")
    for part in parts:  # between two intervals a sample would have to jump as the weights of a mixture change
        if not supports.have_one_support(supports.components_of(part)):
            refuse(f"the supports of the components of {type(part).__name__} are not known to be one fixed interval")
    with standard_promotion():
        univariate = as_sampled(univariate)
        for _ in range(3):
            x = x - (zero_with_gradient(univariate.cdf(x)) / jnp.exp(univariate.log_prob(x))).astype(x.dtype)
    return x


def score(what: str, distribution: Any, x: jax.Array) -> jax.Array:
    """Zero, with the derivatives of the log-density at a fixed x, (*batch); NaN where rounding made them wrong."""
    require_density(what, distribution)
    # Validation would take a sample for impossible that was rounded to the bound of its support (an exponential's 0,
    # once in ten million times), though its density is finite and right.
    with standard_promotion(), without_validation():
        density = log_prob(once_at_kinks(what, distribution), lax.stop_gradient(x), own=True)
        rounded = ~jnp.isfinite(lax.stop_gradient(density)) | _is_rounded(distribution, density.shape, x)
        return zero_with_gradient(density) + jnp.where(rounded, jnp.nan, 0.0).astype(density.dtype)


def _is_rounded(distribution: Any, shape, x, step: Any = 0.0, around: tuple[Any, ...] = ()):
    """Whether rounding took from samples, of this batch shape, what their score depends on.

    It did so near a location where neighbouring numbers are more than a quarter of the scale apart: `step` is four
    times their distance, as the inverses of transforms stretch it. For NumPyro's other densities the scale is that of
    log p along a step. It did so where NumPyro clipped a sample away from the ends of the unit interval or the simplex.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    within = lambda found: jnp.any(found, axis=tuple(range(len(shape), found.ndim)))
    clipped = lambda x: within(jnp.logical_or(*_at_ends(x)))
    # Up and down in turns along each axis of an event, so that differences of neighbours move, too.
    parity = lambda x: sum(jnp.indices(x.shape, sparse=True)[len(shape) :], start=jnp.zeros((1,) * x.ndim, int)) % 2
    turns = lambda step: jnp.where(parity(step) == 1, -step, step)
    shaken = lambda function, x, turned: (function(x + turned), function(x - turned))
    at_least = lambda step, x: jnp.maximum(jnp.abs(step), jnp.abs(x) * (4 * float(jnp.finfo(x.dtype).eps)))
    rounded, step = jnp.zeros(shape, bool), at_least(step, x)
    while isinstance(distribution, _AROUND):
        distribution = distribution.base_dist
    tiny, eps = float(jnp.finfo(x.dtype).tiny), float(jnp.finfo(x.dtype).eps)
    # It does Beta and Dirichlet no harm (`_WithEnds`) if the inverses of the transforms around them find the end again.
    of_gammas = [keeps_log_prob(p, _OF_GAMMAS) for p in (distribution, *supports.components_of(distribution))]
    high, low = x >= 1 - 4 * eps, x <= 1.0001 * tiny
    for near, end in ((high, 1 - eps), (high, 1 - 2 * eps), (low, tiny)) if around and any(of_gammas) else ():
        # An end is no constant here: XLA would transform it when it compiles, with other rounding than for samples.
        start = moved = jnp.where(near, jnp.asarray(end, x.dtype), x)
        for move in (*around, *(move.inv for move in reversed(around))):
            moved = move(moved)
        rounded |= within(near & (moved != start))
    around = (*supports.transforms_of(distribution), *around)
    for move in reversed(supports.transforms_of(distribution)):
        rounded |= clipped(x) if isinstance(supports.constraint_of(move, "codomain"), _UNIT) else False
        if isinstance(move, _SMOOTH_MOVES):
            x, step = jax.jvp(move.inv, (x,), (step,))
        elif supports.of_numpyro(type(move)):  # a user's flow or density may be dear, and have no derivative by samples
            sides, x = shaken(move.inv, x, turns(step)), move.inv(x)
            step = jnp.fmax(*(jnp.abs(side - x) for side in sides))  # one may be outside of the domain
        else:
            x, step = move.inv(x), 0.0
        x, step = lax.stop_gradient((x, at_least(step, x)))
    if isinstance(distribution, dist.TransformedDistribution):
        return rounded | _is_rounded(distribution.base_dist, shape, x, step, around)
    beside = isinstance(distribution, dist.MixtureSameFamily)  # whose components have an axis of their own
    for part in supports.components_of(distribution):
        inside, step_inside = (jnp.expand_dims(v, len(shape)) if beside else v for v in (x, step))
        rounded |= _is_rounded(part, shape, inside, step_inside)
    if isinstance(distribution, _LOC_SCALE):
        scale = width = distribution.scale
    elif isinstance(distribution, dist.MultivariateNormal | dist.MultivariateStudentT):
        factor: Any = distribution.scale_tril
        scale = jnp.diagonal(factor, axis1=-2, axis2=-1)  # of each component, given those before it
        width = jnp.linalg.norm(factor, axis=-1)
    elif isinstance(distribution, dist.LowRankMultivariateNormal):
        scale = jnp.sqrt(distribution.cov_diag)
        width = scale + jnp.linalg.norm(jnp.asarray(distribution.cov_factor), axis=-1)
    else:
        support = supports.constraint_of(distribution, "support")
        if keeps_log_prob(distribution, _OF_GAMMAS):
            return rounded
        rounded |= clipped(x) if isinstance(support, _UNIT) else False
        continuous = getattr(support, "is_discrete", True) is False and not supports.components_of(distribution)
        if continuous and supports.of_numpyro(type(distribution)):
            # The second derivative along a step, by slopes: differences of a log-density would be lost in its rounding.
            density = functools.partial(log_prob, lax.stop_gradient(distribution))
            slope = jax.grad(lambda side: jnp.sum(density(side)))
            turned = turns(step)
            one, other = shaken(slope, x, turned)
            event = tuple(range(x.ndim - len(distribution.event_shape), x.ndim))
            bend = jnp.sum((one - other) * turned, axis=event, keepdims=True)
            rounded |= within(jnp.abs(bend) > 2)  # as at a normal's sample, where the step is the scale
        return rounded
    near = jnp.abs(x - distribution.loc) <= 8 * (width + step)
    return rounded | within(near & (step > scale))


def _at_ends(x):
    """Two masks: the samples that NumPyro may have clipped near 0, and those that it may have clipped near 1."""
    limits = jnp.finfo(x.dtype)
    return x <= float(limits.tiny), x >= 1 - float(limits.eps)


def require_density(what: str, distribution: Any) -> None:
    for part in supports.all_parts_of(distribution):
        # The log_prob of a folded distribution knows AbsTransform alone, and NumPyro adds the transforms of its base.
        folds = supports.folds(part) and not (isinstance(part, dist.FoldedDistribution) and len(part.transforms) == 1)
        wrong = f"{what}: the log_prob of {type(part).__name__} is not the density of its samples"
        if isinstance(part, _NOT_A_DENSITY) or folds:
            instead = "Sample what is underneath, and mask, censor or transform in the cost (jnp.where)."
            raise TypeError(f"{wrong}{', with AbsTransform' * folds}: it has no right score. {instead}")
        if not supports.have_one_support(supports.components_of(part)):
            instead = "Sample the component first, by likelihood_ratio()."
            raise TypeError(f"{wrong} unless its components have one support, which is not known. {instead}")


def once_at_kinks(what: str, distribution: Any) -> Any:
    """The distribution; differentiating its score is an error where its density has a kink: a delta function is missed.

    With p = exp(-|x - m|) / 2 and any f, the second derivative of E[f(x)] in m is E[f(x)] - f(m), and no sample shows
    f(m): the mean over samples of f(x) p'' / p, with p'' the second derivative beside the kink, is E[f(x)].
    """

    def kinks(part):
        parts = supports.all_parts_of(part) if isinstance(part, (*_KINKED, dist.TransformedDistribution)) else []
        return [part for part in parts if isinstance(part, _KINKED)]

    def once(part):
        if not (kinked := kinks(part)):
            return part
        reason = (
            f"{what}: the density of {type(kinked[0]).__name__} has a kink at its location, where its second "
            "derivative is a delta function that no sample shows: likelihood ratio has no second derivative with "
            "respect to the location, nor to a transform that may move it. Use reparameterization(), or a smooth "
            "density such as SoftLaplace. Write a scale as the distribution's own, as in Laplace(0.0, scale)."
        )
        part = copy.copy(part)
        if isinstance(part, dist.TransformedDistribution):
            part.base_dist = once_at_kinks(what, part.base_dist)
            part.transforms = refuse_second_derivative(part.transforms, reason)
        else:
            part.loc = refuse_second_derivative(part.loc, reason)
        return part

    return jax.tree.map(once, distribution, is_leaf=lambda part: bool(kinks(part)))


def log_prob(distribution: Any, x: jax.Array, *, own: bool = False) -> jax.Array:
    """The log-density of values, in float32 at least; with `own`, of the distribution's own samples (`_WithEnds`)."""
    return as_sampled(distribution, own).log_prob(widened(x))


def as_sampled(distribution, own=False):
    """The distribution, in float32 at least, with the law of its samples and the derivatives of this law.

    NumPyro's log-densities have wrong derivatives for logits (`_OfLogits`), and for categorical or multinomial
    distributions: samples have the probabilities p / sum p, and log p has other derivatives, even if p sums to 1; the
    cdf of a mixture has these weights p, too. For large logits, such as sums of log-likelihoods, log p is a small
    difference of large numbers: the largest logit is taken off.
    """

    def of_part(part):
        if keeps_log_prob(part, _BY_LOGITS):
            return _OfLogits(part)
        if own and keeps_log_prob(part, _OF_GAMMAS):
            return _WithEnds(part)
        if keeps_log_prob(part, _ON_A_SIMPLEX):
            part, probs = copy.copy(part), jnp.asarray(part.probs)
            part.probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
            vars(part).pop("logits", None)  # computed from the old ones, and kept
        if keeps_log_prob(part, _UP_TO_A_CONSTANT):
            part, logits = copy.copy(part), jnp.asarray(part.logits)
            part.logits = logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        if keeps_log_prob(part, _GATED):
            part = copy.copy(part)
            part.base_dist = mended(part.base_dist)
            return _Gated(part)
        if keeps_log_prob(part, _MIXTURES):
            return _Mixed(jax.tree.map(of_part, part, is_leaf=lambda x: x is not part and mend(x)))
        return _Counts(part) if keeps_log_prob(part, _COUNTS) else part

    of = (*_BY_LOGITS, *_OF_GAMMAS, *_ON_A_SIMPLEX, *_UP_TO_A_CONSTANT, *_GATED, *_MIXTURES, *_COUNTS)
    mend = lambda part: keeps_log_prob(part, of)
    mended = lambda tree: jax.tree.map(of_part, tree, is_leaf=mend)
    return mended(widened(distribution))


def keeps_log_prob(part, classes) -> bool:
    """Whether a distribution is of one of these classes and has its log_prob: a subclass may have another."""
    return any(isinstance(part, base) and type(part).log_prob is base.log_prob for base in classes)


def named(part: Any, classes: tuple[Any, ...]) -> str:
    """Its name in an error that tells of these classes."""
    own = ", a subclass whose log_prob is its own" if isinstance(part, classes) else ""
    return type(part).__name__ + own


class _OfPart(dist.Distribution):
    pytree_data_fields = ("part",)

    def __init__(self, part):
        self.part = part
        super().__init__(part.batch_shape, part.event_shape, validate_args=False)

    @property
    def support(self):  # distributions around it, such as of inflated zeros, ask for it
        return self.part.support

    def cdf(self, value):
        return self.part.cdf(value)

    def __getattr__(self, name):  # a user's distribution around it may read its parameters
        if name == "part":  # copy.copy asks before the copy has a part
            raise AttributeError(name)
        return getattr(self.part, name)


class _OfLogits(_OfPart):
    """The number x of ones among n choices: its log-density is x logits - n softplus(logits) + log (n over x).

    NumPyro's formula has max(logits, 0) and |logits|, so that at a logit of 0 the score of one choice is x instead of x
    - 1/2, and a product inf * 0. Infinite logits become finite ones, at which the other outcome has probability 0. For
    logits above 0 the log-density is that of the n - x zeros, so that no large numbers cancel.
    """

    def log_prob(self, value):
        logits = jnp.asarray(self.part.logits)
        far = float(jnp.finfo(logits.dtype).max) ** 0.5
        logits = jnp.clip(logits, -far, far)
        bernoulli = isinstance(self.part, dist.BernoulliLogits)  # whose x may be a fraction, as the grey of an image
        n = 1 if bernoulli else jnp.asarray(self.part.total_count, logits.dtype)
        ways = 0 if bernoulli else gammaln(n + 1) - gammaln(value + 1) - gammaln(n - value + 1)
        turned, logits = jnp.where(logits > 0, n - value, value), jnp.where(logits > 0, -logits, logits)
        return turned * logits - n * jnp.log1p(jnp.exp(logits)) + ways


class _Gated(_OfPart):
    """Inflated zeros, or a hurdle; derivatives are taken at a gate a little below 1, and for a hurdle above 0.

    NumPyro's are NaN at 1 and 0. The value is that of the gate as it is, so that what it shuts out has no density.
    """

    def log_prob(self, value):
        part = copy.copy(self.part)
        gate = jnp.asarray(part.gate, jnp.result_type(part.gate, float))
        limits, hurdle = jnp.finfo(gate.dtype), isinstance(part, dist.HurdleProbs)
        part.gate = jnp.clip(gate, float(limits.tiny) if hurdle else -1, 1 - float(limits.epsneg))
        return lax.stop_gradient(self.part.log_prob(value)) + zero_with_gradient(part.log_prob(value))


class _Counts(_OfPart):
    """Counts, some of which may have no other possible value than 0: their x log p is 0, with derivatives of 0.

    NumPyro's derivatives are 0 / 0 where a rate or probability is 0, and 0 * inf where a logit is infinite.
    """

    def log_prob(self, value):
        part: Any = copy.copy(self.part)
        x = jnp.asarray(value, jnp.result_type(float))
        none = x == 0
        if isinstance(self.part, dist.MultinomialProbs | dist.MultinomialLogits):
            probs = isinstance(self.part, dist.MultinomialProbs)
            log_p = jnp.log(jnp.where(none, 1, part.probs)) if probs else jax.nn.log_softmax(part.logits)
            return gammaln(part.total_count + 1) + jnp.sum(jnp.where(none, 0, x * log_p) - gammaln(x + 1), axis=-1)
        if isinstance(self.part, dist.Poisson):
            of_none, part.rate = -jnp.asarray(part.rate, x.dtype), jnp.where(none, 1, part.rate)
        else:
            of_none, part.rate = part.concentration * jnp.log1p(-part.probs), 1 / jnp.where(none, 0.5, part.probs) - 1
        return jnp.where(none, of_none, part.log_prob(value))


class _Mixed(_OfPart):
    """A mixture: log p + log(1 + sum of w p_0 / p) for components p_0 whose weight w is 0, and its derivative is not.

    NumPyro's is 0 there, or NaN: a weight that begins at 0 would never move.
    """

    def log_prob(self, value):
        part, mixing = copy.copy(self.part), self.part.mixing_distribution
        if not isinstance(mixing, dist.CategoricalProbs):
            return part.log_prob(value)
        none = mixing.probs == 0
        others = jnp.where(none, 0, mixing.probs)
        part._mixing_distribution = dist.CategoricalProbs(others)  # which divides them by their sum, of 1
        density = part.log_prob(value) + zero_with_gradient(jnp.log(jnp.sum(others, axis=-1)))
        part._mixing_distribution = dist.CategoricalLogits(jnp.zeros_like(mixing.probs))
        ratio = part.component_log_probs(value) + math.log(part.mixture_size) - density[..., None]
        none &= jnp.isfinite(ratio)
        most = math.log(jnp.finfo(density.dtype).max) - 9
        ratio = jnp.exp(jnp.minimum(jnp.where(none, ratio, 0), most))
        return density + jnp.log1p(jnp.sum(jnp.where(none, mixing.probs, 0) * ratio, axis=-1))


class _WithEnds(_OfPart):
    """A Beta or Dirichlet distribution; at a clipped sample the derivative is that of all the mass clipped to it.

    NumPyro clips samples to [tiny, 1 - eps]: a tenth of the samples, with concentrations of a tenth. A share with the
    concentration a has the density C e^(a - 1) at a small e, and the mass C e^a / a below it. So the derivative of the
    log-mass is that of the log-density plus that of -log a. Near 1 a Beta's samples are 1 - n eps with whole numbers n:
    the sample 1 - eps stands for all distances up to 3/2 eps, whose mass is (3/2)^a times that of eps.
    """

    def log_prob(self, value):
        part, (at_zero, at_one) = self.part, _at_ends(value)
        of_end = lambda end, a, far: jnp.where(end, a * math.log(far) - jnp.log(a), 0)
        if isinstance(part, dist.Beta):
            ends = of_end(at_zero, part.concentration1, 1.0) + of_end(at_one, part.concentration0, 1.5)
        else:
            ends = jnp.sum(of_end(at_zero, part.concentration, 1.0), axis=-1)
        return part.log_prob(value) + zero_with_gradient(ends)


def guarded(what: str, distribution: Any, score: jax.Array) -> jax.Array:
    """The score; differentiating it is an error if the support moves with a parameter, which it does not see."""
    moves = f"{what}: the bounds of the support of {type(distribution).__name__} depend on a differentiated parameter"
    reason = f"{moves}, so that its score lacks a part of the derivative. Use reparameterization()."
    for bound in jax.tree.leaves([supports.bounds_of(part) for part in supports.all_parts_of(distribution)]):
        if jnp.issubdtype(jnp.result_type(bound), jnp.floating):
            fixed = jnp.sum(refuse_derivative(jnp.asarray(bound, jnp.float32), reason))
            score = score + zero_with_gradient(fixed).astype(score.dtype)
    return score


def batch_shape(distribution: Any, x: jax.Array) -> tuple[int, ...]:
    shape = getattr(distribution, "batch_shape", None)
    if shape is None:
        with standard_promotion():
            shape = jax.eval_shape(distribution.log_prob, x).shape
    return tuple(shape)


def _draw(distribution, method, key):
    with standard_promotion():
        x = getattr(widened(distribution), method)(key)
    if not isinstance(x, jax.Array):
        raise TypeError(f"{type(distribution).__name__}.{method} must return one array, got {type(x).__name__}")
    return x.astype(float_dtype(distribution, x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def float_dtype(distribution: Any, default: Any) -> Any:
    floats = [x for x in jax.tree.leaves(distribution) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    with standard_promotion():
        return jnp.result_type(*(floats or [default]))


def _claims_rsample_by_default(part) -> bool:
    # NumPyro's has_rsample says that all declared parameters are reparametrized: so it is true if none is declared.
    inherits = lambda name: getattr(type(part), name, None) is getattr(dist.Distribution, name)
    return inherits("has_rsample") and inherits("rsample") and not part.arg_constraints


@standard_promotion()
def _has_cdf(distribution, x) -> bool:
    univariate = getattr(distribution, "event_shape", ()) == () and callable(getattr(distribution, "cdf", None))
    # Of a folded distribution NumPyro's cdf would forget one of the two sides.
    if not univariate or any(supports.folds(part) for part in supports.parts_of(distribution)):
        return False
    try:
        jax.eval_shape(distribution.cdf, x)
    except NotImplementedError:
        return False
    return True


_BY_LOGITS = (dist.BernoulliLogits, dist.BinomialLogits)
_OF_GAMMAS = (dist.Beta, dist.Dirichlet)
_LOC_SCALE = (dist.Normal, dist.Laplace, dist.Logistic, dist.Cauchy, dist.Gumbel, dist.StudentT, dist.SoftLaplace)
_LOC_SCALE += (dist.AsymmetricLaplace, dist.AsymmetricLaplaceQuantile)
_AROUND = (*supports.WRAPPERS, dist.LeftTruncatedDistribution, dist.RightTruncatedDistribution)
_AROUND += (dist.TwoSidedTruncatedDistribution, dist.FoldedDistribution)
_SMOOTH_MOVES = (to.AffineTransform, to.ExpTransform, to.SigmoidTransform, to.LowerCholeskyAffine)
_BENDING = (to.AbsTransform, to.L1BallTransform)
_KINKED = (dist.Laplace, dist.AsymmetricLaplace)  # at their location; other densities are smooth inside the support
_UNIT = (type(constraints.unit_interval), type(constraints.simplex))
_ON_A_SIMPLEX = (dist.CategoricalProbs, dist.MultinomialProbs)
_UP_TO_A_CONSTANT = (dist.CategoricalLogits, dist.MultinomialLogits)
_GATED = (dist.ZeroInflatedProbs, dist.HurdleProbs)
_MIXTURES = (dist.MixtureSameFamily, dist.MixtureGeneral)
_COUNTS = (dist.Poisson, dist.NegativeBinomialProbs, dist.MultinomialProbs, dist.MultinomialLogits)
_NOT_A_DENSITY = (
    dist.MaskedDistribution,
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
    dist.IntervalCensoredDistribution,
    dist.ImproperUniform,
    dist.Unit,
)
