"""Weights that look for a bias of reparameterization where a simulator jumps, and turn to the likelihood ratio there.

Each takes a node's gradients lane by lane, as every rule of `ap.weights` does. `experiments.contact` compares them.
"""

import math

import jax.numpy as jnp

import apgrad as ap

Weights = ap.weights.Weights
_INVERSE_VARIANCE = ap.weights.inverse_variance().message.rule


def alpha_order(gamma: float, *, confidence: float = 0.95) -> Weights:
    """Inverse-variance weights, as far as the two estimators agree up to a given error.

    The alpha-order estimator of Suh, Simchowitz, Zhang & Tedrake (2022), section 4: alpha times reparameterization and
    1 - alpha times likelihood ratio, of the least variance under a bound on the error,

        alpha B + epsilon <= gamma,    so    alpha = min(inverse-variance weight, max(0, gamma - epsilon) / B),

    B the distance of the two means, and epsilon what the likelihood ratio's mean is off by at the given confidence. The
    paper mixes the gradient of the whole objective; here each node is mixed by itself. The paper has epsilon by
    Bernstein's inequality; here it is the bound for a Gaussian mean, sqrt(V / lanes) (1 + sqrt(2 log(1 / (1 -
    confidence)))), V the variance of the likelihood ratio summed over features.

    Under cross-fitting the rule sees the contribution of half of the lanes, which is half as long, so gamma is half the
    error that is allowed. `math.inf` gives inverse variances, and a gamma below the ratio's own noise the ratio.

    Raises:
      ValueError: for numbers outside these ranges.
    """
    if not gamma > 0:
        raise ValueError(f"alpha_order needs a positive gamma, got {gamma!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"alpha_order needs a confidence between 0 and 1, got {confidence!r}")
    factor = 1 + math.sqrt(-2 * math.log1p(-confidence))

    def rule(gradients, suffix):
        _require_two("alpha_order", gradients)
        lanes = gradients.shape[1]
        pathwise, ratio = jnp.sum(gradients, axis=1)
        distance = jnp.linalg.norm(pathwise - ratio)
        epsilon = factor * jnp.sqrt(lanes * jnp.sum(jnp.var(gradients[1], axis=0, ddof=min(1, lanes - 1))))
        room = jnp.maximum(gamma - epsilon, 0) / jnp.where(distance == 0, 1, distance)
        room = jnp.where(distance == 0, 1, jnp.where(jnp.isnan(room), 0, room))
        alpha = jnp.minimum(_INVERSE_VARIANCE(gradients, suffix)[0], room)
        return jnp.stack([alpha, 1 - alpha])

    return Weights(ap.weights.Weighting(rule))


def mean_test(weights: Weights | None = None, *, threshold: float = 3.5) -> Weights:
    """The given weights, but the likelihood ratio alone at nodes where the two estimators' means differ.

    Where both estimators are unbiased, D = c_2 - c_1 has mean 0. With D_i the difference on lane i and V the variance
    over lanes summed over features, the sum of D over n lanes has a root mean square of sqrt(n V). The rule turns to
    the likelihood ratio where the sum is longer than `threshold` times that. With one feature this is the t-test of two
    means on paired samples. With many, the length of a Gaussian vector of this root mean square exceeds 1 + sqrt(2
    log(1 / p)) times it with a probability of at most p: 3.5 holds p = .044, and p = .0005 with one feature.

    It needs no assumption on what comes after the node, and so serves long rollouts. But D is as noisy as the
    likelihood ratio is: what bias that noise hides stays.

    Raises:
      ValueError: for a threshold that is not positive.
    """
    if not threshold > 0:
        raise ValueError(f"mean_test needs a positive threshold, got {threshold!r}")

    def differs(gradients):
        D = gradients[1] - gradients[0]
        scale = jnp.max(jnp.abs(D), initial=0)
        D = D / jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1)  # no overflow in the square
        variance = jnp.sum(jnp.var(D, axis=0, ddof=min(1, len(D) - 1)))
        return jnp.sum(jnp.sum(D, axis=0) ** 2) > threshold**2 * len(D) * variance  # False for NaN

    return _turn_to_ratio("mean_test", ap.weights.decoupled() if weights is None else weights, differs)


def variance_test(weights: Weights | None = None, *, dimensions: int = 1, c: float = 1.0) -> Weights:
    """The given weights, but the likelihood ratio alone where it spreads more than the pathwise slopes explain.

    A test in the manner of DDCG (Onoda, Parmas, Yaguchi & Matsuo, 2026, arXiv 2604.18161). Of DDCG we know from the
    abstract and the public reviews that it compares the variances of pathwise gradients and of the cost, mixes by
    inverse variances where the two fit, and takes the likelihood ratio elsewhere; we have not seen the formula. What
    follows is our own.

    Let a cost f(e) depend on Gaussian noise e of d dimensions, all deviations 1, centred to mean 0. Poincare's
    inequality says E f^2 <= E |f'|^2 =: P for every f without jumps. The likelihood ratio is e f, and by Stein's
    identity

        X := E |e|^2 f^2 = d E f^2 + 2 E f (e . f') <= d P + 2 sqrt(X P),    so    X <= (1 + sqrt(1 + d))^2 P.

    A jump adds to X and not to P. The rule turns to the likelihood ratio where c X > (1 + sqrt(1 + d))^2 P. A linear f
    has X = (d + 2) P: at d = 1 and c = 1 a jump goes unseen until it makes half of X. A larger c sees more, and turns
    away costs that do not jump.

    Noise that comes after the node adds to X and not to P as well: the test is for one choice that all the cost follows
    from, such as noise on an open-loop plan, and not for rollouts with noise at every step. The target is the mean of
    the choice, so that X and P are of the noise itself, up to one scale.

    Raises:
      ValueError: for numbers that are not positive.
    """
    if not (dimensions > 0 and c > 0):
        raise ValueError(f"variance_test needs positive dimensions and c, got {dimensions!r} and {c!r}")
    limit = (1 + math.sqrt(1 + dimensions)) / math.sqrt(c)

    def jumps(gradients):
        scale = jnp.max(jnp.abs(gradients), initial=0)
        pathwise, ratio = gradients / jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1)
        return jnp.linalg.norm(ratio) > limit * jnp.linalg.norm(pathwise)

    return _turn_to_ratio("variance_test", ap.weights.inverse_variance() if weights is None else weights, jumps)


def _turn_to_ratio(name, weights, found):
    """The weights, but [0, 1] where `found(gradients)`."""

    def wrap(weighting):
        def rule(gradients, suffix):
            _require_two(name, gradients)
            ordinary = weighting.rule(gradients, suffix)
            usable = jnp.all(jnp.isfinite(gradients[1]))
            return jnp.where(found(gradients) & usable, jnp.array([0, 1], ordinary.dtype), ordinary)

        return weighting._replace(rule=rule)

    return Weights(wrap(weights.message), weights.contribution and wrap(weights.contribution))


def _require_two(name, gradients):
    if len(gradients) != 2:
        raise ValueError(f"{name} weighs two estimators, a pathwise one and a score, got {len(gradients)}")
