"""A short-horizon actor-critic of the kind of SHAC (Xu et al., 2022, "Accelerated policy learning with parallel
differentiable simulation"), in plain JAX.

Lanes are simulated for windows of h steps, one window after the other. The actor's loss is that of a window, with what
comes after it valued by a target critic,

    mean over lanes of  sum_{k < h} gamma^k c_{k+1} + gamma^h V'(s_h),

and its derivative is pathwise through the simulator and through V', never farther. Then the critic V is fitted to
TD(lambda) targets of the window, G_k = c_{k+1} + gamma ((1 - lambda) V'(s_{k+1}) + lambda G_{k+1}), G_h = V'(s_h), in
16 passes over four minibatches, and V' moves towards V by .8 of the way; these, gamma = .99 and lambda = .95 are
those of the published settings. Ours are a policy without noise of its own, Adam's usual decays at rates that stay as
they are, .001 for the critic, and, since an episode ends after `horizon` steps, a critic that sees the time and is zero
at the end. Lanes are out of step by whole windows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.parts import networks
from experiments.parts.policies import CLIP, Learning, System, adam

GAMMA, LAMBDA, PASSES, BATCHES, RATE, FOLLOW = 0.99, 0.95, 16, 4, 1e-3, 0.8


def value(critic: networks.Layers, s: jax.Array, left: jax.Array) -> jax.Array:
    """The cost to come of states (..., n) with so much of the episode left, from 0 to 1, (...)."""
    return left * networks.apply(critic, jnp.concatenate([s, left[..., None]], axis=-1))[..., 0]


def goals(costs: jax.Array, values: jax.Array) -> jax.Array:
    """TD(lambda) targets of the states before costs (h, lanes), of the values of the states after them."""

    def back(goal, found):
        cost, after = found
        goal = cost + GAMMA * ((1 - LAMBDA) * after + LAMBDA * goal)
        return goal, goal

    return jax.lax.scan(back, values[-1], (costs, values), reverse=True)[1]


def learner(
    system: System, horizon: int, new_policy: Any, lanes: int, window: int, units: int, warm_up: int = 0
) -> Learning:
    """A step is as many windows as an episode has; the actor's gradients are clipped by their norm."""
    actor, fitting = adam(CLIP, warm_up * (horizon // window)), optax.adam(RATE)

    def init(key):
        policy, (place, begin, other) = new_policy(key), jax.random.split(jax.random.fold_in(key, 1), 3)
        s = system.start(begin, lanes)
        t = window * jax.random.randint(place, (lanes,), 0, horizon // window)
        *hidden, (w, b) = networks.layers(other, (s.shape[1] + 1, units, units, 1))
        critic = [*hidden, (0 * w, b)]  # zero at first
        return policy, actor.init(policy), critic, fitting.init(critic), critic, s, t

    def left(t):
        return (horizon - t) / horizon

    def simulate(policy, target, s, t, key):
        def body(carry, key):
            s, k = carry
            drawn = lambda s, key: jnp.asarray(system.step(policy, s).sample(key))
            s = jax.vmap(drawn)(s, jax.random.split(key, lanes))
            return (s, k + 1), (s, system.cost(s) / horizon)

        (end, _), (states, costs) = jax.lax.scan(body, (s, 0), jax.random.split(key, window))
        future = GAMMA**window * value(target, end, left(t + window))
        return jnp.mean(GAMMA ** jnp.arange(window) @ costs + future), (states, costs)

    def fit(carry, key):
        critic, moments, s, t, wanted = carry

        def batch(carry, chosen):
            critic, moments = carry
            error = lambda critic: jnp.mean((value(critic, s[chosen], left(t[chosen])) - wanted[chosen]) ** 2)
            updates, moments = fitting.update(jax.grad(error)(critic), moments)
            return (optax.apply_updates(critic, updates), moments), None

        order = jax.random.permutation(key, len(wanted)).reshape(BATCHES, -1)
        (critic, moments), _ = jax.lax.scan(batch, (critic, moments), order)
        return (critic, moments, s, t, wanted), None

    def one(state, key, rate):
        policy, moments, critic, fitted, target, s, t = state
        noise, again, passes = jax.random.split(key, 3)
        s = jnp.where((t == 0)[:, None], system.start(again, lanes), s)
        loss = jax.value_and_grad(lambda policy: simulate(policy, target, s, t, noise), has_aux=True)
        (_, (states, costs)), gradient = loss(policy)
        updates, moments = actor.update(gradient, moments)
        policy = optax.apply_updates(policy, jax.tree.map(lambda u: -rate * u, updates))
        times = t + 1 + jnp.arange(window)[:, None]
        values = value(target, states, left(times))
        before = jnp.concatenate([s[None], states[:-1]])
        flat = before.reshape(-1, s.shape[1]), (times - 1).reshape(-1), goals(costs, values).reshape(-1)
        (critic, fitted, *_), _ = jax.lax.scan(fit, (critic, fitted, *flat), jax.random.split(passes, PASSES))
        target = jax.tree.map(lambda old, new: old + FOLLOW * (new - old), target, critic)
        return policy, moments, critic, fitted, target, states[-1], (t + window) % horizon

    def step(state, key, rate):
        keys = jax.random.split(key, horizon // window)
        return jax.lax.scan(lambda state, key: (one(state, key, rate), None), state, keys)[0]

    return Learning(init, step)
