"""A checkpointed block that remembers its inputs packed, and is evaluated again at what they are restored to.

The block is not linear in them: with x + e restored, E e = 0, the mean of its messages is off by half of its second
derivative times the variance of e, small for many bits, but a bias.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.keys import hashed
from apgrad._ground.primitives import refuse_derivative
from apgrad._programs import jaxprs
from apgrad.memory._passes import REASON, inexact, remembering
from apgrad.memory._samplers import Sampler, kept, restored


def packed_block(program: jaxprs.Program, inner: Any, samplers: Sequence[Sampler | None]) -> Callable[..., list[Any]]:
    """`(key, *inputs) -> outputs`, a node around the program; its backward pass is the derivative of `inner`."""
    count = len(samplers)

    def plain(*inputs):
        return jaxprs.evaluate(program, inputs)

    def forward(key, inputs, chosen):
        outputs, keys = plain(*inputs), hashed(key, jnp.arange(count))
        keep = lambda k, s, x: x if s is None else kept(s, k, refuse_derivative(x, REASON))
        packed = [keep(*one) for one in zip(keys, samplers, inputs, strict=True)]
        return outputs, packed, [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in inputs]

    def backward(key, packed, messages, chosen, shapes):
        # Checkpointed as a whole, so that nothing of the block is evaluated before its messages are there.
        @jax.checkpoint
        def send(packed, key, messages):
            packed, messages = jax.lax.optimization_barrier((packed, messages))
            keys = hashed(key, jnp.arange(count))
            inputs = [
                m if s is None else restored(s, k, m, like)
                for k, s, m, like in zip(keys, samplers, packed, shapes, strict=True)
            ]
            own = hashed(key, count)  # what is drawn inside is independent of the inputs' rounding
            block, some = jaxprs.restrict(lambda *values: inexact(inner(own, *values)), inputs, chosen)
            return jax.vjp(block, *some)[1](messages)

        return send(packed, key, messages)

    return remembering(count, plain, forward, backward)
