"""What the nodes of mixers are made of: one sample with each estimator's pullback, messages, weights, refusals."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apgrad._ground.port import port
from apgrad._ground.propagator import Propagator, first_order, node
from apgrad.expectations import _channels as channels
from apgrad.expectations._cross_fitting import Streams
from apgrad.expectations._tape import Tape
from apgrad.expectations.estimators._baselines import Baseline, LearnedBaseline
from apgrad.expectations.estimators._estimator import Mixer, surrogate
from apgrad.expectations.mixing._features import NodeMemory
from apgrad.expectations.weights import Weighting, decoupled

Charge = tuple[jax.Array, Baseline]  # a zero to be charged with later costs, and the baseline that is taken off


class Messages(NamedTuple):
    """The messages that come back to a mixer's node.

    Attributes:
      own: the message to the sample in the own stream, (lanes, ...).
      output: the message to the sample in the output stream, (lanes, ...).
      to_zeros: for each of the baselines that `charged` lists the message to its zero, (lanes, ...).
      suffix: the gradient that later nodes have gathered, (lanes, width), or None.
      folds: 2 with cross-fitting, 1 without.
    """

    own: jax.Array
    output: jax.Array
    to_zeros: list[jax.Array]
    suffix: jax.Array | None
    folds: int


class NodeAnswer(NamedTuple):
    """What a mixer's node sends on.

    Attributes:
      shared: the messages to the arguments that lanes share, summed over lanes.
      lane: the messages to the lanes' own arguments, in each stream.
      suffix: the gradient gathered so far, with this node's, (lanes, width), or None.
      row: what `ap.adaptive` is told of the node, float32 (5,); None without `ap.adaptive`.
    """

    shared: Any
    lane: Streams
    suffix: jax.Array | None
    row: Any = None


def charged(mixer: Mixer) -> list[Baseline]:
    """The baselines of the estimators with a score, each once: the node has a zero on the tape for each of them.

    Args:
      mixer: the mixer.
    """
    found: dict[Any, Baseline] = {_identity(e.baseline): e.baseline for e in mixer.estimators if e.score is not None}
    return list(found.values())


def surrogates(mixer: Mixer, distribution: Any, key: jax.Array) -> tuple[tuple[Any, list[Any]], list[Any]]:
    """One sample with a zero for each of the baselines that `charged` lists, and each estimator's pullback.

    Args:
      mixer: the mixer.
      distribution: what is sampled, for one lane or, in `ap.sample`, for all lanes.
      key: a PRNG key.

    Returns:
      `((x, zeros), pullbacks)`. A pullback takes the estimator's entry of `divide` to a message to the distribution.
    """
    drawn, zeros, pullbacks = None, {}, {}
    # Estimators with a pathwise derivative come first, so that the others need not draw the sample again: the compiler
    # does not merge two runs of the random number generator.
    for index in sorted(range(len(mixer.estimators)), key=lambda i: mixer.estimators[i].pathwise is None):
        estimator = mixer.estimators[index]

        def one(distribution, estimator=estimator, drawn=drawn):
            return surrogate(estimator, distribution, key, drawn)

        (x, density), pullbacks[index] = jax.vjp(one, distribution)
        drawn = x if drawn is None else drawn
        if density is not None:
            zero = jnp.where(jnp.isfinite(density), port(density), jnp.nan)
            baseline = _identity(estimator.baseline)
            zeros[baseline] = zeros[baseline] + zero if baseline in zeros else zero
    zeros = [zeros[_identity(baseline)] for baseline in charged(mixer)]
    return (drawn, zeros), [pullbacks[index] for index in range(len(mixer.estimators))]


def divide(mixer: Mixer, to_x: jax.Array, to_zeros: list[Any]) -> list[tuple[Any, Any]]:
    """The messages of each estimator: to its sample, and to the zero of its own baseline if it has a score.

    Args:
      mixer: the mixer.
      to_x: the message to the sample, of the sample's shape and dtype.
      to_zeros: for each of the baselines that `charged` lists the message to its zero, of the log-density's shape.
    """
    slots = [_identity(baseline) for baseline in charged(mixer)]
    return [(to_x, None if e.score is None else to_zeros[slots.index(_identity(e.baseline))]) for e in mixer.estimators]


def _identity(baseline):
    """Equal for baselines that are the same. A baseline may be any callable object, without an equality of its own."""
    if baseline is None or isinstance(baseline, str):
        return baseline
    return type(baseline), id(baseline.function if isinstance(baseline, LearnedBaseline) else baseline)


def require_mixer(mixer: Mixer, what: str, tape: Tape, by_coordinates: bool) -> None:
    """Tells the tape that a node weighs its estimators, or raises an error for a mixer that cannot be mixed here.

    Args:
      mixer: the mixer.
      what: the node's name in errors.
      tape: the current tape.
      by_coordinates: whether each coordinate of the distribution's parameters has its own weight.

    Raises:
      ValueError: for a mixer that cannot be mixed here.
    """
    channels.declare_weighing(tape, what)
    if channels.is_adaptive(tape):
        trouble = None
        if by_coordinates:
            trouble = "this one has a weight for each coordinate: use ap.stochastic with target='arguments'"
        elif len(mixer.estimators) != 2:
            trouble = f"this mixer has {len(mixer.estimators)} estimators"
        elif mixer.weights != decoupled():
            trouble = "this mixer has a rule of its own, which would not be asked: leave weights= out, or use ap.grad"
        if trouble:
            raise ValueError(
                f"{what}: ap.adaptive gives weights of least variance to a node's two estimators, and {trouble}"
            )
    if mixer.target not in ("arguments", "parameters"):
        raise ValueError(f"{what}: a mixer's target is 'arguments' or 'parameters', got {mixer.target!r}")
    if tape.lanes < 2:
        raise ValueError(f"{what} takes the variance over lanes and needs at least 2, got lanes={tape.lanes}")


def mixer_node(
    mixer: Mixer, forward: Callable[..., Any], backward: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """A node whose second derivative is refused.

    Args:
      mixer: the mixer, which the error names.
      forward: the `forward` of the node's propagator.
      backward: the `backward` of the node's propagator.
      **options: the options of `apgrad.node`.
    """
    reason = (
        f"{mixer.name} has no second derivative: its weights are no part of the objective, and differentiating "
        "them would be silently wrong. Use likelihood_ratio() or reparameterization() for higher orders."
    )
    return node(first_order(Propagator(forward, backward), reason), **options)


def to_parameters(memory: NodeMemory, to_x: jax.Array, to_zeros: list[Any]) -> list[list[Any]]:
    """Each estimator's messages to the distribution's parameters.

    Args:
      memory: what the node keeps of its forward pass.
      to_x: the messages to the sample, (lanes, ...).
      to_zeros: for each of the baselines that `charged` lists the messages to its zero, (lanes, ...).

    Returns:
      For each estimator a list with an array (lanes, ...) for each array of parameters, or None for an integer one.
    """

    def one(pullbacks, to_x, to_zeros):
        messages = divide(memory.mixer, to_x, to_zeros)
        answers = [jax.tree.leaves(p(m)[0]) for p, m in zip(pullbacks, messages, strict=True)]
        return [[None if z.dtype == jax.dtypes.float0 else z for z in leaves] for leaves in answers]

    return jax.vmap(one)(memory.pullbacks, to_x, to_zeros)


def weigh(what: str, weighting: Weighting, features: jax.Array, suffix: jax.Array | None) -> jax.Array:
    """The weights of a node's estimators, (folds, estimators), by a weight rule.

    Args:
      what: the node's name in errors.
      weighting: the rule, and whether it looks at the suffix.
      features: floating point, (folds, estimators, lanes / folds, width).
      suffix: floating point, (folds, lanes / folds, width); None is the same as zeros.

    Raises:
      ValueError: if the rule does not return one weight for each estimator.
    """
    if suffix is None or not weighting.suffix:
        suffix = jnp.zeros_like(features[:, 0])

    def one_fold(features, suffix):
        weights = weighting.rule(features, suffix)
        if jnp.shape(weights) != features.shape[:1]:
            raise ValueError(
                f"{what}: a weight rule must return one weight for each of the {len(features)} estimators, got "
                f"shape {jnp.shape(weights)}"
            )
        return weights

    return jax.vmap(one_fold)(features, suffix)
