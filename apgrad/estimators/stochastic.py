"""Stochastic nodes: a distribution, a sample of it, and an estimator for the derivative.

An *estimator* is what it does with the two messages that come back to a sample x. The cotangent of x goes
through `pathwise(distribution, key) -> x`, the cost-to-go through `score(distribution, x) -> zero`, a zero
with the derivative of the log-density. Both are ordinary differentiable JAX, and an estimator has one of
them or both: that is all an estimator is, and its derivatives follow by differentiation.

A *mixer* runs several estimators on one sample and adds up their cotangents with weights, which it computes
from the per-lane gradients that each would give to the target. Its node is a propagator with a rule of
its own, which is no derivative, and so says no to second derivatives.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from apgrad.estimators import baselines, distributions
from apgrad.estimators.baselines import Baseline
from apgrad.port import port
from apgrad.propagator import Propagator, Static, first_order, hoist, node
from apgrad.tape import Tape, require_lanes


class Estimator(NamedTuple):
    """How one random choice is differentiated.

    Messages are cotangents of the objective, a mean over lanes: the cost's derivative, and the cost-to-go, over the
    number of lanes.

    Attributes:
      name: for errors.
      pathwise: `(distribution, key) -> x`, a sample that carries the derivative which the message to x is to
        go through. None: the sample is drawn plainly and carries no derivative.
      score: `(distribution, x) -> zero`, of the log-density's shape, with the derivative which the cost-to-go
        is to multiply. None: the choice is not charged with costs.
      baseline: what is taken off the cost-to-go.

    Example:
      The straight-through estimator (Bengio et al., 2013; biased): the sample's derivative is the mean's.

      >>> import jax, apgrad as ap, numpyro.distributions as dist
      >>> def pathwise(distribution, key):
      ...     x = distribution.sample(key).astype(distribution.mean.dtype)
      ...     return x + ap.zero_with_gradient(distribution.mean)
      >>> @ap.stochastic(ap.Estimator("straight_through", pathwise))
      ... def flip(p):
      ...     return dist.Bernoulli(probs=p)
      >>> def program(tape, p):
      ...     tape, x = flip(tape, p)
      ...     return tape.cost(3 * x)
      >>> float(jax.grad(ap.expectation(program, lanes=10), argnums=1)(jax.random.key(0), 0.5)).__round__(4)
      3.0
    """

    name: str
    pathwise: Callable[[Any, Any], Any] | None = None
    score: Callable[[Any, Any], Any] | None = None
    baseline: Baseline = None


class Mixer(NamedTuple):
    """Several estimators of one random choice, mixed by weights that a rule computes at the node.

    Attributes:
      name: for errors.
      estimators: they share one sample: given one key, those with a pathwise derivative draw the same x.
      weights: `targets -> array (len(estimators),)`, weights that sum to 1. `targets` holds, for each
        estimator, its per-lane gradients of the target: a list of arrays (lanes, ...).
      baseline: as in `Estimator`, for the cost-to-go that all of them read.
    """

    name: str
    estimators: tuple[Estimator, ...]
    weights: Callable[[list[list[jax.Array]]], jax.Array]
    baseline: Baseline = None


def stochastic(
    estimator: Estimator | Mixer, in_axes: tuple[int | None, ...] | None = None, *, parts: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., tuple[Tape, jax.Array]]]:
    """Decorates a function of one lane that returns a distribution: it then samples it on all lanes.

    Args:
      estimator: `reparameterization()`, `likelihood_ratio()`, `total_propagation()` or your own.
      in_axes: for each argument 0 (its leading axis is the lanes) or None (shared by the lanes, as parameters
        are). By default the first argument is shared and the others are the lanes'. Mixers weigh their
        estimators by the per-lane gradients of what is differentiated: of the shared arguments and of arrays that
        the function closes over, or where none of those is, of the lanes' arguments.
      parts: the distribution's first batch axis numbers parts of a lane that are independent of each other;
        costs of shape (lanes, parts) are then charged to a part's own choices. Without it, all the
        choices of a lane are charged with all the costs after them, which is right in any case.

    Returns:
      A decorator; the decorated function is `(tape, *args) -> (tape, x)`, with x of shape (lanes, ...).

    Raises:
      TypeError, ValueError: at trace time, for arguments without the lane axis, a function that returns no
        distribution, or a distribution without what the estimator needs.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> @ap.stochastic(ap.total_propagation())
      ... def step(theta, x):
      ...     return dist.Normal(jnp.sin(theta * x), 0.1)
      >>> def rollout(tape, theta):
      ...     x = jnp.ones(tape.lanes)
      ...     (tape, x), _ = jax.lax.scan(lambda c, _: (step(c[0], theta, c[1]), None), (tape, x), length=5)
      ...     return tape.cost(x**2)
      >>> jax.grad(ap.expectation(rollout, lanes=100), argnums=1)(jax.random.key(0), 2.0).shape
      ()
    """
    _require_estimator("stochastic", estimator)

    def decorate(function):
        what = f"{getattr(function, '__name__', 'stochastic function')} ({estimator.name})"

        @functools.wraps(function)
        def stochastic_function(tape, *args):
            _require_tape(what, tape)
            axes = _resolve_axes(what, in_axes, args)
            names = _argument_names(function, len(args))
            require_lanes(what, tape.lanes, {n: x for n, x, axis in zip(names, args, axes, strict=True) if axis == 0})
            tape, key = tape.next_key()
            keys = jax.random.split(key, tape.lanes)

            def distribution(*lane_args):
                made = function(*lane_args)
                distributions.require_distribution(what, made)
                return made

            if isinstance(estimator, Mixer):
                x, zero = _mix_lanes(estimator, distribution, axes, args, keys)
            else:
                x, zero = jax.vmap(lambda key, *a: _surrogate(estimator, distribution(*a), key), (0, *axes))(
                    keys, *args
                )
            if parts:
                tape.declare_parts(x.shape, what)
            if zero is not None:
                guard = jax.vmap(
                    lambda *a: distributions.support_guard(what, distribution(*a)), axes, axis_size=tape.lanes
                )
                zero = zero + guard(*args).reshape(-1, *[1] * (zero.ndim - 1)).astype(zero.dtype)
                b = baselines.evaluate(estimator.baseline, (axes, tape.lanes), args)
                tape = tape.credit(zero, name=what, parts=parts, **b)
            return tape, x

        # The tape is one more argument than the signature of the wrapped function has.
        del stochastic_function.__wrapped__
        return stochastic_function

    return decorate


def sample(
    tape: Tape, distribution: Any, estimator: Estimator | Mixer, *, parts: bool = False
) -> tuple[Tape, jax.Array]:
    """Samples a distribution that is already built, for all lanes at once.

    The node sees the distribution's parameters only; whatever computed them is ordinary JAX. Mixers weigh
    their estimators by the per-lane gradients of those parameters that have the lanes as leading axis.

    Args:
      tape: the current tape.
      distribution: its batch shape starts with the lanes.
      estimator: as in `stochastic`.
      parts: the second batch axis numbers independent parts, as in `stochastic`.

    Returns:
      `(tape, x)`, with x of shape (lanes, ...).

    Raises:
      TypeError, ValueError: at trace time, as `stochastic`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logits):
      ...     d = dist.Categorical(logits=jnp.broadcast_to(logits, (tape.lanes, 3)))
      ...     tape, x = ap.sample(tape, d, ap.likelihood_ratio())
      ...     return tape.cost(jnp.array([1.0, 4.0, 9.0])[x])
      >>> jax.grad(ap.expectation(program, lanes=100), argnums=1)(jax.random.key(0), jnp.zeros(3)).shape
      (3,)
    """
    _require_estimator("sample", estimator)
    what = f"sample ({estimator.name})"
    _require_tape(what, tape)
    distributions.require_distribution(what, distribution)
    tape, key = tape.next_key()
    if isinstance(estimator, Mixer):
        x, zero = _mix_batch(estimator, distribution, key, tape.lanes)
    else:
        x, zero = _surrogate(estimator, distribution, key)
    shape = distributions.batch_shape(distribution, x)
    if shape[:1] != (tape.lanes,) or x.shape[:1] != (tape.lanes,):
        raise ValueError(
            f"{what}: the distribution has batch shape {shape}, which must start with the lanes, ({tape.lanes}, ...): "
            "else lanes would share one sample. Broadcast a parameter with jnp.broadcast_to."
        )
    if parts:
        tape.declare_parts(x.shape, what)
    if zero is not None:
        zero = zero + distributions.support_guard(what, distribution).astype(zero.dtype)
        b = baselines.evaluate(estimator.baseline, None, (distribution,))
        tape = tape.credit(zero, name=what, parts=parts, **b)
    return tape, x


def _mix_lanes(mixer, distribution, axes, args, keys):
    """A mixer's node for a per-lane function: the target is what is differentiated of the shared arguments."""
    leaves, treedef = jax.tree.flatten([x for x, axis in zip(args, axes, strict=True) if axis is None])
    lane = [x for x, axis in zip(args, axes, strict=True) if axis == 0]
    static = [callable(leaf) or isinstance(leaf, str) for leaf in leaves]
    arrays = [leaf for leaf, is_static in zip(leaves, static, strict=True) if not is_static]

    def ordered(arrays, lane):
        arrays, lane = iter(arrays), iter(lane)
        shared = iter(treedef.unflatten([leaf if s else next(arrays) for leaf, s in zip(leaves, static, strict=True)]))
        return distribution(*(next(shared if axis is None else lane) for axis in axes))

    one_lane = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), lane)
    converted, closed_over = hoist(ordered, arrays, one_lane)

    def build(shared, lane):
        arrays, closed_over = shared
        return converted(arrays, lane, *closed_over)

    def forward(shared, lane, keys, perturbed):
        def one(lane, key):
            return _surrogates(mixer, build(shared, lane), key)

        output, pullbacks = jax.vmap(one)(lane, keys)
        # The function is differentiated again in the backward pass: cheaper to keep than its linearization,
        # which holds a copy of the shared arguments for each lane.
        return output, (shared, lane, pullbacks, Static(tuple(map(tuple, map(jax.tree.leaves, perturbed[:2])))))

    def backward(memory, message):
        shared, lane, pullbacks, perturbed = memory

        def one(lane, pullbacks, message):
            _, to_arguments = jax.vjp(build, shared, lane)
            return [_drop_float0(to_arguments(*pullback(message))) for pullback in pullbacks]

        answers = jax.vmap(one)(lane, pullbacks, message)
        weights = mixer.weights([_target(answer, perturbed.value) for answer in answers])
        summed = [jax.tree.map(lambda g: jnp.sum(g, axis=0), to_shared) for to_shared, _ in answers]
        return _weighted_sum(weights, summed), _weighted_sum(weights, [to_lane for _, to_lane in answers]), None

    return _mixer_node(mixer, forward, backward, perturbed=True)((arrays, closed_over), lane, keys)


def _target(answer, perturbed):
    """The per-lane gradients of the differentiated shared arguments, or else of the lane's own."""
    for gradients, flags in zip(answer, perturbed, strict=True):
        leaves = jax.tree.leaves(gradients, is_leaf=lambda g: g is None)
        if target := [g for g, flag in zip(leaves, flags, strict=True) if flag and g is not None]:
            return target
    return []


def _mix_batch(mixer, distribution, key, lanes):
    """A mixer's node for a distribution of all lanes: the target is its parameters that vary by lane."""
    led = [
        jnp.ndim(leaf) > 0 and jnp.shape(leaf)[0] == lanes and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        for leaf in jax.tree.leaves(distribution)
    ]
    if not any(led):
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(distribution)]
        raise ValueError(
            f"sample ({mixer.name}) weighs its estimators by the per-lane gradients of the distribution's parameters, "
            f"and none has the lanes ({lanes}) as leading axis; got shapes {shapes}. Broadcast a parameter to the "
            "lanes, or use ap.stochastic, whose target is the shared arguments."
        )

    def forward(distribution, key):
        return _surrogates(mixer, distribution, key)

    def backward(pullbacks, message):
        answers = [pullback(message)[0] for pullback in pullbacks]
        targets = [[g for g, is_led in zip(jax.tree.leaves(a), led, strict=True) if is_led] for a in answers]
        return _weighted_sum(mixer.weights(targets), answers), None

    return _mixer_node(mixer, forward, backward)(distribution, key)


def _surrogate(estimator, distribution, key, drawn=None):
    """The sample and the zero, with the derivatives that the estimator gives them."""
    if estimator.pathwise is not None:
        x = estimator.pathwise(distribution, key)
    else:
        x = distributions.sample(distribution, key) if drawn is None else drawn
    return x, None if estimator.score is None else estimator.score(distribution, lax.stop_gradient(x))


def _surrogates(mixer, distribution, key):
    """One sample with a zero in the log-density's shape, and each estimator's pullback from both."""
    scoring = [e for e in mixer.estimators if e.score is not None]
    zero = port(jax.eval_shape(lambda: _surrogate(scoring[0], distribution, key)[1])) if scoring else None
    drawn, pullbacks = None, {}
    # Those with a pathwise derivative first, so that the others need not draw the sample again: the compiler
    # does not merge two runs of the random number generator.
    for index in sorted(range(len(mixer.estimators)), key=lambda i: mixer.estimators[i].pathwise is None):

        def padded(distribution, estimator=mixer.estimators[index], drawn=drawn):
            x, own_zero = _surrogate(estimator, distribution, key, drawn)
            # An estimator without a score answers a message to the zero with nothing.
            return x, zero if own_zero is None else own_zero

        (x, _), pullbacks[index] = jax.vjp(padded, distribution)
        drawn = x if drawn is None else drawn
    return (drawn, zero), [pullbacks[index] for index in range(len(mixer.estimators))]


def _weighted_sum(weights, answers):
    def combine(*leaves):
        if not jnp.issubdtype(leaves[0].dtype, jnp.inexact):
            return leaves[0]
        # An exploding estimator of weight 0 must leave nothing behind: 0 * inf would be NaN.
        return sum(jnp.where(w == 0, 0, w.astype(g.dtype) * g) for w, g in zip(weights, leaves, strict=True))

    return jax.tree.map(combine, *answers)


def _drop_float0(tree):
    """None for the cotangents of integers and keys, which `vmap` cannot return."""
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, tree)


def _mixer_node(mixer, forward, backward, **options):
    reason = (
        f"{mixer.name} has no second derivative: its weights are no part of the objective, and differentiating "
        "them would be silently wrong. Use likelihood_ratio() or reparameterization() for higher orders."
    )
    return node(first_order(Propagator(forward, backward), reason), **options)


def _resolve_axes(what, in_axes, args):
    if in_axes is not None and not isinstance(in_axes, tuple | list):
        raise TypeError(f"{what}: in_axes must be a tuple with 0 or None for each argument, got {in_axes!r}")
    axes = (None,) + (0,) * (len(args) - 1) if in_axes is None else tuple(in_axes)
    if len(axes) != len(args):
        raise ValueError(f"{what}: in_axes={axes} is for {len(axes)} argument(s), called with {len(args)}")
    if any(axis not in (None, 0) for axis in axes):
        raise ValueError(f"{what}: in_axes must be 0 (lanes first) or None (shared) for each argument, got {axes}")
    return axes


def _argument_names(function, count):
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    return names if len(names) == count else list(range(count))


def _require_tape(what, tape):
    if not isinstance(tape, Tape):
        raise TypeError(f"{what}: the first argument is the tape, got {type(tape).__name__}; call it as f(tape, ...)")


def _require_estimator(what, estimator):
    if not isinstance(estimator, (Estimator, Mixer)):
        raise TypeError(
            f"{what} takes an estimator, as ap.likelihood_ratio() makes it, got {estimator!r}. Did you forget the "
            "parentheses?"
        )
