"""Total propagation in training: weights from what nodes saw in the calls before (`mixing/_moments.py`).

*Unbiased given the past.* Given state and parameters the weights are constants, and a mixture with constant weights
that sum to 1 has the right expectation if each estimator has it (where a simulator jumps, reparameterization has not),
and if the call's key is independent of all the keys that went into state and parameters.

*By state.* With `by_state=True` each part of the state space has weights of its own (`mixing/_moments.py`). A node sees
its own variance, and not what cancels between nodes. Hence a *guard*: messages go back twice, with these weights and by
reparameterization alone, and the call returns the gradient that varied less in earlier calls, by |g(k) - g(k-1)|^2, on
average twice the variance. A full window's mean leaves out the largest one, as an explosion makes two.

*What is slow.* After an explosion the likelihood ratio keeps its weight for one or two windows; else there is no delay.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import whole
from apgrad._ground.keys import require_key
from apgrad._ground.norms import scaled_norm
from apgrad._programs.jaxprs import place
from apgrad.expectations import _expectation as objectives
from apgrad.expectations._channels import ROW, visits
from apgrad.expectations._cross_fitting import PASS
from apgrad.expectations._ledger import Ledger, TapePlan, differs
from apgrad.expectations.mixing import _moments as moments

SHORTER = 10  # how many times shorter the short window is
NONE = float(np.finfo(np.float32).max)  # stands for an unknown change; `jax_debug_nans` would stop at a NaN


class AdaptiveState(NamedTuple):
    """What earlier calls left: a pytree of arrays, to be carried through training and kept in checkpoints.

    Attributes:
      moments: for each window the means of the previous block of calls and this one, (2, 2, visits, cells, 5), float32.
      count: how many calls there were, an int32 scalar.
      last: with `by_state` (else None) the last gradients by reparameterization and by the weights, arrays (2, ...).
      changes: likewise log |g(k) - g(k-1)|^2 of both, float32 (window, 2); the largest float32 where none is known.
    """

    moments: jax.Array
    count: jax.Array
    last: Any = None
    changes: Any = None

    @property
    def guarded(self) -> jax.Array:
        """With `by_state`, whether the next call takes reparameterization alone, a Boolean scalar."""
        if self.changes is None:
            raise ValueError("only an ap.adaptive(..., by_state=True) has a guard, and this state is without by_state")
        known = self.changes[:, :1] != NONE
        calls, ordered = jnp.sum(known), jnp.sort(jnp.where(known, self.changes, jnp.inf), axis=0)
        left = jnp.arange(len(self.changes)) < calls - calls // len(self.changes)
        sizes = jax.nn.logsumexp(jnp.where(left[:, None], ordered, -jnp.inf), axis=0)
        # A gradient that was not finite may be so again, and would spoil all that comes after.
        return (sizes[0] < sizes[1]) & ~jnp.any(jnp.isposinf(self.changes[:, 0]))


class Adaptive(NamedTuple):
    """A pair of pure functions, which work under `jit`, `scan` and `vmap`.

    Attributes:
      init: `(key, *args) -> state`. It makes one gradient, for its moments alone. Call it under `jax.jit`.
      value_and_grad: `(key, state, *args) -> (value, gradient, state)`; with `has_aux`, the value is `(value, aux)`.
        Each call needs a key of its own, independent of all keys that went into state and arguments.
    """

    init: Callable[..., Any]
    value_and_grad: Callable[..., tuple[Any, Any, Any]]


def adaptive(
    program: Callable[..., Any],
    lanes: int,
    argnums: int | Sequence[int] = 1,
    *,
    window: int = 200,
    by_state: bool = False,
    has_aux: bool = False,
    check_nan: bool = True,
) -> Adaptive:
    """Gradients for training, whose mixers are weighed by what they saw in earlier calls.

    Args:
      program: as in `expectation`. Its mixers have two estimators and the default weights, as `total_propagation()`.
      lanes: as in `expectation`, at least 2.
      argnums: which arguments to differentiate: 1 is the program's first one, as in `value_and_grad`.
      window: how many calls are always remembered; no call is remembered for more than twice as many.
      by_state: give each part of a node's state space its own weights, for gradients that explode in one part, and take
        reparameterization alone while that varies less. It takes two reverse passes, and the state two gradients.
      has_aux: as in `expectation`.
      check_nan: as in `expectation`.

    Raises:
      ValueError: for a window that is not a positive integer; at trace time, for a program without mixers, mixers with
        other than two estimators or with a weight for each coordinate, and a state of other shapes.
      TypeError: at trace time, as `value_and_grad`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> step = ap.stochastic(ap.total_propagation())(lambda theta, x: dist.Normal(x + theta, 0.1))
      >>> def program(tape, theta):
      ...     tape, x = step(tape, theta, jnp.zeros(tape.lanes))
      ...     return tape.cost((x - 1) ** 2)
      >>> objective = ap.adaptive(program, lanes=100)
      >>> state = jax.jit(objective.init)(jax.random.key(0), 0.0)
      >>> value, gradient, state = jax.jit(objective.value_and_grad)(jax.random.key(1), state, 0.0)
      >>> state.moments.shape
      (2, 2, 1, 1, 5)
    """
    cells = moments.CELLS if by_state else 1
    window = whole("window, a number of calls,", window)
    lanes, lengths = objectives.require_program(program, lanes), np.array([max(1, window // SHORTER), window], np.int32)
    several, numbers = objectives.argument_numbers(argnums)

    def differentiate(key, state, args, kwargs):
        key = require_key("the first argument", key)
        objectives.require_differentiable(argnums, args)

        def run(*args):
            return lambda tape: program(tape, *args, **kwargs)

        plan, counted = objectives.make_plan(run(*args), TapePlan(lanes, sites=(), cells=cells), has_aux, key)
        slots = sum(plan.sites or ())
        if not slots:
            trouble = f"{counted.sites[0]} is never visited" if counted.sites else "no node of the program has a mixer"
            raise ValueError(f"{trouble}: ap.adaptive weighs mixers, as ap.total_propagation(). Use ap.value_and_grad")
        if state is not None:
            require_state(np.zeros((2, 2, slots, cells, ROW)), state.moments)
        _, weights, sent = visits(plan)

        def once(given):
            def objective(chosen, rows):
                inputs, ledger = place(chosen, [n - 1 for n in numbers], args), Ledger(first=counted)
                tape, aux = objectives.run_program(run(*inputs), ledger, plan, has_aux, key, {**given, sent: rows})
                if ledger.sites != counted.sites:
                    raise differs(f"the mixers were {counted.sites}, then {ledger.sites}")
                total = tape._total
                return jnp.mean(objectives.refuse_nan(total, (inputs, kwargs)) if check_nan else total), aux

            chosen, zeros = [args[n - 1] for n in numbers], jnp.zeros(sent.shape, plan.dtype)
            value, pullback, aux = jax.vjp(objective, chosen, zeros, has_aux=True)
            answer = lambda _: pullback(jnp.ones_like(value))
            if not (given and by_state):
                return value, aux, answer(0)
            # Of both passes the rows are the same: a node looks at the messages that are weighed.
            gradients, rows = jax.vmap(answer, axis_name=PASS, axis_size=2)(jnp.arange(2))
            return value, aux, (gradients, rows[1])

        if state is None:
            value, aux, (gradients, rows) = once({})
        else:
            short, long = jax.vmap(moments.weights)(*_means(state, lengths, lanes))
            value, aux, (gradients, rows) = once({weights: moments.cautious(short, long)})
        return (value, aux) if has_aux else value, gradients, rows.astype(jnp.float32)

    def init(key, *args, **kwargs):
        _, gradients, rows = differentiate(key, None, args, kwargs)
        found = jnp.broadcast_to(jnp.stack([jnp.zeros_like(rows), rows]), (2, 2, *rows.shape))
        if not by_state:
            return AdaptiveState(found, jnp.int32(1))
        last = jax.tree.map(lambda g: jnp.stack([g, g]), gradients)
        return AdaptiveState(found, jnp.int32(1), last, jnp.full((window, 2), NONE, jnp.float32))

    def value_and_grad(key, state, *args, **kwargs):
        if not isinstance(state, AdaptiveState):
            raise TypeError(f"value_and_grad takes (key, state, *args), and the state is from init; got {type(state)}")
        value, gradients, rows = differentiate(key, state, args, kwargs)
        remembered = jax.vmap(moments.remember, (0, None, 0))(state.moments, rows, state.count % lengths)
        after = AdaptiveState(remembered, state.count + 1)
        if by_state:
            require_state((gradients, jnp.zeros((window, 2))), (state.last, state.changes))
            change = jax.vmap(_log_square)(jax.tree.map(jnp.subtract, gradients, state.last))
            # The first difference does not count: the gradient of init was made with other weights.
            changes = state.changes.at[(state.count - 1) % window].set(jnp.where(state.count > 1, change, NONE))
            after = after._replace(last=gradients, changes=changes)
            gradients = jax.tree.map(lambda g: jnp.where(state.guarded, *g), gradients)
        return value, tuple(gradients) if several else gradients[0], after

    return Adaptive(init, value_and_grad)


def _means(state, lengths, lanes):
    """The mean of the rows in each window, (2, visits, cells, 5), and how many lanes it is of, (2,)."""
    current = (state.count - 1) % lengths + 1
    shares = (current / (lengths + current)).astype(jnp.float32)
    means = jax.vmap(moments.average)(state.moments[:, 0], state.moments[:, 1], shares)
    return means, lanes * jnp.minimum(state.count, lengths + current)


def require_state(own: Any, given: Any) -> None:
    form = lambda tree: (jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)])
    if form(own) != form(given):
        found, needed = (jax.tree.map(jnp.shape, tree) for tree in (given, own))
        shapes = f"it has shapes {found}, and these need {needed}. Make it with init for these arguments."
        raise ValueError(f"the state is that of other arguments or another window: {shapes}")


def _log_square(tree):
    """The logarithm of the square of a gradient, float32; infinite where it is not finite."""
    size, norm = scaled_norm(tree)
    return jnp.where(jnp.isfinite(norm), 2 * (jnp.log(size) + jnp.log(norm)), jnp.inf).astype(jnp.float32)
