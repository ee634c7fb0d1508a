"""A `cond` whose branches share their memory.

JAX gives each branch of a `cond` memory of its own, with copies of the operands in it. `randomized_cond` makes the
whole `cond` one node. In the forward pass, the branch that is taken writes its memory into arrays that all branches
share. Operands are remembered outside of the branches, where an array that somebody else keeps costs nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from apgrad._ground.keys import again
from apgrad._ground.propagator import Propagator, node
from apgrad._programs import jaxprs
from apgrad.memory._passes import Traced, differentiated, evaluated, inexact, remember, send
from apgrad.memory._plan import MemoryPlan


def randomized_cond(programs: Sequence[jaxprs.Program], plan: Callable[..., MemoryPlan]) -> Callable[..., list[Any]]:
    """`(key, index, *operands) -> outputs`, a node."""
    size = len(programs[0].jaxpr.invars)

    def forward(key, index, *operands, perturbed):
        chosen = differentiated(operands, perturbed[2:])
        if not chosen:
            functions = [lambda *values, p=p: evaluated(p, (*values, *p.consts)) for p in programs]
            return jax.lax.switch(index, functions, *operands), None
        inputs = (key, *operands)
        plans = [plan(i, chosen, key) for i in range(len(programs))]
        outside = [_outside(p, len(inputs)) for p in plans]

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
        known = Traced(plans, outside, [jax.tree.structure(row) for row in stored], places, chosen)
        return outputs, (index, key, {str(at): inputs[at] for at in used}, shared, known)

    def backward(memory, messages):
        answers: list[Any] = [None] * size
        if memory is None:
            return (None, None, *answers)
        index, key, operands, shared, known = memory
        plans, outside, structures, places, chosen = known.value

        def run(i, key, operands, shared, messages):
            kept = jax.tree.unflatten(structures[i], [shared[place] for place in places[i]])
            whole = [
                stored if at is None else operands[str(at)] if at <= size else programs[i].consts[at - size - 1]
                for stored, at in zip(kept, outside[i], strict=True)
            ]
            return send(plans[i], again(key), tuple(whole), messages)

        functions = [lambda *a, i=i: run(i, *a) for i in range(len(plans))]
        found = jax.lax.switch(index, functions, key, operands, shared, inexact(messages))
        return (None, None, *jaxprs.place(found, chosen, answers))

    call = node(Propagator(forward, backward), perturbed=True)
    return lambda key, index, *operands: list(call(key, index, *operands))


def _outside(made: MemoryPlan, size: int) -> list[int | None]:
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
            fits = [j for j, s in enumerate(layout) if (s.shape, s.dtype) == like and j not in taken]
            if not fits:
                fits = [len(layout)]
                layout.append(struct)
            taken.append(fits[0])
        places.append(taken)
    return layout, places
