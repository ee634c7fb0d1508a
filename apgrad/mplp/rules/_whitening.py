"""Whitening of a layer's inputs as the layer learns: recursive least squares inside a learned rule.

The inputs of a layer are correlated, so a gradient step for one example disturbs what others have learned. For linear
regression the cure is recursive least squares (Plackett, 1950): keep P = (I + lambda sum x x^T)^-1 and step along P x
in place of x. Here each dense layer keeps its own P, and lambda is meta-trained. A minibatch enters P divided by its
root mean square and by sqrt(N), so P depends on the directions of the inputs only, and stays well conditioned.

*Full.* For a minibatch X (rows, N), by Woodbury's identity with S = I/lambda + X P X^T (rows, rows):

    P <- P - P X^T S^-1 X P,        P_new X^T = P X^T S^-1 / lambda

So the whitened inputs cost no further product. With many rows (as in a convolution) P is (P^-1 + lambda X^T X)^-1. P
shrinks like 1/t, so learning would stop: P <- P + epsilon (I - P), epsilon meta-trained, keeps P between 0 and I.

*Window.* If a layer is wide, P is the identity less a matrix of low rank, made of the last r rows Z (r, N):

    P = I - Z^T (I/lambda + Z Z^T)^-1 Z

The Gram matrix Z Z^T is kept beside Z; Z X^T is among its columns. What leaves the window is forgotten.
"""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve

from apgrad.mplp._protocol import Site

State = dict[str, jax.Array]


def init(site: Site, limit: int, rank: int) -> State:
    """`P` = I, (N, N); or zeros for r rows, as many whole minibatches as `rank` holds: `rows` (r, N), `gram` (r, r)."""
    rows, inputs, _ = site.shape
    if inputs <= limit or rows > rank:
        return {"P": jnp.eye(inputs, dtype=float)}
    size = rows * (rank // rows)
    return {"rows": jnp.zeros((size, inputs), float), "gram": jnp.zeros((size, size), float)}


@jax.default_matmul_precision("highest")  # with the few bits of a GPU's or TPU's default, P becomes indefinite
def whiten(x: jax.Array, state: State, strength: jax.Array, forget: jax.Array) -> tuple[jax.Array, State]:
    """P x with the new P, and the new state, for a minibatch x (rows, N); strength is lambda, forget epsilon."""
    size = jnp.sqrt(x.shape[1] * (jnp.mean(x**2) + 1e-12))
    scaled = x / size
    if "P" in state:
        whitened, P = _full(scaled, state["P"], strength, forget)
        return whitened * size, {"P": P}
    rows = x.shape[0]
    Z = jnp.concatenate([state["rows"][rows:], scaled])
    new = Z @ scaled.T
    gram = jnp.concatenate([jnp.concatenate([state["gram"][rows:, rows:], new[:-rows]], axis=1), new.T])
    # An empty row of the window has zeros in the Gram matrix, so it has no effect.
    # Solved by Cholesky's method, which is accurate where rows repeat and make the Gram matrix nearly singular.
    inner = jnp.linalg.cholesky(gram + jnp.eye(gram.shape[0], dtype=gram.dtype) / strength)
    return (scaled - cho_solve((inner, True), new).T @ Z) * size, {"rows": Z, "gram": gram}


def _full(x, P, strength, forget):
    rows, inputs = x.shape
    eye = jnp.eye(inputs, dtype=P.dtype)
    if rows <= inputs:
        PX = P @ x.T
        # S = L L^T is small, rows by rows, with eigenvalues of at least 1 / lambda. The update V^T V,
        # V = L^-1 X P, keeps P symmetric to the last bit; with S^-1 X P rounding errors add up until P is indefinite.
        # L^-1 is formed because a batched triangular solve with N right-hand sides took three times as long (CPU).
        inverse = jnp.linalg.inv(jnp.linalg.cholesky(x @ PX + jnp.eye(rows, dtype=P.dtype) / strength))
        V = inverse @ PX.T
        whitened, P = inverse.T @ V / strength, P - V.T @ V
    else:
        P = jnp.linalg.inv(eye + strength * P @ (x.T @ x)) @ P
        whitened = x @ P
    return whitened, P + forget * (eye - P)
