"""Any JAX function, with a random and smaller memory in its reverse pass.

The function's jaxpr is walked. Straight-line stretches become propagators (`apgrad.node`): forward, the equations as
they are, and of their pullback's coefficients what `apgrad.randomized.plan` says is to be remembered; backward, the
pullback with the coefficients restored. `scan`, `cond` and `jax.checkpoint` are rebuilt around stretches of their
own, with fresh keys in each step; `while` has no reverse mode and stays as it is; calls are entered; a function's own
derivative rule is used, and its coefficients are remembered like any others.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad import jaxprs
from apgrad.primitives import refuse_derivative
from apgrad.propagator import Propagator, node
from apgrad.randomized import plan as planning
from apgrad.randomized.plan import Coefficient
from apgrad.randomized.samplers import Rounding, Sampler, nbytes, rounding

_REASON = (
    "ap.randomize has no second derivative: the random memory is no differentiable function of the inputs. "
    "Differentiate the function itself, or wrap what needs two derivatives apart from the rest"
)

Choice = Callable[[Coefficient], Sampler | None]


def randomize(
    function: Callable[..., Any],
    sampler: Sampler | Choice | None = None,
    *,
    through: Sampler | None = rounding(bits=8),  # noqa: B008
    budget_bytes: int | None = None,
    min_size: int = 512,
) -> Callable[..., Any]:
    """The function, with a reverse pass that remembers samples: the same value, an unbiased gradient, less memory.

    Args:
      function: any JAX function of arrays: `jit`, `scan`, `cond`, `while_loop`, `vmap`, `jax.checkpoint`, custom
        derivative rules, any library's modules inside.
      sampler: for all coefficients that the reverse pass would keep, and that enter it linearly, or a function
        `(Coefficient) -> sampler or None` that chooses, by name, size or shape; None keeps it exactly.
      through: stands in for a sampler that keeps a fraction of the entries wherever other samples follow on the way
        of the messages (activations' derivatives, attention): noise of 100 % and more would multiply there with depth
        (section 3.3). None keeps those exactly.
      budget_bytes: instead of a sampler: how much may be remembered in all. The samplers are then chosen for the least
        added variance, see `apgrad.randomized.budget`.
      min_size: arrays with fewer entries are kept exactly.

    Returns:
      `randomized(key, *args)`: all randomness comes from the key. Reverse mode, once.

    Raises:
      TypeError: if the first argument of the result is no PRNG key, or it is differentiated twice.
      ValueError: if neither or both of sampler and budget are given, or the budget cannot be kept.

    Note:
      Where an array is needed twice on one way of the messages, it is remembered twice. Arguments of the function are
      not counted and not sampled: the caller has them. Derivative rules of `jax.custom_vjp` are taken for linear in the
      message, as derivatives are; a propagator whose backward is not should not be randomized.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> def loss(w, x):
      ...     return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
      >>> w, x = 0.1 * jax.random.normal(jax.random.key(0), (64, 64)), jnp.ones((128, 64))
      >>> gradient = jax.grad(ap.randomize(loss, ap.randomized.rounding(bits=4)), argnums=1)(jax.random.key(1), w, x)
      >>> error = jnp.linalg.norm(gradient - jax.grad(loss)(w, x)) / jnp.linalg.norm(gradient)
      >>> bool(0 < error < 0.05)
      True
    """
    if (sampler is None) == (budget_bytes is None):
        raise ValueError("randomize takes either a sampler or budget_bytes, got " + ("both" if sampler else "neither"))
    if sampler is not None and not callable(sampler) and not isinstance(sampler, Sampler):
        raise TypeError(f"a sampler has keep, restore and variance, or is a function that chooses one; got {sampler!r}")

    def randomized(key, *args):
        if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
            raise TypeError(
                f"the first argument of a randomized function is a PRNG key, jax.random.key(seed), got {key!r}"
            )
        choose = _chooser(sampler, through, min_size)
        if budget_bytes is not None:
            from apgrad.randomized.budget import allocate

            choose = allocate(coefficients(function, *args, min_size=min_size), budget_bytes)
        leaves, treedef = jax.tree.flatten(args)
        program, shape = jaxprs.trace(lambda *leaves: function(*jax.tree.unflatten(treedef, leaves)), *leaves)
        walk = _Walk(choose, min_size)
        outputs = walk.stretch(program, [True] * len(leaves), "", 1)(key, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    randomized.original = function
    return randomized


def coefficients(function: Callable[..., Any], *args: Any, min_size: int = 512) -> list[tuple[Coefficient, str]]:
    """What reverse mode of a function remembers, in the form in which `randomize` can: with "sampled", "bits" or
    "exact".

    Args:
      function: differentiated with respect to all its floating-point arguments.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      min_size: as in `randomize`.
    """
    found: dict[str, tuple[Coefficient, str]] = {}
    walk = _Walk(_chooser(_Nothing(), None, min_size), min_size, lambda name, entry: found.setdefault(name, entry))

    def run(*args):
        leaves, treedef = jax.tree.flatten(args)
        program, _ = jaxprs.trace(lambda *leaves: function(*jax.tree.unflatten(treedef, leaves)), *leaves)
        outputs = walk.stretch(program, [True] * len(leaves), "", 1)(jax.random.key(0), *leaves)
        return [x for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact)]

    flat, treedef = jax.tree.flatten(args)
    inexact = [i for i, x in enumerate(flat) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

    def differentiated(values):
        def restricted(*chosen):
            merged = list(values)
            for i, x in zip(inexact, chosen, strict=True):
                merged[i] = x
            return run(*jax.tree.unflatten(treedef, merged))

        return jax.vjp(restricted, *(values[i] for i in inexact))[0]

    jax.eval_shape(differentiated, flat)
    return list(found.values())


class _Nothing:
    """Marks what could be sampled: keeps all of it."""

    def keep(self, key, x, axis=-1):
        return x

    def restore(self, key, memory, like, axis=-1):
        return memory

    def variance(self, x, axis=-1):
        return jnp.zeros_like(x)


def _chooser(sampler: Any, through: Sampler | None, min_size: int) -> Choice:
    def choose(coefficient):
        if not isinstance(sampler, Sampler):
            return sampler(coefficient)
        return sampler if coefficient.last or isinstance(sampler, Rounding | _Nothing) else through

    def chooser(coefficient):
        size = 1
        for n in coefficient.shape:
            size *= n
        if size < min_size or not coefficient.shape:
            return None
        chosen = choose(coefficient)
        like = jax.ShapeDtypeStruct(coefficient.shape, coefficient.dtype)
        # A sample of few entries in groups or rows may be larger than the array.
        if chosen is not None and not isinstance(chosen, _Nothing) and nbytes(chosen, like) > coefficient.nbytes:
            return None
        return chosen

    return chooser


class _Walk:
    """A walk over a program that makes propagators of its straight-line stretches."""

    def __init__(self, choose: Choice, min_size: int, record: Callable[..., Any] = lambda name, entry: None):
        self.choose, self.min_size, self.record = choose, min_size, record

    def stretch(self, program: jaxprs.Program, live: Sequence[bool], where: str, count: int) -> Callable[..., Any]:
        """`(key, *inputs) -> outputs`, a node around the program."""
        flags = [*live, *(True for _ in program.consts)]
        bare = jaxprs.Program(program.jaxpr, ())

        def split(inputs):
            size = len(bare.jaxpr.invars)
            return jaxprs.Program(bare.jaxpr, tuple(inputs[size:])), inputs[:size]

        def plain(key, *inputs):
            opened, values = split(inputs)
            marked = [_Live(v) if flag else v for v, flag in zip(values, flags, strict=False)]
            opened = opened._replace(consts=tuple(_Live(c) for c in opened.consts))
            return [_value(v) for v in jaxprs.evaluate(opened, marked, self._apply(key, where, count))]

        def forward(key, *inputs, perturbed):
            inexact = [jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) for x in inputs]
            chosen = [i for i, (p, f) in enumerate(zip(perturbed[1:], inexact, strict=True)) if p and f]
            if not chosen:
                opened, values = split(inputs)
                exact = jaxprs.evaluate(opened, values, lambda eqn, inputs: jaxprs.caller(eqn)(*inputs))
                return exact, None

            def linearize(key, *inputs):
                def restricted(*some):
                    values = list(inputs)
                    for i, x in zip(chosen, some, strict=True):
                        values[i] = x
                    outputs = plain(key, *values)
                    return [x for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact)], outputs

                _, pullback, outputs = jax.vjp(restricted, *(inputs[i] for i in chosen), has_aux=True)
                return outputs, pullback

            walk_key, draw_key = jax.random.split(key)
            made = planning.make_plan(
                linearize,
                (walk_key, *inputs),
                [True, *flags],
                [flags[i] for i in chosen],
                self.choose,
                where,
                count,
            )
            for i, slot in enumerate(made.slots):
                if slot.coefficient is not None and slot.how not in ("live", "nested"):
                    name = slot.coefficient.name or f"{where}/kept[{i}]"
                    self.record(name, (slot.coefficient._replace(name=name), slot.how))
            outputs, memory = _remember(made, draw_key, (walk_key, *inputs))
            return outputs, (memory, draw_key, _Backward(made, tuple(chosen), len(inputs)))

        def backward(memory, messages):
            if memory is None:
                return (None, *(None for _ in flags))
            memory, key, (made, chosen, size) = memory[0], memory[1], memory[2].value
            messages = [m for m in messages if jnp.issubdtype(m.dtype, jnp.inexact)]
            found = _send(made, key, memory, messages)
            answer: list[Any] = [None] * size
            for i, message in zip(chosen, found, strict=True):
                answer[i] = message
            return (None, *answer)

        call = node(Propagator(forward, backward), perturbed=True)
        return lambda key, *inputs: call(key, *inputs, *program.consts)

    def _apply(self, key: jax.Array, where: str, count: int) -> Callable[..., Any]:
        number = 0

        def evaluated(eqn, marked):
            nonlocal number
            values, live = [_value(v) for v in marked], [isinstance(v, _Live) for v in marked]
            inside = jaxprs.nested(eqn)
            if inside is None:
                outputs = jaxprs.caller(eqn)(*values)
                view = eqn.primitive.name in planning.VIEWS and live[0]
                return [_Live(v) if view else v for v in outputs]
            if inside.kind == "call":
                program = inside.jaxprs[0]
                program = program._replace(consts=tuple(_Live(c) for c in program.consts))
                return jaxprs.evaluate(program, marked, apply)
            if inside.kind in ("custom", "while"):
                return jaxprs.caller(eqn)(*values)
            number += 1
            here = jax.random.fold_in(key, number)
            label = "/".join(p for p in (where, jaxprs.scope(eqn), f"{inside.kind}{number}") if p)
            return self._enter(eqn, inside, values, live, here, label, count)

        def apply(eqn, marked):
            # Scopes are names of the coefficients.
            name = jaxprs.scope(eqn)
            with jax.named_scope(name) if name else contextlib.nullcontext():
                return evaluated(eqn, marked)

        return apply

    def _enter(self, eqn, inside, values, live, key, label, count):
        if inside.kind == "scan":
            consts, carry, _ = inside.counts
            # Constants and inputs of the steps stay where they are, states do not.
            flags = [flag and not consts <= i < consts + carry for i, flag in enumerate(live)]
            body = self.stretch(inside.jaxprs[0], flags, label, count * inside.length)
            return jaxprs.rebuild(
                eqn, inside, [lambda step, *inputs: body(jax.random.fold_in(key, step), *inputs)], values
            )
        if inside.kind == "cond":
            branches = [self.stretch(p, live[1:], f"{label}.{i}", count) for i, p in enumerate(inside.jaxprs)]
            functions = [lambda *inputs, b=b: b(key, *inputs) for b in branches]
            return jaxprs.rebuild(eqn, inside, functions, values)
        # What is inside a checkpoint is remembered for a moment only: the key goes in as an input.
        inner = self.stretch(inside.jaxprs[0], live, label, 0)
        return list(jax.checkpoint(inner, **inside.options)(key, *values))


class _Live:
    """A value that somebody else keeps."""

    def __init__(self, value):
        self.value = value


def _value(v):
    return v.value if isinstance(v, _Live) else v


@jax.tree_util.register_static
class _Backward:
    """What the backward pass knows from the trace of the forward pass; compared by identity."""

    def __init__(self, *value):
        self.value = value


def _remember(made: planning.Plan, key: jax.Array, inputs: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Evaluates the forward program, and keeps each slot as soon as its variable is there."""
    jaxpr, consts = made.forward
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))
    wanted = {v for v in (*jaxpr.outvars[: made.outputs], *(s.var for s in made.slots)) if not _literal(v)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            wanted.update(v for v in eqn.invars if not _literal(v))
    waiting: dict[Any, list[int]] = {}
    for i, slot in enumerate(made.slots):
        waiting.setdefault(slot.var, []).append(i)
    memory: list[Any] = [None] * len(made.slots)

    def remember(var):
        for i in waiting.get(var, ()):
            slot, value = made.slots[i], values[var]
            if slot.how != "live":
                value = refuse_derivative(value, _REASON)
            if slot.how == "sampled":
                # The draws wait for the value and what comes next for the memory, else the compiler may draw for all
                # layers at once, or keep the value until the end.
                raw, value = jax.lax.optimization_barrier((jax.random.key_data(jax.random.fold_in(key, i)), value))
                value = slot.sampler.keep(jax.random.wrap_key_data(raw, impl=jax.random.key_impl(key)), value)
                value, values[var] = jax.lax.optimization_barrier((value, values[var]))
            elif slot.how == "bits":
                value = jnp.packbits(value.reshape(-1))
            memory[i] = value

    for var in (*jaxpr.constvars, *jaxpr.invars):
        remember(var)
    for eqn in eqns[::-1]:
        planning._run([eqn], values)
        for var in eqn.outvars:
            remember(var)
    outputs = [v.val if _literal(v) else values[v] for v in jaxpr.outvars[: made.outputs]]
    return [jnp.asarray(v) if not hasattr(v, "dtype") else v for v in outputs], tuple(memory)


def _send(made: planning.Plan, key: jax.Array, memory: tuple[Any, ...], messages: Sequence[Any]) -> list[Any]:
    """Evaluates the backward program."""
    jaxpr, consts = made.pullback
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars[len(jaxpr.invars) - len(messages) :], messages, strict=True))

    def restore(slot, kept):
        which, like = made.slots[slot], made.slots[slot].var.aval
        if which.how == "sampled":
            like = jax.ShapeDtypeStruct(like.shape, like.dtype)
            return which.sampler.restore(jax.random.fold_in(key, slot), kept, like)
        return jnp.unpackbits(kept)[: like.size].reshape(like.shape).astype(bool) if which.how == "bits" else kept

    for step in made.steps:
        inputs = [step.root] if step.root is not None else step.eqn.invars
        present = {i: values[v] for i, v in enumerate(inputs) if not _literal(v) and i not in step.uses}
        slots = {
            s: memory[s] for use in step.uses.values() for s in use.slots if made.slots[s].how in ("sampled", "bits")
        }
        if slots:
            # Not before the messages are there: else the compiler may restore everything at once.
            slots, present = jax.lax.optimization_barrier((slots, present))
        restored = {i: u.replay(*(restore(s, slots.get(s, memory[s])) for s in u.slots)) for i, u in step.uses.items()}
        if step.root is not None:
            out = step.eqn.outvars[0]
            values[out] = present[0].astype(out.aval.dtype) * restored[1].astype(out.aval.dtype)
            continue
        arguments = [v.val if _literal(v) else restored.get(i, present.get(i)) for i, v in enumerate(inputs)]
        values.update(zip(step.eqn.outvars, jaxprs.caller(step.eqn)(*arguments), strict=True))
    return [_final(v, values) for v in jaxpr.outvars]


def _final(v, values):
    if _literal(v):
        return jnp.asarray(v.val, v.aval.dtype)
    if v in values:
        return values[v]
    return jnp.zeros(v.aval.shape, v.aval.dtype)


def _literal(v: Any) -> bool:
    return isinstance(v, planning.Literal)
