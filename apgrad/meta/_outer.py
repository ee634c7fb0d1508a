"""Outer gradients by differentiation: through the whole unroll, through pieces of it, and forward.

An estimator is one function, `(theta, key, carry) -> (loss, gradient, carry)`, and it starts from the carry None, which
`init` turns into one of fixed form: so unrolls go on across outer steps, which is what truncation and persistent
estimators live by. `lanes` maps an estimator over tasks, `clipped` bounds what each may add, `average` adds up several.

    full:       dL/dtheta by reverse mode; unbiased, and explodes where the recurrence is chaotic
    truncated:  the same over K of T steps, the state at the start held constant; biased towards short horizons
                (and like all that goes on across truncations, per segment: see below)
    forward:    one tangent for each meta-parameter is carried along (Williams & Zipser, 1989: real-time recurrent
                learning): memory does not grow with T, cost grows with the number of meta-parameters

*Per segment.* `truncated`, `truncated_evolution`, `persistent_evolution` and `single_evolution` give the loss and the
gradient of the K steps that an estimate makes (and of the final loss, where the unroll ends there), not of the whole
unroll. The T/K estimates of an unroll add up to the unroll's; the mean over lanes that are out of step is K/T of it.
Times T/K, they compare with `backpropagation` and `evolution`. Adam, and gradients that are normalized, do not see the
factor; plain SGD, clipping, and a mean with whole unrolls (`average`) do.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from apgrad.meta._partition import without_fixed
from apgrad.meta._require import number, whole
from apgrad.meta._unroll import Problem, objective, run


@dataclasses.dataclass(frozen=True)
class OuterGradient:
    """An estimator of the outer gradient.

    Attributes:
      init: `(theta, key) -> carry`, what is kept from one outer step to the next.
      estimate: `(theta, key, carry) -> (loss, gradient, carry)`.
    """

    init: Callable[[Any, jax.Array], Any]
    estimate: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any, Any]]

    def __call__(self, theta: Any, key: jax.Array, carry: Any = None) -> tuple[jax.Array, Any, Any]:
        """`estimate`, from a fresh carry if none is given; the gradient of what is not trained is zero."""
        if carry is None:
            # split, not fold_in: split(key)[i], which an estimate draws from, is fold_in(key, i)
            begin, key = jax.random.split(key)
            carry = self.init(theta, begin)
        loss, gradient, carry = self.estimate(theta, key, carry)
        return loss, without_fixed(gradient), carry


def backpropagation(problem: Problem, *, remat: bool | int = False) -> OuterGradient:
    """Reverse mode through the whole unroll, a new task each time.

    Args:
      problem: the recurrence.
      remat: see `run`.
    """

    def estimate(theta, key, carry):
        value = jax.value_and_grad(lambda theta: objective(problem, theta, key, remat=remat)[0])
        return *value(theta), carry

    return OuterGradient(lambda theta, key: (), estimate)


class Segments(NamedTuple):
    """Unrolls that go on: the inner state, the key of this unroll, and the steps made."""

    state: Any
    t: jax.Array


def start(problem: Problem, theta: Any, key: jax.Array, segment: int, *, stagger: bool = True) -> Segments:
    """An unroll at its start; staggered, at a random multiple of the segment, so that lanes are out of step."""
    if problem.length % whole("the truncation K", segment, 1):
        raise ValueError(
            f"a truncation of K steps divides the unroll's T; got K={segment}, T={problem.length}. Choose another K, "
            "or another length."
        )
    keys = jax.random.split(key)
    state, t = problem.init(theta, keys[0]), jnp.zeros((), int)
    if stagger and segment < problem.length:
        count = problem.length // segment
        t = segment * jax.random.randint(keys[1], (), 0, count)
        one = lambda s, i: (jax.tree.map(lambda a, b: jnp.where(i < t, a, b), problem.step(theta, s)[0], s), None)
        state, _ = jax.lax.scan(one, state, jnp.arange(problem.length - segment))
    return Segments(jax.lax.stop_gradient(state), t)


def advance(problem: Problem, theta: Any, carry: Segments, segment: int, *, remat: bool | int = False):
    """K steps on: their loss, with the final one where the unroll ends here; and the carry."""
    state, losses = run(problem, theta, carry.state, segment, remat=remat)
    t = carry.t + segment
    done = t >= problem.length
    loss = jnp.sum(losses) + jnp.where(done, problem.final(theta, state), 0.0)
    return loss, Segments(state, t)


def renew(problem: Problem, theta: Any, key: jax.Array, carry: Segments) -> Segments:
    """A new task in place of an unroll that has ended."""
    fresh = Segments(problem.init(theta, key), jnp.zeros((), int))
    return jax.tree.map(lambda new, old: jnp.where(carry.t >= problem.length, new, old), fresh, carry)


def truncated(problem: Problem, segment: int, *, remat: bool | int = False, stagger: bool = True) -> OuterGradient:
    """Reverse mode through K of T steps; the state crosses truncations as a constant.

    Loss and gradient are those of the K steps, K/T of an unroll's on average: see the head of this file.

    Args:
      problem: the recurrence.
      segment: K.
      remat: see `run`.
      stagger: whether lanes start out of step, so that every outer step sees all parts of an unroll.
    """

    def estimate(theta, key, carry):
        def loss(theta):
            value, new = advance(problem, theta, jax.lax.stop_gradient(carry), segment, remat=remat)
            return value, new

        (value, new), gradient = jax.value_and_grad(loss, has_aux=True)(theta)
        return value, gradient, jax.lax.stop_gradient(renew(problem, theta, key, new))

    return OuterGradient(lambda theta, key: start(problem, theta, key, segment, stagger=stagger), estimate)


def forward_mode(problem: Problem) -> OuterGradient:
    """Forward mode through the whole unroll, for few meta-parameters: the same gradient as `backpropagation`.

    Args:
      problem: the recurrence, of functions that have a forward mode; the nodes of `mplp` have none.

    Raises:
      TypeError: if a function in the unroll has none.
    """

    def estimate(theta, key, carry):
        flat, unravel = ravel_pytree(theta)

        def loss(flat):
            value, _ = objective(problem, unravel(flat), key)
            return value, value

        try:
            gradient, value = jax.jacfwd(loss, has_aux=True)(flat)
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            raise TypeError(
                "forward_mode differentiates only what has a forward mode, and the unroll has a custom_vjp function: "
                "the nodes of mplp are such, and with them `network.predict` and the losses of `sinusoid` and `images`."
                " Write the task's loss in plain JAX, or use backpropagation or an evolution strategy."
            ) from error
        return value, unravel(gradient), carry

    return OuterGradient(lambda theta, key: (), estimate)


def lanes(estimator: OuterGradient, count: int, *, mesh: Mesh | None = None) -> OuterGradient:
    """The mean over `count` tasks, each with its own carry: the outer batch.

    Args:
      estimator: for one task.
      count: tasks.
      mesh: of devices, over which the tasks are spread (global-view sharding along its first axis); the same numbers
        as on one device, but for rounding.
    """
    count = whole("count", count, 1)
    if mesh is not None and count % mesh.shape[mesh.axis_names[0]]:
        raise ValueError(f"{count} tasks do not divide among the {mesh.shape[mesh.axis_names[0]]} devices of the mesh")

    def spread(tree):
        if mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(
            tree, NamedSharding(global_view(mesh), PartitionSpec(mesh.axis_names[0]))
        )

    def init(theta, key):
        return jax.vmap(estimator.init, (None, 0))(theta, jax.random.split(key, count))

    def estimate(theta, key, carry):
        keys = spread(jax.random.split(key, count))
        losses, gradients, carry = jax.vmap(estimator.estimate, (None, 0, 0))(theta, keys, spread(carry))
        mean = lambda x: jnp.mean(x, axis=0)
        return mean(losses), jax.tree.map(mean, gradients), carry

    return OuterGradient(init, estimate)


def clipped(estimator: OuterGradient, max_norm: float = 1.0) -> OuterGradient:
    """Clips every estimate's gradient to a global norm, before `lanes` takes the mean over tasks.

    So that one task whose unroll has turned chaotic does not drown the others. A gradient that is not finite stays so,
    and `train` skips the step.

    Args:
      estimator: for one task.
      max_norm: of the gradient over all meta-parameters.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> steep = ap.meta.OuterGradient(lambda theta, key: (), lambda theta, key, carry: (theta, 100 * theta, carry))
      >>> _, gradient, _ = ap.meta.lanes(ap.meta.clipped(steep), 4)(jnp.float32(3.0), jax.random.key(0))
      >>> float(gradient)
      1.0
    """
    number("max_norm", max_norm, positive=True)

    def estimate(theta, key, carry):
        loss, gradient, carry = estimator.estimate(theta, key, carry)
        factor = max_norm / jnp.maximum(optax.tree.norm(gradient), max_norm)
        return loss, jax.tree.map(lambda g: factor.astype(g.dtype) * g, gradient), carry

    return OuterGradient(estimator.init, estimate)


def global_view(mesh: Mesh) -> Mesh:
    """The mesh with axes along which the compiler shards (jax.make_mesh makes explicit ones)."""
    return Mesh(mesh.devices, mesh.axis_names)


def average(estimators: Sequence[OuterGradient], weights: Sequence[float] | None = None) -> OuterGradient:
    """Several estimators' weighted mean: a family over architectures is one for each.

    Args:
      estimators: with the same theta.
      weights: relative, none below 0; equal if not given.
    """
    weights = [1.0] * len(estimators) if weights is None else list(weights)
    for weight in weights:
        number("weight", weight)
    if not estimators or len(weights) != len(estimators) or not sum(weights) > 0:
        raise ValueError(f"{len(estimators)} estimators need as many weights of positive sum, got {weights}")

    def init(theta, key):
        return tuple(e.init(theta, jax.random.fold_in(key, i)) for i, e in enumerate(estimators))

    def estimate(theta, key, carry):
        results = [e.estimate(theta, jax.random.fold_in(key, i), carry[i]) for i, e in enumerate(estimators)]
        shares = [w / sum(weights) for w in weights]
        mix = lambda *xs: functools.reduce(jnp.add, [s * x for s, x in zip(shares, xs, strict=True)])
        losses, gradients, carries = zip(*results, strict=True)
        return mix(*losses), jax.tree.map(mix, *gradients), carries

    return OuterGradient(init, estimate)
