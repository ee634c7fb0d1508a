"""Compiles one sharded step and prints what it exchanges: the process that `experiments.collectives` starts."""

import functools
import itertools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax.sharding import NamedSharding, PartitionSpec

import apgrad as ap
from apgrad import meta, mplp
from experiments.collectives import STEPS, count

mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
SPREAD, WHOLE = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
COLUMNS = NamedSharding(mesh, PartitionSpec(None, "x"))


def lanes():
    """A gradient of total propagation over 6,400 lanes of a policy of 4,866 parameters."""
    sizes = (8, 64, 64, 2)
    policy = [0.1 * jnp.ones((n, m)) for n, m in itertools.pairwise(sizes)]

    @ap.stochastic(ap.total_propagation())
    def move(policy, x):
        h = x
        for w in policy:
            h = jnp.tanh(h @ w)
        return dist.Normal(0.9 * x + jnp.concatenate([h] * 4), 0.1).to_event(1)

    def episode(tape, policy):
        x = jax.lax.with_sharding_constraint(jnp.ones((tape.lanes, 8)), SPREAD)
        (tape, x), _ = jax.lax.scan(lambda c, _: (move(c[0], policy, c[1]), None), (tape, x), length=STEPS)
        return tape.cost(jnp.sum(x**2, axis=-1))

    return ap.grad(episode, lanes=6400), (jax.random.key(0), policy), (WHOLE, WHOLE), policy


def tasks():
    """An outer gradient by backpropagation through an unroll of 5 steps, 64 tasks."""
    task = meta.sinusoid()
    rule = mplp.load_pretrained("sinusoid")
    problem = meta.inner_problem(task, meta.message_passing(task.network), 5)
    outer = meta.batched(meta.reverse_mode(problem), 64, mesh=mesh)
    return lambda rule, key: outer(rule, key)[1], (rule, jax.random.key(0)), (WHOLE, WHOLE), rule


def model(randomized, sharding):
    """A training step of an MLP, data or weights sharded."""
    weights = [0.05 * jnp.ones((512, 512))] * 4

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    lean = ap.randomize(loss, ap.memory.rounding(bits=4)) if randomized else lambda key, w, x: loss(w, x)
    optimizer = optax.sgd(0.1)

    def step(weights, key, x):
        gradient = jax.grad(lean, argnums=1)(key, weights, x)
        return optax.apply_updates(weights, optimizer.update(gradient, optimizer.init(weights))[0])

    places = {"batch": ([WHOLE] * 4, WHOLE, SPREAD), "weights": ([COLUMNS] * 4, WHOLE, WHOLE)}[sharding]
    return step, (weights, jax.random.key(0), jnp.ones((6400, 512))), places, weights


CASES: dict[str, Any] = {"lanes": lanes, "outer tasks": tasks}
for kind in ("gradient", "randomized model"):
    for sharding in ("batch", "weights"):
        CASES[f"{sharding} of a {kind}"] = functools.partial(model, kind == "randomized model", sharding)


def main(what: str) -> None:
    """Prints the counts as a line of JSON."""
    step, args, places, parameters = CASES[what]()
    compiled = jax.jit(step, in_shardings=places).lower(*args).compile()
    memory: Any = compiled.memory_analysis()
    sizes = {"argument bytes": memory.argument_size_in_bytes, "temp bytes": memory.temp_size_in_bytes}
    sizes["parameter bytes"] = sum(x.nbytes for x in jax.tree.leaves(parameters))
    print(json.dumps(count(compiled.as_text() or "") | sizes))


if __name__ == "__main__":
    main(sys.argv[1])
