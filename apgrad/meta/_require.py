"""Checks of the numbers that users give as options, at the call of a function and not inside its program."""

import math
import operator
from typing import Any


def whole(name: str, value: Any, least: int) -> int:
    """The value as an int, if it is an integer of at least so much; the name is the option's, in errors."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}") from error
    if found < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {name}={found}")
    return found


def number(name: str, value: Any, *, positive: bool = False) -> None:
    """Refuses what is not a finite number, or is negative (or 0, if it must be positive)."""
    bound = "above 0" if positive else "of at least 0"
    try:
        if isinstance(value, bool | str):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a finite number {bound}, got {value!r}") from error
    if not math.isfinite(found) or found < 0 or (positive and found == 0):
        raise ValueError(f"{name} must be a finite number {bound}, got {name}={value}")
