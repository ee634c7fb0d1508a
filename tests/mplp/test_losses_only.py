"""What a network's loss may depend on: what loses its message is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apgrad import mplp
from tests.mplp.graphs import jit


def parts():
    params = {"w": jnp.full((3, 2), 0.3), "v": jnp.full((2, 2), 0.2)}
    return params, (jnp.arange(12.0).reshape(4, 3) / 10, jnp.ones((4, 2)))


def network(extra, weight=lambda hidden, params: 1.0):
    def run(places, params, batch):
        x, y = batch
        hidden = mplp.activation(places["a"], jnp.tanh, mplp.dense(places["d"], places.signal(x), params["w"]))

        def body(carry, _):
            hidden, total = carry
            hidden = mplp.activation(places["b"], jnp.tanh, mplp.dense(places["e"], hidden, params["v"]))
            return (hidden, total + jnp.mean(mplp.squared_error(places["loss"], hidden, y))), None

        (out, loss), _ = jax.lax.scan(body, (hidden, jnp.zeros(())), length=2)
        return weight(hidden, params) * loss + extra(places, hidden, out, params), {"watched": jnp.sum(hidden.value)}

    return run


LOST = {
    "a value": lambda places, hidden, out, params: 0.1 * jnp.sum(hidden.value**2),
    "a value from a scan": lambda places, hidden, out, params: jnp.mean(out.value),
    "a parameter": lambda places, hidden, out, params: 1e-3 * jnp.sum(params["w"].value ** 2),
    "a condition": lambda places, hidden, out, params: jax.lax.cond(
        jnp.sum(out.value) > 0, lambda: jnp.sum(out.value), lambda: 0.0
    ),
}
KEPT = {
    "nothing": lambda places, hidden, out, params: 0.0,
    "a readout": lambda places, hidden, out, params: 0.1 * jnp.mean(mplp.readout(places["r"], hidden) ** 2),
    "a constant": lambda places, hidden, out, params: jnp.sum(jax.lax.stop_gradient(hidden.value)),
    "a comparison": lambda places, hidden, out, params: jnp.mean(jnp.where(hidden.value > 0, 1.0, 2.0)),
}


def step(net):
    params, batch = parts()
    rule = mplp.Exact(0.1)
    return mplp.backward(rule, net, params, mplp.init_state(rule, net, params, batch), batch)


@pytest.mark.parametrize("name", [*LOST, "a weight of a loss"])
def test_a_loss_that_sends_no_message_is_refused(name):
    lost = network(LOST[name]) if name in LOST else network(KEPT["nothing"], lambda hidden, _: jnp.mean(hidden.value))
    with pytest.raises(TypeError, match=r"outside the loss nodes.*mplp\.readout"):
        jax.eval_shape(lambda: step(lost))


def test_what_is_not_lost_is_learned_from():
    """With the exact rule, updates are the gradient of the whole loss, times the rate."""
    params, batch = parts()

    def expected(net):
        loss = lambda params: net(mplp.Places(mplp.Exact(0.1)), jax.tree.map(mplp.parameter, params), batch)[0]
        return jax.grad(loss)(params)

    found, gradients = jit(lambda: [[f(network(KEPT[n])) for n in KEPT] for f in (lambda n: step(n)[0], expected)])()
    close = lambda a, b: np.testing.assert_allclose(a, -0.1 * b, rtol=1e-5, atol=1e-8)
    jax.tree.map(close, found, gradients)
