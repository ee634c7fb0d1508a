"""What authors of nodes ask of a tape: credit, ports, and declarations.

`credit` charges a random choice with the costs after it. The array of a `Port` that a node adds is an input of the node
(`request`) and an output (`put`): there its `backward` gets what later nodes sent, and sends to earlier nodes.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.primitives import mark, zero_with_gradient
from apgrad.expectations._lanes import donors, mean_of_others, require_mask, weighed_mean_of_others
from apgrad.expectations._ledger import Doing, Mark, TapePlan, differs, marked
from apgrad.expectations._ports import BASELINED, CONSTANT, PLAIN, RAW, RAW_FOR_OTHERS, STANDARDIZED, Port, dice
from apgrad.expectations._tape import Tape
from apgrad.expectations.estimators._baselines import is_standardized

ROW = 5  # numbers that a mixer sends to `ap.adaptive` at each visit, for each cell of its inputs


def credit(
    tape: Tape,
    zero: jax.Array,
    *,
    name: str,
    baseline: jax.Array | Literal["leave_one_out", "standardized"] | None,
    learn: bool = False,
    parts: bool = False,
    mask: jax.Array | None = None,
    log_weight: jax.Array | None = None,
    of_choose: bool = False,
) -> Tape:
    """Charges later costs to a random choice whose log-density is `zero`, (lanes, ...).

    Only the derivative of `zero` counts: the cotangent that comes back is the cost-to-go G, less the baseline b. Where
    `zero` is not finite, the lane's total and the derivative are NaN. A `baseline` that is an array, (lanes,), or
    (lanes, parts) where `parts` are the second axis of `zero`, must not depend on the choice; `learn` trains it by the
    gradient of (b - G)^2 / 2. Where a `mask` is False, the choice is charged with nothing, and the lane is in no
    leave-one-out baseline of it. `log_weight`, of the shape of `zero`, is the logarithm of the weight of later costs
    (`_score.py`). `of_choose` says that the choice is of `ap.choose`, where a warning gives other advice.
    """
    ledger = tape._require_current(name)
    ledger.declared["scoring"] = name
    if zero.ndim < 1 + parts or zero.shape[0] != tape.lanes:
        raise ValueError(f"{name}: the log-density has shape {zero.shape}, not ({tape.lanes},{' parts,' * parts} ...)")
    shape = zero.shape[: 1 + parts]
    zero = zero.reshape(*shape, -1).sum(-1)
    weighed = None if log_weight is None else log_weight.reshape(*shape, -1).sum(-1)
    own = None if isinstance(baseline, str) else baseline
    if mask is not None:
        mask = require_mask(name, mask, shape)
    others, standardized = isinstance(baseline, str), is_standardized(baseline)
    if others and tape.lanes < 2:
        few = f"needs at least 2, got lanes={tape.lanes}"
        hint = "Use more lanes, or baseline=None: an argument of ap.choose and ap.score, else of the estimator."
        raise ValueError(f"{name}: the baseline {baseline!r} is a mean over lanes and {few}. {hint}")
    if own is not None and jnp.shape(own) != shape:
        raise ValueError(f"{name}: the baseline has shape {jnp.shape(own)}, expected {shape}")
    # Costs do not know masks. So the mean over the lanes that live at this choice is taken where the costs come back.
    living = others and mask is not None and not standardized
    charged = Port("plain", shape, PLAIN)
    if others and not living:
        charged = Port("standardized", shape, STANDARDIZED) if standardized else Port("baselined", shape, BASELINED)
    raw = Port("others", shape, RAW_FOR_OTHERS) if living else Port("raw", shape, RAW)
    asked = {charged, raw} if learn or living else {charged}
    if ledger.collecting:
        ledger.ports |= asked
        if parts:
            ledger.declared["scoring parts"] = name
        mark(zero, Mark.SCORE, zero.ndim)
        if others:
            ledger.declared["baselined"] = name
            if weighed is None:  # values of `ap.score` are given for each lane anyway
                mark(zero, Mark.LEAVES_ONE_OUT, (name, of_choose))
        return tape._follow()

    if not asked <= tape._ports.keys():
        raise differs(f"{name} charges its choice in another way or shape")
    ports, dtype = dict(tape._ports), tape._plan.dtype
    zero = zero if mask is None else jnp.where(mask, zero, 0)  # after the mark: a mask mixes no data
    finite = jnp.isfinite(lax.stop_gradient(zero))
    zero = zero_with_gradient(zero * jnp.where(finite, 1, jnp.nan).astype(zero.dtype)).astype(dtype)
    if weighed is not None:
        finite, zero = finite & jnp.isfinite(weighed), zero + weighed.astype(dtype)
    total = tape._total + jnp.where(finite.reshape(tape.lanes, -1).all(-1), 0, jnp.nan).astype(dtype)
    before = tape._before(len(shape))
    if living:
        others_mean = functools.partial(mean_of_others, folds=tape._plan.folds, mask=mask)
        if tape._plan.weighs:  # by the weights so far: those of later choices are not known
            so_far = lax.stop_gradient(before + zero)
            others_mean = lambda x: weighed_mean_of_others(x, so_far, tape._plan.folds, mask)
        # A cost c adds c r to the total, so that this adds -(the mean of the others' costs) (exp(z) - 1) exp(before).
        weight = jnp.exp(before) * jnp.expm1(zero)
        ports[raw] = ports[raw] - jax.linear_transpose(others_mean, weight)(weight)[0]
    if own is not None:
        b = jnp.asarray(own, dtype) if mask is None else jnp.where(mask, jnp.asarray(own, dtype), 0)
        total = total + tape._plan.per_lane(jnp.exp(before) * dice(0, zero, lax.stop_gradient(b)))
        if learn:
            total = total + tape._plan.per_lane(zero_with_gradient(b**2 / 2))
            ports[raw] = ports[raw] - zero_with_gradient(b)
    ports[charged] = ports[charged] + zero
    return tape._follow(total=total, ports=ports)


def request(tape: Tape, port: Port, what: str) -> jax.Array | None:
    """The array of a port; None in the first trace, where the tape has no ports yet."""
    ledger = tape._require_current(what)
    if ledger.collecting:
        ledger.ports.add(port)
        return None
    if port not in tape._ports:
        raise differs(f"{what} asks for the port {port.name} {port.shape}")
    return tape._ports[port]


def put(tape: Tape, port: Port, array: jax.Array | None, what: str) -> Tape:
    tape._require_current(what)
    return tape._follow(ports=tape._ports if array is None else {**tape._ports, port: array})


class Visits(NamedTuple):
    """The ports of `ap.adaptive`, for a program whose mixers are visited `slots` times."""

    counts: Port  # how often each site has drawn a sample so far, (sites,)
    weights: Port  # the mixers' weights, for each visit of each site and each cell, (slots, cells, 4)
    rows: Port  # what mixers saw at their visits, (slots, cells, 5): messages to the first tape


def visits(plan: TapePlan) -> Visits:
    sites = plan.sites or ()
    weights = Port("weights", (sum(sites), plan.cells, 4), CONSTANT, jnp.float32)
    rows = Port("rows", (sum(sites), plan.cells, ROW))
    return Visits(Port("visits", (len(sites),), dtype=jnp.int32), weights, rows)


class Visit(NamedTuple):
    slot: jax.Array  # the number of the visit
    weights: jax.Array | None  # the mixer's weights, (cells, 4); None where the mixer weighs by what it sees

    @property
    def guarded(self) -> bool:  # whether messages go back twice, along the axis `PASS`
        return self.weights is not None and len(self.weights) > 1


def visit(tape: Tape, what: str) -> tuple[Tape, Visit | None]:
    """The next tape, and what `ap.adaptive` knows of this visit of a mixer's site; None without `ap.adaptive`."""
    ledger, sites = tape._require_current(what), tape._plan.sites
    if sites is None:
        return tape, None
    number = len(ledger.sites)
    ledger.sites.append(what)
    if ledger.collecting:
        return tape._follow(marked(tape._key, Mark.VISIT, number)), None
    counts, weights, _ = visits(tape._plan)
    slot, given = sum(sites[:number]) + tape._ports[counts][number], tape._ports.get(weights)
    tape = tape._follow(ports={**tape._ports, counts: tape._ports[counts].at[number].add(1)})
    return tape, Visit(slot, None if given is None else lax.stop_gradient(given[slot]))


def drawn(tape: Tape, x: jax.Array, charged: bool, parts: bool = False, moving: str | None = None) -> jax.Array:
    """The samples, (lanes, ...); where lanes are tested for independence, some get another lane's sample."""
    if (ledger := tape._require_current("drawn")).collecting:
        x = mark(x, Mark.DRAWN, 1 + parts) if charged else x
        if moving is not None:
            ledger.declared.setdefault("moving", moving)
            x = mark(x, Mark.MOVED, 0)
        return x
    return x if tape._plan.disturbed is None else x[donors(tape.lanes, *tape._plan.disturbed)]


def declare_parts(tape: Tape, shape: tuple[int, ...], what: str, parts: bool | None, charged: bool) -> bool:
    """Whether the second axis of a sample is parts; `parts` is what the user said, `charged` whether it matters."""
    if parts is None and charged and tape.data is not None and shape[1:2] == (tape.data,):
        found = f"{what}: the sample has shape {shape}, whose second axis is as long as data={tape.data}"
        raise ValueError(f"{found}. Say parts=True if it is one choice for each datum, and parts=False if not.")
    if not parts:
        return False
    if len(shape) < 2 or shape[1] < 1:
        raise ValueError(f"{what}: with parts=True a sample is (lanes, parts, ...), and parts >= 1, got {shape}")
    tape._require_current(what).parts.setdefault(shape[1], what)
    return True


def declare(tape: Tape, what: str, doing: Doing) -> None:
    tape._require_current(what).declared[doing] = what
