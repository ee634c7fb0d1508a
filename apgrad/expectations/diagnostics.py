"""Diagnostics: which estimator suits a program, measured.

    found = ap.diagnostics.compare({"RP": one, "LR": other}, key, theta, reference="LR")
    print(found)
    print(ap.diagnostics.recommend(found))

*What a gradient costs.* In a given time, estimates of variance V that take s seconds each average to a variance
V s / time. So what counts is the *efficiency* 1 / (V s), once the bias is known to be small: `compare`. The variance is
the mean of the squared distances d_i from the mean, and has the standard error of a mean. Where pathwise gradients
explode, one d_i is much of the sum, and the true variance is larger than any sample says: such heavy tails are flagged.
Objectives take turns, and the ratios of their seconds, round by round, say how well the seconds are known.

*Why.* Pathwise gradients explode where small perturbations do: `perturbation_growth`, of `_growth.py`.

*Where.* `node_variances`, of `_node_variances.py`, has both estimators' variances at every node.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from apgrad.expectations._growth import Growth as Growth, perturbation_growth as perturbation_growth
from apgrad.expectations._node_variances import (
    NodeVariances as NodeVariances,
    node_variances as node_variances,
    table,
)

SIGNIFICANT = 1e-3  # how often a difference that is none may be called one, for the variance and for the time each


class Row(NamedTuple):
    """What `compare` found of one gradient. Arrays are float64, (elements,), the gradient's leaves in a row.

    Attributes:
      mean: the mean of the estimates.
      standard_error: the standard error of the mean.
      bias: the mean less the truth; None where no truth is known.
      off: the bias of the worst element in standard errors (of the difference, against a reference); nan without truth.
      biased: whether `off` is more than chance explains (1 in 1000, for all the elements together).
      variance: the variance of one estimate, summed over the elements; infinite where an estimate is not finite.
      variance_error: the standard error of the variance; it is too small where tails are heavy.
      heavy_tailed: whether one estimate makes a fifth of the variance, and three times what a normal one would.
      seconds: the time of one compiled gradient, the median over rounds.
      efficiency: 1 / (variance seconds).
      times: the seconds in each round; None where they are known exactly.
    """

    mean: np.ndarray
    standard_error: np.ndarray
    bias: np.ndarray | None
    off: float
    biased: bool
    variance: float
    variance_error: float
    heavy_tailed: bool
    seconds: float
    efficiency: float
    times: np.ndarray | None = None


class Comparison(NamedTuple):
    """What `compare` found; printed, it is a table.

    Attributes:
      rows: what was found of each objective, by its name.
      refused: why an objective has no such gradient (a pathwise one of discrete choices), by its name.
      num_estimates: how many estimates each row is made of.
    """

    rows: dict[str, Row]
    refused: dict[str, str]
    num_estimates: int

    def __str__(self) -> str:
        best = max(r.efficiency for r in self.rows.values())
        cells = [("", "mean", "bias / SE", "variance", "ms", "efficiency", "")]
        for name, r in self.rows.items():
            mean = f"norm {np.linalg.norm(r.mean):.3g}"
            if r.mean.size == 1:
                mean = f"{r.mean[0]:.4g} ± {r.standard_error[0]:.1g}"
            off = "" if math.isnan(r.off) else f"{r.off:.1f}"
            variance = f"{r.variance:.2g} ± {r.variance_error:.1g}"
            relative = "1" if r.efficiency == best else f"{r.efficiency / best:.2g}"
            notes = ", ".join(["biased"] * r.biased + ["heavy tails"] * r.heavy_tailed)
            cells.append((name, mean, off, variance, f"{1e3 * r.seconds:.3g}", relative, notes))
        elements = next(iter(self.rows.values())).mean.size
        of_all = f"; variance and norm over {elements} elements" if elements > 1 else ""
        lines = [table(cells), f"{self.num_estimates} estimates each{of_all}; efficiency relative to the best"]
        return "\n".join(lines + [f"{name}: refused, {why}" for name, why in self.refused.items()])


def compare(
    objectives: Mapping[str, Callable[..., Any]],
    key: jax.Array,
    *args: Any,
    argnums: int | Sequence[int] = 1,
    num_estimates: int = 200,
    truth: Any = None,
    reference: str | None = None,
    rounds: int = 10,
) -> Comparison:
    """Bias, variance, seconds and efficiency of the gradients of objectives with the same expectation.

    Estimates are computed one after the other, by a compiled `lax.map`; objectives take turns, a chunk each, and the
    seconds are the median over rounds of a chunk's time, per estimate. A machine at rest gives the best figures.

    Args:
      objectives: functions `(key, *args) -> scalar` by name, as `ap.expectation` makes them.
      key: a PRNG key; each objective and estimate gets its own.
      *args: the objectives' arguments after the key.
      argnums: what to differentiate, as in `jax.grad`: 1 is the first argument after the key.
      num_estimates: how many estimates of each gradient are made, rounded up to a multiple of `rounds`.
      truth: the exact gradient, if it is known.
      reference: where no truth is known, the name of an unbiased objective, whose mean the others are compared with.
      rounds: how often the objectives take turns.

    Returns:
      A `Comparison`.

    Raises:
      ValueError: for no objectives, too few estimates, truth and reference both, an unknown reference, a truth of
        another form; with their messages, where all the objectives or the reference raise an error.

    Example:
      >>> import jax, apgrad as ap, numpyro.distributions as dist
      >>> def objective(estimator):
      ...     @ap.stochastic(estimator)
      ...     def draw(theta):
      ...         return dist.Normal(theta, 1.0)
      ...     def program(tape, theta):
      ...         tape, x = draw(tape, theta)
      ...         return tape.cost(x**2)
      ...     return ap.expectation(program, lanes=100)
      >>> objectives = {"RP": objective(ap.reparameterization()), "LR": objective(ap.likelihood_ratio())}
      >>> found = ap.diagnostics.compare(objectives, jax.random.key(0), 1.0, truth=2.0)
      >>> [row.biased for row in found.rows.values()]
      [False, False]
      >>> 3 < found.rows["LR"].variance / found.rows["RP"].variance < 6     # 18 / 4
      True
    """
    if not objectives or rounds < 1 or num_estimates < 2:
        raise ValueError(
            f"compare needs an objective, a round and 2 estimates at least, got {len(objectives)} objective(s), "
            f"rounds={rounds}, num_estimates={num_estimates}"
        )
    if truth is not None and reference is not None:
        raise ValueError("compare takes the exact gradient, truth=, or a reference to stand for it, not both")
    if reference is not None and reference not in objectives:
        raise ValueError(f"reference={reference!r} is none of the objectives, {list(objectives)}")
    chunk = -(-num_estimates // rounds)
    compiled, refused = {}, {}
    keys = jax.random.split(key, (len(objectives), rounds, chunk))
    for (name, objective), mine in zip(objectives.items(), keys, strict=True):
        try:
            compiled[name] = _compile(objective, argnums, mine, args)
        except (TypeError, ValueError) as error:
            refused[name] = f"{type(error).__name__}: {error}"
    if not compiled or reference in refused:
        raise ValueError(f"compare has {'no reference' if compiled else 'nothing'} to go by, refused are {refused}")

    samples = {name: [] for name in compiled}
    seconds = {name: [] for name in compiled}
    for r in range(rounds):
        for name, (function, mine) in compiled.items():
            start = time.perf_counter()
            out = jax.block_until_ready(function(mine[r], *args))
            seconds[name].append((time.perf_counter() - start) / chunk)
            samples[name].append(_flat(out, 1))
    samples = {name: np.concatenate(x) for name, x in samples.items()}
    against = None
    if truth is not None:
        against = _flat(truth, 0), 0.0
    elif reference is not None:
        against = _mean_and_error(samples[reference])
    rows = {
        name: _row(x, np.array(seconds[name]), None if name == reference else against) for name, x in samples.items()
    }
    return Comparison(rows, refused, chunk * rounds)


def recommend(comparison: Comparison) -> str:
    """What to use, and why, in plain words.

    The most efficient row without significant bias or heavy tails is recommended, with all that do not differ from it:
    the ratio of efficiencies is below 1.1, or its interval includes 1. The interval is the product of one for the ratio
    of variances, which misses the true ratio once in 1000 times, and of the least and largest ratio of seconds.

    Args:
      comparison: what `compare` found, with a truth or a reference, so that biases are known.

    Example:
      >>> import numpy as np, apgrad as ap
      >>> x = np.zeros(1)
      >>> row = ap.diagnostics.Row(x, x, x, 0.0, False, 1.0, 0.01, False, 1e-3, 1000.0)
      >>> rows = {"RP": row, "LR": row._replace(variance=10.0, efficiency=100.0)}
      >>> print(ap.diagnostics.recommend(ap.diagnostics.Comparison(rows, {}, 100)))
      Use RP: it is 10 (9.67 to 10.3) times as efficient as LR, the next.
    """
    rows = comparison.rows
    sound = {n: r for n, r in rows.items() if not (r.biased or r.heavy_tailed)}
    ranked = sorted(sound, key=lambda n: -sound[n].efficiency)
    if not ranked:
        lines = ["None of these: each is biased or has heavy tails. Try total_propagation() with cross_fit=True."]
    elif len(ranked) == 1:
        what = "the only one" + " without significant bias or heavy tails" * (len(rows) > 1)
        lines = [f"Use {ranked[0]}: it is {what}."]
    else:
        first, second = ranked[:2]
        ratios = {n: _ratio(rows[first], rows[n]) for n in ranked[1:]}
        equal = [n for n, (ratio, low, _) in ratios.items() if ratio <= 1.1 or low <= 1]
        if equal:
            ratio, low, high = ratios[equal[0]]
            lines = [
                f"Use {', '.join([first, *equal[:-1]])} or {equal[-1]}, the simplest of them: no difference is "
                f"significant ({first} is {ratio:.3g} times as efficient as {equal[0]}, from {low:.3g} to {high:.3g})."
            ]
        else:
            ratio, low, high = ratios[second]
            lines = [
                f"Use {first}: it is {ratio:.3g} ({low:.3g} to {high:.3g}) times as efficient as {second}, the next."
            ]
    for name, r in rows.items():
        if r.biased and r.bias is not None:
            size, spread = np.linalg.norm(r.bias), math.sqrt(r.variance)
            lines.append(
                f"{name} is biased by {size:.2g} ({r.off:.0f} standard errors; one estimate's standard deviation is "
                f"{spread:.2g}), which averaging does not remove; total propagation has cross_fit=True for that."
            )
        if r.heavy_tailed:
            lines.append(f"{name} has heavy tails: trust neither its mean nor its variance, {r.variance:.2g} here.")
    lines += [f"{name} is refused: {why}" for name, why in comparison.refused.items()]
    if len(rows) > 1 and all(r.bias is None for r in rows.values()):
        lines.append("Biases are not known: give compare a truth or a reference.")
    return "\n".join(lines)


def _ratio(first: Row, second: Row) -> tuple[float, float, float]:
    """How many times more efficient the first one is, and the ends of the interval."""
    if first.variance == 0 < second.variance:
        return math.inf, math.inf, math.inf
    variances = math.log(second.variance / first.variance) if second.variance != first.variance else 0.0
    error = math.hypot(*(r.variance_error / r.variance if r.variance else 0.0 for r in (first, second)))
    error *= NormalDist().inv_cdf(1 - SIGNIFICANT / 2)
    logs = np.log([second.seconds / first.seconds])
    if first.times is not None and second.times is not None:
        # Round by round: what else the machine does slows down both. All are on one side once in 2^(n - 1) times.
        logs = np.log(second.times / first.times) if len(first.times) > 5 else np.array([-np.inf, 0.0, np.inf])
    low, middle, high = logs.min(), np.median(logs), logs.max()
    return math.exp(variances + middle), math.exp(variances - error + low), math.exp(variances + error + high)


def _compile(objective, argnums, keys, args):
    gradient = jax.grad(objective, argnums=argnums)
    function = jax.jit(lambda keys, *args: lax.map(lambda key: gradient(key, *args), keys))
    jax.block_until_ready(function(keys[0], *args))
    return function, keys


def _flat(tree, batch):
    """The leaves in a row, after `batch` axes."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(*x.shape[:batch], -1) for x in leaves], axis=-1)


def _mean_and_error(samples):
    return samples.mean(0), samples.std(0, ddof=1) / math.sqrt(len(samples))


def _row(samples, times, against):
    seconds = float(np.median(times))
    n, size = samples.shape
    with np.errstate(invalid="ignore"):
        mean, error = _mean_and_error(samples)
    finite = bool(np.isfinite(samples).all())
    d = np.square(samples - mean).sum(1) * n / (n - 1) if finite else np.full(n, np.inf)
    variance, variance_error = float(d.mean()), float(d.std(ddof=1) / math.sqrt(n)) if finite else math.inf
    # The largest of n squares of normal numbers is about 2 log 2n.
    share = min(max(0.2, 6 * math.log(2 * n) / n), 0.5)
    heavy = not finite or bool(variance > 0 and d.max() > share * n * variance)
    bias, off = None, math.nan
    if against is not None:
        truth, truth_error = against
        if truth.shape != mean.shape:
            raise ValueError(f"the gradient has {mean.size} elements, the truth {truth.size}")
        bias = mean - truth
        error_of_bias = np.maximum(np.hypot(error, truth_error), np.finfo(np.float64).tiny)
        # Ten float32 roundings are no bias.
        offs = np.where(np.abs(bias) <= 1e-6 * np.abs(truth), 0.0, np.abs(bias) / error_of_bias)
        off = float(np.max(np.where(np.isfinite(offs), offs, np.inf), initial=0)) if finite else math.nan
    biased = off > NormalDist().inv_cdf(1 - SIGNIFICANT / (2 * max(size, 1)))
    efficiency = 1 / (variance * seconds) if variance else math.inf
    return Row(mean, error, bias, off, biased, variance, variance_error, heavy, seconds, efficiency, times)
