"""Outer gradients by differentiation: through a whole unroll, through pieces of an unroll, and forward.

*Losses of segments.* `truncated`, `truncated_evolution`, `persistent_evolution` and `single_evolution` make K of T
steps for each estimate, whose loss and gradient are on average K/T of the unroll's. Adam does not notice the factor;
plain SGD, clipping, and `average` with outer gradients of whole unrolls do.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from apgrad._ground.arguments import number, whole
from apgrad._ground.messages import tuple_of
from apgrad._ground.norms import rescaled
from apgrad._programs import pure
from apgrad.meta._partition import merge, partition, require_trainable, value_and_gradient
from apgrad.meta._unroll import Problem, final, objective, run, scalar, step
from apgrad.mplp._places import strong

__all__ = ["OuterGradient", "average", "batched", "clipped", "forward_mode", "reverse_mode", "truncated"]


Estimate = tuple[jax.Array, Any, Any]
"""Loss, gradient and carry."""


class OuterGradient:
    """A way to estimate the gradient of an unroll's loss with respect to the meta-parameters.

    Args:
      init: `(theta, key) -> carry`, what goes on from one outer step to the next, such as an unroll that is half done.
        It is jitted: what it closes over, as the `init` of a `Problem` may, keeps its value of the first call.
      estimate: `(theta, key, carry) -> (loss, gradient, carry)`: a scalar, a pytree like theta, and the new carry.
    """

    def __init__(self, init: Callable[[Any, jax.Array], Any], estimate: Callable[[Any, jax.Array, Any], Estimate]):
        self._init = jax.jit(init)  # without jit a staggered start compiles its steps at each call
        self._estimate = estimate

    def init(self, theta: Any, key: jax.Array) -> Any:
        """The carry at the start.

        Args:
          theta: the meta-parameters; a TypeError if they are not floating point.
          key: PRNG key of the start.
        """
        require_trainable(theta)
        # A step removes weak types, so that the second step would be compiled again.
        return jax.tree.map(strong, self._init(theta, key))

    def estimate(self, theta: Any, key: jax.Array, carry: Any) -> Estimate:
        """Loss, gradient, with zeros for what is not trained, and new carry.

        Args:
          theta: the meta-parameters; a TypeError if they are not floating point.
          key: PRNG key of this estimate.
          carry: the carry of `init` or of the estimate before.
        """
        require_trainable(theta)
        returns = "the estimate of an outer gradient returns (loss, gradient, carry)"
        of = pure.unchanged("an outer gradient", lambda theta: self._estimate(theta, key, carry))
        loss, gradient, carry = tuple_of(3, returns, of(theta))
        (trained, fixed), (gradient, _) = partition(theta), partition(gradient)
        form = lambda tree: (jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)])
        if form(gradient) != form(trained):
            own, got = (jax.tree.map(jnp.shape, tree) for tree in (trained, gradient))
            raise TypeError(f"an outer gradient has theta's structure and shapes: theta has {own}, {got} is returned")
        zeros = jax.tree.map(jnp.zeros_like, fixed)
        return scalar("the loss of an outer gradient", loss), merge(gradient, zeros), carry

    def __call__(self, theta: Any, key: jax.Array, carry: Any = None) -> Estimate:
        """Loss, gradient and carry by `estimate`, with the carry of the call before, at first `init(theta, key)`.

        An outer gradient of whole unrolls keeps nothing from call to call, and may be called without a carry. One that
        keeps something, such as an unroll that is half done, raises a ValueError without a carry. A carry of other
        shapes, such as the carry of one task given to `batched`, is a ValueError, too.
        """
        own = jax.eval_shape(lambda: self.init(theta, key))
        if carry is None:
            if kept := jax.tree.leaves(own):
                raise ValueError(
                    f"this outer gradient keeps {len(kept)} arrays from call to call, such as an unroll that is half "
                    "done, and is called without them. Begin with carry = outer.init(theta, key), and hand to each "
                    "call what the call before returned: loss, gradient, carry = outer(theta, key, carry)."
                )
            # split, not fold_in: split(key)[i], which an estimate draws from, is fold_in(key, i)
            return self.estimate(theta, jax.random.split(key)[1], own)
        shapes = [[jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (own, carry)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the carry of this outer gradient has arrays of the shapes {shapes[0]}, got {shapes[1]}. "
                "carry = outer.init(theta, key) makes it, by the outer gradient that is called: "
                "meta.batched(outer, count) has a carry for each task, which outer.init alone does not make."
            )
        return self.estimate(theta, key, carry)


def of_loss(loss: Callable[[Any, jax.Array], jax.Array]) -> OuterGradient:
    """Reverse mode through a function of theta and a key, which keeps nothing for the next outer step."""

    def estimate(theta, key, carry):
        return *value_and_gradient(lambda theta: loss(theta, key), theta), carry

    return OuterGradient(lambda theta, key: (), estimate)


def reverse_mode(problem: Problem, *, remat: bool | int = False) -> OuterGradient:
    """Reverse mode through the whole unroll of a new task: unbiased; explodes where the recurrence is chaotic.

    Args:
      problem: the recurrence.
      remat: whether steps are computed again instead of remembered; see `run`.
    """
    return of_loss(lambda theta, key: objective(problem, theta, key, remat=remat)[0])


class Segments(NamedTuple):
    """An unroll made segment by segment: the problem's state, with its steps' keys, and the number of steps made."""

    state: Any
    t: jax.Array


def start(problem: Problem, theta: Any, key: jax.Array, segment: int, *, stagger: bool = True) -> Segments:
    """An unroll at its start or, staggered, after a random number of segments, so that tasks are out of step."""
    if problem.length < whole("the truncation K", segment) or problem.length % segment:
        raise ValueError(f"a truncation's K must divide the unroll's T, got K={segment}, T={problem.length}: change K")
    keys = jax.random.split(key)
    state, t = problem.init(theta, keys[0]), jnp.zeros((), int)
    if stagger and segment < problem.length:
        t = segment * jax.random.randint(keys[1], (), 0, problem.length // segment)
        one = lambda s, i: (optax.tree.where(i < t, step(problem, theta, s)[0], s), None)
        state, _ = jax.lax.scan(one, state, jnp.arange(problem.length - segment))
    return Segments(jax.lax.stop_gradient(state), t)


def advance(
    problem: Problem, theta: Any, carry: Segments, segment: int, *, remat: bool | int = False
) -> tuple[jax.Array, Segments]:
    """The loss of the next segment, with the final loss where the unroll ends, and the unroll after it."""
    state, losses = run(problem, theta, carry.state, segment, remat=remat)
    t = carry.t + segment
    ending = lambda: final(problem, theta, state)
    nothing = lambda: jnp.zeros_like(jax.eval_shape(ending))
    # A `cond` leaves out the derivative before the end, which may be NaN; `where` does not.
    return jnp.sum(losses) + jax.lax.cond(t >= problem.length, ending, nothing), Segments(state, t)


def renew(problem: Problem, theta: Any, key: jax.Array, carry: Segments) -> Segments:
    """A new task's unroll in place of an unroll that has ended; an unroll that has not ended goes on."""
    fresh = Segments(problem.init(theta, key), jnp.zeros((), int))
    return optax.tree.where(carry.t >= problem.length, fresh, carry)


def truncated(problem: Problem, segment: int, *, remat: bool | int = False, stagger: bool = True) -> OuterGradient:
    """Reverse mode through K of T steps, from a state that is held constant: biased towards short horizons.

    The gradient of what acts on the start of an unroll only, as the prior of a `WithPrior` does, is zero.

    Args:
      problem: the recurrence.
      segment: K, steps of a segment; it divides the length of the unroll.
      remat: whether steps are computed again instead of remembered; see `run`.
      stagger: whether tasks start out of step, so that every outer step sees all parts of an unroll.
    """

    def estimate(theta, key, carry):
        def loss(theta):
            return advance(problem, theta, jax.lax.stop_gradient(carry), segment, remat=remat)

        (value, new), gradient = value_and_gradient(loss, theta, has_aux=True)
        return value, gradient, jax.lax.stop_gradient(renew(problem, theta, key, new))

    return OuterGradient(lambda theta, key: start(problem, theta, key, segment, stagger=stagger), estimate)


def forward_mode(problem: Problem) -> OuterGradient:
    """Forward mode through the whole unroll (real-time recurrent learning; Williams & Zipser, 1989).

    It is the gradient of `reverse_mode`. Its memory does not grow with T, its cost grows with the size of theta.

    Args:
      problem: the recurrence. Its functions must have a forward mode, or a TypeError is raised: a `jax.custom_vjp`
        function such as a node has none, unless the unroll itself differentiates it, as steps of `message_passing` do.
    """

    def estimate(theta, key, carry):
        trained, fixed = partition(theta)

        def loss(trained):
            value, _ = objective(problem, merge(trained, fixed), key)
            return value, value

        # With nothing to train there is no direction, which jacfwd asks for.
        derivative = jax.jacfwd(loss, has_aux=True) if jax.tree.leaves(trained) else lambda none: (none, loss(none)[0])
        try:
            gradient, value = derivative(trained)
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            raise TypeError(
                "meta.forward_mode cannot differentiate this unroll: it calls a jax.custom_vjp function, which has a "
                "reverse mode only, outside of what the unroll itself differentiates. Nodes are such functions. Use "
                "reverse_mode, truncated or an evolution strategy, or write this function in plain JAX."
            ) from error
        # jacfwd gives the gradient the dtype of the loss.
        gradient = jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, trained)
        return value, gradient, carry

    return OuterGradient(lambda theta, key: (), estimate)


def batched(outer: OuterGradient, count: int, *, mesh: Mesh | None = None) -> OuterGradient:
    """The mean over `count` tasks, each with its own carry: the outer batch.

    Args:
      outer: the outer gradient of one task.
      count: how many tasks.
      mesh: devices over whose first axis the tasks are spread; results are those of one device, but for rounding.
    """
    count = whole("count", count)
    if mesh is not None and count % mesh.shape[mesh.axis_names[0]]:
        raise ValueError(f"{count} tasks do not divide among the {mesh.shape[mesh.axis_names[0]]} devices of the mesh")

    def spread(tree):
        if mesh is None:
            return tree
        over_tasks = NamedSharding(global_view(mesh), PartitionSpec(mesh.axis_names[0]))
        return jax.lax.with_sharding_constraint(tree, over_tasks)

    def init(theta, key):
        return jax.vmap(outer.init, (None, 0))(theta, jax.random.split(key, count))

    def estimate(theta, key, carry):
        keys = spread(jax.random.split(key, count))
        *found, carry = jax.vmap(outer.estimate, (None, 0, 0))(theta, keys, spread(carry))
        return *jax.tree.map(lambda x: jnp.mean(x, axis=0), found), carry

    return OuterGradient(init, estimate)


def clipped(outer: OuterGradient, max_norm: float = 1.0) -> OuterGradient:
    """Clips the gradient of every estimate to a global norm; within `batched`, the gradient of each task.

    So a task whose unroll is chaotic does not drown the others. A gradient that is not finite stays so.

    Args:
      outer: the outer gradient of one task.
      max_norm: the largest norm of the gradient over all meta-parameters.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> steep = ap.meta.OuterGradient(lambda theta, key: (), lambda theta, key, carry: (theta, 100 * theta, carry))
      >>> float(ap.meta.batched(ap.meta.clipped(steep), 4)(jnp.float32(3.0), jax.random.key(0))[1])
      1.0
    """
    number("max_norm", max_norm, positive=True)

    def estimate(theta, key, carry):
        loss, gradient, carry = outer.estimate(theta, key, carry)
        return loss, rescaled(partition(gradient)[0], max_norm, shorten=True), carry

    return OuterGradient(outer.init, estimate)


def global_view(mesh: Mesh) -> Mesh:
    """The mesh with axes of type `Auto`, along which the compiler shards; those of `jax.make_mesh` are explicit."""
    return Mesh(mesh.devices, mesh.axis_names)


def average(outers: Iterable[OuterGradient], weights: Sequence[float] | None = None) -> OuterGradient:
    """The weighted mean of several outer gradients, such as one for each of several architectures.

    Args:
      outers: outer gradients of the same theta.
      weights: relative weights of at least 0; equal if not given.
    """
    outers = list(outers)
    weights = [1.0] * len(outers) if weights is None else list(weights)
    for weight in weights:
        number("weight", weight)
    if not outers or len(weights) != len(outers) or not sum(weights) > 0:
        raise ValueError(f"{len(outers)} outer gradients need as many weights of positive sum, got {weights}")

    def init(theta, key):
        return tuple(outer.init(theta, jax.random.fold_in(key, i)) for i, outer in enumerate(outers))

    def estimate(theta, key, carry):
        results = [outer.estimate(theta, jax.random.fold_in(key, i), carry[i]) for i, outer in enumerate(outers)]
        shares = [w / sum(weights) for w in weights]
        mix = lambda *xs: functools.reduce(jnp.add, [s * x for s, x in zip(shares, xs, strict=True)])
        losses, gradients, carries = zip(*results, strict=True)
        trained = [partition(gradient)[0] for gradient in gradients]
        return mix(*losses), jax.tree.map(mix, *trained), carries

    return OuterGradient(init, estimate)
