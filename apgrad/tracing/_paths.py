"""Reading one path: from an element of a parameter, edge by edge, to the loss.

A program is walked again, and all messages are kept. At each variable the path goes to the equation that sent most to
its element, and there to the output element that sent most, which a column of the Jacobian shows (a one-hot `jax.jvp`).

With the messages of `viterbi(count=k)`, each contribution comes with the weights of its own k heaviest paths. The path
of rank n goes to the contribution with the n-th greatest of all these weights, and continues as that weight's path.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from apgrad._ground.messages import Static, form_of
from apgrad._programs import jaxprs
from apgrad.tracing._equation import transposed_mode
from apgrad.tracing._interpreter import Context, active_carry, backward, forward, linearized, values_of, walk
from apgrad.tracing._semirings import LOG, Semiring, top_k
from apgrad.tracing._sums import dtype_of, filled


class PathStep(NamedTuple):
    """One edge of a path.

    Attributes:
      primitive: the name of the primitive that the edge belongs to.
      scope: the named scopes around the primitive, as "encoder/LSTM_0".
      steps: for each loop around the primitive, the outermost first, the number of the iteration.
      shape: the shape of the primitive's output.
      index: the index of the element of the output at which the edge ends.
      weight: the derivative along the edge.
      message: the weight of the rest of a viterbi path; on a greedy path the element's |gradient|.
    """

    primitive: str
    scope: str
    steps: tuple[int, ...]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    weight: float
    message: float


def _heaviest(compared: int) -> Any:
    """The plus of a semiring with this option `compared`: sums before the component, then the greater value's."""

    def plus(a, b):
        greater = (b[compared] > a[compared]) | jnp.isnan(b[compared])
        pairs = enumerate(zip(a, b, strict=True))
        return tuple(x + y if i < compared else jnp.where(greater, y, x) for i, (x, y) in pairs)

    return plus


def viterbi(masks: int = 0, count: int = 1) -> Semiring:
    """The semiring of the `count` heaviest paths. It adds logarithms: products would leave the range of a dtype."""
    several, zero = top_k(count), (LOG(-math.inf),)
    plus, compared = (_heaviest(0), 0) if count == 1 else (several.plus, None)
    times = lambda a, b: (*(a[0] + x for x in b[:count]), *b[count:])
    lift, rest = lambda w: (jnp.log(jnp.abs(w)),), (count - 1) * zero + masks * (0,)
    return Semiring(several.name, lift, times, plus, zero + rest, (LOG(0), *rest), compared=compared)


def greedy(masks: int = 0) -> Semiring:
    """DuSell's greedy path (Algorithm 1): at each vertex it follows the edge that brings most gradient, |w g|.

    The components are g, the greatest |w g| among the contributions, and its masks. Its `settle` makes it no semiring.
    """
    times, none = lambda a, b: (a[0] * b[0], jnp.abs(a[0]) * b[1], *b[2:]), (0,) * masks
    settle = lambda m: (m[0], jnp.abs(m[0]), *m[2:])
    zero, one = (0.0, 0.0, *none), (1.0, 1.0, *none)
    return Semiring("greedy", lambda w: (w,), times, _heaviest(1), zero, one, settle=settle, compared=1)


SEMIRINGS = {"viterbi": viterbi, "greedy": greedy}


def _bytes(x):
    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def _shardings(tree):
    return tuple(getattr(x, "sharding", None) for x in jax.tree.leaves(tree))


class Compiled:
    """Executables, found by the text of their program: what a function closes over may change from point to point."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    @jax.disable_jit(False)  # a user who debugs under `jax.disable_jit` reads paths, too
    def __call__(self, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        leaves, tree = jax.tree.flatten(args)
        traced = jax.jit(lambda *leaves: function(*tree.unflatten(leaves)), keep_unused=True).trace(*leaves)
        lowered, (jaxpr, consts) = traced.lower(), jaxprs.opened(traced.jaxpr)
        # A JAX that passes the constants of a program beside it leaves their values out of its text.
        atoms = (v for eqn in jaxprs.all_equations(jaxprs.Program(jaxpr, consts)) for v in eqn.invars)
        values = [*consts, *(v.val for v in atoms if isinstance(v, Literal) and np.ndim(v.val))]
        parts = [lowered.as_text().encode(), *map(_bytes, values)]
        key = hashlib.sha256(b"".join(parts)).digest(), lowered.out_tree, _shardings(leaves)
        if key not in self._kept:
            self._kept[key] = lowered.compile()
        return jax.disable_jit(False)(lambda *args: self._kept[key](*jax.tree.leaves(args)))


class Element(NamedTuple):
    """An element of an input or output, by number and index, and the rank of the path that goes on from there."""

    number: int
    index: tuple[int, ...]
    rank: int = 0


Way = tuple[list[PathStep], Element]
"""The steps of a path and the element of an output at which they end."""


class NoPathError(Exception):
    """No path of this rank goes on."""


def ranked(candidates: Sequence[tuple[Any, Sequence[Any]]], rank: int, zero: float) -> tuple[Any, int]:
    """Of contributions `(what, weights of its paths)`, what has the weight of this rank, and that weight's number."""
    weighed = [(float(w), what, r) for what, weights in candidates for r, w in enumerate(weights) if not w <= zero]
    if any(math.isnan(w) for w, *_ in weighed):
        raise ValueError(
            "the element has no heaviest path, because a derivative between it and the loss is NaN, or is 0 where "
            "another is infinite. `with jax.debug_nans(True)`, jax.grad says where a NaN is made."
        )
    if rank >= len(weighed):
        raise NoPathError
    weighed.sort(key=lambda each: -each[0])
    return weighed[rank][1:]


class Reader:
    """Reads paths by the messages of `viterbi()` or `greedy()`, and keeps the compiled walks."""

    def __init__(self, context: Context, compiled: Compiled):
        self.context, self._compiled = context, compiled
        compared = context.semiring.compared
        self.zero = float(context.semiring.zero[compared or 0])
        self.weights = slice(None) if compared is None else slice(compared, compared + 1)
        self._made: dict[Any, Any] = {}

    def follow(self, scope: str, program: Any, inputs: Any, active: Sequence[bool], messages: Any, at: Element) -> Way:
        """The path from an element of an input of a program; `messages` are those at its outputs."""
        jaxpr = program.jaxpr
        known, arrived, sent = self._walk(program, [jnp.asarray(x) for x in inputs], active, messages)
        # The outputs come last, as if they were one more equation.
        rows = [*zip((eqn.invars for eqn in jaxpr.eqns), sent, strict=True), (jaxpr.outvars, self._weights(messages))]
        variable, (_, index, rank), steps, start = jaxpr.invars[at.number], at, [], 0
        while True:
            candidates = [
                ((row, number), [w[index] for w in weights])
                for row, (atoms, contributions) in enumerate(rows[start:], start)
                for number, (atom, weights) in enumerate(zip(atoms, contributions, strict=False))
                if atom is variable and weights is not None
            ]
            (row, number), rank = ranked(candidates, rank, self.zero)
            if row == len(jaxpr.eqns):
                return steps, Element(number, index, rank)
            eqn, place = jaxpr.eqns[row], Element(number, index, rank)
            given, flags = values_of(eqn.invars, known)
            more, (output, index, rank) = self._through(scope, eqn, given, flags, arrived[row], place)
            steps, variable, start = steps + more, eqn.outvars[output], row + 1

    def _weights(self, messages):
        return [None if m is None else m[self.weights] for m in messages]

    def _run(self, name, function, program, *args):
        """Runs `function(program, *args)`, for which the name stands: for each form of the arguments compiled once."""
        index = name, *map(form_of, (program, *args)), _shardings((program, args))
        if index not in self._made:
            self._made[index] = self._compiled(function, program, *args)
        return self._made[index](program, *args)

    def _walk(self, program, inputs, active, messages):
        """For each variable its value and whether it is active; for each equation what arrived and what it sent."""
        jaxpr, context, flags = program.jaxpr, self.context, tuple(active)
        variables = list(dict.fromkeys(v for eqn in jaxpr.eqns for v in jaxprs.variables(eqn.invars)))

        def walked(program, inputs, messages):
            known, pulls = forward(context, program, inputs, flags)
            found = backward(context, jaxpr, pulls, messages)
            arrived = [[found.get(v) for v in eqn.outvars] for eqn in jaxpr.eqns]
            sent = [
                [] if pull is None or all(m is None for m in here) else self._weights(pull(here))
                for pull, here in zip(pulls, arrived, strict=True)
            ]
            values, flags_of = values_of(variables, known)
            return values, arrived, sent, Static(flags_of)

        values, arrived, sent, static = self._run(("walk", flags), walked, program, list(inputs), messages)
        return dict(zip(variables, zip(values, static.value, strict=True), strict=True)), arrived, sent

    def _through(self, scope, eqn, inputs, active, arrived, at) -> Way:
        inside, scope = jaxprs.nested(eqn), jaxprs.join(scope, jaxprs.scope(eqn))
        if inside is None:
            return self._edge(scope, eqn, inputs, arrived, at)
        if inside.kind in ("call", "remat"):
            return self.follow(scope, inside.jaxprs[0], inputs, active, arrived, at)
        if inside.kind == "cond":
            branch = inside.jaxprs[int(np.clip(int(inputs[0]), 0, len(inside.jaxprs) - 1))]
            return self.follow(scope, branch, inputs[1:], active[1:], arrived, at._replace(number=at.number - 1))
        if inside.kind == "custom":
            return self._rule(scope, eqn, inputs, active, arrived, at)
        return self._loop(scope, inside, inputs, active, arrived, at)

    def _edge(self, scope, eqn, inputs, arrived, at) -> Way:
        call = functools.partial(jaxprs.caller(eqn), **transposed_mode(eqn.primitive.name, jaxprs.Parameters(eqn)))
        function, (x,) = jaxprs.restrict(call, inputs, [at.number])
        _, columns = jax.jvp(function, (x,), (jnp.zeros_like(x).at[at.index].set(1),))
        candidates, semiring = [], self.context.semiring
        for number, (column, message) in enumerate(zip(columns, arrived, strict=True)):
            if message is None or column.size == 0:
                continue
            sent = semiring.times(semiring.lift(column.astype(dtype_of(message))), message)
            products, weights = (np.stack(m[self.weights], axis=-1) for m in (sent, message))
            flat = np.where(products > self.zero, products, self.zero).reshape(-1, products.shape[-1])
            # Only the rank + 1 greatest elements can have the path of this rank.
            first = np.argsort(-flat[:, 0], kind="stable")[: at.rank + 1] if at.rank else [np.argmax(flat[:, 0])]
            for i in np.sort(first):
                index = tuple(int(n) for n in np.unravel_index(i, column.shape))
                candidates.append(((number, index, float(column[index]), weights[index]), flat[i]))
        (number, index, weight, after), rank = ranked(candidates, at.rank, self.zero)
        shape, rest = tuple(eqn.outvars[number].aval.shape), float(after[rank])
        rest = rest if self.zero == 0 else math.exp(rest) if rest < 709 else math.inf
        step = PathStep(eqn.primitive.name, scope, (), shape, index, weight, rest)
        return [step], Element(number, index, rank)

    def _rule(self, scope, eqn, inputs, active, arrived, at) -> Way:
        program, tangents, chosen, real, _ = linearized(eqn, inputs, active)
        messages, flags = [m for m, r in zip(arrived, real, strict=True) if r], (True,) * len(tangents)
        at = at._replace(number=chosen.index(at.number))
        steps, end = self.follow(scope, program, tangents, flags, messages, at)
        outputs = [i for i, r in enumerate(real) if r]
        return [s._replace(scope=scope) for s in steps], end._replace(number=outputs[end.number])

    def _loop(self, scope, inside, inputs, active, arrived, at) -> Way:
        semiring, context, program, (number, index, rank) = self.context.semiring, self.context, inside.jaxprs[-1], at
        first, fixed, carried = inside.loop
        inputs = [jnp.asarray(x) for x in inputs]
        tested, inputs, last, number = inputs[: inside.counts[0]], inputs[first:], fixed + carried, number - first
        active = active_carry(program, active[first:], fixed, carried)
        outer, carry, xs = inputs[:fixed], inputs[fixed:last], inputs[last:]
        advance = lambda values: self._run("step", jaxprs.evaluate, program, values)[:carried]
        scan = inside.kind == "scan"
        slices, stages = [], []
        for t in range(inside.length)[:: -1 if inside.reverse else 1] if scan else itertools.count():
            if not (scan or self._run("test", jaxprs.evaluate, inside.jaxprs[0], [*tested, *carry])[0]):
                break
            slices.append(t)
            stages.append([*outer, *carry, *(x[t] for x in xs)])
            carry = advance(stages[-1])

        def back(program, values, messages):
            return walk(context, program, values, active).pull(messages)

        messages, sent, arriving = [], [], filled(semiring, arrived[:carried], carry)
        for t, values in zip(reversed(slices), reversed(stages), strict=True):
            messages.append([*arriving, *(None if m is None else tuple(x[t] for x in m) for m in arrived[carried:])])
            answers = self._run(("loop", active), back, program, values, messages[-1])
            sent.append(answers)
            arriving = filled(semiring, answers[fixed:last], values[fixed:last])
        messages, sent = messages[::-1], sent[::-1]
        if number >= fixed and not stages:
            return [], Element(number - fixed, index, rank)
        step, steps = 0, []
        if number < fixed:
            weights = [self._weights(answers)[number] for answers in sent]
            candidates = [(t, [w[index] for w in each]) for t, each in enumerate(weights) if each]
            step, rank = ranked(candidates, rank, self.zero)
        elif number >= last:
            step, index = slices.index(index[0]), index[1:]
        while True:
            place = Element(number, index, rank)
            more, end = self.follow(scope, program, stages[step], active, messages[step], place)
            steps += [s._replace(steps=(slices[step], *s.steps)) for s in more]
            if end.number >= carried:
                return steps, end._replace(index=(slices[step], *end.index))
            step, (output, index, rank) = step + 1, end
            if step == len(stages):
                return steps, end
            number = fixed + output
