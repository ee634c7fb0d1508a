"""Checks of what users give: numbers (JAX may trace them), argument numbers, names, functions and parameters."""

import contextlib
import difflib
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def closest(name: Any, names: Collection[str]) -> list[str]:
    return difflib.get_close_matches(str(name), names, 3, cutoff=0.0)


def nearest(name: Any, names: Collection[str]) -> str:
    close = closest(name, names)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else "no name is known."


def whole(what: str, value: Any, least: int = 1, most: float = math.inf) -> int:
    try:
        found = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = least - 1
    if not least <= found <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{what} must be an integer {bounds}, got {value!r}")
    return found


def number(what: str, value: Any, *, positive: bool = False, signed: bool = False) -> None:
    """Refuses what is no finite number >= 0 (`positive`: > 0, `signed`: of any sign); traced numbers pass."""
    good = not isinstance(value, bool | str) and np.ndim(value) == 0
    if not (good and meets(value, lambda x: np.isfinite(x) & (signed | ((x > 0) if positive else (x >= 0))))):
        bound = " above 0" if positive else "" if signed else " of at least 0"
        raise ValueError(f"{what} must be a finite number{bound}, got {value!r}")


def require_one_of(choices: Collection[Any], **options: Any) -> None:
    for name, value in options.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}")


def require_call(what: str, function: Callable[..., Any], names: Sequence[str], hint: str = "") -> None:
    """Refuses a function that does not take these arguments by position; a function without a signature passes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        called = f"{what} is called with ({', '.join(names)})"
        raise TypeError(f"{called}, and it takes {signature}: {error}. Let it take these{hint}.") from None


@contextlib.contextmanager
def noted(text: str, kinds: Any = Exception) -> Iterator[None]:
    """Adds the text to errors of these kinds that are raised inside, such as which function of the user's is called."""
    try:
        yield
    except kinds as error:
        error.add_note(text)
        raise


def per_axis(name: str, sizes: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One size for each space axis of an array (batch, *space, channels)."""
    axes, found = max(len(shape) - 2, 0), np.asarray(sizes)
    if found.dtype.kind not in "iu" or found.shape not in ((), (axes,)) or np.any(found < 1):
        wanted = f"a positive integer, or one for each of the {axes} space axes of (batch, *space, channels) = {shape}"
        raise ValueError(f"{name} needs {wanted}; got {sizes!r}")
    return tuple(np.broadcast_to(found, axes).tolist())


def is_single(numbers: Any) -> bool:
    return hasattr(numbers, "__index__") and not getattr(numbers, "shape", ())


def integers(numbers: Any, what: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(n) for n in ([numbers] if is_single(numbers) else numbers))
    except TypeError as error:
        raise TypeError(f"{what} must be an integer or a sequence of integers, got {numbers!r}") from error


def chosen_numbers(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    given = integers(argnums, "argnums")
    for n in given:
        if not -count <= n < count:
            raise ValueError(f"argnums has {n}, but the function got {count} positional arguments (keywords aside)")
    numbers = tuple(n % count for n in given)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"argnums {argnums} name one of the {count} arguments twice. Give each once.")
    return numbers


def unlike(tree: Any, kind: Any = jnp.floating) -> str:
    """The path and the dtype or type of a pytree's first leaf that is no number or array of the kind; else empty."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_array = hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)
        if not (is_array and jnp.issubdtype(jnp.result_type(leaf), kind)):
            found = f"has dtype {jnp.result_type(leaf)}" if is_array else f"is no array but a {type(leaf).__name__}"
            return f"{jax.tree_util.keystr(path)} {found}"
    return ""


def require_parameters(what: str, tree: Any, kind: Any, reason: str) -> None:
    if found := unlike(tree, kind):
        do = (
            "Leave the argument out of argnums, or differentiate its parameters alone: `graph, params, rest = "
            "nnx.split(module, nnx.Param, ...)`, and in the function `nnx.merge(graph, params, rest, copy=True)`; with "
            "Equinox `eqx.partition`."
        )
        if found.startswith((" has dtype int", " has dtype uint")):
            do = "Give it as floating point, such as 1.0 in place of 1."
        raise TypeError(f"{what}{found}, {reason}. {do}")


def meets(value: Any, condition: Callable[[np.ndarray], Any]) -> bool:
    """Whether real numbers of any library meet a condition; numbers that JAX traces cannot be checked, and pass."""
    try:
        known = np.asarray(value)
        return bool(known.dtype.kind not in "cSUT" and np.all(condition(known)))
    except jax.errors.TracerArrayConversionError:
        return True
    except (TypeError, ValueError):  # not numbers, such as None or a function, or lists of unequal lengths
        return False
