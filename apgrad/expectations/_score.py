"""Choices that were made elsewhere: `ap.score`.

A value x was drawn from a *behaviour* distribution with density b(x); the program wants the expectation under its own,
p_theta (importance sampling; Precup, Sutton & Singh, "Eligibility traces for off-policy policy evaluation", ICML 2000):

    E_p[c(x)] = E_b[c(x) w],   w = p_theta(x) / b(x),   d/dtheta E_p[c(x)] = E_b[c(x) w d log p_theta(x) / dtheta]

if b > 0 wherever p > 0. The right hand sides are the derivatives of c(x) exp(z) with

    z = log p_theta(x) - log b(x),    b a constant.

A plain choice adds a zero with the derivatives of log p_theta to the tape's zeros (`_tape.py`); here it is z. So costs
and messages are weighed by the product of the ratios before them. A baseline v that does not depend on the lane's own
choices adds v (1 - exp(z)), whose expectation is 0 with all of its derivatives, since E_b[exp(z)] is 1 for every theta.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.primitives import refuse_derivative
from apgrad.expectations import _channels as channels, _distributions as distributions, _supports as supports
from apgrad.expectations._lanes import over, require_batch, require_lanes, require_mask
from apgrad.expectations._ledger import Ledger
from apgrad.expectations._ports import STANDARDIZED
from apgrad.expectations._tape import Tape, require_tape
from apgrad.expectations.estimators import _baselines as baselines


def score(
    tape: Tape,
    distribution: Any,
    value: Any,
    *,
    behaviour_log_prob: Any,
    baseline: baselines.Baseline = "leave_one_out",
    parts: bool | None = None,
    mask: Any = None,
) -> Tape:
    """Charges later costs to a value that was drawn elsewhere: REINFORCE for cached generation and replay.

    Costs after it are weighed by p(value) / behaviour(value), so that the objective and its derivatives are those under
    `distribution`. Where the two differ much, the ratios' product over a lane varies much. `aux` is not weighed.

    Args:
      tape: the current tape.
      distribution: what the expectation is under; its batch shape starts with the lanes. The behaviour must be able to
        draw whatever this one can: where it was cut to the top k or top p, set the same logits to -inf here.
      value: what was drawn, of the shape of a sample, (lanes, ...). It is data, without derivative.
      behaviour_log_prob: the log-density that the value was drawn with, after temperature and the like, of the
        distribution's batch shape, in float32 or wider; a constant to differentiation.
      baseline: as for `likelihood_ratio`. In the leave-one-out mean a lane's cost counts by its squared weight. Give
        None where lanes' values are not independent (mirrored, or of one buffer).
      parts: the second batch axis numbers independent parts, as in `sample`.
      mask: Booleans of (lanes,), up to the batch shape, such as (lanes, tokens): False where nothing was chosen.

    Raises:
      TypeError, ValueError: at trace time, for shapes and dtypes that do not fit, a value with a derivative, a
        distribution without a right score, and beside `tape.discount`, a shaped cost or a standardized baseline.
      FloatingPointError: when it runs, for impossible values, and log-densities not finite or, if discrete, above 0.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> thrown = jax.random.bernoulli(jax.random.key(0), 0.5, (100_000,)).astype(int)
      >>> def program(tape, p):
      ...     coins = dist.Bernoulli(probs=jnp.full(tape.lanes, p))
      ...     return ap.score(tape, coins, thrown, behaviour_log_prob=jnp.full(tape.lanes, jnp.log(0.5))).cost(thrown)
      >>> [float(v).__round__(2) for v in jax.jit(ap.value_and_grad(program, lanes=100_000))(jax.random.key(1), 0.3)]
      [0.3, 1.0]
    """
    what = "score"
    require_tape(what, tape)
    distributions.require_distribution(what, distribution)
    baselines.require_baseline(what, baseline)
    value, behaviour = jnp.asarray(value), jnp.asarray(behaviour_log_prob)
    shape = distributions.batch_shape(distribution, value)
    sampled = jax.eval_shape(lambda key: distributions.sample(distribution, key), jax.random.key(0)).shape
    if value.shape != sampled:
        raise ValueError(f"{what}: the value has shape {value.shape}, and samples of the distribution have {sampled}")
    require_lanes(what, tape.lanes, {"value": value})
    require_batch(what, tape.lanes, shape)
    if behaviour.shape != shape:
        raise ValueError(f"{what}: behaviour_log_prob has shape {behaviour.shape}, expected that of the batch, {shape}")
    if not jnp.issubdtype(behaviour.dtype, jnp.floating) or jnp.finfo(behaviour.dtype).bits < 32:
        wide = "its rounding would be an error of every weight. Take log_softmax(logits.astype(jnp.float32))."
        raise TypeError(f"{what}: behaviour_log_prob has dtype {behaviour.dtype}, and {wide}")
    lost = f"{what}: the value depends on what is differentiated, and it is data here: its derivative would be lost"
    reason = f"{lost}. Use ap.sample with reparameterization(), or give jax.lax.stop_gradient(value)."
    value, behaviour = refuse_derivative(value, reason), lax.stop_gradient(behaviour)
    if mask is not None:
        mask = jnp.broadcast_to(require_mask(what, mask, shape), shape)
        if jnp.issubdtype(value.dtype, jnp.floating):  # a masked value may be outside of the support: NaN times 0
            inside = distributions.sample(distribution, jax.random.key(0)).astype(value.dtype)
            value = jnp.where(over(mask, value.ndim), value, inside)
    distributions.require_density(what, distribution)
    with distributions.standard_promotion(), distributions.without_validation():
        density = distributions.log_prob(distributions.once_at_kinks(what, distribution), value)
        ratio = lax.stop_gradient(density) - behaviour
        ratio = jnp.where(_impossible(distribution, value, behaviour), jnp.nan, ratio)
        zero = distributions.guarded(what, distribution, density)
    by_part, alive = channels.declare_parts(tape, value.shape, what, parts, True), None
    if mask is not None:
        zero, ratio = jnp.where(mask, zero, 0), jnp.where(mask, ratio, 0)
        alive = jnp.any(mask, axis=tuple(range(1 + by_part, mask.ndim)))
    channels.declare(tape, what, "weighed")
    b = baselines.evaluate(baseline, None, (distribution,))
    return channels.credit(tape, zero, log_weight=ratio, name=what, parts=by_part, mask=alive, **b)


def require_weighable(ledger: Ledger) -> None:
    standardized = any(port.arithmetic == STANDARDIZED for port in ledger.ports)
    done = ledger.declared
    for found, name, instead in (
        ("discounting" in done, "tape.discount fades weights with the credit", "give discounted costs to tape.cost"),
        ("shaping" in done, "a shaped cost is not weighed", "use tape.cost without shaping"),
        (standardized, "the standardized baseline charges scores that are not weighed", "use another baseline"),
    ):
        if found and "weighed" in done:
            raise ValueError(f"{done['weighed']} weighs the costs after it, and {name}: {instead}, or call ap.sample")


def _impossible(distribution, value, behaviour):
    """Where a value is outside of the support, or a discrete value's log-density above 0 by more than rounding."""
    discrete = supports.is_discrete(distribution, jax.random.key(0))
    wrong = behaviour > 0.01 if discrete else jnp.zeros(behaviour.shape, bool)
    support = supports.declared(distribution, "support")
    return wrong if support is None else wrong | ~jnp.broadcast_to(support(value), wrong.shape)
