"""One training run of a network with randomized memory, step by step, resumable; see `rad_training`."""

import bisect
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from apgrad import memory as rad
from experiments import harness
from experiments.parts import rad_networks

PUBLISHED_BATCH = {"mlp": 22, "convnet": 20, "rnn": 21, "transformer": 22}


@functools.cache
def residual_bytes(network: str, method: str, fraction: float, size: int, shape: tuple[int, ...]) -> int:
    """What reverse mode remembers of so many examples, measured; see `apgrad.memory.residuals`."""
    params = jax.eval_shape(lambda: rad_networks.parameters(network, jax.random.key(0), shape))
    x, y = jax.ShapeDtypeStruct((size, *shape), jnp.uint8), jax.ShapeDtypeStruct((size,), jnp.int32)
    loss = rad_networks.method_loss(network, method, fraction)
    return sum(r.nbytes for r in rad.residuals(lambda p, x, y: loss(jax.random.key(0), p, x, y), params, x, y))


@functools.cache
def reduced(network: str, fraction: float, batch: int, shape: tuple[int, ...]) -> int:
    """The largest batch of reverse mode that remembers no more than "different" of a batch; 1 at least."""
    budget = residual_bytes(network, "different", fraction, batch, shape)
    # Bytes rise with the examples: the last size that fits.
    measured = lambda n: residual_bytes(network, "baseline", fraction, n, shape)
    return max(1, bisect.bisect_right(range(1, batch + 1), budget, key=measured))


@functools.cache
def _compiled(network: str, method: str, fraction: float, size: int, batch: int, steps: int) -> Any:
    """The compiled step, pairs of exact and noisy gradients, and scores; cached, for all pairs and seeds."""
    loss, exact = (rad_networks.method_loss(network, m, fraction) for m in (method, "baseline"))

    # A call for each step, not a scan: XLA's convolutions on the CPU are 7 to 64 times slower inside a loop; nor many
    # seeds in one program: products of matrices take nearly all of the time.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, total, x, y, start, noise, t, rate, decay):
        chosen = jax.random.randint(jax.random.fold_in(start, t), (size,), 0, len(x))
        key = jax.random.fold_in(noise, t)
        value, gradient = jax.value_and_grad(loss, argnums=1)(key, params, x[chosen], y[chosen])
        updates, state = _optimizer(network, steps, rate, decay).update(gradient, state, params)
        return optax.apply_updates(params, updates), state, total + value

    @jax.jit
    def gradients(params, x, y, noise, pick):
        chosen = jax.random.randint(pick, (batch,), 0, len(x))
        return [jax.grad(f, argnums=1)(noise, params, x[chosen], y[chosen]) for f in (exact, loss)]

    return step, gradients, jax.jit(rad_networks.logits(network))


def _optimizer(network: str, steps: int, rate: Any, decay: Any) -> optax.GradientTransformation:
    if network == "rnn":
        return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))
    schedule = optax.exponential_decay(rate, max(steps // 10, 1), 0.6, staircase=True)
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(schedule))


class Run(NamedTuple):
    """One training."""

    network: str  # its name.
    method: str  # its name.
    fraction: float  # of the entries kept.
    batch: int  # examples of every method but the smaller batches.
    steps: int  # of training.
    pair: tuple[float, ...]  # learning rate and weight decay.
    evaluations: int  # how often train and test sets are looked at.
    draws: int  # of the noise, at each of them.

    def size(self, shape: tuple[int, ...]) -> int:
        """Examples of a batch, of images of a shape."""
        if self.method == "reduced published":
            return PUBLISHED_BATCH[self.network]
        if self.method == "reduced":
            return reduced(self.network, self.fraction, self.batch, shape)
        return self.batch

    def train(self, start: Any, key: Any, sets: Any, checkpoint: harness.Checkpoint | None) -> dict[str, Any]:
        """Trains on the first two arrays of `sets`, evaluates on them and on the last two.

        Returns:
          A row of "curve" is the step, the mean loss of the batches since the last row, loss and accuracy of the
          training set (5,000 of it) and of the test set (all of it in the last row, 2,000 before); "noise" has for each
          of them, and the start, the squared noise over signal by layer and in all.
        """
        x, y = jnp.asarray(sets[0]), jnp.asarray(sets[1])
        size = self.size(x.shape[1:])
        programs = _compiled(self.network, self.method, self.fraction, size, self.batch, self.steps)
        step, gradients, scores = programs
        params = rad_networks.parameters(self.network, start, x.shape[1:])
        rate, decay = (jnp.float32(v) for v in self.pair)
        state = _optimizer(self.network, self.steps, rate, decay).init(params)
        every = self.steps // self.evaluations
        names = [*(str(name) for name in rad_networks.layers(params)), "all"]
        noisy = self.draws > 0 and not self.method.startswith(("baseline", "reduced"))

        def noise(params, key):
            pick, key = jax.random.split(key)
            found = []
            for k in jax.random.split(key, self.draws):
                one, two = (rad_networks.layers(g) for g in gradients(params, x, y, k, pick))
                squares = np.array([(np.sum((one[n] - two[n]) ** 2), np.sum(one[n] ** 2)) for n in one])
                found.append([*(squares[:, 0] / squares[:, 1]), squares[:, 0].sum() / squares[:, 1].sum()])
            return np.mean(found, 0)[None]

        def evaluate(images, labels):
            parts = [scores(params, images[i : i + 500]) for i in range(0, len(images), 500)]
            logs = np.concatenate([np.asarray(jax.nn.log_softmax(p)) for p in parts])
            labels = np.asarray(labels)
            return -logs[np.arange(len(labels)), labels].mean(), (logs.argmax(1) == labels).mean()

        begun = (params, state, np.zeros((0, 6)), noise(params, key) if noisy else np.zeros((0, len(names))))
        params, state, curve, noises = checkpoint.load(begun) if checkpoint else begun
        for i in range(len(curve), self.evaluations):
            total = jnp.zeros(())
            for t in range(i * every, (i + 1) * every):
                params, state, total = step(params, state, total, x, y, start, key, t, rate, decay)
            test = slice(None if i + 1 == self.evaluations else 2000)
            row = [(i + 1) * every, float(total) / every, *evaluate(x[:5000], y[:5000])]
            curve = np.append(curve, [[*row, *evaluate(sets[2][test], sets[3][test])]], 0)
            if noisy:
                noises = np.append(noises, noise(params, jax.random.fold_in(key, i)), 0)
            if checkpoint:
                checkpoint.save((params, state, curve, noises))
        return {"curve": curve.tolist(), "noise": [dict(zip(names, n, strict=True)) for n in noises.tolist()]}
