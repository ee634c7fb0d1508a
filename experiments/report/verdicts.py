"""What the papers say, what was measured, and the verdict, which is computed and not written.

A figure *matches* if it is within two standard errors of the paper's (of the two errors together, where the paper has
one), or within 10 % where neither has an error. Outside, it *beats* the paper's if it is off in the direction that is
better, and else is *not reproduced*. A claim in words is held by a function of the results. A run whose setting is not
the paper's has the verdict *small*, whatever it found, unless the compared part of the run does have the paper's
setting; images that are a subset of the paper's are another setting, too. What no paper says is *new*.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Results = dict[str, Any]


class Value(NamedTuple):
    """A figure: its mean, and its standard error or None."""

    mean: float
    error: float | None = None


class Claim(NamedTuple):
    """One statement of a paper."""

    source: str  # where the paper says it
    what: str  # the quantity, in words
    run: str  # the folder of the results
    published: Value | str | None  # a figure, or a statement in words; None for a finding that no paper has
    ours: Callable[[Results], Value | tuple[str, bool]]  # a figure, or for a statement (words, whether it holds)
    better: Literal["lower", "higher"] = "lower"
    same: bool | None = None  # whether the compared part has the paper's setting; None where the run as a whole says


def verdict(claim: Claim, results: Results) -> str:
    """One of "matches", "beats", "small", "not reproduced" and "new".

    Example:
      >>> claim = Claim("Fig. 1", "error", "run", Value(1.0, 0.1), lambda results: Value(results["error"], 0.1))
      >>> [verdict(claim, {"error": e}) for e in (1.2, 0.5, 1.5)]
      ['matches', 'beats', 'not reproduced']
    """
    if claim.published is None:
        return "new"
    if claim.same is False or (claim.same is None and is_small(results)):
        return "small"
    ours = claim.ours(results)
    if not isinstance(ours, Value) or isinstance(claim.published, str):
        return "matches" if ours[1] else "not reproduced"
    distance = ours.mean - claim.published.mean
    errors = [v.error for v in (ours, claim.published) if v.error is not None]
    bound = 2 * sum(e**2 for e in errors) ** 0.5 if errors else 0.1 * abs(claim.published.mean)
    if abs(distance) <= bound:
        return "matches"
    return "beats" if (distance < 0) == (claim.better == "lower") else "not reproduced"


def is_small(results: Results) -> bool:
    """Whether the run's setting differs from the paper's: its options, or a subset for the data."""
    return (results.get("setting") or "").startswith("not the paper") or "a subset" in str(results.get("data"))


def figure(value: Value) -> str:
    """The figure with its standard error, as many digits as the error allows.

    Example:
      >>> figure(Value(76.637, 0.213)), figure(Value(0.00116334, 0.00013)), figure(Value(2.69)), figure(Value(8.4e14))
      ('76.6 ± 0.2', '0.00116 ± 0.00013', '2.69', '8.4e+14')
    """
    if value.error is None:
        return f"{value.mean:.3g}"
    rounded, _, power = f"{value.error:.1e}".partition("e")
    digits = rounded.startswith("1") - int(power)
    if digits < 0 or digits > 7:
        return f"{value.mean:.3g} ± {value.error:.1g}"
    return f"{value.mean:.{digits}f} ± {value.error:.{digits}f}"
