"""A random choice whose alternatives are looked at: `ap.choose`.

A choice x ~ p(theta) is followed by the cost c(x) and by a value y(x), and y by further costs R(y). The expectation
J = E[c(x)] + E[R(y(x))] has two terms, and each of them has an estimator of its own.

* *The cost of the continuation.* The estimator may evaluate c where it likes. It answers with a C that is right in
  expectation, given the past, and so are its derivatives. The tape adds C as a cost **before** the choice is credited:
  its term is `C exp(p)`, p the zeros of the earlier choices alone (`_tape.py`), right to the orders to which C is.
* *What follows y.* Costs after y are known for the sample x alone, and charged by the likelihood ratio. Where the
  continuation hands on no array, there is no score. The derivative of y at the fixed sample is JAX's.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.messages import describe, tuple_of
from apgrad._ground.primitives import mark
from apgrad._ground.warning import warn
from apgrad._programs.jaxprs import trace
from apgrad.expectations import _channels as channels, _distributions as distributions
from apgrad.expectations._lanes import require_batch, require_lanes
from apgrad.expectations._ledger import Mark
from apgrad.expectations._programs.jumps import Jump, jump
from apgrad.expectations._programs.leading_axes import is_sum_over
from apgrad.expectations._tape import Tape, require_tape
from apgrad.expectations.estimators import _baselines as baselines
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator
from apgrad.expectations.estimators._discrete import base, relaxable
from apgrad.expectations.estimators._estimator import Estimator, Mixer, once


def choose(
    tape: Tape,
    distribution: Any,
    continuation: Callable[..., tuple[Any, Any]],
    estimator: ChoiceEstimator,
    *args: Any,
    baseline: baselines.Baseline = "leave_one_out",
) -> tuple[Tape, Any]:
    """Samples a distribution and calls the continuation with the sample; the estimator also calls it at alternatives.

    Args:
      tape: the current tape.
      distribution: its batch shape starts with the lanes; further axes are independent choices of one lane.
      continuation: `(x, *args) -> (cost, y)` for one lane, pure: a scalar cost, and what goes on in the program, a
        pytree or None. It is differentiable with respect to its arguments and all that it closes over.
      estimator: an `ap.ChoiceEstimator`, such as `rloo(samples)`, `enumeration()`, `disarm()` or `measure_valued()`.
      *args: pytrees with the lanes as leading axis, such as examples. The continuation closes over what lanes share.
      baseline: what is taken off the costs that follow y, as in `likelihood_ratio`.

    Returns:
      `(tape, y)`, with the lanes as leading axis of y.

    Raises:
      TypeError, ValueError: at trace time, for an estimator of another kind, a distribution that the estimator does not
        take, or a continuation that does not return a scalar cost and a value.

    Warns:
      UserWarning: at trace time, where y holds no array and the cost is a sum of terms, each of which sees one of the
        lane's choices, such as the mean over a minibatch: then each choice pays for the others' costs.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, w, x, y):     # x (examples, 4), y (examples,): a minibatch, whose examples are the lanes
      ...     return ap.choose(tape, dist.Bernoulli(logits=x @ w), lambda z, y: ((z - y) ** 2, None), ap.rloo(4), y)[0]
      >>> x, y = jnp.eye(4), jnp.array([0.0, 1.0, 0.0, 1.0])
      >>> jax.jit(ap.grad(program, lanes=4))(jax.random.key(0), jnp.zeros(4), x, y).shape     # the mean over examples
      (4,)
    """
    if isinstance(estimator, Estimator | Mixer):
        instead = "ap.stochastic(estimator) or ap.sample(tape, distribution, estimator), and costs to the tape"
        raise TypeError(f"choose: {estimator.name} does not look at alternatives of a choice; give it to {instead}")
    if not isinstance(estimator, ChoiceEstimator):
        raise TypeError(f"choose needs an estimator like ap.arm(), got {estimator!r}. Did you forget the parentheses?")
    what = f"choose ({estimator.name})"
    baselines.require_baseline(what, baseline)
    require_tape(what, tape)
    distributions.require_distribution(what, distribution)
    distributions.require_density(what, distribution)
    require_lanes(what, tape.lanes, args)
    tape, key = tape.next_key()
    require_batch(what, tape.lanes, tuple(getattr(distribution, "batch_shape", ())))

    seen = functools.partial(relaxable, distribution) if estimator.relaxed else lambda x: x

    def cost_of(x, *lane):
        cost = jnp.asarray(continuation(x, *lane)[0])
        return cost if jnp.issubdtype(cost.dtype, jnp.floating) else cost.astype(jnp.result_type(float))

    def costs(xs):
        return jax.vmap(lambda x: jax.vmap(cost_of)(x, *args))(xs)

    drawn = jax.eval_shape(lambda key: distributions.sample(distribution, key), key)
    form, program = _form(what, continuation, jax.eval_shape(seen, drawn), args)
    x, cost = _pair(what, estimator.estimate(distribution, key, costs), drawn)
    collecting = tape._require_current(what).collecting
    cost = mark(cost, Mark.CHOSEN, 0) if collecting else channels.drawn(tape, cost, False)
    x = channels.drawn(tape, lax.stop_gradient(x), bool(jax.tree.leaves(form)))
    if estimator.relaxed:
        _warn_of_jumps(what, program)
    tape = tape.cost(cost if estimator.every_order else once(estimator.name, cost))
    if not jax.tree.leaves(form):
        events = len(getattr(base(distribution), "event_shape", ()))
        _warn_of_a_batch(what, program, x.shape[: x.ndim - events])
        return tape, form
    y = jax.vmap(lambda x, *lane: continuation(x, *lane)[1])(seen(x), *args)
    distributions.require_unrounded(f"{what} that hands a value on", distribution, x)
    zero = distributions.guarded(what, distribution, distributions.score(what, distribution, x))
    b = baselines.evaluate(baseline, None, (distribution,))
    return channels.credit(tape, zero, name=what, of_choose=True, **b), y


def _pair(what, found, drawn):
    wanted = (
        f"{what}: estimate must return (x, cost), in this order: a sample x of shape {drawn.shape} and dtype "
        f"{drawn.dtype}, as the distribution's, and a cost (lanes,) of floating point, as costs(xs) are"
    )
    x, cost = tuple_of(2, wanted, found)
    arrays = isinstance(x, jax.Array) and isinstance(cost, jax.Array)
    if not (arrays and (x.shape, x.dtype) == (drawn.shape, drawn.dtype) and jnp.issubdtype(cost.dtype, jnp.floating)):
        raise TypeError(f"{wanted}; got ({describe(x)}, {describe(cost)})")
    return found


def _form(what, continuation, drawn, args):
    lane = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)), (drawn, *args))

    def pair(*inputs):
        wanted = f"{what}: the continuation must return (cost, y), y may be None"
        cost, y = tuple_of(2, wanted, continuation(*inputs))
        return jnp.asarray(cost), y

    program, (cost, y) = trace(pair, *lane)
    if cost.shape != () or not any(jnp.issubdtype(cost.dtype, kind) for kind in (jnp.floating, jnp.integer, bool)):
        found = f"got shape {cost.shape} and dtype {cost.dtype}"
        raise ValueError(f"{what}: a lane's cost must be one real number, {found}. {_MINIBATCH}")
    return y, program


_MINIBATCH = (
    "For a minibatch let each example be a lane: ap.expectation(program, lanes=examples) without data=, a distribution "
    "of batch shape (examples,), and the examples as arguments after the estimator, ap.choose(tape, distribution, "
    "lambda x, example: (cost, None), estimator, examples). help(ap.choose) has a whole program."
)


def _warn_of_a_batch(what, program, shape):
    axes = [0, *[None] * (len(program.jaxpr.invars) - 1)]
    if len(shape) > 1 and shape[1] > 1 and is_sum_over(program, axes):
        warn(
            f"{what}: a lane makes {shape[1]} choices, and its cost is a sum or a mean of {shape[1]} terms that see "
            "one of them each. So every choice pays for the costs of all the others: the gradient is right, but its "
            f"variance (or the number of evaluations) can be {shape[1]} times what it need be. {_MINIBATCH}"
        )


def _warn_of_jumps(what, program):
    if jump(program) > Jump.MAY_JUMP:
        warn(
            f"{what}: the cost is evaluated between the outcomes too, and jumps there. The gradient is "
            "right, but its variance is higher than without the relaxation. Write the cost as a differentiable "
            "function of x (a product with a one-hot vector), or use ap.disarm() or ap.rloo()."
        )
