"""Forward gradients: a derivative along one random direction, which is an unbiased estimate of the message.

Baydin, Pearlmutter, Syme, Wood & Torr, "Gradients without backpropagation", 2022; Ren, Kornblith, Liao & Hinton,
"Scaling forward gradient with local losses", ICLR 2023, take it at parts of a network. For y = f(x) and a direction v
with E v v' = 1, forward mode gives y and J v; only v and J v are kept. To a message m the answer is (m . J v) v, whose
expectation is E v v' J' m = J' m; its variance grows with the number of inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.keys import normal
from apgrad._ground.propagator import Propagator
from apgrad._programs.jaxprs import is_inexact, place, restrict
from apgrad.rewiring._layers import Where, chosen
from apgrad.rewiring._rewire import Rule


def forward_gradient(*, where: Where = None) -> Rule:
    """Sites remember one random direction and the derivative along it, and answer with an unbiased estimate.

    The rule draws: the rewired function is `(key, *args)`.

    Args:
      where: which sites, see `ap.rewiring.Where`; the function as a whole if not given.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> estimate = jax.grad(ap.rewire(lambda x: jnp.sum(x**2), ap.rewiring.forward_gradient()), argnums=1)
      >>> keys, x = jax.random.split(jax.random.key(0), 10_000), jnp.array([1.0, -2.0])
      >>> bool(jnp.allclose(jax.vmap(estimate, (0, None))(keys, x).mean(0), 2 * x, atol=0.3))
      True
    """

    def at(site, params):
        def forward(*inputs):
            keys = jax.random.split(site.key, len(inputs))
            floats = [i for i, x in enumerate(inputs) if is_inexact(x)]
            # Complex numbers with real and imaginary parts of variance 1 each.
            size = lambda x: 2**0.5 if jnp.iscomplexobj(x) else 1.0
            draws = [normal(keys[i], (x := inputs[i]).shape, x.dtype, size(x)) for i in floats]
            output, tangent = jax.jvp(*restrict(site.function, inputs, floats), draws)
            return output, (place(draws, floats, [None] * len(inputs)), tangent)

        def backward(memory, message):
            draws, tangent = memory
            pairs = zip(jax.tree.leaves(message), jax.tree.leaves(tangent), strict=True)
            along: Any = sum(jnp.sum(jnp.real(m * t)) for m, t in pairs if t.dtype != jax.dtypes.float0)
            return tuple(None if draw is None else along.astype(draw.dtype) * jnp.conj(draw) for draw in draws)

        return Propagator(forward, backward)

    return Rule(chosen(where, lambda site: site.kind == "function"), at, random=True)
