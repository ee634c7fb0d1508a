"""How total propagation sees a node's parameters, and so what it costs: `ap.diagnostics.sketches`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from apgrad._programs import uses
from apgrad.expectations._adaptive import adaptive
from apgrad.expectations._node_variances import table


class Sketch(NamedTuple):
    """How one use of parameters in a node is sketched.

    Attributes:
      node: the node's name.
      shapes: the shapes of the parameters, as the operation takes them.
      operation: the primitive; "none" where the distribution has the parameters themselves, "all" for all of a node.
      form: "thin products", which cost little; "8 derivatives" of the operation; or "the gradient of each lane".
    """

    node: str
    shapes: tuple[tuple[int, ...], ...]
    operation: str
    form: str


class Sketches(tuple[Sketch, ...]):
    """What `sketches` found; printed, it is a table."""

    def __str__(self) -> str:
        rows = [(s.node, " ".join(map(str, s.shapes)), s.operation, s.form) for s in self]
        return table([("node", "parameters", "operation", "sketched by"), *rows])


def sketches(
    program: Callable[..., Any], lanes: int, key: jax.Array, *args: Any, argnums: int | Sequence[int] = 1
) -> Sketches:
    """How each use of parameters in the program's mixers is sketched. Nothing is computed, the program is traced.

    Nodes whose targets have at most 16 elements are not listed: their features are the gradients themselves.

    Args:
      program: as in `ap.adaptive`.
      lanes: as in `ap.adaptive`.
      key: a PRNG key.
      *args: the program's arguments after the tape.
      argnums: as in `ap.adaptive`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> @ap.stochastic(ap.total_propagation())
      ... def step(p, x):
      ...     return dist.Normal(jnp.tanh(x @ p["w"] + p["b"]) * p["table"][2], 0.1).to_event(1)
      >>> def program(tape, p):
      ...     tape, x = step(tape, p, jnp.ones((tape.lanes, 5)))
      ...     return tape.cost(jnp.sum(x, axis=-1))
      >>> p = {"w": jnp.ones((5, 7)), "b": jnp.ones(7), "table": jnp.ones((9, 7))}
      >>> print(ap.diagnostics.sketches(program, 100, jax.random.key(0), p))
      node                      parameters    operation    sketched by
      step (total_propagation)      (5, 7)  dot_general  thin products
      step (total_propagation)        (7,)          add  thin products
      step (total_propagation)        (7,)          mul  thin products
    """
    found: list[Any] = []
    token = uses.RECORD.set(found)
    try:
        jax.eval_shape(adaptive(program, lanes, argnums).init, key, *args)
    finally:
        uses.RECORD.reset(token)
    node, rows = "", []
    for entry in found:
        if isinstance(entry, str):
            node = entry
        else:
            rows.append(Sketch(node, *entry))
    return Sketches(dict.fromkeys(rows))
