"""Sites: the nodes of a program that a rule may rewire, found in the program's jaxpr before anything runs.

A `Planner` offers the parts of a program to a rule, the large ones first: the function as a whole, named scopes, calls,
single equations. A part that the rule takes becomes a site; any other is opened. In what cannot be opened (a
`while_loop`, a function with its own derivative rule) a site that the rule would take is an error.

Which operand of a product is the weight follows from what both are made of, see `argnums` of `ap.rewire`.
"""

import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from apgrad._programs import jaxprs
from apgrad._programs.flow import flow, steady
from apgrad._programs.kinds import COMBINE, ELEMENTWISE, NO_DERIVATIVE, PRODUCT, WITHIN_ELEMENTWISE

# The facts about an array:
MADE = 0  # made inside the program, of no input
CLOSED = 1  # the function closes over it, and nobody says which arguments are parameters
WEIGHT = 2  # made of parameters alone
STACKED = 3  # the same, with another weight at each step of a scan
DATA = 4  # made of data
ACTIVATION = 5  # anything else, such as what is made of weights and data
SiteKind = typing.Literal["function", "scope", "call", "dense", "conv", "matmul", "elementwise", "name"]


class ProgramSite(NamedTuple):
    """A node of a program, as a rule sees it.

    Attributes:
      kind: "function" (all of it), "scope" (neighbouring equations in one `jax.named_scope`, as a module of Flax Linen
        is; used twice in a row it is one site, unless it is under `jax.jit`), "call" (a function under `jax.jit`, or
        one with a derivative rule of its own), "dense" (a matrix product of an input and a weight), "conv" (the same of
        a convolution), "matmul" (any other product), "elementwise" (a primitive or call that acts element by element),
        or "name" (`jax.ad_checkpoint.checkpoint_name`, the identity).
      label: the name of the scope, of the called function or of the primitive, or what `checkpoint_name` got.
      name: the scopes around the site, its label and a number: unique in the function, and the same at each call.
      number: counts the sites that are offered to the rule, in the order of the program.
      function: `(*inputs) -> output`: inputs that are no weights first, then the weights. Several outputs are a tuple.
      inputs: the shapes and dtypes of the inputs.
      weights: how many of the inputs, the last ones, are made of parameters alone.
      output: the shape and dtype of the output, or a tuple of them.
      result: the shapes and dtypes of the output of the whole function, a pytree.
      repeated: whether the site stands in a `scan`.
      stacked: whether a weight is another one at each step of the scan.
      teaches: whether the messages to inputs that are no weights reach a parameter: not so where these are the data.
      key: for a rule with `random`, a PRNG key of this site's and step's own; otherwise None.
    """

    kind: SiteKind
    label: str
    name: str
    number: int
    function: Callable[..., Any]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    weights: int
    output: Any
    result: Any
    repeated: bool = False
    stacked: bool = False
    teaches: bool = True
    key: Any = None

    def __repr__(self) -> str:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.inputs)
        return f"<{self.kind} {self.name}: {shapes}; weights: {self.weights}>"


class PlanStep(NamedTuple):
    """A step of a plan, which stands where an equation stood: an equation, or a site that the rule takes."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqn: Any = None
    site: ProgramSite | None = None
    order: Sequence[int] = ()  # for a site, the numbers of the inputs in the order in which its function takes them
    plans: Sequence[jaxprs.Program] = ()  # of the programs inside, if one of them has a site


class Planner:
    """Offers the sites of a program to a rule (`offered`), and writes down which ones it takes (`taken`)."""

    def __init__(self, where: Callable[[ProgramSite], bool], result: Any, closed: int):
        self.where, self.result, self.closed = where, result, closed
        self.offered: list[ProgramSite] = []
        self.taken: list[ProgramSite] = []
        self.names: dict[str, int] = {}
        self.hidden = ""
        self.loops = 0

    def constant(self, value: Any) -> int:
        # Integers that are data, as tokens, make activations of a parameter that they index.
        data = lambda: self.closed == DATA or jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        return self.closed if np.ndim(value) and data() else MADE

    def whole(self, program: jaxprs.Program, facts: Sequence[int], label: str) -> jaxprs.Program:
        jaxpr = program.jaxpr
        outputs = list(dict.fromkeys(jaxprs.variables(jaxpr.outvars)))
        inside = jaxprs.part(jaxpr.eqns, jaxpr.invars, outputs, program)
        step = self._offer("function", label, "", facts, PlanStep(jaxpr.invars, outputs), inside)
        return self.plan(program, facts, "") if step is None else jaxprs.part([step], jaxpr.invars, jaxpr.outvars)

    def plan(self, program: jaxprs.Program, facts: Sequence[int], where: str) -> jaxprs.Program:
        jaxpr = program.jaxpr
        known = dict(zip(jaxpr.constvars, map(self.constant, program.consts), strict=True))
        known |= dict(zip(jaxpr.invars, facts, strict=True))
        steps = self._scopes(jaxpr.eqns, jaxpr.outvars, known, where, 0)
        return jaxprs.part(steps, jaxpr.invars, jaxpr.outvars, program)

    def _scopes(self, eqns, needed, known, where, depth) -> list[PlanStep]:
        """The steps of equations whose scopes agree up to a depth; neighbours in a deeper scope are one site."""
        steps, stop = [], 0
        label_of = lambda eqn: next(iter(jaxprs.plain_scope(jaxprs.scope(eqn)).split("/")[depth:]), "")
        for label, group in itertools.groupby(eqns, label_of):
            group = list(group)
            stop += len(group)
            if label:
                after = {*jaxprs.variables(needed), *jaxprs.variables(v for e in eqns[stop:] for v in e.invars)}
                steps += self._scope(group, after, known, where, depth, label)
            else:
                steps += [self._equation(eqn, known, where) for eqn in group]
        return steps

    def _scope(self, eqns, after, known, where, depth, label):
        made = dict.fromkeys(v for e in eqns for v in e.outvars)
        used = dict.fromkeys(jaxprs.variables(v for e in eqns for v in e.invars))
        inputs, outputs = [v for v in used if v not in made], [v for v in made if v in after]
        program = jaxprs.part(eqns, inputs, outputs)
        facts = [known[v] for v in inputs]
        scope = jaxprs.plain_scope(jaxprs.scope(eqns[0])).split("/")[:depth]
        step = self._offer("scope", label, jaxprs.join(where, *scope), facts, PlanStep(inputs, outputs), program)
        if step is None:
            return self._scopes(eqns, after, known, where, depth + 1)
        known.update(zip(outputs, flow(program, facts, through, merged, self.constant), strict=True))
        return [step]

    def _equation(self, eqn, known, where) -> PlanStep:
        facts = [self.constant(v.val) if isinstance(v, Literal) else known[v] for v in eqn.invars]
        around = jaxprs.join(where, jaxprs.plain_scope(jaxprs.scope(eqn)))
        step = PlanStep(eqn.invars, eqn.outvars, eqn)
        inputs = list(dict.fromkeys(jaxprs.variables(eqn.invars)))
        made = flow(jaxprs.part([eqn], inputs, eqn.outvars), [known[v] for v in inputs], through, merged, self.constant)
        known.update(zip(eqn.outvars, made, strict=True))
        inside = jaxprs.nested(eqn)
        kind, label = _kind_and_label(eqn, inside, facts)
        taken = self._offer(kind, label, around, facts, step) if kind else None
        return taken or self._open(step, inside, facts, around)

    def _open(self, step, inside, facts, around) -> PlanStep:
        before, name = len(self.taken), step.eqn.primitive.name
        if inside is None:
            programs = jaxprs.inside_of(step.eqn)
            equations = [e.primitive.name for p in programs for e in jaxprs.all_equations(p)]
            if name == "pallas_call" or any(e in PRODUCT for e in equations):
                label = around.rpartition("/")[2] or "name"
                raise NotImplementedError(
                    f"rewire cannot see into the primitive {name!r} ({around or 'at the top'}), where products may be. "
                    "Let a rule take the call or jax.named_scope around it as one site, with its usual way back, "
                    f"ap.rewiring.first_of(rule, ap.rewiring.Rule(lambda site: site.label == {label!r}, lambda site, "
                    "params: ap.backpropagation(site.function))), or leave it out of the function."
                )
            if name not in COMBINE:
                for program in programs:
                    self._hide(program, [DATA] * len(program.jaxpr.invars), around, name)
            if name != "custom_vmap_call":  # JAX has no reverse mode of it, so that no message goes there
                jaxprs.require_known(step.eqn, "rewire")
            return step
        if inside.kind == "cond":
            plans = [self.plan(p, facts[1:], jaxprs.join(around, f"branch{i}")) for i, p in enumerate(inside.jaxprs)]
        elif inside.kind == "scan":
            consts, carry, _ = inside.counts
            body = inside.jaxprs[0]
            # A carry that the body returns as it came is the same at each step, like a constant.
            carried = zip(body.jaxpr.invars[consts : consts + carry], body.jaxpr.outvars[:carry], strict=True)
            stays = {*body.jaxpr.invars[:consts], *(v for v, after in carried if v is after)}
            inputs = zip(facts, body.jaxpr.invars, strict=True)
            facts = [STACKED if f == WEIGHT and v not in stays else f for f, v in inputs]
            walk = lambda facts: flow(body, facts, through, merged, self.constant)
            self.loops += 1
            plans = [self.plan(body, steady(walk, facts, consts, carry, merged)[0], jaxprs.join(around, "scan"))]
            self.loops -= 1
        elif inside.kind in ("call", "remat"):
            plans = [self.plan(inside.jaxprs[0], facts, jaxprs.join(around, inside.label))]
        else:
            if inside.kind == "while":
                self._hide(inside.jaxprs[1], facts[inside.loop[0] :], around, name)
            else:
                self._hide(inside.jaxprs[0], facts, jaxprs.join(around, inside.label), name)
            return step
        return step._replace(plans=plans) if len(self.taken) > before else step

    def _hide(self, program, facts, around, name) -> None:
        """Offers the sites of a program in which none can be taken: to take one is an error."""
        outer, self.hidden = self.hidden, self.hidden or f"{name} {around}".strip()
        self.plan(program, facts, around)
        self.hidden = outer

    def _offer(self, kind: SiteKind, label, around, facts, step: PlanStep, program=None) -> PlanStep | None:
        """The step with a site in place of its equation, or of the program of several, if the rule takes the site."""
        floats = lambda variables: [v for v in variables if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
        if not floats(step.invars) or not floats(step.outvars):
            return None
        numbers = [i for i, v in enumerate(step.invars) if not isinstance(v, Literal)]
        heavy = [i for i in numbers if _is_weight(facts[i])]
        order = [i for i in numbers if i not in heavy] + heavy
        literals = [v.val if isinstance(v, Literal) else None for v in step.invars]
        count = len(step.outvars)

        def function(*inputs):
            values = jaxprs.place(inputs, order, literals)
            outputs = jaxprs.run(step.eqn, values) if program is None else jaxprs.evaluate(program, values, _run)
            return outputs[0] if count == 1 else tuple(outputs)

        name = jaxprs.join(around, label)
        nth = self.names[name] = self.names.get(name, -1) + 1
        own = kind, label, f"{name}[{nth}]", len(self.offered), function
        inputs, outputs = tuple(_shape(step.invars[i]) for i in order), tuple(map(_shape, step.outvars))
        form = inputs, len(heavy), outputs[0] if count == 1 else outputs, self.result
        stacked, teaches = any(facts[i] == STACKED for i in heavy), any(facts[i] == ACTIVATION for i in numbers)
        site = ProgramSite(*own, *form, self.loops > 0, stacked, teaches)
        self.offered.append(site)
        if not self.where(site):
            return None
        if self.hidden:
            raise ValueError(
                f"the rule takes the site {site}, which cannot be rewired inside {self.hidden}. Leave it out (where=); "
                "or use a scan in place of a while_loop, take a function with its own derivative rule as one site, or "
                "inside shard_map, pmap or ap.randomize, rewire the function that is mapped or randomized."
            )
        if kind in ("dense", "conv") and CLOSED in facts:
            raise ValueError(
                f"the function closes over the array of shape {step.invars[facts.index(CLOSED)].aval.shape} that the "
                f"site {site} multiplies a parameter by, so rewire cannot know which of the two is the weight. Name "
                "the arguments that are parameters by argnums=: then all that the function closes over is data."
            )
        self.taken.append(site)
        return step._replace(site=site, order=order)


def _run(eqn, values):
    """Evaluates an equation in its scopes, for a rule that traces the site's function again and looks for scopes."""
    with jaxprs.where_it_stands(eqn):
        return jaxprs.run(eqn, values)


def merged(*facts: int) -> int:
    largest = max(facts, default=MADE)
    return ACTIVATION if largest == DATA and any(map(_is_weight, facts)) else largest


def through(eqn: Any, facts: Sequence[int]) -> list[int] | None:
    if jaxprs.nested(eqn) is not None:
        return None
    made = ACTIVATION if eqn.primitive.name in PRODUCT and _is_weighted(facts) else merged(*facts)
    return [made] * len(eqn.outvars)


def _kind_and_label(eqn, inside, facts) -> tuple[SiteKind | None, str]:
    name = eqn.primitive.name
    if inside is not None:
        called = inside.kind in ("call", "custom")
        return ("elementwise" if _is_elementwise(eqn, inside) else "call") if called else None, inside.label
    if name in PRODUCT:
        layer = "dense" if name == "dot_general" else "conv"
        return layer if _is_weighted(facts) else "matmul", name
    if name == "name":
        return "name", jaxprs.Parameters(eqn)["name"]
    return "elementwise" if name in ELEMENTWISE or name in NO_DERIVATIVE else None, name


def _is_weighted(facts):
    return sorted(map(_is_weight, facts[:2])) == [False, True]


def _is_weight(fact):
    return fact in (WEIGHT, STACKED)


def _is_elementwise(eqn, inside):
    shapes = [v.aval.shape for v in eqn.invars if v.aval.shape] or [()]
    if len(shapes) > 1 or [v.aval.shape for v in eqn.outvars] != shapes:
        return False
    plain = lambda eqn: eqn.primitive.name in WITHIN_ELEMENTWISE or bool(jaxprs.inside_of(eqn))
    return all(map(plain, jaxprs.all_equations(inside.jaxprs[0])))


def _shape(v):
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
