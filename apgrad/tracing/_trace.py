"""`trace_gradients`: a loss at one point, with the paths along which its parameters get their gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from apgrad._ground.arguments import chosen_numbers, integers, is_single, number_of
from apgrad._programs.jaxprs import plain_scope, restrict
from apgrad.tracing import _paths as paths
from apgrad.tracing._influence import ComponentKind, Influence, PathKind, influence, parameter_names
from apgrad.tracing._interpreter import Context
from apgrad.tracing._paths import PathStep, Reader
from apgrad.tracing._semiring_grad import NESTED, original, semiring_grad, traced
from apgrad.tracing._semirings import max_product, top_k
from apgrad.tracing._sums import constant


def trace_gradients(
    f: Callable[..., Any], *, argnums: int | Sequence[int] = 0, in_axes: Any = None
) -> Callable[..., "Trace"]:
    """Which path taught this weight? A function of f's arguments that returns a `Trace`.

    The trace computes a thing when it is first asked for. Inside `jit` use `ap.tracing.influence`.

    Args:
      f: the loss, a function that returns a floating-point scalar.
      argnums: which positional arguments are the parameters, as for `jax.grad`.
      in_axes: the axes of examples, as for `jax.vmap`, with None for an argument that the examples share. If given, f
        is the loss of one example, and each example is traced by itself; arrays are then given by position. By default
        f is traced as a whole.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> def loss(params, x):
      ...     with jax.named_scope("hidden"):
      ...         h = jnp.tanh(x @ params["w"])
      ...     with jax.named_scope("head"):
      ...         return jnp.sum(h * params["v"])
      >>> params = {"w": jnp.array([[1.0, 0.5], [0.2, -1.0]]), "v": jnp.array([1.0, -2.0])}
      >>> trace = ap.trace_gradients(loss)(params, jnp.array([1.0, 2.0]))
      >>> for step in trace.path("w", (0, 1)):
      ...     print(step.scope, step.primitive, step.index, f"{step.weight:.2f}")
      hidden dot_general (1,) 1.00
      hidden tanh (1,) 0.18
      head mul (1,) -2.00
      head reduce_sum () 1.00
      >>> print(trace.influence(depth=1))
      viterbi        v      w
      hidden     0.000  1.000
      head       1.000  1.000
    """

    @functools.wraps(f)
    def trace(*args, **kwargs):
        return Trace(original(f), args, kwargs, argnums, in_axes)

    return trace


class Trace:
    """A loss at one point, made by `trace_gradients`: ask it for weights, paths and influence.

    Attributes:
      parameters: the names of the parameters.
      examples: the number of examples, or None if the loss is traced as a whole.
    """

    def __init__(self, f: Any, args: Any, kwargs: Any, argnums: Any, in_axes: Any):
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise TypeError(
                "trace_gradients reads paths at concrete values, but is called inside a JAX transformation. Use "
                "ap.tracing.influence(f) there (and ap.tracing.every(n, ...) in a training loop)."
            )
        self._f, self._args, self._kwargs, self._argnums, self._axes = f, args, kwargs, argnums, in_axes
        self.examples = None if in_axes is None else _examples(args, kwargs, in_axes)
        _, _, treedef, _ = traced(f, *self._point(0), argnums)
        self.parameters = parameter_names(treedef, argnums)
        self._readers: dict[Any, Any] = {}

    @functools.cached_property
    def gradient(self) -> Any:
        """The gradient, in the structure of the parameters; with `in_axes`, it has a leading axis of examples."""
        return self._mapped(jax.grad(self._f, argnums=self._argnums))

    @functools.cached_property
    def weights(self) -> Any:
        """The weight of the heaviest path of each element, in the structure of the parameters."""
        return self._mapped(semiring_grad(self._f, max_product(), self._argnums))

    def influence(
        self, kind: PathKind = "viterbi", *, by: ComponentKind = "scope", depth: int | None = None
    ) -> Influence:
        """For each component and parameter the share of elements whose path runs through it; see `tracing.influence`.

        With `in_axes` the shares have a leading axis of examples.

        Args:
          kind: which path an element has: "viterbi", the heaviest, or "greedy".
          by: what a component is: a named scope or a primitive.
          depth: how many names of a scope, counted from the outside, make a component; by default all levels do.
        """
        return self._mapped(influence(self._f, kind, by=by, depth=depth, argnums=self._argnums))

    def path(
        self, parameter: str, index: tuple[int, ...] | int = (), kind: PathKind = "viterbi", example: int = 0
    ) -> list[PathStep]:
        """The path of one element: the edges from the element to the loss.

        It is empty if no gradient reaches the element, or the element is the loss itself.

        Args:
          parameter: one of the names in `parameters`.
          index: the index of the element in the parameter.
          kind: "viterbi", the heaviest path, or "greedy", which goes at each step to where most gradient comes from.
          example: the number of the example, if examples are traced by themselves.

        Raises:
          ValueError: for an unknown parameter or kind, an `example` without `in_axes`, or a path weight that is NaN.
          IndexError: for an index outside the parameter's shape.
        """
        if kind not in ("viterbi", "greedy"):
            raise ValueError(f"kind must be 'greedy' or 'viterbi', got {kind!r}")
        return (
            self._read(parameter, index, paths.viterbi() if kind == "viterbi" else paths.greedy(), example, 1)[0] or []
        )

    def paths(
        self, parameter: str, index: tuple[int, ...] | int = (), count: int = 5, example: int = 0
    ) -> list[list[PathStep]]:
        """The heaviest paths of one element, the heaviest first; fewer where there are fewer.

        `ap.semiring_grad` with `top_k(count)` finds the weights of these paths. Two paths are different if they differ
        in any edge.

        Args:
          parameter: one of the names in `parameters`.
          index: the index of the element in the parameter.
          count: how many paths, at least 1.
          example: the number of the example, if examples are traced by themselves.

        Raises:
          ValueError: as for `path`, or for a count below 1.
          IndexError: for an index outside the parameter's shape.

        Example:
          >>> import apgrad as ap
          >>> trace = ap.trace_gradients(lambda x: 3.0 * x - 2.0 * x)(1.0)
          >>> for path in trace.paths("x"):
          ...     print([(step.primitive, step.weight) for step in path])
          [('mul', 3.0), ('sub', 1.0)]
          [('mul', 2.0), ('sub', -1.0)]
        """
        return [p for p in self._read(parameter, index, top_k(count), example, count) if p is not None]

    def _read(self, parameter, index, semiring, example, count):
        short = parameter.removesuffix("/value") if isinstance(parameter, str) else parameter
        number = number_of(parameter if parameter in self.parameters else short, self.parameters, "parameter")
        if (semiring.name, example) not in self._readers:
            program, inputs, _, active = traced(self._f, *self._point(example), self._argnums)
            self._readers[semiring.name, example] = Reader(Context(semiring, NESTED)), program, inputs, active
        reader, program, inputs, active = self._readers[semiring.name, example]
        shape = jnp.shape(inputs[number])
        index = integers(index, "index")
        if len(index) != len(shape) or not all(-n <= i < n for i, n in zip(index, shape, strict=True)):
            raise IndexError(f"{parameter} has the shape {shape}, which has no element {index}")
        index = tuple(i % n for i, n in zip(index, shape, strict=True))
        one = constant(reader.context.semiring.one, (), program.jaxpr.outvars[0].aval.dtype)
        found = [reader.follow("", program, inputs, active, [one], number, index, rank) for rank in range(count)]
        plain = lambda steps: [step._replace(scope=plain_scope(step.scope)) for step in steps]
        return [None if end < 0 else plain(steps) for steps, end, *_ in found]

    def heaviest(
        self, count: int = 5, kind: PathKind = "viterbi", example: int = 0
    ) -> list[tuple[str, tuple[int, ...], list[PathStep]]]:
        """The paths of the elements with the greatest path weights, as (parameter, index, path).

        Elements whose weight is NaN are left out.

        Args:
          count: how many elements, at least 1.
          kind: which paths, "viterbi" or "greedy".
          example: the number of the example, if examples are traced by themselves.

        Raises:
          ValueError: for a count below 1.
        """
        if not is_single(count) or count < 1:
            raise ValueError(f"heaviest needs a count, a whole number of at least 1, got {count}")
        self._point(example)
        leaves = [np.asarray(x) for x in jax.tree.leaves(self.weights)]
        leaves = leaves if self.examples is None else [x[example] for x in leaves]
        flat = np.concatenate([x.ravel() for x in leaves])
        starts = np.cumsum([0, *(x.size for x in leaves)])
        found = []
        for place in np.argsort(-flat, kind="stable")[: min(count, np.sum(~np.isnan(flat)))]:
            number = int(np.searchsorted(starts, place, side="right")) - 1
            index = tuple(int(i) for i in np.unravel_index(place - starts[number], leaves[number].shape))
            name = self.parameters[number]
            found.append((name, index, self.path(name, index, kind, example)))
        return found

    def program(self) -> Any:
        """The traced program and its number of parameters, for drawing."""
        program, _, _, _ = traced(self._f, *self._point(0), self._argnums)
        return program, len(self.parameters)

    def _point(self, example):
        (example,) = integers(example, "example")
        if self._axes is None:
            if example:
                raise ValueError(f"there is no example {example}: without in_axes the loss is traced as a whole")
            return self._args, self._kwargs
        if not 0 <= example < self.examples:
            raise IndexError(f"there are {self.examples} examples, so none has the number {example}")
        return _pick(self._args, self._axes, example), self._kwargs

    def _mapped(self, function):
        """Calls a compiled function of what is chosen or mapped; all else stays as it was given, strings too."""
        axes = _axes(self._args, self._axes)
        numbers = chosen_numbers(self._argnums, len(self._args))
        places = [i for i, axis in enumerate(axes) if i in numbers or axis is not None]

        call, values = restrict(functools.partial(function, **self._kwargs), self._args, places)
        if self._axes is not None:
            call = jax.vmap(call, in_axes=tuple(axes[i] for i in places))
        return jax.jit(call)(*values)


def _examples(args, kwargs, in_axes):
    if any(jnp.ndim(x) for x in jax.tree.leaves(kwargs) if hasattr(x, "shape")):
        raise ValueError("in_axes are of positional arguments: give arrays by position, and None in in_axes if shared")
    pairs = zip(
        jax.tree.leaves(args, is_leaf=_is_none),
        jax.tree.leaves(_leaf_axes(args, in_axes), is_leaf=_is_none),
        strict=True,
    )
    shapes = [(jnp.shape(x), axis) for x, axis in pairs if axis is not None]
    if wrong := [pair for pair in shapes if not -len(pair[0]) <= pair[1] < len(pair[0])]:
        raise ValueError(f"in_axes maps the axis {wrong[0][1]} of an array of shape {wrong[0][0]}")
    sizes = {shape[axis] for shape, axis in shapes}
    if len(sizes) != 1:
        raise ValueError(f"in_axes must map at least one argument, all to the same size; got sizes {sorted(sizes)}")
    return sizes.pop()


def _pick(args, in_axes, example):
    one = lambda x, axis: x if axis is None else jnp.take(x, example, axis=axis)
    return jax.tree.map(one, args, _leaf_axes(args, in_axes), is_leaf=_is_none)


def _axes(args, in_axes):
    """The axis of each argument."""
    axes = (in_axes,) * len(args) if in_axes is None or is_single(in_axes) else tuple(in_axes)
    if len(axes) != len(args):
        raise ValueError(f"in_axes has {len(axes)} entries for {len(args)} arguments")
    return axes


def _leaf_axes(args, in_axes):
    """The axis of each leaf of the arguments."""
    return jax.tree.broadcast(_axes(args, in_axes), tuple(args), is_leaf=_is_none)


def _is_none(x):
    return x is None
