"""Control of a reaction-diffusion equation with a random memory (Oktay et al., 2021, section 5, eq. 8, Fig. 7,
Appendix B).

    phi_{t+1} = M phi_t + dt C_t(theta) * phi_t,    L = mean_t |phi_t - target_t|^2

on a grid of 33 x 33, of whose points the square is the mean, with dt = 1/4096. A reverse pass needs of each state phi_t
two things: dL/dphi_t = 2 (phi_t - target_t) / (33^2 T), and the coefficient of C_t in the next step, dt phi_t.
Equation 8 samples each independently of the other: k of the grid's points, times d/k. (With one sample for both, as in
the published code, and without the factor, the expectation is about f^2 times the gradient, and its errors correlate.)
Messages and C_t are computed anew.

    python -m experiments.rad_pde
    python -m experiments.rad_pde --preset paper

The preset paper is the paper's setting: time 10, which is 40,960 steps, 800 iterations of Adam, sampling with
replacement. The paper does not say the learning rate, the range of the uniform start or how many starts; ours are 1e-2,
[-1, 1] and four, the same for every fraction. Its code has 1e-2 too, but one start in [-.1, .1], where the loss is far
smaller, and the same points in every step and iteration. Figure 7 draws some of the fractions; the preset has all that
are known from the paper and its code. The memory of a fraction is both samples; that of exact reverse mode is the
states alone, which is half of what the paper counts.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from apgrad import memory as rad
from apgrad._ground.propagator import Propagator, node
from experiments import harness

N, DT, D = 33, 1 / 4096, 0.25
GRID = np.linspace(0, 1, N, dtype=np.float32)[1:-1]
X, Y = np.meshgrid(GRID, GRID, indexing="ij")
START = np.sin(np.pi * X) * np.sin(np.pi * Y)
POINTS = (N - 2) ** 2
BLOCK = 64


class Config(harness.Config):
    """Options of this experiment."""

    fractions: tuple[float, ...] = (1.0, 0.1, 0.01)  # of the grid's points that are kept; 1 is exact.
    time: float = 0.0625  # the horizon; a unit has 4096 steps.
    iterations: int = 200  # of Adam at 1e-2.
    draws: int = 50  # of the gradient at the start, for its error.
    starts: int = 1  # of theta; each fraction is trained from each of them.


PARTIAL = True
PAPER = Config(fractions=(1.0, 0.1, 0.01, 0.005, 0.002, 0.001), time=10.0, iterations=800, draws=50, starts=4)


def source(theta: jax.Array, t: jax.Array) -> jax.Array:
    """C at times (n,), a Fourier series of seven terms in x and t: (n, 31), which holds for every y."""
    t = jnp.pi * t[:, None]
    s, c = jnp.sin(t), jnp.cos(t)
    x, y = np.sin(2 * np.pi * GRID), np.cos(2 * np.pi * GRID)
    terms = [jnp.ones_like(s), s, c, x * s, x * c, y * s, y * c]
    return sum((theta[i] * term for i, term in enumerate(terms)), jnp.zeros(()))


def target(t: jax.Array) -> jax.Array:
    """phi_0 + sin(pi t) sin(2 pi x) sin(pi y) / 4 at times (n,): (n, 31, 31)."""
    wave = jnp.asarray(np.sin(2 * np.pi * X) * np.sin(np.pi * Y))
    return jnp.asarray(START) + 0.25 * jnp.sin(jnp.pi * t)[:, None, None] * wave


def advance(phi: jax.Array, c: jax.Array) -> jax.Array:
    """One step, M phi + dt C phi, of the inner points, with c = dt C (31,); linear in phi and symmetric."""
    p = jnp.pad(phi, 1)
    around = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * phi
    return phi + D * DT * (N - 1) ** 2 * around + c[:, None] * phi


def steps_in_a_block(sampler: rad.Sampler | None, block: int) -> Any:
    """`(key, phi, theta, i) -> (phi after block i, squared errors at its steps)`.

    All but the stencil is computed for the block's steps at once, which is what makes a step cheap; the states of one
    block are there in full meanwhile, forward and backward. Each step is an example to the sampler: it draws its own
    points. With no sampler the memory is the states, and the gradient exact.
    """
    like = jax.ShapeDtypeStruct((block, POINTS), jnp.float32)

    def times(i):
        return (i * block + jnp.arange(block)).astype(jnp.float32) * DT

    def forward(key, phi, theta, i):
        t = times(i)
        phi, states = jax.lax.scan(lambda p, c: (advance(p, c), p), phi, DT * source(theta, t))
        errors = states - target(t)
        one, two = jax.random.split(key)
        kept = states
        if sampler is not None:
            kept = (sampler.keep(one, states.reshape(like.shape)), sampler.keep(two, errors.reshape(like.shape)))
        return (phi, jnp.sum(errors**2, (1, 2)) / N**2), (key, theta, i, kept)

    def backward(memory, message):
        key, theta, i, kept = memory
        to_phi, to_errors = message
        t = times(i)
        if sampler is None:
            states, errors = kept, kept - target(t)
        else:
            keys = jax.random.split(key)
            restored = (sampler.restore(k, m, like) for k, m in zip(keys, kept, strict=True))
            states, errors = (found.reshape(block, N - 2, N - 2) for found in restored)
        pushes = to_errors[:, None, None] * (2 / N**2) * errors
        pushed = lambda m, step: (advance(m, step[0]) + step[1], m)
        to_phi, messages = jax.lax.scan(pushed, to_phi, (DT * source(theta, t), pushes), reverse=True)
        pull = jax.linear_transpose(lambda v: source(v, t), jax.ShapeDtypeStruct(theta.shape, theta.dtype))
        return None, to_phi, pull(DT * jnp.sum(states * messages, 2))[0], None

    return node(Propagator(forward, backward))


def make_loss(fraction: float | str, steps: int, block: int = BLOCK) -> Any:
    """`(key, theta) -> L`, with blocks of at most `block` steps.

    "checkpoint" is plain JAX with `jax.checkpoint`: exact, with blocks of about sqrt(steps).
    """
    longest = int(steps**0.5) if fraction == "checkpoint" else block
    block = max(b for b in range(1, longest + 1) if steps % b == 0)
    if fraction == "checkpoint":

        def step(phi, t, theta):
            error = jnp.sum((phi - target(t[None])[0]) ** 2) / N**2
            return advance(phi, DT * source(theta, t[None])[0]), error

        @jax.checkpoint
        def run(key, phi, theta, i):
            del key
            t = (i * block + jnp.arange(block)).astype(jnp.float32) * DT
            return jax.lax.scan(lambda phi, t: step(phi, t, theta), phi, t)

    else:
        run = steps_in_a_block(None if fraction == 1 else rad.different_sample(float(fraction)), block)

    def loss(key, theta):
        def body(phi, i):
            return run(jax.random.fold_in(key, i), phi, theta, i)

        return jnp.mean(jax.lax.scan(body, jnp.asarray(START), jnp.arange(steps // block))[1])

    return loss


def cells(config: Config) -> list[harness.Cell]:
    """The fractions, start by start, so that a run cut short has all of them; and the checkpoint, once."""
    cells: list[harness.Cell] = [{"fraction": f, "start": s} for s in range(config.starts) for f in config.fractions]
    cells.insert(len(config.fractions), {"fraction": "checkpoint", "start": 0})
    return cells


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    steps = round(config.time / DT)
    loss = make_loss(cell["fraction"], steps)
    # The paper starts in a stable state: theta_0 balances the diffusion of phi_0; the others are uniform.
    start = jax.random.fold_in(jax.random.key(config.seed), cell["start"])
    theta = jax.random.uniform(start, (7,), minval=-1.0).at[0].set(2 * np.pi**2 * D)
    both = jax.jit(jax.value_and_grad(loss, argnums=1))
    optimizer = optax.adam(1e-2)
    state = (theta, optimizer.init(theta), np.zeros(0))
    # The checkpoint's training would be that of fraction 1.
    iterations = 1 if cell["fraction"] == "checkpoint" else config.iterations
    checkpoint = harness.checkpoint(config, cell)
    state = checkpoint.load(state)
    while len(state[2]) < iterations:
        now, moments, curve = state
        value, gradient = both(jax.random.fold_in(jax.random.key(seed), len(curve)), now)
        updates, moments = optimizer.update(gradient, moments)
        state = (optax.apply_updates(now, updates), moments, np.append(curve, float(value)))
        if len(state[2]) % 20 == 0:
            checkpoint.save(state)
    exact = jax.jit(jax.grad(make_loss("checkpoint", steps), argnums=1))(jax.random.key(0), theta)
    began = time.process_time()
    gradients = [both(k, theta)[1].tolist() for k in jax.random.split(jax.random.key(seed + 1), config.draws)]
    microseconds = (time.process_time() - began) / config.draws / steps * 1e6
    kept = rad.residuals(lambda t: loss(jax.random.key(0), t), theta)
    result = {"curve": state[2], "theta": state[0], "gradients": gradients, "exact": exact}
    result |= {"residual_bytes": sum(r.nbytes for r in kept), "microseconds_a_step": microseconds}
    return result | {"temp_bytes": rad.temp_bytes(loss, jax.random.key(0), theta)}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Error of the gradient, of its mean over the draws, memory, and the loss reached, over the starts.

    Of an unfinished run, the starts that all fractions have are reported, so that fractions compare.
    """
    finished = {f: {c["start"] for c, _ in records if c["fraction"] == f} for f in config.fractions}
    shared = set.intersection(*(starts for starts in finished.values() if starts))
    records = [(c, r) for c, r in records if c["fraction"] == "checkpoint" or c["start"] in shared]
    rows, curves = [], {}
    for fraction in (*config.fractions, "checkpoint"):
        runs = {c["start"]: r for c, r in records if c["fraction"] == fraction}
        if not runs:
            continue
        errors, means, spreads = [], [], []
        for result in runs.values():
            g, exact = np.array(result["gradients"]), np.array(result["exact"])
            errors.append(np.mean(np.sum((g - exact) ** 2, 1)) / np.sum(exact**2))
            means.append(np.linalg.norm(g.mean(0) - exact) / np.linalg.norm(exact))
            spreads.append(np.linalg.norm(g.std(0, ddof=1)) / np.sqrt(len(g)) / np.linalg.norm(exact))
        first, curves[fraction] = runs[min(runs)], np.array([r["curve"] for r in runs.values()])
        finals = curves[fraction][:, -1].tolist()
        row = {"fraction": fraction, "starts": len(runs), "iterations": len(first["curve"])}
        row |= {"initial_loss": np.mean(curves[fraction][:, 0]), "final_loss": np.mean(finals), "final_losses": finals}
        row |= {"error_of_mean": means[0], "error_of_mean_se": spreads[0]}
        row["noise_over_signal"] = np.sqrt(np.mean(errors))
        row |= {k: first[k] for k in ("residual_bytes", "temp_bytes")}
        rows.append(row | {"microseconds_a_step": np.mean([r["microseconds_a_step"] for r in runs.values()])})
    columns = ("residual_bytes", "temp_bytes", "microseconds_a_step", "initial_loss", "final_loss")
    figure, ((ax,),) = harness.panels()
    for row in rows[: len(curves) - ("checkpoint" in curves)]:
        mean = np.exp(np.mean(np.log(curves[row["fraction"]]), 0))
        ax.plot(mean, label=f"{row['fraction']}: {row['residual_bytes'] / 1e6:.2f} MB")
    ax.set(yscale="log", xlabel="iteration", ylabel="loss, geometric mean over starts")
    ax.set_title(f"{len(shared)} of {config.starts} starts")
    ax.legend()
    table = harness.table(rows, "fraction", "noise_over_signal", "error_of_mean", *columns)
    return harness.Report({}, rows, table, figure)


if __name__ == "__main__":
    harness.main()
