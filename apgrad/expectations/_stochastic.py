"""Stochastic nodes: a distribution, a sample of it, and an estimator for the derivative."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from apgrad._programs import jaxprs, pure
from apgrad.expectations import _channels as channels, _distributions as distributions
from apgrad.expectations._lanes import require_batch, require_lanes
from apgrad.expectations._tape import Tape, require_tape
from apgrad.expectations.estimators import _baselines as baselines
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator
from apgrad.expectations.estimators._estimator import Estimator, Mixer, moves, require_derivative, surrogate
from apgrad.expectations.mixing._node import draw_batch_by_mixer, draw_by_mixer


def stochastic(
    estimator: Estimator | Mixer, in_axes: tuple[int | None, ...] | None = None, *, parts: bool | None = None
) -> Callable[[Callable[..., Any]], Callable[..., tuple[Tape, jax.Array]]]:
    """Decorates a function of one lane that returns a distribution: the decorated function samples it on all lanes.

    Args:
      estimator: `reparameterization()`, `likelihood_ratio()`, `total_propagation()` or your own.
      in_axes: for each argument 0 (its leading axis is the lanes) or None (shared). By default the first one is shared.
      parts: the distribution's first batch axis numbers independent parts of a lane, and costs of shape (lanes, parts)
        are charged to a part's own choices alone. With `data` given to `ap.expectation` the parts are the data, and a
        choice of shape (lanes, data, ...) must say whether it is one for each datum.

    Returns:
      A decorator; the decorated function is `(tape, *args, mask=None) -> (tape, x)`, with x of shape (lanes, ...). The
      mask, Booleans (lanes,) known before the choice, is False where a lane's episode is over: the choice is charged
      with nothing. Give the tape costs of 0 there, and the distribution valid parameters.

    Raises:
      TypeError, ValueError: at trace time, for arguments without the lane axis, a function that returns no
        distribution or changes its arguments in place, or a distribution without what the estimator needs.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> @ap.stochastic(ap.total_propagation())
      ... def step(theta, x):
      ...     return dist.Normal(jnp.sin(theta * x), 0.1)
      >>> def program(tape, theta):
      ...     tape, x = step(tape, theta, jnp.ones(tape.lanes))
      ...     return tape.cost(x**2)
      >>> jax.jit(ap.grad(program, lanes=100))(jax.random.key(0), 2.0).shape
      ()
    """
    _require_estimator("stochastic", estimator)

    def decorate(function):
        what = f"{getattr(function, '__name__', 'stochastic function')} ({estimator.name})"
        signature = list(inspect.signature(function).parameters)
        name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
        name += f":{function.__code__.co_firstlineno}" if hasattr(function, "__code__") else ""  # tells lambdas apart

        @functools.wraps(function)
        def stochastic_function(tape, *args, **kwargs):
            require_tape(what, tape)
            mask = kwargs.pop("mask", None) if "mask" not in signature else None
            args = _positional(what, function, args, kwargs, in_axes)
            axes = _resolve_axes(what, in_axes, args)
            names = signature if len(signature) == len(args) else range(len(args))
            lane = {n: x for n, x, axis in zip(names, args, axes, strict=True) if axis == 0}
            require_lanes(what, tape.lanes, lane)
            jaxprs.require_undivided(what, lane, 1)
            tape, key = tape.next_key()
            keys = jax.random.split(key, tape.lanes)

            def distribution(*lane_args):
                made = pure.unchanged("ap.stochastic", function)(*lane_args)
                distributions.require_distribution(what, made)
                return made

            if isinstance(estimator, Mixer):
                jaxprs.require_undivided(what, [x for x, axis in zip(args, axes, strict=True) if axis is None])
                tape, x, charges = draw_by_mixer(tape, estimator, what, name, distribution, axes, args, keys)
            else:
                draw = functools.partial(surrogate, estimator)
                x, density = jax.vmap(lambda key, *a: draw(distribution(*a), key), (0, *axes))(keys, *args)
                charges = [] if density is None else [(density, estimator.baseline)]

            def guard(zeros):
                each = lambda zero, *a: distributions.guarded(what, distribution(*a), zero)
                return jax.vmap(each, (0, *axes))(zeros, *args)

            return _charge(tape, x, charges, guard, (axes, tape.lanes), args, what, parts, mask, estimator)

        # The tape is one more argument than the signature of the wrapped function has.
        del stochastic_function.__wrapped__
        return stochastic_function

    return decorate


def sample(
    tape: Tape,
    distribution: Any,
    estimator: Estimator | Mixer,
    *,
    parts: bool | None = None,
    mask: jax.Array | None = None,
) -> tuple[Tape, jax.Array]:
    """Samples a distribution that is already built, for all lanes at once: `(tape, x)`, with x of shape (lanes, ...).

    Mixers weigh each coordinate of the parameters that start with the lanes; those that lanes share have one weight.

    Args:
      tape: the current tape.
      distribution: its batch shape starts with the lanes.
      estimator: as in `stochastic`.
      parts: the second batch axis numbers independent parts, as in `stochastic`.
      mask: Booleans (lanes,), or (lanes, parts) with `parts`, as in `stochastic`.

    The errors are those of `stochastic`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, p):
      ...     tape, x = ap.sample(tape, dist.Categorical(probs=jnp.tile(p, (tape.lanes, 1))), ap.likelihood_ratio())
      ...     return tape.cost(jnp.array([1.0, 4.0, 9.0])[x])
      >>> jax.jit(ap.grad(program, lanes=100))(jax.random.key(0), jnp.ones(3) / 3).shape
      (3,)
    """
    _require_estimator("sample", estimator)
    what = f"sample ({estimator.name})"
    require_tape(what, tape)
    distributions.require_distribution(what, distribution)
    tape, key = tape.next_key()
    if (known := getattr(distribution, "batch_shape", None)) is not None:
        require_batch(what, tape.lanes, tuple(known))  # before NumPyro or JAX meet other shapes than these
    if isinstance(estimator, Mixer):
        tape, x, charges = draw_batch_by_mixer(tape, estimator, what, distribution, key)
    else:
        x, density = surrogate(estimator, distribution, key)
        charges = [] if density is None else [(density, estimator.baseline)]
    shape = distributions.batch_shape(distribution, x)
    require_batch(what, tape.lanes, shape, x.shape)
    guard = functools.partial(distributions.guarded, what, distribution)
    return _charge(tape, x, charges, guard, None, (distribution,), what, parts, mask, estimator)


def _charge(tape, x, charges, guard, mapped, inputs, what, parts, mask, estimator):
    by_part = channels.declare_parts(tape, x.shape, what, parts, bool(charges))
    for zero, baseline in charges:
        b = baselines.evaluate(baseline, mapped, inputs)
        tape = channels.credit(tape, guard(zero), name=what, parts=by_part, mask=mask, **b)
    return tape, channels.drawn(tape, x, bool(charges), by_part, what if moves(estimator) else None)


def _resolve_axes(what, in_axes, args):
    if in_axes is not None and not isinstance(in_axes, tuple | list):
        raise TypeError(f"{what}: in_axes must be a tuple with 0 or None for each argument, got {in_axes!r}")
    axes = (None,) + (0,) * (len(args) - 1) if in_axes is None else tuple(in_axes)
    if len(axes) != len(args):
        raise ValueError(f"{what}: in_axes={axes} is for {len(axes)} argument(s), called with {len(args)}")
    if any(axis not in (None, 0) for axis in axes):
        raise ValueError(f"{what}: in_axes must be 0 (lanes first) or None (shared) for each argument, got {axes}")
    return axes


def _positional(what, function, args, kwargs, in_axes):
    """All arguments by position, which is how `in_axes` counts them."""
    if not kwargs:
        return args
    bound = inspect.signature(function).bind(*args, **kwargs)
    if bound.kwargs or in_axes is not None:  # else the function fills in its own defaults
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"{what}: in_axes counts arguments by position, and {list(bound.kwargs)} have none")
    return bound.args


def _require_estimator(what, estimator):
    if isinstance(estimator, ChoiceEstimator):
        instead = "tape, y = ap.choose(tape, distribution, continuation, estimator, *args)"
        raise TypeError(f"{what}: {estimator.name} needs what comes after the choice as a function: {instead}")
    if not isinstance(estimator, (Estimator, Mixer)):
        raise TypeError(f"{what} takes an estimator, got {estimator!r}. Did you forget the parentheses?")
    require_derivative(what, estimator)
