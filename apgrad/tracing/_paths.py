"""Reading one path: from an element of a parameter, edge by edge, to the loss.

No pointers are stored (Algorithm 1 of DuSell's "Analyzing neural network optimization with gradient tracing" stores one
for each element of each array). A program is walked once more, and the messages of all its variables are kept. At each
variable the path goes to the greatest contribution to the variable's element: first to the equation that sent most,
then to the output element of this equation that sent most. One column of the equation's Jacobian (a `jax.jvp` with a
one-hot tangent) shows which element that is. Inside loops, only the steps that the path goes through are walked so.

Of two equal contributions the first is taken: the first equation in the order of the program, then the first input, the
first step, and the first element in row-major order.

The k heaviest paths are read in the same way, with the messages of `top_k`. Each contribution comes with the weights of
its own k heaviest paths. The path of rank n goes to the contribution that has the n-th greatest of all these weights,
and continues as the path that has this weight there.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.messages import Static, form_of
from apgrad._programs import jaxprs
from apgrad.tracing import _control as control
from apgrad.tracing._compiled import Compiled
from apgrad.tracing._interpreter import Context, backward, filled, forward, walk
from apgrad.tracing._semirings import Semiring


class PathStep(NamedTuple):
    """One edge of a path.

    Attributes:
      primitive: the name of the primitive that the edge belongs to.
      scope: the named scopes around the primitive, as "encoder/LSTM_0".
      steps: for each loop around the primitive, the outermost first, the number of the iteration.
      shape: the shape of the primitive's output.
      index: the index of the element of the output at which the edge ends.
      weight: the derivative along the edge.
      message: what arrived at this element: its |gradient| on a greedy path, the weight of the rest of the path on a
        viterbi path.
    """

    primitive: str
    scope: str
    steps: tuple[int, ...]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    weight: float
    message: float


def viterbi(masks: int = 0) -> Semiring:
    """The semiring of the heaviest path, which has the greatest product of |derivatives|."""

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
    """DuSell's greedy path (Algorithm 1): at each vertex it follows the edge that brings most gradient, |w g|.

    The components are the gradient g, the greatest |w g| among the contributions, and the masks of this contribution.
    A vertex that has all its contributions sends on its whole gradient (`settle`). So this is no semiring.
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
    """Of contributions `(what, the weights of its heaviest paths)`, the one that has the weight of a given rank.

    With `what` comes which of its weights it is; None if there are not so many positive weights.

    Example:
      >>> ranked([("a", [5.0, 1.0]), ("b", [3.0, 2.0])], 2)
      ('b', 1)
    """
    weighed = [(float(w), what, r) for what, weights in candidates for r, w in enumerate(weights) if not w <= 0]
    if any(math.isnan(w) for w, *_ in weighed):
        raise ValueError(
            "the element has no heaviest path, because a derivative between it and the loss is NaN, or is 0 where "
            "another is infinite. `with jax.debug_nans(True)`, jax.grad says where a NaN is made."
        )
    weighed.sort(key=lambda each: -each[0])
    return weighed[rank][1:] if rank < len(weighed) else None


class Reader:
    """Reads paths of one kind, and keeps the compiled walks for the next path.

    The semiring of its context is `viterbi()`, `greedy()`, or `top_k(k)` for ranks below k.
    """

    def __init__(self, context: Context, compiled: Compiled):
        self.context, self._compiled = context, compiled
        compared = context.semiring.compared
        self.weights = slice(None) if compared is None else slice(compared, compared + 1)
        self._made: dict[Any, Any] = {}

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
    ) -> tuple[list[PathStep], int, tuple[int, ...], int]:
        """The path of a given rank (0 is the heaviest) from an element of the input number `at` of a program.

        Returns its steps, the number of the output where it ends, the index of the element there, and the rank of the
        path from there on; the number is -1 if no path goes on.
        """
        jaxpr = program.jaxpr
        given, flags, arrived, sent = self._walk(program, [jnp.asarray(x) for x in inputs], active, messages)
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
            more, output, index, rank = self._through(
                scope, eqn, given[number], flags[number], arrived[number], slot, index, rank
            )
            if output < 0:
                return NOWHERE
            steps += more
            variable, start = eqn.outvars[output], number + 1

    def _run(self, name, jaxpr, function, *args):
        """Runs a function that belongs to a program by a name; it is read once."""
        forms = tuple(map(form_of, args))
        if (name, id(jaxpr), forms) not in self._made:
            # The program is kept alive, and its id its own.
            self._made[name, id(jaxpr), forms] = self._compiled(function, *args), jaxpr
        return self._made[name, id(jaxpr), forms][0](*args)

    def _walk(self, program, inputs, active, messages):
        """Per equation of a program: the values of its inputs, which are active, the messages that came and go."""
        jaxpr, context, flags = program.jaxpr, self.context, tuple(active)

        def walked(consts, inputs, messages):
            _, steps = forward(context, jaxprs.Program(jaxpr, consts), inputs, flags)
            found = backward(context, jaxpr, [step.pull for step in steps], messages)
            arrived, sent = [], []
            for eqn, (_, _, pull) in zip(jaxpr.eqns, steps, strict=True):
                here = [found.get(v) for v in eqn.outvars]
                dead = pull is None or all(m is None for m in here)
                arrived.append(None if dead else here)
                answers = None if dead or pull is None else [None if m is None else m[self.weights] for m in pull(here)]
                sent.append(answers)
            # Each value once, however many equations it goes into.
            values = {id(x): x for step in steps for x in step.inputs}
            place = {name: i for i, name in enumerate(values)}
            places = tuple(tuple(place[id(x)] for x in step.inputs) for step in steps)
            static = Static((places, tuple(step.active for step in steps)))
            return list(values.values()), arrived, sent, static

        given = list(program.consts), list(inputs), messages
        values, arrived, sent, static = self._run(("walk", flags), jaxpr, walked, *given)
        places, active = static.value
        return [[values[i] for i in row] for row in places], active, arrived, sent

    def _through(self, scope, eqn, inputs, active, arrived, slot, index, rank):
        """The path through one equation: its steps, the output's number, the element's index, the rank after it."""
        inside, name = jaxprs.nested(eqn), jaxprs.scope(eqn)
        scope = jaxprs.join(scope, name)
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
        function, (x,) = jaxprs.restrict(jaxprs.caller(eqn), inputs, [slot])
        x = jnp.asarray(x)
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
        return [PathStep(eqn.primitive.name, scope, (), shape, place, weight, float(after[rank]))], number, place, rank

    def _rule(self, scope, eqn, inputs, active, arrived, slot, index, rank):
        program, tangents, chosen, real, _ = control.linearized(eqn, inputs, active)
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
        active = control.active_carry(program, active, fixed, carried)
        inputs = [jnp.asarray(x) for x in inputs]
        outer, carry, xs = inputs[:fixed], inputs[fixed : fixed + carried], inputs[fixed + carried :]
        consts, name = list(program.consts), ("loop", tuple(active))
        run = lambda consts, values: jaxprs.evaluate(jaxprs.Program(program.jaxpr, consts), values)
        advance = lambda values: self._run("step", program.jaxpr, run, consts, values)
        slices, stages = [], []
        if inside.kind == "scan":
            slices = list(range(inside.length))[:: -1 if inside.reverse else 1]
            for t in slices:
                stages.append([*outer, *carry, *(x[t] for x in xs)])
                carry = advance(stages[-1])[:carried]
        else:
            test, test_consts = inside.jaxprs[0]
            go_on = lambda consts, values: jaxprs.evaluate(jaxprs.Program(test, consts), values)[0]
            while bool(self._run("test", test, go_on, list(test_consts), [*tested, *carry])):
                slices.append(len(stages))
                stages.append([*outer, *carry])
                carry = advance(stages[-1])
        last = filled(semiring, arrived[:carried], carry)
        context = self.context

        def back(consts, values, messages):
            return walk(context, jaxprs.Program(program.jaxpr, consts), values, active).pull(messages)

        messages, sent = [], []
        for t, values in zip(reversed(slices), reversed(stages), strict=True):
            ys = [None if m is None else tuple(x[t] for x in m) for m in arrived[carried:]]
            messages.append([*last, *ys])
            answers = self._run(name, program.jaxpr, back, consts, values, messages[-1])
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
