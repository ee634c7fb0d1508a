"""Diagnostics: which estimator suits a program, measured.

*What a gradient costs.* The squared error of an estimate of a gradient t is V + |b|^2, variance and squared bias, and
an estimate takes s seconds: the *efficiency* is 1 / ((V + |b|^2) s). Where t is the mean of m estimates of a reference
of variance V_r, the squared distance of a mean of n estimates is |b|^2 + V / n + V_r / m; the last two are taken off.

*What it does not say.* Where pathwise gradients explode, few estimates make the variance, and the true one is larger
than any sample's: such heavy tails are flagged. The other estimates may still point the right way: see the cosine.

`perturbation_growth` says why gradients explode, `node_variances` where.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from apgrad._ground import bias as _bias
from apgrad._ground.arguments import noted as _noted
from apgrad._ground.progress import progress_bar as _progress_bar
from apgrad.expectations._adaptive import Adaptive as _Adaptive
from apgrad.expectations._growth import Growth as Growth, perturbation_growth as perturbation_growth
from apgrad.expectations._node_variances import NodeVariances as NodeVariances, node_variances as node_variances, table

SIGNIFICANT = 1e-3  # how often chance may pass for a difference: once for the variance, once for the time
ROUNDING = 1e-5  # of the gradient's norm: how far a float32 sum of 10,000 terms is typically off


class Row(NamedTuple):
    """What `compare` found of one gradient. Arrays are float64, (elements,), the gradient's leaves in a row.

    The *truth* is the exact gradient, or the mean of the reference.

    Attributes:
      mean: the mean of the estimates.
      standard_error: the standard error of the mean.
      bias: the mean less the truth, 0 where that is rounding; None where no truth is known, and for the reference.
      off: the worst element's bias in standard errors; infinite where nothing varies, nan without truth or finite mean.
      biased: whether the mean is farther off than chance takes it once in 1000 times (`ap.testing.assert_unbiased`).
      variance: the variance of one estimate, summed over the elements; infinite where an estimate is not finite.
      squared_bias: the square of the bias, less what the noise of both means adds to it; nan where `off` is.
      squared_error: the variance of one estimate plus the squared bias; without a truth the variance alone.
      uncertainty: the standard error of the squared error; it is too small where tails are heavy.
      cosine: the median over estimates of the cosine with the truth, or else with the mean of the other estimates.
      share: the share of the variance that the farthest 1 % of the estimates make; with `lanes=1`, the farthest lanes.
      heavy_tailed: whether one estimate makes half of the variance, or a fifth and thrice the largest normal one's.
      seconds: the time of one gradient, without compiling: the median over rounds of a chunk's time per estimate.
      efficiency: 1 / (squared_error seconds).
      times: the seconds of one gradient in each round.
      rounding: whether elements are off by more than chance, but by no more than 1e-5 of the truth's norm together.
    """

    mean: np.ndarray
    standard_error: np.ndarray
    bias: np.ndarray | None
    off: float
    biased: bool
    variance: float
    squared_bias: float
    squared_error: float
    uncertainty: float
    cosine: float
    share: float
    heavy_tailed: bool
    seconds: float
    efficiency: float
    times: np.ndarray
    rounding: bool = False


class Comparison(NamedTuple):
    """What `compare` found. Printed, it is a table: "bias / SE" is `off`, "both" `squared_error`, "top 1 %" `share`.

    Attributes:
      rows: what was found of each objective, by its name.
      refused: why an objective has no gradient (such as a pathwise one of discrete choices), by its name.
      num_estimates: how many estimates each row is made of.
    """

    rows: dict[str, Row]
    refused: dict[str, str]
    num_estimates: int

    def __str__(self) -> str:
        best = max(r.efficiency for r in self.rows.values())
        cells = [("", "mean", "bias / SE", "variance", "bias^2", "both", "cosine", "top 1 %", "ms", "efficiency", "")]
        for name, r in self.rows.items():
            mean = f"norm {np.linalg.norm(r.mean):.3g}"
            if r.mean.size == 1:
                mean = f"{r.mean[0]:.4g} ± {r.standard_error[0]:.1g}"
            bias = ("", "") if r.bias is None else (_short(r.off), f"{r.squared_bias:.2g}")
            error = f"{r.squared_error:.2g} ± {r.uncertainty:.1g}"
            relative = "1" if r.efficiency == best else f"{r.efficiency / best:.2g}"
            tails = "not finite" if r.variance == math.inf else "heavy tails"
            notes = ", ".join(["biased"] * r.biased + ["rounding"] * r.rounding + [tails] * r.heavy_tailed)
            of = f"{r.cosine:.2f}", f"{r.share:.0%}", f"{1e3 * r.seconds:.3g}", relative
            cells.append((name, mean, bias[0], f"{r.variance:.2g}", bias[1], error, *of, notes))
        elements = next(iter(self.rows.values())).mean.size
        of_all = f"; norm and squares over {elements} elements" if elements > 1 else ""
        how = f"{self.num_estimates} estimates each{of_all}; efficiency relative to the best; ms without compiling"
        return "\n".join([table(cells), how, *(f"{name}: refused, {why}" for name, why in self.refused.items())])


def compare(
    objectives: Mapping[str, Callable[..., Any]],
    key: jax.Array,
    *args: Any,
    argnums: int | Sequence[int] = 1,
    num_estimates: int = 200,
    truth: Any = None,
    reference: str | None = None,
    rounds: int = 10,
    progress: bool = True,
) -> Comparison:
    """Bias, variance, direction, seconds and efficiency of the gradients of objectives with the same expectation.

    Gradients with a state (`ap.adaptive`, `ap.multilevel`) are no such objectives: judge them by training.

    Args:
      objectives: functions `(key, *args) -> scalar` by name, as `ap.expectation` makes them.
      key: a PRNG key.
      *args: the objectives' arguments after the key.
      argnums: what to differentiate, as in `jax.grad`: 1 is the first argument after the key.
      num_estimates: how many estimates of each gradient are made, rounded up to a multiple of `rounds`.
      truth: the exact gradient, if it is known.
      reference: where no truth is known, the name of an unbiased objective, whose mean the others are compared with.
      rounds: how many turns each objective takes, one after the other.
      progress: whether to show a tqdm bar, with one step for each compilation and for each turn.

    Raises:
      ValueError: for no objectives, too few estimates, truth and reference both, an unknown reference, a truth of
        another form; where all objectives or the reference raise errors; for a truth or reference that is not finite.

    Example:
      >>> import jax, apgrad as ap
      >>> objectives = {"right": lambda key, x: x**2 + x * jax.random.normal(key), "wrong": lambda key, x: x}
      >>> found = ap.diagnostics.compare(objectives, jax.random.key(0), 1.0, truth=2.0)
      >>> [row.biased for row in found.rows.values()]
      [False, True]
    """
    if not objectives or rounds < 1 or num_estimates < 2:
        found = f"{len(objectives)} objective(s), {rounds=}, {num_estimates=}"
        raise ValueError(f"compare needs an objective, a round and 2 estimates at least, got {found}")
    if truth is not None and reference is not None:
        raise ValueError("compare takes the exact gradient, truth=, or a reference to stand for it, not both")
    if reference is not None and reference not in objectives:
        raise ValueError(f"reference={reference!r} is none of the objectives, {list(objectives)}")
    if truth is not None and not all(np.isfinite(x).all() for x in _real(truth)):
        raise ValueError(f"compare needs a truth that is finite, since nothing is near inf or nan, got {truth}")
    chunk = -(-num_estimates // rounds)
    keys = dict(zip(objectives, jax.random.split(key, (len(objectives), rounds, chunk)), strict=True))
    compiled, refused, samples, seconds = {}, {}, {}, {}
    steps = len(objectives) * (1 + rounds)
    with _progress_bar("comparing", steps, shown=progress) as bar:
        for name, objective in objectives.items():
            try:
                with _doing(bar, "compiling", name):
                    compiled[name] = _compile(objective, argnums, keys[name][0], args)
            except (TypeError, ValueError) as error:
                refused[name] = f"{type(error).__name__}: {error}"
                bar.update(rounds)
        if not compiled or reference in refused:
            raise ValueError(f"compare has {'no reference' if compiled else 'nothing'} to go by, refused are {refused}")
        for r in range(rounds):
            for name, function in compiled.items():
                with _doing(bar, "running", name):
                    start = time.perf_counter()
                    out = jax.block_until_ready(function(keys[name][r], *args))
                    seconds.setdefault(name, []).append((time.perf_counter() - start) / chunk)
                    samples.setdefault(name, []).append(_flat(out, 1))
    one = jax.tree.map(lambda x: x[0], out)
    if reference is not None and not np.isfinite(samples[reference]).all():
        bad = sum(not np.isfinite(x).all() for x in np.concatenate(samples[reference]))
        found = f"{bad} of its {chunk * rounds} estimates are not finite"
        raise ValueError(f"reference={reference!r} stands for the truth, and {found}. Give another, or truth=")
    if truth is not None and (mine := _form(one)) != (given := _form(truth)):
        raise ValueError(f"the gradient has the form {mine}, the truth {given}: give it as jax.grad gives the gradient")
    cuts = np.cumsum([x.size for x in _real(one)])[:-1]
    samples = {name: np.concatenate(x) for name, x in samples.items()}
    against = samples.get(reference or "") if truth is None else np.stack([_flat(truth, 0)] * 2)  # two equal rows
    row = lambda name: _row(samples[name], np.array(seconds[name]), None if name == reference else against, cuts)
    return Comparison({name: row(name) for name in samples}, refused, chunk * rounds)


def recommend(comparison: Comparison) -> str:
    """What to use, and why, in plain words.

    The most efficient row without heavy tails is recommended, and every row whose ratio of efficiencies to it is at
    most 1.1 or has 1 in its interval. Where a biased gradient is the best single estimate, the text says how many
    estimates of an unbiased gradient must be averaged to be better.

    Args:
      comparison: what `compare` found, with a truth or a reference, so that biases are known.

    Example:
      >>> import jax, apgrad as ap
      >>> normal = lambda deviation: lambda key, x: deviation * x * jax.random.normal(key)
      >>> objectives = {"RP": normal(1.0), "LR": normal(100.0)}
      >>> found = ap.diagnostics.compare(objectives, jax.random.key(0), 0.0, truth=0.0)
      >>> ap.diagnostics.recommend(found).startswith("Use RP: it is ")
      True
    """
    rows = comparison.rows
    ranked = sorted((n for n in rows if not rows[n].heavy_tailed), key=lambda n: -rows[n].efficiency)
    unbiased = [n for n in ranked if not rows[n].biased]
    if not ranked:
        lines = ["None of these: each has heavy tails. Try ap.clip_lanes, or total_propagation() with cross_fit=True."]
    elif len(ranked) == 1:
        lines = [f"Use {ranked[0]}: it is the only one{' without heavy tails' if len(rows) > 1 else ''}."]
    else:
        first, second = ranked[:2]
        ratios = {n: _ratio(rows[first], rows[n]) for n in ranked[1:]}
        equal = [n for n, (ratio, low, _) in ratios.items() if ratio <= 1.1 or low <= 1]
        ratio, low, high = ratios[equal[0] if equal else second]
        why = f"it is {ratio:.3g} ({low:.3g} to {high:.3g}) times as efficient as {second}, the next"
        if ratio == math.inf:
            why = f"it has no error, and {second}, the next, has one"
        lines = [f"Use {first}: {why}."]
        if equal:
            lines = [
                f"Use {', '.join([first, *equal[:-1]])} or {equal[-1]}, the simplest of them: no difference is "
                f"significant ({first} is {ratio:.3g} times as efficient as {equal[0]}, from {low:.3g} to {high:.3g})."
            ]
    for name, r in rows.items():
        if r.biased and r.bias is not None:
            size = math.sqrt(r.squared_bias) or float(np.linalg.norm(r.bias))
            lines.append(f"{name} is biased by {size:.2g} (at worst {_short(r.off, 0)} standard errors).")
            if ranked[:1] == [name] and unbiased and r.squared_bias:
                u = rows[unbiased[0]]
                number = (u.variance - r.variance * r.seconds / u.seconds) / r.squared_bias
                lines[-1] += f" Averages of more than {number:.2g} estimates of {unbiased[0]} are better."
        if r.variance == math.inf:
            lines.append(f"{name} is not finite in some estimates, or their squares are not.")
        elif r.heavy_tailed:
            lines.append(f"{name} has heavy tails: {r.share:.0%} of its variance comes from 1 % of its estimates.")
            if r.cosine > 0.5:
                lines[-1] += f" Yet its median cosine is {r.cosine:.2f}: cut what few lanes send back, ap.clip_lanes."
    lines += [f"{name} is refused: {why}" for name, why in comparison.refused.items()]
    if len(rows) > 1 and all(r.bias is None for r in rows.values()):
        lines.append("Biases are not known: give compare a truth or a reference.")
    return "\n".join(lines)


def _ratio(first: Row, second: Row) -> tuple[float, float, float]:
    """How many times more efficient the first one is, and the ends of the interval."""
    if first.squared_error == 0 < second.squared_error:
        return math.inf, math.inf, math.inf
    equal = second.squared_error == first.squared_error
    errors = 0.0 if equal else math.log(second.squared_error / first.squared_error)
    error = math.hypot(*(r.uncertainty / r.squared_error if r.squared_error else 0.0 for r in (first, second)))
    error *= NormalDist().inv_cdf(1 - SIGNIFICANT / 2)
    # Round by round, since other work on the machine slows down both. By chance, one side has all n at 2^(1 - n).
    logs = np.log(second.times / first.times) if len(first.times) > 5 else np.array([-np.inf, 0.0, np.inf])
    low, middle, high = logs.min(), np.median(logs), logs.max()
    return math.exp(errors + middle), math.exp(errors - error + low), math.exp(errors + error + high)


@contextlib.contextmanager
def _doing(bar, what, name):
    bar.set_postfix_str(f"{what} {name}")
    try:
        with _noted(f"This is from the objective {name!r} of ap.diagnostics.compare, called as {name}(key, *args)."):
            yield
    finally:
        bar.update()


def _compile(objective, argnums, keys, args):
    if isinstance(objective, _Adaptive):
        raise TypeError("it keeps a state from call to call, and an objective has none: judge it by training")
    if not callable(objective):
        raise TypeError(f"an objective is a function (key, *args) -> scalar, got {type(objective).__name__}")
    value = jax.eval_shape(objective, keys[0], *args)
    if getattr(value, "shape", None) != ():
        like = "as that of ap.expectation(program, lanes), and no gradient"
        raise TypeError(
            f"an objective returns a scalar, {like}; got the shapes {jax.tree.map(lambda x: x.shape, value)}"
        )
    gradient = jax.grad(objective, argnums=argnums)
    function = jax.jit(lambda keys, *args: lax.map(lambda key: gradient(key, *args), keys))
    if not jax.tree.leaves(jax.block_until_ready(function(keys, *args))):
        raise TypeError(f"argnums={argnums} has no arrays to differentiate")
    return function


def _short(x: float, digits: int = 1) -> str:
    return f"{x:.{digits}f}" if x < 1000 else f"{x:.0e}"


def _form(tree):
    return str(jax.tree.map(lambda x: f"complex {np.shape(x)}" if np.iscomplexobj(x) else np.shape(x), tree))


def _real(tree):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    both = [np.stack([np.real(x), np.imag(x)], axis=-1) if np.iscomplexobj(x) else x for x in leaves]
    return [x.astype(np.float64) for x in both]


def _flat(tree, batch):
    return np.concatenate([x.reshape(*x.shape[:batch], -1) for x in _real(tree)], axis=-1)


def _mean_and_error(samples):
    return samples.mean(0), samples.std(0, ddof=1) / math.sqrt(len(samples))


@np.errstate(invalid="ignore", divide="ignore")
def _row(samples, times, against, cuts=()):
    seconds, (n, size) = float(np.median(times)), samples.shape
    mean, error = _mean_and_error(samples)
    finite = bool(np.isfinite(samples).all())
    d = np.square(samples - mean).sum(1) * n / (n - 1) if finite else np.full(n, np.inf)
    variance = float(d.mean())
    share = float(np.sort(d)[-max(1, n // 100) :].sum() / d.sum()) if 0 < variance < math.inf else float(variance > 0)
    # The largest of n squares of normal numbers is about 2 log 2n.
    heavy = not finite or bool(variance > 0 and d.max() > min(max(0.2, 6 * math.log(2 * n) / n), 0.5) * n * variance)
    bias, off, squared_bias, more, biased, rounding = None, math.nan, math.nan, 0.0, False, False
    truth = (n * mean - samples) / (n - 1)
    if against is not None:
        truth, truth_error = _mean_and_error(against)
        bias = mean - truth
        offs = np.where(bias == 0, 0.0, np.abs(bias) / np.hypot(error, truth_error))
        far = offs > NormalDist().inv_cdf(1 - SIGNIFICANT / (2 * max(size, 1)))
        rounding = bool(0 < np.linalg.norm(bias[far]) <= ROUNDING * np.linalg.norm(truth))
        rounded = far & rounding
        bias, offs = np.where(rounded, 0.0, bias), np.where(rounded, 0.0, offs)
        if finite:
            pairs = min(n, len(against))  # the reference has its own noise
            differences = samples[:pairs] - against[:pairs] if truth_error.any() else samples - truth
            leaves = np.split(np.where(rounded, 0.0, differences), cuts, axis=1)
            zeros, level = [np.zeros(x.shape[1]) for x in leaves], NormalDist().inv_cdf(1 - SIGNIFICANT / 2)
            chance = _bias.distance(leaves, zeros, level)
            biased = chance.off > chance.bound
            if biased and np.linalg.norm(bias) <= ROUNDING * np.linalg.norm(truth):  # by many elements a little each
                biased, rounding = False, True
            off = float(np.max(np.where(np.isnan(offs), np.inf, offs), initial=0))
            squared_bias = max(float(bias @ bias - error @ error - truth_error @ truth_error), 0.0)
            d, more = np.square(samples - truth).sum(1), 2 * float(_mean_and_error(against @ bias)[1])
    cosines = (samples * truth).sum(1) / (np.linalg.norm(samples, axis=1) * np.linalg.norm(truth, axis=-1))
    cosine = float(np.median(np.where(np.isfinite(cosines), cosines, 0)))
    squared_error = variance if math.isnan(squared_bias) else variance + squared_bias
    uncertainty = math.hypot(float(d.std(ddof=1)) / math.sqrt(n), more) if finite else math.inf
    efficiency = 1 / (squared_error * seconds) if squared_error else math.inf
    errors = bias, off, biased, variance, squared_bias, squared_error, uncertainty
    return Row(mean, error, *errors, cosine, share, heavy, seconds, efficiency, times, rounding)
