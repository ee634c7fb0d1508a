"""What the tests of randomized memory share."""

import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap

KEY = jax.random.key(0)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), float)


def remembered(function, *args):
    """The bytes that reverse mode remembers."""
    return sum(r.nbytes for r in ap.memory.residuals(function, *args))


def assert_unbiased(gradient, truth, draws=4000, seed=0):
    """Within 4 standard errors, element by element; what does not vary, to float error of the array's largest entry."""

    def batch(keys):
        return jax.vmap(gradient)(keys)

    keys = jax.random.split(jax.random.key(seed), draws)
    found = jax.jit(lambda keys: jax.lax.map(batch, keys.reshape(-1, 250)))(keys)
    varied = False
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(truth), strict=True):
        a, b = np.asarray(a, np.float64).reshape(draws, *np.shape(b)), np.asarray(b, np.float64)
        error = a.std(0) / np.sqrt(draws)
        distance = np.abs(a.mean(0) - b)
        allowed = 4 * error + 5e-6 * np.abs(b).max()
        assert np.all(distance <= allowed), (
            f"{jax.tree_util.keystr(path)} is off by {np.max(distance / np.maximum(error, 1e-30)):.1f} standard errors"
        )
        varied |= bool(np.any(error > 1e-5 * np.abs(b).max()))
    assert varied, "nothing is random"
