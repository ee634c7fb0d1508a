"""The scan of inner steps, and a network without a rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from apgrad import mplp
from tests.mplp.graphs import close
from tests.refusals import refused

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("remat", [False, True, 1, 3, 99])
def test_a_scan_is_the_same_whatever_it_remembers(remat):
    """Seven steps, in segments that leave a rest, with inputs and outputs that are pytrees."""

    def total(start, inputs, scan):
        step = lambda s, x: (jnp.sin(s) + x["a"], {"s": s, "square": s[:, None] * x["a"]})
        end, outputs = scan(step, start, inputs)
        return jnp.sum(end) + jnp.sum(outputs["square"] ** 2), outputs

    start, inputs = jnp.ones(2), {"a": jnp.linspace(0.0, 1.0, 14).reshape(7, 2)}
    scan = lambda step, carry, inputs: mplp.scan_steps(step, carry, inputs, remat=remat)
    derivative = lambda scan: jax.jit(lambda s, x: jax.value_and_grad(total, (0, 1), has_aux=True)(s, x, scan))
    close(derivative(scan)(start, inputs), derivative(jax.lax.scan)(start, inputs), rtol=1e-6)


@pytest.mark.parametrize("remat", [False, 2])
def test_inputs_of_several_lengths_are_refused(remat):
    scan = functools.partial(mplp.scan_steps, lambda s, x: (s, s), jnp.ones(2), remat=remat)
    for inputs, length in [((jnp.ones(5), jnp.ones(7)), None), (jnp.ones(10), 5), (jnp.ones(()), None), (None, None)]:
        refused(ValueError, "one leading axis", scan, inputs, length=length)


def test_a_scan_of_no_steps_and_a_segment_of_none():
    empty, _ = mplp.scan_steps(lambda s, x: (s + x, s), jnp.ones(2), jnp.ones((0, 2)), remat=True)
    np.testing.assert_array_equal(empty, 1.0)
    with pytest.raises(ValueError, match="remat must be an integer of at least 1, got 0"):
        mplp.scan_steps(lambda s, x: (s + x, s), jnp.ones(2), jnp.ones((3, 2)), remat=0)


def test_a_network_without_a_rule_is_made_of_plain_functions():
    """It has a forward-mode derivative, and the outputs of its layers are those of the model's parts."""
    first, second = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1))
    network, params = mplp.from_nnx(nnx.Sequential(first, jnp.tanh, second), mplp.squared_error)
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    hidden = x @ first.kernel[...]
    expected = [hidden, jnp.tanh(hidden), jnp.tanh(hidden) @ second.kernel[...]]
    names, outputs = zip(*network.layer_outputs(params, x), strict=True)
    assert names == ("0_dense", "1_activation", "2_dense")
    close(list(outputs), expected, rtol=1e-6)
    value, tangent = jax.jvp(lambda x: network.predict(params, x), (x,), (jnp.ones_like(x),))
    np.testing.assert_array_equal(value, outputs[-1])
    slope = (1 - jnp.tanh(hidden) ** 2) * (jnp.ones_like(x) @ first.kernel[...])
    np.testing.assert_allclose(tangent, slope @ second.kernel[...], rtol=1e-5)
