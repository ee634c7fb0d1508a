"""A policy that learns through contacts: the puck's physics, the actor-critic's targets, and a tiny run."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.parts import actor_critic, puck


def test_the_puck_keeps_its_energy_without_dampers(monkeypatch):
    monkeypatch.setattr(puck, "DAMPING", 0.0)
    monkeypatch.setattr(puck, "DT", 2e-4)
    body = lambda s, _: ((after := puck.step(s, jnp.zeros(2))), after)
    path = jax.jit(lambda s: jax.lax.scan(body, s, length=3000)[1])(jnp.array([1.6, 0.1, -1.5, 0.3]))
    p, v = np.split(np.asarray(path, np.float64), 2, axis=1)
    posts = np.maximum(puck.RADIUS - np.linalg.norm(p[:, None] - puck.POSTS, axis=-1), 0)
    walls = np.maximum(np.abs(p) - puck.BOX, 0)
    stored = puck.STIFFNESS / 2 * (np.sum(posts**2, 1) + np.sum(walls**2, 1))
    energy = stored + np.sum(v**2, 1) / 2
    assert np.count_nonzero(np.diff(stored > 0)) >= 4  # it goes into contacts and out again
    np.testing.assert_allclose(energy, energy[0], rtol=0.02)


def test_a_contact_begins_without_a_jump_and_a_post_scatters():
    at = lambda depth, height: jnp.array([1 + puck.RADIUS - depth, height, -2.0, 0.0])
    end = jax.jit(jax.vmap(lambda s: jax.lax.scan(lambda s, _: (puck.step(s, jnp.zeros(2)), None), s, length=6)[0]))
    before, after, upper, lower = end(jnp.stack([at(-1e-5, 0.0), at(1e-5, 0.0), at(-0.1, 0.01), at(-0.1, -0.01)]))
    np.testing.assert_allclose(before, after, atol=2e-4)
    assert before[2] > 1.5 and upper[3] > 0.05 > -0.05 > lower[3]


def test_targets_of_the_critic_are_those_of_td_lambda():
    costs, values = jax.random.normal(jax.random.key(0), (2, 4, 3))
    found, gamma, lam = actor_critic.goals(costs, values), actor_critic.GAMMA, actor_critic.LAMBDA
    for t in range(4):  # sums of k costs and a value, with weights (1 - lambda) lambda^(k-1), and the rest for the last
        some = [sum(gamma**i * costs[t + i] for i in range(k)) + gamma**k * values[t + k - 1] for k in range(1, 5 - t)]
        weights = [(1 - lam) * lam**k for k in range(len(some) - 1)] + [lam ** (len(some) - 1)]
        np.testing.assert_allclose(found[t], sum(w * x for w, x in zip(weights, some, strict=True)), rtol=1e-5)


def test_the_actors_first_update_is_that_of_the_windows_cost():
    # With one window an episode and Adam's first step, which has the gradient's signs, the policy moves by the rate.
    system = actor_critic.System(
        lambda key, lanes: jax.random.normal(key, (lanes, 1)), lambda policy, s, key: s * policy, lambda s: s[..., 0], 2
    )
    init, step = actor_critic.learner(system, lambda key: jnp.float32(0.5), 4, 2, 3, 10.0)
    with jax.numpy_dtype_promotion("standard"):
        first = init(jax.random.key(0))
        after = jax.jit(step)(first, jax.random.key(1), jnp.float32(0.1))
    begun = system.start(jax.random.split(jax.random.split(jax.random.key(1), 1)[0], 3)[1], 4)
    slope = jnp.mean(begun) * (1 + actor_critic.GAMMA * 2 * 0.5)
    np.testing.assert_allclose(after[0], 0.5 - 0.1 * np.sign(slope), rtol=1e-3)
    assert after[6].tolist() == [0] * 4
