"""What is not to be trained comes out of every outer gradient and of every optimizer with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from apgrad import meta, mplp
from apgrad.meta._partition import is_fixed
from tests.meta.test_outer import ALL

TASK = meta.sinusoid(sizes=(1, 1), batch=4, held_out=5)
FORMS = jax.eval_shape(lambda key: (TASK.prior(key), TASK.batch(TASK.draw(key), key)), jax.random.key(0))
SITES = mplp.sites(TASK.network, *FORMS)
RULES = {
    "per synapse": lambda: mplp.PerSynapse(
        SITES, message_size=2, hidden=2, layers=(3,), cell="mlp", share=True, rngs=nnx.Rngs(0)
    ),
    "thesis, fixed rate": lambda: mplp.Thesis(SITES, message_size=2, hidden=3, learn_rate=False, rngs=nnx.Rngs(0)),
}
OUTER = ALL | {
    "batched": lambda p: meta.batched(meta.clipped(meta.truncated(p, 1)), 2),
    "average": lambda p: meta.average([meta.evolution(p), meta.reverse_mode(p)]),
}


def fixed_values(theta):
    return [x[...] for x in jax.tree.leaves(theta, is_leaf=is_fixed) if is_fixed(x)]


def rule_of(name):
    """A rule with values that no accident keeps: also a negative zero, whose sign an addition of zero loses."""
    rng = np.random.default_rng(0)
    rule = jax.tree.map(lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape), x.dtype), RULES[name]())
    for x in jax.tree.leaves(rule, is_leaf=is_fixed):
        if is_fixed(x) and x[...].size > 1:
            x[...] = x[...].at[0].set(-0.0)
    return rule


def bits(values):
    return [np.asarray(x).tobytes() for x in values]


@pytest.mark.parametrize(("name", "learns"), [("per synapse", False), ("thesis, fixed rate", True)])
def test_training_leaves_it_alone(name, learns):
    """In two steps by an outer gradient that perturbs and an optimizer that decays all that they are given."""
    rule = rule_of(name)

    def step(theta, s):  # its losses depend on every number of the rule, also on those that are fixed
        s = 0.5 * jnp.sin(s) + sum(jnp.mean(jnp.sin(x + 0.3)) for x in jax.tree.leaves(theta))
        return s, jnp.sum(s**2)

    problem = meta.Problem(lambda theta, key: jnp.ones(2), step, lambda theta, s: jnp.sum(s), 2)
    if learns:
        problem = meta.inner_problem(TASK, meta.message_passing(TASK.network), 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.5))
    with jax.numpy_dtype_promotion("standard"):  # which optax's adamw needs
        done = meta.train(meta.evolution(problem), optimizer, rule, jax.random.key(3), 2, every=2, progress=False)
    assert int(done.skipped) == 0 and fixed_values(rule)
    assert bits(fixed_values(done.theta)) == bits(fixed_values(rule))
    assert jax.tree.structure(done.theta) == jax.tree.structure(rule)
    for a, b in zip(*(jax.tree.leaves(meta.partition(x)[0]) for x in (done.theta, rule)), strict=True):
        assert jnp.any(a != b)  # what is trained has moved, all of it


@pytest.mark.parametrize("name", OUTER)
def test_the_loss_sees_it_and_the_gradient_has_zeros(name):
    """A recurrence whose loss depends on a fixed number, without a stop_gradient in it."""
    theta = {"w": jnp.ones(3), "fixed": nnx.BatchStat(jnp.asarray([2.0, 3.0]))}
    seen = []

    def step(theta, s):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), theta["fixed"][...])
        s = 0.5 * s * theta["fixed"][...][0] * jnp.mean(theta["w"])
        return s, jnp.sum(theta["fixed"][...] * s)

    outer = OUTER[name](meta.Problem(lambda theta, key: jnp.ones(2), step, lambda theta, s: jnp.sum(s), 2))
    _, gradient, _ = jax.jit(lambda theta, key: outer(theta, key, outer.init(theta, key)))(theta, jax.random.key(0))
    jax.block_until_ready(gradient)
    jax.effects_barrier()
    assert bits([gradient["fixed"][...]]) == bits([jnp.zeros(2)])
    assert jnp.all(gradient["w"] != 0)
    assert seen and all(np.array_equal(x, [2.0, 3.0]) for one in seen for x in one.reshape(-1, 2))


def test_parts_make_the_whole():
    theta = {"rule": rule_of("per synapse"), "none": None, "prior": [jnp.ones(2)]}
    parts = meta.partition(theta)
    assert sum(len(jax.tree.leaves(part)) for part in parts) == len(jax.tree.leaves(theta))
    whole = meta.merge(*parts)
    assert jax.tree.structure(whole) == jax.tree.structure(theta)
    assert bits(jax.tree.leaves(whole)) == bits(jax.tree.leaves(theta))
