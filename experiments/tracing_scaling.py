"""Time of tracing against the size of the graph (DuSell, "Gradient tracing", Figs 1.2 and 1.3).

Four families, each timed for jitted `jax.grad` and every semiring:

* layers: feed-forward networks with tanh, 10 inputs, 20 units a layer, 15 outputs (Fig. 1.2);
* diamonds: random networks. A layer becomes, with probability .95, a diamond: two layers that read the same input,
  each with a layer behind it, whose outputs are joined; each layer behind may become a diamond, with half the
  probability. 10 to 500 units a layer, 10 inputs and outputs (Fig. 1.3; in the paper's words the two layers themselves
  become diamonds, which would leave all layers side by side);
* large diamonds: the same networks with all widths scaled, to 1e3 to 1e8 edges: small graphs take the time that a call
  takes, and only the large ones say how time grows;
* batch: three layers of 500 on more and more examples, up to 1e9 scalar edges.

    python -m experiments.tracing_scaling
    python -m experiments.tracing_scaling --preset paper

The size is that of the scalar graph: edges of the program's equations, element by element. A line is fitted by least
squares in relative errors; shown are its slope and the exponent of a power law through the larger half of the sizes.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import linregress

import apgrad as ap
from apgrad._programs import jaxprs
from experiments import harness
from experiments.benchmarks import tracing
from experiments.parts.turns import take_turns

SEMIRINGS = ("grad", "ordinary", "max-product", "log max-product", "absolute sum", "entropy", "top 3")


class Config(harness.Config):
    """Options of this experiment."""

    layers: tuple[int, ...] = (2, 8, 32)  # numbers of layers.
    diamonds: int = 3  # how many random networks.
    sizes: tuple[float, ...] = (1e4, 1e6, 1e7)  # edges of the large diamonds, about.
    batches: tuple[int, ...] = (1, 8, 64)  # numbers of examples.
    repeats: int = 5  # timings of each.

    def __post_init__(self):
        super().__post_init__()
        if min(len(self.layers), self.diamonds, len(self.sizes), len(self.batches)) < 3 or self.repeats < 2:
            raise ValueError("a line wants three points in each family, and repeats at least 2")


SIZES = tuple(float(10 ** (k / 2)) for k in range(6, 17))
PAPER = Config(layers=(2, 5, 10, 20, 40, 80), diamonds=12, sizes=SIZES, batches=(1, 4, 16, 64, 256, 700), repeats=8)
FAMILIES = ("layers", "diamonds", "large diamonds", "batch")


def cells(config: Config) -> list[harness.Cell]:
    """Every network of the four families; the semirings are timed beside each other."""
    numbers = (config.layers, range(config.diamonds), map(round, config.sizes), config.batches)
    return [{"family": name, "n": n} for name, some in zip(FAMILIES, numbers, strict=True) for n in some]


def dense(rng: np.random.Generator, inputs: int, outputs: int) -> dict[str, Any]:
    """A layer's parameters."""
    w = rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(outputs)}


def plan(rng: np.random.Generator, probability: float = 0.95) -> Any:
    """A random network: the units of a layer, or for a diamond two pairs of a layer's units and what follows it."""
    if rng.random() >= probability:
        return int(rng.integers(10, 501))
    return [(int(rng.integers(10, 501)), plan(rng, probability / 2)) for _ in range(2)]


def diamond(make: Any, planned: Any, inputs: int, scale: float = 1.0) -> tuple[Any, int]:
    """A planned network of layers by `make(inputs, units)`, in lists (diamonds), and the number of its outputs."""
    units = lambda n: max(1, round(scale * n))
    if isinstance(planned, int):
        return make(inputs, units(planned)), units(planned)
    branches, outputs = [], 0
    for first, rest in planned:
        after, count = diamond(make, rest, units(first), scale)
        branches.append({"first": make(inputs, units(first)), "rest": after})
        outputs += count
    return branches, outputs


def scale_to(planned: Any, edges: float) -> float:
    """The scale at which a planned network has about so many edges, twice its weights, by bisection."""
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        weights, _ = diamond(lambda n, m: n * m, planned, 10, middle)
        low, high = (middle, high) if 2 * sum(jax.tree.leaves(weights)) < edges else (low, middle)
    return low


def apply(network: Any, x: jax.Array) -> jax.Array:
    """Runs a network of `diamond`."""
    if isinstance(network, list):
        return jnp.concatenate([apply(branch, x) for branch in network], axis=-1)
    if "first" in network:
        return apply(network["rest"], jnp.tanh(x @ network["first"]["w"] + network["first"]["b"]))
    return jnp.tanh(x @ network["w"] + network["b"])


def problem(cell: harness.Cell, seed: int) -> tuple[Any, Any]:
    """A loss and its parameters."""
    rng, n = np.random.default_rng(seed), cell["n"]
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    if "diamonds" in cell["family"]:
        planned = plan(rng)
        scale = scale_to(planned, n) if cell["family"] == "large diamonds" else 1.0
        body, outputs = diamond(functools.partial(dense, rng), planned, 10, scale)
        params = [body, dense(rng, outputs, 10)]
        x, y = normal(1, 10), normal(1, 10)
        return lambda p: jnp.mean((jnp.tanh(apply(p[0], x) @ p[1]["w"] + p[1]["b"]) - y) ** 2), params
    widths = (10, *(20,) * (n - 1), 15) if cell["family"] == "layers" else (500,) * 4
    params = [dense(rng, a, b) for a, b in itertools.pairwise(widths)]
    rows = n if cell["family"] == "batch" else 1
    x, y = normal(rows, widths[0]), normal(rows, widths[-1])

    def loss(params):
        h = x
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h - y) ** 2)

    return loss, params


def edges(loss: Any, params: Any) -> int:
    """The edges of the scalar graph: of a matrix product two for each multiplication, else one an element."""
    total = 0

    def apply(eqn, values):
        nonlocal total
        sizes = [math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * sizes[-1] * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        else:
            total += max(sizes)
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    program, _ = jaxprs.trace(loss, params)
    jaxprs.inline(program, jax.tree.leaves(params), apply)
    return total


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    loss, params = problem(cell, seed)
    traced = [jax.grad(loss), *(ap.semiring_grad(loss, tracing.SEMIRINGS[name]) for name in SEMIRINGS[1:])]
    compiled = {name: jax.jit(f).lower(params).compile() for name, f in zip(SEMIRINGS, traced, strict=True)}
    seconds = take_turns({name: lambda f=f: f(params) for name, f in compiled.items()}, config.repeats, 0.02)
    return {"edges": edges(loss, params), "seconds": [float(np.median(found)) for found in seconds.values()]}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    named = lambda result: dict(zip(SEMIRINGS, result["seconds"], strict=True))
    rows = [{**cell, "edges": result["edges"], **named(result)} for cell, result in records]
    figures = {}
    figure, (axes,) = harness.panels(1, 4, (17, 4.3))
    for (ax, family), name in itertools.product(zip(axes, FAMILIES, strict=True), SEMIRINGS):
        chosen = sorted((r for r in rows if r["family"] == family), key=lambda r: r["edges"])
        size, seconds = (np.array([r[k] for r in chosen], float) for k in ("edges", name))
        slope, offset = np.polyfit(size, seconds, 1, w=1 / seconds)
        residuals = seconds / (offset + slope * size) - 1
        half = slice(len(size) // 2 if len(size) >= 4 else 0, None)
        power: Any = linregress(np.log(size[half]), np.log(seconds[half]))
        found = {"nanoseconds_an_edge": 1e9 * slope, "offset_seconds": offset}
        found["relative_residual"] = float(np.sqrt(np.mean(residuals**2)))
        figures[f"{family} {name}"] = found | {"exponent": power.slope, "exponent_standard_error": power.stderr}
        (line,) = ax.plot(size, seconds, "o", label=name)
        fine = np.geomspace(size[0], size[-1], 50)
        ax.plot(fine, offset + slope * fine, lw=1, color=line.get_color())
        ax.set(xscale="log", yscale="log", xlabel="edges of the scalar graph", ylabel="seconds", title=family)
    axes[0].legend()
    shown = [{"family, semiring": name, **found} for name, found in figures.items()]
    return harness.Report(figures, rows, harness.table(shown, *shown[0]), figure)


if __name__ == "__main__":
    harness.main()
