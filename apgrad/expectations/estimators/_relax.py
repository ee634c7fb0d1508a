"""RELAX: a learned function of a relaxation of the choice as control variate.

The control variate of `_control_variate.py` (Grathwohl et al., ICLR 2018) with any differentiable function k, such as a
small network, that learns to make the variance small. The continuation is evaluated once and may be a black box.

Where the cost depends on more than the choice, such as an image, k should see that too: `relax(control, x)` gives k the
x of its lane. Nothing is biased, since k may be any function that does not depend on the choice's noise.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from apgrad._ground.primitives import refuse_derivative
from apgrad._programs.jaxprs import arrays_of, hoist
from apgrad.expectations._lanes import require_lanes
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator
from apgrad.expectations.estimators._control_variate import with_control_variate
from apgrad.expectations.estimators._discrete import choices

_CLOSURE = (
    "the control of relax closes over an array that is differentiated, which would get the gradient of the variance "
    "instead of its own. Make what is trained a leaf of the control, which is a pytree (an NNX module, or "
    "jax.tree_util.Partial(function, parameters)), and wrap in jax.lax.stop_gradient what is not."
)


def relax(control: Callable[..., Any], *given: Any) -> ChoiceEstimator:
    """RELAX, for Bernoulli and categorical choices; `ap.choose` takes it.

    With a control that is not trained the variance can be hundreds of times that of `rloo(4)`: there is no other
    baseline. Give the control as an argument of the objective, and train it, or take `rloo` or `disarm`.

    Args:
      control: `(z, *given) -> scalar`, differentiable; z is one lane's relaxation, of the shape of its logits and
        float32 at least. A Bernoulli choice is 1 where z > 0, a categorical one the argmax over the last axis. As an
        argument of the objective, a callable pytree (an NNX module) gets the gradient of the variance, to be descended.
      *given: pytrees (lanes, ...); the control gets its lane's. They are held fixed, and must not depend on the choice.

    Raises:
      TypeError: for another distribution, and a control that cannot be called or closes over what is differentiated.
      ValueError: at trace time, for a control that jumps or whose value is no scalar, or `given` without the lanes.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap, numpyro.distributions as dist
      >>> def program(tape, logit, scale):
      ...     d = dist.Bernoulli(logits=jnp.broadcast_to(logit, (tape.lanes,)))
      ...     control = jax.tree_util.Partial(lambda scale, z: scale * jax.nn.sigmoid(z), scale)
      ...     return ap.choose(tape, d, lambda x: ((x - 0.45) ** 2, None), ap.relax(control))[0]
      >>> gradient, descent = jax.jit(ap.grad(program, lanes=20_000, argnums=(1, 2)))(jax.random.key(0), 0.0, 0.0)
      >>> float(gradient).__round__(2), bool(descent < 0)
      (0.03, True)
    """
    if not callable(control):
        raise TypeError(f"relax takes a function of one lane's relaxation, got {type(control).__name__}")

    def estimate(distribution, key, costs):
        require_lanes("relax", distribution.batch_shape[0], given)
        held = lax.stop_gradient(given)

        def controlled(control, z):
            arrays, restore = arrays_of(control, (jax.Array,))
            of_arrays = lambda arrays, z, held: jax.vmap(restore(*arrays))(z, *held)
            converted, closed_over = hoist(of_arrays, arrays, z, held)
            value = converted(arrays, z, held, *refuse_derivative(closed_over, _CLOSURE))
            if value.shape != z.shape[:1]:
                raise ValueError(f"relax: the control must return a scalar for one lane, got shape {value.shape[1:]}")
            return value

        made, at_outcomes = choices("relax", distribution), lambda x: costs(x[None])[0]
        return with_control_variate("relax", made, key, at_outcomes, controlled, control)

    assumptions = "The control and what it is given depend on the choice through z alone."
    return ChoiceEstimator("relax", estimate, lambda distribution: 1, "none", assumptions, every_order=True)
