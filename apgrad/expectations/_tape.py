"""The tape: how costs find the random choices that caused them.

An objective is an expectation, `J = E[sum of costs]`, over the samples that a program draws. The
likelihood-ratio derivative of J needs, at each random choice, the costs that come after it. Proppo sends
them there as messages through a graph of its own; here they are cotangents of a port on a value, the
tape, that is threaded through the program like a PRNG key.

The tape carries, for each of B independent *lanes* (repetitions of the program, its leading axis), zeros
`p`. A random choice x with log-density l adds `zero_with_gradient(l(x))` to p, and a cost c adds

    c exp(p) + b (1 - exp(p))                                                        (*)

to the lane's total; the objective is the mean of the totals over lanes. In value, (*) is c. Its derivatives
are those of `c exp(sum of the log-densities before c)`, which is the DiCE objective (Foerster et al., 2018;
with baselines, Mao et al., 2019): in expectation right to any order, and pathwise
derivatives of c come with them. The baseline b, a constant to differentiation, must not depend on the
lane's own choices, since then E[b d^k exp(p)] = 0 for every k >= 1. Leave-one-out: b_i is the mean of the
*other* lanes' c.

So the cotangent that arrives at a random choice through p is, for each lane, the cost incurred after it in
program order, less the baseline, over B. Likelihood ratio multiplies it by the score; total propagation
reads it. Kinds of port, made only where a node asks for them:

* `baselined`: the p of (*), seen by the leave-one-out baseline.
* `plain`: the same without b. A node with a baseline of its own, a function b of what was there before its
  choice, adds `b exp(all before) (1 - exp(z))` to the total, with z the node's own zero: again zero in
  value and of zero expectation in any derivative.
* `regression`: linear, a cost adds `stop_gradient(c) r`. Its cotangent is the raw cost-to-go G, at any
  order. A learned baseline adds `zero_with_gradient(b^2 / 2)` to the total and `-zero_with_gradient(b)` to
  r, so that its gradient is that of (b - G)^2 / 2.

Each exists for the lane and, where nodes ask, for *parts*: components of a lane that are independent of
each other, (lanes, parts), so that a part's choices pay for the costs of that part only.
"""

import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.primitives import refuse_batching, zero_with_gradient
from apgrad._ground.propagator import backpropagation, first_order, node
from apgrad.expectations._branches import run_branches
from apgrad.expectations._lanes import cost_shape_error, donors, fold, require_lanes
from apgrad.expectations._ledger import LEDGER, Ledger, Plan

Kind = Literal["baselined", "plain", "regression"]


_BATCHED = (
    "a tape cannot have a batch axis. In jax.vmap copies of it would draw the same numbers, and in tapes stacked by "
    "vmap or scan costs would count several times. Give the axis to the arrays, after the lanes: a distribution of "
    "batch shape (lanes, n), a cost summed over the axis; or run the copies by tape.parallel. Carry a tape through "
    "scan, and keep it out of the stacked outputs."
)
_STAMPS = itertools.count(1)  # one count for all programs, so that no tape of another one is taken for current


@jax.tree_util.register_pytree_with_keys_class
class Tape:
    """A value to thread through a program: it brings each cost back to the choices before it.

    `expectation` makes it and hands it to the program. `stochastic` functions, `sample`, `cost`, `parallel`
    and `next_key` take a tape and return the next one; a tape is used once, and the last one is returned.
    It is a pytree: `scan`, `while_loop`, `cond` and `checkpoint` carry it like an array.

    Attributes:
      lanes: the number of independent repetitions of the program, the leading axis of its arrays.
    """

    def __init__(self, plan: Plan, key: Any, total: Any, ports: dict[str, Any]):
        self._plan, self._key, self._total, self._ports = plan, key, total, ports
        ledger = LEDGER.get()
        self._stamp = 0
        if ledger is not None and isinstance(key, jax.Array):
            ledger.stamp = self._stamp = next(_STAMPS)
            ledger.arrays = tuple(map(id, jax.tree.leaves((key, total, ports))))

    def tree_flatten_with_keys(self):
        """For JAX: the arrays of the tape, and its static structure."""
        if LEDGER.get() is not None and self._stamp:
            self.require_current("a tape given to a JAX transformation")
        names = ("key", "total", "ports")
        values = (self._key, self._total, self._ports)
        return [(jax.tree_util.GetAttrKey(n), v) for n, v in zip(names, values, strict=True)], self._plan

    @classmethod
    def tree_unflatten(cls, plan, children):
        """For JAX: the tape with other arrays."""
        ledger = LEDGER.get()
        stamp, arrays = (0, ()) if ledger is None else (ledger.stamp, ledger.arrays)
        tape = cls(plan, *children)
        # A compiled function called for the first time unflattens its outputs twice: both are the same tape.
        if ledger is not None and tape._stamp and arrays == ledger.arrays:
            ledger.stamp = tape._stamp = stamp
        return tape

    def follow(self, key: Any = None, total: Any = None, ports: Any = None) -> "Tape":
        """For authors of nodes: the next tape, with the arrays of this one where others are not given."""
        key = self._key if key is None else key
        if self._plan.dtype is None:
            data = refuse_batching(jax.random.key_data(key), _BATCHED)
            key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
        total, ports = self._total if total is None else total, self._ports if ports is None else ports
        return Tape(self._plan, key, total, ports)

    def __repr__(self) -> str:
        return f"Tape(lanes={self.lanes})"

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return self._plan.lanes

    @property
    def keeps(self) -> bool:
        """For authors of nodes: weights are given to the objective, see `ap.expectation(..., keep_weights=True)`."""
        return self._plan.keeps

    @property
    def folds(self) -> int:
        """For authors of nodes: the lanes come in this many equal groups, and a batch statistic is of one group."""
        return self._plan.folds

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
        self.require_current("next_key")
        key, fresh = jax.random.split(self._key)
        return self.follow(key), fresh

    def cost(self, cost: Any, *args: Any, shaping: Callable[..., Any] | None = None) -> "Tape":
        """Adds a cost: one value a lane, of which the objective is the mean. May be called many times.

        Args:
          cost: an array (lanes,), or (lanes, parts) where nodes were made with `parts=True`: column j is
            then the cost of part j, and must not depend on another part's choices. Or a function of one
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
        ledger = self.require_current("cost")
        if shaping is not None:
            if not callable(cost):
                raise TypeError("shaping acts on a cost function: call tape.cost(function, x, shaping=...)")
            tape, key = self.next_key()
            require_lanes("tape.cost", self.lanes, args)
            if self.folds == 1:
                pathwise, message = shaping(key, cost, *args)
            else:
                folded = jax.vmap(lambda key, args: shaping(key, cost, *args))
                both = folded(jax.random.split(key, self.folds), fold(args, self.folds))
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

    def parallel(self, *branches: Callable[["Tape"], tuple["Tape", Any]]) -> tuple["Tape", tuple[Any, ...]]:
        """Runs branches that do not depend on each other, so that one's choices do not pay for another's costs.

        Each branch starts from its own tape. Costs after the join are charged to the choices of all of them:
        the joined port is the sum of the branches' less (n - 1) times the fork's.

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

    def credit(
        self,
        zero: jax.Array,
        *,
        name: str,
        baseline: jax.Array | Literal["leave_one_out"] | None,
        learn: bool = False,
        parts: bool = False,
    ) -> "Tape":
        """For authors of estimators: charges later costs to a random choice.

        Args:
          zero: the choice's log-density, of shape (lanes, ...). Only its derivative counts: the cotangent it gets
            back is the cost-to-go, less the baseline. Where its value is not finite, the lane's total is NaN.
          name: the estimator, for errors.
          baseline: `"leave_one_out"`, None, or an array: (lanes,), or (lanes, parts) with `parts`. An array
            must be a function of what was there before the choice.
          learn: train the array towards the cost-to-go, by the gradient of (b - G)^2 / 2.
          parts: the second axis of `zero` numbers parts of a lane that are independent of each other.

        Returns:
          The next tape.
        """
        ledger = self.require_current(name)
        ledger.scoring = name
        if zero.ndim < 1 + parts or zero.shape[0] != self.lanes:
            raise ValueError(
                f"{name}: the log-density has shape {zero.shape}, expected the lanes first, "
                f"({self.lanes},{' parts,' if parts else ''} ...)"
            )
        shape = zero.shape[: 1 + parts]
        zero = zero.reshape(*shape, -1).sum(-1)
        leave_one_out = isinstance(baseline, str)
        own = None if isinstance(baseline, str) else baseline
        if leave_one_out and self.lanes < 2:
            raise ValueError(
                f"{name}: the leave-one-out baseline is the mean over the other lanes and needs at least 2, "
                f"got lanes={self.lanes}. Use more lanes, or {name}(baseline=None)."
            )
        kind: Kind = "baselined" if leave_one_out else "plain"
        if own is not None and jnp.shape(own) != shape:
            raise ValueError(f"{name}: the baseline has shape {jnp.shape(own)}, expected {shape}")
        if ledger.collecting:
            ledger.ports[_port_name(kind, parts)] = shape
            if learn:
                ledger.ports[_port_name("regression", parts)] = shape
            return self.follow()

        ports = dict(self._ports)
        finite = jnp.isfinite(lax.stop_gradient(zero)).reshape(self.lanes, -1).all(-1)
        total = self._total + jnp.where(finite, 0, jnp.nan).astype(self._plan.dtype)
        zero = zero_with_gradient(zero).astype(self._plan.dtype)
        if own is not None:
            b = jnp.asarray(own, self._plan.dtype)
            before = self._logp("baselined", len(shape)) + self._logp("plain", len(shape))
            correction = -lax.stop_gradient(b) * jnp.exp(before) * jnp.expm1(zero)
            total = total + correction.reshape(self.lanes, -1).sum(-1)
            if learn:
                total = total + zero_with_gradient(b**2 / 2).reshape(self.lanes, -1).sum(-1)
                regression = _port_name("regression", parts)
                ports[regression] = ports[regression] - zero_with_gradient(b)
        ports[_port_name(kind, parts)] = ports[_port_name(kind, parts)] + zero
        return self.follow(total=total, ports=ports)

    def request_port(self, name: str, shape: tuple[int, ...]) -> jax.Array | None:
        """For authors of mixers: a port of the tape's own, through which a node sends to those before it.

        Costs take no notice of it. A node takes the port as an input and returns it as an output for `put_port`: its
        `backward` then finds there what later nodes sent, and answers with what earlier ones shall find.

        Args:
          name: the same name is the same port. One that starts with `state:` goes around `parallel` branches,
            whose own begin at zero, and one with `count:` through them in turn; others add up what the branches send.
          shape: of the messages, of the costs' dtype.

        Returns:
          Zeros, or None where the program is traced for the first time and has no ports yet.
        """
        ledger = self.require_current(name)
        if ledger.collecting:
            if ledger.ports.setdefault(name, shape) != shape:
                raise ValueError(f"port {name!r} was requested with shapes {ledger.ports[name]} and {shape}")
            return None
        return self._ports[name]

    def request_table(self, name: str, width: int) -> dict[str, jax.Array]:
        """For authors of mixers: the weights that the objective was given for this node, and how many came before.

        Args:
          name: of the function.
          width: how many weights a node has.

        Returns:
          Nothing unless weights are kept and ports are there; else the ports `table`, (nodes, width), and `count`.
        """
        ledger = self.require_current(name)
        if self._plan.keeps and ledger.tables.setdefault(name, width) != width:
            raise ValueError(f"{name} is called with {width} weights here and {ledger.tables[name]} there")
        if not self._plan.keeps or ledger.collecting:
            return {}
        return {kind: self._ports[f"{kind}:{name}"] for kind in ("table", "count")}

    def put_port(self, name: str, port: jax.Array | None) -> "Tape":
        """For authors of mixers: the next tape, with the port as the node returned it."""
        self.require_current(name)
        ports = self._ports if port is None else {**self._ports, name: port}
        return self.follow(ports=ports)

    def declare_parts(self, shape: tuple[int, ...], name: str) -> None:
        """For authors of nodes: says that the second axis of this shape numbers independent parts."""
        if len(shape) < 2:
            raise ValueError(f"{name}: with parts=True the sample's shape is (lanes, parts, ...), got {shape}")
        self.require_current(name).parts.setdefault(shape[1], name)

    def drawn(self, x: jax.Array) -> jax.Array:
        """For authors of nodes: the samples (lanes, ...) as drawn; where lanes are tested for independence, others."""
        self.require_current("drawn")
        return x if self._plan.disturbed is None else x[donors(self.lanes, *self._plan.disturbed)]

    def mix_lanes(self, name: str) -> "Tape":
        """For authors of nodes that let lanes act on each other: likelihood-ratio credit is then refused."""
        self.require_current(name).mixing = name
        return self.follow()

    def require_current(self, what: str) -> Ledger:
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
                "not depend on each other use tape.parallel. (jax.eval_shape of a function of the tape is a use.)"
            )
        shapes = {} if self._plan.dtype is None else {"total": (self.lanes,), **dict(self._plan.ports)}
        arrays = {"total": self._total, **self._ports}
        if jnp.shape(self._key) or any(jnp.shape(arrays[name]) != shape for name, shape in shapes.items()):
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
            return self.follow()
        p, q, r = (self._logp(kind, cost.ndim) for kind in ("baselined", "plain", "regression"))
        kinds = {name.removesuffix("_parts") for name in self._ports if ":" not in name}
        term = cost
        if message is not None and kinds:
            term = term + _charge(message, p + q)
        elif kinds:
            term = term * jnp.exp(p + q)
            if "baselined" in kinds:
                each = fold(cost, self.folds)
                others = (jnp.sum(each, axis=1, keepdims=True) - each) / (each.shape[1] - 1)
                term = term - lax.stop_gradient(others).reshape(cost.shape) * jnp.expm1(p)
        if "regression" in kinds:
            term = term + lax.stop_gradient(cost if message is None else message) * r
        return self.follow(total=self._total + term.reshape(self.lanes, -1).sum(-1))

    def _logp(self, kind: Kind, ndim: int) -> jax.Array:
        """The port that a cost of `ndim` axes sees: (lanes,) for all of the lane, or (lanes, parts)."""
        lane = self._ports.get(_port_name(kind, False), jnp.zeros((self.lanes,), self._plan.dtype))
        parts = self._ports.get(_port_name(kind, True))
        if ndim == 1:
            return lane if parts is None else lane + parts.sum(-1)
        return lane[:, None] if parts is None else lane[:, None] + parts


# Zero in value; its derivative charges a message in the place of a cost, which is right once.
_charge = node(
    first_order(
        backpropagation(lambda message, p: lax.stop_gradient(message) * p),
        "a shaped cost has no second derivative: what it charges is a linearization, and differentiating it again "
        "would be silently wrong. Use tape.cost without shaping for higher orders.",
    )
)


def _port_name(kind: Kind, parts: bool) -> str:
    return f"{kind}_parts" if parts else kind
