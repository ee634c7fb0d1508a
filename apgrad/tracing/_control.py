"""Programs inside equations: calls, loops, branches, and functions with a derivative rule of their own.

Each is walked inside. What a rule remembers:

* a call, what is inside; `remat` and `cond`, their inputs (they are walked again on the way back);
* `scan`, what its body remembers, stacked over the steps: but once only what is the same in each, and what came in with
  xs not again;
* `while`, a number of its states that does not depend on how often it goes round, `SLOTS`, evenly spaced: those between
  are computed again. (`jax.grad` refuses `while`.)
* a function with its own rule, what the rule does. A `custom_jvp` is walked as the tangent program of its rule,
  which is linear; a `custom_vjp` as the transposed program of its backward pass, if that is linear: else its messages
  are no sums over edges, and there is nothing to trace.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from apgrad._programs import jaxprs
from apgrad.tracing._interpreter import Context, Walked, filled, walk
from apgrad.tracing._linear import require_linear
from apgrad.tracing._rules import CONSTANTS
from apgrad.tracing._sums import zeros

SLOTS = 64


def call(context: Context, eqn: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    """A jitted function and the like."""
    return walk(context, _inside(eqn).jaxprs[0], inputs, active)


def remat(context: Context, eqn: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    """`jax.checkpoint`: walked again on the way back, from its inputs."""
    jaxpr, consts = _inside(eqn).jaxprs[0]
    outputs = jaxprs.caller(eqn)(*inputs)

    def pull(memory, messages):
        consts, inputs = lax.optimization_barrier(memory)  # or the compiler merges both walks, and remembers
        return walk(context, (jaxpr, consts), inputs, active).pull(messages)

    return Walked(outputs, _inexact(outputs), Partial(pull, (list(consts), list(inputs))))


def cond(context: Context, eqn: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    """`lax.cond` and `lax.switch`: on the way back, the branch that was taken is walked."""
    branches, semiring = _inside(eqn).jaxprs, context.semiring
    outputs = jaxprs.caller(eqn)(*inputs)
    like = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in outputs]
    programs, consts = [b[0] for b in branches], [list(b[1]) for b in branches]
    wanted = active[1:]

    def pull(memory, messages):
        (index, *operands), consts = memory
        full = filled(semiring, messages, like)

        def through(jaxpr, consts, operands, full):
            answers = walk(context, (jaxpr, consts), operands, wanted).pull(full)
            answers = filled(semiring, answers, operands)
            return [m if a else None for m, a in zip(answers, wanted, strict=True)]

        paths = [functools.partial(through, p, c) for p, c in zip(programs, consts, strict=True)]
        return [None, *lax.switch(index, paths, operands, full)]

    return Walked(outputs, _inexact(outputs), Partial(pull, (list(inputs), consts)))


def scan(context: Context, eqn: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    """`lax.scan`: the body's memory is stacked, and a scan the other way pulls through it."""
    inside, semiring = _inside(eqn), context.semiring
    (jaxpr, consts), (fixed, carried, _) = inside.jaxprs[0], inside.counts
    outer, carry, xs = inputs[:fixed], inputs[fixed : fixed + carried], inputs[fixed + carried :]
    flags = active_carry(jaxpr, active, fixed, carried)
    form: dict[str, Any] = {}

    def body(carry, x):
        walked = walk(context, (jaxpr, consts), [*outer, *carry, *x], flags)
        leaves, treedef = jax.tree.flatten(walked.pull)
        # A leaf that is there anyway is not stacked: what the loop closes over, and its xs.
        known = {id(v): ("outer", i) for i, v in enumerate(outer)} | {id(v): ("xs", i) for i, v in enumerate(x)}
        places, kept = [], []
        for leaf in leaves:
            place = known.get(id(leaf))
            if place is None:
                place = known[id(leaf)] = ("kept", len(kept))
                kept.append(leaf)
            places.append(place)
        form.update(treedef=treedef, places=places, active=walked.active)
        return walked.outputs[:carried], (walked.outputs[carried:], kept)

    loop = functools.partial(lax.scan, length=inside.length, reverse=inside.reverse)
    final, (ys, kept) = loop(body, list(carry), list(xs))
    outputs = [*final, *ys]
    treedef, places = form["treedef"], form["places"]
    like = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in outputs]
    # Only what is used: an xs that no pull remembers need not be alive.
    used = {place for place in places if place[0] != "kept"}
    memory = {
        "kept": kept,
        "outer": {i: v for i, v in enumerate(outer) if ("outer", i) in used},
        "xs": {i: v for i, v in enumerate(xs) if ("xs", i) in used},
    }
    length, reverse = inside.length, inside.reverse
    shapes = [(jnp.shape(x), jnp.result_type(x)) for x in outer]

    def pull(memory, messages):
        last = filled(semiring, messages, like)
        totals = [zeros(semiring, *s) if f else None for s, f in zip(shapes, flags[:fixed], strict=True)]
        carry_flags = flags[fixed : fixed + carried]
        arrived = [m if f else None for m, f in zip(last[:carried], carry_flags, strict=True)]

        def back(state, step):
            arrived, totals = state
            arriving, kept, xs = step
            found = {"kept": kept, "outer": memory["outer"], "xs": xs}
            pullback = jax.tree.unflatten(treedef, [found[kind][i] for kind, i in places])
            answers = pullback([*arrived, *arriving])
            given, before, xs_messages = answers[:fixed], answers[fixed : fixed + carried], answers[fixed + carried :]
            totals = [
                t if m is None else semiring.plus(m, t) if t is not None else None
                for m, t in zip(given, totals, strict=True)
            ]
            before = filled(semiring, before, like[:carried])
            before = [m if f else None for m, f in zip(before, carry_flags, strict=True)]
            return (before, totals), filled_xs(xs_messages)

        def filled_xs(found):
            return [
                None if not f else zeros(semiring, s, d) if m is None else m
                for m, f, (s, d) in zip(found, flags[fixed + carried :], xs_shapes, strict=True)
            ]

        steps = (last[carried:], memory["kept"], memory["xs"])
        (arrived, totals), through = lax.scan(back, (arrived, totals), steps, length=length, reverse=not reverse)
        return [*totals, *arrived, *through]

    xs_shapes = [(jnp.shape(x)[1:], jnp.result_type(x)) for x in xs]
    return Walked(outputs, form["active"], Partial(pull, memory))


def active_carry(jaxpr: Any, active: Any, fixed: int, carried: int) -> tuple[bool, ...]:
    """The active inputs of a loop's body: a carry is active if it begins so, or any step makes it so."""
    flags = list(active)
    while True:
        made = activity(jaxpr, flags)[:carried]
        grown = [a or b for a, b in zip(flags[fixed : fixed + carried], made, strict=True)]
        if grown == flags[fixed : fixed + carried]:
            return tuple(flags)
        flags[fixed : fixed + carried] = grown


def activity(jaxpr: Any, active: Any) -> list[bool]:
    """Which outputs of a program depend on its active inputs; for nested equations, all if any."""
    live = {v for v, a in zip(jaxpr.invars, active, strict=True) if a}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in CONSTANTS and any(not hasattr(v, "val") and v in live for v in eqn.invars):
            live.update(v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
    return [not hasattr(v, "val") and v in live for v in jaxpr.outvars]


def while_loop(context: Context, eqn: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    """`lax.while_loop`: `SLOTS` states are remembered, and every step between computed again from the last of them."""
    inside, semiring = _inside(eqn), context.semiring
    (test, test_consts), (body, body_consts) = inside.jaxprs
    first, fixed, carried = inside.counts
    test_outer, outer, carry = inputs[:first], inputs[first : first + fixed], list(inputs[first + fixed :])
    flags = active_carry(body, active[first:], fixed, carried)

    def advance(outer, consts, state):
        return evaluate((body, consts), [*outer, *state])

    def go_on(state):
        return evaluate((test, test_consts), [*test_outer, *state[1]])[0]

    count, final = lax.while_loop(go_on, lambda s: (s[0] + 1, advance(outer, body_consts, s[1])), (jnp.int32(0), carry))
    shapes = [(jnp.shape(x), jnp.result_type(x)) for x in outer]
    like = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in final]
    heads = [None] * first

    def pull(memory, messages):
        count, carry, outer, consts = memory
        stride = jnp.maximum(-(-count // SLOTS), 1)
        slots = [jnp.zeros((SLOTS, *x.shape), x.dtype).at[0].set(x) for x in map(jnp.asarray, carry)]

        def store(i, state):
            slots, now = state
            now = advance(outer, consts, now)
            due, slot = (i + 1) % stride == 0, (i + 1) // stride
            slot = jnp.where(due, slot, SLOTS)
            return [s.at[slot].set(x, mode="drop") for s, x in zip(slots, now, strict=True)], now

        slots, _ = lax.fori_loop(0, count, store, (slots, list(carry)))
        totals = [zeros(semiring, *s) if f else None for s, f in zip(shapes, flags[:fixed], strict=True)]
        arrived = [m if f else None for m, f in zip(filled(semiring, messages, like), flags[fixed:], strict=True)]

        def back(k, state):
            arrived, totals = state
            i = count - 1 - k
            start = [s[i // stride] for s in slots]
            now = lax.fori_loop(0, i % stride, lambda _, s: advance(outer, consts, s), start)
            answers = walk(context, (body, consts), [*outer, *now], flags).pull(arrived)
            totals = [t if m is None else semiring.plus(m, t) for m, t in zip(answers[:fixed], totals, strict=True)]
            before = filled(semiring, answers[fixed:], like)
            return [m if f else None for m, f in zip(before, flags[fixed:], strict=True)], totals

        arrived, totals = lax.fori_loop(0, count, back, (arrived, totals))
        return [*heads, *totals, *arrived]

    memory = (count, list(carry), list(outer), list(body_consts))
    return Walked(list(final), tuple(flags[fixed:]), Partial(pull, memory))


def custom(context: Context, eqn: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    """A function with its own derivative rule, as the linear program that the rule is."""
    program, tangents, chosen, real, outputs = _linearized(eqn, inputs, active)
    walked = walk(context._replace(enter=None), program, tangents, (True,) * len(tangents))
    count = len(active)

    def pull(inner, messages):
        answers: list[Any] = [None] * count
        for i, m in zip(chosen, inner([m for m, r in zip(messages, real, strict=True) if r]), strict=True):
            answers[i] = m
        return answers

    return Walked(outputs, tuple(real), Partial(pull, walked.pull))


def rule_program(eqn: Any, inputs: Any, active: Any) -> tuple[Any, list[Any], list[int], list[bool]]:
    """The linear program of a function with its own rule: from tangents of its active inputs to those of its outputs.

    Returns:
      The program, its inputs (zeros), the numbers of the active inputs, and which outputs have tangents.
    """
    return _linearized(eqn, inputs, active)[:4]


def _linearized(eqn, inputs, active):
    chosen, single = [i for i, a in enumerate(active) if a], jaxprs.caller(eqn)

    def function(*values):
        full = list(inputs)
        for i, value in zip(chosen, values, strict=True):
            full[i] = value
        outputs = single(*full)
        real = [jnp.issubdtype(y.dtype, jnp.inexact) for y in outputs]
        return [y for y, r in zip(outputs, real, strict=True) if r], [
            None if r else y for y, r in zip(outputs, real, strict=True)
        ]

    primals = [inputs[i] for i in chosen]
    tangents = [jnp.zeros_like(x) for x in primals]
    if eqn.primitive.name.startswith("custom_vjp"):
        floats, pullback, others = jax.vjp(function, *primals, has_aux=True)
        linear = require_linear(pullback, floats, primals, jaxprs.scope(eqn))
    else:
        floats, linear, others = jax.linearize(function, *primals, has_aux=True)
    closed = jax.make_jaxpr(linear)(*tangents)
    found = iter(floats)
    outputs = [next(found) if y is None else y for y in others]
    return (closed.jaxpr, closed.consts), tangents, chosen, [y is None for y in others], outputs


def evaluate(program: Any, inputs: Any) -> list[Any]:
    """Runs a program."""
    return jaxprs.evaluate(program, inputs, lambda eqn, values: jaxprs.caller(eqn)(*values))


def _inside(eqn: Any) -> Any:
    return jaxprs.nested(eqn)


def _inexact(outputs):
    return tuple(jnp.issubdtype(y.dtype, jnp.inexact) for y in outputs)


NESTED = {
    "call": call,
    "remat": remat,
    "cond": cond,
    "scan": scan,
    "while": while_loop,
    "custom": custom,
}
