"""How much memory a function's reverse pass takes: what it remembers, and what the compiled program needs.

Residuals are the arrays that `jax.vjp` leaves behind, without the arguments and their views. Temp bytes are the
compiler's account of the gradient's scratch memory, with the gradients' buffers. **XLA on the CPU drops optimization
barriers**, and with them all that `jax.checkpoint` saves outside of a scan. So the report keeps them, and says so.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from apgrad._ground.arguments import chosen_numbers
from apgrad._ground.pictures import new_figure
from apgrad._ground.warning import warn
from apgrad._programs import jaxprs
from apgrad._programs.kinds import LINEAR_IN_EACH, SAME_VALUE
from apgrad.memory._budget import relative_variance
from apgrad.memory._randomize import arrays_in, randomize
from apgrad.memory._recompute import work as work_of
from apgrad.memory._samplers import array_bytes, nbytes, rounding, stratified
from apgrad.memory._slots import is_view

__all__ = ["MemoryReport", "Residual", "memory_report", "residuals", "temp_bytes"]
_NO_SCOPE = "(no scope; ap.tracing.name_modules names those of a Flax NNX model)"
_NOTICEABLE = 0.01  # the share of plain reverse mode's bytes from which on more memory is spoken of
# LLVM's optimizations, which take half of a compilation, come after the buffers have been assigned. XLA dies of a
# barrier in a small loop that it has hoisted into a call.
_KEEP_BARRIERS = {
    "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting",
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class Residual(NamedTuple):
    """An array that the reverse pass remembers.

    Attributes:
      name: its scopes and the primitive that computes it.
      shape: of all steps, if a scan's body computes it.
      dtype: its dtype.
      nbytes: the bytes of all steps.
      source: the user's line that computes it.
      count: how many steps there are.
      consumers: the scopes and primitives of the reverse pass that take it.
      linear: whether all these are linear in it, so that it may be rounded or sampled without bias.
      work: about how many operations compute it again from what else is remembered.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    source: str = ""
    count: int = 1
    consumers: tuple[str, ...] = ()
    linear: bool = False
    work: float = 0.0

    def remedies(self) -> dict[str, tuple[int, str]]:
        """What each remedy would save of the bytes, and what it costs, predicted without compiling.

        The compiled peak may fall by less, see `ap.memory.plan`. Variances are over the array's mean square, for normal
        entries.
        """
        found = {"recompute": (self.nbytes, f"{self.work:.2g} operations")}
        if self.linear and self.shape and jnp.issubdtype(self.dtype, jnp.floating):
            like = jax.ShapeDtypeStruct(self.shape, self.dtype)
            for name, sampler in _REMEDIES.items():
                saved = self.nbytes - nbytes(sampler, like)
                if saved > 0:
                    found[name] = saved, f"variance {relative_variance(sampler):.2g}"
        return found | {"offload": (self.nbytes, f"{2 * self.nbytes} bytes moved")}


_REMEDIES = {"round to 8 bits": rounding(8), "round to 4 bits": rounding(4), "sample a tenth": stratified(0.1)}


class MemoryBytes(NamedTuple):
    """One row of a report: what reverse mode remembers, and the compiled gradient's scratch memory."""

    residual_bytes: int
    temp_bytes: int
    residuals: tuple[Residual, ...]


class MemoryReport(NamedTuple):
    """What `memory_report` found; `str` makes a table of it.

    Attributes:
      rows: a row for each variant, by name; the first is plain reverse mode.
      note: how the gradients were compiled, and which variants need 1 % more memory or more than plain reverse mode.
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
        first = next(iter(self.rows.values()))
        width = max(len(name) for name in self.rows)
        unit, scale = ("MB", 1e6) if max(row.residual_bytes for row in self.rows.values()) >= 1e5 else ("kB", 1e3)
        lines = [f"{'':{width}}  residuals {unit}   less  temp {unit}   less"]
        # How many times less than reverse mode, where both are of a size to be compared.
        less = lambda mine, full: f"{f'{full / mine:.1f}x' if mine * 1000 > full else '-':>6}"
        for name, (kept, temp, _) in self.rows.items():
            residuals = f"{kept / scale:12.3f} {less(kept, first.residual_bytes)}"
            lines.append(f"{name:{width}}  {residuals} {temp / scale:8.3f} {less(temp, first.temp_bytes)}")
        steps = lambda r: f"  {r.count} steps" if r.count > 1 else ""
        kept = []
        for number, r in _grouped(first.residuals)[:5]:
            many, each = (f"{number} x ", ", each") if number > 1 else ("", "")
            kept.append(f"  {many}{_size(r.nbytes)}  {r.name}  {r.dtype}{list(r.shape)}{steps(r)}  {r.source}".rstrip())
            kept.append(f"      for {', '.join(r.consumers[:3])}" + (" ..." if len(r.consumers) > 3 else ""))
            saved = [f"{name} -{_size(saved)} ({cost})" for name, (saved, cost) in r.remedies().items()]
            kept.append(f"      of residuals{each}: {'; '.join(saved)}")
        if kept:
            which = f"the largest of {len(first.residuals)} arrays that {next(iter(self.rows))} keeps"
            lines += [f"{which} (a variance is of the noise, over the array's mean square):", *kept]
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
    """Arrays that differ in the numbers of their scopes alone are one, with how many they are; most bytes first."""
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
    flat, inexact, put = _shapes_in(args)

    def linearize(*values):
        with_messages = lambda *values: [x for x in jax.tree.leaves(function(*put(*values))) if jaxprs.is_inexact(x)]
        restricted, some = jaxprs.restrict(with_messages, values, inexact)
        return jax.vjp(restricted, *some)

    traced, (outputs, pullback) = jaxprs.trace(linearize, *flat)
    leaves, tree = jax.tree.flatten(pullback)
    back = jaxprs.inlined(lambda leaves, messages: tree.unflatten(leaves)(messages), leaves, outputs)
    jaxpr = jaxprs.inlined(lambda *values: jaxprs.inline(traced, values)[len(outputs) :], *flat).jaxpr
    free = {*jaxpr.invars, *jaxpr.constvars}
    index = functools.cache(_Index)  # a program may stand in several equations

    def source(v):
        maker = index(jaxpr).maker
        while not isinstance(v, Literal) and v in maker and _same(maker[v]):
            v = maker[v].invars[maker[v].outvars.index(v)]
        return v

    found = {}
    for v, taken in zip(jaxpr.outvars, back.jaxpr.invars, strict=False):
        origin = source(v)
        if isinstance(origin, Literal) or origin in free or v in found or origin in found:
            continue
        keep = min(origin, v, key=lambda v: array_bytes(v.aval))
        name, line, count, work = _maker_of(keep, jaxpr, index)
        users = _consumers(back.jaxpr, taken, index)
        linear = all(is_linear for _, is_linear in users)
        names, aval = tuple(dict.fromkeys(name for name, _ in users)), keep.aval
        found[keep] = Residual(name, aval.shape, aval.dtype, array_bytes(aval), line, count, names, linear, work)
    return tuple(found.values())


class _Index:
    """Of a jaxpr, for each variable, what makes it and what takes it: found in one pass, however many are asked for."""

    def __init__(self, jaxpr: Any):
        self.jaxpr, self.maker = jaxpr, {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.takers: dict[Any, list[tuple[Any, int]]] = {}
        for eqn in jaxpr.eqns:
            for i, v in enumerate(eqn.invars):
                if not isinstance(v, Literal):
                    self.takers.setdefault(v, []).append((eqn, i))

    @functools.cached_property
    def work(self) -> dict[Any, float]:
        """Of each output, and of what it is a view of, the work of computing it from the other outputs."""
        # The equations that a variable needs are a bit set, which lives until the variable's last use.
        eqns, kept = self.jaxpr.eqns, {*jaxprs.variables(self.jaxpr.outvars)}
        asked = set(kept)
        for eqn in reversed(eqns):
            if _same(eqn) and not asked.isdisjoint(eqn.outvars):
                asked.update(jaxprs.variables(eqn.invars))
        costs, needs, found = np.array(list(map(work_of, eqns))), dict[Any, int](), {}
        for i, eqn in enumerate(eqns):
            taken, bits = jaxprs.variables(eqn.invars), 1 << i
            for v in taken:
                bits |= needs.get(v, 0)
            needs |= {v: bits for v in eqn.outvars if v in self.takers and v not in kept}
            for v in taken:
                if self.takers[v][-1][0] is eqn:
                    needs.pop(v, None)
            if not asked.isdisjoint(eqn.outvars):
                octets = np.frombuffer(bits.to_bytes(i // 8 + 1, "little"), np.uint8)
                work = float(costs[: i + 1] @ np.unpackbits(octets, bitorder="little")[: i + 1])
                found |= dict.fromkeys(eqn.outvars, work)
        return found


def _consumers(jaxpr: Any, var: Any, index: Callable[[Any], _Index]) -> list[tuple[str, bool]]:
    """The equations that take a variable or a view of it, in programs inside too, and whether they are linear in it."""
    found = []
    for eqn, i in index(jaxpr).takers.get(var, ()):
        here, inside = jaxprs.plain_scope(jaxprs.scope(eqn)), jaxprs.nested(eqn)
        if inside is not None and inside.kind in ("call", "cond", "remat", "scan"):
            at = i - (inside.kind == "cond")
            inner = [_consumers(p.jaxpr, p.jaxpr.invars[at], index) for p in inside.jaxprs if at >= 0]
            found += [(jaxprs.join(here, name), flag) for users in inner for name, flag in users]
        elif _same(eqn):
            found += _consumers(jaxpr, eqn.outvars[eqn.invars.index(var)], index)
        else:
            name = eqn.primitive.name
            found.append((jaxprs.join(here, name), name in LINEAR_IN_EACH))
    return found


def _maker_of(var: Any, jaxpr: Any, index: Callable[[Any], _Index]) -> tuple[str, str, int, float]:
    """Of a variable: scopes and primitive, line, steps, work; in a program inside, those of what makes it."""
    eqn = index(jaxpr).maker[var]
    inside, here = jaxprs.nested(eqn), jaxprs.plain_scope(jaxprs.scope(eqn))
    if inside is not None and inside.kind in ("call", "cond", "remat", "scan"):
        number = eqn.outvars.index(var)
        steps = inside.length if inside.kind == "scan" and number >= inside.counts[1] else 1
        for program in inside.jaxprs:
            maker, v = index(program.jaxpr).maker, program.jaxpr.outvars[number]
            # Through what only moves it, and through the zeros that a branch has in place of another's array.
            while not isinstance(v, Literal) and v in maker and _moves(maker[v]):
                v = maker[v].invars[0]
            if not isinstance(v, Literal) and v in maker:
                name, line, count, work = _maker_of(v, program.jaxpr, index)
                return jaxprs.join(here, name), line, steps * count, steps * work
        return jaxprs.join(here, eqn.primitive.name), jaxprs.source_line(eqn), steps, steps * work_of(eqn)
    return jaxprs.join(here, eqn.primitive.name), jaxprs.source_line(eqn), 1, index(jaxpr).work[var]


def _idle_policies(program: jaxprs.Program) -> list[str]:
    """The checkpointed blocks, by scope, whose policy keeps none of the arrays inside."""
    policies, found = jax.checkpoint_policies, []
    none = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[], offload_src="device", offload_dst="pinned_host"
    )
    for eqn in program.jaxpr.eqns:
        inside, here = jaxprs.nested(eqn), jaxprs.join(jaxprs.plain_scope(jaxprs.scope(eqn)), eqn.primitive.name)
        if inside is None:
            continue
        policy = inside.options.get("policy") if inside.kind == "remat" else None
        if policy is not None and policy is not policies.nothing_saveable:
            kept = False
            for e in inside.jaxprs[0].jaxpr.eqns:
                arguments = (e.primitive, *(v.aval for v in e.invars))
                answer = policy(*arguments, **e.params)
                kept |= bool(answer) and type(answer) is not type(none(*arguments, **e.params))
            found += [] if kept else [f"{here}, {jaxprs.source_line(eqn)}"]
        found += [name for inner in inside.jaxprs for name in _idle_policies(inner)]
    return found


def _same(eqn: Any) -> bool:
    return is_view(eqn) or eqn.primitive.name in SAME_VALUE


def _moves(eqn: Any) -> bool:
    return _same(eqn) and len(eqn.invars) == 1 and not isinstance(eqn.invars[0], Literal)


def memory_report(
    function: Callable[..., Any],
    *args: Any,
    variants: Mapping[str, Callable[..., Any]] | None = None,
    key: jax.Array | None = None,
) -> MemoryReport:
    """The memory of a scalar function's gradient: what reverse mode keeps, array by array, and what is compiled.

    Args:
      function: `(*args) -> scalar`.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s; differentiated where floating-point.
      variants: other rows: names to functions of the same arguments, as `{"checkpoint": jax.checkpoint(function)}`.
      key: if given, the rows `randomize` with rounding to 4 and 2 bits are added, with this key.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> def loss(w, x):
      ...     return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
      >>> report = ap.memory_report(loss, jnp.ones((64, 64)), jnp.ones((32, 64)), key=jax.random.key(0))
      >>> report.rows["reverse mode"].residual_bytes > 5 * report.rows["rounding, 4 bits"].residual_bytes
      True
    """
    functions: dict[str, tuple[Callable[..., Any], Any]] = {"reverse mode": (function, args)}
    if key is not None:
        for bits in (4, 2):
            functions[f"rounding, {bits} bits"] = randomize(function, rounding(bits=bits)), (key, *args)
    functions |= {name: (f, args) for name, f in (variants or {}).items()}
    flat, _, put = _shapes_in(args)
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
    is_more = lambda mine, full: mine - full >= max(_NOTICEABLE * full, 1)
    more = [
        f"{name!r} {does} {mine} bytes, reverse mode {full}"
        for name, row in rows.items()
        for does, mine, full in zip(("remembers", "compiles to"), row, first, strict=False)
        if is_more(mine, full)
    ]
    if more:
        note = "\n".join([note, "MORE MEMORY than plain reverse mode: " + "; ".join(more)]).strip()
    # The compiler may need more scratch memory by chance; but what is remembered is the transformation's choice.
    worse = [name for name, row in rows.items() if is_more(row.residual_bytes, first.residual_bytes)]
    if worse:
        warn(
            f"{', '.join(worse)}: more memory than plain reverse mode ({rows[worse[0]].residual_bytes} bytes are "
            f"remembered, {first.residual_bytes} by reverse mode). Leave this function, or this part of it, as it is.",
        )
    return MemoryReport(rows, note)


def compiled_note() -> str:
    cpu = jax.default_backend() == "cpu"
    return "compiled on the CPU with optimization barriers kept (XLA drops them there by default)" if cpu else ""


def temp_bytes(function: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None) -> int:
    """The bytes of the compiled gradient's scratch memory, with optimization barriers kept on the CPU too.

    Args:
      function: `(*args) -> scalar`.
      *args: pytrees of arrays, keys or `jax.ShapeDtypeStruct`s, all of them inputs of the program that is compiled.
        What is made of arrays that the function closes over alone is no scratch memory: XLA computes it beforehand.
      argnums: the arguments to differentiate with respect to, where floating-point; all if not given.

    Returns:
      The bytes, or -1 where the compiler gives no account.

    Raises:
      TypeError: if the function has more outputs than one scalar, or no floating-point array is differentiated.
    """
    flat, inexact, put = _shapes_in(args, argnums)
    if not inexact:
        leaves = jax.tree.leaves(args if argnums is None else [args[i] for i in chosen_numbers(argnums, len(args))])
        found = ", ".join(dict.fromkeys(str(getattr(x, "dtype", type(x).__name__)) for x in leaves)) or "none"
        raise TypeError(
            f"this gradient needs a floating-point array to differentiate with respect to, got {found}. "
            "Give parameters in floating point; argnums, where there are any, are their numbers."
        )

    def scalar(*values):
        output = function(*put(*values))
        if (form := [jnp.shape(x) for x in jax.tree.leaves(output)]) != [()]:
            raise TypeError(
                f"the gradient that is measured is of a function with one scalar output, got arrays of shapes {form}. "
                "Leave what is auxiliary out: lambda *args: function(*args)[0]"
            )
        return output

    gradient = jax.jit(jax.grad(scalar, argnums=inexact))
    options: Any = _KEEP_BARRIERS if jax.default_backend() == "cpu" else None
    compiled = gradient.lower(*flat).compile(compiler_options=options)
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else -1


def _shapes_in(args: Any, argnums: Any = None) -> tuple[list[Any], tuple[int, ...], Callable[..., Any]]:
    flat, inexact, put = arrays_in(args, range(len(args)) if argnums is None else chosen_numbers(argnums, len(args)))
    return list(jax.eval_shape(lambda *arrays: arrays, *flat)), inexact, put
