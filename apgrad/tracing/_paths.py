"""Reading one path: from an element of a parameter, edge by edge, to the loss.

No pointers are stored (Algorithm 1 of the seed stores one for each element of each array). A program is walked once
more with the messages of all its variables kept, and a path decides at each variable anew which contribution to its
element was the greatest: among the equations that use it the one that sent most, and inside that, by the column of its
Jacobian for this one element (a `jax.jvp` with a one-hot tangent), the output element. Inside loops only the steps that
the path goes through are walked so.

Where two contributions are equal, the first is taken: of equations in the order of the program, then of inputs, steps,
and elements in row-major order.

The k heaviest paths are read in the same way with the messages of `top_k`. The path of rank n takes at each variable
the n-th of all contributions, each of which comes with the weights of its own k heaviest paths; which of them it was
is the rank of the path from there on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._programs import jaxprs
from apgrad.tracing import _control as control
from apgrad.tracing._interpreter import Context, backward, filled, forward, join
from apgrad.tracing._semirings import Semiring


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


NOWHERE: Any = ([], -1, (), 0)


def ranked(candidates: Sequence[tuple[Any, Sequence[Any]]], rank: int) -> tuple[Any, int] | None:
    """Of contributions `(what, the weights of its heaviest paths)`, whose is the weight of a rank among all, and which.

    Example:
      >>> ranked([("a", [5.0, 1.0]), ("b", [3.0, 2.0])], 2)
      ('b', 1)
    """
    weighed = [(float(w), what, r) for what, weights in candidates for r, w in enumerate(weights) if w > 0]
    weighed.sort(key=lambda each: -each[0])
    return weighed[rank][1:] if rank < len(weighed) else None


class Reader:
    """Reads paths of one kind; compiled walks are kept.

    Args:
      context: with the semiring `viterbi()`, `greedy()`, or `top_k(k)` for paths of ranks below k.
    """

    def __init__(self, context: Context):
        self.context = context
        compared = context.semiring.compared
        self.weights = slice(None) if compared is None else slice(compared, compared + 1)
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
        rank: int = 0,
    ) -> tuple[list[Step], int, tuple[int, ...], int]:
        """The path of a rank from an element of an input of a program to one of its outputs.

        Returns:
          The steps, the output's number, the index of its element, and the rank of what follows. No steps and -1 if no
          path goes on.
        """
        jaxpr = program[0]
        values, arrived, sent, flags = self._walk(program, active)(program[1], list(inputs), messages)
        variable, steps = jaxpr.invars[at], []
        start = 0
        while True:
            candidates: list[Any] = []
            for number, eqn in enumerate(jaxpr.eqns[start:], start):
                for slot, atom in enumerate(eqn.invars):
                    if atom is variable and sent[number] is not None and sent[number][slot] is not None:
                        candidates.append(((number, slot), [w[index] for w in sent[number][slot]]))
            for number, atom in enumerate(jaxpr.outvars):
                if atom is variable and messages[number] is not None:
                    candidates.append((number, [w[index] for w in messages[number][self.weights]]))
            chosen = ranked(candidates, rank)
            if chosen is None:
                return NOWHERE
            choice, rank = chosen
            if isinstance(choice, int):
                return steps, choice, index, rank
            number, slot = choice
            eqn = jaxpr.eqns[number]
            given = [v.val if hasattr(v, "val") else values[v] for v in eqn.invars]
            more, output, index, rank = self._through(
                scope, eqn, given, flags[number], arrived[number], slot, index, rank
            )
            if output < 0:
                return NOWHERE
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
                answers = None if dead or pull is None else [None if m is None else m[self.weights] for m in pull(here)]
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

    def _through(self, scope, eqn, inputs, active, arrived, slot, index, rank):
        """The path through one equation: its steps, the output's number, the element's index, the rank after it."""
        inside, name = jaxprs.nested(eqn), jaxprs.scope(eqn)
        scope = join(scope, name)
        if inside is None:
            return self._edge(scope, eqn, inputs, arrived, slot, index, rank)
        if inside.kind in ("call", "remat"):
            return self.follow(scope, inside.jaxprs[0], inputs, active, arrived, slot, index, rank)
        if inside.kind == "cond":
            branch = inside.jaxprs[int(np.clip(int(inputs[0]), 0, len(inside.jaxprs) - 1))]
            return self.follow(scope, branch, inputs[1:], active[1:], arrived, slot - 1, index, rank)
        if inside.kind == "custom":
            return self._rule(scope, eqn, inputs, active, arrived, slot, index, rank)
        return self._loop(scope, inside, inputs, active, arrived, slot, index, rank)

    def _edge(self, scope, eqn, inputs, arrived, slot, index, rank):
        call = jaxprs.caller(eqn)

        def function(x):
            return call(*(x if i == slot else y for i, y in enumerate(inputs)))

        x = jnp.asarray(inputs[slot])
        hot = jnp.zeros_like(x).at[index].set(1)
        _, columns = jax.jvp(function, (x,), (hot,))
        candidates: list[Any] = []
        for number, (column, message) in enumerate(zip(columns, arrived, strict=True)):
            if message is None:
                continue
            column, weights = np.asarray(column), np.stack([np.asarray(w) for w in message[self.weights]], axis=-1)
            products = np.where((found := np.abs(column)[..., None] * weights) > 0, found, 0)
            if products.size == 0:
                continue
            flat = products.reshape(-1, products.shape[-1])
            # No more elements than rank + 1 can count.
            first = np.argsort(-flat[:, 0], kind="stable")[: rank + 1] if rank else [np.argmax(flat[:, 0])]
            for place in np.sort(first):
                element = tuple(int(i) for i in np.unravel_index(place, column.shape))
                candidates.append(((number, element, float(column[element]), weights[element]), flat[place]))
        chosen = ranked(candidates, rank)
        if chosen is None:
            return NOWHERE
        (number, place, weight, after), rank = chosen
        shape = tuple(eqn.outvars[number].aval.shape)
        return [Step(eqn.primitive.name, scope, (), shape, place, weight, float(after[rank]))], number, place, rank

    def _rule(self, scope, eqn, inputs, active, arrived, slot, index, rank):
        program, tangents, chosen, real = control.rule_program(eqn, inputs, active)
        messages = [m for m, r in zip(arrived, real, strict=True) if r]
        flags = (True,) * len(tangents)
        steps, output, index, rank = self.follow(
            scope, program, tangents, flags, messages, chosen.index(slot), index, rank
        )
        steps = [s._replace(scope=scope) for s in steps]
        return steps, [i for i, r in enumerate(real) if r][output] if output >= 0 else -1, index, rank

    def _loop(self, scope, inside, inputs, active, arrived, slot, index, rank):
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
            return [], slot - fixed if slot >= fixed else -1, index, rank
        place = 0
        if slot < fixed:
            chosen = ranked([(t, [w[index] for w in m[self.weights]]) for t, m in enumerate(sent) if m], rank)
            if chosen is None:
                return NOWHERE
            place, rank = chosen
        elif slot >= fixed + carried:
            place, index = slices.index(index[0]), index[1:]
        steps = []
        while True:
            more, output, index, rank = self.follow(
                scope, program, stages[place], active, messages[place], slot, index, rank
            )
            if output < 0:
                return NOWHERE
            steps += [s._replace(steps=(slices[place], *s.steps)) for s in more]
            if output >= carried:
                return steps, output, (slices[place], *index), rank
            place, slot = place + 1, fixed + output
            if place == len(stages):
                return steps, output, index, rank
