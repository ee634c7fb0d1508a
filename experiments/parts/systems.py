"""Steps of Runge and Kutta, and the Lorenz system that policies are to hold still."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

DT = 0.08  # of a step of the Lorenz system


def runge_kutta(velocity: Callable[[jax.Array], jax.Array], s: jax.Array, dt: float) -> jax.Array:
    """The state a step of fourth order later."""
    b = velocity(s + dt / 2 * (a := velocity(s)))
    c = velocity(s + dt / 2 * b)
    return s + dt / 6 * (a + 2 * b + 2 * c + velocity(s + dt * c))


def lorenz(s: jax.Array, rho: float | jax.Array, force: jax.Array) -> jax.Array:
    """The state (3,) a step later, under a force on y that stays the same."""

    def velocity(s):
        x, y, z = s
        return jnp.stack([10 * (y - x), x * (rho - z) - y + force, x * y - 8 / 3 * z])

    return runge_kutta(velocity, s, DT)
