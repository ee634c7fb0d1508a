"""The tape: how costs find the random choices that caused them.

An objective is an expectation, `J = E[sum of costs]`, over the samples that a program draws. The
likelihood-ratio derivative of J needs, at each random choice, the costs that come after it. Proppo sends
them there as messages through a graph of its own; here they are cotangents of a port on a value, the
tape, that is threaded through the program like a PRNG key.

The tape carries, for each of B independent *lanes* (repetitions of the program, its leading axis), zeros
`p`. A random choice x with log-density l adds `zero_with_gradient(l(x))` to p, and a cost c adds

    c exp(p) + b (1 - exp(p))                                                        (*)

to the lane's total; the objective is the mean of the totals over lanes. In value, (*) is c. Its derivatives
are the derivatives of `c exp(sum of the log-densities before c)`, which is the DiCE objective (Foerster et al., 2018;
with baselines, Mao et al., 2019): in expectation right to any order, and pathwise
derivatives of c come with them. The baseline b, a constant to differentiation, must not depend on the
lane's own choices, since then E[b d^k exp(p)] = 0 for every k >= 1. Leave-one-out: b_i is the mean of the
*other* lanes' c.

So the cotangent that arrives at a random choice through p is, for each lane, the cost incurred after the choice in
program order, less the baseline, over B. Likelihood ratio multiplies this cotangent by the score; total propagation
reads it. The kinds of channel (`_ledger.py`), which are made only where a node asks for them (`_channels.py`):

* `baselined`: the p of (*), seen by the leave-one-out baseline.
* `standardized`: a linear port g, to which a cost adds `stop_gradient(s) g` with s the lane's standard score, the cost
  less the mean over lanes, over their standard deviation. It is a biased gradient of the first order alone.
* `plain`: the p of a cost without b. A node with a baseline of its own, a function b of what was there before its
  choice, adds `b exp(all before) (1 - exp(z))` to the total, with z the node's own zero: again zero in
  value and of zero expectation in any derivative.
* `regression`: a linear port, to which a cost adds `stop_gradient(c) r`. Its cotangent is the raw cost-to-go G, at any
  order. A learned baseline adds `zero_with_gradient(b^2 / 2)` to the total and `-zero_with_gradient(b)` to
  r, so that its gradient is the gradient of (b - G)^2 / 2.

Each exists for the lane and, where nodes ask, for *parts*: components of a lane that are independent of
each other, (lanes, parts), so that a part's choices pay for the costs of that part only.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from apgrad._ground.primitives import refuse_batching
from apgrad._ground.propagator import backpropagation, first_order, node
from apgrad.expectations._branches import run_branches
from apgrad.expectations._data_axis import per_lane
from apgrad.expectations._lanes import cost_shape_error, fold, mean_of_others, require_lanes, standard_score
from apgrad.expectations._ledger import LEDGER, Channel, Kind, Ledger, TapePlan

_BATCHED = (
    "a tape cannot have a batch axis. In jax.vmap copies of it would draw the same numbers, and in tapes stacked by "
    "vmap or scan costs would count several times. Give the axis to the arrays, after the lanes: a distribution of "
    "batch shape (lanes, n), a cost summed over the axis; or run the copies by tape.parallel. Carry a tape through "
    "scan, and keep it out of the stacked outputs."
)
_STAMPS = itertools.count(1)  # one count for all programs, so that no tape of another one is taken for current


class Tape:
    """A value to thread through a program: it brings each cost back to the choices before it.

    `expectation` makes it and hands it to the program. `stochastic` functions, `sample`, `cost`, `parallel`
    and `next_key` take a tape and return the next one; a tape is used once, and the last one is returned.
    It is a pytree: `scan`, `while_loop`, `cond` and `checkpoint` carry it like an array.

    Attributes:
      lanes: the number of independent repetitions of the program, the leading axis of its arrays.
      data: the number of data in the minibatch, the second axis of choices and costs of a datum; None without one.
    """

    def __init__(self, plan: TapePlan, key: Any, total: Any, ports: dict[Channel, Any], carried: Any):
        self._plan, self._key, self._total, self._ports, self._carried = plan, key, total, ports, carried
        ledger = LEDGER.get()
        self._stamp = 0
        if ledger is not None and isinstance(key, jax.Array):
            ledger.stamp = self._stamp = next(_STAMPS)
            ledger.arrays = tuple(map(id, jax.tree.leaves((key, total, ports, carried))))

    def _follow(self, key: Any = None, total: Any = None, ports: Any = None, carried: Any = None) -> "Tape":
        """The next tape, with the arrays of this one where others are not given."""
        key = self._key if key is None else key
        if self._plan.dtype is None:
            data = refuse_batching(jax.random.key_data(key), _BATCHED)
            key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
        total, ports = self._total if total is None else total, self._ports if ports is None else ports
        return Tape(self._plan, key, total, ports, self._carried if carried is None else carried)

    def __repr__(self) -> str:
        return f"Tape(lanes={self.lanes})"

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return self._plan.lanes

    @property
    def data(self) -> int | None:
        """The number of data in the minibatch, as `ap.expectation` was told."""
        return self._plan.data

    def next_key(self) -> tuple["Tape", jax.Array]:
        """A fresh PRNG key, for noise that takes no part in the estimator (say, a random initial state).

        Returns:
          `(tape, key)`.

        Example:
          >>> import jax, apgrad as ap
          >>> def program(tape, theta):
          ...     tape, key = tape.next_key()
          ...     start = jax.random.normal(key, (tape.lanes,))
          ...     return tape.cost((start + theta) ** 2)
          >>> objective = ap.expectation(program, lanes=1000)
          >>> float(jax.grad(objective, argnums=1)(jax.random.key(0), 1.0)).__round__()
          2
        """
        self._require_current("next_key")
        key, fresh = jax.random.split(self._key)
        return self._follow(key), fresh

    def cost(self, cost: Any, *args: Any, shaping: Callable[..., Any] | None = None) -> "Tape":
        """Adds a cost: one value a lane, of which the objective is the mean. May be called many times.

        Args:
          cost: an array (lanes,), or (lanes, parts) where nodes were made with `parts=True`: column j is
            then the cost of part j, and must not depend on another part's choices. With `data` given to
            `ap.expectation` the parts are the data, and the mean over data is taken. Or a function of one
            lane of `args`, returning a scalar (or (parts,)).
          *args: only with a function: pytrees with the lanes as leading axis.
          shaping: only with a function: `apgrad.gaussian_shaping()`, or any function
            `(key, cost_function, *args) -> (pathwise, message)` of arrays (lanes,): the term whose value and
            pathwise derivative count, and what random choices before it are charged.

        Returns:
          The next tape.

        Raises:
          ValueError: at trace time, for shapes that are not one cost a lane.
          TypeError: at trace time, for costs that are not real numbers.

        Example:
          >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
          >>> def program(tape, theta):
          ...     d = dist.Normal(jnp.full((tape.lanes,), theta), 1.0)
          ...     tape, x = ap.sample(tape, d, ap.reparameterization())
          ...     return tape.cost(lambda x: x**2, x)
          >>> objective = ap.expectation(program, lanes=10_000)
          >>> float(objective(jax.random.key(0), 2.0)).__round__(1)
          5.0
        """
        ledger = self._require_current("cost")
        if shaping is not None:
            if not callable(cost):
                raise TypeError("shaping acts on a cost function: call tape.cost(function, x, shaping=...)")
            tape, key = self.next_key()
            require_lanes("tape.cost", self.lanes, args)
            if self._plan.folds == 1:
                pathwise, message = shaping(key, cost, *args)
            else:
                folded = jax.vmap(lambda key, args: shaping(key, cost, *args))
                both = folded(jax.random.split(key, self._plan.folds), fold(args, self._plan.folds))
                pathwise, message = jax.tree.map(lambda x: x.reshape(self.lanes, *x.shape[2:]), both)
            pathwise, message = (tape._check_cost(array, ledger, parts=False) for array in (pathwise, message))
            return tape._add(pathwise, ledger, message)
        if callable(cost):
            require_lanes("tape.cost", self.lanes, args)
            cost = jax.vmap(cost)(*args)
        elif args:
            raise TypeError("tape.cost(c) takes one array; tape.cost(function, *args) takes a function first")
        cost = self._check_cost(cost, ledger)
        return self._add(cost, ledger)

    def discount(self, factor: Any) -> "Tape":
        """Lets the credit of all choices so far fade: they are charged with later costs times a factor.

        Called once a step, before the step's choice, it charges a choice at step s with the costs at step t times
        factor^(t - s): the policy gradient with discounted costs-to-go, of less variance, and **biased** for the sum of
        the costs, unless late costs depend little on early choices. To discount the costs themselves, which biases
        nothing, multiply what you give to `cost`. Pathwise derivatives do not fade.

        A zero p of the tape becomes log(1 + factor (exp(p) - 1)), so that what costs are multiplied by, exp(p) - 1,
        fades as a whole: its expectation stays 0 in every derivative, and so does every baseline's. In the second
        derivative the product of the scores of two choices fades too from the later one on, and between the two, as in
        Loaded DiCE (Farquhar, Whiteson & Foerster, 2019).

        Args:
          factor: a number from 0 to 1, or one for each lane, (lanes,). It is a constant to differentiation. A factor
            that JAX traces, as an argument of a jitted objective, has no value yet, and its range is not checked.

        Returns:
          The next tape.

        Raises:
          ValueError: for a factor out of range; at trace time, in a branch of `parallel`; and in a program with a
            mixer, which adds pathwise derivatives that are not faded.

        Example:
          >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
          >>> flip = ap.stochastic(ap.likelihood_ratio())(lambda logit: dist.Bernoulli(logits=logit))
          >>> def program(tape, logit):
          ...     tape, x = flip(tape, logit)
          ...     return tape.discount(0.5).cost(x.astype(jnp.float32))
          >>> objective = ap.expectation(program, lanes=100_000)
          >>> float(jax.grad(objective, argnums=1)(jax.random.key(0), 0.0)).__round__(2)     # half of p (1 - p)
          0.13
        """
        ledger = self._require_current("discount")
        if ledger.branches:
            raise ValueError(
                "discount inside a branch of tape.parallel: the choices before the fork are in all branches, and their "
                "credit would fade once for each. Call it before the fork or after the join."
            )
        if jnp.shape(factor) not in ((), (self.lanes,)):
            raise ValueError(f"discount takes a scalar or ({self.lanes},), one factor a lane, got {jnp.shape(factor)}")
        known = None if isinstance(factor, jax.core.Tracer) else np.asarray(factor)
        if known is not None and not (np.isrealobj(known) and np.all((known >= 0) & (known <= 1))):
            raise ValueError(f"discount takes a factor from 0 to 1, got {factor}")
        ledger.discounting = True
        if ledger.collecting:
            return self._follow()

        def fade(channel, port):
            if channel.kind in (Kind.SUFFIX, Kind.MOMENTS):
                return port
            by_lane = jnp.broadcast_to(lax.stop_gradient(jnp.asarray(factor, port.dtype)), (self.lanes,))
            by_lane = by_lane.reshape(-1, *[1] * (port.ndim - 1))
            return by_lane * port if channel.kind == Kind.REGRESSION else jnp.log1p(by_lane * jnp.expm1(port))

        return self._follow(ports={channel: fade(channel, port) for channel, port in self._ports.items()})

    def parallel(self, *branches: Callable[["Tape"], tuple["Tape", Any]]) -> tuple["Tape", tuple[Any, ...]]:
        """Runs branches that do not depend on each other, so that one's choices do not pay for another's costs.

        Each branch starts from its own tape. Costs after the join are charged to the choices of all of them:
        a port after the join is the sum of the branches' ports, less (n - 1) times the port before the fork.

        Args:
          *branches: functions `branch(tape) -> (tape, output)`.

        Returns:
          `(tape, outputs)`, with one output a branch.

        Example:
          >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
          >>> flip = ap.stochastic(ap.likelihood_ratio())(lambda theta: dist.Bernoulli(logits=theta))
          >>> def branch(tape, theta):
          ...     tape, x = flip(tape, theta)
          ...     return tape.cost(x.astype(jnp.float32)), x
          >>> def program(tape, a, b):
          ...     tape, (x, y) = tape.parallel(lambda t: branch(t, a), lambda t: branch(t, b))
          ...     return tape.cost((x == y).astype(jnp.float32))
          >>> objective = ap.expectation(program, lanes=100)
          >>> len(jax.grad(objective, argnums=(1, 2))(jax.random.key(0), 0.0, 1.0))
          2
        """
        return run_branches(self, branches)

    def _require_current(self, what: str) -> Ledger:
        """The trace's ledger, or an error if the tape is not the current one."""
        ledger = LEDGER.get()
        if ledger is None:
            raise ValueError(
                f"{what}: a tape works only inside the program of ap.expectation, while it runs (a custom_vjp "
                "function's fwd may run later: do not give it the tape)"
            )
        if self._stamp != ledger.stamp:
            raise ValueError(
                f"{what}: this tape was already used, and what was done with it since would be lost. Every "
                "use returns the next tape: go on with that one, as with a PRNG key. Into scan, while_loop "
                "and cond pass the tape as carry or operand, do not close over it; for branches that do "
                "not depend on each other use tape.parallel. (jax.eval_shape of a function of the tape is a use. "
                "nnx.jit and the like look at their arguments again after the call: use jax.jit and plain JAX.)"
            )
        collecting = self._plan.dtype is None
        wrong = [jnp.shape(port) != channel.shape for channel, port in self._ports.items()]
        if jnp.shape(self._key) or any(wrong) or not (collecting or jnp.shape(self._total) == (self.lanes,)):
            raise ValueError(f"{what}: {_BATCHED}")
        return ledger

    def _check_cost(self, cost: Any, ledger: Ledger, parts: bool = True) -> jax.Array:
        cost = jnp.asarray(cost)
        if not any(jnp.issubdtype(cost.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise TypeError(f"a cost must be real numbers, got dtype {cost.dtype}; convert it with .astype")
        if cost.ndim not in ((1, 2) if parts else (1,)) or cost.shape[0] != self.lanes:
            raise ValueError(cost_shape_error(self.lanes, cost.shape))
        ledger.cost_shapes.add(cost.shape)
        ledger.cost_dtypes.add(cost.dtype if jnp.issubdtype(cost.dtype, jnp.floating) else jnp.dtype(jnp.float32))
        return cost if self._plan.dtype is None else cost.astype(self._plan.dtype)

    def _add(self, cost: jax.Array, ledger: Ledger, message: jax.Array | None = None) -> "Tape":
        """Adds (*); or, given another message to charge than the cost, `cost + message p`."""
        if ledger.collecting:
            return self._follow()
        p, q, r = (self._logp(kind, cost.ndim) for kind in (Kind.BASELINED, Kind.PLAIN, Kind.REGRESSION))
        kinds = {channel.kind for channel in self._ports}
        term = cost
        charged = bool(kinds - {Kind.SUFFIX, Kind.MOMENTS, Kind.STANDARDIZED})
        if message is not None and charged:
            term = term + _charge(message, p + q)
        elif charged:
            term = term * jnp.exp(p + q)
            if Kind.BASELINED in kinds:
                term = term - lax.stop_gradient(mean_of_others(cost, self._plan.folds)) * jnp.expm1(p)
        if Kind.STANDARDIZED in kinds:
            score = standard_score(lax.stop_gradient(cost if message is None else message), self._plan.folds)
            term = term + _charge_score(score, self._logp(Kind.STANDARDIZED, cost.ndim))
        if Kind.REGRESSION in kinds:
            term = term + lax.stop_gradient(cost if message is None else message) * r
        return self._follow(total=self._total + per_lane(self._plan, term))

    def _logp(self, kind: Kind, ndim: int) -> jax.Array:
        """The port that a cost of `ndim` axes sees: (lanes,) for all of the lane, or (lanes, parts)."""
        ports = {len(channel.shape): port for channel, port in self._ports.items() if channel.kind == kind}
        lane, parts = ports.get(1, jnp.zeros((self.lanes,), self._plan.dtype)), ports.get(2)
        if ndim == 1:
            return lane if parts is None else lane + parts.sum(-1)
        return lane[:, None] if parts is None else lane[:, None] + parts


# Zero in value; their derivatives charge a message in the place of a cost, once.
_linear = backpropagation(lambda message, p: lax.stop_gradient(message) * p)
_charge = node(
    first_order(
        _linear,
        "a shaped cost has no second derivative: what it charges is a linearization, and differentiating it again "
        "would be silently wrong. Use tape.cost without shaping for higher orders.",
    )
)
_charge_score = node(
    first_order(
        _linear,
        "the standardized baseline has no second derivative: what it charges is no cost, and differentiating it again "
        "would be silently wrong. Use the leave-one-out baseline for higher orders.",
    )
)


def _flatten(tape: Tape) -> tuple[Any, TapePlan]:
    """The arrays of the tape, with their names, and its static structure."""
    if LEDGER.get() is not None and tape._stamp:
        tape._require_current("a tape given to a JAX transformation").given = tape._stamp
    arrays = {"key": tape._key, "total": tape._total, "ports": tape._ports, "carried": tape._carried}
    return [(jax.tree_util.GetAttrKey(name), array) for name, array in arrays.items()], tape._plan


def _unflatten(plan: TapePlan, arrays: Any) -> Tape:
    """The tape with other arrays, as transformations make it: current if no tape was used since one was flattened."""
    ledger = LEDGER.get()
    stamp, identities = (0, ()) if ledger is None else (ledger.stamp, ledger.arrays)
    tape = Tape(plan, *arrays)
    # A compiled function called for the first time unflattens its outputs twice: both are the same tape.
    if ledger is not None and tape._stamp and identities == ledger.arrays:
        ledger.stamp = tape._stamp = stamp
    elif ledger is not None and tape._stamp and ledger.given != stamp:
        ledger.stamp, ledger.arrays, tape._stamp = stamp, identities, -1
    return tape


jax.tree_util.register_pytree_with_keys(Tape, _flatten, _unflatten)
