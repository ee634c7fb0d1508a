import jax
import jax.monitoring
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest

import apgrad as ap

KEY = jax.random.key(0)
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: COMPILED.append(name) if "backend_compile" in name else None
)
ESTIMATORS = {"rp": ap.reparameterization, "lr": ap.likelihood_ratio, "tp": ap.total_propagation}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_calls_without_jit_compile_nothing_again(estimator):
    @ap.stochastic(ESTIMATORS[estimator]())
    def step(theta):
        return dist.Normal(theta, 1.0)

    def program(tape, theta):
        tape, x = step(tape, theta)
        return tape.cost(x**2)

    gradient = jax.grad(ap.expectation(program, 4), argnums=1)
    for i in range(2):
        gradient(jax.random.key(i), 1.0)
    before = len(COMPILED)
    for i in range(3):
        gradient(jax.random.key(i), 1.0)
    # What is compiled again at each call is also kept by JAX at each call: memory would grow.
    assert before > 0 and len(COMPILED) == before
