"""`ap.memory.plan`: what a gradient keeps, computes again or packs, under a budget of compiled memory.

Of the choices of `apgrad.memory._recompute` whose predicted bytes fit, the one with the least work is compiled. The
bytes that it needs beyond its prediction are added to all predictions, so that a few compilations find the best choice.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from apgrad._ground.arguments import chosen_numbers, number
from apgrad._ground.primitives import refuse_message
from apgrad.memory._budget import added_variance, allocate
from apgrad.memory._randomize import StretchWalk, listed, recorded, walked
from apgrad.memory._recompute import choices
from apgrad.memory._report import compiled_note, pair_of, temp_bytes

_TRIES = 6  # compilations of each method
_HOPE = 0.8  # a budget below this share of the gradient that should be the smallest is given up
_CLOSE = 0.03  # the share of the budget that may be left unused
_AUXILIARY = "what a plan with has_aux=True returns beside the loss has no derivative: add it to the loss to have one"


class Trial(NamedTuple):
    """A gradient that was compiled."""

    method: str  # "keep", "recompute" or "pack"
    peak_bytes: int  # its scratch memory by the compiler's account
    work: float  # the operations that are done again, over those of the forward pass
    variance: float  # what rounding adds to coefficients, over their square, on average
    function: Callable[..., Any]  # `(key, *args)`


class Plan(NamedTuple):
    """What `plan` chose; `str` makes a table of what it compiled.

    Attributes:
      function: `(key, *args)`: the same value, and a gradient in the budget. Only a plan that rounds uses the key.
      chosen: the row of `trials` that the function is of.
      trials: all that was compiled, in order; the first is the function as it is.
    """

    function: Callable[..., Any]
    chosen: Trial
    trials: tuple[Trial, ...]
    budget_bytes: int

    def __str__(self) -> str:
        return f"budget {self.budget_bytes / 1e6:.3f} MB\n{table(self.trials, self.chosen)}"


def plan(
    function: Callable[..., Any],
    *args: Any,
    budget_bytes: int,
    argnums: int | Sequence[int] = 0,
    variance: float = 1.0,
    has_aux: bool = False,
) -> Plan:
    """The function with a reverse pass that needs at most so many bytes of compiled memory, exact if that can be.

    It is the function as it is, if that fits; else it remembers some arrays, chosen for the least work of computing the
    others again; else it rounds coefficients, with the least added variance. `plan` compiles up to about a dozen times.

    Args:
      function: `(*args) -> scalar`, any JAX function.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s, of the shapes that it will be called with.
      budget_bytes: the most scratch memory (`compiled.memory_analysis().temp_size_in_bytes`) of the jitted gradient.
        Arguments and gradients are not counted. If arguments (or shapes) are sharded, it is the memory of one device.
      argnums: the arguments to differentiate with respect to, as in `jax.grad`.
      variance: the most that rounding may add to a coefficient, over its square: 1.0 admits 2 bits, 0.1 admits 4, and
        with 0 the plan is exact. Arrays of fewer than 512 entries, over all steps of scans, are not rounded.
      has_aux: whether the function returns `(scalar, aux)`, as in `jax.grad`; so does the planned one, then.

    Raises:
      ValueError: if the budget cannot be kept, with the smallest that was found; for a bad number.
      TypeError: if the function has more outputs than one scalar, or no floating-point array is differentiated; if more
        than keeping all is needed and a `jax.custom_vjp` function inside has a gradient that leaves its message out.

    Example:
      >>> import functools, jax, jax.numpy as jnp, apgrad as ap
      >>> layer = lambda x, w: jax.nn.relu(x @ w)
      >>> loss = lambda ws, x: jnp.mean(functools.reduce(layer, ws, x) ** 2)
      >>> plan = ap.memory.plan(loss, [jnp.eye(32)] * 8, jnp.ones((256, 32)), budget_bytes=300_000)
      >>> plan.chosen.method, plan.chosen.peak_bytes <= 300_000
      ('recompute', True)
    """
    number("budget_bytes", budget_bytes)
    number("variance", variance)
    numbers = chosen_numbers(argnums, len(args))
    trials: list[Trial] = []

    def with_constant(*args):  # no message comes to what is auxiliary
        loss, aux = pair_of(function(*args))
        return loss, jax.lax.stop_gradient(aux)

    planned = with_constant if has_aux else function

    def compiled(method: str, work: float, variance: float, made: Callable[..., Any]) -> Trial:
        def random(key, *args):
            output = made(key, *args)
            return (output[0], refuse_message(output[1], _AUXILIARY)) if has_aux else output

        peak = temp_bytes(random, jax.random.key(0), *args, argnums=[i + 1 for i in numbers], has_aux=has_aux)
        trials.append(Trial(method, peak, work, variance, random))
        return trials[-1]

    def finished(trial: Trial) -> Plan:
        return Plan(trial.function, trial, tuple(trials), int(budget_bytes))

    if compiled("keep", 0.0, 0.0, lambda key, *args: planned(*args)).peak_bytes <= budget_bytes:
        return finished(trials[0])
    plans = recorded(planned, args, numbers)
    found = choices(plans)
    around = trials[0].peak_bytes - found[0].nbytes  # the working set
    best: Trial | None = None
    why: Exception | None = None  # nothing can be rounded
    left, beyond = found[1:], 0.0
    while left and len(trials) <= _TRIES:
        fits = [c for c in left if c.nbytes + beyond <= budget_bytes]
        if best is not None and not fits:
            break
        pick = min(fits, key=lambda c: (c.work, c.nbytes)) if fits else min(left, key=lambda c: c.nbytes)
        walk = lambda *stretch, stays=pick.stays: StretchWalk(lambda _: None, None, stays, exact=True).stretch(*stretch)
        trial = compiled("recompute", pick.work / found[0].forward, 0.0, walked(planned, walk))
        beyond = trial.peak_bytes - pick.nbytes
        if trial.peak_bytes <= budget_bytes:
            best = trial
            left = [c for c in left if c.work < pick.work and trial.peak_bytes < (1 - _CLOSE) * budget_bytes]
        elif not fits and _HOPE * trial.peak_bytes > budget_bytes:
            break
        else:  # as long as choices are left that are predicted to be smaller, only these are tried
            left = [c for c in left if c.nbytes < pick.nbytes] or [c for c in left if c is not pick]
    if best is None and variance > 0:
        coefficients, target = listed(plans), max(budget_bytes - around, budget_bytes / 2)
        tried: set[float] = set()
        low, high = 0.0, found[0].kept  # bytes of coefficients: the most that were few enough, the fewest not
        for _ in range(_TRIES):
            choose, estimate, smallest = allocate(coefficients, target, variance)
            if estimate in tried:
                break
            tried.add(estimate)
            walk = lambda *stretch, choose=choose: StretchWalk(choose).stretch(*stretch)
            try:
                trial = compiled("pack", 0.0, added_variance(coefficients, choose), walked(planned, walk))
            except (TypeError, NotImplementedError) as error:  # messages that are not linear, or go where none can see
                why = error
                break
            spare = budget_bytes - trial.peak_bytes
            if spare >= 0:
                best, low = trial, estimate
            else:
                high = min(estimate, target)
            if (spare < 0 and smallest) or 0 <= spare <= _CLOSE * budget_bytes:
                break
            target = estimate + spare
            if not low < target < high:
                target = (low + high) / 2
    if best is not None:
        return finished(best)
    smallest = min(t.peak_bytes for t in trials)
    cut = "" if variance >= 1 or why else ", a higher variance="
    raise ValueError(
        f"a budget of {budget_bytes} bytes cannot be kept: the smallest that was found is "
        f"{smallest} bytes (as the function is, the compiled gradient needs {trials[0].peak_bytes}). What may help: "
        f"budget_bytes={smallest}, a smaller batch{cut}, or ap.randomize of the function with jax.checkpoint around "
        "its blocks. Tried were\n" + table(trials)
    ) from why


def table(trials: Sequence[Trial], chosen: Trial | None = None) -> str:
    row = lambda t: (
        f"{t.method:9}  {t.peak_bytes / 1e6:9.3f}  {t.work:10.2f}  {t.variance:14.2g}"
        f"{'  chosen' if t is chosen else ''}"
    )
    head = f"{'method':9}  {'peak MB':>9}  {'work again':>10}  {'added variance':>14}"
    return "\n".join([head, *map(row, trials), *([note] if (note := compiled_note()) else [])])
