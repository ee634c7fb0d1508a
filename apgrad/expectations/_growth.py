"""How perturbations grow along a trajectory: the spectrum of its Jacobian.

Over t steps small perturbations grow by the singular values of J = J_t ... J_1. Orthogonal iteration
V <- orth(J' orth(J V)) finds the largest. Orthogonalizing after each step (Benettin et al., 1980),
J_i Q_{i-1} = Q_i R_i, keeps it from overflow: log sigma_k = sum_i log |R_i[k, k]|.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree


class Growth(NamedTuple):
    """The growth of perturbations along a trajectory, the largest first; printed, a line each. Arrays are float64.

    Attributes:
      log_singular_values: (num,), the logarithms of the largest singular values of the Jacobian of all steps.
      exponents: (num,), these logarithms over the number of steps: finite-time Lyapunov exponents.
      steps: (steps, num), the logarithm of the growth in each step; the sum over steps is `log_singular_values`.
    """

    log_singular_values: np.ndarray
    exponents: np.ndarray
    steps: np.ndarray

    def __str__(self) -> str:
        rows = zip(self.exponents, self.log_singular_values / math.log(10), strict=True)
        return "\n".join(f"exponent {e:+.3f}: {math.exp(e):.3g} a step, 10^{s:+.1f} in all" for e, s in rows)


def perturbation_growth(
    step: Callable[[Any, Any], Any],
    state: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    num: int = 1,
    rounds: int = 10,
) -> Growth:
    """The largest singular values of the Jacobian of many steps, by orthogonal power iteration.

    Args:
      step: `(state, x) -> state`, of one lane, without randomness: the noise may be in `xs`.
      state: a pytree of float32 or float64 arrays, where the trajectory begins.
      xs: inputs of the steps, with the steps as leading axis, as in `lax.scan`.
      length: the number of steps, without `xs`.
      num: how many singular values are found.
      rounds: rounds of the iteration. In each, the error of value k falls by the factor (sigma_{num+1} / sigma_k)^2.

    Raises:
      ValueError: for a `num` that is not from 1 to the state's size, no steps, a step that changes the state's form, or
        a state, before or after a step, with other dtypes, such as integers, which a perturbation would round.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> growth = ap.diagnostics.perturbation_growth(lambda x, _: 4 * x * (1 - x), jnp.float32(0.3), length=1000)
      >>> round(float(growth.exponents[0]), 2)     # the logistic map: ln 2
      0.69
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        dtype = jnp.result_type(leaf)
        if not _is_wide(dtype):
            raise ValueError(
                f"perturbation_growth needs a state of float32 or float64, without PRNG keys and counters: "
                f"state{jax.tree_util.keystr(path)} has dtype {dtype}. Give the steps their noise and numbers in xs, "
                "convert half precision by x.astype(jnp.float32), and close over constants"
            )
    if (xs is None and length is None) or not all(map(jnp.ndim, jax.tree.leaves(xs))):
        wanted = "give length=, or xs, the steps' inputs with the steps as leading axis"
        raise ValueError(f"perturbation_growth needs the number of steps: {wanted}")
    flat, restore = ravel_pytree(state)
    if not (1 <= num <= flat.size and rounds >= 1):
        raise ValueError(
            f"perturbation_growth needs a round, and num from 1 to the state's size: got rounds={rounds}, num={num}, "
            f"size {flat.size}"
        )

    def move(z, x):
        new = step(restore(z), x)
        before, after = (jax.tree.map(jnp.shape, s) for s in (state, new))
        wrong = [x.dtype for x in map(jnp.asarray, jax.tree.leaves(new)) if not _is_wide(x.dtype)]
        if after != before or wrong:
            found = f"{after}{f' with dtype {wrong[0]}, which a perturbation would round' if wrong else ''}"
            raise ValueError(f"step must return a state of the form that it got, {before}, got {found}")
        return ravel_pytree(new)[0].astype(z.dtype)

    def forward(frame, zx):
        z, x = zx
        _, jvp = jax.linearize(lambda z: move(z, x), z)
        frame, r = jnp.linalg.qr(jax.vmap(jvp, 1, 1)(frame))
        return frame, jnp.log(jnp.abs(jnp.diagonal(r)))

    def back(frame, zx):
        z, x = zx
        _, vjp = jax.vjp(lambda z: move(z, x), z)
        return jnp.linalg.qr(jax.vmap(lambda v: vjp(v)[0], 1, 1)(frame))[0], None

    @jax.jit
    def run(flat, xs, frame):
        _, visited = lax.scan(lambda z, x: (move(z, x), z), flat, xs, length)

        def one_round(frame, _):
            outward, _ = lax.scan(forward, frame, (visited, xs))
            return lax.scan(back, outward, (visited, xs), reverse=True)[0], None

        frame, _ = lax.scan(one_round, frame, length=rounds)
        return lax.scan(forward, frame, (visited, xs))[1]

    frame = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (flat.size, num), flat.dtype))[0]
    steps = np.asarray(run(flat, xs, frame), np.float64)
    if not len(steps):
        raise ValueError("perturbation_growth needs at least one step, got none")
    total = steps.sum(0)
    order = np.argsort(-total)
    return Growth(total[order], total[order] / len(steps), steps[:, order])


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32
