"""What authors of nodes ask of a tape: credit, channels, and declarations.

    tape = channels.credit(tape, log_density, name="my node", baseline="leave_one_out")

`credit` charges the costs after a random choice to the choice. A `Channel` is a port of the tape: a node takes the port
as an input and returns it as an output, and its `backward` finds there what later nodes sent, and answers with what
earlier nodes shall find. The program is traced twice. In the first trace nodes ask for channels, and in the second the
tape has their ports.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from apgrad._ground.primitives import mark, zero_with_gradient
from apgrad.expectations._data_axis import per_lane
from apgrad.expectations._lanes import donors, mean_of_others
from apgrad.expectations._ledger import Channel as Channel, Kind, Mark, differs
from apgrad.expectations._tape import Tape

SUFFIX = Kind.SUFFIX


def credit(
    tape: Tape,
    zero: jax.Array,
    *,
    name: str,
    baseline: jax.Array | Literal["leave_one_out", "standardized"] | None,
    learn: bool = False,
    residual: bool = False,
    parts: bool = False,
    mask: jax.Array | None = None,
) -> Tape:
    """Charges later costs to a random choice.

    Args:
      tape: the current tape.
      zero: the choice's log-density, of shape (lanes, ...). Only its derivative counts: the cotangent that comes back
        to it is the cost-to-go, less the baseline. Where its value is not finite, the lane's total is NaN.
      name: the node's name in errors.
      baseline: `"leave_one_out"`, `"standardized"`, None, or an array: (lanes,), or (lanes, parts) with `parts`. An
        array must be a function of what was there before the choice.
      residual: take the mean of the other lanes' cost-to-go, less their own baselines, off as well.
      learn: train the array towards the cost-to-go, by the gradient of (b - G)^2 / 2.
      parts: the second axis of `zero` numbers parts of a lane that are independent of each other.
      mask: a Boolean array, (lanes,), or (lanes, parts) with `parts`: where False, the choice is charged with nothing,
        and the lane is in no other lane's leave-one-out baseline of this choice.

    Returns:
      The next tape.
    """
    ledger = tape._require_current(name)
    ledger.scoring = name
    if zero.ndim < 1 + parts or zero.shape[0] != tape.lanes:
        raise ValueError(
            f"{name}: the log-density has shape {zero.shape}, expected the lanes first, "
            f"({tape.lanes},{' parts,' if parts else ''} ...)"
        )
    shape = zero.shape[: 1 + parts]
    zero = zero.reshape(*shape, -1).sum(-1)
    own = None if isinstance(baseline, str) else baseline
    if mask is not None:
        mask = jnp.asarray(mask)
        if jnp.shape(mask) not in (shape[:1], shape) or not jnp.issubdtype(mask.dtype, jnp.bool_):
            raise ValueError(
                f"{name}: the mask has shape {jnp.shape(mask)} and dtype {mask.dtype}, expected Booleans {shape}"
            )
        mask = mask.reshape(*mask.shape, *[1] * (len(shape) - mask.ndim))
        zero = jnp.where(mask, zero, 0)
    others = residual or isinstance(baseline, str)
    if others and tape.lanes < 2:
        raise ValueError(
            f"{name}: the {'leave-one-out' if baseline != 'standardized' else 'standardized'} baseline is a mean over "
            f"lanes and needs at least 2, got lanes={tape.lanes}. Use more lanes, or give the estimator baseline=None."
        )
    if own is not None and jnp.shape(own) != shape:
        raise ValueError(f"{name}: the baseline has shape {jnp.shape(own)}, expected {shape}")
    kind = Kind.STANDARDIZED if isinstance(baseline, str) and baseline == "standardized" else Kind.BASELINED
    # Costs do not know masks. So the mean over the lanes that live at this choice is taken where the costs come back.
    living = others and mask is not None and kind == Kind.BASELINED
    charged = Channel(kind if others and not living else Kind.PLAIN, "", shape)
    regression = Channel(Kind.REGRESSION, "", shape)
    if ledger.collecting:
        ledger.channels |= {charged, regression} if learn or living else {charged}
        ledger.charged_parts = name if parts else ledger.charged_parts
        if isinstance(baseline, str):
            ledger.leaving_one_out = True
            mark(zero, Mark.LEAVES_ONE_OUT, name)
        return tape._follow()

    if not {charged, regression if learn or living else charged} <= tape._ports.keys():
        raise differs(f"{name} charges its choice in another way or shape")
    ports, dtype = dict(tape._ports), tape._plan.dtype
    finite = jnp.isfinite(lax.stop_gradient(zero)).reshape(tape.lanes, -1).all(-1)
    total = tape._total + jnp.where(finite, 0, jnp.nan).astype(dtype)
    zero = zero_with_gradient(zero).astype(dtype)
    before = tape._logp(Kind.BASELINED, len(shape)) + tape._logp(Kind.PLAIN, len(shape))
    others_mean = functools.partial(mean_of_others, folds=tape._plan.folds, mask=mask if living else None)
    if living:
        # A cost c adds c r to the total, so that this adds -(the mean of the others' costs) (exp(z) - 1) exp(before).
        weight = jnp.exp(before) * jnp.expm1(zero)
        ports[regression] = ports[regression] - jax.linear_transpose(others_mean, weight)(weight)[0]
    if own is not None:
        b = jnp.asarray(own, dtype) if mask is None else jnp.where(mask, jnp.asarray(own, dtype), 0)
        taken = b - others_mean(b) if residual else b
        correction = -lax.stop_gradient(taken) * jnp.exp(before) * jnp.expm1(zero)
        total = total + per_lane(tape._plan, correction)
        if learn:
            total = total + per_lane(tape._plan, zero_with_gradient(b**2 / 2))
            ports[regression] = ports[regression] - zero_with_gradient(b)
    ports[charged] = ports[charged] + zero
    return tape._follow(total=total, ports=ports)


def request(tape: Tape, channel: Channel, what: str) -> jax.Array | None:
    """The port of a channel, zeros of the costs' dtype, for a node to take as an input.

    Costs take no notice of a channel that carries no costs.

    Args:
      tape: the current tape.
      channel: the channel; an equal one is the same channel.
      what: the node's name in errors.

    Returns:
      The port, or None in the first trace of the program, where the tape has no ports yet.
    """
    ledger = tape._require_current(what)
    if ledger.collecting:
        ledger.channels.add(channel)
        return None
    if channel not in tape._ports:
        raise differs(f"{what} asks for {channel}")
    return tape._ports[channel]


def moments(tape: Tape) -> Channel:
    """The channel of the rows that mixers send to `ap.adaptive`.

    Args:
      tape: a tape of the second trace.
    """
    return next(channel for channel in tape._ports if channel.kind == Kind.MOMENTS)


def put(tape: Tape, channel: Channel, port: jax.Array | None, what: str) -> Tape:
    """The next tape, with a channel's port as the node returned it.

    Args:
      tape: the current tape.
      channel: the channel.
      port: the channel's port as the node returned it, of the channel's shape; None where `request` returned None.
      what: the node's name in errors.
    """
    tape._require_current(what)
    return tape._follow(ports=tape._ports if port is None else {**tape._ports, channel: port})


def folds(tape: Tape) -> int:
    """How many groups of equal size the lanes come in: a batch statistic is of one group.

    Args:
      tape: any tape.
    """
    return tape._plan.folds


def seed(tape: Tape) -> jax.Array:
    """A seed for hashes, uint32: one for the whole of a program's call, and another one in every call.

    Args:
      tape: any tape.
    """
    return tape._carried.seed


def is_adaptive(tape: Tape) -> bool:
    """Whether the program runs under `ap.adaptive`.

    Args:
      tape: any tape.
    """
    return tape._plan.sites is not None


class Visit(NamedTuple):
    """One visit of a mixer's site, under `ap.adaptive`.

    Attributes:
      slot: the row of the visit.
      weights: the row of the mixer's weights; None where the mixer weighs by what it sees.
    """

    slot: jax.Array
    weights: jax.Array | None


def visit(tape: Tape, what: str) -> tuple[Tape, Visit | None]:
    """Counts a visit of a mixer's site, and gives what `ap.adaptive` knows of it; None without `ap.adaptive`.

    Args:
      tape: the current tape.
      what: the node's name in errors.

    Returns:
      The next tape, and the visit.
    """
    ledger, sites, carried = tape._require_current(what), tape._plan.sites, tape._carried
    if sites is None:
        return tape, None
    number = len(ledger.sites)
    ledger.sites.append(what)
    if ledger.collecting:
        return tape._follow(carried=carried._replace(seed=mark(carried.seed, Mark.VISIT, number))), None
    if number >= len(sites):
        raise ValueError(f"{what}: the program did not do the same at each of its two traces, as ap.adaptive needs")
    slot = sum(sites[:number]) + carried.visits[number]
    weights = None if carried.weights is None else lax.stop_gradient(carried.weights[slot])
    return tape._follow(carried=carried._replace(visits=carried.visits.at[number].add(1))), Visit(slot, weights)


def drawn(tape: Tape, x: jax.Array) -> jax.Array:
    """The samples as the node drew them; where lanes are tested for independence, some get another lane's sample.

    Args:
      tape: the current tape.
      x: samples (lanes, ...).
    """
    tape._require_current("drawn")
    return x if tape._plan.disturbed is None else x[donors(tape.lanes, *tape._plan.disturbed)]


def declare_parts(tape: Tape, shape: tuple[int, ...], what: str, parts: bool | None, charged: bool) -> bool:
    """Says whether the second axis of a sample numbers parts of a lane that are independent of each other.

    Args:
      tape: the current tape.
      shape: the sample's.
      what: the node's name in errors.
      parts: what the user said; None where nothing was said.
      charged: whether the choice is charged with costs, so that it matters.

    Returns:
      Whether it does.

    Raises:
      ValueError: for a sample without a second axis, or one that seems to have the data axis, where nothing was said.
    """
    if not parts:
        data = tape._plan.data
        if parts is None and charged and data is not None and shape[1:2] == (data,):
            raise ValueError(
                f"{what}: the sample has shape {shape}, whose second axis is as long as data={data}. Say parts=True if "
                "it is one choice for each datum, which then pays for the costs of its datum only; parts=False if not."
            )
        return False
    if len(shape) < 2 or shape[1] < 1:
        raise ValueError(
            f"{what}: with parts=True the sample's shape is (lanes, parts, ...), a part at least, got {shape}"
        )
    tape._require_current(what).parts.setdefault(shape[1], what)
    return True


def declare_lanes_interact(tape: Tape, what: str) -> Tape:
    """Says that a node lets lanes act on each other: credit, which goes to a lane's own choices, is then refused.

    Args:
      tape: the current tape.
      what: the node's name in errors.

    Returns:
      The next tape.
    """
    tape._require_current(what).interacting = what
    return tape._follow()


def declare_weighing(tape: Tape, what: str) -> None:
    """Says that a node takes weights from the samples that it weighs, so that cross-fitting has two streams.

    Args:
      tape: the current tape.
      what: the node's name in errors.
    """
    tape._require_current(what).weighing = what
