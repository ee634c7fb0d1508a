"""Meta-trains the rules that come with the package.

    python -m experiments.meta_train sinusoid --steps 4200 --out runs/first
    python -m experiments.meta_train sinusoid --start runs/first/sinusoid --steps 12000 --out runs/sinusoid

    export APGRAD_DATA=...
    python -m experiments.meta_train image_mlp --steps 2200 --out runs/image_mlp
    python -m experiments.meta_train images --steps 4200 --out runs/images
    python -m experiments.meta_train sequences --steps 600 --out runs/sequences
    python -m experiments.meta_train convnets --steps 900 --out runs/convnets
    python -m experiments.meta_train regression --steps 2200 --out runs/regression      # needs no APGRAD_DATA

It goes on where it was killed, and ends with the rule and its card, `NAME.npz` and `NAME.json`, in the folder; copied
to `apgrad/mplp/trained/` they are what `mplp.load_pretrained(NAME)` reads. The options of the rule, and what the card
says of the data and of where the rule holds, are those of the card that is there (`mplp.pretrained_card`). `image_mlp`
falls apart after its 20 steps; the one that comes with the package went on with `--start` for 5,000 and for 3,000 steps
more.

`images` trains a normalized rule on a family of networks, for the number of updates that it is told. The one that comes
with the package was trained for 2,400 outer steps on twelve networks of at most 300 updates, before its controllers had
a say in the corrections, and for 1,800 more on the family below; its card says so under "start". `sequences` is the
same for Elman's and gated units that read an image in parts, in a network whose layers are named by their number, and
`convnets` for networks of two convolutions. The `sequences` of the package had 600 outer steps without the last two
networks, and 600 more with them; in both its controllers did not settle yet. `regression` is for the squared error,
and learns from random teachers (`experiments.parts.regression`).
"""

import datetime
import functools
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import apgrad as ap
from apgrad import meta, mplp
from experiments.parts import architectures, meta_curves, regression

Name = Literal["sinusoid", "image_mlp", "images", "sequences", "convnets", "regression"]


def step_function(z: jax.Array) -> jax.Array:
    """max(0, sign z), the paper's step."""
    return jnp.maximum(0.0, jnp.sign(z))


def steep_sigmoid(z: jax.Array) -> jax.Array:
    """sigmoid(8 z): on the way to a step, with a derivative."""
    return jax.nn.sigmoid(8.0 * z)


FAMILY = [  # images and side, hidden widths, activation, minibatch, deviation of the prior, updates
    ("mnist", 12, (50,), jax.nn.sigmoid, 8, 0.05, 20),
    ("mnist", 12, (64, 64, 64), jax.nn.sigmoid, 32, 0.05, 20),
    ("mnist", 12, (100, 40), jax.nn.relu, 16, None, 20),
    ("mnist", 12, (50,), steep_sigmoid, 8, 0.05, 20),
    ("digits", None, (100,), jax.nn.gelu, 64, 0.02, 20),
    ("cifar10", 12, (64, 64), jax.nn.relu, 32, 0.05, 20),
    ("mnist", 12, (30, 30, 30, 30), jnp.tanh, 128, 0.02, 20),
    ("mnist", 12, (40,), jax.nn.relu, 2, None, 20),
    ("mnist", 28, (100,), jax.nn.gelu, 64, None, 20),
    ("cifar10", 12, (150,), jnp.tanh, 16, None, 50),
    ("mnist", 12, (50,), jax.nn.sigmoid, 8, 0.05, 100),
    ("digits", None, (100, 40), jnp.tanh, 16, None, 100),
    ("mnist", 12, (60, 30), jax.nn.relu, 4, 0.05, 100),
    ("mnist", 12, (60, 60), steep_sigmoid, 16, 0.05, 100),
    ("cifar10", 12, (64,), jax.nn.gelu, 32, None, 100),
    ("mnist", 12, (32,), jax.nn.sigmoid, 16, None, 300),
    ("mnist", 12, (40, 20), jax.nn.relu, 32, 0.05, 300),
    ("digits", None, (32, 20), jax.nn.sigmoid, 32, 0.05, 1000),
]
SEQUENCES = [  # images and side, options of `architectures.recurrent`, minibatch, updates
    ("digits", None, {}, 16, 20),
    ("digits", None, {"cell": "RNN"}, 16, 20),
    ("digits", None, {"units": 24, "parts": 16}, 16, 20),
    ("mnist", 12, {"parts": 6}, 32, 20),
    ("mnist", 12, {"cell": "RNN", "parts": 12}, 4, 20),
    ("mnist", 12, {"units": 48}, 16, 50),
    ("digits", None, {}, 8, 100),
    ("digits", None, {"cell": "RNN"}, 16, 100),
    ("mnist", 12, {"cell": "RNN"}, 16, 100),
    ("mnist", 12, {}, 16, 100),
]
CONVNETS = [  # images and side, options of `architectures.convnet`, minibatch, updates
    ("digits", None, {}, 16, 20),
    ("digits", None, {"channels": (4, 8), "activation": jnp.tanh}, 32, 20),
    ("mnist", 12, {}, 8, 20),
    ("mnist", 12, {"channels": (8, 8), "activation": jax.nn.gelu}, 4, 50),
    ("cifar10", 12, {"colors": 3}, 32, 20),
    ("mnist", 28, {"channels": (4, 8)}, 16, 20),
    ("digits", None, {}, 8, 100),
    ("mnist", 12, {"channels": (4, 8)}, 16, 100),
]
REGRESSIONS = [  # inputs, outputs, hidden widths, activation, minibatch, deviation of the prior, updates
    (4, 1, (50,), jax.nn.sigmoid, 8, 0.05, 20),
    (16, 1, (64, 64), jax.nn.relu, 32, None, 20),
    (32, 8, (100,), jax.nn.gelu, 32, None, 20),
    (8, 1, (40, 40, 40), jnp.tanh, 16, 0.05, 20),
    (16, 3, (32,), jax.nn.relu, 4, None, 20),
    (8, 1, (30, 30, 30, 30), jnp.tanh, 64, 0.05, 50),
    (10, 1, (50,), jax.nn.relu, 16, None, 100),
    (4, 1, (40, 40), jax.nn.sigmoid, 16, 0.05, 100),
    (32, 8, (64,), jax.nn.relu, 32, None, 100),
    (16, 1, (64, 64), jax.nn.gelu, 16, None, 100),
    (8, 2, (32,), jnp.tanh, 8, 0.05, 300),
    (16, 1, (40, 20), jax.nn.relu, 32, None, 300),
]
LAYERED = {"sequences": (architectures.recurrent, SEQUENCES), "convnets": (architectures.convnet, CONVNETS)}
DRAWN = 3  # members of the family in an outer step
REMAT = 1  # each step is computed again, which takes these networks less time than to read back all that it remembers
ARCHITECTURE = {
    "images": f"{len(FAMILY)} MLPs; softmax cross-entropy",
    "sequences": f"{len(SEQUENCES)} networks of Elman's or gated units and a dense layer; softmax cross-entropy",
    "convnets": f"{len(CONVNETS)} networks of two convolutions of 3x3, each with an activation and max-pooling, and a "
    "dense layer; softmax cross-entropy",
    "regression": f"{len(REGRESSIONS)} MLPs; squared error",
}
"""The families by name: what they are, as the card says it."""


def recipe(name: str) -> tuple[list[tuple[meta.Task, int]], int]:
    """The tasks that a rule is trained on, how many of each are in an outer batch, and the steps of their unrolls."""
    if name == "sinusoid":
        return [(meta.sinusoid(), 16)], 5
    make = functools.partial(meta.images, meta.data.load("mnist", size=12))
    family = (((50,), jax.nn.sigmoid, 4), ((50, 50), jax.nn.sigmoid, 3), ((50,), steep_sigmoid, 1))
    return [(make(hidden=hidden, activation=f), count) for hidden, f, count in family], 20


def outer_gradient(parts: list[tuple[meta.Task, int]], length: int, clip: bool) -> meta.OuterGradient:
    """Backpropagation through whole unrolls, 0.7 held-out and 0.3 hint loss.

    With `clip` every task's gradient is clipped to a norm of 1.
    """
    outers = []
    for task, count in parts:
        problem = meta.inner_problem(task, meta.message_passing(task.network), length)
        one = meta.reverse_mode(problem, remat=REMAT)
        outers.append(meta.batched(meta.clipped(one) if clip else one, count))
    return outers[0] if len(outers) == 1 else meta.average(outers, [count for _, count in parts])


def members(name: str, images: tuple[str, ...] = ("digits", "mnist", "cifar10")) -> list[tuple[meta.Task, int]]:
    """The tasks of a family that are of some images, each with the number of its updates."""
    if name == "regression":
        names = ("inputs", "outputs", "hidden", "activation", "batch", "deviation")
        return [(regression.teachers(**dict(zip(names, row, strict=False))), row[-1]) for row in REGRESSIONS]
    load = functools.cache(lambda name, side: meta.data.load(name, size=side))
    if name in LAYERED:
        make, networks = LAYERED[name]
        task = lambda data, made, batch: architectures.task(data, made, batch=batch, held_out=128)
        made = lambda options: functools.partial(make, **options)
        return [(task(load(i, n), made(o), batch), length) for i, n, o, batch, length in networks if i in images]
    names = ("hidden", "activation", "batch", "deviation")
    task = lambda data, row: meta.images(data, held_out=128, **dict(zip(names, row, strict=True)))
    return [(task(load(data, side), row), length) for data, side, *row, length in FAMILY if data in images]


def places(family: list[tuple[meta.Task, int]]) -> tuple[mplp.Site, ...]:
    """The places of all roles in a family."""
    return tuple({site.name: site for task, _ in family for site in meta_curves.sites(task)}.values())


def family_gradient(family: list[tuple[meta.Task, int]]) -> meta.OuterGradient:
    """The gradient through whole unrolls of members drawn anew in each step.

    Nine tenths of the loss are that of images that the network has not learned from; a member's gradient is clipped to
    a norm of 1. The rule is told the member's number of updates.
    """
    gradients = []
    for task, length in family:
        learner = timed(meta.message_passing(task.network), length)
        problem = meta.inner_problem(task, learner, length, hint=0.1, held_out=0.9)
        gradients.append(meta.clipped(meta.reverse_mode(problem, remat=REMAT)).estimate)

    def estimate(theta, key, carry):
        def one(key):
            which, key = jax.random.split(key)
            branches = [lambda theta, key, member=member: member(theta, key, ())[:2] for member in gradients]
            return jax.lax.switch(jax.random.randint(which, (), 0, len(gradients)), branches, theta, key)

        losses, found = jax.lax.map(one, jax.random.split(key, DRAWN))
        return jnp.mean(losses), jax.tree.map(lambda g: jnp.mean(g, axis=0), found), carry

    return meta.OuterGradient(lambda theta, key: (), estimate)


def timed(learner: meta.Learner, steps: Any) -> meta.Learner:
    """The learner, whose rule is told how many updates there will be, if it takes that."""
    told = lambda rule: rule.for_steps(steps) if isinstance(rule, mplp.Normalized) else rule
    init = lambda rule, *of: learner.init(told(rule), *of)
    return meta.Learner(init, lambda rule, *of: learner.step(told(rule), *of))


def schedule(steps: int, peak: float) -> optax.Schedule:
    """Constant for the first half, then a cosine to 0: until then a run can still be made longer or shorter."""
    half = steps // 2
    falling = optax.cosine_decay_schedule(peak, steps - half)
    return optax.join_schedules([optax.constant_schedule(peak), falling], [half])


# Hidden widths, activation and minibatch of networks that rules for images are judged in, and of one for "images".
JUDGED = {"144-50-10, sigmoid": ((50,), jax.nn.sigmoid, 8), "144-50-50-10, sigmoid": ((50, 50), jax.nn.sigmoid, 8)}
JUDGED["144-50-10, step (a transfer)"] = ((50,), step_function, 8)
RELU = {"144-100-40-10, relu, minibatches of 16": ((100, 40), jax.nn.relu, 16)}


def judge(name: str, rule: Any, length: int, runs: int, seed: int = 1000) -> dict[str, Any]:
    """Half the squared error over the domain, or the test accuracy in percent, after the last inner step."""
    measure, scale, options = meta.accuracy, 100.0, {"held_out": 1000, "split": "test"}
    if name == "sinusoid":
        tasks, measure, scale = {"sinusoid": meta.sinusoid()}, lambda task, *args: task.loss(*args), 1.0
    elif name == "regression":
        make = functools.partial(regression.task, hidden=(64,), activation=jax.nn.relu, batch=16, deviation=None)
        tasks, measure = {f"{data}, explained": make(data) for data in regression.SETS}, regression.explained
    elif name in LAYERED:
        task = architectures.task(meta.data.load("mnist", size=12), LAYERED[name][0], batch=16, **options)
        tasks = {"12x12 MNIST, minibatches of 16": task}
    else:
        make = functools.partial(meta.images, meta.data.load("mnist", size=12), **options)
        judged = JUDGED | (RELU if name == "images" else {})
        tasks = {k: make(hidden=widths, activation=f, batch=batch) for k, (widths, f, batch) in judged.items()}
    results = {}
    for label, task in tasks.items():
        learner, of_task = timed(meta.message_passing(task.network), length), functools.partial(measure, task)
        last = meta_curves.along(scale * meta_curves.evaluation(task, learner, seed, runs, length, of_task)(rule))[-1]
        mean, half = last["mean"], 1.96 * last.pop("standard_error")
        results[label] = {**last, "interval": [mean - half, mean + half], "runs": runs}
    return results


def main(name: Name, /, out: Path, steps: int = 3000, seed: int = 0, start: Path | None = None) -> None:
    """Trains a rule and writes it with its card.

    Args:
      name: of the rule.
      out: folder.
      steps: outer steps.
      seed: of the rule's start and of all tasks.
      start: a trained rule to go on from, written by this program, without suffix.
    """
    peak, history, known = 2e-3, {}, mplp.pretrained_card(name)
    (parts, length), family = ([], 20), members(name) if name in ARCHITECTURE else []
    if family:
        outer, sites = family_gradient(family), places(family)
    else:
        parts, length = recipe(name)
        outer = outer_gradient(parts, length, clip=start is not None)
        sites = max((meta_curves.sites(task) for task, _ in parts), key=len)  # the deepest network has all roles
    make: Any = mplp.Normalized if family else mplp.Separable
    rule = make(sites, rngs=nnx.Rngs(seed), **known["rule"])
    if start is not None:
        (started, before), peak = mplp.load_trained(start), 1e-3
        form = lambda rule: jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(rule)))
        if form(started) != form(rule):
            raise ValueError(f"{start} is another rule than {name!r}: it was made with {dict(started.options)}")
        nnx.update(rule, nnx.state(started))
        history = {"start": {k: v for k, v in before.items() if k not in ("rule", "sites", "results")}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule(steps, peak)))
    done = meta.train(outer, optimizer, rule, jax.random.key(seed), steps, folder=out, version="1", every=50)
    results = judge(name, done.theta, length, runs=100)
    clipped = "gradients" if parts and start is None else "every task's gradient"
    rates = f"Adam at {peak} up to step {steps // 2}, then a cosine to 0 at step {steps}"
    card = {k: v for k, v in known.items() if k not in ("class", "rule", "sites", "start")}
    card |= {"meta_steps": steps, "seed": seed, "apgrad": ap.__version__, "jax": jax.__version__}
    card |= {"date": datetime.date.today().isoformat(), "results": results}
    card |= {"inner_steps": sorted({steps for _, steps in family}) if family else length}
    card |= {"outer_batch": [count for _, count in parts] or DRAWN}
    card |= {"schedule": f"{rates}; {clipped} clipped to a norm of 1"}
    if family:
        card["architecture"] = f"{DRAWN} a step, drawn of {ARCHITECTURE[name]}; told the number of updates"
    mplp.save_trained(done.theta, card | history, out / name)
    print(results)


if __name__ == "__main__":
    tyro.cli(main)
