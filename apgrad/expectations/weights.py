"""Weights: how total propagation mixes its estimators at a node.

At a node stand n estimators (reparameterization first, then likelihood ratio), each with a message for the node
before and a contribution to the gradient of the target, the parameters. Both are linear in what is mixed, and
all the estimators have the same expectation whatever happened before the node; so any weights that sum to 1,
and do not depend on the samples that they mix, leave the gradient unbiased, and even two different ones do: one
for the message, one for the contribution. `ap.expectation(..., cross_fit=True)` makes the weights independent.
What remains is to make the variance small. Let c_e be the per-lane contributions to the target, V the variance over
lanes summed over the target's elements, and D = c_2 - c_1. All are centred over lanes, and < , > is the inner product
over lanes and elements.

* *Inverse variance* (Parmas et al., 2018; Proppo, section 3.4): w_e proportional to 1 / V(c_e). Right for independent
  estimators, which these are not.
* *Local covariance*: the least V(c_1 + k D) is at k = - <c_1, D> / <D, D>.
* *Suffix covariance*: what counts is the variance of the sum over nodes, and neighbours' contributions cancel. With G
  the lane's gradient gathered so far on the way back, the least V(G + c_1 + k D) is at - <G + c_1, D> / <D, D>: D is a
  control variate for all that is there. Good for the contribution. For the message it is greedy: a message that
  suits this node's contribution may explode in the nodes before it.
* *Decoupled*: the message by local covariance, the contribution, element by element, by suffix covariance.

*Shrinkage.* An estimated k is noisy, and where c_1 alone is good by far (V(D) 10,000 times V(c_1)), the noise of tens
of nodes is all that mixing adds. Used on lanes that it has not seen, s k costs <D, D> E (s k - k*)^2 more than the
best k* does, which is least at s = k*^2 / (k*^2 + v), v the variance of k over samples of lanes (James & Stein, 1961).
Contributions are heavy-tailed and one lane may make all of k; so v is what leaving out each lane in turn says (the
jackknife; HC3 of MacKinnon & White, 1985). With the residuals e = A + k D, A what is to be made small,

    v = sum_i (r <D_i, e_i> / (<D, D> - r <D_i, D_i>))^2,    k' = k max(0, 1 - v / k^2),

r = lanes / (lanes - 1), as the means change as well.

In chaos c_1 explodes, and what is left of it must be shrunk, not k: the two change places where c_2 is typically
the smaller, by the mean over lanes of log |c_e|, here not centred. For c_1 this mean grows with the Lyapunov
exponent. Variances would not do to decide: where c_1 is small but for a lane in thousands, the half that has this lane
would turn the other half to c_2. `experiments.total_propagation` has the figures.

*What stronger shrinkage does.* It takes away small weights of c_2 at all nodes, which alone keep the rare lane from
exploding that the half at hand does not have: with twice v the gradient of `experiments.lorenz_control` in chaos
can have 100 times the variance of that with v, while what it saves elsewhere is a fifth at most.
"""

import math
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Resolution = Literal["node", "leaf", "element", "auto"]


class Rule(Protocol):
    """A rule that weighs the estimators of a node, or of one array or one element of the target."""

    def __call__(self, gradients: jax.Array, suffix: jax.Array) -> jax.Array:
        """The weights.

        Args:
          gradients: (n, lanes, elements), each estimator's contribution to the target, lane by lane. Elements are
            the target's, or coordinates of a random sketch of it, which keeps inner products on average.
          suffix: (lanes, elements), the same of the nodes after this one; zeros without `Weighting.suffix`.

        Returns:
          (n,), which should sum to 1.
        """
        ...


class Weighting(NamedTuple):
    """A rule, and what it is applied to.

    Attributes:
      rule: see `Rule`.
      per: one weight for each `"node"`, for each `"leaf"` (array) of the target or for each `"element"`; `"auto"` is
        elements while lanes times elements are at most 2^23, and leaves beyond.
      suffix: gather the gradient of later nodes for the rule. It is gathered over the calls of one decorated
        function, of its shared arguments (not of arrays that it closes over).
    """

    rule: Rule
    per: Resolution = "node"
    suffix: bool = False


class Weights(NamedTuple):
    """How a mixer weighs what it sends.

    Attributes:
      message: weighs the message to the node before. It has one weight a node, whatever `per` says, unless the target
        is the distribution's parameters.
      contribution: weighs the contribution to the target; None: the message's rule does, `per` as it says.
      every: compute new weights at every so many nodes, and keep them for those in between, which then cost no
        per-lane gradients of the target. Weights must be one a node.
    """

    message: Weighting
    contribution: Weighting | None = None
    every: int = 1


def inverse_variance(*, per: Resolution = "node", every: int = 1) -> Weights:
    """Weights proportional to the inverse of each estimator's variance over lanes, as published.

    Args:
      per: one weight a node (Proppo), or coordinate by coordinate (TPX: Parmas, Seno & Aoki, 2023, with
        `total_propagation(target="parameters")`); see `Weighting`.
      every: see `Weights`.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> rule = ap.weights.inverse_variance().message.rule
      >>> gradients = jnp.array([[[1.0], [-1.0]], [[2.0], [-2.0]]])       # 2 estimators, 2 lanes, 1 element
      >>> [round(float(w), 3) for w in rule(gradients, jnp.zeros((2, 1)))]
      [0.8, 0.2]
    """
    return Weights(Weighting(_inverse_variance, per), every=every)


def local_covariance(*, per: Resolution = "node", every: int = 1) -> Weights:
    """Weights of least variance of the node's own contribution, given how the estimators correlate.

    Args:
      per: see `Weighting`.
      every: see `Weights`.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> rule = ap.weights.local_covariance().message.rule
      >>> noise = jnp.array([1.0, -1.0, 2.0, -2.0])[:, None]
      >>> rule(jnp.stack([noise, -noise]), jnp.zeros((4, 1))).tolist()    # they cancel
      [0.5, 0.5]
    """
    return Weights(Weighting(least_variance(), per), every=every)


def suffix_covariance(*, per: Resolution = "node", every: int = 1) -> Weights:
    """Weights of least variance of all the gradient gathered so far on the way back.

    Args:
      per: of the contribution, see `Weighting`; the message has one weight a node.
      every: see `Weights`.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> rule = ap.weights.suffix_covariance().message.rule
      >>> noise = jnp.array([1.0, -1.0, 2.0, -2.0])[:, None]
      >>> rule(jnp.stack([0 * noise, 2 * noise]), -noise).tolist()    # the second takes away what is there
      [0.5, 0.5]
    """
    return Weights(Weighting(least_variance(), per, suffix=True), every=every)


def decoupled(*, per: Resolution = "auto", shrinkage: float = 1.0, every: int = 1) -> Weights:
    """The message by local covariance, the contribution by suffix covariance, both shrunk. The default.

    Args:
      per: of the contribution, see `Weighting`.
      shrinkage: the factor of v / k^2 in this module's formula; 0 for none.
      every: see `Weights`; more than 1 needs `per="node"`.

    Example:
      >>> import apgrad as ap
      >>> ap.weights.decoupled().contribution.per
      'auto'
    """
    rule = least_variance(shrinkage)
    return Weights(Weighting(rule), Weighting(rule, per, suffix=True), every)


def least_variance(shrinkage: float = 0.0) -> Rule:
    """The rule of least variance of `suffix + sum_e w_e gradients_e`, with weights in [0, 1] that sum to 1.

    For two estimators this is the module's formula; others are mixed in one after the other, each with the mixture
    of those before it.

    Args:
      shrinkage: the factor of v / k^2 in the module's formula; 0 for none.
    """
    if not (math.isfinite(shrinkage) and shrinkage >= 0):
        raise ValueError(f"shrinkage must be a finite number of at least 0, got {shrinkage!r}")

    def rule(gradients, suffix):
        mixture, weights = gradients[0], [jnp.ones((), gradients.dtype)]
        for other in gradients[1:]:
            share, k = _shares(mixture, other, suffix, shrinkage)
            weights = [w * share for w in weights] + [k]
            mixture = jnp.where(share == 0, 0, share * mixture) + jnp.where(k == 0, 0, k * other)
        return jnp.stack(weights)

    return rule


def _shares(first, second, suffix, shrinkage):
    """The weights of two estimators."""
    swap = _typical(second) < _typical(first) if shrinkage else jnp.zeros((), bool)
    base, other = jnp.where(swap, second, first), jnp.where(swap, first, second)
    # Scaled before they are squared: gradients of an exploding estimator overflow float32 in the square.
    pair = jnp.stack([base + suffix, other - base])
    scale = jnp.max(jnp.abs(pair), axis=(1, 2), initial=0)
    usable = (scale > 0) & jnp.isfinite(scale)
    pair = pair / jnp.where(usable, scale, 1)[:, None, None]
    A, D = pair - jnp.mean(pair, axis=1, keepdims=True)
    AD, DD = jnp.sum(A * D), jnp.sum(D * D)
    safe = jnp.where(DD > 0, DD, 1)
    k = -AD / safe  # the weight of the other one, in units of the scales
    if shrinkage:
        ratio = len(D) / max(len(D) - 1, 1)
        rest = DD - ratio * jnp.sum(D * D, axis=1)  # <D, D> without each lane
        alone = rest <= 1e-6 * DD  # nothing but rounding: the others say nothing of k
        moves = ratio * jnp.sum(D * (A + k * D), axis=1) / jnp.where(alone, 1, rest)
        v = jnp.sum(jnp.where(alone, k, moves) ** 2)
        k = k * jnp.clip(1 - shrinkage * v / jnp.where(k == 0, 1, k**2), 0, 1)
    k = jnp.where(usable[1] & (DD > 0), jnp.clip(k * scale[0] / jnp.where(usable[1], scale[1], 1), 0, 1), 0)
    # What overflows gets nothing, and the first one the rest where both do.
    overflow = ~jnp.isfinite(scale[1]) & jnp.isfinite(jnp.max(jnp.abs(other), initial=0))
    k = jnp.where(overflow, 1, jnp.where(jnp.isnan(k), 0, k))
    return jnp.where(swap, k, 1 - k), jnp.where(swap, 1 - k, k)


def _typical(gradients):
    """The mean over lanes of log |c|_1, not centred, as a few lanes would move the centre; NaN where it overflows."""
    logs = jnp.log(jnp.sum(jnp.abs(gradients), axis=1) + jnp.finfo(gradients.dtype).tiny)
    # Not jnp.mean: XLA:CPU fuses the logarithm into the sum, where it is no vector code, and three times slower.
    return jnp.dot(logs, jnp.full(len(logs), 1 / len(logs), logs.dtype), precision="highest")


def _inverse_variance(gradients, suffix):
    variances = jnp.sum(jnp.var(gradients, axis=1), axis=-1)
    variances = jnp.where(jnp.isnan(variances), jnp.inf, variances)
    smallest = jnp.min(variances)
    # smallest / V is 1 for the best: no division by zero where nothing varies, none of inf where all explode.
    ratios = jnp.where(variances == smallest, 1, smallest / jnp.where(variances == 0, 1, variances))
    return ratios / jnp.sum(ratios)
