"""Predictive coding: hidden values first settle between what predicts them and what they predict; then weights learn.

Whittington & Bogacz, "An approximation of the error backpropagation algorithm in a predictive coding network with local
Hebbian synaptic plasticity", Neural Computation 29, 2017. With the predictions mu_l = f_l(z_{l-1}) the energy is

    E(z, w) = sum over l of |z_l - mu_l|^2 / 2  +  loss(last z, w).

Inference follows - dE/dz for some steps, from z_l = mu_l on; then the weights follow - dE/dw. With e_l = z_l - mu_l
both are local (equations 2.9 and 2.13):

    dE/dz_l = e_l - (df_{l+1}/dz_l)' e_{l+1},      dE/dw_l = - (df_l/dw_l)' e_l.

As a propagator: a value node replaces the prediction mu by z. To the message m it answers e + m for z, and it sends
- (derivative of f)' e to the inputs of f. Inference needs many such passes for one message, so the rule takes the
function with its loss as one site, and puts value nodes into it by a second `rewire`.
"""

import functools

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import number, whole
from apgrad._ground.propagator import Propagator
from apgrad._programs import jaxprs
from apgrad.rewiring._layers import Where, chosen
from apgrad.rewiring._rewire import Rule, rewire
from apgrad.rewiring._sites import ProgramSite


def predictive_coding(where: Where, *, steps: int = 20, rate: float = 0.1) -> Rule:
    """The gradients are those of predictive coding's energy, after inference of the hidden values.

    The rule takes the function as a whole, which returns the sum of the examples' losses, a scalar. A mean would make
    the loss weigh less than the errors of the hidden values; divide outside of the rewired function. Another output, or
    a hidden value that is in a `scan` or is several arrays, is a ValueError.

    Args:
      where: the sites whose outputs are hidden values, see `ap.rewiring.Where`: the label of the activation function,
        of a layer under `jax.jit`, or what `checkpoint_name` got.
      steps: of gradient descent on the energy; a ValueError if there are more hidden values in a row than steps.
      rate: the learning rate of this descent, positive. Where it is too large for the energy's curvature or kinks, so
        that the inference more than doubles it, the gradients are NaN: take a smaller rate and more steps.
        `optax.apply_if_finite` leaves out such a minibatch.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> loss = lambda ws, x, y: jnp.sum((jnp.tanh(x @ ws[0]) @ ws[1] - y) ** 2) / 2
      >>> args = [jnp.ones((3, 4)), jnp.ones((4, 2))], jnp.ones((8, 3)), jnp.ones((8, 2))
      >>> [g.shape for g in jax.grad(ap.rewire(loss, ap.rewiring.predictive_coding("tanh")))(*args)]
      [(3, 4), (4, 2)]
    """
    number("rate", rate, positive=True)
    steps = whole("the steps of predictive coding", steps)

    def at(site, params):
        if getattr(site.output, "shape", None) != ():
            raise ValueError(f"predictive coding needs the loss, a scalar sum over examples: {site} has {site.output}")
        weights = range(len(site.inputs) - site.weights, len(site.inputs))
        # The rules are direct, so that their `backward` runs even where no message comes, as before a stop_gradient.
        rule = lambda at: Rule(chosen(where), at, _zeros, direct=True)
        with_values = rewire(site.function, rule(_value_node), argnums=weights)
        predictions = rewire(site.function, rule(_prediction), argnums=weights)
        predicted = rewire(site.function, rule(functools.partial(_prediction, given=True)), argnums=weights)

        def infer(*inputs):
            # The gradient with respect to the prediction rule's parameters, zeros, is the predictions.
            before, first = jax.value_and_grad(predictions)(predictions.init(*inputs), *inputs)
            plan = predictions._plan(inputs)[0]
            if steps < (row := max(_in_a_row(plan, [0] * len(plan.jaxpr.invars)))):
                raise ValueError(
                    f"predictive coding has {row} hidden values in a row, and {steps=}: an error passes one of them in "
                    f"a step, so that it would not reach the first ones. Give steps={row} at least."
                )
            down = lambda z, g: z - rate * jnp.conj(g)
            step = lambda _, z: jax.tree.map(down, z, jax.grad(with_values)(z, *inputs))
            values = jax.lax.fori_loop(0, steps, step, first)
            loss, after = jax.value_and_grad(predicted)(values, *inputs)
            half_square = lambda z: sum(jnp.sum(jnp.abs(x) ** 2).astype(loss.dtype) for x in jax.tree.leaves(z)) / 2
            energy = loss + half_square(jax.tree.map(jnp.subtract, values, after))
            # What oscillates a little in a minibatch is no reason to stop; a descent that diverges grows exponentially.
            rounding = float(jnp.finfo(loss.dtype).eps) * half_square(first)
            return values, energy <= before + jnp.abs(before) + rounding

        def backward(inputs, message):
            values, lower = infer(*inputs)
            message = jnp.where(lower, message, jnp.nan)
            _, pullback = jax.vjp(lambda *inputs: with_values(values, *inputs), *inputs)
            sent = lambda x, gradient: message.astype(gradient.dtype) * gradient if jaxprs.is_inexact(x) else None
            return tuple(map(sent, inputs, pullback(jnp.ones_like(message))))

        return Propagator(lambda *inputs: (site.function(*inputs), inputs), backward)

    return Rule(lambda site: site.kind == "function", at)


def _in_a_row(plan: jaxprs.Program, before: list[int]) -> list[int]:
    """How many sites are on the longest way to each output of a plan, given how many are before its inputs."""

    def apply(step, before):
        inside = [_in_a_row(p, before[len(before) - len(p.jaxpr.invars) :]) for p in step.plans]
        here = [max(before, default=0) + (step.site is not None)] * len(step.outvars)
        return map(max, *inside, inside[0]) if inside else here

    return jaxprs.evaluate(plan, before, apply, lambda constant: 0)


def _zeros(site: ProgramSite) -> jax.Array:
    if isinstance(site.output, tuple) or site.repeated:
        reason = "is in a scan, which would give all of its steps one value" if site.repeated else "is several arrays"
        raise ValueError(f"the hidden value of {site} {reason}; predictive coding cannot infer it")
    return jnp.zeros(site.output.shape, site.output.dtype)


def _value_node(site: ProgramSite, value: jax.Array) -> Propagator:
    """The output is the value; the messages are the derivatives of |value - prediction|^2 / 2 and of what follows."""

    def forward(*inputs):
        prediction, pullback = jax.vjp(site.function, *inputs)
        return value, (jnp.conj(value - prediction), pullback)

    def backward(memory, message, *result):
        error, pullback = memory
        return message + error, *pullback(-error)

    return Propagator(forward, backward)


def _prediction(site: ProgramSite, value: jax.Array, given: bool = False) -> Propagator:
    """The output is the prediction, or the value if that is given; the message to the value is the prediction."""

    def forward(*inputs):
        prediction = site.function(*inputs)
        return value if given else prediction, (prediction, inputs)

    return Propagator(forward, lambda memory, message, *result: (memory[0], *(None for _ in memory[1])))
