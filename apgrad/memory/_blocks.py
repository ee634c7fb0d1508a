"""A checkpointed block that remembers its inputs packed, and is evaluated again at what they are restored to.

The block is not linear in its inputs. With restored inputs x + e, E e = 0, the mean of the block's messages is off by a
half times its second derivative times the variance of e: small for many bits, but a bias.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.keys import again, hashed
from apgrad._ground.primitives import refuse_derivative
from apgrad._ground.propagator import Propagator, node
from apgrad._programs import jaxprs
from apgrad.memory._passes import REASON, Traced, differentiated, evaluated, inexact
from apgrad.memory._samplers import Sampler, restored


def packed_block(
    program: jaxprs.Program, inner: Callable[..., Any], samplers: Sequence[Sampler | None]
) -> Callable[..., list[Any]]:
    """`(key, *inputs) -> outputs`, a node around the program; its backward pass is the derivative of `inner`."""

    def forward(key, *inputs, perturbed):
        chosen = differentiated(inputs, perturbed[1:])
        outputs = evaluated(program, (*inputs, *program.consts))
        if not chosen:
            return outputs, None
        keys = hashed(key, jnp.arange(len(inputs)))
        packed = [
            x if s is None else s.keep(k, refuse_derivative(x, REASON))
            for k, s, x in zip(keys, samplers, inputs, strict=True)
        ]
        shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in inputs]
        return outputs, (packed, key, Traced(shapes, chosen))

    def backward(memory, messages):
        answers: list[Any] = [None] * len(samplers)
        if memory is None:
            return (None, *answers)
        packed, key, (shapes, chosen) = memory[0], again(memory[1]), memory[2].value

        # Checkpointed as a whole, so that nothing of the block is evaluated before its messages are there.
        @jax.checkpoint
        def send(packed, key, messages):
            packed, messages = jax.lax.optimization_barrier((packed, messages))
            keys = hashed(key, jnp.arange(len(samplers)))
            inputs = [
                m if s is None else restored(s, k, m, like)
                for k, s, m, like in zip(keys, samplers, packed, shapes, strict=True)
            ]
            own = hashed(key, len(samplers))  # what is drawn inside is independent of the inputs' rounding
            block, some = jaxprs.restrict(lambda *values: inexact(inner(own, *values)), inputs, chosen)
            return jax.vjp(block, *some)[1](messages)

        return (None, *jaxprs.place(send(packed, key, inexact(messages)), chosen, answers))

    call = node(Propagator(forward, backward), perturbed=True)
    return lambda key, *inputs: list(call(key, *inputs))
