"""Weights: how total propagation mixes its estimators at a node.

Each of a node's estimators (reparameterization first, then likelihood ratio) has a message for the node before and a
contribution to the gradient of the target, the parameters. Given what was before the node, both estimators have the
same expectation. So weights that sum to 1 and do not depend on the samples leave the gradient unbiased, also if message
and contribution have different ones. `ap.expectation(..., cross_fit=True)` makes weights independent of the samples.

Let c_e be the per-lane contributions to the target, V the variance over lanes summed over the target's elements, and
D = c_2 - c_1, all centred over lanes; < , > is the inner product over lanes and elements.

* *Inverse variance* (Parmas et al., 2018; Proppo, section 3.4): w_e proportional to 1 / V(c_e), ignoring correlation.
* *Local covariance*: the least V(c_1 + k D) is at k = - <c_1, D> / <D, D>.
* *Suffix covariance*: with G a lane's gradient gathered on the way back, the least V(G + c_1 + k D) is at k = - <G +
  c_1, D> / <D, D>. For the message this is greedy: what suits this node's contribution may explode in the nodes before.

*Shrinkage.* An estimated k is noisy. On lanes that it has not seen, s k has <D, D> E (s k - k*)^2 more variance than
the best k*. This is least at s = k*^2 / (k*^2 + v), v the variance of k over samples of lanes (James & Stein, 1961).
Contributions are heavy-tailed, so v comes from leaving out each lane in turn (the jackknife; HC3 of MacKinnon & White,
1985). With A = c_1 or G + c_1, residuals e = A + k D, and r = lanes / (lanes - 1), as means change too,

    v = sum_i (r <D_i, e_i> / (<D, D> - r <D_i, D_i>))^2,    k' = k max(0, 1 - v / k^2).

In chaos c_1 explodes, and its weight 1 - k must be shrunk, not k: so c_1 and c_2 change places where c_2 is typically
the smaller, by the mean over lanes of log |c_e|, here not centred. (One large lane in thousands decides a variance.)
Stronger shrinkage takes away small weights of c_2, which alone keep a rare lane from exploding.

*Where the simulator jumps*, reparameterization is biased and varies little, so that all these rules prefer it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import number


class Weighting(NamedTuple):
    """A rule, and whether the rule looks at later nodes.

    Attributes:
      rule: `(gradients, suffix) -> weights`, (estimators,), which sum to 1: others are an error, or NaN where they are
        traced. `gradients`, (estimators, lanes, features), are each estimator's contributions to the target, or a
        sketch of them, which keeps inner products on average. `suffix`, (lanes, features), is the later nodes', or 0.
      suffix: whether the gradient of later nodes is gathered for the rule. It is gathered over calls of one decorated
        function, for its shared arguments, and if these have over 16 numbers, also for arrays that it closes over.
    """

    rule: Callable[[jax.Array, jax.Array], jax.Array]
    suffix: bool = False


class Weights(NamedTuple):
    """How a mixer weighs what it sends: for each of two purposes, one weight for each estimator at a node.

    With `target="parameters"`, and in `ap.sample`, the message's rule weighs each coordinate of the distribution's
    parameters by itself (TPX: Parmas, Seno & Aoki, 2023), and the suffix is zero.

    Attributes:
      message: weighs the message to the lanes' own arguments, and so to the nodes before.
      contribution: weighs the contribution to the arguments that lanes share; None stands for the message's.
    """

    message: Weighting
    contribution: Weighting | None = None


def inverse_variance() -> Weights:
    """Weights proportional to the inverse of each estimator's variance over lanes, as published.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> gradients = jnp.array([[[1.0], [-1.0]], [[2.0], [-2.0]]])       # 2 estimators, 2 lanes, 1 feature
      >>> [round(float(w), 3) for w in ap.weights.inverse_variance().message.rule(gradients, jnp.zeros((2, 1)))]
      [0.8, 0.2]
    """
    return Weights(Weighting(_inverse_variance))


def local_covariance() -> Weights:
    """Weights that make the variance of the node's own contribution least, given how the estimators correlate.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> noise = jnp.array([1.0, -1.0, 2.0, -2.0])[:, None]
      >>> ap.weights.local_covariance().message.rule(jnp.stack([noise, -noise]), 0 * noise).tolist()    # they cancel
      [0.5, 0.5]
    """
    return Weights(Weighting(least_variance()))


def suffix_covariance() -> Weights:
    """Weights that make the variance of all the gradient gathered so far on the way back least.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> noise = jnp.array([1.0, -1.0, 2.0, -2.0])[:, None]    # the second estimator takes away what is there
      >>> ap.weights.suffix_covariance().message.rule(jnp.stack([0 * noise, 2 * noise]), -noise).tolist()
      [0.5, 0.5]
    """
    return Weights(Weighting(least_variance(), suffix=True))


def decoupled(*, shrinkage: float = 1.0) -> Weights:
    """The message by local covariance, the contribution by suffix covariance, both shrunk. The default.

    Args:
      shrinkage: the factor of v / k^2 in this module's formula, at least 0, else a `ValueError`; 0 for no shrinkage.

    Example:
      >>> import apgrad as ap
      >>> [purpose.suffix for purpose in ap.weights.decoupled()]    # message, contribution
      [False, True]
    """
    rule = least_variance(shrinkage)
    return Weights(Weighting(rule), Weighting(rule, suffix=True))


def per_step_inverse_variance() -> Weights:
    """Inverse-variance weights of each step's contribution; messages go back by reparameterization alone.

    This is IVW-H (Onoda, Parmas, Yaguchi & Matsuo, 2026, arXiv 2604.18161), written from others' descriptions and code.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> weights = ap.weights.per_step_inverse_variance()
      >>> gradients = jnp.array([[[1.0], [-1.0]], [[2.0], [-2.0]]])       # 2 estimators, 2 lanes, 1 feature
      >>> [round(float(w.rule(gradients, jnp.zeros((2, 1)))[0]), 3) for w in weights]
      [1.0, 0.8]
    """
    return Weights(Weighting(_first_alone), Weighting(_inverse_variance))


def _first_alone(gradients, suffix):
    return jnp.zeros(len(gradients), gradients.dtype).at[0].set(1)


def least_variance(shrinkage: float = 0.0) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The rule of least variance of `suffix + sum_e w_e gradients_e`, with weights in [0, 1] that sum to 1.

    Estimators are mixed in one after the other, each with the mixture of the estimators before it.

    Args:
      shrinkage: the factor of v / k^2 in the module's formula; 0 for none.
    """
    number("shrinkage", shrinkage)
    return _LeastVariance(float(shrinkage))


@dataclasses.dataclass(frozen=True)  # so that equal weights are equal, and a copy of them too
class _LeastVariance:
    shrinkage: float

    def __call__(self, gradients, suffix):
        mixture, weights = gradients[0], [jnp.ones((), gradients.dtype)]
        for other in gradients[1:]:
            share, k = _shares(mixture, other, suffix, self.shrinkage)
            weights = [w * share for w in weights] + [k]
            mixture = jnp.where(share == 0, 0, share * mixture) + jnp.where(k == 0, 0, k * other)
        return jnp.stack(weights)


# Jitted, so that nodes of one shape trace it once.
@functools.partial(jax.jit, static_argnums=3)
def _shares(first, second, suffix, shrinkage):
    sizes = _sizes(first), _sizes(second)
    largest = [jnp.max(size) for size in sizes]
    # The weight k of the estimator with the largest lane is computed, and the other one has 1 - k. The other way round,
    # the weight of a message that explodes would be 1 less a number next to 1: nothing but rounding.
    swap = largest[1] < largest[0]
    first, second = jnp.where(swap, second, first), jnp.where(swap, first, second)
    # Scaled before they are squared: gradients of an exploding estimator overflow float32 in the square.
    most = jnp.where(swap, largest[0], largest[1])
    # Not the maximum of the suffix alone: if the suffix is constant zeros, XLA takes seconds for it while compiling.
    with_suffix = jnp.maximum(jnp.where(swap, sizes[1], sizes[0]), _sizes(suffix))
    scales = [jnp.max(with_suffix), jnp.maximum(*largest)]
    usable = [(scale > 0) & jnp.isfinite(scale) for scale in scales]
    units = [jnp.where(use, scale, 1) for use, scale in zip(usable, scales, strict=True)]
    A, D = first / units[0] + suffix / units[0], second / units[1] - first / units[1]
    A, D = (x - jnp.mean(x, axis=0, keepdims=True) for x in (A, D))
    # Nothing but each lane's inner products is needed.
    each, square = jnp.sum(A * D, axis=1), jnp.sum(D * D, axis=1)
    AD, DD = jnp.sum(each), jnp.sum(square)
    k = -AD / jnp.where(DD > 0, DD, 1)  # in units of the scales
    more = 0  # added to k after k has its unit
    if shrinkage:
        ratio = len(D) / max(len(D) - 1, 1)
        rest = DD - ratio * square  # <D, D> without each lane
        alone = rest <= 1e-6 * DD  # nothing but rounding: the others say nothing of k
        moves = ratio * (each + k * square) / jnp.where(alone, 1, rest)
        v = jnp.sum(jnp.where(alone, k, moves) ** 2)
        # The weight of the typically larger estimator is shrunk: k, or 1 - k, and then k becomes k (1 - share) + share.
        typical = [_typical(size) for size in sizes]
        other = (typical[1] < typical[0]) != swap
        shrunk = jnp.where(other, units[1] / units[0] - k, k)
        share = jnp.clip(shrinkage * v / jnp.where(shrunk == 0, 1, shrunk**2), 0, 1)
        k, more = k * (1 - share), jnp.where(other, share, 0)
    k = jnp.where(usable[1] & (DD > 0), jnp.clip(k * units[0] / units[1] + more, 0, 1), 0)
    # An estimator that overflows gets no weight; if both do, the first one gets all.
    overflow = ~jnp.isfinite(scales[1]) & jnp.isfinite(most)
    k = jnp.where(overflow, 1, jnp.where(jnp.isnan(k), 0, k))
    return jnp.where(swap, k, 1 - k), jnp.where(swap, 1 - k, k)


def _sizes(gradients):
    return jnp.sum(jnp.abs(gradients), axis=1)


def _typical(sizes):
    """The mean over lanes of log |c|_1; NaN where it overflows."""
    logs = jnp.log(sizes + jnp.finfo(sizes.dtype).tiny)
    # Not jnp.mean: XLA:CPU fuses the logarithm into the sum, where it is no vector code, and three times slower.
    return jnp.dot(logs, jnp.full(len(logs), 1 / len(logs), logs.dtype), precision="highest")


def _inverse_variance(gradients, suffix):
    # Scaled before they are squared, by the smallest of them: what overflows then has no weight.
    largest = jnp.max(jnp.abs(gradients), axis=(1, 2), initial=0)
    scale = jnp.min(jnp.where((largest > 0) & jnp.isfinite(largest), largest, jnp.inf))
    variances = jnp.sum(jnp.var(gradients / jnp.where(jnp.isfinite(scale), scale, 1), axis=1), axis=-1)
    variances = jnp.where(jnp.isnan(variances), jnp.inf, variances)
    smallest = jnp.min(variances)
    # smallest / V is 1 for the best: no division by zero where nothing varies, none of inf where all explode.
    ratios = jnp.where(variances == smallest, 1, smallest / jnp.where(variances == 0, 1, variances))
    return ratios / jnp.sum(ratios)
