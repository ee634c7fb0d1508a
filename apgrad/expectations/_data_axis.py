"""The data axis: a minibatch of B data, with K samples for each.

The lanes are the samples, and the data are parts of a lane: the leave-one-out baseline is the mean over the other
samples *of the same datum*. With a lane for each datum and sample the variance is several times as large:
`warn_of_mixed_data` finds where a score has its lanes from an array that was given.
"""

import jax

from apgrad._ground.warning import warn
from apgrad._programs.jaxprs import Program
from apgrad.expectations._lanes import cost_shape_error
from apgrad.expectations._ledger import Ledger, Mark, TapePlan
from apgrad.expectations._programs.leading_axes import marks_with_outer_axis
from apgrad.expectations._programs.marks import followed


def per_lane(plan: TapePlan, term: jax.Array) -> jax.Array:
    """What a term adds to its lane's total, (lanes,): the mean over data, or the sum over other parts."""
    if term.ndim == 1:
        return term
    return term.mean(-1) if plan.data is not None else term.sum(-1)


def require_parts(plan: TapePlan, ledger: Ledger) -> None:
    lanes, data = plan.lanes, plan.data
    if len(ledger.parts) > 1:
        raise ValueError(f"nodes with different numbers of parts in one program: {ledger.parts}")
    for size, what in ledger.parts.items():
        if data not in (None, size):
            raise ValueError(f"{what} has {size} parts, and data={data} is given: use {size}, or a part an example")
    size, axis = (next(iter(ledger.parts), None), "parts") if data is None else (data, "data")
    by_part = [shape for shape in ledger.cost_shapes if len(shape) == 2]
    for shape in by_part:
        if size is None:
            raise ValueError(cost_shape_error(lanes, shape))
        if size != shape[1]:
            raise ValueError(f"a cost of shape {shape}, expected ({lanes}, {size}): the lanes and the {axis}")
    if not by_part and (charged := ledger.declared.get("scoring parts")):
        raise ValueError(
            f"{charged} was made with parts=True, and no cost has shape (lanes, parts): the costs were summed or "
            f"averaged to ({lanes},) before, so that every part would pay for all of them. Give costs of shape "
            f"({lanes}, {size}), one value for each lane and a {'part' if data is None else 'datum'}."
        )


def warn_of_mixed_data(program: Program, lanes: int) -> None:
    mixed = marks_with_outer_axis(program, Mark.LEAVES_ONE_OUT, lanes)
    charged = followed(program, Mark.LEAVES_ONE_OUT, Mark.COST) if mixed else set()
    if not (found := [label for label in mixed if label in charged]):
        return
    name, of_choose = found[0]
    advice = (
        "Let lanes be samples of one datum, and data a second axis: ap.expectation(program, lanes=samples, "
        "data=batch), a distribution of batch shape (samples, batch), parts=True, costs of shape (samples, batch). "
        "Or give the node a baseline of its own: baseline=ap.learned_baseline(...), a function, or None."
    )
    if of_choose:
        advice = (
            "These are costs after the choice: put those that do not depend on it before it. Let its continuation "
            "return what it costs on average, later choices summed over; or draw the choices by "
            "ap.sample(..., parts=True), with lanes=samples and data=batch."
        )
    warn(
        f"{name}: the leave-one-out baseline is the mean over other lanes, and here lanes differ by more than their "
        f"samples: the program was given an array with a row for each of the {lanes} lanes. The gradient is right, but "
        "its variance can be several times what it need be: the baseline averages over other data. " + advice
    )
