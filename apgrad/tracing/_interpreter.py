"""The walk of tracing: forward through a program, collecting each equation's pull, then backward through the pulls.

A value is *active* if it depends on an input for which a message is wanted. Of the equations with programs inside

* `remat` and `cond` remember their inputs, and are walked again on the way back;
* `scan` stacks what its body remembers over the steps, but not what is the same in each step or came in with xs;
* `while` remembers its first state; on the way back it keeps `KEPT` states, evenly spaced, and computes those between;
* a `custom_jvp` function is walked as the tangent program of its rule, which is linear, a `custom_vjp` function as the
  transposed program of its backward pass if that pass is linear. Otherwise its messages are no sums over edges.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.tree_util import Partial

from apgrad._programs import jaxprs
from apgrad._programs.flow import flow, steady
from apgrad._programs.kinds import LINEAR_IN, LINEAR_IN_ALL, NO_DERIVATIVE
from apgrad._programs.linearity import CONSTANT, LINEAR, ZERO, linearity
from apgrad.tracing._equation import Equation, Pull
from apgrad.tracing._products import dense
from apgrad.tracing._rules import RULES
from apgrad.tracing._semirings import Semiring, Value
from apgrad.tracing._sums import filled, plus_of, structs

KEPT = 64


class Context(NamedTuple):
    """What is the same for all of a walk: `enter` is applied to each message before it goes through an equation."""

    semiring: Semiring
    scope: str = ""  # around the program that is walked
    enter: Callable[[Value, str], Value] | None = None  # (message, scope) -> message


class Walked(NamedTuple):
    """A program or equation after its walk forward."""

    outputs: list[Any]
    active: tuple[bool, ...]  # for each output, whether it depends on an active input
    pull: Any  # None where nothing active goes in or comes out


def walk(context: Context, program: jaxprs.Program, inputs: Sequence[Any], active: Sequence[bool]) -> Walked:
    """A program as one step: its outputs, and a pull through all of it."""
    jaxpr, flags = program.jaxpr, tuple(active)
    known, pulls = forward(context, program, inputs, active)

    def pull(pulls, messages):
        found = backward(context, jaxpr, pulls, messages)
        return [found.get(v) if a else None for v, a in zip(jaxpr.invars, flags, strict=True)]

    return Walked(*values_of(jaxpr.outvars, known), Partial(pull, pulls))


def forward(
    context: Context, program: jaxprs.Program, inputs: Sequence[Any], active: Sequence[bool]
) -> tuple[dict[Any, tuple[Any, bool]], list[Pull | None]]:
    """Evaluates a program: of each variable the value and whether it is active, and the pulls of the equations."""
    jaxpr, consts = program
    pairs, pulls = [*((c, False) for c in consts), *zip(inputs, active, strict=True)], []
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], pairs, strict=True))
    for eqn in jaxpr.eqns:
        walked = walk_equation(context, eqn, *values_of(eqn.invars, known))
        pulls.append(walked.pull)
        known.update(zip(eqn.outvars, zip(walked.outputs, walked.active, strict=True), strict=True))
    return known, pulls


def values_of(atoms: Sequence[Any], known: Mapping[Any, tuple[Any, bool]]) -> tuple[list[Any], tuple[bool, ...]]:
    pairs = [(atom.val, False) if isinstance(atom, Literal) else known[atom] for atom in atoms]
    return [value for value, _ in pairs], tuple(active for _, active in pairs)


def walk_equation(context: Context, eqn: Any, inputs: Sequence[Any], active: tuple[bool, ...]) -> Walked:
    name, call = eqn.primitive.name, jaxprs.caller(eqn)
    if not any(active) or name in NO_DERIVATIVE:
        return Walked(call(*inputs), (False,) * len(eqn.outvars), None)
    jaxprs.require_values(eqn, "tracing")
    jaxprs.require_known(eqn, "tracing")
    inside = jaxprs.nested(eqn)
    if inside is not None:
        within = context._replace(scope=jaxprs.join(context.scope, jaxprs.scope(eqn)))
        return NESTED[inside.kind](within, eqn, inside, inputs, active)
    # An array without elements has no edges.
    active = tuple(a and jnp.size(x) > 0 for a, x in zip(active, inputs, strict=True))
    some = any(active) and any(math.prod(v.aval.shape) for v in eqn.outvars)
    outputs = call(*inputs)
    flags = tuple(some and jnp.issubdtype(y.dtype, jnp.inexact) for y in outputs)
    if not any(flags):
        return Walked(outputs, flags, None)
    if any(jnp.issubdtype(jnp.result_type(x), jnp.complexfloating) for x in (*inputs, *outputs)):
        raise TypeError(
            f"tracing is of real numbers, got complex ones at the primitive {name!r}. Keep complex numbers out of "
            "what is traced, or trace real and imaginary parts that are computed apart."
        )
    equation = Equation(context.semiring, name, call, inputs, active, outputs, jaxprs.Parameters(eqn))
    equation = equation._replace(in_parts=functools.partial(_in_parts, context, equation))
    rule = dense if context.semiring.kind == "gradient" else RULES.get(name, dense)
    return Walked(outputs, flags, rule(equation))


def _in_parts(context: Context, equation: Equation, function: Callable[..., Any]) -> Pull:
    """The pull of an equation by the program of a function that computes the same; the outputs are there already."""
    # The parts are no vertices: between them nothing is settled, and no component entered.
    quiet = context._replace(enter=None, semiring=context.semiring._replace(settle=lambda message: message))
    inputs, active, name = [jnp.asarray(x) for x in equation.inputs], equation.active, equation.name
    # Messages do not depend on inputs in which the function is linear: these are not remembered.
    linear = range(len(inputs)) if name in LINEAR_IN_ALL else LINEAR_IN.get(name, ())
    forms = [(x.shape, x.dtype) for x in inputs]

    def pull(kept, messages):
        inputs = [jnp.zeros(*form) if x is None else x for x, form in zip(kept, forms, strict=True)]
        program, _ = jaxprs.trace(function, *inputs)
        return walk(quiet, program, inputs, active).pull(messages)

    return Partial(pull, [None if i in linear else x for i, x in enumerate(inputs)])


def backward(
    context: Context, jaxpr: Any, pulls: Sequence[Pull | None], messages: Sequence[Value | None]
) -> dict[Any, Value]:
    """The messages at all variables of a program; those at its inputs are not settled, as more may come from around."""
    semiring, found = context.semiring, {}

    def add(atom, message):  # in the order of the program: of two equal contributions the first one wins
        if message is not None and not isinstance(atom, Literal):
            found[atom] = plus_of(semiring, message, found[atom]) if atom in found else message

    for atom, message in zip(reversed(jaxpr.outvars), reversed(messages), strict=True):
        add(atom, message)
    for eqn, pull in zip(reversed(jaxpr.eqns), reversed(pulls), strict=True):
        if pull is None or not any(v in found for v in eqn.outvars):
            continue
        for v in eqn.outvars:
            if v in found:
                found[v] = semiring.settle(found[v])
        arrived = [found.get(v) for v in eqn.outvars]
        inside = jaxprs.nested(eqn)
        if context.enter is not None and (inside is None or inside.kind == "custom"):
            where = jaxprs.join(context.scope, jaxprs.scope(eqn))
            arrived = [None if m is None else context.enter(m, where) for m in arrived]
        for atom, message in zip(reversed(eqn.invars), reversed(pull(arrived)), strict=True):
            add(atom, message)
    return found


def _call(context: Context, eqn: Any, inside: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    return walk(context, inside.jaxprs[0], inputs, active)


def _remat(context: Context, eqn: Any, inside: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    outputs = jaxprs.caller(eqn)(*inputs)

    def pull(memory, messages):
        program, inputs = lax.optimization_barrier(memory)  # else the compiler merges both walks, and remembers all
        return walk(context, program, inputs, active).pull(messages)

    return Walked(outputs, tuple(jaxprs.inexact_outputs(eqn)), Partial(pull, (inside.jaxprs[0], list(inputs))))


def _cond(context: Context, eqn: Any, inside: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    semiring, outputs = context.semiring, jaxprs.caller(eqn)(*inputs)
    like, wanted = structs(outputs), active[1:]

    def pull(memory, messages):
        (index, *operands), branches = memory
        full = filled(semiring, messages, like)

        def through(program, operands, full):
            answers = walk(context, program, operands, wanted).pull(full)
            return filled(semiring, answers, operands, wanted)

        paths = [functools.partial(through, program) for program in branches]
        return [None, *lax.switch(index, paths, operands, full)]

    return Walked(outputs, tuple(jaxprs.inexact_outputs(eqn)), Partial(pull, (list(inputs), inside.jaxprs)))


def _scan(context: Context, eqn: Any, inside: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    semiring, (program,), (fixed, carried, _) = context.semiring, inside.jaxprs, inside.counts
    outer, carry, xs = inputs[:fixed], inputs[fixed : fixed + carried], inputs[fixed + carried :]
    flags = active_carry(program, active, fixed, carried)
    form: dict[str, Any] = {}

    def body(carry, x):
        walked = walk(context, program, [*outer, *carry, *x], flags)
        leaves, treedef = jax.tree.flatten(walked.pull)
        # A leaf that is there anyway (what the loop closes over, and its xs) is not stacked; any other leaf is once.
        where = {id(v): ("outer", i) for i, v in enumerate(outer)} | {id(v): ("xs", i) for i, v in enumerate(x)}
        kept = {}
        for n, leaf in enumerate(leaves):
            if id(leaf) not in where:
                where[id(leaf)], kept[n] = ("kept", n), leaf
        form.update(treedef=treedef, places=[where[id(leaf)] for leaf in leaves], active=walked.active)
        return walked.outputs[:carried], (walked.outputs[carried:], kept)

    length, reverse = inside.length, inside.reverse
    final, (ys, kept) = lax.scan(body, list(carry), list(xs), length=length, reverse=reverse)
    outputs, treedef, places = [*final, *ys], form["treedef"], form["places"]
    # Only what is used: an xs that no pull remembers need not be alive.
    there = {"kept": kept, "outer": dict(enumerate(outer)), "xs": dict(enumerate(xs))}
    memory = {kind: {i: v for i, v in arrays.items() if (kind, i) in places} for kind, arrays in there.items()}
    like, outer_like = structs(outputs), structs(outer)
    xs_like = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in structs(xs)]
    outer_flags, carry_flags, xs_flags = flags[:fixed], flags[fixed : fixed + carried], flags[fixed + carried :]

    def pull(memory, messages):
        totals = filled(semiring, [None] * fixed, outer_like, outer_flags)
        arrived = filled(semiring, messages[:carried], like[:carried], carry_flags)

        def back(state, step):
            arrived, totals = state
            arriving, of_step = step
            found = memory | of_step
            pullback = jax.tree.unflatten(treedef, [found[kind][i] for kind, i in places])
            answers = pullback([*arrived, *arriving])
            before = filled(semiring, answers[fixed : fixed + carried], like[:carried], carry_flags)
            through = filled(semiring, answers[fixed + carried :], xs_like, xs_flags)
            return (before, _add(semiring, answers[:fixed], totals)), through

        of_steps = {kind: memory[kind] for kind in ("kept", "xs")}
        steps = (filled(semiring, messages[carried:], like[carried:]), of_steps)
        (arrived, totals), through = lax.scan(back, (arrived, totals), steps, length=length, reverse=not reverse)
        return [*totals, *arrived, *through]

    return Walked(outputs, form["active"], Partial(pull, memory))


def active_carry(body: jaxprs.Program, active: Sequence[bool], fixed: int, carried: int) -> tuple[bool, ...]:
    """The active inputs of a loop's body: a carry is active if it begins so, or any step makes it so."""

    def walked(flags):
        return flow(body, flags, depends, operator.or_, lambda value: False)

    return tuple(steady(walked, active, fixed, carried, operator.or_)[0])


def depends(eqn: Any, flags: list[bool]) -> list[bool] | None:
    """Which outputs of an equation depend on an active input; None asks for a look inside the equation."""
    if eqn.primitive.name in NO_DERIVATIVE or not any(flags):
        return [False] * len(eqn.outvars)
    inside = jaxprs.nested(eqn)
    if inside is None or inside.kind == "custom":
        return jaxprs.inexact_outputs(eqn)
    return None


def _while_loop(context: Context, eqn: Any, inside: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    semiring, (test, body), (first, fixed, carried) = context.semiring, inside.jaxprs, inside.loop
    test_outer, outer, carry = inputs[: inside.counts[0]], inputs[first : first + fixed], list(inputs[first + fixed :])

    def advance(body, outer, state):
        return jaxprs.evaluate(body, [*outer, *state])

    flags, goes_on = active_carry(body, active[first:], fixed, carried), lambda s: advance(test, test_outer, s[1])[0]
    count, final = lax.while_loop(goes_on, lambda s: (s[0] + 1, advance(body, outer, s[1])), (jnp.int32(0), carry))
    like, outer_like, heads = structs(final), structs(outer), [None] * first

    def pull(memory, messages):
        count, carry, outer, body = memory
        stride = jnp.maximum(-(-count // KEPT), 1)
        kept = [jnp.zeros((KEPT, *x.shape), x.dtype).at[0].set(x) for x in map(jnp.asarray, carry)]

        def store(i, state):
            kept, now = state
            now = advance(body, outer, now)
            due, place = (i + 1) % stride == 0, (i + 1) // stride
            place = jnp.where(due, place, KEPT)
            return [s.at[place].set(x, mode="drop") for s, x in zip(kept, now, strict=True)], now

        kept, _ = lax.fori_loop(0, count, store, (kept, list(carry)))
        totals = filled(semiring, [None] * fixed, outer_like, flags[:fixed])
        arrived = filled(semiring, messages, like, flags[fixed:])

        def back(k, state):
            arrived, totals = state
            i = count - 1 - k
            start = [s[i // stride] for s in kept]
            now = lax.fori_loop(0, i % stride, lambda _, s: advance(body, outer, s), start)
            answers = walk(context, body, [*outer, *now], flags).pull(arrived)
            totals = _add(semiring, answers[:fixed], totals)
            return filled(semiring, answers[fixed:], like, flags[fixed:]), totals

        arrived, totals = lax.fori_loop(0, count, back, (arrived, totals))
        return [*heads, *totals, *arrived]

    return Walked(list(final), tuple(flags[fixed:]), Partial(pull, (count, list(carry), list(outer), body)))


def _custom(context: Context, eqn: Any, inside: Any, inputs: Any, active: tuple[bool, ...]) -> Walked:
    program, tangents, chosen, real, outputs = linearized(eqn, inputs, active)
    walked = walk(context._replace(enter=None), program, tangents, (True,) * len(tangents))
    count = len(active)

    def pull(inner, messages):
        answers = inner([m for m, r in zip(messages, real, strict=True) if r])
        return jaxprs.place(answers, chosen, [None] * count)

    return Walked(outputs, tuple(real), Partial(pull, walked.pull))


def linearized(eqn: Any, inputs: Sequence[Any], active: Sequence[bool]) -> tuple[Any, list, list[int], list[bool], Any]:
    """The linear program of a function with its own rule: from tangents of active inputs to tangents of outputs.

    After it come zeros for its inputs, the numbers of the active inputs, which outputs have a tangent, and the outputs.
    """
    chosen, call, real = [i for i, a in enumerate(active) if a], jaxprs.caller(eqn), jaxprs.inexact_outputs(eqn)
    inputs = [jnp.asarray(x) for x in inputs]  # a rule may use methods of JAX's arrays that NumPy's do not have

    def with_messages(*inputs):
        outputs = call(*inputs)
        return [y for y, r in zip(outputs, real, strict=True) if r], outputs

    function, primals = jaxprs.restrict(with_messages, inputs, chosen)
    tangents = [jnp.zeros_like(x) for x in primals]
    if jaxprs.own_rule_of(eqn):  # a custom_jvp rule may differentiate a custom_vjp function
        floats, pullback, outputs = jax.vjp(function, *primals, has_aux=True)
        back = jaxprs.trace(lambda x, m: jax.vjp(function, *x, has_aux=True)[1](m), primals, floats)[0]
        linear = _require_linear(back, pullback, floats, jaxprs.scope(eqn))
    else:
        _, linear, outputs = jax.linearize(function, *primals, has_aux=True)
    return jaxprs.trace(linear, *tangents)[0], tangents, chosen, real, outputs


def _require_linear(program: Any, pullback: Callable[..., Any], outputs: Any, where: str) -> Callable[..., Any]:
    """The tangent map whose transpose is the pullback; `program` computes the pullback from inputs and messages."""
    name = f" in {where!r}" if where else ""
    message = (
        f"cannot trace through a custom_vjp function{name}: its backward pass is no sum over edges, because it is not "
        "linear in the message ({}). So it is with total propagation, MPLP and propagators that clip messages. Trace a "
        "program without it; in place of what ap.randomize returned, trace the function that it was given."
    )
    inputs = [CONSTANT] * (len(program.jaxpr.invars) - len(outputs)) + [LINEAR] * len(outputs)
    if not {ZERO, LINEAR}.issuperset(linearity(program, inputs)):
        what = "it is a while_loop, where a fori_loop of a fixed number of steps would do, or a sum, product or "
        raise TypeError(message.format(what + "other function of messages and constants"))
    transposed = jax.linear_transpose(pullback, list(outputs))

    def tangent_map(*tangents):
        try:
            return transposed(tuple(tangents))[0]
        except (NotImplementedError, AssertionError, TypeError, ValueError, jax.errors.UnexpectedTracerError) as error:
            raise TypeError(message.format("or cannot be seen to be: JAX cannot transpose it")) from error

    return tangent_map


def _add(semiring, messages, totals):
    return [t if m is None or t is None else semiring.plus(m, t) for m, t in zip(messages, totals, strict=True)]


NESTED = {"call": _call, "remat": _remat, "cond": _cond, "scan": _scan, "while": _while_loop, "custom": _custom}
