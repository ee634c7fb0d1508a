"""How much memory a function's reverse pass takes: what it remembers, and what the compiled program needs.

`memory_report` compares a function with checkpointing and with `ap.randomize`; `residuals` and `temp_bytes` are its
parts. Residuals are the arrays that `jax.vjp` leaves behind, without the arguments and their views, which the caller
has anyway. Temp bytes are the compiler's own account of the gradient's scratch memory
(`compiled.memory_analysis().temp_size_in_bytes`), in which buffers of the gradients are counted. **XLA on the CPU drops
optimization barriers** (its pass `cse_barrier_expander`), and with them all that `jax.checkpoint` saves outside of a
scan. So the report compiles with this pass switched off there, and says so.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from apgrad._ground.pictures import new_figure
from apgrad._programs import jaxprs
from apgrad._programs.kinds import SAME_VALUE
from apgrad.memory._randomize import randomize
from apgrad.memory._samplers import array_bytes, rounding
from apgrad.memory._slots import is_view

_NOTICEABLE = 0.01  # the share of plain reverse mode's bytes from which on more memory is spoken of
# LLVM's optimizations, which take half of a compilation, come after the buffers have been assigned.
_KEEP_BARRIERS = {
    "xla_disable_hlo_passes": "cse_barrier_expander",
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class Residual(NamedTuple):
    """An array that the reverse pass remembers, by its scopes and primitive, and the user's line that computes it."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    source: str = ""


class MemoryBytes(NamedTuple):
    """One row of a report: what reverse mode remembers, and the compiled gradient's scratch memory."""

    residual_bytes: int
    temp_bytes: int
    residuals: tuple[Residual, ...]


class MemoryReport(NamedTuple):
    """What `memory_report` found; `str` makes a table of it.

    Attributes:
      rows: a row for each variant, by name; the first is plain reverse mode.
      note: how the gradients were compiled, and which variants need more memory than plain reverse mode.
    """

    rows: dict[str, MemoryBytes]
    note: str

    def __str__(self) -> str:
        """The table."""
        first = next(iter(self.rows.values()))
        width = max(len(name) for name in self.rows)
        lines = [f"{'':{width}}  residuals MB   less  temp MB   less"]
        for name, row in self.rows.items():
            parts = [
                f"{mine / 1e6:{w}.3f} {_times_less(mine, full):>6}"
                for w, mine, full in (
                    (12, row.residual_bytes, first.residual_bytes),
                    (8, row.temp_bytes, first.temp_bytes),
                )
            ]
            lines.append(f"{name:{width}}  {' '.join(parts)}")
        largest = sorted(first.residuals, key=lambda r: -r.nbytes)[:5]
        kept = [f"  {r.nbytes / 1e6:.3f} MB  {r.name}  {r.dtype}{list(r.shape)}  {r.source}".rstrip() for r in largest]
        if kept:
            lines += [f"the largest of {len(first.residuals)} arrays that {next(iter(self.rows))} keeps:", *kept]
        return "\n".join([*lines, self.note])

    def plot(self, ax: Any = None) -> Any:
        """Draws the rows as horizontal bars.

        Args:
          ax: matplotlib axes; a new figure's if not given.

        Returns:
          The axes; `ax.figure` is the figure.
        """
        if ax is None:
            ax = new_figure((7.0, 1.2 + 0.4 * len(self.rows))).subplots()
        names = list(self.rows)
        for i, (label, pick) in enumerate(
            {"residuals": lambda r: r.residual_bytes, "compiled temp": lambda r: r.temp_bytes}.items()
        ):
            places = [j + 0.4 * i - 0.2 for j in range(len(names))]
            ax.barh(places, [pick(row) / 1e6 for row in self.rows.values()], height=0.4, label=label)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlabel("MB")
        ax.legend(frameon=False)
        return ax


def _times_less(mine: int, full: int) -> str:
    """How many times less than reverse mode, where both are of a size to be compared."""
    return f"{full / mine:.1f}x" if mine * 1000 > full else "-"


def residuals(function: Callable[..., Any], *args: Any) -> tuple[Residual, ...]:
    """What reverse mode of `function(*args)` remembers with respect to all its floating-point arguments.

    Args:
      function: any JAX function.
      *args: pytrees of arrays, keys or `jax.ShapeDtypeStruct`s.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> [(r.shape, r.nbytes) for r in ap.memory.residuals(lambda x: jnp.sum(jnp.sin(x) * 2), jnp.ones((3, 5)))]
      [((3, 5), 60)]
    """
    flat, put = jaxprs.arrays_of(args)
    inexact = [i for i, x in enumerate(flat) if jnp.issubdtype(_dtype(x), jnp.inexact)]

    def linearize(*values):
        def with_messages(*values):
            outputs = jax.tree.leaves(function(*put(*values)))
            return [x for x in outputs if jnp.issubdtype(_dtype(x), jnp.inexact)]

        restricted, some = jaxprs.restrict(with_messages, values, inexact)
        return jax.tree.leaves(jax.vjp(restricted, *some)[1])

    structs = [jax.ShapeDtypeStruct(jnp.shape(x), _dtype(x)) for x in flat]
    jaxpr = jaxprs.inlined(linearize, *structs).jaxpr
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    free = {*jaxpr.invars, *jaxpr.constvars}

    def source(v):
        same = lambda eqn: is_view(eqn) or eqn.primitive.name in SAME_VALUE
        while not isinstance(v, Literal) and v in maker and same(maker[v]):
            v = maker[v].invars[maker[v].outvars.index(v)]
        return v

    found = {}
    for v in jaxpr.outvars:
        origin = source(v)
        if isinstance(origin, Literal) or origin in free or v in found or origin in found:
            continue
        keep = min(origin, v, key=lambda v: array_bytes(v.aval))
        name = jaxprs.join(jaxprs.plain_scope(jaxprs.scope(maker[keep])), maker[keep].primitive.name)
        aval: Any = keep.aval
        found[keep] = Residual(name, aval.shape, aval.dtype, array_bytes(aval), jaxprs.source_line(maker[keep]))
    return tuple(found.values())


def memory_report(
    function: Callable[..., Any],
    *args: Any,
    layers: Callable[..., Any] | None = None,
    variants: Mapping[str, Callable[..., Any]] | None = None,
    key: jax.Array | None = None,
) -> MemoryReport:
    """The memory of a scalar function's gradient, beside the memory of plain reverse mode and of checkpointing.

    Args:
      function: `(*args) -> scalar`.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s; differentiated where floating-point.
      layers: a function `(wrap) -> function` that makes the same function with `wrap` around each of its layers; then
        checkpointing of each layer is a row (`wrap=jax.checkpoint`).
      variants: other rows: names to functions of the same arguments; a nested checkpoint, for example.
      key: if given, the rows `randomize` with rounding to 4 and 2 bits and their checkpoints are added, with this key.

    Returns:
      The report. A variant that needs at least 1 % more memory than plain reverse mode is named in its note; if it
      remembers that much more, a `UserWarning` says so too.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> def loss(w, x):
      ...     return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
      >>> report = ap.memory_report(loss, jnp.ones((64, 64)), jnp.ones((32, 64)), key=jax.random.key(0))
      >>> report.rows["reverse mode"].residual_bytes > 5 * report.rows["rounding, 4 bits"].residual_bytes
      True
    """
    functions: dict[str, Callable[..., Any]] = {"reverse mode": function, "checkpoint": jax.checkpoint(function)}
    if layers is not None:
        functions["checkpoint each layer"] = layers(jax.checkpoint)
    if key is not None:
        for bits in (4, 2):
            random = randomize(function, rounding(bits=bits))
            functions[f"rounding, {bits} bits"] = lambda *a, random=random: random(key, *a)
        if layers is not None:
            random_layers = randomize(layers(jax.checkpoint), rounding(bits=4))
            functions["checkpoint each layer + rounding, 4 bits"] = lambda *a: random_layers(key, *a)
    functions |= dict(variants or {})
    cpu = jax.default_backend() == "cpu"
    rows = {}
    for i, (name, f) in enumerate(functions.items()):
        if sys.stderr.isatty():  # compiling a large model takes minutes
            print(f"memory_report: {name}, {i + 1} of {len(functions)} gradients to compile", file=sys.stderr)
        kept = residuals(f, *args)
        rows[name] = MemoryBytes(sum(r.nbytes for r in kept), temp_bytes(f, *args), kept)
    note = "compiled on the CPU with optimization barriers kept (XLA drops them there by default)" if cpu else ""
    first = rows["reverse mode"]
    is_more = lambda mine, full: mine - full >= max(_NOTICEABLE * full, 1)
    more = [
        f"{name!r} {kind} {mine} bytes, reverse mode {full}"
        for name, row in rows.items()
        for kind, mine, full in (
            ("remembers", row.residual_bytes, first.residual_bytes),
            ("compiles to", row.temp_bytes, first.temp_bytes),
        )
        if is_more(mine, full)
    ]
    if more:
        note = "\n".join([note, "MORE MEMORY than plain reverse mode: " + "; ".join(more)]).strip()
    # The compiler may need more scratch memory by chance; but what is remembered is the transformation's choice.
    worse = [name for name, row in rows.items() if is_more(row.residual_bytes, first.residual_bytes)]
    if worse:
        warnings.warn(
            f"{', '.join(worse)}: more memory than plain reverse mode ({rows[worse[0]].residual_bytes} bytes are "
            f"remembered, {first.residual_bytes} by reverse mode). Leave this function, or this part of it, as it is.",
            stacklevel=2,
        )
    return MemoryReport(rows, note)


def temp_bytes(function: Callable[..., Any], *args: Any) -> int:
    """The bytes of the compiled gradient's scratch memory, with optimization barriers kept on the CPU too.

    Args:
      function: `(*args) -> scalar`.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s; differentiated where floating-point.

    Returns:
      The bytes, or -1 where the compiler gives no account.
    """
    flat, put = jaxprs.arrays_of(args)
    inexact = tuple(i for i, x in enumerate(flat) if jnp.issubdtype(_dtype(x), jnp.inexact))
    gradient = jax.jit(jax.grad(lambda *v: function(*put(*v)), argnums=inexact))
    options: Any = _KEEP_BARRIERS if jax.default_backend() == "cpu" else None
    compiled = gradient.lower(*flat).compile(compiler_options=options)
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else -1


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
