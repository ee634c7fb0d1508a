"""Nodes in the place of control flow: a `cond` whose branches share their memory, and a block that packs its inputs.

JAX gives each branch of a `cond` memory of its own, with copies of the operands in it. Here the whole `cond` is one
node: the branch that is taken writes its memory into arrays that all branches share. Operands are remembered outside of
the branches, where an array that somebody else keeps costs nothing.

A checkpointed block may remember its inputs packed; it is then evaluated again at the restored inputs x + e, E e = 0.
Its messages are not linear in x: their mean is off by half of their second derivative times the variance of e. That is
small if the bits are many, but a bias.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.keys import hashed
from apgrad._ground.primitives import refuse_derivative
from apgrad._programs import jaxprs
from apgrad.memory._memory_plan import MemoryPlan
from apgrad.memory._passes import REASON, inexact, remember, remembering, send
from apgrad.memory._samplers import Sampler, kept, restored


def randomized_cond(programs: Sequence[jaxprs.Program], plan: Callable[..., MemoryPlan]) -> Callable[..., list[Any]]:
    """`(key, index, *operands) -> outputs`, a node."""
    size = len(programs[0].jaxpr.invars)

    def plain(index, *operands):
        return jax.lax.switch(index, [lambda *values, p=p: jaxprs.evaluate(p, values) for p in programs], *operands)

    def forward(key, inputs, chosen):
        index, *operands = inputs
        inputs = (key, *operands)
        plans = [plan(i, [n - 1 for n in chosen], key) for i in range(len(programs))]
        outside = [_outside(p) for p in plans]

        def run(i, key, inputs):
            outputs, memory = remember(plans[i], key, (*inputs, *programs[i].consts))
            return outputs, [m if at is None else None for m, at in zip(memory, outside[i], strict=True)]

        stored = [jax.eval_shape(lambda *a, i=i: run(i, *a)[1], key, inputs) for i in range(len(plans))]
        layout, places = _layout([jax.tree.leaves(row) for row in stored])

        def branch(i, key, inputs):
            outputs, kept = run(i, key, inputs)
            shared = [jax.lax.full(struct.shape, 0, struct.dtype) for struct in layout]
            return outputs, jaxprs.place(jax.tree.leaves(kept), places[i], shared)

        functions = [lambda *a, i=i: branch(i, *a) for i in range(len(plans))]
        outputs, shared = jax.lax.switch(index, functions, key, inputs)
        used = sorted({at for row in outside for at in row if at is not None and at < len(inputs)})
        memory = index, {str(at): inputs[at] for at in used}, shared
        return outputs, memory, plans, outside, [jax.tree.structure(row) for row in stored], places

    def backward(key, memory, messages, chosen, plans, outside, structures, places):
        index, operands, shared = memory

        def run(i, key, operands, shared, messages):
            kept = jax.tree.unflatten(structures[i], [shared[place] for place in places[i]])
            whole = [
                stored if at is None else operands[str(at)] if at <= size else programs[i].consts[at - size - 1]
                for stored, at in zip(kept, outside[i], strict=True)
            ]
            return send(plans[i], key, tuple(whole), messages)

        functions = [lambda *a, i=i: run(i, *a) for i in range(len(plans))]
        return jax.lax.switch(index, functions, key, operands, shared, messages)

    return remembering(1 + size, plain, forward, backward)


def _outside(made: MemoryPlan) -> list[int | None]:
    """For each slot the number of the input that it remembers as it is, or None if there is no such input."""
    number = {v: i for i, v in enumerate(made.forward.jaxpr.invars)}
    return [number.get(slot.var) if slot.how in ("live", "exact") else None for slot in made.slots]


def _layout(shapes: Sequence[Sequence[Any]]) -> tuple[list[Any], list[list[int]]]:
    """A list of arrays for any of some rows of arrays: `(its shapes, the places of each row's arrays in the list)`."""
    layout: list[Any] = []
    places = []
    for row in shapes:
        taken: list[int] = []
        for struct in row:
            like = (struct.shape, struct.dtype)
            fits = (j for j, s in enumerate(layout) if (s.shape, s.dtype) == like and j not in taken)
            taken.append(next(fits, len(layout)))
            if taken[-1] == len(layout):
                layout.append(struct)
        places.append(taken)
    return layout, places


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
            # What is drawn inside has keys of other numbers, so it is independent of the inputs' rounding.
            block, some = jaxprs.restrict(lambda *values: inexact(inner(key, *values)), inputs, chosen)
            return jax.vjp(block, *some)[1](messages)

        return send(packed, key, messages)

    return remembering(count, plain, forward, backward)
