"""A test of programs: lanes must not act on each other."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from apgrad._ground.arguments import whole
from apgrad.expectations._expectation import lane_costs


def assert_independent_lanes(
    program: Callable[..., Any], lanes: int, key: jax.Array, *args: Any, rtol: float = 1e-5
) -> None:
    """Asserts that lanes do not act on each other: other samples in some of them leave the others' costs as they are.

    Likelihood-ratio credit and cross-fitting rely on this. The test makes 1 + 2 log2(lanes) runs. It sees what moves a
    cost with this key: try several where all lanes decide an event together. It does not change values of `ap.score`.

    Args:
      program: `program(tape, *args) -> tape`, as in `ap.expectation`.
      lanes: how many lanes the program runs with, at least 4.
      key: a PRNG key.
      *args: the program's arguments after the tape.
      rtol: how far costs may move by rounding, relative to the largest.

    Raises:
      AssertionError: naming a lane whose cost moved with other lanes' samples, or for costs that are not finite, or if
        no cost moved by more than rounding with its own lane's samples, so that nothing was tested.

    Example:
      >>> import jax, jax.numpy as jnp, numpyro.distributions as dist, apgrad as ap
      >>> def program(tape, theta):
      ...     tape, x = ap.sample(tape, dist.Normal(theta * jnp.ones(tape.lanes), 1.0), ap.reparameterization())
      ...     return tape.cost((x - jnp.mean(x)) ** 2)
      >>> ap.testing.assert_independent_lanes(program, 4, jax.random.key(0), 1.0)
      Traceback (most recent call last):
      AssertionError: the cost of lane ... moved from ... to ... when other lanes drew other samples: ...
    """
    lanes = whole("lanes of assert_independent_lanes, which disturbs half of them,", lanes, 4)
    before = np.asarray(lane_costs(program, lanes, key, *args))
    if not np.isfinite(before).all():
        raise AssertionError(f"costs are not finite, so that none can be seen to move: {before}")
    lane_numbers, tested, rounding = np.arange(lanes), False, rtol * np.max(np.abs(before))
    # The numbers of two lanes differ in some bit. Lanes with a 0 there are disturbed in one run, lanes with a 1 in
    # another: so each of the two is once disturbed while the other is not.
    for bit, value in itertools.product(range((lanes - 1).bit_length()), (0, 1)):
        after = np.asarray(lane_costs(program, lanes, key, *args, disturbed=(bit, value)))
        moved = np.abs(after - before)
        tested |= bool(np.any(moved > rounding))
        moved = np.where(lane_numbers >> bit & 1 == value, 0, moved)
        moved = np.where(np.isnan(moved), np.inf, moved)
        lane = int(np.argmax(moved))
        if moved[lane] > rounding:
            moved = f"moved from {before[lane]} to {after[lane]} when other lanes drew other samples"
            why = "the program lets lanes act on each other (a mean or a normalisation over the leading axis?)"
            raise AssertionError(f"the cost of lane {lane} {moved}: {why}")
    if not tested:
        raise AssertionError(
            f"no cost moved by more than rtol={rtol} when lanes drew other samples, so that nothing was tested: did "
            "all lanes draw the same outcome, as of a rare event? Give more lanes, or another key. Is a part of the "
            "cost large and the same for all samples? Leave it out."
        )
