"""What REBAR and RELAX share: a control variate along a relaxation of the choice, trained on the variance.

Grathwohl, Choi, Wu, Roeder & Duvenaud, "Backpropagation through the void: optimizing control variates for black-box
gradient estimation", ICLR 2018, equation 7 and appendix A. A discrete choice is x = H(z) of a continuous z: a Bernoulli
one with logit phi, or a categorical one with log-probabilities phi_i,

    z = phi + logit(u),  x = 1[z > 0],            z_i = phi_i - log(-log u_i),  x = argmax z_i.

Let z' be another z with the same x, drawn from p(z | x), and k any function. Then E[k(z)] = E_x[E[k(z') | x]] for every
theta, so that with z and z' differentiable in theta, and e the exponential of a zero with the derivatives of log p(x),

    k(z) - k(z') e                                                                                    (*)

has expectation 0, with all of its derivatives: a control variate for c(x) e. It enters as a zero with its derivatives.
Pathwise derivatives of k miss the jumps of k, k(z') e does not: a k that jumps where x does takes away the gradient.

*The conditional relaxation, from the same noise* (Tucker et al., 2017, appendix: the coupling). Given x, z is a fixed
function of noise w whose distribution does not depend on theta: for Bernoulli choices (x = 1; x = 0 mirrors it)

    z' = softplus(w + softplus(phi)),     w = log(exp(z) - 1) - softplus(phi),

which is logit(v) for a uniform v; for categorical ones the maximum z_x does not depend on theta at all, and

    z'_i = -log(exp(-z_x) + w_i / p_i),     w_i = p_i (exp(-z_i) - exp(-z_x)).

So w may be computed from z itself, held fixed: then z' = z in value, and only the derivatives differ. (*) asks nothing
of how z and z' depend on each other; sharing the noise takes away the variance between them.

*Training.* The gradient g of the lane's cost with respect to phi has a mean that does not depend on k, so the
derivative of |g|^2 with respect to the parameters of k estimates that of the variance. It enters as a zero with this
derivative, with phi and all else held fixed; in (*) the parameters of k are held fixed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.primitives import zero_with_gradient
from apgrad._ground.warning import warn
from apgrad._programs.jaxprs import trace
from apgrad.expectations._distributions import without_validation
from apgrad.expectations._programs.jumps import Jump, jump
from apgrad.expectations.estimators._choice_estimator import per_lane
from apgrad.expectations.estimators._discrete import Choices, within_floats


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

    Categorical logits are normalized for the surrogate, and g is the gradient with respect to those before that.
    """
    normalized = jax.nn.log_softmax if choices.categorical else lambda phi: phi
    return per_lane(jax.grad(lambda phi: jnp.sum(surrogate(normalized(phi))))(lax.stop_gradient(choices.logits)) ** 2)


def with_control_variate(
    what: str, choices: Choices, key: jax.Array, costs: Callable[..., Any], control: Callable[..., Any], parameters: Any
) -> tuple[jax.Array, jax.Array]:
    """The sample and its cost; `control(parameters, z)`, (lanes,), depends on nothing else that is differentiated."""
    choices = choices._replace(logits=within_floats(choices.logits))
    x, unconditional, conditional = relaxed(choices, key)
    cost = costs(x)

    def value(parameters, z):
        with without_validation():  # else a log_prob in the control is -inf between outcomes
            return control(parameters, z).astype(cost.dtype)

    def surrogate(phi, parameters, cost):
        zero = zero_with_gradient(per_lane(choices._replace(logits=phi).log_prob(x))).astype(cost.dtype)
        weight = jnp.exp(zero)
        free, given = (value(parameters, z(phi)) for z in (unconditional, conditional))
        return cost * weight + zero_with_gradient(free - given * weight)

    found = jump(trace(lambda z: value(parameters, z), choices.logits)[0])
    instead = "Write it, or rebar's cost, without comparisons and integers (a product with a one-hot vector)"
    if found == Jump.MAY_JUMP:
        why = "chooses between two formulas by a comparison of relaxed outcomes: the gradient is wrong if it jumps"
        warn(f"{what}: the control variate {why}. {instead}, by jnp.maximum or a function of jax.nn.")
    elif found > Jump.MAY_JUMP:
        why = "jumps between the outcomes, so that the gradient would be wrong"
        raise ValueError(f"{what}: the control variate {why}. {instead}, or use rloo() or disarm().")
    held = jax.tree.map(lambda p: lax.stop_gradient(p) if isinstance(p, jax.Array) else p, parameters)
    estimate = surrogate(choices.logits, held, cost)
    if any(isinstance(p, jax.Array) for p in jax.tree.leaves(parameters)):
        of_logits = lambda phi: surrogate(phi, parameters, lax.stop_gradient(cost))
        estimate = estimate + zero_with_gradient(second_moment(of_logits, choices)).astype(cost.dtype)
    return x, estimate
