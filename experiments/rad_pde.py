"""Control of a reaction-diffusion equation with a random memory (Oktay et al., 2021, section 5, eq. 8, Fig. 7,
Appendix B).

    phi_{t+1} = M phi_t + dt C_t(theta) * phi_t,    L = mean_t |phi_t - target_t|^2

on a grid of 33 x 33, with dt = 1/4096. A reverse pass needs of each state phi_t two things: dL/dphi_t = 2 (phi_t -
target_t) dx^2 / T, and the coefficient of C_t in the next step, dt phi_t. Equation 8 samples each independently of
the other: k of the grid's points, times d/k. (With one sample for both, as in the published code, and without the
factor, the expectation is about f^2 times the gradient, and its errors correlate.) Messages and C_t are computed anew.

    python -m experiments.rad_pde
    python -m experiments.rad_pde --preset paper

The paper has 40,960 steps and 800 iterations, four hours of a GPU for each fraction; the preset paper has time 1
instead of 10, and 100 iterations.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from apgrad import memory as rad
from apgrad._ground.propagator import Propagator, node
from experiments import harness

N, DT, D = 33, 1 / 4096, 0.25
GRID = np.linspace(0, 1, N, dtype=np.float32)
X, Y = np.meshgrid(GRID, GRID, indexing="ij")
START = np.sin(np.pi * X) * np.sin(np.pi * Y)
POINTS = (N - 2) ** 2


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      fractions: of the grid's points that are kept; 1 is exact.
      time: the horizon; a unit has 4096 steps.
      iterations: of Adam at 1e-2.
      draws: of the gradient at the start, for its error.
    """

    fractions: tuple[float, ...] = (1.0, 0.1, 0.01)
    time: float = 0.0625
    iterations: int = 20
    draws: int = 50


PAPER = Config(fractions=(1.0, 0.1, 0.01, 0.005, 0.002, 0.001), time=1.0, iterations=100, draws=30)


def source(theta: jax.Array, t: jax.Array) -> jax.Array:
    """C, a Fourier series of seven terms in x and t, (33, 33)."""
    s, c = jnp.sin(jnp.pi * t), jnp.cos(jnp.pi * t)
    x, y = np.sin(2 * np.pi * X), np.cos(2 * np.pi * X)
    terms = [1.0, s, c, x * s, x * c, y * s, y * c]
    return functools.reduce(jnp.add, [theta[i] * term for i, term in enumerate(terms)])


def target(t: jax.Array) -> jax.Array:
    """phi_0 + sin(pi t) sin(2 pi x) sin(pi y) / 4."""
    return jnp.asarray(START) + 0.25 * jnp.sin(jnp.pi * t) * (np.sin(2 * np.pi * X) * np.sin(np.pi * Y)).astype(
        np.float32
    )


def diffuse(phi: jax.Array) -> jax.Array:
    """M phi: linear, zero on the boundary."""
    inner = phi[1:-1, 1:-1]
    around = phi[2:, 1:-1] + phi[:-2, 1:-1] + phi[1:-1, 2:] + phi[1:-1, :-2] - 4 * inner
    return jnp.pad(inner + D * DT * (N - 1) ** 2 * around, 1)


def sampled_step(sampler: rad.Sampler | None) -> Any:
    """`(key, phi, theta, t) -> (next phi, squared error at t)`; with no sampler plain JAX."""

    def plain(phi, theta, t):
        return diffuse(phi) + DT * source(theta, t) * jnp.pad(phi[1:-1, 1:-1], 1), jnp.mean((phi - target(t)) ** 2)

    if sampler is None:
        return lambda key, phi, theta, t: plain(phi, theta, t)

    like = jax.ShapeDtypeStruct((POINTS,), jnp.float32)

    def forward(key, phi, theta, t):
        one, two = jax.random.split(key)
        inner = phi[1:-1, 1:-1].reshape(-1)
        error = (phi - target(t))[1:-1, 1:-1].reshape(-1)
        memory = (key, sampler.keep(one, inner), sampler.keep(two, error), theta, t)
        return plain(phi, theta, t), memory

    def backward(memory, message):
        key, inner, error, theta, t = memory
        one, two = jax.random.split(key)
        to_phi, to_loss = message
        restored = jnp.pad(sampler.restore(one, inner, like).reshape(N - 2, N - 2), 1)
        back = jax.linear_transpose(
            lambda phi: diffuse(phi) + DT * source(theta, t) * jnp.pad(phi[1:-1, 1:-1], 1),
            jax.ShapeDtypeStruct((N, N), jnp.float32),
        )(to_phi)[0]
        back = back + to_loss * 2 / N**2 * jnp.pad(sampler.restore(two, error, like).reshape(N - 2, N - 2), 1)
        pull = jax.linear_transpose(lambda v: source(v, t), jax.ShapeDtypeStruct(theta.shape, theta.dtype))
        return None, back, pull(DT * restored * to_phi)[0], None

    return node(Propagator(forward, backward))


def make_loss(fraction: float | str, steps: int) -> Any:
    """`(key, theta) -> L`; "checkpoint" is exact, with blocks of about sqrt(steps)."""
    exact = fraction in (1.0, "checkpoint")
    step = sampled_step(None if exact else rad.different_sample(float(fraction), replacement=False))

    def loss(key, theta):
        def body(phi, i):
            return step(jax.random.fold_in(key, i), phi, theta, i.astype(jnp.float32) * DT)

        if fraction == "checkpoint":
            block = max(b for b in range(1, int(steps**0.5) + 1) if steps % b == 0)
            inner = jax.checkpoint(lambda phi, i: jax.lax.scan(body, phi, i))
            _, errors = jax.lax.scan(inner, jnp.asarray(START), jnp.arange(steps).reshape(-1, block))
        else:
            _, errors = jax.lax.scan(body, jnp.asarray(START), jnp.arange(steps))
        return jnp.mean(errors)

    return loss


def cells(config: Config) -> list[harness.Cell]:
    """The fractions, and the checkpoint."""
    return [{"fraction": f} for f in (*config.fractions, "checkpoint")]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Loss along the iterations, errors of the gradient at the start, and memory."""
    steps = round(config.time / DT)
    loss = make_loss(cell["fraction"], steps)
    # The paper starts in a stable state: theta_0 balances the diffusion of phi_0; the others are uniform.
    theta = jax.random.uniform(jax.random.key(config.seed), (7,), minval=-1.0).at[0].set(2 * np.pi**2 * D)
    exact = jax.jit(jax.grad(make_loss("checkpoint", steps), argnums=1))(jax.random.key(0), theta)
    both = jax.jit(jax.value_and_grad(loss, argnums=1))
    gradients = [both(k, theta)[1] for k in jax.random.split(jax.random.key(seed + 1), config.draws)]
    optimizer = optax.adam(1e-2)
    state, curve = optimizer.init(theta), []
    for i in range(config.iterations):
        value, gradient = both(jax.random.fold_in(jax.random.key(seed), i), theta)
        curve.append(float(value))
        updates, state = optimizer.update(gradient, state)
        theta = optax.apply_updates(theta, updates)
    return {
        "curve": curve,
        "gradients": np.asarray(gradients).tolist(),
        "exact": np.asarray(exact).tolist(),
        "residual_bytes": sum(r.nbytes for r in rad.residuals(lambda t: loss(jax.random.key(0), t), theta)),
        "temp_bytes": rad.temp_bytes(lambda t: loss(jax.random.key(0), t), theta),
    }


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Error of the gradient, of its mean over the draws, memory, and the loss reached."""
    rows = []
    for cell, result in records:
        g, exact = np.array(result["gradients"]), np.array(result["exact"])
        error = g.std(0, ddof=1) / np.sqrt(len(g))
        rows.append(
            {
                "fraction": cell["fraction"],
                "final_loss": result["curve"][-1],
                "noise_over_signal": float(np.sqrt(np.mean(np.sum((g - exact) ** 2, 1)) / np.sum(exact**2))),
                "error_of_mean": float(np.linalg.norm(g.mean(0) - exact) / np.linalg.norm(exact)),
                "error_of_mean_se": float(np.linalg.norm(error) / np.linalg.norm(exact)),
                "residual_bytes": result["residual_bytes"],
                "temp_bytes": result["temp_bytes"],
            }
        )
    lines = ["  fraction   noise/signal   error of mean (s.e.)    residual MB   temp MB   loss"]
    lines += [
        f"{r['fraction']!s:>10} {r['noise_over_signal']:14.2g} "
        f"{r['error_of_mean']:13.2g} ({r['error_of_mean_se']:.1g}) "
        f"{r['residual_bytes'] / 1e6:14.3f} {r['temp_bytes'] / 1e6:9.3f}   {r['final_loss']:.3g}"
        for r in rows
    ]
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    ax = figure.subplots()
    for cell, result in records:
        ax.plot(result["curve"], label=str(cell["fraction"]))
    ax.set(yscale="log", xlabel="iteration", ylabel="loss")
    ax.legend(frameon=False, fontsize=7)
    return harness.Report({}, rows, "\n".join(lines), figure)


if __name__ == "__main__":
    harness.main()
