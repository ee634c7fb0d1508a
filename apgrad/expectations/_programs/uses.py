"""Where parameters enter a program: their uses, and what gradients are made of there.

A program of one lane takes *parameters*, which lanes share, and values of its own lane. What it computes of parameters
alone is a *view* of them: a transposed matrix, a broadcast bias. A *use* is an equation that takes a view together with
values of the lane. The gradient of the parameters is a sum over the uses, each of which needs three things only: the
views, the *operands* (what the use takes of the lane), and the message to what the use makes.

    outputs, operands, made = expose(program, inputs, ports)     # ports: zeros added to what the uses make
    made = replay(program, inputs, operands)                     # the same, as a function of the parameters alone

`jax.vjp` of `expose` with respect to the ports gives the messages, which may be mixed; that of `replay` takes them to
the parameters. Mapped over lanes, it sums over lanes by one product a layer, without the gradients of single lanes.

*Sketches.* With random signs z_k of the parameters' shapes, f_k = <gradient, z_k>, the inner product of two lanes'
gradients is the mean over k of f_k f'_k, on average over the signs. And f_k is a sum over the uses as well,

    f_k = sum over uses of <message, derivative of the use along z_k>.

Signs are products of one sign for each coordinate, z_k[i, j] = u_k[i] v_k[j]. For a dense layer y = x W this makes
f_k = (x . u_k)(message . v_k): two thin products in place of a gradient, and so for adding and multiplying, in `scan`
and in `vmap`. Other uses (a convolution, a table of embeddings) take `NUMBER` derivatives of that one equation; where
an equation forbids them (`jax.custom_vjp`) the lane's gradient is made.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.primitives import refuse_message
from apgrad._programs.jaxprs import Program, caller, inline, is_inexact, nested, place, restrict
from apgrad.expectations._programs.signs import NUMBER, Factors, dense, inner, moved, of_step, of_steps, thin


class ValueKind(IntEnum):
    """What a value depends on: neither lane nor parameters, parameters alone, or the lane."""

    FIXED = 0
    VIEW = 1
    LANE = 2


class Value(NamedTuple):
    kind: ValueKind  # what it depends on
    array: Any = None  # the value; None for values of the lane in `replay`
    signs: Any = None  # for a view in a sketch, the derivatives of the view along the parameters' signs


Values = Sequence[Value]
Arrays = Sequence[Any]  # of arrays, or of pytrees of arrays


def expose(program: Program, inputs: Values, ports: Any = None) -> tuple[list[Any], list[Any], list[Any]]:
    """Evaluates a program of one lane, with ports added to what its uses make.

    Returns the program's outputs, and by use its operands and floating-point outputs; those of a `scan` are stacked.
    """
    walk = _Expose(ports)
    return walk.run(program, inputs), walk.operands, walk.made


def replay(program: Program, inputs: Values, operands: Arrays) -> list[Any]:
    walk = _Replay(operands)
    walk.run(program, _without_lane(inputs))
    return walk.found


def sketch(program: Program, inputs: Values, operands: Arrays, messages: Arrays, signs: Arrays) -> jax.Array:
    found = _without_lane(inputs)
    views = [i for i, value in enumerate(found) if value.kind == ValueKind.VIEW]
    signed = place([found[i]._replace(signs=z) for i, z in zip(views, signs, strict=True)], views, found)
    walk = _Sketch(operands, messages)
    try:
        walk.run(program, signed)
    except TypeError as error:
        if "forward-mode" not in str(error):  # of a function with a reverse-mode rule alone
            raise
        return inner(gradient(program, inputs, operands, messages), signs)
    return walk.found


def gradient(
    program: Program, inputs: Values, operands: Arrays, messages: Arrays, lanes: int | None = None, of: Any = None
) -> list[jax.Array]:
    """The gradient of the parameters, in order: of one lane, or the sum over the lanes of the operands."""
    parameters = [i for i, value in enumerate(inputs) if value.kind == ValueKind.VIEW] if of is None else of

    def made(*arrays):
        given = place([Value(ValueKind.VIEW, x) for x in arrays], parameters, inputs)
        of_one = lambda operands: replay(program, given, operands)
        return of_one(operands) if lanes is None else jax.vmap(of_one, axis_size=lanes)(operands)

    return list(jax.vjp(made, *(inputs[i].array for i in parameters))[1](list(messages)))


def _without_lane(inputs):
    return [Value(ValueKind.LANE) if value.kind == ValueKind.LANE else value for value in inputs]


class _Walk:
    """A walk over a program that meets each use once, always in the same order."""

    def run(self, program: Program, inputs: Values) -> list[Any]:
        return [self.of_lane(value).array for value in self.through(program, inputs)]

    def through(self, program: Program, inputs: Values) -> list[Value]:
        return [_tagged(value) for value in inline(program, list(inputs), self._apply)]

    def of_lane(self, value: Value) -> Value:
        """A view that becomes a value of the lane is a use by itself."""
        if value.kind != ValueKind.VIEW:
            return Value(ValueKind.LANE, value.array)
        return Value(ValueKind.LANE, self.use(lambda x: [x], [value])[0])

    def _apply(self, eqn, values):
        values = [_tagged(value) for value in values]
        kinds = {value.kind for value in values}
        if ValueKind.LANE not in kinds:
            return self.of_views(eqn, values, max(kinds, default=ValueKind.FIXED))
        if ValueKind.VIEW not in kinds:
            return [Value(ValueKind.LANE, x) for x in self.of_lanes(eqn, values)]
        inside = nested(eqn)
        if inside is not None and inside.kind == "remat":
            return self.through(inside.jaxprs[0], values)
        if inside is not None and inside.kind == "scan":
            return self._scan(inside, values)
        make = self.blocked if inside is not None and inside.kind == "while" else self.use
        return [Value(ValueKind.LANE, x) for x in make(caller(eqn), values, eqn)]

    # What a walk does with an equation without views, `(eqn, values)`; with a use, `(function, values, eqn=None)`, of
    # the equation if there is one; with a use that no message passes, a `while_loop`; and with a scan that has
    # `inputs(carry, x)` for its body: the carry and the stacked outputs, as arrays.
    of_lanes: ClassVar[Callable[..., list[Any]]]
    use: ClassVar[Callable[..., list[Any]]]
    blocked: ClassVar[Callable[..., list[Any]]]
    loop: ClassVar[Callable[..., list[Any]]]

    def of_views(self, eqn, values, kind):
        made = caller(eqn)(*(value.array for value in values))
        return [Value(kind if is_inexact(x) else ValueKind.FIXED, x) for x in made]

    def _scan(self, inside, values):
        program, (consts, carried, _) = inside.jaxprs[0], inside.counts
        before, carry, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]
        heads, outs = program.jaxpr.invars[consts : consts + carried], program.jaxpr.outvars
        # What a step hands on as it got it does not change.
        moving = [i for i, c in enumerate(carry) if heads[i] is not outs[i] or c.kind == ValueKind.LANE]

        def inputs(values, x):
            return [*before, *place(values, moving, carry), *x]

        made = self.loop(inside, program, inputs, moving, [self.of_lane(carry[i]) for i in moving], xs)
        outputs = [Value(ValueKind.LANE, x) for x in made]
        return [*place(outputs[: len(moving)], moving, carry), *outputs[len(moving) :]]


class _Expose(_Walk):
    def __init__(self, ports):
        self.ports, self.operands, self.made = None if ports is None else iter(ports), [], []

    def of_lanes(self, eqn, values):
        return caller(eqn)(*(value.array for value in values))

    def use(self, function, values, eqn=None):
        outputs = function(*(value.array for value in values))
        return self._with_ports(outputs, [value.array for value in values if value.kind == ValueKind.LANE])

    def blocked(self, function, values, eqn):
        outputs = function(*(lax.stop_gradient(value.array) for value in values))
        why = "there is no reverse mode for lax.while_loop, which a parameter of the node goes through"
        instead = "Use lax.scan, or lax.fori_loop with a number of steps that is known."
        outputs = self._with_ports(outputs, [x for x in outputs if is_inexact(x)])
        return refuse_message(outputs, f"{why}. {instead}")

    def _with_ports(self, outputs, operands):
        chosen = [i for i, x in enumerate(outputs) if is_inexact(x)]
        self.operands.append(operands)
        self.made.append([outputs[i] for i in chosen])
        if self.ports is None:
            return outputs
        return place([outputs[i] + p for i, p in zip(chosen, next(self.ports), strict=True)], chosen, outputs)

    def loop(self, inside, program, inputs, moving, carry, xs):
        def body(state, x):
            arrays, ports = x
            inner = _Expose(ports)
            given = [v._replace(array=a) for v, a in zip(xs, arrays, strict=True)]
            outputs = inner.run(program, inputs([Value(ValueKind.LANE, c) for c in state], given))
            return [outputs[i] for i in moving], (outputs[inside.counts[1] :], inner.operands, inner.made)

        start, steps = [value.array for value in carry], [value.array for value in xs]
        ports, options = None if self.ports is None else next(self.ports), dict(inside.options, reverse=inside.reverse)
        after, (ys, operands, made) = lax.scan(body, start, (steps, ports), inside.length, **options)
        self.operands.append(operands)
        self.made.append(made)
        return [*after, *ys]


class _Replay(_Walk):
    def __init__(self, *of_uses):
        self.of_uses, self.found = zip(*of_uses, strict=True), []

    def of_lanes(self, eqn, values):
        return [None] * len(eqn.outvars)

    def arrays(self, values, operands):
        """The arrays that a use takes: views as they are now, values of the lane as they were in `expose`."""
        lane = iter(operands)
        return [next(lane) if value.kind == ValueKind.LANE else value.array for value in values]

    def use(self, function, values, eqn=None):
        outputs = function(*self.arrays(values, *next(self.of_uses)))
        self.found.append([x for x in outputs if is_inexact(x)])
        return [None] * len(outputs)

    def blocked(self, function, values, eqn):
        self.found.extend(next(self.of_uses))
        return [None] * len(eqn.outvars)

    def loop(self, inside, program, inputs, moving, carry, xs):
        def step(arrays, signs, *of_uses):
            walk = type(self)(*of_uses)
            given = [Value(v.kind, a, of_step(v.signs, s)) for v, a, s in zip(xs, arrays, signs, strict=True)]
            walk.run(program, inputs(carry, given))
            return walk.found

        arrays, signs = [value.array for value in xs], [of_steps(value.signs, inside.length) for value in xs]
        self.add_steps(jax.vmap(step, axis_size=inside.length)(arrays, signs, *next(self.of_uses)))
        return [None] * (len(moving) + len(program.jaxpr.outvars) - inside.counts[1])

    def add_steps(self, found):
        self.found.append(found)


class _Sketch(_Replay):
    def __init__(self, operands, messages):
        super().__init__(operands, messages)
        self.found = jnp.zeros(NUMBER, jnp.float32)

    def of_views(self, eqn, values, kind):
        outputs = super().of_views(eqn, values, kind)
        if kind == ValueKind.FIXED:
            return outputs
        factors = _moved(eqn, values, outputs)
        if factors is not None:
            return [outputs[0]._replace(signs=factors)]
        chosen = [i for i, value in enumerate(outputs) if value.kind == ValueKind.VIEW]
        signs = _derivatives(caller(eqn), values, [value.array for value in values], chosen)
        return place([outputs[i]._replace(signs=s) for i, s in zip(chosen, signs, strict=True)], chosen, outputs)

    def use(self, function, values, eqn=None):
        operands, messages = next(self.of_uses)
        arrays = self.arrays(values, operands)
        shapes = jax.eval_shape(lambda *arrays: list(function(*arrays)), *arrays)
        self.found = self.found + jnp.real(self._of_use(function, values, arrays, eqn, messages, shapes))
        return [None] * len(shapes)

    def _of_use(self, function, values, arrays, eqn, messages, shapes):
        if eqn is None:
            return inner(messages, [values[0].signs])
        views = [i for i, value in enumerate(values) if value.kind == ValueKind.VIEW]
        if len(views) == 1 and len(values) == 2:
            terms = thin(eqn, arrays, views[0], values[views[0]].signs, messages)
            if terms is not None:
                return terms
        chosen = [i for i, x in enumerate(shapes) if is_inexact(x)]
        return inner(messages, _derivatives(function, values, arrays, chosen))

    def blocked(self, function, values, eqn):
        next(self.of_uses)
        return [None] * len(eqn.outvars)

    def add_steps(self, found):
        self.found = self.found + jnp.sum(found, axis=0)


def _tagged(value):
    return value if isinstance(value, Value) else Value(ValueKind.FIXED, value)


def _moved(eqn, values, outputs):
    """The factors of a view that an equation makes of one other view; None if its signs are no factors any more."""
    if eqn.primitive.name == "mul" and values[0].kind == ValueKind.FIXED:
        values = values[::-1]
    view, *others = values
    if not isinstance(view.signs, Factors) or outputs[0].kind != ValueKind.VIEW:
        return None
    by = [other.array for other in others if other.kind == ValueKind.FIXED and jnp.ndim(other.array) == 0]
    by = by[0] if by and not jnp.iscomplexobj(by[0]) else None
    return moved(eqn, view.signs, jnp.shape(view.array), jnp.shape(outputs[0].array), by)


def _derivatives(function, values, arrays, chosen):
    """The derivatives of the chosen outputs along the views' signs, each (NUMBER, ...)."""
    views = [i for i, value in enumerate(values) if value.kind == ValueKind.VIEW]

    def outputs(*args):
        made = function(*args)
        return [made[i] for i in chosen]

    restricted, primals = restrict(outputs, arrays, views)
    tangents = [dense(values[i].signs, jnp.shape(x)).astype(x.dtype) for i, x in zip(views, primals, strict=True)]
    return jax.vmap(lambda *z: jax.jvp(restricted, tuple(primals), z)[1])(*tangents)
