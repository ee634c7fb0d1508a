"""Propagators: what a node computes, what it remembers, what it sends backward.

Reverse-mode differentiation passes one kind of message (a cotangent) by one kind of rule (the
transposed Jacobian). *Automatic propagation* (Parmas & Seno, "Proppo: a message passing framework
for customizable and composable learning algorithms", NeurIPS 2022, section 3) keeps the walk over the
graph and lets a node replace the rule. Here a node's rule is a pair of pure functions, and
`jax.custom_vjp` is the graph walker: it adds up messages at a fan-out and works under `jit`, `vmap`,
`scan`, `cond`, `remat` and sharding.

This is the ground floor.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from apgrad.primitives import refuse_derivative


class Propagator(NamedTuple):
    """A node's two pure functions.

    Attributes:
      forward: `(*inputs) -> (output, memory)`. Inputs, output and memory are pytrees of arrays. Memory
        is all that `backward` sees of the forward pass.
      backward: `(memory, message) -> messages`, where `message` has the structure and shapes of the
        output, and `messages` is a tuple with one message for each input, of that input's structure
        and shapes. `None` stands for no message (zeros), for a whole input or any part of one.
        Integer inputs and PRNG keys get no message, whatever stands there.

    Example:
      Reverse the message, as in domain-adversarial training (Ganin et al., 2016):

      >>> import jax, apgrad as ap
      >>> reverse = ap.node(ap.Propagator(
      ...     forward=lambda x: (x, None),
      ...     backward=lambda memory, message: (-message,),
      ... ))
      >>> float(jax.grad(lambda x: reverse(x) ** 2)(3.0))
      -6.0
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Any, Any], Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Memory that is no array: a hashable value that is known when the program is traced."""

    value: Any


def node(propagator: Propagator, *, perturbed: bool = False) -> Callable[..., Any]:
    """An ordinary JAX function whose reverse pass is the propagator's `backward`.

    Reverse mode differentiates it any number of times: the second derivative differentiates what
    `backward` computes. Where that is not the derivative you mean, wrap the propagator in `first_order`.
    Forward mode raises JAX's `TypeError`: a propagator has no forward-mode rule.

    Args:
      propagator: the pair of functions. They may not close over an array that is traced or differentiated
        outside: it would get no message (and inside a `scan`, JAX cannot compile it). Pass it as an input.
      perturbed: tell `forward` what is differentiated: it is called as `forward(*inputs, perturbed=flags)`, with
        Python bools in the structure of the inputs.

    Returns:
      `function(*inputs) -> output`.

    Raises:
      TypeError: at trace time, if `forward` does not return a pair or `backward` not a tuple.
      ValueError: at trace time, if the messages do not match the inputs.

    Example:
      A message clipped on its way back:

      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> clip = ap.node(ap.Propagator(lambda x: (x, None), lambda _, m: (jnp.clip(m, -1, 1),)))
      >>> jax.grad(lambda x: jnp.sum(clip(x) ** 2))(jnp.array([0.25, 3.0]))
      Array([0.5, 1. ], dtype=float32)
    """

    def forward(inputs, flags):
        result = propagator.forward(*inputs, perturbed=flags) if perturbed else propagator.forward(*inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                "a propagator's forward must return the pair (output, memory), got "
                f"{_describe(result)}. Return (output, None) if nothing is to be remembered."
            )
        return result

    @jax.custom_vjp
    def call(*inputs):
        return forward(inputs, jax.tree.map(lambda _: False, inputs))[0]

    def fwd(*inputs):
        flags = None
        if perturbed:
            flags = jax.tree.map(lambda p: p.perturbed, inputs, is_leaf=lambda p: isinstance(p, CustomVJPPrimal))
            inputs = jax.tree.map(lambda p: p.value, inputs, is_leaf=lambda p: isinstance(p, CustomVJPPrimal))
        # The plain forward, never the wrapped `call`: with a learned backward the wrapped one would be
        # differentiated by its own rule, and meta-gradients would be silently wrong.
        output, memory = forward(inputs, flags)
        leaves, treedef = jax.tree.flatten(inputs)
        return output, (memory, Static((treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))))

    def bwd(residual, message):
        memory, inputs = residual
        if perturbed:
            message = jax.tree.map(_instantiate, message, is_leaf=lambda m: isinstance(m, SymbolicZero))
        return _check_messages(propagator.backward(memory, message), *inputs.value)

    call.defvjp(fwd, bwd, symbolic_zeros=perturbed)

    @functools.wraps(propagator.forward)
    def function(*inputs):
        try:
            return call(*inputs)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(
                "a propagator closes over an array that is traced or differentiated outside it, which "
                "would get no message. Pass the array to the node as an input."
            ) from error

    return function


def chain(*propagators: Propagator) -> Propagator:
    """Propagators in sequence, each with its own memory; each feeds its output to the next.

    Proppo's ChainProp (section 3.3): propagators nest safely, since none sees another's memory. The
    first takes all the inputs, each other one the output before it.

    Args:
      *propagators: at least one.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> halve = ap.Propagator(lambda x: (x, None), lambda _, m: (m / 2,))
      >>> sine = ap.node(ap.chain(ap.backpropagation(jnp.sin), halve))
      >>> float(jax.grad(sine)(0.0))
      0.5
    """
    _require_propagators("chain", propagators)

    def forward(*inputs):
        memories = []
        for propagator in propagators:
            output, memory = propagator.forward(*inputs)
            memories.append(memory)
            inputs = (output,)
        return output, tuple(memories)  # pyright: ignore[reportPossiblyUnbound]

    def backward(memories, message):
        for propagator, memory in zip(reversed(propagators[1:]), reversed(memories[1:]), strict=True):
            message = _only(propagator.backward(memory, message))
        return propagators[0].backward(memories[0], message)

    return Propagator(forward, backward)


def combine(*propagators: Propagator) -> Propagator:
    """Propagators in sequence on one shared memory, their messages merged.

    Proppo's ComboProp (section 3.3). Memories are dicts, and every `backward` sees their union, so that
    one propagator can use what another one stored. Where messages are dicts, a propagator answers the
    keys it returns, and the keys it does not return pass on to the propagator before it.

    Args:
      *propagators: at least one; each `forward` returns a dict as its memory.

    Raises:
      TypeError: at trace time, if a memory is not a dict.
      ValueError: at trace time, if two propagators write the same key.

    Example:
      The first one's backward scales by what the second one stored:

      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> scale = ap.Propagator(lambda x: (x, {}), lambda memory, m: (m * memory["norm"],))
      >>> store = ap.Propagator(lambda x: (x, {"norm": jnp.abs(x)}), lambda _, m: (m,))
      >>> float(jax.grad(ap.node(ap.combine(scale, store)))(-3.0))
      3.0
    """
    _require_propagators("combine", propagators)

    def forward(*inputs):
        shared: dict[Any, Any] = {}
        for propagator in propagators:
            output, memory = propagator.forward(*inputs)
            if not isinstance(memory, dict):
                raise TypeError(f"combine needs memories that are dicts, got {_describe(memory)}")
            if both := sorted(shared.keys() & memory.keys()):
                raise ValueError(
                    f"two combined propagators write the same memory key {both[0]!r}. Rename one, or use "
                    "chain, which gives each propagator a memory of its own."
                )
            shared |= memory
            inputs = (output,)
        return output, shared  # pyright: ignore[reportPossiblyUnbound]

    def backward(shared, message):
        for propagator in reversed(propagators[1:]):
            answer = _only(propagator.backward(shared, message))
            merge = isinstance(answer, dict) and isinstance(message, dict)
            message = {**message, **answer} if merge else answer
        return propagators[0].backward(shared, message)

    return Propagator(forward, backward)


def skip(propagator: Propagator) -> Propagator:
    """The propagator's forward; backward, the message passes over the node as it came.

    Proppo's SkipProp. With a forward that has no useful derivative this is the straight-through
    estimator (Bengio et al., 2013). It has one input, of the output's structure and shapes.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> ste = ap.node(ap.skip(ap.backpropagation(jnp.round)))
      >>> [float(v) for v in jax.value_and_grad(lambda x: 3 * ste(x))(1.4)]
      [3.0, 3.0]
    """

    def forward(value):
        output, _ = propagator.forward(value)
        given, got = (jax.tree.map(jnp.shape, tree) for tree in (value, output))
        if given != got:
            raise ValueError(
                f"skip passes the message over the node, so input and output must have the same shapes; "
                f"got input {given} and output {got}"
            )
        return output, None

    return Propagator(forward, lambda _, message: (message,))


def backpropagation(function: Callable[..., Any]) -> Propagator:
    """Reverse-mode differentiation of a JAX function, as a propagator: a part for `chain` and friends.

    Proppo's BackPropagator; a function with several outputs starts backpropagation at all of them.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> float(jax.grad(ap.node(ap.backpropagation(jnp.sin)))(0.0))
      1.0
    """
    return Propagator(
        forward=lambda *inputs: jax.vjp(function, *inputs),
        backward=lambda pullback, message: pullback(message),
    )


def first_order(propagator: Propagator, reason: str) -> Propagator:
    """The same propagator, except that differentiating through it twice raises `TypeError(reason)`.

    For a backward rule that is no derivative (or a derivative only once): differentiated again as if it
    were, it would be wrong without a word.

    Args:
      propagator: the rule.
      reason: what the error says: which rule, and what to use instead.

    Example:
      >>> import jax, apgrad as ap
      >>> double = ap.Propagator(lambda x: (x, x), lambda x, m: (2 * x * m,))
      >>> f = ap.node(ap.first_order(double, "no second derivative of double"))
      >>> try:
      ...     jax.grad(jax.grad(f))(1.0)
      ... except TypeError as error:
      ...     print(error)
      no second derivative of double
    """
    # Once differentiated, the node is its forward with memory: a derivative that arrives there is the second, as
    # is one of the messages.
    return Propagator(
        forward=lambda *inputs, **options: propagator.forward(*refuse_derivative(inputs, reason), **options),
        backward=lambda memory, message: refuse_derivative(propagator.backward(memory, message), reason),
    )


def hoist(function: Callable[..., Any], *inputs: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A function without closures over traced arrays: `function(*inputs) == converted(*inputs, *arrays)`.

    A `custom_vjp` function may not close over an array that is to be differentiated; with the arrays as
    inputs they get their messages like any other.

    Args:
      function: any JAX function.
      *inputs: what it will be called with, as arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The converted function, and the list of arrays.
    """
    converted, arrays = jax.closure_convert(function, *inputs)
    return converted, arrays


def _require_propagators(name: str, propagators: tuple[Any, ...]) -> None:
    if not propagators:
        raise ValueError(f"{name} needs at least one propagator, got none")
    for propagator in propagators:
        if not isinstance(propagator, Propagator):
            raise TypeError(
                f"{name} takes propagators, got {_describe(propagator)}. Wrap a function f as ap.backpropagation(f)."
            )


def _only(messages: Any) -> Any:
    """The message of a propagator with one input."""
    if not (isinstance(messages, tuple) and len(messages) == 1):
        raise TypeError(
            "a propagator fed by another one has one input, so its backward must return a tuple of one "
            f"message, got {_describe(messages)}"
        )
    return messages[0]


def _instantiate(message: Any) -> Any:
    # A symbolic zero stands for an array, and has its shape and dtype.
    return jnp.zeros_like(message) if isinstance(message, SymbolicZero) else message  # pyright: ignore[reportArgumentType]


def _check_messages(messages: Any, treedef: Any, avals: tuple[Any, ...]) -> tuple[Any, ...]:
    """The messages as `custom_vjp` wants them, or an error that says which one is wrong."""
    children = treedef.children()
    if not isinstance(messages, tuple) or len(messages) != len(children):
        raise TypeError(
            f"a propagator's backward must return a tuple with one message for each of its {len(children)} "
            f"input(s), got {_describe(messages)}. A single message m is returned as (m,)."
        )
    remaining = iter(avals)

    def check(index, treedef, message):
        wanted = [next(remaining) for _ in range(treedef.num_leaves)]
        if message is None:
            return None
        try:
            leaves = treedef.flatten_up_to(message)
            fits = jax.tree_util.all_leaves(leaves, is_leaf=lambda x: x is None)
        except (ValueError, TypeError):
            fits, leaves = False, []
        if not fits:
            raise ValueError(
                f"the message for input {index} has the structure {jax.tree.structure(message)}, the input "
                f"has {treedef}. A message has the structure of its input; None stands for no message."
            )
        return treedef.unflatten([_fit(index, leaf, *aval) for leaf, aval in zip(leaves, wanted, strict=True)])

    return tuple(check(i, t, m) for i, (t, m) in enumerate(zip(children, messages, strict=True)))


def _fit(index: int, message: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if message is None or not jnp.issubdtype(dtype, jnp.inexact):
        return None
    if jnp.shape(message) != shape:
        raise ValueError(
            f"the message for input {index} has shape {jnp.shape(message)}, the input has shape {shape}. A "
            "message has the shape of its input; for any other shape, send it through a port (ap.port)."
        )
    return jnp.asarray(message, dtype)


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__}"
