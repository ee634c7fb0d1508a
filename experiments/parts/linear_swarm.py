"""Swarms of linear-Gaussian particles, as a program for apgrad and as an exact float64 reference.

Each lane is a particle in the plane with position and velocity, z = (p, v), pushed by a linear feedback K z whose eight
coefficients K (2, 4) are the parameters:

    z_{t+1} = A z_t + B K z_t + eps_t,    eps_t ~ N(0, sigma^2 I),    z_0 ~ N(m_0, s_0^2 I),             (1)

A and B are a step dt = .1 of a particle without friction. A lane's cost is the mean over the H steps of the cost of the
position, which is to come to 0:

    c(p) = |p|^2 / 2,    or    c(p) = 1 - exp(-|p|^2 / 2 s^2),                                           (2)

the quadratic cost, or the saturating cost of PILCO and PIPPS (Deisenroth & Rasmussen, 2011; Parmas et al., 2018) of
width s. Every cost has many choices before it, and every choice has many costs after it. Wanted: the gradient in K of
the expected cost J.

*Exactly.* The state is Gaussian at every step, and with M = A + B K

    m_{t+1} = M m_t,    S_{t+1} = M S_t M' + sigma^2 I.                                                  (3)

The expected costs (2) of a Gaussian position N(m, S) in two dimensions are (|m|^2 + tr S) / 2 and

    1 - |I + S / s^2|^(-1/2) exp(-m' (S + s^2 I)^(-1) m / 2).                                            (4)

`jax.grad` through (3) and (4) in float64 is the gradient.

*With a bounded force*, f tanh(K z / f), the states are only near Gaussian. The reference is then the mean of many
estimates by reparameterization, with its standard error.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import apgrad as ap
from experiments.parts import chaotic_network

DT = 0.1
START = (1.0, -0.7, 0.0, 0.3)
GAINS = ((-0.6, 0.15, -0.6, 0.0), (-0.15, -0.6, 0.0, -0.6))
QUADRATIC = float("inf")  # the width of the quadratic cost


class Swarm(NamedTuple):
    """Where particles start and how they move."""

    spread: float  # s_0, the standard deviation of the start
    sigma: float  # of the noise
    bend: float = 0.0  # 1 / f of the bounded force; 0 for the linear one


SWARMS = {"tight": Swarm(0.1, 0.1), "broad": Swarm(1.0, 0.02), "bounded force": Swarm(1.0, 0.02, 2.0)}


# Those of the chaotic network, here with shaping of every step's cost.
METHODS = {name: chaotic_network.METHODS[name] for name in ("RP", "LR")}
METHODS["LR, no baseline"] = chaotic_network.Method(lambda: ap.likelihood_ratio(baseline=None))
METHODS |= {name: chaotic_network.METHODS[name] for name in ("TP", "GS-LR", "GS-TP", "GR")}


def dynamics() -> tuple[np.ndarray, np.ndarray]:
    """A (4, 4) and B (4, 2) of (1), float32."""
    eye, none = np.eye(2, dtype=np.float32), np.zeros((2, 2), np.float32)
    return np.block([[eye, np.float32(DT) * eye], [none, eye]]), np.concatenate([none, np.float32(DT) * eye])


def cost(position: jax.Array, width: jax.Array) -> jax.Array:
    """The cost (2) of a position (2,): quadratic where the width is infinite."""
    square = jnp.sum(position**2) / 2
    return jnp.where(jnp.isinf(width), square, -jnp.expm1(-square / width**2))


def program(method: str, horizon: int) -> Callable[..., ap.Tape]:
    """The program `(tape, gains, swarm, width) -> tape` whose expected cost is J."""
    chosen = METHODS[method]
    A, B = map(jnp.asarray, dynamics())

    @ap.stochastic(chosen.estimator(), in_axes=(None, None, None, 0))
    def step(gains, sigma, bend, z):
        force = gains @ z
        bounded = jnp.where(bend > 0, bend, 1)
        force = jnp.where(bend > 0, jnp.tanh(bounded * force) / bounded, force)
        return dist.Normal(A @ z + B @ force, sigma)

    def rollout(tape, gains, swarm, width):
        tape, key = tape.next_key()

        def body(carry, _):
            tape, z = step(carry[0], gains, swarm.sigma, swarm.bend, carry[1])
            if chosen.resampling:
                tape, z = ap.gaussian_resampling(tape, z)
            charged = lambda position: cost(position, width) / horizon
            tape = tape.cost(charged, z[:, :2], shaping=ap.gaussian_shaping() if chosen.shaping else None)
            return (tape, z), None

        start = jnp.array(START) + swarm.spread * jax.random.normal(key, (tape.lanes, 4))
        return jax.lax.scan(body, (tape, start), length=horizon)[0][0]

    return rollout


def gradients(method: str, swarm: Swarm, width: float, horizon: int, lanes: int, count: int, seed: int) -> np.ndarray:
    """Independent estimates of the gradient in the gains, (count, 8) float64 of float32 precision.

    Compiled once for a method, a horizon, and the numbers of lanes and estimates.

    Example:
      >>> found = gradients("RP", SWARMS["broad"], 0.5, horizon=3, lanes=200, count=50, seed=0)
      >>> error = found.std(axis=0, ddof=1) / 50**0.5
      >>> bool(np.all(abs(found.mean(axis=0) - exact(SWARMS["broad"], 0.5, horizon=3)) < 4 * error))
      True
    """
    keys = jax.random.split(jax.random.key(seed), count)
    arguments = jnp.array(GAINS), jax.tree.map(jnp.float32, swarm), jnp.float32(width)
    return np.asarray(_compiled(method, horizon, lanes)(keys, *arguments), np.float64)


@functools.cache
def _compiled(method, horizon, lanes):
    gradient = jax.grad(ap.expectation(program(method, horizon), lanes=lanes), argnums=1)
    return jax.jit(lambda keys, *args: jax.lax.map(lambda key: gradient(key, *args).reshape(-1), keys))


def exact(swarm: Swarm, width: float, horizon: int) -> np.ndarray:
    """The gradient in the gains, (8,) float64, by (3) and (4).

    Raises:
      ValueError: for a bounded force, with which states are not Gaussian.
    """
    if swarm.bend:
        raise ValueError(f"exact needs a swarm with a linear force, bend 0, got bend {swarm.bend}")
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(lambda gains: expected_cost(gains, swarm, width, horizon)))
        return np.asarray(gradient(jnp.array(GAINS))).reshape(-1)


def expected_cost(gains: jax.Array, swarm: Swarm, width: float, horizon: int) -> jax.Array:
    """J with a linear force."""
    A, B = (jnp.asarray(matrix, gains.dtype) for matrix in dynamics())
    M, eye = A + B @ gains, jnp.eye(4, dtype=gains.dtype)

    def body(carry, _):
        m, S = M @ carry[0], M @ carry[1] @ M.T + swarm.sigma**2 * eye
        return (m, S), expected_position_cost(m[:2], S[:2, :2], width)

    start = jnp.array(START, gains.dtype), swarm.spread**2 * eye
    return jnp.mean(jax.lax.scan(body, start, length=horizon)[1])


def expected_position_cost(m: jax.Array, S: jax.Array, width: float) -> jax.Array:
    """The expected cost (4), or its quadratic counterpart, of a position N(m, S)."""
    if np.isinf(width):
        return (m @ m + jnp.trace(S)) / 2
    wider = S + width**2 * jnp.eye(2, dtype=S.dtype)
    return 1 - width**2 / jnp.sqrt(jnp.linalg.det(wider)) * jnp.exp(-m @ jnp.linalg.solve(wider, m) / 2)
