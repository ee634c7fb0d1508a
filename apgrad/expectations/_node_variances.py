"""How much each node's gradient varies. A weight rule records it, as it is given both estimators' gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from apgrad.expectations._expectation import expectation
from apgrad.expectations.estimators._total_propagation import total_propagation
from apgrad.expectations.mixing._backward import Numbered
from apgrad.expectations.weights import Weighting, Weights, decoupled, per_step_inverse_variance


class NodeVariances(NamedTuple):
    """The variance of each node's gradient of its own target, in the order of the program: arrays (nodes,).

    A node's target is what is differentiated of its own arguments (`Mixer.target`). Where these are not the program's
    first argument but made of it, as in `step(tape, 10 * theta, x)`, the chain rule's factor, here 10, is not in the
    variances: do not compare nodes whose factors differ, or nodes with the variance of the program's gradient.

    These are variances of the mean over lanes, summed over the target's elements (sketched if more than 16).

    Attributes:
      rp: the variance of reparameterization, where reparameterization alone is sent back.
      lr: the variance of likelihood ratio, which does not depend on what is sent back.
      tp_rp: the variance of reparameterization, on the messages that total propagation sends back.
      tp: the variance of the mixture of `tp_rp` and `lr` with the message's weight.
      weight: the weight of likelihood ratio in the message.
    """

    rp: np.ndarray
    lr: np.ndarray
    tp_rp: np.ndarray
    tp: np.ndarray
    weight: np.ndarray

    def __str__(self) -> str:
        cells: list[Sequence[str]] = [("node", "RP", "LR", "RP within TP", "TP", "weight of LR")]
        for i in np.unique(np.linspace(0, len(self.rp) - 1, min(len(self.rp), 20)).astype(int)):
            cells.append((str(i + 1), *(f"{x[i]:.2g}" for x in self[:4]), f"{self.weight[i]:.2f}"))
        return f"{table(cells)}\nvariances of gradients of each node's own arguments"


def node_variances(
    build: Callable[[Any], Callable[..., Any]],
    lanes: int,
    key: jax.Array,
    *args: Any,
    weights: Weights = decoupled(),  # noqa: B008 (a tuple)
) -> NodeVariances:
    """The variances of both estimators' gradients of each node's own arguments, node by node.

    Args:
      build: `build(estimator) -> program`, a program with that estimator at its nodes, made with `ap.stochastic`.
      lanes: how many lanes there are, as in `ap.expectation`.
      key: a PRNG key.
      *args: the program's arguments after the tape, of which the first is differentiated.
      weights: how total propagation mixes.

    A program without a node that has this estimator is a `ValueError`, and so is such a node of `ap.sample`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def build(estimator):
      ...     step = ap.stochastic(estimator)(lambda theta, x: dist.Normal(theta * x, 0.1))
      ...     def program(tape, theta):
      ...         tape, x = step(tape, theta, jnp.ones(tape.lanes))
      ...         tape, x = step(tape, theta, x)
      ...         return tape.cost(x)
      ...     return program
      >>> found = ap.diagnostics.node_variances(build, 1000, jax.random.key(0), 2.0)
      >>> len(found.rp), bool((found.rp < found.lr).all())
      (2, True)
    """

    def record(message: Weighting, contribution: Weighting | None):
        records = []
        listening = Weights(message._replace(rule=Numbered(_listen(message.rule, records))), contribution)
        objective = expectation(build(total_propagation(weights=listening)), lanes)
        jax.block_until_ready(jax.jit(jax.grad(objective, argnums=1))(key, *args))
        jax.effects_barrier()
        if not records:
            raise ValueError("no node weighed its estimators: the gradient must pass through ap.stochastic(estimator)")
        records.sort(key=lambda record: record[0])  # callbacks come in any order
        shares, scales, variances = (np.stack(x).astype(np.float64) for x in list(zip(*records, strict=True))[1:])
        variances = np.where(np.isfinite(scales), variances * scales**2, np.inf)
        return shares, variances * lanes**2 / (lanes - 1)

    _, pathwise = record(per_step_inverse_variance().message, None)
    shares, mixed = record(weights.message, weights.contribution or weights.message)
    return NodeVariances(pathwise[:, 0], mixed[:, 1], mixed[:, 0], mixed[:, 2], shares[:, 1])


def _listen(rule: Callable[..., Any], records: list[Any]) -> Callable[..., Any]:
    """The same rule, which sends the host the node's number, weights, and the scales and variances of all gradients."""

    def listening(number, gradients, suffix):
        weights = rule(gradients, suffix)
        w = weights[:, None, None]
        rows = jnp.concatenate([gradients, jnp.where(w == 0, 0, w * gradients).sum(0)[None]])
        # Scaled before they are squared, which could overflow.
        scale = jnp.max(jnp.abs(rows), axis=(1, 2))
        safe = jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1)
        variance = jnp.sum(jnp.var(rows / safe[:, None, None], axis=1), axis=-1)

        def append(*found):
            records.append([np.array(x) for x in found])
            return np.zeros((), weights.dtype)

        # The messages depend on the callback's answer, so that the call cannot be left out.
        return weights + io_callback(append, jax.ShapeDtypeStruct((), weights.dtype), number, weights, scale, variance)

    return listening


def table(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in rows)
