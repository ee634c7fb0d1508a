"""The experiments on contact and policy search: closed forms of their systems, the puck, the actor-critic."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

import apgrad as ap
from experiments import contact, policy_search, policy_search_cartpole as cartpole
from experiments.parts import actor_critic, policies, puck

KEY = jax.random.key(0)


def test_the_pathwise_bias_of_the_ball_is_the_jump_times_its_density():
    # d/dtheta E f = E f' + the sum of the jumps times the density where they are; the wall is cleared at two angles.
    clears = lambda a: contact.WALL * np.tan(a) - contact.WALL**2 / (2 * np.cos(a) ** 2) - contact.HEIGHT
    theta = 0.55
    jumps = 0.0
    for angle, sign in ((brentq(clears, 0.3, 0.8), -1), (brentq(clears, 0.8, 1.4), 1)):
        jumps += sign * (np.sin(2 * angle) - contact.WALL) * norm.pdf(angle, theta, contact.THROW)
    smooth = contact.gradients("ball", "RP", theta, 200_000, 2, 0).mean()
    assert contact.exact_ball(theta) == pytest.approx(smooth + jumps, abs=0.01)
    unbiased = contact.gradients("ball", "LR", theta, 10_000, 100, 0)
    error = unbiased.std() / len(unbiased) ** 0.5
    assert abs(unbiased.mean() - contact.exact_ball(theta)) < 4 * error
    assert abs(jumps) > 50 * error


def test_the_stop_takes_speed_and_keeps_the_place():
    q, v = contact.pendulum_step(jnp.array([0.0, 0.0]), jnp.array([contact.STOP - 1e-4, 1.0]))
    free = 1.0 - contact.DT * np.sin(contact.STOP)
    np.testing.assert_allclose(v, -free / 2, rtol=1e-3)
    np.testing.assert_allclose(contact.STOP - q, contact.DT * free / 2, rtol=1e-3)


def test_first_success():
    curves = np.array([[3.0, 1.0, 2.0, 0.5], [3.0, 3.0, 3.0, 3.0], [0.0, 3.0, 3.0, 3.0]])
    assert policies.first_success(curves, 1.0, every=10).tolist() == [20, np.inf, 10]


def test_short_horizons_stop_the_gradient():
    # With a segment as long as the rollout nothing is stopped; with shorter ones the gradient moves, the value stays.
    policy = policies.policy(policy_search.LORENZ, 4, KEY)
    values = {}
    for segment in (0, 6, 2):
        method = policy_search.METHODS["RP"]._replace(segment=segment)
        function = ap.value_and_grad(policies.program(policy_search.LORENZ, method, "every step", 6), 8)
        values[segment] = jax.jit(function)(KEY, policy)
    for other, equal in ((6, True), (2, False)):
        assert float(values[other][0]) == pytest.approx(float(values[0][0]), rel=1e-6)
        pairs = zip(*(jax.tree.leaves(values[s][1]) for s in (0, other)), strict=True)
        assert all(np.allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6) for a, b in pairs) == equal


def test_the_cart_pole_keeps_its_energy(monkeypatch):
    monkeypatch.setattr(cartpole, "FRICTION", 0.0)
    monkeypatch.setattr(cartpole, "SUBSTEPS", 20)
    m, total, length, g = cartpole.POLE, cartpole.CART + cartpole.POLE, cartpole.LENGTH, cartpole.GRAVITY

    def energy(s):  # a uniform rod on a cart: its middle is at half its length, its moment about the hinge m l^2 / 3
        _, v, a, w = np.asarray(s, np.float64)
        moving = total * v**2 / 2 + m * length * v * w * np.cos(a) / 2 + m * length**2 * w**2 / 6
        return moving - m * g * length * np.cos(a) / 2

    states = [jnp.array([0.0, 0.5, 1.0, 2.0])]
    for _ in range(5):
        states.append(cartpole.real_step(states[-1], jnp.float32(0.0)))
    np.testing.assert_allclose([energy(s) for s in states], energy(states[0]), atol=1e-3)


def test_the_model_is_bayesian_linear_regression():
    keys = jax.random.split(KEY, 5)
    basis = jax.random.normal(keys[0], (cartpole.FEATURES, 5)), jax.random.uniform(keys[1], (cartpole.FEATURES,))
    states, forces = jax.random.normal(keys[2], (60, 4)), jax.random.normal(keys[3], (60,))
    changes, used = jax.random.normal(keys[4], (60, 4)), jnp.arange(60) < 50
    _, W, A, v = cartpole.fit(basis, states, forces, changes, used.astype(jnp.float32))
    F = np.asarray(jax.vmap(cartpole.features, (None, 0, 0))(basis, states, forces), np.float64)[:50]
    precision = F.T @ F + cartpole.RIDGE * np.eye(F.shape[1])
    Y = np.asarray(changes, np.float64)[:50]
    expected = F @ np.linalg.solve(precision, F.T @ Y)
    np.testing.assert_allclose(F @ np.asarray(W), expected, atol=0.05)
    np.testing.assert_allclose(v, np.mean((Y - expected) ** 2, axis=0), atol=0.02)
    spread = np.einsum("ni,ij,nj->n", F, np.linalg.inv(precision), F)
    np.testing.assert_allclose(np.einsum("ni,ij,nj->n", F, np.asarray(A, np.float64), F), spread, atol=0.02)


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
    start, step = lambda key, lanes: jax.random.normal(key, (lanes, 1)), lambda policy, s: dist.Delta(s * policy)
    system = policies.System((1, 1), start, step, lambda s: s[..., 0])
    init, step = actor_critic.learner(system, 2, lambda key: jnp.float32(0.5), 4, 2, 3)
    with jax.numpy_dtype_promotion("standard"):
        first = init(jax.random.key(0))
        after = jax.jit(step)(first, jax.random.key(1), jnp.float32(0.1))
    begun = system.start(jax.random.split(jax.random.split(jax.random.key(1), 1)[0], 3)[1], 4)
    slope = jnp.mean(begun) * (1 + actor_critic.GAMMA * 2 * 0.5)
    np.testing.assert_allclose(after[0], 0.5 - 0.1 * np.sign(slope), rtol=1e-3)
    assert after[6].tolist() == [0] * 4
