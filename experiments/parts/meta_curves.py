"""What the meta-training experiments share: training a rule and keeping its curve."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

from apgrad import meta, mplp


def sites(task: meta.Task) -> tuple[mplp.Site, ...]:
    """The places of a task's network."""
    params = task.prior(jax.random.key(0))
    return mplp.sites(task.network, params, task.batch(task.draw(jax.random.key(0)), jax.random.key(1)))


def thesis_adam(rate: float = 1e-3) -> optax.GradientTransformation:
    """The thesis's outer optimizer: gradients clipped elementwise to ±1, Adam with beta_1 = .99."""
    return optax.chain(optax.clip(1.0), optax.adam(rate, b1=0.99))


def train(
    outer: meta.OuterGradient, optimizer: optax.GradientTransformation, theta: Any, seed: int, steps: int, points: int
) -> tuple[Any, list[float], int]:
    """The trained meta-parameters, the mean losses of `points` stretches, and how many steps were skipped."""
    losses: list[float] = []
    done = meta.train(
        outer,
        optimizer,
        theta,
        jax.random.key(seed),
        steps,
        every=max(1, steps // points),
        progress=False,
        log=lambda step, metrics: losses.append(metrics["loss"]),
    )
    return done.theta, losses, int(done.skipped)


def evaluated(
    task: meta.Task, learner: meta.Learner, theta: Any, seed: int, runs: int, steps: int, *, prior: Any = None
) -> np.ndarray:
    """Held-out losses (runs, steps + 1), the same tasks for every learner."""
    return evaluation(task, learner, seed, runs, steps)(theta, prior)


def evaluation(task: meta.Task, learner: meta.Learner, seed: int, runs: int, steps: int) -> Callable[..., np.ndarray]:
    """`(theta, prior=None) -> held-out losses (runs, steps + 1)`, one jitted program."""
    keys = jax.random.split(jax.random.key(seed), runs)

    @jax.jit
    def run(theta, prior):
        one = lambda key: meta.evaluate(task, learner, theta, key, steps, prior=prior)
        return jax.lax.map(one, keys, batch_size=10)

    return lambda theta, prior=None: np.asarray(run(theta, prior), np.float64)


def tuned(
    task: meta.Task, make: Callable[[float], optax.GradientTransformation], rates, seed: int, runs: int, steps: int
) -> tuple[float, np.ndarray, dict[str, float]]:
    """An optimizer at the rate that is best at the last step; and the sweep."""
    evaluate = evaluation(task, meta.optimizer(make, task.loss), seed, runs, steps)
    curves = {rate: evaluate(np.float32(rate)) for rate in rates}
    sweep = {str(r): float(c[:, -1].mean()) for r, c in curves.items()}
    best = min(rates, key=lambda r: sweep[str(r)] if np.isfinite(sweep[str(r)]) else np.inf)
    return best, curves[best], sweep


def statistics(values: np.ndarray) -> dict[str, float]:
    """Mean, deviation and standard error of the last column."""
    last = values[:, -1]
    deviation = float(last.std(ddof=1))
    return {"mean": float(last.mean()), "deviation": deviation, "standard_error": deviation / len(last) ** 0.5}


def curve_figure(curves: dict[str, dict[str, list[list[float]]]], steps: int, title: str) -> Figure:
    """Panels of medians over seeds, with all seeds behind them."""
    figure = Figure(figsize=(4.5 * len(curves), 3.6), layout="constrained")
    for ax, (panel, lines) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for label, seeds in lines.items():
            values = np.array(seeds)
            at = np.linspace(steps / values.shape[1], steps, values.shape[1])
            (line,) = ax.plot(at, np.median(values, axis=0), label=label)
            ax.plot(at, values.T, color=line.get_color(), alpha=0.25, linewidth=0.7)
        ax.set(xlabel="outer step", ylabel="loss", yscale="log", title=panel)
        ax.legend(fontsize=7)
    figure.suptitle(title)
    return figure
