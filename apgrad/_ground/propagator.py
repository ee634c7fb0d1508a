"""Propagators: what a node computes, what it remembers, what it sends backward.

*Automatic propagation* (Parmas & Seno, "Proppo: a message passing framework for customizable and composable learning
algorithms", NeurIPS 2022, section 3) lets a node of reverse mode's graph replace the rule by which it sends messages.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from apgrad._ground.arguments import noted
from apgrad._ground.closures import reached
from apgrad._ground.messages import Static as Static, check_messages, describe, form_of, numbered, tuple_of
from apgrad._ground.primitives import mapped_with, refuse_derivative
from apgrad._programs import pure
from apgrad._programs.jaxprs import hoist, is_inexact, require_unchecked, varying

__all__ = ["Propagator", "backpropagation", "chain", "combine", "first_order", "node", "skip"]


class Propagator(NamedTuple):
    """A node's two pure functions.

    Attributes:
      forward: `(*inputs) -> (output, memory)`, all of them pytrees of arrays.
      backward: `(memory, message) -> messages`, where `message` has the form of the output, and `messages` is a tuple
        with one message for each input, of that input's form. `None` stands for zeros, for an input or a part of one.
        Integers, Booleans and PRNG keys get no message, and the message to an integer output has JAX's dtype `float0`.

    Example:
      >>> import jax, apgrad as ap
      >>> reverse = ap.node(ap.Propagator(lambda x: (x, None), lambda memory, message: (-message,)))
      >>> float(jax.grad(lambda x: reverse(x) ** 2)(3.0))
      -6.0
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Any, Any], Any]


def node(
    propagator: Propagator, *, perturbed: bool = False, named_axes: Sequence[tuple[str, int]] = ()
) -> Callable[..., Any]:
    """An ordinary JAX function whose reverse pass is the propagator's `backward`.

    A second derivative differentiates what `backward` computes (`first_order` refuses it). There is no forward mode.

    Args:
      propagator: the pair of functions. What is differentiated must be an input: `forward` may not close over it.
      perturbed: call `forward(*inputs, perturbed=flags)`, with a bool for each array: is it differentiated?
      named_axes: names and sizes of axes that are mapped around `backward`, but not around the call of the node.

    Raises:
      TypeError: at trace time, if `forward` returns no pair or `backward` no tuple, if a derivative is asked for of an
        array that `forward` closes over, and in forward mode.
      ValueError: at trace time, for messages unlike their inputs, an output without floats, or inputs changed in place.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> clip = ap.node(ap.Propagator(lambda x: (x, None), lambda _, m: (jnp.clip(m, -1, 1),)))
      >>> jax.grad(lambda x: jnp.sum(clip(x) ** 2))(jnp.array([0.25, 3.0]))
      Array([0.5, 1. ], dtype=float32)
    """
    _require_propagators("node", (propagator,))

    residuals = _Residuals()
    plain = pure.unchanged("ap.node", propagator.forward)

    def forward(inputs, flags):
        output, memory = _pair(propagator.forward(*inputs, perturbed=flags) if perturbed else plain(*inputs))
        closed_over = [x for x in reached(propagator.forward) if isinstance(x, Tracer)] if perturbed else []
        mapped = mapped_with(output, (inputs, closed_over))
        # An array that is output and memory stays one array. One that is an input is remembered as it came.
        same = dict(zip(map(id, jax.tree.leaves(output)), jax.tree.leaves(mapped), strict=True))
        same |= {id(x): x for x in jax.tree.leaves(inputs)}
        return mapped, jax.tree.map(lambda x: same.get(id(x), x), memory)

    @jax.custom_vjp
    def call(*inputs):
        return forward(inputs, jax.tree.map(lambda _: False, inputs))[0]

    def fwd(*inputs):
        flags = None
        if perturbed:
            flags = jax.tree.map(lambda p: p.perturbed, inputs, is_leaf=lambda p: isinstance(p, CustomVJPPrimal))
            inputs = jax.tree.map(lambda p: p.value, inputs, is_leaf=lambda p: isinstance(p, CustomVJPPrimal))
            # In a shard_map that checks what varies JAX has neither symbolic zeros nor named axes.
            require_unchecked("ap.randomize, total propagation and cross-fitting are differentiated", inputs)
        # The plain forward, never the wrapped `call`: with a learned backward the wrapped one would be
        # differentiated by its own rule, and meta-gradients would be silently wrong.
        output, memory = forward(inputs, flags)
        _require_arrays(memory)
        if not any(is_inexact(x) for x in jax.tree.leaves(output)):
            raise ValueError(
                "a propagator is differentiated, but its output has no floating-point array, and only these get "
                "messages. Return it in the input's dtype, as ap.skip does; or call the function without ap.node."
            )
        residual = memory, form_of(inputs), Static(tuple(map(varying, jax.tree.leaves(inputs))))
        if perturbed:
            largest, everything = memory, jax.tree.map(lambda _: True, inputs)
            some = zip(jax.tree.leaves(flags), jax.tree.leaves(inputs), strict=True)
            if not residuals.traced_once and any(is_inexact(x) and not p for p, x in some):
                try:
                    largest = jax.eval_shape(lambda inputs: forward(inputs, everything)[1], inputs)
                except Exception as error:  # of an input that has no derivative, and that nobody differentiates
                    residuals.require_equal(memory, error)
            residual = residuals.packed(residual, len(jax.tree.leaves(largest)))
        return output, residual

    def bwd(residual, message):
        memory, inputs, axes = residuals.unpacked(residual) if perturbed else residual
        message = jax.tree.map(_instantiate, message, is_leaf=lambda m: isinstance(m, SymbolicZero))
        with noted(_MAPPED, jax.errors.UnexpectedTracerError):
            messages = check_messages(propagator.backward(memory, message), inputs)
        apart = lambda n, m: m if m is not None and varying(m) - axes.value[n] else None
        unlike = jax.tree.map(apart, numbered(inputs), messages)
        require_unchecked("nodes send messages that vary from shard to shard to what the shards share,", unlike)
        return messages

    call.defvjp(fwd, bwd, symbolic_zeros=perturbed)

    @functools.wraps(propagator.forward)
    def function(*inputs):
        if not perturbed and any(isinstance(found, Tracer) for found in reached(*propagator)):
            return _opened(propagator._replace(forward=plain), inputs, named_axes)
        residuals.traced_once = True
        try:
            # Of an integer that a scan stacks for another custom_vjp, JAX 0.10.2 makes an empty message of wrong shape.
            return jax.tree.map(lambda x: x if is_inexact(x) else jax.lax.stop_gradient(x), call(*inputs))
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(_CLOSURE) from error
        finally:
            residuals.traced_once = False

    return function


class _Residuals:
    """Residuals whose structure depends on what is differentiated, in a form that does not.

    JAX 0.10.2 restores a residual by the structure that the last trace of `fwd` had. So each residual carries the
    number of its own structure, as the width of an empty array, and is padded to the most arrays that any structure
    has. A `fwd` that is traced while the call runs is traced once, and needs no padding.
    """

    def __init__(self):
        self.structures: list[Any] = []
        self.traced_once = False
        self.counts: int | None = None

    def packed(self, residual: Any, size: int) -> Any:
        leaves, structure = jax.tree.flatten(residual)
        if structure not in self.structures:
            self.structures.append(structure)
        number = jnp.zeros((0, self.structures.index(structure)))
        return number, leaves, [jnp.zeros(0)] * (size - len(leaves))

    def require_equal(self, memory: Any, error: Exception) -> None:
        """If tracing the largest memory raised this error, all memories must have as many arrays as the first one."""
        count = len(jax.tree.leaves(memory))
        if self.counts not in (None, count):
            raise error
        self.counts = count

    def unpacked(self, packed: Any) -> Any:
        number, *leaves = jax.tree.leaves(packed)
        structure = self.structures[number.shape[-1]]
        return jax.tree.unflatten(structure, leaves[: structure.num_leaves])


_CLOSURE = (
    "a function closes over an array that is differentiated outside it, which would get no message. Make the array an "
    "argument of the function: for ap.node, of forward, where backward returns a message for it (None for no message)."
)

_MAPPED = "backward uses an array of a transformation, such as one that jax.vmap maps: return it from forward as memory"


def _opened(propagator: Propagator, inputs: Any, named_axes: Sequence[tuple[str, int]]) -> Any:
    """Calls a node whose functions close over traced arrays, as its inputs; those of `forward` refuse derivatives."""
    form = form_of(inputs)
    forward, outside = hoist(lambda *inputs: _pair(propagator.forward(*inputs)), *inputs)
    output, memory = jax.eval_shape(forward, *inputs, *outside)
    outputs = form_of((output,))

    def answer(memory, floats):
        (message,) = check_messages((floats,), outputs, dense=True)
        return check_messages(propagator.backward(memory, message), form)

    floats = jax.tree.map(lambda x: x if is_inexact(x) else None, output)
    backward, needed = hoist(answer, memory, floats, axes=named_axes)

    def with_memory(inputs, outside, needed):
        output, memory = forward(*inputs, *outside)
        return output, (memory, needed)

    def answered(memory, message):
        floats = jax.tree.map(lambda m, x: m if is_inexact(x) else None, message, output)
        return backward(memory[0], floats, *memory[1]), None, None

    outside = refuse_derivative(outside, _CLOSURE)
    return node(Propagator(with_memory, answered))(inputs, outside, needed)


def chain(*propagators: Propagator) -> Propagator:
    """Propagators in sequence, each with its own memory; each feeds its output to the next.

    Proppo's ChainProp (section 3.3). Between two propagators messages are as between two nodes.

    Args:
      *propagators: at least one. The first takes all the inputs, each other one the output before it.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> halve = ap.Propagator(lambda x: (x, None), lambda _, m: (m / 2,))
      >>> sine = ap.node(ap.chain(ap.backpropagation(jnp.sin), halve))
      >>> float(jax.grad(sine)(0.0))
      0.5
    """
    _require_propagators("chain", propagators)

    def forward(*inputs):
        output, memories, forms = _through(propagators, inputs)
        return output, (memories, forms)

    return Propagator(forward, lambda memory, message: _back("chain", propagators, memory, message))


def combine(*propagators: Propagator) -> Propagator:
    """Propagators in sequence on one shared memory, their messages merged.

    Proppo's ComboProp (section 3.3). Memories are dicts, and every `backward` sees their union. Where messages are
    dicts, the keys that a propagator does not return pass on to the propagator before it.

    Args:
      *propagators: at least one; each `forward` returns a dict as its memory, with keys of its own.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> scale = ap.Propagator(lambda x: (x, {}), lambda memory, m: (m * memory["norm"],))
      >>> store = ap.Propagator(lambda x: (x, {"norm": jnp.abs(x)}), lambda _, m: (m,))
      >>> float(jax.grad(ap.node(ap.combine(scale, store)))(-3.0))
      3.0
    """
    _require_propagators("combine", propagators)

    def forward(*inputs):
        output, memories, forms = _through(propagators, inputs)
        shared: dict[Any, Any] = {}
        for memory in memories:
            if not isinstance(memory, dict):
                raise TypeError(f"combine needs memories that are dicts, got {describe(memory)}")
            if both := sorted(shared.keys() & memory.keys(), key=str):
                raise ValueError(f"two propagators write the same memory key {both[0]!r}: rename one, or use chain")
            shared |= memory
        return output, (shared, forms)

    def passed_on(messages, message, form):
        answer = messages[0] if isinstance(messages, tuple) and len(messages) == 1 else None
        if not (isinstance(answer, dict) and isinstance(message, dict)):
            return messages
        (wanted,) = numbered(form)
        return ({k: m for k, m in message.items() if isinstance(wanted, dict) and k in wanted} | answer,)

    def backward(memory, message):
        shared, forms = memory
        return _back("combine", propagators, ([shared] * len(propagators), forms), message, passed_on)

    return Propagator(forward, backward)


def _through(propagators: tuple[Propagator, ...], inputs: Any) -> tuple[Any, list[Any], list[Static]]:
    memories, forms = [], []
    for propagator in propagators:
        output, memory = _pair(propagator.forward(*inputs))
        memories.append(memory)
        forms.append(form_of((output,)))
        inputs = (output,)
    return inputs[0], memories, forms


def _back(name, propagators, memory, message, merge=lambda messages, message, form: messages):
    memories, forms = memory
    for i in reversed(range(1, len(propagators))):
        messages = merge(propagators[i].backward(memories[i], message), message, forms[i - 1])
        where = f" of propagator {i} in {name} (counted from 0)"
        (message,) = check_messages(messages, forms[i - 1], where, dense=True)
    return propagators[0].backward(memories[0], message)


def skip(propagator: Propagator) -> Propagator:
    """The propagator's forward; on the way back, the message passes the node unchanged.

    Proppo's SkipProp does so for the nodes before it. The straight-through estimator (Bengio et al., 2013). An integer
    output of a floating-point input comes in the input's dtype, since JAX carries no message to an integer.

    Args:
      propagator: with one input, of the output's structure and shapes. Its `backward` is not used.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> ste = ap.node(ap.skip(ap.backpropagation(lambda x: x > 0)))
      >>> [float(v) for v in jax.value_and_grad(lambda x: 3 * ste(x))(1.4)]
      [3.0, 3.0]
    """
    _require_propagators("skip", (propagator,))

    def forward(*inputs):
        if len(inputs) != 1:
            raise TypeError(f"skip passes messages over to one input, got {len(inputs)}: give them as one pytree")
        (value,) = inputs
        output, _ = _pair(propagator.forward(value))
        given, got = (jax.tree.map(jnp.shape, tree) for tree in (value, output))
        if given != got:
            raise ValueError(f"skip passes messages over: input {given} and output {got} must have the same shapes")
        return jax.tree.map(_for_messages, value, output), None

    return Propagator(forward, lambda _, message: (message,))


def _for_messages(value: Any, output: Any) -> Any:
    """The output in a dtype at which a message for the input can arrive."""
    mine, other = jnp.result_type(value), jnp.result_type(output)
    if jnp.issubdtype(mine, jnp.inexact) and not is_inexact(output):
        if not (jnp.issubdtype(other, jnp.integer) or jnp.issubdtype(other, jnp.bool_)):
            raise TypeError(f"skip has an input of dtype {mine} and an output of dtype {other}, which has no messages")
        return jnp.asarray(output).astype(mine)
    if jnp.issubdtype(mine, jnp.floating) and jnp.issubdtype(other, jnp.complexfloating):
        raise TypeError(
            f"skip has a real input of dtype {mine} and an output of dtype {other}, whose messages are complex: they "
            "cannot pass to the input. Return the real part, or write the backward pass as a Propagator."
        )
    return output


def backpropagation(function: Callable[..., Any]) -> Propagator:
    """Reverse-mode differentiation of a JAX function, as a propagator (Proppo's BackPropagator).

    Args:
      function: any differentiable JAX function.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> float(jax.grad(ap.node(ap.backpropagation(jnp.sin)))(0.0))
      1.0
    """
    if not callable(function):
        raise TypeError(f"backpropagation takes a function, got {describe(function)}")
    function = pure.unchanged("ap.backpropagation", function)
    return Propagator(lambda *inputs: jax.vjp(function, *inputs), lambda pullback, message: pullback(message))


def first_order(propagator: Propagator, reason: str) -> Propagator:
    """The same propagator, except that differentiating through it twice raises `TypeError(reason)`.

    Args:
      propagator: the rule.
      reason: what the error says: which rule, and what to use instead.

    Example:
      >>> import jax, pytest, apgrad as ap
      >>> double = ap.Propagator(lambda x: (x, x), lambda x, m: (2 * x * m,))
      >>> f = ap.node(ap.first_order(double, "no second derivative of double"))
      >>> with pytest.raises(TypeError, match="no second derivative of double"):
      ...     jax.grad(jax.grad(f))(1.0)
    """
    _require_propagators("first_order", (propagator,))
    # After one derivative the node is its forward with memory. A derivative of that, or of a message, is the second.
    return Propagator(
        forward=lambda *inputs, **options: propagator.forward(*refuse_derivative(inputs, reason), **options),
        backward=lambda memory, message: refuse_derivative(propagator.backward(memory, message), reason),
    )


def _require_propagators(name: str, propagators: tuple[Any, ...]) -> None:
    if not propagators:
        raise ValueError(f"{name} needs at least one propagator, got none")
    for propagator in propagators:
        if not isinstance(propagator, Propagator):
            raise TypeError(f"{name} takes propagators, got {describe(propagator)}: wrap f as ap.backpropagation(f)")


def _pair(result: Any) -> tuple[Any, Any]:
    return tuple_of(2, "a propagator's forward must return the pair (output, memory or None)", result)


def _require_arrays(memory: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(memory):
        if not (isinstance(x, bool | int | float | complex) or hasattr(x, "dtype") or hasattr(x, "__jax_array__")):
            at = f"a propagator's memory{jax.tree_util.keystr(path)} is no array"
            raise TypeError(f"{at}, got {describe(x)}. Let backward close over what is known beforehand.")


def _instantiate(message: Any) -> Any:
    # A symbolic zero stands for an array, and has its shape and dtype; `jax.vjp` takes a Python number for a scalar.
    if isinstance(message, SymbolicZero):
        if message.dtype == jax.dtypes.float0:  # of an integer; jax.numpy makes no zeros of float0 for Python's
            return np.zeros(message.shape, message.dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return jnp.zeros_like(message)  # pyright: ignore[reportArgumentType]
    return message if hasattr(message, "dtype") else jnp.asarray(message)
