"""Training a transformer in less memory: peak bytes, step time and the largest batch, of a method each in a process.

Reverse mode as it is, `jax.checkpoint` around each block, and `ap.memory.plan` at a half and at a quarter of plain's
compiled scratch memory train the same transformer on the same batches by Adam. A device counts its peak bytes from the
start of a process, and does not forget: so every method has a process of its own, which reads the peak after training
and before anything larger is compiled. A CPU counts none, and the peak says nothing of the steps where the process
needed more before them: there the compiled step's arguments, outputs and scratch memory, less what they share, stand
for it, and the table says so. The largest batch is the one whose compiled step fits in the device's limit (on a CPU in
`--limit`), found by secants; none runs out of memory. The quick preset has 4 small blocks and 20 steps in place of 12
blocks and 200.

    python -m experiments.benchmarks.accelerator
    python -m experiments.benchmarks.accelerator --preset paper
"""

import os

# Before JAX starts: the processes share a device, and what a GPU's compiler tries kernels on would count in the peak.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import concurrent.futures
import functools
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from apgrad import memory as rad
from experiments import harness
from experiments.benchmarks import compiling
from experiments.parts.turns import BARRIERS

SHARES = {"plan, half": 2, "plan, quarter": 4}
METHODS = ("plain", "jax.checkpoint", *SHARES)
VOCABULARY = 64


class Config(harness.Config):
    """Options of this benchmark."""

    blocks: int = 4  # of the transformer.
    width: int = 32  # of a block, with 4 heads.
    batch: int = 8  # sequences in a step.
    length: int = 32  # of a sequence.
    steps: int = 20  # of training.
    limit: int = 8_000_000  # bytes that the largest batch may need on a device that names no limit.


PAPER = Config(blocks=12, width=256, batch=16, length=128, steps=200, limit=2_000_000_000)


def transformer(config: Config, checkpoint: bool) -> tuple[Any, Any]:
    """`(parameters, tokens) -> loss` of saying what each token is mapped to, and parameters."""
    blocks = [compiling.Block(config.width, nnx.Rngs(i)) for i in range(config.blocks)]
    run, states = compiling.stacked(blocks, around=jax.checkpoint if checkpoint else compiling.same)

    def loss(parameters, tokens):
        states, table = parameters
        x = run(states, table[tokens])
        x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ table.T, (5 * tokens + 1) % VOCABULARY))

    return loss, (states, 0.1 * compiling.normal(7, VOCABULARY, config.width))


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(method=METHODS)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        return own.submit(trained, config, cell["method"]).result()


def trained(config: Config, method: str) -> dict[str, Any]:
    """What the only method of a process needs; all methods have the same keys."""
    loss, parameters = transformer(config, method == "jax.checkpoint")
    tokens = jnp.zeros((config.batch, config.length), jnp.int32)
    function, kept = lambda key, *a: loss(*a), "recompute" if method == "jax.checkpoint" else "keep"
    if method in SHARES:
        budget = rad.temp_bytes(loss, parameters, tokens, argnums=0) // SHARES[method]
        try:
            plan = rad.plan(loss, parameters, tokens, budget_bytes=budget)
        except ValueError as error:
            return {"kept": "refused", "why": str(error)}
        function, kept = plan.function, plan.chosen.method
    optimizer = optax.adam(1e-3)
    state = parameters, optimizer.init(parameters)

    def step(batch, state, key):
        parameters, moments = state
        tokens = jax.random.randint(key, (batch, config.length), 0, VOCABULARY)
        value, gradient = jax.value_and_grad(function, argnums=1)(key, parameters, tokens)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(parameters, updates), moments), value

    def compiled(batch, options):
        lowered = jax.jit(functools.partial(step, batch), donate_argnums=0).lower(like, jax.random.key(0))
        return lowered.compile(compiler_options=options)

    def needed(program):
        found = program.memory_analysis()
        parts = (found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)
        return sum(parts) - found.alias_size_in_bytes

    like = jax.eval_shape(lambda: state)
    run = compiled(config.batch, BARRIERS)
    result: dict[str, Any] = {"kept": kept, "compiled": needed(run), "step": [], "losses": []}
    device = lambda: jax.devices()[0].memory_stats() or {}
    jax.block_until_ready(state)
    before = device().get("peak_bytes_in_use")
    now = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    for i in range(config.steps):
        start = now()
        state, value = jax.block_until_ready(run(state, jax.random.key(i)))
        result["step"].append(now() - start)
        result["losses"].append(float(value))
    peak = device().get("peak_bytes_in_use")
    result["peak"] = peak if peak != before else None
    fast = BARRIERS and BARRIERS | {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    limit = device().get("bytes_limit", config.limit)
    size = lambda batch: result["compiled"] if batch == config.batch else needed(compiled(batch, fast))
    return result | {"largest": largest(size, limit, config.batch)}


def largest(size: Callable[[int], float], limit: float, start: int) -> int:
    """The largest batch whose `size(batch)` is at most the limit, to an eighth; 0 if none is.

    What a step needs grows about linearly with the batch, so the next batch tried is where the last two's line meets
    the limit, held between the largest known to fit and the smallest known not to.

    Example:
      >>> largest(lambda batch: 100 + 7 * batch, 1000, 8), largest(lambda batch: 100, 50, 8)
      (128, 0)
    """
    found = {batch: size(batch) for batch in (start, 2 * start)}
    (before, was), (batch, now) = found.items()
    while True:
        low = max((x for x in found if found[x] <= limit), default=0)
        high = min((x for x in found if x > low), default=None)
        step = max(1, low // 8)
        if high is not None and high - low <= step:
            return low
        slope = (now - was) / (batch - before)
        guess = int(batch + (limit - now) / slope) if slope > 0 else 2 * batch
        guess = max(low + step, guess if high is None else min(guess, high - 1))
        before, was, batch, now = batch, now, guess, size(guess)
        found[batch] = now


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    found = {cell["method"]: result for cell, result in records}
    plain, rows = found["plain"], []
    for method, result in found.items():
        row = {"method": method, "kept": result["kept"], "bytes": None, "MB": None, "MB_compiled": None}
        row |= dict.fromkeys(("step_ms", "step_ratio", "largest_batch", "loss", "loss_off"))
        if "step" in result:
            on_device = result["peak"] is not None
            row["bytes"] = "device's peak" if on_device else "compiled peak"
            row["MB"] = result["peak" if on_device else "compiled"] / 1e6
            row["MB_compiled"], row["largest_batch"] = result["compiled"] / 1e6, result["largest"]
            took, of_plain = np.median(result["step"]), np.median(plain["step"])
            row |= {"step_ms": 1e3 * took, "step_ratio": took / of_plain, "loss": result["losses"][-1]}
            row["loss_off"] = np.max(np.abs(np.divide(result["losses"], plain["losses"]) - 1))
        rows.append(row)
    figure, (axes,) = harness.panels(1, 3, (12, 3.4))
    some = [row for row in rows if row["MB"]]
    names = [r["method"] for r in some]
    harness.bars(axes[0], names, {"": [r["MB"] for r in some]})
    axes[0].set(xlabel=f"MB, batch {config.batch}")
    harness.bars(axes[1], names, {"": [r["largest_batch"] for r in some]})
    axes[1].set(xlabel="largest batch that fits")
    for row, style in zip(some, ("-", "--", ":", "-."), strict=False):
        axes[2].plot(found[row["method"]]["losses"], style, label=f"{row['method']}: {row['step_ratio']:.2f}")
    axes[2].set(xlabel="step", ylabel="loss", title=f"{config.blocks} blocks of width {config.width}")
    axes[2].legend(loc="upper right", title="step time over plain's")
    return harness.Report({}, rows, harness.table(rows, *rows[0]), figure)


if __name__ == "__main__":
    harness.main()
