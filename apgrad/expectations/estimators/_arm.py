"""ARM: augment, REINFORCE, merge, for Bernoulli choices.

Yin & Zhou, "ARM: augment-REINFORCE-merge gradient for stochastic binary networks", ICLR 2019, theorem 1. With logits
phi (one or many choices), u uniform on (0, 1) and one u a choice,

    d/dphi E[c(x)] = E[(c(1[u > sigmoid(-phi)]) - c(1[u < sigmoid(phi)])) (u - 1/2)].

*Derivation.* For one choice the right side is the integral of (c(x') - c(x)) (u - 1/2), with x' = 1[u > 1 - p] and x =
1[u < p], that is p (1 - p) (c(1) - c(0)): the derivative with respect to the logit. With many choices this holds for
each given the others, since x and x' are both samples: x goes on, and the cost is the mean over both.
"""

from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator
from apgrad.expectations.estimators._disarm import antithetic


def arm() -> ChoiceEstimator:
    """Augment-REINFORCE-merge, for Bernoulli choices; `ap.choose` takes it. `disarm()` never varies more.

    Another distribution is a `TypeError` at trace time, and so is differentiating twice.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> program = lambda tape, p: ap.choose(tape, dist.Bernoulli(probs=p), lambda x: (x, None), ap.arm())[0]
      >>> float(jax.jit(ap.grad(program, lanes=10_000))(jax.random.key(0), jnp.full(10_000, 0.5)).sum()).__round__(1)
      1.0
    """
    return antithetic("arm", lambda u, p, x, other: 0.5 - u)
