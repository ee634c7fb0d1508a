"""Objectives: the expectation of a program's costs, as an ordinary JAX function.

The program is traced twice: first to collect what nodes ask of the tape (`_ledger.py`), then with a tape that has it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from apgrad._ground.arguments import integers, is_single, require_parameters, whole
from apgrad._ground.keys import is_key, require_key
from apgrad._ground.messages import tuple_of
from apgrad._ground.primitives import mark, refuse_message
from apgrad._ground.warning import warn
from apgrad._programs.jaxprs import trace
from apgrad.expectations._channels import visits
from apgrad.expectations._cross_fitting import in_two_streams
from apgrad.expectations._lanes import cost_shape_error
from apgrad.expectations._ledger import LEDGER, Ledger, Mark, TapePlan, count_marks, followed, require_threaded
from apgrad.expectations._ports import SEED, Port
from apgrad.expectations._programs.jumps import marks_that_jump
from apgrad.expectations._programs.leading_axes import marks_with_outer_axis
from apgrad.expectations._programs.mixed_entries import mixes_entries
from apgrad.expectations._score import require_weighable
from apgrad.expectations._tape import Tape


def expectation(
    program: Callable[..., Any],
    lanes: int,
    *,
    data: int | None = None,
    cross_fit: bool = False,
    has_aux: bool = False,
    check_nan: bool = True,
) -> Callable[..., Any]:
    """The objective of a program: the expectation of its costs, as an ordinary JAX function.

    Args:
      program: `program(tape, *args) -> tape`, which returns the last tape; its arrays have the lanes as leading axis.
        Lanes must not act on each other (no batch normalisation over lanes): credit goes to a lane's own choices.
      lanes: how many lanes, at least 1; estimators with batch statistics need 2.
      data: the size of the minibatch, where lanes are samples of each datum. Choices (`parts=True`) and costs have data
        as second axis, (lanes, data), and the objective is their mean. With `choose`, examples are lanes instead.
      cross_fit: take every batch statistic (weights, baselines, shaping) from one half of the lanes, so that total
        propagation is unbiased. Lanes must be even, at least 4, and independent: `ap.testing.assert_independent_lanes`.
      has_aux: the program returns `(tape, aux)`, the objective `(value, aux)`. Where a node has a score, aux has no
        derivative: reverse mode raises an error that says so, and in forward mode the derivative of aux is NaN.
      check_nan: raise an error when a lane's costs are NaN, by a host callback. Turn it off to export a program.

    Returns:
      `objective(key, *args) -> scalar`, a pure function. The scalar is float32, or the costs' dtype if that is wider.

    Raises:
      ValueError: at trace time, for lanes that are not a positive integer, no costs, a tape that is not the last, or
        costs or later choices that mix the lanes (or parts) of what a score estimator drew, as a mean over lanes does.
      TypeError: at trace time, for a program that does not return its tape or a key that is none.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, theta):
      ...     tape, x = ap.sample(tape, dist.Bernoulli(probs=jnp.full(tape.lanes, theta)), ap.likelihood_ratio())
      ...     return tape.cost((x - 0.45) ** 2)
      >>> objective = ap.expectation(program, lanes=100_000)
      >>> float(jax.jit(jax.grad(objective, argnums=1))(jax.random.key(0), 0.3)).__round__(2)     # 0.55^2 - 0.45^2
      0.1
    """
    lanes = require_program(program, lanes)
    if data is not None:
        data = whole("data, the size of the minibatch,", data)
    if cross_fit and (lanes < 4 or lanes % 2):
        raise ValueError(f"cross_fit=True needs halves of at least 2 lanes: an even number, at least 4, got {lanes}")

    def objective(key, *args, **kwargs):
        key = require_key("the objective's first argument", key, ". The key comes first: (key, *args)")
        run = lambda tape: program(tape, *args, **kwargs)
        plan, ledger = make_plan(run, TapePlan(lanes, folds=1 + cross_fit, data=data), has_aux, key)

        def evaluate(key, args, kwargs):
            run = lambda tape: program(tape, *args, **kwargs)
            tape, aux = run_program(run, Ledger(first=ledger), plan, has_aux, key)
            total, aux = tape._total, _depend_on_choices(tape, aux)
            return jnp.mean(refuse_nan(total, (args, kwargs)) if check_nan else total), aux

        if cross_fit and (mixer := ledger.declared.get("weighing")):
            evaluate = in_two_streams(evaluate, mixer)
        value, aux = evaluate(key, args, kwargs)
        if charging := ledger.declared.get("scoring"):
            why = f"aux has no derivative in a program with {charging}, which differentiates costs alone"
            aux = refuse_message(aux, f"{why}. Give it to tape.cost, or wrap aux in jax.lax.stop_gradient.")
        return (value, aux) if has_aux else value

    objective.__name__ = getattr(program, "__name__", "objective")
    objective.__doc__ = f"Expected cost of {objective.__name__}, estimated with {lanes} lanes: (key, *args) -> scalar."
    return objective


def require_program(program: Any, lanes: Any) -> int:
    if not callable(program):
        raise TypeError(f"a program is a function of (tape, *args), got {type(program).__name__}")
    return whole("lanes", lanes)


def value_and_grad(
    program: Callable[..., Any], lanes: int, argnums: int | Sequence[int] = 1, **options: Any
) -> Callable[..., Any]:
    """`jax.value_and_grad` of the program's `expectation`.

    Args:
      program: as in `expectation`.
      lanes: as in `expectation`.
      argnums: which arguments of `objective(key, *args)` to differentiate: 1 is the first one after the key.
      **options: the options of `expectation`.

    Returns:
      `function(key, *args) -> (value, gradient)`; with `has_aux`, `((value, aux), gradient)`.

    In `argnums`, an argument that is not floating point is a `TypeError` at trace time, and the key is a `ValueError`.

    Example:
      >>> import jax, apgrad as ap
      >>> step = jax.jit(ap.value_and_grad(lambda tape, x: tape.cost(jax.numpy.full(tape.lanes, x**2)), lanes=4))
      >>> [float(v) for v in step(jax.random.key(0), 3.0)]
      [9.0, 6.0]
    """
    several, numbers = argument_numbers(argnums)
    objective, has_aux = expectation(program, lanes, **options), options.get("has_aux", False)
    inner = jax.value_and_grad(objective, numbers if several else numbers[0], has_aux)

    def function(key, *args, **kwargs):
        require_differentiable(argnums, args)
        return inner(key, *args, **kwargs)

    return function


def grad(
    program: Callable[..., Any], lanes: int, argnums: int | Sequence[int] = 1, **options: Any
) -> Callable[..., Any]:
    """`jax.grad` of the program's `expectation`: `(key, *args) -> gradient`, or with `has_aux` `(gradient, aux)`.

    Args:
      program: as in `expectation`.
      lanes: as in `expectation`.
      argnums: as in `value_and_grad`, which raises the same errors.
      **options: the options of `expectation`.

    Example:
      >>> import jax, apgrad as ap
      >>> gradient = jax.jit(ap.grad(lambda tape, x: tape.cost(jax.numpy.full(tape.lanes, x**2)), lanes=4))
      >>> float(gradient(jax.random.key(0), 3.0))
      6.0
    """
    both = value_and_grad(program, lanes, argnums, **options)

    def function(key, *args, **kwargs):
        value, gradient = both(key, *args, **kwargs)
        return (gradient, value[1]) if options.get("has_aux", False) else gradient

    function.__name__ = f"grad({getattr(program, '__name__', 'program')})"
    return function


def argument_numbers(argnums: int | Sequence[int]) -> tuple[bool, tuple[int, ...]]:
    numbers = integers(argnums, "argnums")
    if not numbers:
        raise ValueError("argnums is empty: name at least one argument to differentiate")
    if min(numbers) < 1:
        raise ValueError(f"argnums={argnums}: 0 is the key, and the program's first argument is argnums=1")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"argnums={argnums} names an argument twice")
    return not is_single(argnums), numbers


def require_differentiable(argnums: int | Sequence[int], args: Sequence[Any]) -> None:
    for n in argument_numbers(argnums)[1]:
        if n > len(args):
            raise ValueError(f"argnums={argnums}, but the objective got the key and {len(args)} argument(s)")
        if is_key(args[n - 1]):
            raise TypeError(f"argument {n} is a PRNG key, which has no gradient. The key comes first: (key, *args).")
        require_parameters(f"argument {n}", args[n - 1], jnp.inexact, "which has no gradient")


def lane_costs(
    program: Callable[..., Any], lanes: int, key: jax.Array, *args: Any, disturbed: tuple[int, int] | None = None
) -> jax.Array:
    """Each lane's sum of costs, (lanes,). With `disturbed`, (bit, value), lanes of that bit draw other samples."""
    key, run = require_key("the key", key), lambda tape: program(tape, *args)
    plan, ledger = make_plan(run, TapePlan(lanes), False, key, own_costs=False)
    return run_program(run, Ledger(first=ledger), plan._replace(disturbed=disturbed), False, key)[0]._total


def _depend_on_choices(tape, aux):
    """Adds zeros to aux that depend on the choices' densities, so that a derivative of aux can be refused."""
    zeros = [jnp.sum(p) for port, p in tape._ports.items() if port.arithmetic.carries_costs]
    if not zeros:
        return aux
    zero = 0 * jnp.sum(jnp.stack(zeros))
    inexact = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x + zero.astype(x.dtype) if inexact(x) else x, aux)


Run = Callable[[Tape], Any]  # a program with its arguments: a function of the tape alone


def run_program(
    run: Run, ledger: Ledger, plan: TapePlan, has_aux: bool, key: jax.Array, given: dict[Port, Any] | None = None
) -> tuple[Tape, Any]:
    """One trace of a program: its last tape, and aux. `given` are arrays for ports, which else begin with zeros."""
    token = LEDGER.set(ledger)
    try:
        total = mark(jnp.zeros(()), Mark.TOTAL, 0) if plan.dtype is None else jnp.zeros((plan.lanes,), plan.dtype)
        ports = {port: jnp.zeros(port.shape, port.dtype or plan.dtype) for port in plan.ports} | (given or {})
        if SEED in ports:
            ports[SEED] = jax.random.bits(jax.random.fold_in(key, 2**32 - 1), (), jnp.uint32)
        result = run(Tape(plan, key, total, ports))
        pair = "with has_aux=True the program must return (tape, aux)"
        tape, aux = tuple_of(2, pair, result) if has_aux else (result, None)
        if not isinstance(tape, Tape):
            instead = "`return tape.cost(c)`, or with has_aux=True `return tape.cost(c), aux`"
            raise TypeError(f"the program must return its last tape, got {type(tape).__name__}. Write {instead}.")
        tape._require_current("the program returned an earlier tape").require_as_before()
        if any(isinstance(leaf, Tape) for leaf in jax.tree.leaves(aux, is_leaf=lambda x: isinstance(x, Tape))):
            raise TypeError("aux holds a tape, which is of no use outside the program; return (tape, aux) without it")
    finally:
        LEDGER.reset(token)
    return tape, aux


def make_plan(
    run: Run, plan: TapePlan, has_aux: bool, key: jax.Array, own_costs: bool = True
) -> tuple[TapePlan, Ledger]:
    """The tape's plan, from what nodes ask for in an abstract trace, and the ledger of that trace."""
    lanes, ledger = plan.lanes, Ledger()
    first = plan._replace(token=object())
    collected, _ = trace(lambda: run_program(run, ledger, first, has_aux, key)[0]._total)
    if not ledger.cost_shapes:
        raise ValueError("the program never calls tape.cost, so there is nothing to take the expectation of")
    _require_parts(plan, ledger)
    done = ledger.declared
    acting = f"{done.get('interacting')} lets lanes act on each other"
    if "interacting" in done and "scoring" in done:
        raise ValueError(f"{acting}, and {done['scoring']} charges a lane for its own costs. Use reparameterization().")
    if "interacting" in done and plan.folds > 1:
        raise ValueError(f"{acting}, so that halves of them are not independent. Leave out cross_fit=True.")
    require_weighable(ledger)
    if "discounting" in done and "weighing" in done:
        mixed = f"{done['weighing']} mixes it with pathwise derivatives, which do not fade. Use likelihood_ratio()."
        raise ValueError(f"tape.discount fades what costs charge choices with, and {mixed}")
    require_threaded(collected)
    if own_costs and "scoring" in done:
        _require_own_costs(collected, plan, ledger)
    if "baselined" in done:
        _warn_of_mixed_data(collected, lanes)
    if own_costs and "moving" in done and marks_that_jump(collected, Mark.MOVED, (Mark.DRAWN, Mark.CHOSEN), Mark.COST):
        warn(
            f"a cost jumps as what {done['moving']} drew moves, by a comparison, floor, round, sign or an integer: a "
            "pathwise derivative misses what the jump gives, so that the gradient is biased, and 0 where there is "
            "nothing else. Use likelihood_ratio() or measure_valued(), or write the cost without jumps. If it has none "
            "there, as an interpolation, compare jax.lax.stop_gradient of what was drawn, which is not warned of."
        )
    # Sums of costs are kept in float32 or wider, whatever the costs' dtype.
    dtype = max({jnp.dtype(jnp.float32), *ledger.cost_dtypes}, key=lambda dtype: dtype.itemsize)
    if plan.sites is not None:
        passed = count_marks(collected, Mark.VISIT)
        sites = tuple(passed[number] for number in range(len(ledger.sites)))
        plan = plan._replace(sites=sites, token=object())
        counts, _, rows = visits(plan)
        ledger.ports |= {counts, rows}
    ports = tuple(sorted(ledger.ports, key=str))
    return plan._replace(dtype=dtype, ports=ports, fades="discounting" in done, weighs="weighed" in done), ledger


def _require_parts(plan, ledger):
    lanes, data = plan.lanes, plan.data
    if len(ledger.parts) > 1:
        raise ValueError(f"nodes with different numbers of parts in one program: {ledger.parts}")
    for size, what in ledger.parts.items():
        if data not in (None, size):
            raise ValueError(f"{what} has {size} parts, and data={data} is given: use {size}, or a part for each datum")
    size, axis = (next(iter(ledger.parts), None), "parts") if data is None else (data, "data")
    by_part = [shape for shape in ledger.cost_shapes if len(shape) == 2]
    for shape in by_part:
        if size is None:
            raise ValueError(cost_shape_error(lanes, shape))
        if size != shape[1]:
            raise ValueError(f"a cost of shape {shape}, expected ({lanes}, {size}): the lanes and the {axis}")
    if not by_part and (charged := ledger.declared.get("scoring parts")):
        raise ValueError(
            f"{charged} was made with parts=True, and no cost has shape (lanes, parts): the costs were summed or "
            f"averaged to ({lanes},) before, so that every part would pay for all of them. Give costs of shape "
            f"({lanes}, {size}), one value for each lane and a {'part' if data is None else 'datum'}, or parts=False."
        )


def _require_own_costs(program, plan, ledger):
    """Raises a `ValueError` where a choice acts on the costs, or on later choices, of all lanes, or of all parts."""
    scoring, parts = ledger.declared["scoring"], ("a part", "parts") if plan.data is None else ("a datum", "data")
    sizes = plan.lanes, max(ledger.parts, default=1)
    for axis, (one, they) in enumerate([("a lane", "lanes"), parts]):
        if sizes[axis] > 1 and mixes_entries(program, Mark.DRAWN, (Mark.SCORE, Mark.COST), axis):
            raise ValueError(
                f"a cost, or the log-density of a later choice, mixes what was drawn for the {sizes[axis]} {they}, by "
                "a sum, a mean or a maximum over their axis, by drawing, sorting or moving them, or by broadcasting "
                f"along another axis; and {scoring} charges the choices of {one} with its own costs alone: the "
                f"gradient would be wrong. Sum over another axis than that of the {they}, and leave the mean over "
                f"{they} to ap.expectation. Where a statistic is meant as a constant, as a normalisation may be, give "
                "jax.lax.stop_gradient of it, in floating point, since JAX passes integers by. What is drawn again is "
                "no constant, by whatever weights."
            )


def _warn_of_mixed_data(program, lanes):
    """Warns where lanes are the rows of an array that was given: other lanes are then samples of other data.

    With a minibatch of B data, and K samples for each, lanes are the samples and data the parts of a lane: the
    leave-one-out baseline is the mean over the other samples *of the same datum*. With a lane for each datum and sample
    the variance is several times as large.
    """
    mixed = marks_with_outer_axis(program, Mark.LEAVES_ONE_OUT, lanes)
    charged = followed(program, Mark.LEAVES_ONE_OUT, Mark.COST) if mixed else set()
    if not (found := [label for label in mixed if label in charged]):
        return
    name, of_choose = found[0]
    advice = (
        "Let lanes be samples of one datum, and data a second axis: ap.expectation(program, lanes=samples, "
        "data=batch), a distribution of batch shape (samples, batch), parts=True, costs of shape (samples, batch). "
        "Or give the node a baseline of its own: baseline=ap.learned_baseline(...), a function, or None."
    )
    if of_choose:
        advice = (
            "These are costs after the choice: put those that do not depend on it before it. Let its continuation "
            "return what it costs on average, later choices summed over; or draw the choices by "
            "ap.sample(..., parts=True), with lanes=samples and data=batch."
        )
    warn(
        f"{name}: the leave-one-out baseline is the mean over other lanes, and here lanes differ by more than their "
        f"samples: the program was given an array with a row for each of the {lanes} lanes. The gradient is right, but "
        "its variance can be several times what it need be: the baseline averages over other data. " + advice
    )


def refuse_nan(total: jax.Array, given: Any) -> jax.Array:
    """The same totals; if one is NaN, the host raises an error, which says whether all of `given` was finite."""
    arrays = [x for x in jax.tree.leaves(given) if isinstance(x, float | np.ndarray | jax.Array)]
    given = [lax.stop_gradient(x) for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    # A product, so that derivatives of every order have the flag too, and cannot be had without the check.
    return total * (1 + _nan_flag(jnp.isnan(total).any(), given).astype(total.dtype))


@jax.custom_batching.custom_vmap
@jax.jit  # one function for all calls: a new callback or branch would be compiled, and kept by JAX, at each call
def _nan_flag(bad: jax.Array, given: list[jax.Array]) -> jax.Array:
    """0, or an error raised on the host: what depends on the flag cannot be computed without the check."""

    def fail(given):
        finite = jnp.array([jnp.isfinite(x).all() for x in given] or [True]).all()
        return jax.pure_callback(_fail, jax.ShapeDtypeStruct((), jnp.float32), finite)

    return lax.cond(bad, fail, lambda _: jnp.zeros((), jnp.float32), given)


def _fail(finite: Any) -> Any:
    if not finite:
        raise FloatingPointError(
            "a lane's cost is NaN, and an argument of the program is NaN or infinite: data, or a parameter that had no "
            "finite gradient (see ap.clip_lanes, optax.apply_if_finite). Or infinity is meant, as the last level "
            "of ap.multilevel; then look at what feeds the costs. check_nan=False turns this check off."
        )
    raise FloatingPointError(
        "a lane's cost is NaN (or infinite, so that its baseline is; or a sample was rounded to where its density is "
        "0 or infinite, to an end of its support, or more coarsely than its scale, which float64 makes rarer; or "
        "ap.score got a value that its distribution cannot draw, or a behaviour_log_prob that is no log-probability). "
        "All arguments of the program are finite. Look at what feeds the costs (jax.debug.print, or "
        "jax.config.update('jax_debug_nans', True)), and mask failed lanes. check_nan=False turns this check off."
    )


@_nan_flag.def_vmap
def _(axis_size, in_batched, bad, given):
    return _nan_flag(bad.any(), given), False
