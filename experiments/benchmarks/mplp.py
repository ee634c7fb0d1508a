"""What learned message passing costs: CPU time and memory of the rules on the published tasks, and against width.

    python -m experiments.benchmarks.mplp                   # about two minutes
    python -m experiments.benchmarks.mplp --preset paper    # about six

*Tasks.* An inner update, and a meta-step (the meta-gradient through all inner steps), of each rule on networks and
batches of the published tasks: sinusoid (1-20-20-1, 5 steps of 10 points, 4 tasks) and MNIST (144-50-10, 20 steps of 8
images, 1 task; random numbers for images, which cost the same). CPU seconds are those of the whole process
(`time.process_time`) on one core; methods take turns. The *fraction* is useful floating-point operations a CPU second
over those of matrix products of 1000 by 1000 measured in the same turns; useful are those that XLA counts in an inner
update, and three times as many for each step of a meta-step (forward, and twice back). Memory is the compiled
program's, as XLA tells it.

*Width.* An inner update of a 144-n-n-10 network on 8 images: the separable rule without and with whitening, and
plain SGD (`jax.grad`).
"""

import functools
import os
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from apgrad import mplp
from apgrad.mplp.rules import _per_synapse as per_synapse
from experiments import harness
from experiments.mplp_published import build
from experiments.parts.turns import take_turns

TASKS = {  # sizes, steps, batch, tasks of a meta-step, options of the published rule
    "mnist": ((144, 50, 10), 20, 8, 1, {"message_size": 4, "hidden": 7, "share": True}),
    "sinusoid": ((1, 20, 20, 1), 5, 10, 4, {"message_size": 8, "hidden": 15}),
}
RULES: dict[str, Any] = {
    "exact": lambda sites, **_: mplp.Exact(0.1),
    "separable": lambda sites, **_: mplp.Separable(sites, rngs=nnx.Rngs(0)),
    "separable, memory, whitening": lambda s, **_: mplp.Separable(s, neuron_state=4, whiten=True, rngs=nnx.Rngs(0)),
    "per synapse, GRU": lambda sites, **o: mplp.PerSynapse(sites, **o, rngs=nnx.Rngs(0)),
    "per synapse, MLP": lambda sites, **o: mplp.PerSynapse(sites, **o, cell="mlp", rngs=nnx.Rngs(0)),
    "thesis": lambda sites, **_: mplp.Thesis(sites, rngs=nnx.Rngs(0)),
}


class Config(harness.Config):
    """Options of the benchmark."""

    widths: tuple[int, ...] = (64, 256, 1024)  # of the hidden layers.
    rounds: int = 5  # how often each program is timed.


PAPER = Config(widths=(64, 128, 256, 512, 1024, 2048, 4096), rounds=15)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(benchmark=TASKS, size=[0]) + harness.grid(benchmark=["width"], size=config.widths)


def problem(task: str) -> tuple[Any, Any, Any, int, int]:
    """Network, parameters, minibatches of all steps, and the numbers of steps and tasks."""
    sizes, steps, batch, tasks, _ = TASKS[task]
    key = jax.random.key(0)
    x = jax.random.normal(key, (steps, batch, sizes[0]))
    if task == "mnist":
        network, draw = build(sizes, nnx.sigmoid, nnx.softmax, loss=mplp.cross_entropy)
        y = jax.nn.one_hot(jax.random.randint(key, (steps, batch), 0, 10), 10)
    else:
        network, draw = build(sizes, nnx.relu, nnx.relu, loss=mplp.squared_error)
        y = jnp.sin(x)
    return network, draw(key), (x, y), steps, tasks


def meta_step(rule: Any, network: Any, params: Any, batches: Any, tasks: int) -> jax.Array:
    """The meta-gradient of the mean hint loss through all inner steps, for some tasks at once."""

    def loss(rule, params):
        first = jax.tree.map(lambda x: x[0], batches)
        state = mplp.init_state(rule, network, params, first)
        remat = False if isinstance(rule, mplp.PerSynapse) else 1  # a per-synapse rule computes again by itself
        params, _, metrics = mplp.unroll(rule, network, params, state, batches, remat=remat)
        ports = jax.tree.map(mplp.parameter, params)
        return jnp.mean(metrics["loss"]) + jnp.mean(network(mplp.Places(), ports, first)[0])

    many = jax.tree.map(lambda x: jnp.stack([x] * tasks), params)
    return jax.grad(lambda rule: jnp.mean(jax.vmap(lambda p: loss(rule, p))(many)))(rule)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    if cell["benchmark"] == "width":
        return _measure_width(config, cell["size"])
    return _measure_task(config, cell["benchmark"])


def _measure_task(config, task):
    network, params, batches, steps, tasks = problem(task)
    first = jax.tree.map(lambda x: x[0], batches)
    sites = mplp.sites(network, params, first)
    programs = {}  # of a rule, and what it does: the compiled program, its arguments, useful operations
    for name, make in RULES.items():
        rule = make(sites, **TASKS[task][-1])
        state = mplp.init_state(rule, network, params, first)
        update = lambda rule, params, state, batch: mplp.backward(rule, network, params, state, batch)[:2]
        inner = jax.jit(update).lower(rule, params, state, first).compile()
        meta = jax.jit(lambda r, p, b: meta_step(r, network, p, b, tasks)).lower(rule, params, batches).compile()
        # XLA counts the body of a loop once: count all synapses as one chunk. A new function, since traces are cached.
        with mock.patch.object(per_synapse, "CHUNK", 2**62):
            whole: Any = jax.jit(lambda *args, update=update: update(*args)).lower(rule, params, state, first)
        work = whole.cost_analysis()["flops"]
        programs[name, "inner"] = inner, (rule, params, state, first), work
        programs[name, "meta"] = meta, (rule, params, batches), 3 * work * steps * tasks
    return {"rows": _rows(config, programs)}


def _measure_width(config, width):
    network, draw = build((144, width, width, 10), nnx.sigmoid, nnx.sigmoid, nnx.softmax, loss=mplp.cross_entropy)
    key = jax.random.key(0)
    params = draw(key)
    batch = jax.random.normal(key, (8, 144)), jax.nn.one_hot(jnp.arange(8), 10)
    sites = mplp.sites(network, params, batch)
    descend = lambda p, batch: jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(_plain_loss)(p, batch))
    sgd: Any = jax.jit(descend).lower(params, batch).compile()
    programs: dict[Any, Any] = {("SGD", "inner"): (sgd, (params, batch), sgd.cost_analysis()["flops"])}
    for name in ("exact", "separable", "separable, whitening"):
        rule = mplp.Exact(0.1) if name == "exact" else mplp.Separable(sites, whiten="white" in name, rngs=nnx.Rngs(0))
        state = mplp.init_state(rule, network, params, batch)

        def update(rule, params, state, batch):
            updates, state, _ = mplp.backward(rule, network, params, state, batch)
            return optax.apply_updates(params, updates), state

        compiled: Any = jax.jit(update).lower(rule, params, state, batch).compile()
        programs[name, "inner"] = compiled, (rule, params, state, batch), compiled.cost_analysis()["flops"]
    return {"rows": _rows(config, programs)}


def _plain_loss(params, batch):
    """The same network in plain JAX."""
    x, y = batch
    *hidden, last = params.values()
    for p in hidden:
        x = jax.nn.sigmoid(x @ p["kernel"] + p["bias"])
    return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(x @ last["kernel"] + last["bias"]), axis=-1))


def _rows(config, programs):
    square = jnp.ones((1000, 1000))
    matmul = jax.jit(lambda a: a @ a).lower(square).compile()
    calls: dict[Any, Any] = {place: functools.partial(program, *args) for place, (program, args, _) in programs.items()}
    seconds = take_turns({"matmul": lambda: matmul(square), **calls}, config.rounds, 0.02)
    rate = 2e9 / seconds["matmul"]
    rows = []
    for (rule, what), (program, _, flops) in programs.items():
        mine = seconds[rule, what]
        row = {"rule": rule, "what": what, "cpu_ms": 1e3 * float(np.median(mine))}
        row["spread"] = float(np.subtract(*np.percentile(mine, [75, 25])) / np.median(mine))
        row["fraction_of_matmul"] = float(np.median(flops / mine / rate))
        row["megabytes"] = program.memory_analysis().temp_size_in_bytes / 1e6
        rows.append(row | {"matmul_gflops": float(np.median(rate)) / 1e9})
    return rows


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, figures = [{**cell, **row} for cell, result in records for row in result["rows"]], {}
    times = {(r["benchmark"], r["size"], r["rule"], r["what"]): r["cpu_ms"] for r in rows}
    find = lambda *what: times.get(what, float("nan"))
    for row in rows:
        task = row["benchmark"]
        row["over_sgd"] = row["over_separable"] = None
        if row["what"] == "meta":
            figures[f"{task}, {row['rule']}: CPU seconds of a meta-step"] = row["cpu_ms"] / 1e3
        if task == "width":
            row["over_sgd"] = row["cpu_ms"] / find(task, row["size"], "SGD", "inner")
            row["over_separable"] = row["cpu_ms"] / find(task, row["size"], "separable", "inner")
    for task in TASKS:
        ratio = find(task, 0, "per synapse, GRU", "meta") / find(task, 0, "separable", "meta")
        figures[f"{task}: per synapse over separable, a meta-step"] = ratio
    ratios = lambda rule, name: [r[name] for r in rows if (r["benchmark"], r["rule"]) == ("width", rule)]
    whitening, separable = ratios("separable, whitening", "over_separable"), ratios("separable", "over_sgd")
    figures["whitening over separable, largest of the widths"] = max(whitening, default=float("nan"))
    figures["separable over SGD, by width"] = separable
    columns = ("cpu_ms", "fraction_of_matmul", "megabytes", "over_sgd", "over_separable")
    table = harness.table(rows, "benchmark", "size", "rule", "what", *columns)

    figure, ((left, right),) = harness.panels(1, 2, (11, 4))
    names = [name for name in RULES if any((r["rule"], r["what"]) == (name, "meta") for r in rows)]
    harness.bars(left, names, {task: [find(task, 0, name, "meta") for name in names] for task in TASKS})
    left.set(xscale="log", xlabel="CPU ms of a meta-step")
    widths = sorted({r["size"] for r in rows if r["benchmark"] == "width"})
    for rule in ("SGD", "exact", "separable", "separable, whitening"):
        right.plot(widths, [find("width", n, rule, "inner") for n in widths], marker="o", label=rule)
    right.set(xscale="log", yscale="log", xlabel="units of the hidden layers", ylabel="CPU ms of an inner update")
    for ax in (left, right):
        ax.legend()
    return harness.Report(figures, rows, table, figure)


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):  # before JAX makes its pools of threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    harness.main()
