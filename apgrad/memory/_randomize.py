"""`ap.randomize`: any JAX function, with a random and smaller memory in its reverse pass.

Each straight-line stretch of the jaxpr becomes a node, which remembers the coefficients of its pullback as
`apgrad.memory._memory_plan` chooses. A `scan`, `cond` or `jax.checkpoint` is rebuilt around stretches of its own, with
fresh keys in each step. Calls are written out. A function's own derivative rule is used, and randomized too.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import chosen_numbers, number
from apgrad._ground.keys import hashed, require_key, spent
from apgrad._ground.warning import warn, warn_of_gradient
from apgrad._programs import jaxprs, pure
from apgrad._programs.jaxprs import Program
from apgrad.memory._budget import allocate
from apgrad.memory._control import packed_block, randomized_cond
from apgrad.memory._memory_plan import Linearized, MemoryPlan, linearized, make_plan
from apgrad.memory._passes import Function, inexact, remember, remembering, send
from apgrad.memory._samplers import FACTORIES, Sampler, array_bytes, nbytes, require_sampler, rounding
from apgrad.memory._slots import Coefficient, SlotForm, SlotMaker, fitted, is_control_flow, is_view

_NESTED = 2**29  # where the numbers of nested programs' keys begin, after those of the slots
_THROUGH = rounding(bits=8)
Choice = Callable[[Coefficient], Sampler | None]
Largest = dict[str, tuple[int, str]]  # entries and name of the largest array: with "few" entries, "exact", "sampled"


def randomize(
    function: Callable[..., Any],
    sampler: Sampler | Choice | None = None,
    *,
    through: Sampler | None = _THROUGH,
    budget_bytes: int | None = None,
    min_size: int = 512,
    boundaries: Sampler | Choice | None = None,
) -> Callable[..., Any]:
    """The function, with a reverse pass that remembers samples: the same value, an unbiased gradient, less memory.

    An array that is needed twice on one path of the messages is remembered twice. Arguments of the function are neither
    counted nor sampled: the caller keeps them. Under `jax.vmap` or `jax.lax.scan` around the result, a budget is for
    one example or step. Messages that the function rounds (to narrower types) are right to that type's precision. JAX's
    max-pooling remembers its input exactly: `ap.memory.max_pool` remembers places.

    Args:
      function: any JAX function, with transformations, custom derivative rules and any library's modules inside.
      sampler: remembers every coefficient that the reverse pass would keep and that enters it linearly; of a
        convolution's input, positions with all their channels. Or a function `(Coefficient) -> sampler or None` that
        chooses by name, size or shape; None keeps a coefficient exactly.
      through: takes the place of a sampler that keeps a `fraction` of the entries, at coefficients whose messages go on
        to other samples (activations' derivatives, attention): there noise of 100 % and more would multiply with depth
        (section 3.3 of the RAD paper). None keeps these coefficients exactly.
      budget_bytes: in place of a sampler and `through`: the most to remember, by samplers of the least added variance.
      min_size: arrays with fewer entries, counted over all steps of the scans around them, are kept exactly, and so
        are arrays with fewer than 64 entries, or `min_size` if that is less: 0 samples all.
      boundaries: a sampler of the inputs of `jax.checkpoint`ed blocks, or a function that chooses it; None keeps them
        exactly. **It makes gradients biased**, by the square of its noise: a block is evaluated again at inputs that
        are not quite the ones it had. Given these inputs the rest is unbiased, or exact without a sampler or budget.
        Blocks with a `policy` are left as they are.

    Returns:
      `randomized(key, *args, **kwargs)`: all randomness comes from the key, typed or raw; what is no JAX array reaches
      the function as it is. It is differentiated once, in reverse mode. Its attribute `original` is the function.

    Raises:
      TypeError: for what is no sampler or no PRNG key; if the result is differentiated twice; when it is, if values go
        through a mutable reference (`jax.new_ref`), or if a `jax.custom_vjp` function inside has a backward pass that
        is not linear in the message (clipping, MPLP); if `boundaries` alone are given, only if it takes no message.
      ValueError: if a sampler or `through` is given beside a budget, or none of sampler, budget and boundaries; if the
        function changes its arguments in place; when the result is differentiated, if the budget cannot be kept.
      NotImplementedError: in a mesh with explicit axes; when the result is differentiated, if messages go through a
        program that is not read here: randomize the function inside.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
      >>> w, x = 0.1 * jax.random.normal(jax.random.key(0), (64, 64)), jnp.ones((128, 64))
      >>> random = jax.jit(jax.grad(ap.randomize(loss, ap.memory.rounding(bits=4)), argnums=1))
      >>> gradient, exact = random(jax.random.key(1), w, x), jax.jit(jax.grad(loss))(w, x)
      >>> bool(0 < jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact) < 0.05)
      True
    """
    if sampler is not None and budget_bytes is not None:
        raise ValueError("randomize takes either a sampler or budget_bytes, got both")
    if sampler is None and budget_bytes is None and boundaries is None:
        raise ValueError("randomize takes a sampler, budget_bytes or boundaries, got none of them")
    if budget_bytes is not None and through is not _THROUGH:
        raise ValueError(f"a budget chooses all samplers: leave out {budget_bytes=} or {through=}")
    require_sampler("sampler", None if _chooses(sampler) else sampler)
    require_sampler("through", through)
    require_sampler("boundaries", None if _chooses(boundaries) else boundaries)
    number("budget_bytes", budget_bytes or 0)
    number("min_size", min_size)

    def walk(*stretch: Any) -> Callable[..., Any]:
        # A user who gives boundaries may want nothing else sampled, which is then no reason for a warning.
        what, given = ("boundaries", boundaries) if boundaries is not None else ("sampler", sampler)
        seen: dict[str, Largest] = {"sampler": {}, "boundaries": {}}
        at_boundary = boundaries and _chooser(boundaries, boundaries, min_size, seen["boundaries"])
        choose = _chooser(sampler, through, min_size, seen["sampler"])
        made = StretchWalk(choose, at_boundary, exact=sampler is None)

        def make(*stretch):
            if budget_bytes is not None:
                plan = _within(budget_bytes, min_size, at_boundary, *stretch)
            else:
                plan = made.make(*stretch)
            _warn_if_nothing_is_sampled(what, given, seen[what], min_size)
            return plan

        return made.stretch(*stretch, make=make)

    return walked(function, walk)


def _warn_if_nothing_is_sampled(what: str, given: Any, seen: Largest, min_size: int) -> None:
    if "sampled" in seen:
        return
    if "exact" in seen:
        if _chooses(given):
            largest, name = seen["exact"]
            warn(
                f"{what}= has no effect: the function gave None for every array, the largest of which is {name!r} with "
                f"{largest} entries. Let it give a sampler for some name, shape or dtype."
            )
    elif what == "boundaries":
        warn(
            "boundaries have no effect: they are for the inputs of jax.checkpoint blocks without a policy, and no "
            f"block has such an input of at least min_size={min_size} entries that is no argument of the function. Put "
            "jax.checkpoint around a part of the function, or leave boundaries out."
        )
    elif "few" in seen:
        warn(
            f"nothing is sampled: randomize keeps arrays of fewer than min_size={min_size} entries exactly, and the "
            f"largest that may be sampled has {seen['few'][0]}. Give randomize min_size=0 to sample all."
        )


def _chooses(given: Any) -> bool:
    return callable(given) and not isinstance(given, type) and given not in FACTORIES


def walked(function: Function, walk: Callable[..., Function]) -> Function:
    """`(key, *args, **kwargs) -> outputs`: the function as `walk(program, live, where, count)` evaluates it."""

    def randomized(key, *args, **kwargs):
        key = spent(require_key("the first argument of a randomized function", key))
        jaxprs.require_auto("ap.randomize")
        # All else reaches the function as it is, as from jax.grad: Python's numbers, strings, functions.
        leaves, put = jaxprs.arrays_of((args, kwargs), (jax.Array,))

        program, shape = pure.trace("ap.randomize", lambda given: function(*given[0], **given[1]), put, leaves)
        if not any(map(jaxprs.is_inexact, jax.tree.leaves(shape))):
            return function(*args, **kwargs)  # no message comes to integers
        warn_of_gradient("ap.randomize", program)
        outputs = walk(jaxprs.pruned(program), [True] * len(leaves), "", 1)(key, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    vars(randomized)["original"] = function  # for those who look into programs, as tracing does
    return randomized


def coefficients(function: Callable[..., Any], *args: Any, min_size: int = 512) -> list[tuple[Coefficient, SlotForm]]:
    """The coefficients that reverse mode remembers, each with its form: "sampled", "bits" (packed Booleans) or "exact".

    Args:
      function: differentiated with respect to all its floating-point arguments.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      min_size: as in `randomize`.
    """
    return listed(recorded(function, args, range(len(args)), min_size, exact=False))


def shapes_in(args: Any, argnums: Any = None) -> tuple[list[Any], tuple[int, ...], Callable[..., Any]]:
    """The shapes of arguments' arrays, which arrays to differentiate by `argnums` (or all), what puts arrays back."""
    leaves, put = jaxprs.arrays_of(args)
    numbers = range(len(args)) if argnums is None else chosen_numbers(argnums, len(args))
    owners = [number for number, arg in enumerate(args) for _ in jaxprs.arrays_of(arg)[0]]
    inexact = tuple(i for i, x in enumerate(leaves) if owners[i] in numbers and jaxprs.is_inexact(x))
    return list(jax.eval_shape(lambda *arrays: arrays, *leaves)), inexact, put


Recorded = dict[str, MemoryPlan]


def recorded(
    function: Callable[..., Any], args: Any, numbers: Sequence[int], min_size: int = 512, *, exact: bool = True
) -> Recorded:
    """The plans of all stretches by scope, the whole function's last, if all that may be sampled is kept in 32 bits."""
    leaves, chosen, put = shapes_in(args, numbers)
    program, _ = jaxprs.trace(lambda *leaves: function(*put(*leaves)), *leaves)
    flags = [True] * (len(leaves) + len(program.consts))
    return _recorded(min_size, {}, jaxprs.pruned(program), flags, chosen, "", 1, jax.random.key(0), exact=exact)


def _recorded(min_size: int, linear: Any, *stretch: Any, exact: bool = False) -> Recorded:
    choose = _chooser(rounding(32), None, min_size, {})  # which marks what could be sampled
    walk = StretchWalk(choose, linear=linear, exact=exact)
    made = walk.make(*stretch)
    # JAX traces a loop again when it finds one more carry to differentiate: the last of these traces is the loop.
    inside = sorted(walk.plans.items(), key=lambda item: len(item[0][2]))
    return {**{where: plan for (_, _, _, where), (_, plan) in inside}, stretch[3]: made}


def listed(plans: Recorded) -> list[tuple[Coefficient, SlotForm]]:
    found: dict[str, tuple[Coefficient, SlotForm]] = {}
    for where, plan in plans.items():
        for i, slot in enumerate(plan.slots):
            if slot.how not in ("live", "nested"):
                name = slot.coefficient.name or f"{where}/kept[{i}]"
                found.setdefault(name, (slot.coefficient._replace(name=name), slot.how))
    return list(found.values())


def _within(budget: int, min_size: int, at_boundary: Any, *stretch: Any) -> MemoryPlan:
    """A plan of at most so many bytes, counted by slots: `allocate` knows nothing of second draws and shared memory."""
    linear: dict[Any, Any] = {}
    found = listed(_recorded(min_size, linear, *stretch))
    target, best = float(budget), None
    while True:
        choose, estimate, smallest = allocate(found, target)
        made = StretchWalk(choose, at_boundary, linear=linear).make(*stretch)
        used = array_bytes(stretch[-1]) + sum(slot.nbytes for slot in made.slots)
        if used <= budget:
            # Branches share memory, which the estimate adds up: what is left of the budget is given out as well.
            best, higher = made, budget + estimate - used
            if higher <= target:
                return best
            target = higher
            continue
        if best is not None:
            return best
        if smallest:
            raise ValueError(
                f"a budget of {budget} bytes cannot be kept: with the smallest samplers the function remembers {used} "
                f"bytes, arrays of fewer than min_size={min_size} entries exactly. Raise the budget, lower min_size, "
                "or checkpoint parts of the function (jax.checkpoint)."
            )
        target = min(target, estimate) - (used - budget)


def _chooser(sampler: Any, through: Any, min_size: int, seen: Largest) -> Choice:
    """A choice of samplers, which writes down the largest arrays that it is asked about in `seen`."""

    def chooser(coefficient):
        size = math.prod(coefficient.shape)
        if not size or not coefficient.shape:
            return None
        of_all_steps = size * max(coefficient.count, 1)
        if size < min(64, min_size) or of_all_steps < min_size:
            case, chosen = "few", None
        else:
            chosen = sampler
            if not isinstance(sampler, Sampler | None):
                chosen = require_sampler(f"the choice for {coefficient.name!r}", sampler(coefficient))
            elif hasattr(sampler, "fraction") and not coefficient.last:
                chosen = through
            case = "exact" if chosen is None else "sampled"
        seen[case] = max(seen.get(case, (0, "")), (of_all_steps, coefficient.name))
        # A sample of few entries in groups or rows may be larger than the array.
        larger = chosen is not None and nbytes(fitted(chosen, coefficient), coefficient) > coefficient.nbytes
        return None if larger else chosen

    return chooser


class StretchWalk:
    """Makes nodes of a program's straight-line stretches. JAX may trace a loop many times; each is planned once."""

    def __init__(
        self,
        choose: Choice,
        at_boundary: Any = None,
        stays: Mapping[str, frozenset[int]] | None = None,
        linear: dict[Any, tuple[Any, Linearized]] | None = None,  # of stretches without programs inside
        exact: bool = False,  # nothing is sampled, so that backward passes need not be linear
    ):
        self.choose, self.at_boundary, self.stays, self.exact = choose, at_boundary, stays or {}, exact
        self.plans: dict[Any, tuple[Any, MemoryPlan]] = {}
        self.linear = {} if linear is None else linear

    def stretch(self, program: Program, live: Sequence[bool], where: str, count: int, make: Any = None) -> Function:
        """`(key, *inputs) -> outputs`, a node around the program, with a plan by `self.make` or another function."""
        flags = [*live, *(True for _ in program.consts)]
        # The node takes them as inputs: where it closes over what is differentiated, that gets no message.
        consts, program = program.consts, Program(program.jaxpr, ())

        def plain(*inputs):
            return _evaluated(program, inputs)

        def forward(key, inputs, chosen):
            made = self.plan(make or self.make, program, flags, chosen, where, count, key)
            return *remember(made, key, (key, *inputs)), made

        def backward(key, memory, messages, chosen, made):
            return send(made, key, memory, messages)

        call = remembering(len(flags), plain, forward, backward)
        return lambda key, *inputs: call(key, *inputs, *consts)

    def plan(self, make: Callable[..., MemoryPlan], program: Program, *rest: Any) -> MemoryPlan:
        index = id(program.jaxpr), *map(tuple, rest[:2]), rest[2]
        if index not in self.plans:
            self.plans[index] = program, make(program, *rest)  # the program stays alive: its id is unique
        return self.plans[index][1]

    def make(
        self, program: Program, flags: Sequence[bool], chosen: Sequence[int], where: str, count: int, key: Any
    ) -> MemoryPlan:
        """The plan of a program that is differentiated with respect to the chosen ones of its inputs and constants."""

        def linearize(key, *inputs):
            def walked(*values):
                pairs = list(zip(values, flags, strict=True))
                outputs = [v for v, _ in _evaluated(program, pairs, self._apply(key, where, count), _other)]
                return inexact(outputs), outputs

            restricted, some = jaxprs.restrict(walked, inputs, chosen)
            _, pullback, outputs = jax.vjp(restricted, *some, has_aux=True)
            return outputs, pullback

        avals = [v.aval for v in (*program.jaxpr.invars, *program.jaxpr.constvars)]
        inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (key, *avals)]  # of the key the dtype alone matters
        index = id(program.jaxpr), tuple(flags), tuple(chosen)
        made = lambda: linearized(linearize, inputs, _own_rules(program, where), self.exact)
        _, linear = self.linear.get(index) or (program, made())
        if index not in self.linear and not any(map(is_control_flow, jaxprs.all_equations(program))):
            self.linear[index] = program, linear  # with control flow inside, it depends on the choice of samplers
        how = {"choose": self.choose, "where": where, "count": count, "stays": self.stays.get(where)}
        slots = functools.partial(SlotMaker, live=[True, *flags], **how)
        return make_plan(linear, [flags[i] for i in chosen], slots)

    def _apply(self, key: jax.Array, where: str, count: int) -> Callable[..., Any]:
        """A function that evaluates an equation on pairs `(value, whether somebody else keeps it)`."""
        numbers = itertools.count(1)

        def apply(eqn, pairs):
            values, live = [v for v, _ in pairs], [flag for _, flag in pairs]
            inside = jaxprs.nested(eqn)
            jaxprs.require_values(eqn, "ap.randomize")
            with jaxprs.where_it_stands(eqn):  # scopes are names of the coefficients
                if inside is None:
                    view = bool(live) and live[0] and is_view(eqn)
                    return [(v, view) for v in jaxprs.caller(eqn)(*values)]
                if inside.kind == "call":
                    jaxpr, consts = inside.jaxprs[0]
                    return jaxprs.evaluate(Program(jaxpr, tuple((c, True) for c in consts)), pairs, apply, _other)
                if inside.kind in ("custom", "while") or not any(jaxprs.inexact_outputs(eqn)):
                    return map(_other, jaxprs.caller(eqn)(*values))
                label = jaxprs.join(where, jaxprs.scope(eqn), f"{inside.kind}{(number := next(numbers))}")
                return map(_other, self._enter(inside, values, live, hashed(key, _NESTED + number), label, count))

        return apply

    def _enter(self, inside, values, live, key, label, count):
        if inside.kind == "scan":
            consts, carry, _ = inside.counts
            # Somebody may keep the constants and inputs of the steps; nobody else keeps the carry.
            flags = [flag and not consts <= i < consts + carry for i, flag in enumerate(live)]
            body = self.stretch(inside.jaxprs[0], flags, label, count * inside.length)
            function = lambda step, *inputs: body(hashed(key, step), *inputs)
            return jaxprs.rebuild(inside, [function], values)
        if inside.kind == "cond":

            def plan(i, chosen, key):
                flags = [*live[1:], *(True for _ in inside.jaxprs[i].consts)]
                return self.plan(self.make, inside.jaxprs[i], flags, chosen, f"{label}.{i}", count, key)

            return randomized_cond(inside.jaxprs, plan)(key, *values)
        # What is inside a checkpoint is remembered for a moment only: the key goes in as an input.
        inner = self.stretch(inside.jaxprs[0], live, label, 0)
        samplers: list[Any] = [None] * len(values)
        for i, (v, flag) in enumerate(zip(values, live, strict=True)):
            packs = self.at_boundary and inside.options["policy"] is None
            if packs and not flag and jnp.issubdtype(v.dtype, jnp.floating):
                name = f"{label}/inputs[{i}]"
                samplers[i] = self.at_boundary(Coefficient(name, v.shape, v.dtype, count, array_bytes(v), False))
        if not any(samplers):
            return list(jax.checkpoint(inner, **inside.options)(key, *values))
        return packed_block(inside.jaxprs[0], inner, samplers)(key, *values)


def _evaluated(program: Program, inputs: Sequence[Any], *how: Any) -> list[Any]:
    size = len(program.jaxpr.invars)
    return jaxprs.evaluate(Program(program.jaxpr, tuple(inputs[size:])), inputs[:size], *how)


def _own_rules(program: Program, where: str) -> list[str]:
    found, free = [], set()  # calls of one program, as of each layer's activation, are looked into once
    for eqn in program.jaxpr.eqns:
        inside, here = jaxprs.nested(eqn), jaxprs.join(where, jaxprs.plain_scope(jaxprs.scope(eqn)))
        if inside is not None and inside.kind == "call":
            index = id(inside.jaxprs[0].jaxpr)
            own = [] if index in free else _own_rules(inside.jaxprs[0], here)
            free |= set() if own else {index}
            found += own
        elif (inside is None or inside.kind == "custom") and jaxprs.own_rule_of(eqn):
            found.append(repr(jaxprs.join(here, inside.label if inside else eqn.primitive.name)))
    return found


def _other(value: Any) -> tuple[Any, bool]:
    return value if isinstance(value, tuple) else (value, False)
