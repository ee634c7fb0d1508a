"""REBAR and RELAX: a control variate along a relaxation of the choice, trained on the variance.

Grathwohl, Choi, Wu, Roeder & Duvenaud, "Backpropagation through the void: optimizing control variates for black-box
gradient estimation", ICLR 2018, equation 7 and appendix A. A discrete choice is x = H(z) of a continuous z: a Bernoulli
one with logit phi, or a categorical one with log-probabilities phi_i,

    z = phi + logit(u),  x = 1[z > 0],            z_i = phi_i - log(-log u_i),  x = argmax z_i.

Let z' be another z with the same x, drawn from p(z | x), and k any function. Then E[k(z)] = E_x[E[k(z') | x]] for every
theta, so that with z and z' differentiable in theta, and e the exponential of a zero with the derivatives of log p(x),

    k(z) - k(z') e                                                                                    (*)

has expectation 0, with all of its derivatives: a control variate for c(x) e. It enters as a zero with its derivatives.

*The conditional relaxation, from the same noise* (Tucker et al., 2017, appendix: the coupling). Given x, z is a fixed
function of noise w whose distribution does not depend on theta: for Bernoulli choices (x = 1; x = 0 mirrors it)

    z' = softplus(w + softplus(phi)),     w = log(exp(z) - 1) - softplus(phi),

which is logit(v) for a uniform v; for categorical ones the maximum z_x does not depend on theta at all, and

    z'_i = -log(exp(-z_x) + w_i / p_i),     w_i = p_i (exp(-z_i) - exp(-z_x)).

So w may be computed from z itself, held fixed: then z' = z in value, and only the derivatives differ. (*) asks nothing
of how z and z' depend on each other; sharing the noise takes away the variance between them.

*Training.* The gradient g of the lane's cost with respect to phi has a mean that does not depend on k, so the
derivative of |g|^2 with respect to the parameters of k estimates that of the variance. It enters as a zero with this
derivative, with phi and all else held fixed; in the estimate k's own parameters are held fixed.

## REBAR: the continuation at a relaxation of the choice as control variate.

Tucker, Mnih, Maddison, Lawson & Sohl-Dickstein, "REBAR: low-variance, unbiased gradient estimates for discrete latent
variable models", NeurIPS 2017. The control variate above with

    k(z) = eta c(sigmoid(z / temperature))     or     eta c(softmax(z / temperature)),

the cost of relaxed choices (Maddison et al., 2017; Jang et al., 2017). A low temperature brings the relaxation near to
the choice, with wild derivatives. What the continuation depends on besides x gets its derivative from c(x) alone.

## RELAX: a learned function of a relaxation of the choice as control variate.

The control variate above with any differentiable function k, such as a
small network, that learns to make the variance small. The continuation is evaluated once and may be a black box.

Where the cost depends on more than the choice, such as an image, k should see that too: `relax(control, x)` gives k the
x of its lane. Nothing is biased, since k may be any function that does not depend on the choice's noise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.arguments import number
from apgrad._ground.primitives import refuse_derivative, zero_with_gradient
from apgrad._programs.jaxprs import arrays_of, hoist
from apgrad.expectations._distributions import float_dtype
from apgrad.expectations._lanes import require_lanes
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator, fixed, per_lane
from apgrad.expectations.estimators._discrete import Choices, choices, relaxable, within_floats


def relaxed(choices: Choices, key: jax.Array) -> tuple[jax.Array, Callable[[Any], Any], Callable[[Any], Any]]:
    """A sample x, integers (lanes, *rest), and z and z' as functions of the logits."""
    phi = lax.stop_gradient(choices.logits)
    dtype = phi.dtype
    u = jax.random.uniform(key, phi.shape, dtype, minval=jnp.finfo(dtype).tiny)
    if choices.categorical:
        z = phi - jnp.log(-jnp.log(u))
        x = jnp.argmax(z, axis=-1)
        most = jnp.max(z, axis=-1, keepdims=True)
        chosen = jax.nn.one_hot(x, phi.shape[-1], dtype=bool)
        w = phi - z + jnp.log(-jnp.expm1(jnp.where(chosen, -1, z - most)))  # log w_i
        given = lambda phi: jnp.where(chosen, most, -jnp.logaddexp(-most, w - phi))
    else:
        z = phi + (jnp.log(u) - jnp.log1p(-u))
        x, size = (z > 0).astype(jnp.result_type(int)), jnp.abs(z)
        sign = jnp.where(z > 0, 1, -1).astype(dtype)
        w = size + jnp.log(-jnp.expm1(-size)) - jax.nn.softplus(sign * phi)
        given = lambda phi: sign * jax.nn.softplus(w + jax.nn.softplus(sign * phi))
    return x, lambda phi: z + zero_with_gradient(phi), lambda phi: z + zero_with_gradient(given(phi))


def second_moment(surrogate: Callable[[Any], Any], choices: Choices) -> jax.Array:
    """|g|^2 of each lane, (lanes,), with g the gradient of the lane's cost with respect to its logits.

    The surrogate's categorical logits are logarithms of probabilities, in all directions but those of their sum.
    """
    normalized = jax.nn.log_softmax if choices.categorical else lambda phi: phi
    return per_lane(jax.grad(lambda phi: jnp.sum(surrogate(normalized(phi))))(lax.stop_gradient(choices.logits)) ** 2)


def with_control_variate(
    choices: Choices, key: jax.Array, costs: Callable[[Any], Any], control: Callable[[Any, Any], Any], parameters: Any
) -> tuple[jax.Array, jax.Array]:
    """The sample and its cost; in `control(parameters, z)`, (lanes,), nothing but these two may have a derivative."""
    choices = choices._replace(logits=within_floats(choices.logits))
    x, unconditional, conditional = relaxed(choices, key)
    cost = costs(x)

    def surrogate(phi, parameters, cost):
        zero = zero_with_gradient(per_lane(choices._replace(logits=phi).log_prob(x))).astype(cost.dtype)
        weight = jnp.exp(zero)
        free, given = (control(parameters, z(phi)).astype(cost.dtype) for z in (unconditional, conditional))
        return cost * weight + zero_with_gradient(free - given * weight)

    held = jax.tree.map(lambda p: lax.stop_gradient(p) if isinstance(p, jax.Array) else p, parameters)
    estimate = surrogate(choices.logits, held, cost)
    if any(isinstance(p, jax.Array) for p in jax.tree.leaves(parameters)):
        of_logits = lambda phi: surrogate(phi, parameters, lax.stop_gradient(cost))
        estimate = estimate + zero_with_gradient(second_moment(of_logits, choices)).astype(cost.dtype)
    return x, estimate


def rebar(temperature: Any = 0.5, eta: Any = 1.0) -> ChoiceEstimator:
    """REBAR, for Bernoulli and categorical choices; `ap.choose` takes it.

    The continuation is given floating-point outcomes, one-hot for a category, and values between them. So its cost must
    be differentiable in x; `ap.choose` warns of a cast to integers. Another distribution is a `TypeError`.

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
        return with_control_variate(made, key, at_outcomes, control, (temperature, eta))

    assumptions = "The continuation's cost is differentiable in relaxed outcomes."
    return ChoiceEstimator("rebar", estimate, lambda _: 2, "none", assumptions, relaxed=True, every_order=True)


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
      *given: pytrees (lanes, ...), one lane's for the control. They are held fixed, and must not depend on the choice.

    Raises:
      TypeError: for another distribution, and a control that cannot be called or closes over what is differentiated.
      ValueError: at trace time, for a control whose value is no scalar, or `given` without the lanes.

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
        return with_control_variate(made, key, at_outcomes, controlled, control)

    assumptions = "The control and what it is given depend on the choice through z alone."
    return ChoiceEstimator("relax", estimate, lambda distribution: 1, "none", assumptions, every_order=True)
