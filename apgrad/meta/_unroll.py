"""Unrolls: a task and a learner become a problem, a recurrence whose losses the outer loop minimises.

    s_0 = init(theta, key),    s_t, l_t = step(theta, s_{t-1}),    L(theta) = E[sum_t l_t + final(theta, s_T)]

theta are the meta-parameters, s the inner state. For a task, with weights h (hint), v (held-out) and b (batch entropy),

    l_t = (h + b penalty_t) hint_t / T,    final = v held_out

where hint_t is the loss on minibatch t after the step (MPLP, Eq. 12), or before the step (the thesis, Algorithm 2), and
penalty_t is the batch-entropy penalty of the parameters before step t on minibatch t. T is the unroll's own length
where lengths are random. No part of the loss is held constant. (The thesis's Algorithm 2 multiplies the mean penalty
of K steps by the last loss, which it holds constant: it follows the derivative of no function.)
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from apgrad import mplp
from apgrad._ground.arguments import number, require_one_of, whole
from apgrad._ground.messages import describe, tuple_of
from apgrad.meta._partition import copied
from apgrad.meta._tasks import Learner, Task

__all__ = ["Evaluation", "Inner", "Problem", "WithPrior", "batch_entropy", "entropy_penalty", "evaluate"]
__all__ += ["inner_problem", "objective", "run"]

EntropyForm = Literal["reference", "paper"]
ENTROPY = {"reference": 1.0, "paper": 1e-5}  # what is added to the variances


class Problem(NamedTuple):
    """A recurrence with losses.

    Attributes:
      init: `(theta, key) -> state`.
      step: `(theta, state) -> (state, loss)`.
      final: `(theta, state) -> loss`, after the last step.
      length: T, number of steps of an unroll.
      perturb: for `perturbed`: `state -> part`, which gets noise, and `(state, part) -> state`, which puts it back.
    """

    init: Callable[[Any, jax.Array], Any]
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    final: Callable[[Any, Any], jax.Array]
    length: int
    perturb: tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] = (lambda s: s, lambda s, part: part)


class Inner(NamedTuple):
    """An inner problem's state: `task` is from `Task.draw`, `key` for minibatches, `t` of `horizon` steps are made."""

    params: Any
    learner: Any
    task: Any
    key: jax.Array
    t: jax.Array
    horizon: jax.Array


class WithPrior(NamedTuple):
    """Meta-parameters of a learner with the parameters that every task starts from, which are trained too (MAML)."""

    learner: Any
    prior: Any


def inner_problem(
    task: Task,
    learner: Learner,
    length: int,
    *,
    hint: float = 0.3,
    held_out: float = 0.7,
    hint_before: bool = False,
    shortest: int | None = None,
    batch_entropy: float = 0.0,
    entropy_form: EntropyForm = "reference",
    learn_prior: bool = False,
) -> Problem:
    """The problem of learning a task.

    Args:
      task: a family of tasks.
      learner: the inner learner, which is meta-trained.
      length: T, number of inner steps.
      hint: weight of the mean loss on the minibatches that were just learned from (.7 in MPLP's published code).
      held_out: weight of the held-out loss at the end.
      hint_before: whether the hint loss is taken before the step, on data that were not learned from yet.
      shortest: if given, each unroll has its own length, uniform in [shortest, length]; after it only `t` changes.
      batch_entropy: weight of the batch-entropy penalty (2 in the thesis), which multiplies each step's hint loss.
      entropy_form: "reference" (the thesis's Eq. 6) or "paper" (its Eq. 7), see `batch_entropy`.
      learn_prior: whether theta is a `WithPrior`, from whose prior the tasks start.
    """
    length = whole("length", length)
    if shortest is not None and whole("shortest", shortest) > length:
        raise ValueError(f"an unroll has 1 <= shortest <= length steps, got shortest={shortest}, length={length}")
    for name, weight in {"hint": hint, "held_out": held_out, "batch_entropy": batch_entropy}.items():
        number(name, weight)
    if not (hint or held_out or batch_entropy):
        raise ValueError("the weights hint, held_out and batch_entropy are all 0: there is nothing to minimise")
    require_one_of(ENTROPY, entropy_form=entropy_form)

    def parts(theta):
        if learn_prior and not isinstance(theta, WithPrior):
            raise TypeError(f"with learn_prior theta is a WithPrior(learner, prior), got {describe(theta)}")
        return theta if learn_prior else WithPrior(theta, None)

    def task_loss(params, batch):
        found = task.loss(params, batch)
        # A count, such as of errors, has no fractions.
        return found if jnp.issubdtype(found.dtype, jnp.inexact) else found.astype(float)

    def init(theta, key):
        meta, prior = parts(theta)
        keys = jax.random.split(key, 4)
        drawn = task.draw(keys[0])
        params = prior if learn_prior else task.prior(keys[1])
        first = task.batch(drawn, keys[2])
        horizon = jnp.asarray(length) if shortest is None else jax.random.randint(keys[3], (), shortest, length + 1)
        return Inner(params, learner.init(meta, params, first), drawn, keys[2], jnp.zeros((), int), horizon)

    def step(theta, inner):
        meta, _ = parts(theta)
        batch = task.batch(inner.task, jax.random.fold_in(inner.key, inner.t))
        own = copied(inner)
        params, state = learner.step(meta, own.params, own.learner, batch)
        seen = lambda: task_loss(inner.params if hint_before else params, batch)
        # A product with the weight 0 would be computed, and differentiated.
        seen = seen() if hint or batch_entropy else jnp.zeros_like(jax.eval_shape(seen))
        weight = jnp.asarray(hint, seen.dtype)
        if batch_entropy:
            weight += batch_entropy * entropy_penalty(task.network, inner.params, batch[0], form=entropy_form)
        loss = weight * seen / inner.horizon.astype(seen.dtype)
        return inner._replace(params=params, learner=state, t=inner.t + 1), loss

    def step_before_the_horizon(theta, inner):
        loss = lambda: task_loss(inner.params, task.batch(inner.task, inner.key))
        ended = lambda: (inner._replace(t=inner.t + 1), jnp.zeros_like(jax.eval_shape(loss)))
        # A `cond` leaves out the derivative of a step after the horizon, which may be NaN; `where` does not.
        return jax.lax.cond(inner.t < inner.horizon, lambda: step(theta, inner), ended)

    def final(theta, inner):
        if not held_out:
            return jnp.zeros((), float)
        batch = task.held_out(inner.task, jax.random.fold_in(inner.key, length))
        return held_out * task_loss(inner.params, batch)

    def put(inner, part):  # after the last step of an unroll's own length `t` still counts, without noise
        alive = inner.t <= inner.horizon
        part = part if shortest is None else jax.tree.map(lambda x, y: jnp.where(alive, x, y), part, inner.params)
        return inner._replace(params=part)

    perturb = (lambda inner: inner.params, put)
    return Problem(init, step_before_the_horizon if shortest else step, final, length, perturb)


def run(problem: Problem, theta: Any, state: Any, steps: int, *, remat: bool | int = False) -> tuple[Any, jax.Array]:
    """Steps of the recurrence, in a `scan`: the last state, and the losses (steps,).

    Args:
      problem: the recurrence.
      theta: the meta-parameters.
      state: the state before the first step.
      steps: number of steps.
      remat: what a gradient remembers; see `mplp.scan_steps`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> halve = ap.meta.Problem(lambda theta, key: jnp.ones(()), lambda theta, s: (s / 2, s), lambda theta, s: s, 4)
      >>> ap.meta.run(halve, None, jnp.ones(()), 4)[1].tolist()
      [1.0, 0.5, 0.25, 0.125]
    """
    steps = whole("steps", steps, 0)
    return mplp.scan_steps(lambda state, _: step(problem, theta, state), state, length=steps, remat=remat)


def step(problem: Problem, theta: Any, state: Any) -> tuple[Any, jax.Array]:
    made = problem.step(theta, copied(state))
    state, loss = tuple_of(2, "a problem's step returns the pair (state, loss)", made)
    return state, scalar("the loss of a step", loss)


def final(problem: Problem, theta: Any, state: Any) -> jax.Array:
    return scalar("the final loss", problem.final(theta, state))


def scalar(what: str, loss: Any) -> Any:
    if not jax.tree_util.all_leaves([loss]):  # None, or a state that was returned in its place
        raise TypeError(f"{what} is a real scalar, got {'None: return it' if loss is None else describe(loss)}")
    if jnp.shape(loss) or jnp.iscomplexobj(loss):
        raise TypeError(f"{what} is a real scalar, got {jnp.result_type(loss)}{jnp.shape(loss)}: take its mean or sum")
    return loss


def objective(
    problem: Problem, theta: Any, key: jax.Array, *, remat: bool | int = False
) -> tuple[jax.Array, tuple[jax.Array, Any]]:
    """The loss of one unroll from start to end, and a pair of the loss of each step, (steps,), and the last state.

    Args:
      problem: the recurrence.
      theta: the meta-parameters.
      key: PRNG key of the unroll.
      remat: see `run`.
    """
    state, losses = run(problem, theta, problem.init(theta, key), problem.length, remat=remat)
    return jnp.sum(losses) + final(problem, theta, state), (losses, state)


class Evaluation(NamedTuple):
    """The mean of a measure over independent tasks and its standard error, each (steps + 1, *shape of the measure)."""

    mean: jax.Array
    standard_error: jax.Array


def evaluate(
    task: Task,
    learner: Learner,
    theta: Any,
    key: jax.Array,
    steps: int,
    measure: Callable[[Any, Any], jax.Array] | None = None,
    *,
    tasks: int | None = 64,
    prior: Any = None,
) -> Any:
    """How well tasks are learned: a measure of the parameters before and after each step, over independent tasks.

    Args:
      task: a family of tasks.
      learner: an inner learner.
      theta: the meta-parameters of the learner.
      key: PRNG key of the tasks: the same key draws the same tasks for every learner.
      steps: number of inner steps.
      measure: `(params, held-out batch) -> number`; the task's loss if not given.
      tasks: how many tasks are drawn, at least 2, by `jax.random.split(key, tasks)`; None for one task, that of `key`.
      prior: the parameters to start from; the task's prior draws them if not given.

    Returns:
      `(mean, standard_error)`, each (steps + 1,); with `tasks=None` the measures of the one task, (steps + 1,).

    Example:
      >>> import jax, optax, apgrad as ap
      >>> task, key = ap.meta.sinusoid(sizes=(1, 20, 1)), jax.random.key(0)
      >>> mean, error = ap.meta.evaluate(task, ap.meta.optimizer(optax.sgd, task.loss), 0.01, key, 5, tasks=8)
      >>> mean.shape, error.shape, bool(mean[5] < mean[0])
      ((6,), (6,), True)
    """
    steps, measure = whole("steps", steps, 0), measure or task.loss
    if isinstance(theta, WithPrior):
        raise TypeError("theta is a WithPrior: give theta.learner as theta, and prior=theta.prior")
    if tasks is not None:
        whole("tasks", tasks, 2)

    def one(key):
        keys = jax.random.split(key, 4)
        drawn = task.draw(keys[0])
        params = task.prior(keys[1]) if prior is None else prior
        held_out = task.held_out(drawn, keys[3])
        judge = lambda params: jnp.asarray(measure(copied(params), held_out))
        state = learner.init(theta, params, task.batch(drawn, keys[2]))

        def step(carry, key):
            params, state = learner.step(theta, carry[0], carry[1], task.batch(drawn, key))
            return (params, state), judge(params)

        _, values = mplp.scan_steps(step, (params, state), jax.random.split(keys[2], steps))
        return jnp.concatenate([judge(params)[None], values])

    if tasks is None:
        return one(key)
    values = jax.vmap(one)(jax.random.split(key, tasks))
    return Evaluation(jnp.mean(values, axis=0), jnp.std(values, axis=0, ddof=1) / tasks**0.5)


def entropy_penalty(
    network: mplp.Sequential, params: Any, x: jax.Array, *, form: EntropyForm = "reference"
) -> jax.Array:
    """Batch-entropy penalty, mean over the layers' activations of max(0, .5 - H) (thesis, Eqs 6 to 8).

    Args:
      network: the network; its layers of the kind "activation" count.
      params: parameters of the network.
      x: inputs, (batch, ...).
      form: see `batch_entropy`.
    """
    return jnp.mean(jnp.maximum(0.0, 0.5 - batch_entropy(network, params, x, form=form)))


def batch_entropy(network: mplp.Sequential, params: Any, x: jax.Array, *, form: EntropyForm = "reference") -> jax.Array:
    """The batch entropy H of each layer's activations, (layers,) (thesis, Eqs 6 and 7).

    H is the mean over a layer's units of log(2 pi e sigma^2 + c) / 2, sigma^2 the unit's variance over the minibatch; c
    is 1 in Eq. 6 (form "reference"), and 1e-5 here for the epsilon of Eq. 7 (form "paper"). The thesis's code has c =
    1, pi e in place of 2 pi e, and the variance with ddof 1.

    Args:
      network: the network, which has at least one layer of the kind "activation".
      params: parameters of the network.
      x: inputs, (batch, ...).
      form: "reference" or "paper".

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> network, prior = ap.meta.mlp((2, 3, 1), jax.nn.relu, ap.mplp.squared_error)
      >>> ap.meta.batch_entropy(network, prior(jax.random.key(0)), jnp.ones((4, 2))).tolist()  # equal inputs: H is 0
      [0.0]
    """
    require_one_of(ENTROPY, form=form)
    entropies = []
    for layer, (_, value) in zip(network.layers, network.layer_outputs(params, x), strict=True):
        if layer.kind == "activation":
            variance = jnp.var(value, axis=0)
            entropies.append(jnp.mean(jnp.log(2 * jnp.pi * jnp.e * variance + ENTROPY[form])) / 2)
    if not entropies:
        raise ValueError("batch entropy is that of layers of the kind 'activation', and the network has none")
    return jnp.stack(entropies)
