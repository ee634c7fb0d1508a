"""Programs of a few lines, which several tests of this wing share."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

import apgrad as ap

WEIGHTS = {
    "inverse variance": ap.weights.inverse_variance(),
    "local": ap.weights.local_covariance(),
    "suffix": ap.weights.suffix_covariance(),
    "decoupled": ap.weights.decoupled(),
}
PUBLISHED = ap.total_propagation(weights=WEIGHTS["inverse variance"])


def paid(draw, cost=lambda x: x, aux=False):
    """A program that draws, `draw(tape, *args) -> (tape, x)`, and pays a cost of the sample, which may be its aux."""

    def program(tape, *args):
        tape, x = draw(tape, *args)
        tape = tape.cost(cost(x))
        return (tape, x) if aux else tape

    return program


def coins(logits, estimator=ap.likelihood_ratio(), cost=lambda b: b, **options):  # noqa: B008 (a tuple)
    """A program that flips coins of `logits(tape, *args)`, and pays a cost of the numbers 0 and 1."""
    draw = lambda tape, *args: ap.sample(tape, dist.Bernoulli(logits=logits(tape, *args)), estimator, **options)
    return paid(draw, lambda b: cost(b.astype(jnp.float32)))


def rollout(estimator, make, tape, theta, start, length, between=lambda x: x):
    """The tape and the state after so many steps x <- make(theta, x), with ordinary code after each."""
    step = ap.stochastic(estimator)(make)

    def body(carry, _):
        tape, x = step(carry[0], theta, carry[1])
        return (tape, between(x)), None

    return jax.lax.scan(body, (tape, start), length=length)[0]


def walk(estimator, make, length, cost=lambda x: x):
    """A program of so many steps from x = 1, which pays a cost of the last state."""
    return paid(lambda tape, theta: rollout(estimator, make, tape, theta, jnp.ones(tape.lanes), length), cost)


THETA = {"a": jnp.float32(0.9), "b": (jnp.float32(0.3),)}


def linear(theta, x):
    return dist.Normal(theta["a"] * x + theta["b"][0], 0.5)


def linear_rollout(estimator, **options):
    """Four steps of a linear system from x = 1, and the cost x^2 at the end: Gaussian moments in closed form."""

    def draw(tape, theta):
        return rollout(estimator, linear, tape, theta, jnp.ones(tape.lanes, theta["a"].dtype), 4, **options)

    return paid(draw, jnp.square)


@jax.jit
@jax.grad
def linear_truth(theta):
    """The exact gradient."""
    mean, second = 1.0, 0.0
    for _ in range(4):
        mean, second = theta["a"] * mean + theta["b"][0], theta["a"] ** 2 * second + 0.25
    return mean**2 + second
