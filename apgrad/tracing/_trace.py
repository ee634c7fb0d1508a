"""`trace_gradients`: a loss at one point, with the paths along which its parameters get their gradients."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from apgrad._ground.arguments import integers, nearest
from apgrad._programs import jaxprs
from apgrad.tracing._influence import Influence, PathKind, at_depth, influence_in, require_options
from apgrad.tracing._interpreter import Context
from apgrad.tracing._paths import SEMIRINGS, Compiled, Element, NoPathError, PathStep, Reader, viterbi
from apgrad.tracing._scopes import warn_of_residual_adds
from apgrad.tracing._semiring_grad import original, propagated, traced
from apgrad.tracing._semirings import max_product
from apgrad.tracing._sums import constant

# What was compiled for a function, as long as the function lives.
_OF_FUNCTION: weakref.WeakKeyDictionary[Any, Compiled] = weakref.WeakKeyDictionary()


def trace_gradients(f: Callable[..., Any], *, argnums: int | Sequence[int] = 0) -> Callable[..., "Trace"]:
    """Which path taught this weight? A function of f's arguments that returns a `Trace`; `influence` works in `jit`.

    Args:
      f: the loss, a function that returns a floating-point scalar.
      argnums: which positional arguments are the parameters, as for `jax.grad`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> hidden = jax.named_scope("hidden")(lambda w, x: jnp.tanh(x @ w))
      >>> head = jax.named_scope("head")(lambda v, h: jnp.sum(h * v))
      >>> loss = lambda params, x: head(params["v"], hidden(params["w"], x))
      >>> params = {"w": jnp.array([[1.0, 0.5], [0.2, -1.0]]), "v": jnp.array([1.0, -2.0])}
      >>> trace = ap.trace_gradients(loss)(params, jnp.array([1.0, 2.0]))
      >>> [(step.scope, step.primitive, round(step.weight, 2)) for step in trace.path("w", (0, 1))]
      [('hidden', 'dot_general', 1.0), ('hidden', 'tanh', 0.18), ('head', 'mul', -2.0), ('head', 'reduce_sum', 1.0)]
    """
    try:
        compiled = _OF_FUNCTION.setdefault(f, Compiled())
    except TypeError:  # an object that cannot be hashed, or weakly referred to
        compiled = Compiled()

    @functools.wraps(f)
    def trace(*args, **kwargs):
        return Trace(original(f), args, kwargs, argnums, compiled)

    return trace


class Trace:
    """A loss at one point, made by `trace_gradients`; it keeps what it found, and compiled, for the next point too.

    `parameters` are the parameters' names: the keys to each, as "encoder/kernel"; an array alone is "x".
    """

    def __init__(self, f: Any, args: Any, kwargs: Any, argnums: Any, compiled: Compiled):
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise TypeError(
                "trace_gradients reads paths at concrete values, but is called inside a JAX transformation. Use "
                "ap.tracing.influence(f) there (and ap.tracing.every(n, ...) in a training loop)."
            )
        self._loss = traced("ap.trace_gradients", f, args, kwargs, argnums)
        self.parameters = self._loss.names
        self._compiled, self._readers, self._influences = compiled, {}, {}
        self._warned_of: list[str] = []

    @functools.cached_property
    def gradient(self) -> Any:
        """The gradient, in the structure of the parameters: JAX's own."""
        number = len(self.parameters)

        def gradient(loss):
            value = lambda chosen: jaxprs.evaluate(loss.program, [*chosen, *loss.inputs[number:]])[0]
            return jax.grad(value)(loss.inputs[:number])

        return self._loss.tree(self._run(gradient))

    @functools.cached_property
    def weights(self) -> Any:
        """The weight of each element's heaviest path, by `max_product`: 0 or inf beyond the range of its dtype."""
        return self._loss.tree(self._run(lambda loss: propagated(max_product(), loss)))

    def influence(self, kind: PathKind = "viterbi", *, depth: int | None = None, top: int | None = None) -> Influence:
        """As `tracing.influence`.

        Args:
          kind: which path an element has: "viterbi", the heaviest, or "greedy".
          depth: how many names of a scope, counted from the outside, make a component; by default all levels do.
          top: at most how many components, see `Influence.top`; by default all.
        """
        require_options(kind, depth)
        if kind not in self._influences:
            self._influences[kind] = self._run(lambda loss: influence_in(loss, kind, own=True))
        found = at_depth(self._influences[kind], self._loss.program, depth)
        self._warned_of += warn_of_residual_adds(self._loss, found.components, self._warned_of)
        return found if top is None else found.top(top)

    def path(self, parameter: str, index: tuple[int, ...] | int = (), kind: PathKind = "viterbi") -> list[PathStep]:
        """The edges from one element to the loss; none if no gradient reaches the element, or it is the loss itself.

        A path weight that is NaN is a ValueError.

        Args:
          parameter: one of the names in `parameters`.
          index: the index of the element in the parameter.
          kind: "viterbi", the heaviest path, or "greedy", which goes at each step to where most gradient comes from.
        """
        require_options(kind)
        return next(self._read(parameter, index, SEMIRINGS[kind](), 1), [])

    def paths(self, parameter: str, index: tuple[int, ...] | int = (), count: int = 5) -> list[list[PathStep]]:
        """The heaviest paths of one element, the heaviest first; fewer where there are fewer.

        Args:
          parameter: as for `path`.
          index: as for `path`.
          count: how many paths, at least 1.

        Example:
          >>> import apgrad as ap
          >>> trace = ap.trace_gradients(lambda x: 3.0 * x - 2.0 * x)(1.0)
          >>> [[(step.primitive, step.weight) for step in path] for path in trace.paths("x")]
          [[('mul', 3.0), ('sub', 1.0)], [('mul', 2.0), ('sub', -1.0)]]
        """
        return list(self._read(parameter, index, viterbi(count=count), count))

    def _read(self, parameter, index, semiring, count):
        short = parameter.removesuffix("/value") if isinstance(parameter, str) else parameter
        name = parameter if parameter in self.parameters else short
        if name not in self.parameters:
            raise ValueError(f"there is no parameter {name!r}; {nearest(name, self.parameters)}")
        number = self.parameters.index(name)
        if semiring.name not in self._readers:
            self._readers[semiring.name] = Reader(Context(semiring), self._compiled)
        reader, loss = self._readers[semiring.name], self._loss
        shape = loss.inputs[number].shape
        index = integers(index, "index")
        if len(index) != len(shape) or not all(-n <= i < n for i, n in zip(index, shape, strict=True)):
            raise IndexError(f"{parameter} has the shape {shape}, which has no element {index}")
        index = tuple(i % n for i, n in zip(index, shape, strict=True))
        one = [constant(semiring.one, (), loss.program.jaxpr.outvars[0].aval.dtype)]
        follow = functools.partial(reader.follow, "", loss.program, loss.inputs, loss.active, one)
        for rank in range(count):
            with contextlib.suppress(NoPathError):
                steps, _ = follow(Element(number, index, rank))
                yield [step._replace(scope=jaxprs.users_scope(step.scope)) for step in steps]

    def _run(self, function):
        return self._compiled(function, self._loss)(self._loss)
