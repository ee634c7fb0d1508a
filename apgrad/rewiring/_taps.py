"""Taps: the value at a place in a program, and the message that passes there on the way back.

A tap is a JAX primitive, the identity. Its tangent goes through a second primitive, linear, which remembers the value,
and whose transpose puts a third one on the cotangent, the *marker*. So a gradient's program holds one marker for each
message, wherever JAX has moved it. `with_taps` makes what markers see an output; without it all three do nothing.
"""

import contextvars
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from apgrad._ground.messages import describe, form_of
from apgrad._ground.primitives import elementwise
from apgrad._programs import jaxprs, pure


class Tapped(NamedTuple):
    """What a tap saw: the value, and its message of the same shape and dtype (the derivative in backpropagation)."""

    value: jax.Array
    message: jax.Array


def tap(x: jax.Array, name: str, statistic: Callable[[jax.Array, jax.Array], Any] = Tapped) -> jax.Array:
    """The same array; `ap.with_taps` returns its value and the message that comes back to it.

    Args:
      x: a floating-point or complex array of any shape; to others no message comes, and they are a TypeError.
      name: the name by which `ap.with_taps` returns the tap; only taps in different branches of a `cond` may share it.
      statistic: `(value, message) -> any pytree of arrays`, returned in place of the two arrays. In a `scan` it is
        computed in each step, and under `jax.vmap` for each example, so that the arrays themselves are not kept.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> loss = lambda x: jnp.sum(ap.tap(jnp.sin(x), "sine", lambda value, message: jnp.max(message)) ** 2)
      >>> _, taps = ap.with_taps(jax.grad(loss))(jnp.array([0.0, jnp.pi / 2]))
      >>> float(taps["sine"])
      2.0
    """
    if not isinstance(name, str):
        raise TypeError(f"a tap is named by a string, got {name!r}")
    if not callable(statistic):
        raise TypeError(f"the statistic of the tap {name!r} is a function of value and message, got {statistic!r}")
    if not jax.tree_util.all_leaves([x]):
        raise TypeError(f"the tap {name!r} is on a {describe(x)}; tap one array, each under a name of its own")
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"the tap {name!r} is on an array of dtype {dtype}, to which no message comes; tap floats")
    called = _called.get()
    if called is not None:
        called.add(name)
    return _tap_p.bind(jnp.asarray(x), name=name, statistic=statistic, mapped=0)


# The names of the taps that were called while `with_taps` traces its function. JAX drops a tap whose value nobody uses,
# and then only the call shows that the tap was there.
_called: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("taps", default=None)


def with_taps(function: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """The function, with what its taps saw beside its output.

    Args:
      function: takes a gradient inside, by `jax.grad`, `jax.value_and_grad` or `jax.vjp`; it may be a training step.

    Returns:
      `(*args, **keywords) -> (output, taps)`, where `taps` is a dictionary from names to `ap.rewiring.Tapped`, or to
      what the statistic of the tap returns. A tap in a `scan` is stacked over the steps, a tap under `jax.vmap` over
      the examples (unless value and message are the same for all); axes of scans come first. A tap in a branch of a
      `cond` that was not taken is zeros. (But `jax.vmap` evaluates all branches: if it is inside the gradient, taps of
      all branches have values; around a gradient of branches with a `jax.checkpoint`, also messages. Put it around the
      result.) The function is traced at each call, so put `jax.jit` around the result. Of two `with_taps`, one
      within the other, the inner one takes the taps whose messages pass in its own function.

    Raises:
      ValueError: at trace time, if there is no tap; if no message passes a tap, or two do, or one passes it inside a
        `while_loop` or a function with its own derivative rule that is not differentiated; if an argument is changed.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> step = lambda w, h, x: ap.tap(jnp.tanh(w * h + x), "state")
      >>> loss = lambda w, xs: jax.lax.scan(lambda h, x: (step(w, h, x), None), 0.0, xs)[0]
      >>> gradient, taps = jax.jit(ap.with_taps(jax.grad(loss)))(0.5, jnp.ones(3))
      >>> taps["state"].message.shape, float(taps["state"].message[-1])
      ((3,), 1.0)
    """

    def tapped(*args, **keywords):
        arrays, put = jaxprs.arrays_of((args, keywords))
        trace = lambda: pure.trace("ap.with_taps", lambda given: function(*given[0], **given[1]), put, arrays)
        (program, shape), called, outer = _calling(trace)
        names, here = called | _names(program, _tap_p), _names(program, _marker_p)
        if outer is not None:  # another `with_taps` is around this one, and takes the other taps
            outer |= names - here
            names = here
        elif not names:
            raise ValueError("with_taps got a function without taps: mark arrays inside it by ap.tap(x, name)")
        outputs, seen = _collect(program, arrays, here)
        if missing := sorted(names - seen.keys()):
            raise ValueError(
                f"no message passed the tap {missing[0]!r}. Either the function takes no gradient (give jax.grad(f) to "
                "with_taps, not f); or what is differentiated does not depend on the tapped array; or the array does "
                "not depend on what the gradient is taken of; or the derivative ends on the way, as at stop_gradient "
                "or in a node or another function with a derivative rule of its own."
            )
        return jax.tree.unflatten(jax.tree.structure(shape), outputs), dict(sorted(seen.items()))

    return tapped


def _calling(trace: Callable[[], Any]) -> tuple[Any, set[str], set[str] | None]:
    # What `trace` returns, the taps that it called, and those so far of a `with_taps` around it. A context variable
    # cannot be pickled, so that what `with_taps` returns, which cloudpickle copies by value, must not name it.
    called: set[str] = set()
    outer = _called.get()
    token = _called.set(called)
    try:
        return trace(), called, outer
    finally:
        _called.reset(token)


def _names(program: jaxprs.Program, primitive: Primitive) -> set[str]:
    return {eqn.params["name"] for eqn in jaxprs.all_equations(program) if eqn.primitive is primitive}


def _collect(program: jaxprs.Program, inputs: Any, here: set[str]) -> tuple[list[Any], dict[str, Any]]:
    """The outputs of a program, and what its markers see; the taps with the names `here` are taken out of it."""
    seen: dict[str, Any] = {}

    def apply(eqn, values):
        found = {}
        if eqn.primitive is _marker_p:
            found = {eqn.params["name"]: _statistic(*values, **eqn.params)}
            outputs = [values[0]]
        elif eqn.primitive is _tap_p and eqn.params["name"] in here:
            outputs = [values[0]]
        else:
            programs, inside = jaxprs.inside_of(eqn), jaxprs.nested(eqn)
            messages = {name for inner in programs for name in _names(inner, _marker_p)}
            kind = "" if inside is None else inside.kind
            closed = kind in ("", "custom")
            if not messages and (closed or not any(here & _names(inner, _tap_p) for inner in programs)):
                return jaxprs.run(eqn, values)
            if messages and (closed or kind == "while"):
                raise ValueError(
                    f"the message of the tap {min(messages)!r} passes inside the primitive {eqn.primitive.name!r}, out "
                    "of which it cannot be taken. Use a scan in place of a while_loop; differentiate a function with a "
                    "derivative rule of its own together with what is around it."
                )
            outputs, found = _inside(eqn, inside, values, here)
        if both := sorted(seen.keys() & found.keys()):
            raise ValueError(
                f"two messages passed the tap {both[0]!r}: either the place stands twice in the program (a loop in "
                "Python, a layer used twice, a second derivative); then give each place a name of its own. Or a rule "
                "of ap.rewire around it sends several messages through one place, as the inference of predictive "
                "coding does, and none of them is the message: there compare the gradients."
            )
        seen.update(found)
        return outputs

    return jaxprs.evaluate(program, inputs, apply), seen


def _inside(eqn: Any, inside: Any, values: Any, here: set[str]) -> tuple[list[Any], dict[str, Any]]:
    count = len(eqn.outvars)
    shapes: dict[str, Any] = {}
    for program in inside.jaxprs:
        operands = [v.aval for v in program.jaxpr.invars]
        for key, shape in jax.eval_shape(lambda *x, p=program: _collect(p, x, here), *operands)[1].items():
            if form_of(shapes.setdefault(key, shape)) != form_of(shape):
                raise ValueError(f"the tap {key!r} has two forms in two branches: {shapes[key]} and {shape}")
    structure = jax.tree.structure(shapes)

    def function(program, *inputs):
        outputs, found = _collect(program, inputs[inside.kind == "scan" :], here)
        zeros = {n: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), s) for n, s in shapes.items() if n not in found}
        return [*outputs, *jax.tree.leaves(found | zeros)]

    functions = [functools.partial(function, program) for program in inside.jaxprs]
    made = jaxprs.rebuild(inside, functions, values)
    return made[:count], jax.tree.unflatten(structure, made[count:])


def _statistic(message, value, flag, *, name, statistic, mapped):
    def seen(value, message, flag):
        taken = flag == _number(name)
        return jax.tree.map(lambda x: jnp.where(taken, x, jnp.zeros_like(x)), statistic(value, message))

    for _ in range(mapped):
        seen = jax.vmap(seen)
    return seen(value, message, flag)


def _number(name: str) -> np.uint32:
    return np.uint32(zlib.crc32(name.encode()) | 1)


def _flag(x: jax.Array, name: str, mapped: int) -> jax.Array:
    """The tap's number, which a gradient remembers with the value. In a branch that was not taken it is another one.

    `jax.vmap` evaluates all branches of a `cond`, then chooses outputs and what is remembered. So markers of a branch
    that an example did not take see numbers of the branch that it took. The flag is made of the array, in a way
    that the compiler removes, since JAX remembers no constants but makes them again.
    """
    return jnp.where(jnp.any(x != x, axis=range(mapped, x.ndim)) & False, np.uint32(0), _number(name))


def _identity(name: str, jvp: Any = None) -> Primitive:
    """A primitive whose output is its first operand. All operands have the mapped axes first."""
    primitive = elementwise(name, jvp)

    def batched(values, dims, *, mapped, **params):
        size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
        values = [batching.bdim_at_front(x, d, size) for x, d in zip(values, dims, strict=True)]
        return primitive.bind(*values, mapped=mapped + 1, **params), 0

    batching.primitive_batchers[primitive] = batched
    return primitive


def _tap_jvp(primals, tangents, **params):
    flag = _flag(primals[0], params["name"], params["mapped"])
    return _tap_p.bind(*primals, **params), _tangent_p.bind(*tangents, *primals, flag, **params)


def _tangent_jvp(primals, tangents, **params):
    tangent = ad.instantiate_zeros(tangents[0])
    return _tangent_p.bind(*primals, **params), _tangent_p.bind(tangent, *primals[1:], **params)


def _tangent_transpose(message, _, value, flag, **params):
    return [message if type(message) is ad.Zero else _marker_p.bind(message, value, flag, **params), None, None]


_tap_p = _identity("tap", _tap_jvp)
_tangent_p = _identity("tap_tangent", _tangent_jvp)
ad.primitive_transposes[_tangent_p] = _tangent_transpose
_marker_p = _identity("tap_message")  # its derivative has no marker: a tap sees one message
