"""Baselines: what is taken off the cost-to-go before the score multiplies it.

For a random choice x with score s(x), E[s(x) b] = 0 for every b that does not depend on x, so E[s (G - b)] = E[s G],
with less variance where b is near the cost-to-go G (Williams, 1992; Weaver & Tao, 2001). Estimators with a score take:

* `"leave_one_out"`: the mean of the other lanes' cost, cost by cost (Kool et al., 2019). The default.
* `"standardized"`: the standard score of the cost among all lanes, (c - mean) / (deviation + 1e-4), is charged in its
  place (GRPO; Shao et al., "DeepSeekMath", 2024, section 4.1.1). It is biased, and has no second derivative.
* `None`, a function of the node's inputs, which is held constant, or a `learned_baseline`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from apgrad._ground.arguments import require_call


class LearnedBaseline(NamedTuple):
    """A baseline function whose parameters learn the cost-to-go, as `learned_baseline` makes it."""

    function: Callable[..., Any]


Baseline = Literal["leave_one_out", "standardized"] | None | Callable[..., Any] | LearnedBaseline


def learned_baseline(function: Callable[..., Any]) -> LearnedBaseline:
    """A baseline b(parameters, inputs) that learns the cost-to-go G by the gradient of (b - G)^2 / 2.

    Its parameters are arguments of the objective that lanes share, whose gradient is the regression's alone, averaged
    over lanes and summed over nodes. Other parameters that the function uses get the sum of both gradients, which is
    not the gradient of the expected cost: hold them constant in the function by `jax.lax.stop_gradient`.

    Args:
      function: `(*inputs)` of the node, as a function for `likelihood_ratio`; with `parts`, one value a part.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> estimator = ap.likelihood_ratio(baseline=ap.learned_baseline(lambda theta, b: b))
      >>> flip = ap.stochastic(estimator, in_axes=(None, None))(lambda theta, b: dist.Bernoulli(probs=theta))
      >>> program = lambda tape, theta, b: flip(tape, theta, b)[0].cost(jnp.full(tape.lanes, 7.0))
      >>> float(jax.jit(ap.grad(program, lanes=8, argnums=2))(jax.random.key(0), 0.5, 5.0))    # b - G
      -2.0
    """
    if not callable(function):
        raise TypeError(f"learned_baseline takes a function of the node's inputs, got {type(function).__name__}")
    return LearnedBaseline(function)


def require_baseline(name: str, baseline: Any, *, biased: bool = False) -> None:
    if is_standardized(baseline) and not biased:
        raise ValueError(f"{name}: the standardized baseline is biased: use it in likelihood_ratio() of ap.stochastic")
    named = isinstance(baseline, str) and baseline in ("leave_one_out", "standardized")
    if not (named or baseline is None or callable(baseline) or isinstance(baseline, LearnedBaseline)):
        wanted = "None, a function of the node's inputs (in ap.sample: of the distribution) or ap.learned_baseline"
        names = "'leave_one_out', " + "'standardized', " * biased
        raise ValueError(f"{name}: baseline must be {names}{wanted}, got {baseline!r}")


def is_standardized(baseline: object) -> bool:
    return isinstance(baseline, str) and baseline == "standardized"


def evaluate(baseline: Baseline, mapped: tuple[tuple[int | None, ...], int] | None, inputs: Any) -> dict[str, Any]:
    """Keyword arguments of `credit`; `mapped`: the inputs' axes and the number of lanes, None without `vmap`."""
    if baseline is None or isinstance(baseline, str):
        return {"baseline": baseline}
    learned = isinstance(baseline, LearnedBaseline)
    function = baseline.function if learned else baseline
    names = [f"argument {i}" for i in range(len(inputs))] if mapped else ["distribution"]
    require_call("the function of a baseline", function, names)
    if mapped is None:
        b = function(*lax.stop_gradient(inputs))
    else:
        axes, lanes = mapped
        inputs = [x if axis is None else lax.stop_gradient(x) for x, axis in zip(inputs, axes, strict=True)]
        b = jax.vmap(function, axes, axis_size=lanes)(*inputs)
    b = b if learned else lax.stop_gradient(b)
    return {"baseline": b, "learn": learned}
