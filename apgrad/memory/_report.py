"""How much memory a function's reverse pass takes: what it remembers, and what the compiled program needs.

Temp bytes are the compiler's account of the gradient's scratch memory, without what XLA puts into the outputs' buffers
meanwhile. **XLA on the CPU drops optimization barriers**, and so what `jax.checkpoint` saves; not so for the report.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Recompute
from jax.core import Tracer

from apgrad._ground.arguments import chosen_numbers
from apgrad._ground.messages import tuple_of
from apgrad._ground.pictures import new_figure
from apgrad._ground.warning import warn
from apgrad._programs import jaxprs
from apgrad.memory._randomize import randomize, shapes_in
from apgrad.memory._residuals import Residual, residuals
from apgrad.memory._samplers import rounding

__all__ = ["MemoryReport", "memory_report", "temp_bytes"]
_NO_SCOPE = "(no scope; ap.tracing.name_modules names those of a Flax NNX model)"
_NOTICEABLE = 0.01  # more memory is reported if it is more by this share of plain reverse mode's bytes
# LLVM's optimizations, which take half of a compilation, are off, as they come after the buffers have been assigned. So
# is the hoisting of small loops into calls: XLA crashes on a barrier in such a loop.
_KEEP_BARRIERS = {
    "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting",
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class MemoryBytes(NamedTuple):
    """One row of a report: what reverse mode remembers, and the compiled gradient's scratch memory."""

    residual_bytes: int
    temp_bytes: int
    residuals: tuple[Residual, ...]


class MemoryReport(NamedTuple):
    """What `memory_report` found; `str` makes a table of it.

    Attributes:
      rows: a row for each variant, by name; the first is plain reverse mode.
      note: how the gradients were compiled, and which variants need at least 1 % more memory than plain reverse mode.
    """

    rows: dict[str, MemoryBytes]
    note: str

    def scopes(self, depth: int = 2) -> dict[str, int]:
        """The bytes that plain reverse mode keeps, summed by scope, most first.

        Args:
          depth: how many names of a scope count, from the outermost on.
        """
        sums: dict[str, int] = {}
        for r in next(iter(self.rows.values())).residuals:
            scope = jaxprs.join(*r.name.split("/")[:-1][:depth])
            sums[scope] = sums.get(scope, 0) + r.nbytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        plain, first = next(iter(self.rows.items()))
        width = max(map(len, self.rows))
        unit, scale = ("MB", 1e6) if max(row.residual_bytes for row in self.rows.values()) >= 1e5 else ("kB", 1e3)
        lines = [f"{'':{width}}  residuals {unit}   less  temp {unit}   less"]
        # How many times less than reverse mode, where both are of a size to be compared.
        less = lambda mine, full: f"{f'{full / mine:.1f}x' if mine * 1000 > full else '-':>6}"
        for name, (kept, temp, _) in self.rows.items():
            residuals = f"{kept / scale:12.3f} {less(kept, first.residual_bytes)}"
            lines.append(f"{name:{width}}  {residuals} {temp / scale:8.3f} {less(temp, first.temp_bytes)}")
        if first.residuals:
            which = f"the largest of {len(first.residuals)} arrays that {plain} keeps"
            lines.append(f"{which} (a variance is of the noise, over the array's mean square):")
        for number, r in _grouped(first.residuals)[:5]:
            many, each = (f"{number} x ", ", each") if number > 1 else ("", "")
            steps = f"  {r.count} steps" if r.count > 1 else ""
            lines.append(f"  {many}{_size(r.nbytes)}  {r.name}  {r.dtype}{list(r.shape)}{steps}  {r.source}".rstrip())
            lines.append(f"      for {', '.join(r.consumers[:3])}" + (" ..." if len(r.consumers) > 3 else ""))
            saved = [f"{name} -{_size(saved)} ({cost})" for name, (saved, cost) in r.remedies().items()]
            lines.append(f"      of residuals{each}: {'; '.join(saved)}")
        if 0 <= first.temp_bytes < first.residual_bytes:
            lines.append(
                "The compiler needs less than the residuals here: temp memory falls by less than residuals do; "
                "ap.memory.plan measures it."
            )
        scopes: dict[str, list[str]] = {}
        for name in (bytes_of := self.scopes()):
            scopes.setdefault(_unnumbered(f"{name}/")[:-1], []).append(name)
        if len(bytes_of) > 1:
            sums = [(sum(map(bytes_of.__getitem__, same)), name, same) for name, same in scopes.items()]
            lines.append("by scope:")
            for total, name, same in sorted(sums, key=lambda item: -item[0])[:5]:
                what = f"{name} ({len(same)} scopes)" if len(same) > 1 else same[0] or _NO_SCOPE
                lines.append(f"  {_size(total)}  {what}")
        return "\n".join([*lines, self.note])

    def plot(self, ax: Any = None) -> Any:
        """Draws the rows as horizontal bars, and returns the axes.

        Args:
          ax: matplotlib axes; a new figure's if not given.
        """
        if ax is None:
            ax = new_figure((7.0, 1.2 + 0.4 * len(self.rows))).subplots()
        residual, temp = zip(*(row[:2] for row in self.rows.values()), strict=True)
        for i, (label, column) in enumerate((("residuals", residual), ("compiled temp", temp))):
            places = [j + 0.4 * i - 0.2 for j in range(len(self.rows))]
            ax.barh(places, [nbytes / 1e6 for nbytes in column], height=0.4, label=label)
        ax.set_yticks(range(len(self.rows)), list(self.rows))
        ax.invert_yaxis()
        ax.set_xlabel("MB")
        ax.legend(frameon=False)
        return ax


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f} MB" if nbytes >= 1e4 else f"{nbytes} bytes"


def _grouped(arrays: Iterable[Residual]) -> list[tuple[int, Residual]]:
    """`(how many, array)`, most bytes first; arrays that differ only in the numbers of scopes are counted as one."""
    groups: dict[Residual, list[Residual]] = {}
    for array in arrays:
        names = tuple(dict.fromkeys(map(_unnumbered, array.consumers)))
        groups.setdefault(array._replace(name=_unnumbered(array.name), consumers=names, work=0.0), []).append(array)
    found = []
    for alike, same in groups.items():
        one = same[0]
        name = one.name if len({array.name for array in same}) == 1 else alike.name
        consumers = one.consumers if len({array.consumers for array in same}) == 1 else alike.consumers
        work = max(array.work for array in same)
        found.append((len(same), alike._replace(name=name, consumers=consumers, work=work)))
    return sorted(found, key=lambda item: -item[0] * item[1].nbytes)


def _unnumbered(name: str) -> str:
    """A name in which the numbers at the ends of scopes are stars, as "blocks_*/dot_general"."""
    return re.sub(r"\d+(?=/)", "*", name)


def _idle_policies(program: jaxprs.Program) -> list[str]:
    """The checkpointed blocks, by scope, whose policy keeps none of the arrays inside."""
    found = []
    for eqn in program.jaxpr.eqns:
        inside, here = jaxprs.nested(eqn), jaxprs.join(jaxprs.plain_scope(jaxprs.scope(eqn)), eqn.primitive.name)
        if inside is None:
            continue
        # JAX asks the policy of equations within calls, loops and branches of the block, too.
        policy, eqns = inside.options.get("policy"), jaxprs.all_equations(inside.jaxprs[0])
        if policy is not None and policy is not jax.checkpoint_policies.nothing_saveable:
            answers = [policy(e.primitive, *(v.aval for v in e.invars), **e.params) for e in eqns]
            if all(answer is Recompute or not answer for answer in answers):
                found.append(f"{here}, {jaxprs.source_line(eqn)}")
        found += [name for inner in inside.jaxprs for name in _idle_policies(inner)]
    return found


def memory_report(
    function: Callable[..., Any],
    *args: Any,
    variants: Mapping[str, Callable[..., Any]] | None = None,
    key: jax.Array | None = None,
) -> MemoryReport:
    """The memory of a scalar function's gradient: what reverse mode keeps, array by array, and what is compiled.

    Args:
      function: `(*args) -> scalar`.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s; differentiated where floating-point. If they are sharded,
        the compiled memory ("temp MB") is that of one device, and what reverse mode keeps is that of all.
      variants: other rows: names to functions of the same arguments, as `{"checkpoint": jax.checkpoint(function)}`.
      key: if given, the rows `randomize` with rounding to 4 and 2 bits are added, with this key.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
      >>> report = ap.memory_report(loss, jnp.ones((64, 64)), jnp.ones((32, 64)), key=jax.random.key(0))
      >>> report.rows["reverse mode"].residual_bytes > 5 * report.rows["rounding, 4 bits"].residual_bytes
      True
    """
    functions: dict[str, tuple[Callable[..., Any], Any]] = {"reverse mode": (function, args)}
    if key is not None:
        for bits in (4, 2):
            functions[f"rounding, {bits} bits"] = randomize(function, rounding(bits=bits)), (key, *args)
    functions |= {name: (f, args) for name, f in (variants or {}).items()}
    flat, _, put = shapes_in(args)
    if idle := _idle_policies(jaxprs.trace(lambda *values: function(*put(*values)), *flat)[0]):
        warn(
            f"the policy of a checkpointed block keeps nothing there ({'; '.join(idle)}): do its names stand in "
            "jax.ad_checkpoint.checkpoint_name inside the block?",
        )
    rows, note = {}, compiled_note()
    for i, (name, (f, given)) in enumerate(functions.items()):
        if sys.stderr.isatty() and len(functions) > 1:  # compiling a large model takes minutes
            print(f"memory_report: {name}, {i + 1} of {len(functions)} gradients to compile", file=sys.stderr)
        kept = residuals(f, *given)
        rows[name] = MemoryBytes(sum(r.nbytes for r in kept), temp_bytes(f, *given), kept)
    first = rows["reverse mode"]
    kept, compiled = (
        [
            f"{name!r} {does} {row[i]} bytes, reverse mode {first[i]}"
            for name, row in rows.items()
            if row[i] - first[i] >= max(_NOTICEABLE * first[i], 1)
        ]
        for i, does in enumerate(("remembers", "compiles to"))
    )
    if kept or compiled:
        note = f"{note}\nMORE MEMORY than plain reverse mode: {'; '.join(kept + compiled)}".strip()
    # The compiler may need more scratch memory by chance; but what is remembered is the transformation's choice.
    if kept:
        warn(f"more memory than plain reverse mode: {'; '.join(kept)}. Leave this function, or a part of it, as it is.")
    return MemoryReport(rows, note)


def compiled_note() -> str:
    cpu = jax.default_backend() == "cpu"
    return "compiled on the CPU with optimization barriers kept (XLA drops them there by default)" if cpu else ""


pair_of = functools.partial(tuple_of, 2, "with has_aux=True the function must return (loss, aux)")


def temp_bytes(
    function: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None, has_aux: bool = False
) -> int:
    """The bytes of the compiled gradient's scratch memory, with barriers kept on the CPU too; -1 without an account.

    Args:
      function: `(*args) -> scalar`; other outputs, or no floating-point array to differentiate, are a TypeError.
      *args: pytrees of arrays, keys or `jax.ShapeDtypeStruct`s, all of them inputs of the program that is compiled.
        What is made only of arrays that the function closes over is no scratch memory: XLA computes it beforehand.
      argnums: the arguments to differentiate with respect to, where floating-point; all if not given.
      has_aux: whether the function returns `(scalar, aux)`, as in `jax.grad`.
    """
    flat, inexact, put = shapes_in(args, argnums)
    if not inexact:
        leaves = jax.tree.leaves(args if argnums is None else [args[i] for i in chosen_numbers(argnums, len(args))])
        found = ", ".join(dict.fromkeys(str(getattr(x, "dtype", type(x).__name__)) for x in leaves)) or "none"
        raise TypeError(
            f"this gradient needs a floating-point array to differentiate with respect to, got {found}. "
            "Give parameters in floating point; argnums, where there are any, are their numbers."
        )

    def scalar(*values):
        output = function(*put(*values))
        loss, aux = pair_of(output) if has_aux else (output, None)
        if (form := [jnp.shape(x) for x in jax.tree.leaves(loss)]) != [()]:
            raise TypeError(
                f"the gradient that is measured is of a function with one scalar output, got arrays of shapes {form}. "
                "Leave what is auxiliary out (lambda *args: function(*args)[0]), or give ap.memory.plan has_aux=True."
            )
        return loss, aux

    gradient = jax.jit(jax.grad(scalar, argnums=inexact, has_aux=True))
    # What somebody has placed stays there, and the rest is placed by JAX.
    free = lambda x: isinstance(x, Tracer) or not getattr(x, "committed", True)
    given = lambda x: None if free(x) else getattr(x, "sharding", None)
    flat = [aval.update(sharding=given(x)) for aval, x in zip(flat, jaxprs.arrays_of(args)[0], strict=True)]
    options: Any = _KEEP_BARRIERS if jax.default_backend() == "cpu" else None
    compiled = gradient.lower(*flat).compile(compiler_options=options)
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else -1
