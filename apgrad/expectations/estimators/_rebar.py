"""REBAR: the continuation at a relaxation of the choice as control variate.

Tucker, Mnih, Maddison, Lawson & Sohl-Dickstein, "REBAR: low-variance, unbiased gradient estimates for discrete latent
variable models", NeurIPS 2017. The control variate of `_control_variate.py` with

    k(z) = eta c(sigmoid(z / temperature))     or     eta c(softmax(z / temperature)),

the cost of relaxed choices (Maddison et al., 2017; Jang et al., 2017). A low temperature brings the relaxation near to
the choice, with wild derivatives. What the continuation depends on besides x gets its derivative from c(x) alone.
"""

from typing import Any

import jax.numpy as jnp

from apgrad._ground.arguments import number
from apgrad.expectations._distributions import float_dtype
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator, fixed
from apgrad.expectations.estimators._control_variate import with_control_variate
from apgrad.expectations.estimators._discrete import choices, relaxable


def rebar(temperature: Any = 0.5, eta: Any = 1.0) -> ChoiceEstimator:
    """REBAR, for Bernoulli and categorical choices; `ap.choose` takes it.

    The continuation is given floating-point outcomes, one-hot for a category, and values between them. So its cost must
    be differentiable in x: a cost that jumps, as by a cast to integers, is a `ValueError`, and another distribution a
    `TypeError`. There is a warning where two formulas of x may not meet, as in `where(x > 0.5, x + 1, x - 1)`.

    Args:
      temperature: the temperature of the relaxation, a positive scalar; others are a `ValueError`.
      eta: the coefficient of the control variate, a scalar. As arguments of the objective, `eta` and `temperature` (by
        its logarithm, so that it stays positive) get the gradient of the estimate's variance, to be descended.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logit, eta):
      ...     d = dist.Bernoulli(logits=jnp.broadcast_to(logit, (tape.lanes,)))
      ...     return ap.choose(tape, d, lambda x: ((x - 0.45) ** 2, None), ap.rebar(0.5, eta))[0]
      >>> gradient, descent = jax.jit(ap.grad(program, lanes=20_000, argnums=(1, 2)))(jax.random.key(0), 0.0, 0.0)
      >>> float(gradient).__round__(2), bool(descent < 0)     # (.55^2 - .45^2) / 4; a larger eta has less variance
      (0.03, True)
    """
    number("the temperature of rebar", temperature, positive=True)

    def estimate(distribution, key, costs):
        made = choices("rebar", distribution)
        continued = fixed(lambda x: costs(x[None])[0])

        def control(parameters, z):
            hot, scale = parameters
            cost = continued(made.squash(z / jnp.asarray(hot, z.dtype)).astype(float_dtype(distribution, float)))
            return jnp.asarray(scale, cost.dtype) * cost

        at_outcomes = lambda x: costs(relaxable(distribution, x)[None])[0]
        return with_control_variate("rebar", made, key, at_outcomes, control, (temperature, eta))

    assumptions = "The continuation's cost is differentiable in relaxed outcomes."
    return ChoiceEstimator("rebar", estimate, lambda _: 2, "none", assumptions, relaxed=True, every_order=True)
