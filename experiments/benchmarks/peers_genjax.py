"""The problems of `experiments.benchmarks.peers` in GenJAX, whose older JAX needs an environment of its own.

    python peers_genjax.py PROBLEM SAMPLES ESTIMATES SEED ORDER

It imports GenJAX and JAX alone, and prints gradients as JSON, one list an estimate, or what GenJAX raised.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
from genjax.adev import expectation, flip_reinforce  # pyright: ignore[reportMissingImports]

DATA = jnp.array([-1.0, 0.5, 2.0, 2.5, -0.3, 0.8, 1.1, 1.9])
STEPS = 4


def log_bernoulli(logit, x):
    """The log-density of a Bernoulli choice x."""
    return x * jax.nn.log_sigmoid(logit) + (1 - x) * jax.nn.log_sigmoid(-logit)


def data_loss(theta):
    """The negative ELBO of a mixture, a choice for each datum."""
    total = 0.0
    for x, logit in zip(DATA, theta, strict=True):
        z = jnp.where(flip_reinforce(jax.nn.sigmoid(logit)), 1.0, 0.0)
        fit = (x - 2 * z) ** 2 / 2 - jnp.log(jnp.where(z > 0, 0.4, 0.6)) + jnp.log(2 * jnp.pi) / 2
        total += log_bernoulli(logit, z) + fit
    return total


def step(theta, x):
    """One step of the chain: the next state, and the cost."""
    logit = theta[0] - theta[1] * x
    a = jnp.where(flip_reinforce(jax.nn.sigmoid(logit)), 1.0, 0.0)
    after = 0.8 * x + a
    return after, log_bernoulli(logit, a) + jnp.log(2.0) + (after - 1) ** 2


def unrolled_loss(theta):
    """The chain, step by step."""
    x, total = 0.0, 0.0
    for _ in range(STEPS):
        x, cost = step(theta, x)
        total += cost
    return total


def scanned_loss(theta):
    """The chain in `jax.lax.scan`."""
    return jnp.sum(jax.lax.scan(lambda x, _: step(theta, x), 0.0, length=STEPS)[1])


LOSSES = {"data": data_loss, "chain": unrolled_loss, "chain in scan": scanned_loss}


def main():
    """Prints the gradients of the problem that the command line names."""
    problem, samples, estimates, seed, order = sys.argv[1], *map(int, sys.argv[2:6])
    theta = jnp.linspace(-0.4, 0.6, 8) if problem == "data" else jnp.array([0.3, 0.7])
    loss = expectation(LOSSES[problem])
    one = lambda key, theta: loss.grad_estimate(key, (theta,))[0]

    def estimate(key, theta):
        return jnp.mean(jax.vmap(one, (0, None))(jax.random.split(key, samples), theta), 0)

    function = estimate if order == 1 else jax.jacfwd(estimate, argnums=1)
    try:
        many = jax.jit(lambda keys: jax.lax.map(lambda key: function(key, theta), keys, batch_size=100))
        values = many(jax.random.split(jax.random.key(seed), estimates))
        once = jax.jit(estimate)
        once(jax.random.key(0), theta).block_until_ready()
        start = time.process_time()
        for number in range(200):
            once(jax.random.key(number), theta).block_until_ready()
        print(json.dumps({"values": values.tolist(), "seconds": (time.process_time() - start) / 200}))
    except Exception as error:  # whatever it raises is the finding
        print(json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}))


if __name__ == "__main__":
    main()
