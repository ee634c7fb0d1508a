"""What a network depends on must come back as a message: the check of every network that `backward` traces.

Messages come back through ports alone, so a value and its port must go the same way from one node to the next. Where a
value goes without its port, or through a nonlinear function, what it depends on gets a wrong update or none. So the
network is traced forward once, and every variable gets a fact, a set of pairs (origin, function): the parameters and
nodes it comes from, and the functions on the way. A value that enters a node must have the same fact as its port. A
parameter and its port have one shape, so one linear function may be applied to both. The port of a signal has one axis
more, so between two nodes a signal may get new axes or axes in another order, as by `jax.vmap`, and nothing else.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from apgrad._ground.port import Signal
from apgrad._ground.primitives import mark
from apgrad._programs import kinds
from apgrad._programs.flow import flow
from apgrad._programs.jaxprs import Program, inexact_outputs, inside_of, is_inexact, nested, trace

Gate = enum.Enum("Gate", "IN OUT")
Fact = frozenset[tuple[str, str]]
NOTHING: Fact = frozenset()
PORT = ("", "port")  # in the fact of a port
DENSE = ("", "dense")  # in the fact of a signal from a dense node, with no node but wires in between
HELD = ("", "held")  # in the fact of what is the same in all steps of a scan
# In the fact of what a port has otherwise than its value: comparisons of ports.
UNLIKE = ("", "unlike")
NONLINEAR = "a nonlinear function"
SHARED = "the shared node"  # the origin of a parameter that `mplp.shared` made begins with this
WIRE = "mplp.wire"
WIRED = "a signal of the wire"  # the origin of values inside the function of a `wire`
# What a signal may go through outside of a `wire`.
ARRANGING = {"broadcast_in_dim", "convert_element_type", "squeeze", "transpose"}


def enter(where: str, pairs: Any = (), data: Any = ()) -> tuple[list[Any], tuple[Any, ...]]:
    at = lambda x, part: mark(x, Gate.IN, (where, part, "")) if is_inexact(x) else x
    port = lambda p: "port" if isinstance(p, Signal) else "parameter"
    return [type(p)(at(p.value, "value"), at(p.port, port(p))) for p in pairs], tuple(at(x, "data") for x in data)


def leave(where: str, output: Any, kind: str = "") -> Any:
    at = lambda x, part: mark(x, Gate.OUT, (where, part, kind))
    if isinstance(output, jax.Array):
        return at(output, "loss")
    return type(output)(*map(at, output, output._fields))


@dataclasses.dataclass
class Walk:
    size: int  # of messages; no other axis has this size, so it tells which axis of a port has the components
    multiplies: bool = False  # whether there is a `wire` of a function that is not linear
    dense_twice: bool = False  # whether a dense node feeds another one
    # The dense nodes, and whether they feed another: what feeds losses alone is no hidden layer.
    hidden: dict[str, bool] = dataclasses.field(default_factory=dict)
    mapped: set[str] = dataclasses.field(default_factory=set)  # the nodes with signals that `jax.vmap` maps
    # Nodes that use a parameter in every step of a scan, in copies of `jax.vmap`, or a second time, unshared.
    repeated: dict[str, None] = dataclasses.field(default_factory=dict)
    # The facts of values on their way into or out of a node, whose ports come next.
    values: list[Fact] = dataclasses.field(default_factory=list)
    # For each node that is entered and not yet left, the part and the fact of each array that it takes.
    entered: dict[str, list[tuple[str, Fact]]] = dataclasses.field(default_factory=dict)
    parameters: dict[str, list[frozenset[str]]] = dataclasses.field(default_factory=dict)  # their origins at each node
    # For each variable that is a parameter, the ids of the equations that take it and of the equations around these.
    taken: dict[Any, set[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    # For each view and each input of a nested program, its source outside, and the ids of the equations in between.
    outside: dict[Any, tuple[Any, tuple[int, ...]]] = dataclasses.field(default_factory=dict)

    def through(self, eqn: Any, facts: list[Fact]) -> Sequence[Fact] | None:
        name, together = eqn.primitive.name, NOTHING.union(*facts)
        if name == "mark" and isinstance(eqn.params["kind"], Gate):
            where, part, kind = eqn.params["label"]
            entering = eqn.params["kind"] is Gate.IN
            return [self.enter(where, part, facts[0], eqn) if entering else self.leave(where, part, kind, facts[0])]
        if name == "shard_map":
            return flow(inside_of(eqn)[0], facts, self.through, frozenset.union, lambda _: NOTHING, held=_held)
        inside = nested(eqn)
        # An input of a nested program is the variable outside, so that two uses of it are seen. Of the branches of a
        # `cond` one alone runs: two that use a parameter do not use it twice.
        for program in inside.jaxprs if inside is not None and inside.kind != "cond" else ():
            for inner, outer in zip(reversed(program.jaxpr.invars), reversed(eqn.invars), strict=False):
                atom, way = self.source(outer)
                self.outside[inner] = atom, (id(eqn), *way)
        if inside is not None and together and not (inside.kind == "cond" and UNLIKE in facts[0]):
            # A node of the user's own, which takes each value with its port, sends back messages of its own.
            ports = [fact - {PORT, UNLIKE} for fact in facts if PORT in fact]
            if name.startswith("custom_vjp") and ports == [f for f in facts if f and PORT not in f]:
                port = lambda v: self.size in v.aval.shape
                return [together - ({DENSE} if port(v) else {DENSE, PORT, UNLIKE}) for v in eqn.outvars]
            if inside.kind in ("scan", "while", "cond"):  # a port must be in the same one as its value
                facts[:] = [fact | _by(f"{name} {id(eqn)}", _of_signals(fact)) for fact in facts]
            return None
        if name in kinds.VIEW:
            self.outside[eqn.outvars[0]] = self.source(eqn.invars[0])
        if name in kinds.IDENTITY:
            return facts
        made = _made(eqn, facts, together)
        return [made if inexact else made & {UNLIKE} for inexact in inexact_outputs(eqn)]

    def source(self, atom: Any) -> tuple[Any, tuple[int, ...]]:
        return (atom, ()) if isinstance(atom, Literal) else self.outside.get(atom, (atom, ()))

    def enter(self, where: str, part: str, fact: Fact, eqn: Any) -> Fact:
        if part == "parameter" and any(origin.startswith("params") for origin, _ in fact):
            variable, way = self.source(eqn.invars[0])
            taken = self.taken.setdefault(variable, set())
            taken.add((id(eqn), *way))
            copied = where in self.mapped and not eqn.params["mapped"]
            if HELD in fact or copied or len(taken) > 1:
                self.repeated[where] = None
        self.entered.setdefault(where, []).append((part, fact))
        if part == "value":
            self.mapped |= {where} if eqn.params["mapped"] else set()
            self.values.append(fact)
            return frozenset({(WIRED, "")}) if where == WIRE else NOTHING
        value = fact if part == "data" else self.values.pop()
        linear = not any(function == NONLINEAR for _, function in value | fact)
        if value and (part == "data" or value - {PORT} != fact - {PORT, UNLIKE} or not linear):
            what = f"{'data' if part == 'data' else 'a value'} that depends on {_origins(value | fact)}"
            raise TypeError(
                f"{where} takes {what} in another way than its messages, so that none would go back: by .value, by a "
                "function that is not linear, or by a function of a signal outside of mplp.wire. Give the node the "
                "signal or parameter itself, or what mplp.wire makes of a signal, or use jax.lax.stop_gradient."
            )
        return NOTHING

    def leave(self, where: str, part: str, kind: str, fact: Fact) -> Fact:
        """The fact of what a node makes: that it comes from this node, with nothing in between."""
        if part == "port":
            return frozenset({(where, ""), PORT}) | self.values.pop()
        inside = frozenset(each for each in fact if each[0] == WIRED)  # these facts end here
        self.multiplies |= (WIRED, NONLINEAR) in inside
        if fact := fact - inside:
            raise TypeError(
                f"the function of {where} closes over {_origins(fact)}, which would get no message. Give the function "
                "only the values of its signals; or hold what it closes over constant by jax.lax.stop_gradient."
            )
        entered = self.entered.pop(where, [])
        origins = [frozenset(o for o, _ in fact if o) for part, fact in entered if part == "parameter"]
        for mine, known in zip(origins, self.parameters.setdefault(where, origins), strict=True):
            if mine != known and not mine & known:
                name = lambda found: _origins({(o, "") for o in found}) or "a constant"
                raise ValueError(
                    f"{where} is used with several parameters, {name(known)}, and {name(mine)}: these are two nodes. "
                    "Give each its own name; within a layer of several nodes, place.within('second')."
                )
        dense = kind in ("dense", "conv")
        came = NOTHING.union(*(fact for part, fact in entered if part == "value"))
        self.dense_twice |= dense and DENSE in came
        behind = frozenset(pair for pair in came if pair[1] in self.hidden)  # ("", node), the last dense nodes
        if dense:
            self.hidden |= {where: self.hidden.get(where, False), **{node: True for _, node in behind}}
            behind = frozenset({("", where)})
        if part == "loss":
            return NOTHING
        behind |= {DENSE} if dense or (where == WIRE and DENSE in came) else NOTHING
        self.values.append(behind)
        return frozenset({(where, "")}) | behind


def require_messages(program: Program, values: Any, size: int) -> Walk:
    """Refuses a network in which a derivative goes another way than a message, or a place has several parameters.

    `program` computes the loss from the parameters' values and ports, with messages of size `size`.
    """
    names = [f"params{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(values)]
    facts = [frozenset({(name, "")}) for name in names]
    facts += [fact | {PORT} for fact in facts]
    walk = Walk(size)
    (result,) = flow(program, facts, walk.through, frozenset.union, lambda _: NOTHING, held=_held)
    if result:
        of_parameters = [origin.startswith("params[") for origin, _ in result]
        do = "" if all(of_parameters) else "Lead a signal through mplp.readout"
        if any(of_parameters):
            penalty = "A penalty on parameters is a step beside the rule's: subtract rate * jax.grad(penalty)(params)"
            do = f"{do}. {penalty}" if do else penalty
        raise TypeError(
            f"the network's loss depends on {_origins(result)} outside the loss nodes, from which no message comes. "
            f"{do}; put what you only watch into the metrics, or use jax.lax.stop_gradient."
        )
    return walk


def moves(function: Callable[[Any], jax.Array], x: Any) -> bool:
    """Whether a function of an array changes its shape, or is linear in it but not elementwise, as a reversal is."""
    (program, made), start, moving = trace(function, x), frozenset({(WIRED, "")}), set[str]()

    def through(eqn, facts):
        name, together, inside = eqn.primitive.name, NOTHING.union(*facts), nested(eqn)
        if inside is not None:  # a scan over the array carries something from entry to entry
            carries = inside.kind == "scan" and inside.counts[1] > 0
            moving.update({name} if carries and any(facts[sum(inside.counts[:2]) :]) else ())
            return None
        moving.update({name} - kinds.WITHIN_ELEMENTWISE if together and not inside_of(eqn) else ())
        chosen = name in kinds.NO_DERIVATIVE and together  # such as a comparison
        return [start | {(WIRED, NONLINEAR)} if chosen else _made(eqn, facts, together)] * len(eqn.outvars)

    facts = flow(program, [start], through, frozenset.union, lambda _: NOTHING, held=_held)
    linear = all(fact and (WIRED, NONLINEAR) not in fact for fact in facts)
    return made.shape != x.shape or (bool(moving) and linear)


def _held(fact: Fact) -> Fact:
    return fact | {HELD} if fact else fact


def _made(eqn, facts, together):
    name = eqn.primitive.name
    if name in kinds.NO_DERIVATIVE:
        return frozenset({UNLIKE}) if together & {PORT, UNLIKE} else NOTHING
    linear = kinds.is_linear_in(name, [i for i, fact in enumerate(facts) if fact])
    if not linear or (_of_signals(together) and name not in ARRANGING):
        return together | _by(NONLINEAR, together)
    return together | _by(_way(eqn), together)


def _way(eqn):
    """What a linear equation does, in words that are the same for the value of a signal and for its port."""
    name, params = eqn.primitive.name, eqn.params
    axes, numbers = [], [v.val for v in eqn.invars if isinstance(v, Literal)]
    if name == "transpose":
        axes = list(params["permutation"])
        while axes and axes[-1] == len(axes) - 1:  # stays last, as a port's axis of components does
            axes.pop()
    elif name == "broadcast_in_dim":
        axes = sorted({*range(len(params["shape"]))} - {*params["broadcast_dimensions"]})
    return f"{name} {axes} by {numbers}"


def _of_signals(fact):
    return {pair for pair in fact if pair[0] not in ("", WIRED) and not pair[0].startswith(("params", SHARED))}


def _by(function, fact):
    return {(origin, function) for origin, _ in fact - {PORT, UNLIKE}}


def _origins(fact):
    return " and ".join(sorted({origin for origin, _ in fact} - {""}))
