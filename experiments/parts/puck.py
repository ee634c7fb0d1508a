"""A puck among round posts: a simulator with contacts, and a task for a policy that pushes it.

A puck of mass 1 slides without friction in a square of half-width 2, and is pushed by a force of at most 4 in each
direction. The goal is the middle of a ring of six posts of radius .3, whose centres are 1 away from it. Posts and walls
are stiff springs with dampers (Hunt & Crossley, 1975): at a depth d > 0, with the puck leaving at the speed v, they
push it out with

    f = 2000 d (1 - .05 v),

which is zero where a contact begins. So the state is a continuous function of all that came before, and pathwise
derivatives are unbiased. But a round post scatters: two pucks that hit it side by side leave in different directions,
as in a billiard of Sinai's, and through many contacts the derivatives grow exponentially.

A step is five of semi-implicit Euler (.01 each), and noise of deviation .01 in the place and .05 in the velocity. A
lane starts 1.7 away from the goal in any direction, with a velocity N(0, 2^2 I). The cost of a state is the squared
distance from the goal over 4.
"""

import jax
import jax.numpy as jnp
import numpy as np

FORCE, BOX, RADIUS, BEGIN, SPEED = 4.0, 2.0, 0.3, 1.7, 2.0
STIFFNESS, DAMPING, DT, SUBSTEPS = 2000.0, 0.05, 0.01, 5
NOISE = (0.01, 0.01, 0.05, 0.05)
ANGLES = np.pi * np.arange(6) / 3
POSTS = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1).astype(np.float32)


def step(s: jax.Array, force: jax.Array) -> jax.Array:
    """Place and velocity (4,) a step later, without noise, under a force (2,) that stays the same."""
    p, v = s[:2], s[2:]
    push = lambda depth, leaving: STIFFNESS * jax.nn.relu(depth) * (1 - DAMPING * leaving)
    for _ in range(SUBSTEPS):
        away = p - POSTS
        distance = jnp.sqrt(jnp.sum(away**2, axis=1))
        out = away / distance[:, None]
        posts = push(RADIUS - distance, out @ v) @ out
        walls = -jnp.sign(p) * push(jnp.abs(p) - BOX, -jnp.sign(p) * v)
        v = v + DT * (force + posts + walls)
        p = p + DT * v
    return jnp.concatenate([p, v])


def start(key: jax.Array, lanes: int) -> jax.Array:
    """States (lanes, 4) to start from."""
    turn, speed = jax.random.split(key)
    angle = jax.random.uniform(turn, (lanes,), maxval=2 * jnp.pi)
    place = BEGIN * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return jnp.concatenate([place, SPEED * jax.random.normal(speed, (lanes, 2))], axis=1)


def cost(s: jax.Array) -> jax.Array:
    """The cost of states (..., 4)."""
    return jnp.sum(s[..., :2] ** 2, axis=-1) / 4
