"""Programs of a few lines, which several tests of this wing share."""

import jax

import apgrad as ap


def paid(draw, cost=lambda x: x):
    """A program that draws, `draw(tape, *args) -> (tape, x)`, and pays a cost of the sample."""

    def program(tape, *args):
        tape, x = draw(tape, *args)
        return tape.cost(cost(x))

    return program


def rollout(estimator, make, tape, theta, start, length):
    """The tape and the state after so many steps x <- make(theta, x)."""
    step = ap.stochastic(estimator)(make)
    return jax.lax.scan(lambda c, _: (step(c[0], theta, c[1]), None), (tape, start), length=length)[0]
