"""Reading one path: from an element of a parameter, edge by edge, to the loss.

No pointers are stored (Algorithm 1 of the seed stores one for each element of each array). A program is walked once
more with the messages of all its variables kept, and a path decides at each variable anew which contribution to its
element was the greatest: among the equations that use it the one that sent most, and inside that, by the column of its
Jacobian for this one element (a `jax.jvp` with a one-hot tangent), the output element. Inside loops only the steps that
the path goes through are walked so.

Where two contributions are equal, the first is taken: of equations in the order of the program, then of inputs, steps,
and elements in row-major order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad import jaxprs
from apgrad.tracing import control
from apgrad.tracing.interpreter import Context, backward, filled, forward, join
from apgrad.tracing.semirings import Semiring


class Step(NamedTuple):
    """One edge of a path.

    Attributes:
      primitive: whose edge it is.
      scope: the named scopes around it, "encoder/LSTM_0".
      steps: of the loops around it, which iteration, outermost first.
      shape: of the primitive's output.
      index: the output's element.
      weight: the derivative along the edge.
      message: what arrived at the output's element: `greedy` |gradient|, `viterbi` the weight of the path from there.
    """

    primitive: str
    scope: str
    steps: tuple[int, ...]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    weight: float
    message: float


def viterbi(masks: int = 0) -> Semiring:
    """The heaviest path, the greatest product of |derivatives|, with masks that travel along it."""

    def plus(a, b):
        greater = (b[0] > a[0]) | (b[0] != b[0])
        return tuple(jnp.where(greater, y, x) for x, y in zip(a, b, strict=True))

    return Semiring(
        "viterbi",
        lambda w: (jnp.abs(w),),
        lambda a, b: (a[0] * b[0], *(x for x in b[1:])),
        plus,
        (0.0, *(0,) * masks),
        (1.0, *(0,) * masks),
        compared=0,
    )


def greedy(masks: int = 0) -> Semiring:
    """The seed's path (Algorithm 1): at each vertex to the edge that brings most gradient, |w g|.

    The components are the gradient g, the greatest |w g| among the contributions, and masks that go with that one.
    When a vertex has all its contributions, what it sends on is of its whole gradient: `settle`. This is no semiring.
    """

    def plus(a, b):
        greater = (b[1] > a[1]) | (b[1] != b[1])
        return (a[0] + b[0], *(jnp.where(greater, y, x) for x, y in zip(a[1:], b[1:], strict=True)))

    return Semiring(
        "greedy",
        lambda w: (w,),
        lambda a, b: (a[0] * b[0], jnp.abs(a[0]) * b[1], *b[2:]),
        plus,
        (0.0, 0.0, *(0,) * masks),
        (1.0, 1.0, *(0,) * masks),
        settle=lambda m: (m[0], jnp.abs(m[0]), *m[2:]),
        compared=1,
    )


class Reader:
    """Reads paths of one kind; compiled walks are kept.

    Args:
      context: with the semiring `viterbi()` or `greedy()`.
    """

    def __init__(self, context: Context):
        self.context = context
        self.strength = context.semiring.compared
        self._compiled: dict[Any, Any] = {}

    def follow(
        self,
        scope: str,
        program: Any,
        inputs: Sequence[Any],
        active: Sequence[bool],
        messages: Any,
        at: int,
        index: Any,
    ) -> tuple[list[Step], int, tuple[int, ...]]:
        """The path from an element of an input of a program to one of its outputs.

        Returns:
          The steps, the output's number, and the index of its element. No steps and -1 if no path goes on.
        """
        jaxpr = program[0]
        values, arrived, sent, flags = self._walk(program, active)(program[1], list(inputs), messages)
        variable, steps = jaxpr.invars[at], []
        start = 0
        while True:
            best, choice = 0.0, None
            for number, eqn in enumerate(jaxpr.eqns[start:], start):
                for slot, atom in enumerate(eqn.invars):
                    if atom is variable and sent[number] is not None and sent[number][slot] is not None:
                        strength = float(sent[number][slot][index])
                        if strength > best:
                            best, choice = strength, (number, slot)
            for number, atom in enumerate(jaxpr.outvars):
                if atom is variable and messages[number] is not None:
                    strength = float(messages[number][self.strength][index])
                    if strength > best:
                        best, choice = strength, number
            if choice is None:
                return [], -1, ()
            if isinstance(choice, int):
                return steps, choice, index
            number, slot = choice
            eqn = jaxpr.eqns[number]
            given = [v.val if hasattr(v, "val") else values[v] for v in eqn.invars]
            more, output, index = self._through(scope, eqn, given, flags[number], arrived[number], slot, index)
            if output < 0:
                return [], -1, ()
            steps += more
            variable, start = eqn.outvars[output], number + 1

    def _walk(self, program, active):
        jaxpr = program[0]
        key = id(jaxpr), tuple(active)
        if key in self._compiled:
            return self._compiled[key][0]
        context = self.context

        @jax.jit
        def walk(consts, inputs, messages):
            frame = forward(context, (jaxpr, consts), inputs, active)
            found = backward(context, jaxpr, frame.pulls, messages)
            arrived, sent = [], []
            for eqn, pull in zip(jaxpr.eqns, frame.pulls, strict=True):
                here = [found.get(v) for v in eqn.outvars]
                dead = pull is None or all(m is None for m in here)
                arrived.append(None if dead else here)
                answers = (
                    None if dead or pull is None else [None if m is None else m[self.strength] for m in pull(here)]
                )
                sent.append(answers)
            known = [v for v in frame.values if not hasattr(v, "val")]
            static.append((known, [tuple(map(frame.is_active, eqn.invars)) for eqn in jaxpr.eqns]))
            return [frame.values[v] for v in known], arrived, sent

        static: list[Any] = []

        def run(consts, inputs, messages):
            values, arrived, sent = walk(list(consts), inputs, messages)
            known, flags = static[0]
            return dict(zip(known, values, strict=True)), arrived, sent, flags

        self._compiled[key] = run, jaxpr  # the program stays alive, and its id its own
        return run

    def _through(self, scope, eqn, inputs, active, arrived, slot, index):
        """The path through one equation: its steps, the output's number, the element's index."""
        inside, name = jaxprs.nested(eqn), jaxprs.scope(eqn)
        scope = join(scope, name)
        if inside is None:
            return self._edge(scope, eqn, inputs, arrived, slot, index)
        if inside.kind in ("call", "remat"):
            return self.follow(scope, inside.jaxprs[0], inputs, active, arrived, slot, index)
        if inside.kind == "cond":
            branch = inside.jaxprs[int(np.clip(int(inputs[0]), 0, len(inside.jaxprs) - 1))]
            return self.follow(scope, branch, inputs[1:], active[1:], arrived, slot - 1, index)
        if inside.kind == "custom":
            return self._rule(scope, eqn, inputs, active, arrived, slot, index)
        return self._loop(scope, inside, inputs, active, arrived, slot, index)

    def _edge(self, scope, eqn, inputs, arrived, slot, index):
        call = jaxprs.caller(eqn)

        def function(x):
            return call(*(x if i == slot else y for i, y in enumerate(inputs)))

        x = jnp.asarray(inputs[slot])
        hot = jnp.zeros_like(x).at[index].set(1)
        _, columns = jax.jvp(function, (x,), (hot,))
        best, choice = 0.0, None
        for number, (column, message) in enumerate(zip(columns, arrived, strict=True)):
            if message is None:
                continue
            column, message = np.asarray(column), np.asarray(message[self.strength])
            products = np.abs(column) * message
            if products.size and products.max() > best:
                place = np.unravel_index(int(np.argmax(products)), products.shape)
                place = tuple(int(i) for i in place)
                best, choice = float(products[place]), (number, place, float(column[place]), float(message[place]))
        if choice is None:
            return [], -1, ()
        number, place, weight, message = choice
        shape = tuple(eqn.outvars[number].aval.shape)
        return [Step(eqn.primitive.name, scope, (), shape, place, weight, message)], number, place

    def _rule(self, scope, eqn, inputs, active, arrived, slot, index):
        program, tangents, chosen, real = control.rule_program(eqn, inputs, active)
        messages = [m for m, r in zip(arrived, real, strict=True) if r]
        flags = (True,) * len(tangents)
        steps, output, index = self.follow(scope, program, tangents, flags, messages, chosen.index(slot), index)
        steps = [s._replace(scope=scope) for s in steps]
        return steps, [i for i, r in enumerate(real) if r][output] if output >= 0 else -1, index

    def _loop(self, scope, inside, inputs, active, arrived, slot, index):
        """Through the steps of a scan or a while, each walked by itself."""
        semiring, program = self.context.semiring, inside.jaxprs[-1]
        if inside.kind == "while":
            first, fixed, carried = inside.counts
            tested, inputs, active, slot = inputs[:first], inputs[first:], active[first:], slot - first
        else:
            tested, (fixed, carried, _) = [], inside.counts
        active = control.active_carry(program[0], active, fixed, carried)
        outer, carry, xs = inputs[:fixed], list(inputs[fixed : fixed + carried]), inputs[fixed + carried :]
        run = jax.jit(lambda *values: control.evaluate(program, values))
        slices, stages = [], []
        if inside.kind == "scan":
            slices = list(range(inside.length))[:: -1 if inside.reverse else 1]
            for t in slices:
                stages.append([*outer, *carry, *(x[t] for x in xs)])
                carry = run(*stages[-1])[:carried]
        else:
            test, test_consts = inside.jaxprs[0]
            go_on = jax.jit(lambda *state: control.evaluate((test, test_consts), [*tested, *state])[0])
            while bool(go_on(*carry)):
                slices.append(len(stages))
                stages.append([*outer, *carry])
                carry = run(*stages[-1])
        last = filled(semiring, arrived[:carried], carry)
        context = self.context

        @jax.jit
        def back(values, messages):
            frame = forward(context, program, values, active)
            found = backward(context, program[0], frame.pulls, messages)
            return [found.get(v) for v in program[0].invars]

        messages, sent = [], []
        for t, values in zip(reversed(slices), reversed(stages), strict=True):
            ys = [None if m is None else tuple(x[t] for x in m) for m in arrived[carried:]]
            messages.append([*last, *ys])
            answers = back(values, messages[-1])
            sent.append(answers[slot] if slot < fixed else None)
            last = filled(semiring, answers[fixed : fixed + carried], values[fixed : fixed + carried])
        messages, sent = messages[::-1], sent[::-1]
        if not stages:
            return [], slot - fixed if slot >= fixed else -1, index
        place = 0
        if slot < fixed:
            strengths = [0.0 if m is None else float(m[self.strength][index]) for m in sent]
            place = int(np.argmax(strengths))
        elif slot >= fixed + carried:
            place, index = slices.index(index[0]), index[1:]
        steps = []
        while True:
            more, output, index = self.follow(scope, program, stages[place], active, messages[place], slot, index)
            if output < 0:
                return [], -1, ()
            steps += [s._replace(steps=(slices[place], *s.steps)) for s in more]
            if output >= carried:
                return steps, output, (slices[place], *index)
            place, slot = place + 1, fixed + output
            if place == len(stages):
                return steps, output, index
