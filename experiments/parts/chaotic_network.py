"""The chaotic network of Wang (1991), as a program for apgrad and as an exact float64 reference.

A network of two sigmoid units that goes to chaos by period doubling as its inverse temperature beta grows,
with a little noise and a loss at the end (Parmas & Seno, Proppo, 2022, section 4.1 and eq. 2):

    x_{t+1} = sigmoid(beta W x_t) + eps_t,    W = [[-5, 5], [-25, 25]],    eps_t ~ N(0, sigma^2 I),    (1)
    x_0 = (.35, .55),    sigma = .001,    L = |x_H - 1|^2 / 2.

Wanted: the derivative in beta of the expected loss J.

*Exactly.* W has rank one, W x = (5 u, 25 u) with u = x_2 - x_1, so the state enters the next one through u alone,
and u is a Markov chain on a line:

    u_{t+1} = g(u_t) + N(0, 2 sigma^2),    g(u) = s(25 beta u) - s(5 beta u),    s the sigmoid.         (2)

Let F_n(u) be the expected loss n steps before the end. With y = 5 beta u,

    F_1(u) = ((s(y) - 1)^2 + (s(5 y) - 1)^2) / 2 + sigma^2,    F_{n+1}(u) = S_n(g(u)),                   (3)

S_n = F_n * N(0, 2 sigma^2) being a convolution, and J = F_H(u_0), u_0 = .2. Differentiated in beta,

    dF_{n+1}(u) = (dF_n * N)(g(u)) + (F_n * N')(g(u)) dg(u)/dbeta .                                      (4)

Both are computed on a uniform grid of u. There the trapezoidal rule converges faster than any power of the spacing
once that resolves F, whose features are as narrow as the noise over max g' (some 5 beta); between grid points S
is a cubic spline. |g| never exceeds .31, whatever beta, so the grid ends 10 standard deviations beyond, where
1e-23 of the mass is lost. From 20 grid points a standard deviation to 30, no gradient of
`experiments.chaos` moves by more than 2e-8.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy.interpolate import CubicSpline
from scipy.signal import fftconvolve
from scipy.special import expit

import apgrad as ap

SIGMA = 1e-3
START = (0.35, 0.55)
WEIGHTS = ((-5.0, 5.0), (-25.0, 25.0))


class Method(NamedTuple):
    """A way to estimate the gradient: the estimator at each step, and what is done around it."""

    estimator: Callable[[], ap.Estimator | ap.Mixer]
    cross_fit: bool = False
    shaping: bool = False  # Gaussian shaping of the loss
    resampling: bool = False  # Gaussian resampling after each step
    clip_factor: float | None = None  # of `ap.clip_lanes` after each step


def _mixed(weights: ap.weights.Weights) -> Callable[[], ap.Mixer]:
    return lambda: ap.total_propagation(weights=weights)


PUBLISHED = _mixed(ap.weights.inverse_variance())
# TP is total propagation as published, and what follows it weighs otherwise; CF is cross-fitted, so unbiased.
METHODS = {
    "RP": Method(ap.reparameterization),
    "LR": Method(ap.likelihood_ratio),
    "TP": Method(PUBLISHED),
    "TP-CF": Method(PUBLISHED, cross_fit=True),
    "local-CF": Method(_mixed(ap.weights.local_covariance()), cross_fit=True),
    "suffix-CF": Method(_mixed(ap.weights.suffix_covariance()), cross_fit=True),
    "unshrunk-CF": Method(_mixed(ap.weights.decoupled(shrinkage=0)), cross_fit=True),
    "decoupled-CF": Method(ap.total_propagation, cross_fit=True),
    "parameters-CF": Method(lambda: ap.total_propagation(target="parameters"), cross_fit=True),
    "GS-LR": Method(ap.likelihood_ratio, shaping=True),
    "GS-TP": Method(PUBLISHED, shaping=True),
    "GR": Method(ap.reparameterization, resampling=True),
    "clipped at 4": Method(ap.reparameterization, clip_factor=4.0),
    "clipped at 10": Method(ap.reparameterization, clip_factor=10.0),
}
METHODS |= dict.fromkeys(("decoupled", "adaptive", "by state"), Method(ap.total_propagation))


PAST = 200  # earlier calls from which `ap.adaptive` has its weights


def objective(method: str, horizon: int, lanes: int, parameters: int = 1, check_nan: bool = True) -> Callable[..., Any]:
    """The expected loss as an ordinary JAX function, `(key, theta) -> scalar`.

    With 1 parameter theta is beta, a scalar; with 5 it is beta and the four elements of W, row by row.

    Example:
      >>> import jax
      >>> gradient = jax.grad(objective("RP", horizon=2, lanes=100), argnums=1)(jax.random.key(0), 1.0)
      >>> float(gradient).__round__(3) == round(exact(1.0, [2])[2].gradient, 3)
      True
    """
    cross_fit = METHODS[method].cross_fit
    return ap.expectation(program(method, horizon, parameters), lanes, cross_fit=cross_fit, check_nan=check_nan)


def program(method: str, horizon: int, parameters: int = 1) -> Callable[[ap.Tape, Any], ap.Tape]:
    """The program whose expected cost is the loss."""
    chosen = METHODS[method]
    weights = jnp.array(WEIGHTS)

    @ap.stochastic(chosen.estimator())
    def step(theta, x):
        beta, matrix = (theta, weights) if parameters == 1 else (theta[0], theta[1:].reshape(2, 2))
        return dist.Normal(jax.nn.sigmoid(beta * matrix @ x), SIGMA)

    def loss(x):
        return 0.5 * jnp.sum((x - 1) ** 2)

    def rollout(tape, theta):
        def body(carry, _):
            tape, x = step(carry[0], theta, carry[1])
            if chosen.resampling:
                tape, x = ap.gaussian_resampling(tape, x)
            if chosen.clip_factor is not None:
                tape, x = ap.clip_lanes(tape, x, chosen.clip_factor)
            return (tape, x), None

        start = jnp.broadcast_to(jnp.array(START), (tape.lanes, 2))
        (tape, x), _ = jax.lax.scan(body, (tape, start), length=horizon)
        return tape.cost(loss, x, shaping=ap.gaussian_shaping() if chosen.shaping else None)

    return rollout


def gradients(
    method: str, beta: float, horizon: int, lanes: int, num_estimates: int, seed: int, parameters: int = 1
) -> np.ndarray:
    """Independent estimates of the gradient, (num_estimates,) float32, or (num_estimates, 5).

    Compiled once for a method, horizon and number of lanes and estimates: beta and the seed are arguments. The method
    "adaptive" is `ap.adaptive` with one state for all estimates, from `PAST` earlier calls; "by state" is its option.
    """
    keys = jax.random.split(jax.random.key(seed), num_estimates)
    theta = jnp.float32(beta) if parameters == 1 else jnp.array([beta, *np.ravel(WEIGHTS)], jnp.float32)
    return np.asarray(_compiled(method, horizon, lanes, parameters)(keys, theta))


@functools.cache
def _compiled(method, horizon, lanes, parameters):
    if method in ("adaptive", "by state"):
        return jax.jit(_adaptive(method, horizon, lanes, parameters))
    gradient = jax.grad(objective(method, horizon, lanes, parameters), argnums=1)
    return jax.jit(lambda keys, beta: jax.lax.map(lambda key: gradient(key, beta), keys, batch_size=min(10, len(keys))))


def _adaptive(method, horizon, lanes, parameters):
    made = ap.adaptive(program(method, horizon, parameters), lanes, by_state=method == "by state")
    call = lambda state, key, theta: made.value_and_grad(key, state, theta)

    def estimates(keys, theta):
        first, *_ = past = jax.random.split(jax.random.fold_in(keys[0], 1), PAST + 1)
        state, _ = jax.lax.scan(lambda s, key: (call(s, key, theta)[2], None), made.init(first, theta), past[1:])
        return jax.lax.map(lambda key: call(state, key, theta)[1], keys, batch_size=min(10, len(keys)))

    return estimates


class Exact(NamedTuple):
    """The expected loss, its derivative in beta, and the numerical error of the derivative."""

    loss: float
    gradient: float
    error: float


def reference(beta: float, horizons: Sequence[int]) -> dict[int, Exact]:
    """The exact expected loss and gradient at each horizon, with the change from a coarser grid as the error.

    Example:
      >>> reference(1.5, [50])[50].gradient.__round__(4)
      0.0672
    """
    coarse, fine = (exact(beta, horizons, points) for points in (20, 30))
    return {h: fine[h]._replace(error=abs(fine[h].gradient - coarse[h].gradient)) for h in horizons}


def exact(beta: float, horizons: Sequence[int], points: int = 30) -> dict[int, Exact]:
    """The recursion (3) and (4) on one grid; the error is not known (nan).

    One pass serves all horizons, because the chain is the same at every step.
    """
    if not beta > 0 or min(horizons) < 1:
        raise ValueError(f"exact needs a positive beta and horizons of at least 1, got {beta} and {list(horizons)}")
    deviation = np.sqrt(2) * SIGMA
    spacing = deviation / points
    radius = 10 * points  # of the kernel, in grid points
    inner = int(np.ceil(0.31 / spacing))  # the grid of S covers every value of g
    v = spacing * np.arange(-inner, inner + 1)
    grid = spacing * np.arange(-inner - radius, inner + radius + 1)
    u = np.append(grid, START[1] - START[0])  # the last element is the start
    first, second = expit(5 * beta * u), expit(25 * beta * u)
    image = second - first
    slope = 25 * u * second * (1 - second) - 5 * u * first * (1 - first)  # dg/dbeta

    w = spacing * np.arange(-radius, radius + 1)
    density = np.exp(-0.5 * (w / deviation) ** 2)
    density = density / density.sum()
    derivative = -w / deviation**2 * density

    def smooth(values, kernel):
        return CubicSpline(v, fftconvolve(values[:-1], kernel, mode="valid"))(image)

    F = 0.5 * ((first - 1) ** 2 + (second - 1) ** 2) + SIGMA**2
    dF = 5 * u * (first - 1) * first * (1 - first) + 25 * u * (second - 1) * second * (1 - second)
    found = {}
    for steps in range(1, max(horizons) + 1):
        if steps > 1:
            F, dF = smooth(F, density), smooth(dF, density) + smooth(F, derivative) * slope
        if steps in horizons:
            found[steps] = Exact(float(F[-1]), float(dF[-1]), float("nan"))
    return found


def transition(u: np.ndarray, beta: float | np.ndarray) -> np.ndarray:
    """g(u) of (2): the next difference x_2 - x_1, without noise."""
    return expit(25 * beta * u) - expit(5 * beta * u)


def transition_slope(u: np.ndarray, beta: float | np.ndarray) -> np.ndarray:
    """dg/du, the factor by which a small difference grows in a step."""
    first, second = expit(5 * beta * u), expit(25 * beta * u)
    return 25 * beta * second * (1 - second) - 5 * beta * first * (1 - first)
