"""What users give: arguments by their numbers, anything else by a name, and numbers that JAX may have traced."""

import difflib
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np


def nearest(name: Any, names: Collection[str]) -> str:
    """What an error says of an unknown name: the three names that are the most like it."""
    close = difflib.get_close_matches(str(name), names, 3, cutoff=0.0)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else "there is none"


def number_of(name: Any, names: Sequence[str], what: str) -> int:
    """The place of a name in a sequence of names, or an error with the nearest names."""
    if name not in names:
        raise ValueError(f"there is no {what} {name!r}; {nearest(name, names)}")
    return names.index(name)


def is_single(numbers: Any) -> bool:
    """Whether `argnums`, or an index, is one integer (of Python, NumPy or JAX) and no sequence."""
    return hasattr(numbers, "__index__") and not getattr(numbers, "shape", ())


def integers(numbers: Any, what: str) -> tuple[int, ...]:
    """One integer or a sequence of integers, of Python, NumPy or JAX, as a tuple of Python's."""
    try:
        return tuple(operator.index(n) for n in ([numbers] if is_single(numbers) else numbers))
    except TypeError as error:
        raise TypeError(f"{what} must be an integer or a sequence of integers, got {numbers!r}") from error


def chosen_numbers(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The numbers of the arguments that `argnums` choose of `count` positional ones, counted from 0."""
    given = integers(argnums, "argnums")
    for n in given:
        if not -count <= n < count:
            raise ValueError(
                f"argnums has {n}, but the function is called with {count} positional arguments. Keyword arguments "
                "are not counted: give by position what argnums name."
            )
    numbers = tuple(n % count for n in given)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"argnums {argnums} name an argument twice, of {count}. Give each once.")
    return numbers


def meets(value: Any, condition: Callable[[np.ndarray], Any]) -> bool:
    """Whether real numbers of any library meet a condition; numbers that JAX traces cannot be checked, and pass."""
    try:
        known = np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        return True
    return bool(np.isrealobj(known) and np.all(condition(known)))
