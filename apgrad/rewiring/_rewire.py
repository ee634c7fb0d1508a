"""`ap.rewire`: any JAX function, with another backward pass at the nodes that a rule takes.

The function is traced, `_sites` plans which nodes the rule takes, and the program is evaluated again with `ap.node` in
the place of each of these. A rule may ask for the message to the output of the whole function at each site (direct
feedback alignment). Each node then returns a port of the output's form. The ports are added up, through `scan`, `cond`
and all, and meet the output in a last node, which sends the output's message to the sum, and so to each of them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apgrad._ground.arguments import chosen_numbers, integers, nearest, require_call
from apgrad._ground.keys import require_key, spent
from apgrad._ground.messages import check_messages, describe, form_of, shapes_of
from apgrad._ground.propagator import Propagator, first_order, node
from apgrad._ground.warning import warn, warn_of_gradient
from apgrad._programs import jaxprs, pure
from apgrad.rewiring._sites import CLOSED, DATA, WEIGHT, Planner, PlanStep, ProgramSite


class Rule(NamedTuple):
    """Another way back through the nodes that it takes.

    Attributes:
      where: `(ProgramSite) -> bool`, whether the rule takes a site. The function as a whole is offered first, then
        scopes and calls, then single equations; what is inside a site that is taken is not offered.
      at: `(site, params) -> Propagator`, with the inputs of `site.function`. With `init` its `backward` returns one
        more message before the others, the update of `params`, or None.
      init: `site -> params`, the parameters of the rule at a site, a pytree of arrays; None for a rule without any.
      random: whether the rule draws: the rewired function takes a PRNG key first, and `site.key` is the site's own.
      direct: whether propagators have `backward(memory, message, result)`, where `result` is the message to the output
        of the whole function, a pytree with None in the place of integers.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> at = lambda site, params: ap.Propagator(lambda x: (jnp.sin(x), x), lambda x, m: (m * jnp.cos(x) / 2,))
      >>> halve = ap.rewiring.Rule(where=lambda site: site.label == "sin", at=at)
      >>> float(jax.grad(ap.rewire(lambda x: jnp.sin(x) * 3, halve))(0.0))
      1.5
    """

    where: Callable[[ProgramSite], bool]
    at: Callable[[ProgramSite, Any], Propagator]
    init: Callable[[ProgramSite], Any] | None = None
    random: bool = False
    direct: bool = False


def rewire(function: Callable[..., Any], rule: Rule, *, argnums: int | Sequence[int] | None = None) -> "Rewired":
    """The function, with the backward pass of the sites that a rule takes replaced by the rule's.

    Args:
      function: any JAX function of arrays, with transformations and modules inside. Other nodes keep their derivatives.
      rule: says which sites it takes, and what their way back is; see `apgrad.rewiring`.
      argnums: the numbers of the arguments that hold parameters, as in `jax.grad` (the first, if not given). All others
        are data, and where it is given, so is what the function closes over. The product of something with an array
        made of parameters alone is a layer ("dense" or "conv") to the rule. What is made of parameters and data (noisy
        or fast weights) is no layer's weight, and the product of two parameters is a weight, and no layer: let an input
        that is learned, as a first state is, be an argument that is not named here.

    Returns:
      `rewired(*args)`, with the output of the function. A rule with parameters takes them before the arguments,
      `rewired(params, *args)`, and their cotangents are the updates that it proposes; a rule that draws takes a PRNG
      key before all. `rewired.init(*args)` makes parameters, `rewired.sites(*args)` lists sites. Reverse mode, once.

    Raises:
      ValueError: at trace time, if the rule takes no site, no site by a name that it was given, or one that cannot be
        rewired (in a `while_loop`, a `shard_map` over explicit axes or a function with a derivative rule of its own);
        if the rule's parameters are not those of its sites; if the function changes its arguments in place.
      NotImplementedError: for a program inside a primitive that is not known here.
      TypeError: for a second derivative.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> network = lambda weights, x: jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])
      >>> rewired = ap.rewire(network, ap.rewiring.feedback_alignment(jax.random.key(0)))
      >>> args = [jnp.ones((3, 4)), jnp.ones((4, 2))], jnp.ones((8, 3))
      >>> [g.shape for g in jax.grad(rewired, argnums=1)(rewired.init(*args), *args)]
      [(3, 4), (4, 2)]
    """
    require_rule("rewire", rule)
    if not callable(function):
        raise TypeError(f"rewire takes a function, got {describe(function)}")
    if argnums is None:
        return Rewired(function, rule, (0,), CLOSED)
    return Rewired(function, rule, integers(argnums, "argnums"), DATA)


def require_rule(who: str, rule: Any) -> None:
    if not isinstance(rule, Rule):
        hint = ". Call it: a rule is what it returns" if callable(rule) else ""
        raise TypeError(f"{who} takes a rule (ap.rewiring.Rule), got {describe(rule)}{hint}")
    for name in ("where", "at"):
        if not callable(found := getattr(rule, name)):
            hint = f"; for sites with a label give lambda site: site.label == {found!r}" if name == "where" else ""
            raise TypeError(f"where and at of a rule are functions of a site, got {name}={found!r}{hint}")


class _Any(NamedTuple):
    rules: tuple[Rule, ...]

    def __call__(self, site: ProgramSite) -> bool:
        return any(rule.where(site) for rule in self.rules)


def first_of(*rules: Rule) -> Rule:
    """Each site goes to the first rule that takes it. To compose rules *at* a site, `ap.chain` their propagators.

    The result has parameters, draws or is direct if one of the rules does. At a site of a rule without parameters they
    are None. A rule that takes no site is an error at trace time, unless the rules before it took all of its sites.

    Args:
      *rules: at least one.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> rule = ap.rewiring.first_of(ap.rewiring.clip_messages(1.0, where="sin"), ap.rewiring.skip())
      >>> float(jax.grad(ap.rewire(lambda x: 5 * jnp.sin(jnp.round(x)), rule))(0.2))
      1.0
    """
    if not rules:
        raise ValueError("first_of needs at least one rule, got none")
    for rule in rules:
        require_rule("first_of", rule)
    parameters, direct = any(r.init is not None for r in rules), any(r.direct for r in rules)

    def of(site):
        return next(r for r in rules if r.where(site))

    def init(site):
        make = of(site).init
        return None if make is None else make(site)

    def at(site, params):
        rule = of(site)
        forward, backward = rule.at(site, params)

        def answered(memory, message, *result):
            messages = backward(memory, message, *(result if rule.direct else ()))
            return (None, *messages) if parameters and rule.init is None else messages

        return Propagator(forward, answered)

    return Rule(_Any(rules), at, init if parameters else None, any(r.random for r in rules), direct)


@dataclasses.dataclass(frozen=True)
class Rewired:
    """A function whose backward pass a rule has replaced at its sites; made by `ap.rewire`."""

    function: Callable[..., Any]
    rule: Rule
    argnums: tuple[int, ...]
    closed: int  # what the function closes over

    def __call__(self, *args: Any) -> Any:
        """The function's output; see `ap.rewire` for the arguments."""
        given, key, init = list(args), None, self.rule.init
        params: Any = None
        if self.rule.random:
            key = spent(require_key("the first argument of a function rewired by a random rule", *given[:1] or [None]))
            given = given[1:]
        if init is not None:
            params = given.pop(0) if given else None
            if not isinstance(params, dict) or not all(str(name).endswith("]") for name in params):
                got = f"{describe(params)} without names of sites"
                raise TypeError(f"the rule has parameters, which come before *args (rewired.init(*args)); got {got}")
        plan, planner, shape = self._plan(given)
        self._require_each_taken(planner, given)
        if init is None:
            _warn_idle(self.rule, planner)
        else:
            jaxprs.require_unchecked("a function is rewired by a rule with parameters", args)
            wanted = {site.name: jax.eval_shape(functools.partial(init, site)) for site in planner.taken}
            _require_params(params, wanted)
        return _evaluate(plan, jaxprs.arrays_of(tuple(given))[0], key, params, self.rule, shape)

    def init(self, *args: Any) -> dict[str, Any]:
        """The parameters of the rule, by the names of the sites; empty for a rule without any.

        Args:
          *args: what the function will be called with, as arrays or `jax.ShapeDtypeStruct`s.
        """
        planner = self._plan(args)[1]
        self._require_each_taken(planner, args)
        if self.rule.init is None:
            return {}
        _warn_idle(self.rule, planner)
        return {site.name: self.rule.init(site) for site in planner.taken}

    def sites(self, *args: Any) -> list[ProgramSite]:
        """The sites that were offered to the rule, in the order of the program.

        Args:
          *args: what the function will be called with, as arrays or `jax.ShapeDtypeStruct`s.
        """
        return self._plan(args)[1].offered

    def _require_each_taken(self, planner: Planner, args: Sequence[Any]) -> None:
        members = _members(self.rule)
        planned = lambda where: dataclasses.replace(self, rule=self.rule._replace(where=where))._plan(args)[1].offered
        for i, member in enumerate(members):
            what = "the rule" if len(members) == 1 else f"rule {i} of first_of (counted from 0)"
            if any(map(member.where, planner.offered)):
                _require_taken(what, member, planner.offered)
                continue
            # Sites inside of a site that another rule takes were not offered.
            _require_taken(what, member, planned(lambda site: False))
            if any(map(member.where, planned(_Any(members[: i + 1])))):
                raise ValueError(
                    f"{what} takes no site: the sites around its own are offered before them, and later rules take "
                    f"these: {planner.taken}. Let the later rules take other sites (where=)."
                )

    def _plan(self, args: Sequence[Any]) -> tuple[jaxprs.Program, Planner, Any]:
        arrays, put = jaxprs.arrays_of(tuple(args))
        numbers = chosen_numbers(self.argnums, len(args))
        facts = [WEIGHT if i in numbers else DATA for i, arg in enumerate(args) for _ in jaxprs.arrays_of(arg)[0]]
        try:
            program, shape = pure.trace("ap.rewire", lambda args: self.function(*args), put, arrays)
        except TypeError:
            before = "key, " * self.rule.random + "params, " * (self.rule.init is not None)
            hint = f", or call rewired({before}*args) with what it takes"
            require_call("the function that is rewired", self.function, [f"args[{i}]" for i in range(len(args))], hint)
            raise
        warn_of_gradient("ap.rewire", program)
        planner = Planner(self.rule.where, shape, self.closed)
        return planner.whole(program, facts, getattr(self.function, "__name__", "function")), planner, shape


def _require_params(params: dict[str, Any], wanted: dict[str, Any]) -> None:
    if params.keys() != wanted.keys():
        raise ValueError(f"rewired.init makes a dictionary with the sites {sorted(wanted)}, got {sorted(params)}")
    for name, mine in params.items():
        if form_of(mine) != form_of(wanted[name]):
            raise ValueError(
                f"the rule's parameters at the site {name} are {shapes_of(mine)}, where {wanted[name]} is "
                "expected: they were made for other arguments, or by another rule. rewired.init(*args) makes them."
            )


def _members(rule: Rule) -> tuple[Rule, ...]:
    """The rules of which `first_of` made a rule, or the rule itself."""
    return sum(map(_members, rule.where.rules), ()) if isinstance(rule.where, _Any) else (rule,)


def _warn_idle(rule: Rule, planner: Planner) -> None:
    members = _members(rule)
    owners = [next(m for m in members if m.where(site)) for site in planner.taken]
    for member in members:
        mine = [site for site, owner in zip(planner.taken, owners, strict=True) if owner is member]
        if getattr(member.where, "idle", lambda taken, offered: False)(mine, planner.offered):
            warn(
                f"the rule changes only the messages to the inputs of {', '.join(s.name for s in mine)}, which are the "
                "data, so no parameter learns otherwise by it. To teach a layer by the rule, name the layers after it "
                "(where=). Or are the parameters in another argument (argnums=)?"
            )


def _require_taken(what: str, rule: Rule, offered: Sequence[ProgramSite]) -> None:
    """Refuses a rule, `what` in the error, that takes none of these sites, or none by a name that it was given."""
    if unknown := getattr(rule.where, "unknown", lambda sites: [])(offered):
        names = {part for site in offered for part in site.name.rpartition("[")[0].split("/")}
        raise ValueError(
            f"{what} takes no site by the name {unknown[0]!r}; {nearest(unknown[0], sorted(names))} "
            "rewired.sites(*args) lists them: primitives and functions under jax.jit, and for a rule of layers scopes "
            "around these too, which an NNX model has by ap.tracing.name_modules(model)."
        )
    if not any(map(rule.where, offered)):
        names = " or ".join(map(repr, getattr(rule.where, "names", ())))
        hint = "Is the right argument named by argnums, and are the weights arguments of the function?"
        if names:
            hint = f"By default it takes {names}; where= names a primitive or jitted function (no (v > 0).astype)."
        sites = ", ".join(map(repr, offered)) or "none"
        wrong = f"{what} takes no site of the function, so nothing would be rewired"
        raise ValueError(f"{wrong}. The sites are {sites}. {hint}")


def _evaluate(plan: jaxprs.Program, arrays: Sequence[Any], key: Any, params: Any, rule: Rule, result: Any) -> Any:
    """The output of a plan, `result` its form; the port of a direct rule has its form too, without the integers."""
    zeros = lambda x: jnp.zeros(x.shape, x.dtype) if jaxprs.is_inexact(x) else None
    empty = jax.tree.map(zeros, result) if rule.direct else None
    summed, structure = jax.tree.flatten(empty)
    fold = lambda key, number: None if key is None else jax.random.fold_in(key, number)

    def walk(plan, inputs, key):
        port, number = empty, 0

        def apply(step: PlanStep, values):
            nonlocal port, number
            number += 1
            here, count = fold(key, number), len(step.outvars)
            with jaxprs.where_it_stands(step.eqn) if step.eqn else contextlib.nullcontext():
                if step.site is not None:
                    mine = None if params is None else params[step.site.name]
                    output, made = _rewired(step.site, rule, empty)(here, mine, *(values[i] for i in step.order))
                    outputs = output if isinstance(step.site.output, tuple) else [output]
                elif step.plans:
                    inside: Any = jaxprs.nested(step.eqn)
                    functions = [functools.partial(within, p, inside.kind == "scan", here) for p in step.plans]
                    outputs = jaxprs.rebuild(inside, functions, values, summed)
                    outputs, made = outputs[:count], structure.unflatten(outputs[count:])
                else:
                    return jaxprs.run(step.eqn, values)
            port = jax.tree.map(jnp.add, port, made)
            return outputs

        return jaxprs.evaluate(plan, inputs, apply), port

    def within(plan, is_scan, key, *inputs):
        if is_scan:
            step, *inputs = inputs
            key = fold(key, step)
        outputs, port = walk(plan, inputs, key)
        return [*outputs, *jax.tree.leaves(port)]

    outputs, port = walk(plan, arrays, key)
    output = jax.tree.structure(result).unflatten(outputs)
    return _join(output, port) if rule.direct else output


# The node returns the output, and sends its message to the port too.
_floats = lambda message: jax.tree.map(lambda m: None if m.dtype == jax.dtypes.float0 else m, message)
_join = node(Propagator(lambda output, port: (output, None), lambda _, message: (message, _floats(message))))


def _rewired(site: ProgramSite, rule: Rule, port: Any) -> Callable[..., Any]:

    def forward(key, params, *inputs):
        propagator = rule.at(site._replace(key=key), params)
        if not isinstance(propagator, Propagator):
            raise TypeError(
                f"the rule's at must return an ap.Propagator(forward, backward), got {describe(propagator)} at the "
                f"site {site}. A function f with its usual way back is ap.backpropagation(f)."
            )
        output, memory = propagator.forward(*inputs)
        if form_of(output) != form_of(site.output):
            got = shapes_of(output)
            raise ValueError(f"the rule's forward at the site {site} must return {site.output}, got {got}")
        return (output, port), (key, params, memory)

    def backward(memory, message):
        (key, params, memory), (message, result) = memory, message
        if rule.init is not None:
            jaxprs.require_undivided("ap.rewire by a rule with parameters", (params, memory, message))
        propagator: Any = rule.at(site._replace(key=key), params)
        messages = propagator.backward(memory, message, *([result] if rule.direct else []))
        where = f" of the site {site}"
        if rule.init is None:
            return None, None, *check_messages(messages, form_of(site.inputs), where)
        where += " (input 0 is the rule's parameters, and its message their update)"
        return None, *check_messages(messages, form_of((params, *site.inputs)), where)

    return node(first_order(Propagator(forward, backward), _SECOND.format(site=site.name)))


_SECOND = (
    "the backward pass of the site {site} was replaced by ap.rewire, so it is no derivative, and there is no second "
    "derivative of a rewired function. Use the function itself for second derivatives; where the gradient is meant as "
    "a constant, call jax.lax.stop_gradient on its arguments."
)
