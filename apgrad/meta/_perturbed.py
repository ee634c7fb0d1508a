"""Outer gradients by total propagation over perturbed unrolls.

Noise is added to the inner parameters after each step, x_t ~ N(f(theta, x_{t-1}), sigma^2). Each step then has two
estimates of the derivative of E[L(theta; noise)], which differs from L by order sigma^2: pathwise through f, which
explodes where the recurrence is chaotic, and by the likelihood ratio, whose variance grows with T. Total propagation
(Parmas et al., 2018) mixes them at every step by their variance over perturbed unrolls of the same task.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree

from apgrad._ground.arguments import number, unlike, whole
from apgrad.expectations._expectation import expectation
from apgrad.expectations._stochastic import stochastic
from apgrad.expectations.estimators._estimator import Estimator, Mixer
from apgrad.expectations.estimators._total_propagation import total_propagation
from apgrad.expectations.weights import inverse_variance
from apgrad.meta._outer import OuterGradient, of_loss
from apgrad.meta._unroll import Problem, final, step


def perturbed(
    problem: Problem,
    *,
    sigma: float = 0.01,
    unrolls: int = 16,
    estimator: Estimator | Mixer | None = None,
    cross_fit: bool = False,
) -> OuterGradient:
    """The gradient over perturbed unrolls of one task.

    Args:
      problem: the recurrence; `problem.perturb` says which part of the state gets noise. That part is floating point.
      sigma: standard deviation of the noise.
      unrolls: number of perturbed unrolls of the task, the lanes over which total propagation takes variances.
      estimator: how the noise is differentiated; total propagation with the published weights if not given. With
        the default weights of `ap.total_propagation` one of a few chaotic unrolls may get all the weight.
      cross_fit: whether each half of the unrolls is weighed by the other half: unbiased for any number of unrolls.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> step = lambda theta, s: (jnp.sin(theta * s), s**2)
      >>> p = ap.meta.Problem(lambda theta, key: jnp.ones(()), step, lambda theta, s: s**2, 5)
      >>> loss, gradient, _ = jax.jit(ap.meta.perturbed(p))(jnp.float32(2.0), jax.random.key(0))
    """
    number("sigma", sigma, positive=True)
    whole("unrolls", unrolls)
    take, put = problem.perturb
    noisy = stochastic(total_propagation(weights=inverse_variance()) if estimator is None else estimator)

    def loss(theta, key):
        task, noise = jax.random.split(key)

        def program(tape, theta):
            begin = problem.init(theta, task)
            many = lambda x: jnp.broadcast_to(x, (tape.lanes, *jnp.shape(x)))
            state = jax.tree.map(many, begin)
            if found := unlike(take(begin)):
                do = "Say by the problem's `perturb` which part of the state gets noise."
                raise TypeError(f"noise is added to floating-point numbers, and the state{found}. {do}")
            _, unravel = ravel_pytree(take(begin))

            @noisy
            def perturb(theta, state):
                moved, _ = problem.step(theta, state)
                mean, _ = ravel_pytree(take(moved))
                return dist.Normal(mean, jnp.asarray(sigma, mean.dtype)).to_event(1)

            def body(carry, _):
                tape, state = carry
                # The deterministic rest of the state, and the step's loss, come from the step itself; the perturbed
                # part from the node.
                moved, losses = jax.vmap(partial(step, problem), (None, 0))(theta, state)
                tape = tape.cost(losses)
                tape, flat = perturb(tape, theta, state)
                return (tape, jax.vmap(put)(moved, jax.vmap(unravel)(flat))), None

            (tape, state), _ = jax.lax.scan(body, (tape, state), length=problem.length)
            return tape.cost(jax.vmap(partial(final, problem), (None, 0))(theta, state))

        return expectation(program, unrolls, cross_fit=cross_fit, check_nan=False)(noise, theta)

    return of_loss(loss)
