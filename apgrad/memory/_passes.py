"""The forward and the backward pass of a plan, in an order that needs little memory.

`remember` runs a plan's forward program and keeps its slots; `send` runs the backward steps with the coefficients
restored. A compiler may restore all layers' arrays at once, so barriers fix the order: a coefficient is kept before the
next equation runs, and restored when its message is there; a message goes on after the gradients that need it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from apgrad._ground.keys import again, hashed
from apgrad._ground.messages import Static
from apgrad._ground.primitives import refuse_derivative
from apgrad._ground.propagator import Propagator, node
from apgrad._programs import jaxprs
from apgrad.memory._memory_plan import BackwardStep, MemoryPlan
from apgrad.memory._packing import Rounds
from apgrad.memory._samplers import Sampler, kept, restored
from apgrad.memory._slots import CoefficientUse, Slot

Function = Callable[..., Any]
_NEXT = 2**28  # hashed into the next slot's key: above the numbers of words and steps, below those of nested programs
_next_key = jax.jit(hashed)  # traced once
REASON = (
    "ap.randomize has no second derivative: the random memory is no differentiable function of the inputs. "
    "Differentiate the function itself, or leave the part that needs two derivatives out of ap.randomize; where its "
    "gradient is meant as a constant, call jax.lax.stop_gradient on its arguments."
)


def remembering(count: int, plain: Function, forward: Function, backward: Function) -> Callable[..., list[Any]]:
    """A node `(key, *inputs) -> outputs` of `count` inputs, which is `plain(*inputs)` if no input is differentiated.

    Otherwise `forward(key, inputs, chosen)` returns outputs, memory, and what else `backward` needs of this trace. Then
    `backward(key, memory, messages, chosen, *what else it needs)` returns messages to the inputs numbered in `chosen`.
    """

    def run(key, *inputs, perturbed):
        chosen = [i for i, (p, x) in enumerate(zip(perturbed[1:], inputs, strict=True)) if p and jaxprs.is_inexact(x)]
        if not chosen:
            return plain(*inputs), None
        outputs, memory, *known = forward(key, inputs, chosen)
        return outputs, (memory, key, Static(lambda: (chosen, *known)))  # a function: JAX compares it by identity

    def back(memory, messages):
        answers: list[Any] = [None] * count
        if memory is not None:
            memory, key, (chosen, *known) = memory[0], again(memory[1]), memory[2].value()
            answers = jaxprs.place(backward(key, memory, inexact(messages), chosen, *known), chosen, answers)
        return (None, *answers)

    call = node(Propagator(run, back), perturbed=True)
    return lambda key, *inputs: list(call(key, *inputs))


def remember(made: MemoryPlan, key: jax.Array, inputs: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    jaxpr, consts = made.forward
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    waiting: dict[Any, list[int]] = {}
    for i, slot in enumerate(made.slots):
        waiting.setdefault(slot.var, []).append(i)
    memory: list[Any] = [None] * len(made.slots)
    keys = _keys(made, key)

    def keep(var):
        for i in waiting.get(var, ()):
            slot, value = made.slots[i], values[var]
            if slot.how != "live":
                value = refuse_derivative(value, REASON)
            if slot.how == "sampled":
                # What comes next waits for the memory, else the compiler may keep the value until the end.
                value = _kept(slot.sampler, keys[i], value)
                value, values[var] = jax.lax.optimization_barrier((value, values[var]))
            elif slot.how == "bits":
                value = jax.lax.optimization_barrier(jnp.packbits(value.reshape(-1)))
            memory[i] = value

    for var in (*jaxpr.constvars, *jaxpr.invars):
        keep(var)
    wanted = (*jaxpr.outvars[: made.outputs], *(slot.var for slot in made.slots))
    for eqn in jaxprs.needed(jaxpr.eqns, wanted, effects=True):
        jaxprs.run_all([eqn], values)
        for var in eqn.outvars:
            keep(var)
    return [_value(v, values) for v in jaxpr.outvars[: made.outputs]], tuple(memory)


def send(made: MemoryPlan, key: jax.Array, memory: tuple[Any, ...], messages: Sequence[Any]) -> list[Any]:
    jaxpr, consts = made.pullback
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    for v, message in zip(jaxpr.invars[len(jaxpr.invars) - len(messages) :], messages, strict=True):
        values[v] = jnp.asarray(message, v.aval.dtype)  # JAX takes Python's numbers for messages
    keys = _keys(made, key)

    def restore(drawn, slot, kept):
        which, like = made.slots[slot], made.slots[slot].var.aval
        if which.how == "sampled":
            return _restored(which.sampler, like.shape, like.dtype, drawn[slot], kept)
        return jnp.unpackbits(kept)[: like.size].reshape(like.shape).astype(bool) if which.how == "bits" else kept

    spread = {step.eqn.outvars[0] for step in made.steps if step.eqn.primitive.name == "broadcast_in_dim"}
    computed: dict[Any, Any] = {}  # the values of what has been evaluated again
    for step in gradients_first(made.steps):
        inputs = step_inputs(step)
        present = {i: values[v] for i, v in enumerate(inputs) if not isinstance(v, Literal) and i not in step.uses}
        needed = [s for use in step.uses.values() if not use.again for s in use.slots.values()]
        copies = not spread.isdisjoint(jaxprs.variables(inputs))
        slots = {s: memory[s] for s in needed if _waits(made.slots[s], copies)}
        drawn = {s: keys[s] for s in slots if made.slots[s].how == "sampled"}
        if slots:
            late = {s: key for s, key in drawn.items() if not isinstance(made.slots[s].sampler, Rounds)}
            late, slots, present = jax.lax.optimization_barrier((late, slots, present))
            drawn |= late
        coefficients, small, axis = {}, (), _commutes(made, step)
        for i, use in step.uses.items():
            if axis:
                (slot,) = use.slots.values()
                small = slots[slot]
                coefficients[i] = small[0] if isinstance(small, tuple | list) else small
                continue
            arrays = {v: restore(drawn, s, slots.get(s, memory[s])) for v, s in use.slots.items()}
            if use.again:
                arrays, present = _evaluated_again(use, arrays, computed, present)
            else:
                jaxprs.run_all(use.eqns, arrays)
            coefficients[i] = _value(use.var, arrays)
        out = step.eqn.outvars
        if step.root is not None:
            found = [present[0].astype(out[0].aval.dtype) * coefficients[1].astype(out[0].aval.dtype)]
        else:
            given = present | coefficients
            arguments = [v.val if isinstance(v, Literal) else given[i] for i, v in enumerate(inputs)]
            found = jaxprs.caller(step.eqn)(*arguments)
        if axis:
            ((slot, drawn_key),) = drawn.items()
            like, sampler = out[0].aval, made.slots[slot].sampler
            product = (found[0], *small[1:2]) if isinstance(small, tuple | list) else found[0]
            found = [_restored(sampler, like.shape, like.dtype, drawn_key, product, axis - 1)]
        if step.last:
            # Flat, since layouts pass barriers: some layouts of products in branches under vmap crash XLA on the CPU.
            flat = [jnp.reshape(x, -1) for x in found]
            flat, present = jax.lax.optimization_barrier((flat, present))
            found = [jnp.reshape(x, like.aval.shape) for x, like in zip(flat, out, strict=True)]
            values.update((inputs[i], message) for i, message in present.items())
        values.update(zip(out, found, strict=True))
    zeros = {v: jnp.zeros(v.aval.shape, v.aval.dtype) for v in jaxprs.variables(jaxpr.outvars) if v not in values}
    return [_value(v, values | zeros) for v in jaxpr.outvars]


def _evaluated_again(use: CoefficientUse, arrays: dict[Any, Any], computed: dict[Any, Any], present: Any):
    """Adds a coefficient to `computed`, from that and `arrays`, once messages are `present`; returns that and these."""
    if use.var not in computed:
        missing = jaxprs.needed(use.eqns, [use.var], computed)
        wanted = {v for eqn in missing for v in jaxprs.variables(eqn.invars)}
        late = [v for v in arrays if v in wanted]
        held, present = jax.lax.optimization_barrier(([arrays[v] for v in late], present))
        values = computed | arrays | dict(zip(late, held, strict=True))
        jaxprs.run_all(missing, values)
        computed |= {v: values[v] for eqn in missing for v in eqn.outvars}
    return computed, present


def _waits(slot: Slot, copies: bool) -> bool:
    """Whether a slot's memory goes behind a barrier: else compilers transpose it, or expand it, before it is needed.

    A barrier makes an array of a message of `copies` of one number (of a mean): then it is for packed memory only.
    """
    is_key = jnp.issubdtype(slot.var.aval.dtype, jax.dtypes.extended)
    return slot.how in ("sampled", "bits") or not (copies or is_key or slot.how == "nested")


def _keys(made: MemoryPlan, key: jax.Array) -> dict[int, jax.Array]:
    """A key for each slot that is sampled, each hashed from the one before."""
    keys = {}
    for i in (i for i, slot in enumerate(made.slots) if slot.how == "sampled"):
        keys[i] = key = _next_key(key, _NEXT)
    return keys


# Jitted, so that arrays of one shape are traced once: a deep network has hundreds of them.
@functools.partial(jax.jit, static_argnums=0)
def _kept(sampler: Sampler, key: jax.Array, value: jax.Array) -> Any:
    """The sampler's memory of a value. A sampler that draws an array waits for the value."""
    if not isinstance(sampler, Rounds):
        key, value = jax.lax.optimization_barrier((key, value))
    return kept(sampler, key, value)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 5))
def _restored(sampler: Sampler, shape: Any, dtype: Any, key: jax.Array, memory: Any, axis: int = -1) -> jax.Array:
    return restored(sampler, key, memory, jax.ShapeDtypeStruct(shape, dtype), axis)


def inexact(values: Sequence[Any]) -> list[Any]:
    return [x for x in values if jaxprs.is_inexact(x)]


def gradients_first(steps: Sequence[BackwardStep]) -> list[BackwardStep]:
    """Each `last` step is as early as possible: an argument's gradient is made before the message goes on."""
    place: dict[Any, float] = {}
    places = []
    for i, step in enumerate(steps):
        before = max((place.get(v, -1) for v in jaxprs.variables(step_inputs(step))), default=-1)
        places.append(int(before) + 0.5 if step.last else i)
        place |= dict.fromkeys(step.eqn.outvars, places[-1])
    return [steps[i] for i in sorted(range(len(steps)), key=places.__getitem__)]


def step_inputs(step: BackwardStep) -> list[Any]:
    return [step.root] if step.root is not None else list(step.eqn.invars)


def _commutes(made: MemoryPlan, step: BackwardStep) -> int:
    """Where a step may multiply a sampler's small memory and restore the product: the product's axis plus 1; else 0."""
    if step.root is not None or step.eqn.primitive.name != "dot_general" or len(step.uses) != 1:
        return 0
    ((i, use),) = step.uses.items()
    if use.eqns or not any(getattr(made.slots[s].sampler, "shared", False) for s in use.slots.values()):
        return 0
    contracted, batch = (part[i] for part in jaxprs.Parameters(step.eqn)["dimension_numbers"])
    size = step.eqn.invars[i].aval.ndim
    if size - 1 in (*contracted, *batch):
        return 0
    # The output has the batch axes first, then the left operand's free axes, then the right operand's.
    return size - len(contracted) if i == 0 else step.eqn.outvars[0].aval.ndim


def _value(v, values):
    if isinstance(v, Literal):
        return jnp.asarray(v.val, v.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return values[v]
