"""The predicted noise of a random memory is what is measured, layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import rad_prediction


def test_the_backward_pass_of_squares_is_the_sum_over_entries_of_the_input():
    """sum_i v_i |a_i|^2 by the definition, with the Jacobian of the kernel's gradient by the layer's input."""
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 2, 2))
    x, message, v = (jax.random.normal(jax.random.key(i), (2, 4, 4, 2)) for i in (1, 2, 3))

    def gradient(x):
        return jax.vjp(lambda w: rad_prediction.apply("conv", x, w), kernel)[1](message)[0]

    def by_squares(v):
        return jax.vjp(lambda w: rad_prediction.apply("conv", v, w), kernel)[1](message**2)[0].sum()

    jacobian, found = jax.jit(lambda: (jax.jacrev(gradient)(x), by_squares(v**2)))()
    np.testing.assert_allclose(found, jnp.sum(jnp.sum(jacobian**2, (0, 1, 2, 3)) * v**2), rtol=1e-4)


@pytest.mark.long
def test_predictions_hold_and_dense_layers_lose(run):
    rows = run(rad_prediction, "--networks mlp rows --batch 40 --training-steps 5 --draws 60")["rows"]
    assert len(rows) == 14
    for row in rows:
        assert abs(row["predicted_over_measured"] - 1) < 4 * row["standard_error"], row
        dense, rounded = "dense" in row["layer"], "rounding" in row["sampler"]
        if dense:
            np.testing.assert_allclose(row["coherence"], 1, rtol=1e-4)
            assert (row["measured_against_smaller_batch"] > 1) != rounded, row
