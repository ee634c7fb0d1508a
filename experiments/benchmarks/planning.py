"""`ap.memory.plan` beside the single methods: compiled memory, seconds and noise, in one process.

Of an MLP of ReLU layers, a ConvNet and a transformer, in a Python loop and in a scan: reverse mode as it is,
`jax.checkpoint` around each layer, and rounding to 8, 4 and 2 bits. The plan is given the compiled memory of each
single method as its budget, and must be no worse in noise, and no slower among methods without noise. Noise is the mean
over draws of the squared error of the gradient over its square. Compiled memory is with optimization barriers kept.
Seconds of the processor, by turns.

    python -m experiments.benchmarks.planning
    python -m experiments.benchmarks.planning --preset paper
"""

import time
from typing import Any

import jax
import numpy as np

import apgrad as ap
from apgrad import memory as rad
from experiments import harness
from experiments.benchmarks import compiling
from experiments.parts.turns import BARRIERS, take_turns

MODELS = ("MLP", "ConvNet", "transformer, loop", "transformer, scan")
SINGLE = ("checkpoint each layer", "8 bits", "4 bits", "2 bits")


class Config(harness.Config):
    """Options of this benchmark."""

    layers: int = 5  # of the MLP.
    blocks: int = 2  # of the transformer.
    batch: int = 256  # of the MLP.
    draws: int = 4  # of each random gradient.
    runs: int = 3  # of each compiled program.


PAPER = Config(layers=17, blocks=6, batch=2048, draws=8, runs=9)


def model(config: Config, name: str, around: Any = compiling.same) -> tuple[Any, Any, Any]:
    """`(parameters, x) -> loss` with a function around each layer, parameters and x."""
    if name == "MLP":
        return compiling.mlp(config.layers, 128, config.batch, around)
    if name == "ConvNet":
        return compiling.convnet(4, 32, around)
    return compiling.transformer(config.blocks, name == "transformer, scan", around)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(model=MODELS)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    plain, parameters, x = model(config, cell["model"])
    checkpointed = model(config, cell["model"], jax.checkpoint)[0]
    functions = {"reverse mode": lambda key, *a: plain(*a), SINGLE[0]: lambda key, *a: checkpointed(*a)}
    functions |= {f"{b} bits": ap.randomize(plain, rad.rounding(bits=b)) for b in (8, 4, 2)}
    key = jax.random.key(seed)
    memory = {name: rad.temp_bytes(f, key, parameters, x, argnums=1) for name, f in functions.items()}
    plans = {}
    for name in SINGLE:
        start = time.process_time()
        try:
            plan = rad.plan(plain, parameters, x, budget_bytes=memory[name])
        except ValueError as error:
            plans[name] = {"refused": str(error)}
            continue
        plans[name] = {"method": plan.chosen.method, "work": plan.chosen.work, "compiled": len(plan.trials)}
        plans[name]["seconds"] = time.process_time() - start
        functions[f"plan: {name}"] = plan.function
        memory[f"plan: {name}"] = plan.chosen.peak_bytes
    lowered = {name: jax.jit(jax.grad(f, argnums=1)).lower(key, parameters, x) for name, f in functions.items()}
    programs = {name: program.compile(compiler_options=BARRIERS) for name, program in lowered.items()}
    flat = lambda tree: np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
    truth = flat(programs["reverse mode"](key, parameters, x))
    noise = {}
    for name, program in programs.items():
        keys = [jax.random.key(1000 * seed + i) for i in range(config.draws)]
        errors = [np.sum((flat(program(k, parameters, x)) - truth) ** 2) / np.sum(truth**2) for k in keys]
        noise[name] = [float(e) for e in errors]
    seconds = take_turns(programs, config.runs, arguments=(key, parameters, x))
    return {"memory": memory, "plans": plans, "noise": noise, "step": {name: s.tolist() for name, s in seconds.items()}}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = []
    for cell, result in records:
        for name in SINGLE:
            mine = f"plan: {name}"
            row = {**cell, "budget of": name, "MB_plain": result["memory"]["reverse mode"] / 1e6}
            row |= {"MB": result["memory"][name] / 1e6, "method": result["plans"][name].get("method", "refused")}
            measured = ("MB_plan", "noise", "noise_plan", "step", "step_plan", "gradients_compiled", "plan_s")
            row |= dict.fromkeys(measured)
            if mine in result["memory"]:
                row["MB_plan"] = result["memory"][mine] / 1e6
                for key, f in (("noise", np.mean), ("step", np.median)):
                    row[key], row[f"{key}_plan"] = float(f(result[key][name])), float(f(result[key][mine]))
                row["gradients_compiled"] = result["plans"][name]["compiled"]
                row["plan_s"] = result["plans"][name]["seconds"]
            rows.append(row)
    figure, (axes,) = harness.panels(1, len(records), (4 * len(records), 3.4))
    for ax, (cell, result) in zip(axes, records, strict=True):
        plain = np.median(result["step"]["reverse mode"])
        for label, marker, some in (("single methods", "o", False), ("plans", "x", True)):
            names = [n for n in result["memory"] if n.startswith("plan") == some]
            x = [result["memory"][n] / result["memory"]["reverse mode"] for n in names]
            ax.plot(x, [np.median(result["step"][n]) / plain for n in names], marker, label=label)
        ax.set(title=cell["model"], xlabel="compiled memory, over plain's", ylabel="step time, over plain's")
        ax.legend()
    return harness.Report({}, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
