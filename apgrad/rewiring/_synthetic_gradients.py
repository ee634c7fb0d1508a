"""Synthetic gradients: a layer sends a guess of its message, and learns to guess from the message that came.

Jaderberg, Czarnecki, Osindero, Vinyals, Graves, Silver & Kavukcuoglu, "Decoupled neural interfaces using synthetic
gradients", ICML 2017. The message to a layer's input x is guessed as S(x) = x A + c. The target of S is the message
that the layer would have sent for the (synthetic) one it got, its loss |S(x) - target|^2 / 2. A and c begin at 0.
"""

import functools

import jax
import jax.numpy as jnp

from apgrad.rewiring._layers import Where, affine, chosen_layers, layer, require_one_layer, to_input
from apgrad.rewiring._rewire import Rule


def synthetic_gradients(*, where: Where = None) -> Rule:
    """Layers send a guess of their message, made of their input alone and linear in its last axis.

    The parameters are (A, c), of shapes (n, n) and (n,), for each layer; their updates are the gradients of S's loss.

    Args:
      where: which layers, see `ap.rewiring.Where`; all dense layers and convolutions if not given.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> rewired = ap.rewire(lambda w, x: jnp.sum(x @ w), ap.rewiring.synthetic_gradients())
      >>> args = jnp.array([[2.0], [3.0]]), jnp.array([[1.0, 1.0]])
      >>> update, message = jax.grad(rewired, argnums=(0, 2))(rewired.init(*args), *args)
      >>> message, update["dot_general[0]"][1]
      (Array([[0., 0.]], dtype=float32), Array([-2., -3.], dtype=float32))
    """

    def init(site):
        require_one_layer(site)
        x = site.inputs[0]
        return jnp.zeros((x.shape[-1], x.shape[-1]), x.dtype), jnp.zeros(x.shape[-1], x.dtype)

    def at(site, params):
        def answer(x, w, message, update):
            guess, pullback = jax.vjp(functools.partial(affine, x), params)
            (learned,) = pullback(jnp.conj(guess - to_input(site, w, message)))
            return learned, guess, update

        return layer(site, answer)

    return Rule(chosen_layers(where), at, init)
