"""A `cond` whose branches share their memory.

JAX gives each branch memory of its own, with copies of the operands in it. Here the whole `cond` is one node: the
branch that is taken writes its memory into arrays that all share. Operands are remembered outside of the branches,
where an array that somebody else keeps costs nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from apgrad._programs import jaxprs
from apgrad.memory._memory_plan import MemoryPlan
from apgrad.memory._passes import remember, remembering, send


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
    """For each thing to remember, the number of the input that it is, if it is one."""
    number = {v: i for i, v in enumerate(made.forward.jaxpr.invars)}
    return [number.get(slot.var) if slot.how in ("live", "exact") else None for slot in made.slots]


def _layout(shapes: Sequence[Sequence[Any]]) -> tuple[list[Any], list[list[int]]]:
    """Arrays in which each row of arrays has a place: `(shapes of all, the places of each row)`."""
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
