"""Influence balancing: a recurrence whose short truncations have a gradient of the wrong sign, in closed form.

Tallec & Ollivier, 2017 ("Unbiased online recurrent optimization"), as Vicol, Metz & Sohl-Dickstein, 2021 ("Unbiased
gradient estimation in unrolled computation graphs with persistent evolution strategies") have it. The state s has
n = 23 numbers, the meta-parameter theta is one number,

    s' = A s + theta v,    A = (I + U) / 2,    v = (1, ..., 1, -1, ..., -1),    loss (s_1 - 1)^2 / 2

where U has ones above its diagonal and v begins with 10 positive numbers. What is positive reaches s_1 first, so few
steps say that theta moves s_1 up. But the fixed point has s_i = s_{i+1} + 2 theta v_i, so s_1 = 2 (10 - 13) theta
= -6 theta, with the loss (6 theta + 1)^2 / 2 and the derivative 6 (6 theta + 1); the best theta is -1/6.

Published is a state that goes on for ever, from ones. Here an unroll has T = 200 steps from ones, and the losses of the
second half count. What is left of the start at step t is the chance that t flips of a coin have at most 22 heads, 1e-8
at t = 100; so the closed form holds to float precision.
"""

import jax
import jax.numpy as jnp

from apgrad import meta

STATES, POSITIVE = 23, 10
START = 0.5
"""The published start of theta."""
REACH = 2 * (POSITIVE - (STATES - POSITIVE))


def problem(length: int = 200) -> meta.Problem:
    """The recurrence; an unroll's loss is the mean of the losses of its second half."""
    sign = jnp.where(jnp.arange(STATES) < POSITIVE, 1.0, -1.0)

    def init(theta, key):
        return jnp.ones(STATES), jnp.zeros((), int)

    def step(theta, state):
        s, t = state
        s = (s + jnp.append(s[1:], 0.0)) / 2 + theta * sign
        counts = t >= length - length // 2
        return (s, t + 1), jnp.where(counts, (s[0] - 1) ** 2 / 2 / (length // 2), 0.0)

    perturb = (lambda state: state[0], lambda state, s: (s, state[1]))
    return meta.Problem(init, step, lambda theta, state: jnp.zeros(()), length, perturb)


def steady_state(theta: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """The loss of the fixed point and its derivative, scalars.

    Example:
      >>> from experiments.parts import influence_balancing
      >>> [float(x) for x in influence_balancing.steady_state(0.5)]
      [8.0, 24.0]
    """
    error = REACH * jnp.asarray(theta, float) - 1
    return error**2 / 2, REACH * error
