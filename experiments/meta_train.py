"""Meta-trains the rules that come with the package.

    python -m experiments.meta_train sinusoid --steps 4000 --out runs/sinusoid
    APGRAD_DATA=... python -m experiments.meta_train image_mlp --steps 3000 --out runs/image_mlp

It goes on where it was killed, and ends with the rule and its card, `NAME.npz` and `NAME.json`, in the folder; copied
to `apgrad/mplp/trained/` they are what `mplp.load_pretrained(NAME)` reads.
"""

import datetime
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import apgrad as ap
from apgrad import meta, mplp

OPTIONS: dict[str, dict[str, Any]] = {
    "sinusoid": {"channels": 8, "rank": 8, "hidden": 32, "memory": 8, "learning_rate": 0.3},
    "image_mlp": {"channels": 8, "rank": 8, "hidden": 32, "memory": 4, "learning_rate": 10.0, "full": 1024},
}
COMMON: dict[str, Any] = {"whiten": True, "share": "role", "normalize": True}


def step_function(z: jax.Array) -> jax.Array:
    """max(0, sign z), the paper's step."""
    return jnp.maximum(0.0, jnp.sign(z))


def sites_of(task: meta.Task, depth_task: meta.Task | None = None) -> tuple[mplp.Site, ...]:
    """The places of a task's network, or of a deeper one's that has all roles."""
    task = depth_task or task
    params = task.prior(jax.random.key(0))
    return mplp.sites(task.network, params, task.batch(task.draw(jax.random.key(0)), jax.random.key(1)))


def recipe(name: str) -> tuple[list[meta.Task], list[int], tuple[mplp.Site, ...], int]:
    """Tasks, how many of each in an outer batch, the places of all roles, and inner steps."""
    if name == "sinusoid":
        task = meta.sinusoid()
        return [task], [16], sites_of(task), 5
    data = meta.data.load("mnist", size=12)
    tasks = [meta.images(data, activation=f) for f in (jax.nn.sigmoid, step_function)]
    return tasks, [6, 2], sites_of(tasks[0], meta.images(data, hidden=(50, 50))), 20


def outer_gradient(name: str) -> meta.OuterGradient:
    """Backpropagation through whole unrolls, 0.7 held-out and 0.3 hint loss."""
    tasks, counts, _, length = recipe(name)
    parts = []
    for task, count in zip(tasks, counts, strict=True):
        problem = meta.inner_problem(task, meta.message_passing(task.network), length)
        parts.append(meta.lanes(meta.backpropagation(problem), count))
    return parts[0] if len(parts) == 1 else meta.average(parts, counts)


def card(name: str, sites: tuple[mplp.Site, ...], steps: int, seed: int, more: dict[str, Any]) -> dict[str, Any]:
    """What a trained rule says of itself."""
    return {
        "name": name,
        "rule": OPTIONS[name] | COMMON,
        "sites": [site._asdict() for site in sites],
        "meta_steps": steps,
        "seed": seed,
        "apgrad": ap.__version__,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        **more,
    }


def judge(name: str, rule: mplp.Separable, runs: int = 100, seed: int = 1000) -> dict[str, Any]:
    """Half the squared error over the domain, or the test accuracy in percent, after the last inner step."""
    tasks, _, _, length = recipe(name)
    results = {}
    for i, task in enumerate(tasks):
        measure, scale = task.loss, 1.0
        if name != "sinusoid":
            activation = (jax.nn.sigmoid, step_function)[i]
            data = meta.data.load("mnist", size=12)
            task = meta.images(data, activation=activation, split="test", held_out=1000)
            measure, scale = (lambda p, b, task=task: meta.accuracy(task, p, b)), 100.0
        learner = meta.message_passing(task.network)
        one = lambda key, t=task, learn=learner, m=measure: meta.evaluate(t, learn, rule, key, length, m)
        keys = jax.random.split(jax.random.key(seed), runs)
        last = scale * np.asarray(jax.jit(lambda keys, one=one: jax.lax.map(one, keys, batch_size=4))(keys))[:, -1]
        error = float(last.std(ddof=1) / np.sqrt(runs))
        results["sinusoid" if name == "sinusoid" else ("sigmoid", "step")[i]] = {
            "mean": float(last.mean()),
            "deviation": float(last.std(ddof=1)),
            "interval": [float(last.mean() - 1.96 * error), float(last.mean() + 1.96 * error)],
            "runs": runs,
        }
    return results


def main(name: Literal["sinusoid", "image_mlp"], /, out: Path, steps: int = 3000, seed: int = 0) -> None:
    """Trains a rule and writes it with its card.

    Args:
      name: of the rule.
      out: folder.
      steps: outer steps.
      seed: of the rule's start and of all tasks.
    """
    _, counts, sites, length = recipe(name)
    rule = mplp.Separable(sites, rngs=nnx.Rngs(seed), **(OPTIONS[name] | COMMON))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(2e-3, steps)))
    done = meta.train(outer_gradient(name), optimizer, rule, jax.random.key(seed), steps, folder=out, every=50)
    more = {"inner_steps": length, "outer_batch": counts, "results": judge(name, done.theta)}
    mplp.save_trained(done.theta, card(name, sites, steps, seed, more), out / name)
    print(more["results"])


if __name__ == "__main__":
    tyro.cli(main)
