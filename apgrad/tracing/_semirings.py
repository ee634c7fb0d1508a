"""Semirings: what backpropagation sums, and how.

Backpropagation computes, for each scalar v of a computation graph, g_v = sum over its edges (u, v) of w(u, v) g_u
(DuSell, "Analyzing neural network optimization with gradient tracing", eq. 1.6): a sum over all paths from v to the
loss of the products of the derivatives w along them. Sum and product may be those of any semiring (Goodman, "Semiring
parsing", 1999; Du et al., "Generalizing backpropagation for gradient-based interpretability", ACL 2023), since times
distributes over plus. A semiring's value is a tuple of arrays, all of the shape of the variable they belong to.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import meets, whole
from apgrad._ground.messages import describe

__all__ = ["Semiring", "absolute_sum", "entropy", "max_product", "ordinary", "top_k"]
Value = tuple[Any, ...]
"""One array for each component, all of one shape."""
LOG: Any = np.float32  # the type of a zero or one that is a logarithm


class Semiring(NamedTuple):
    """A sum and a product for the messages of backpropagation.

    Attributes:
      name: what errors and tables call the semiring.
      lift: `derivative -> value`, elementwise: the semiring's value of an edge with this derivative.
      times: `(lifted, message) -> message`, elementwise and broadcasting: the message at the other end of an edge.
      plus: `(value, value) -> value`, elementwise and associative: the sum where edges meet; the first of equals wins.
      zero: the zero of plus, the value of no path: for a component a float (the variable's dtype) or an int (uint32).
      one: the one of times, the message at the loss, in the same form.
      finish: `value -> result`, what the user gets for each argument. By default the only component, or the tuple.
      kind: "add" if plus is componentwise addition and times is bilinear, "max" if plus is the maximum of a single
        component: both then run fast. "gradient" is an "add" whose messages are JAX's own cotangents, so that each
        primitive is left to `jax.vjp`. Otherwise None.
      settle: `message -> message`, applied when all contributions to a variable are in. The identity in a semiring.
      compared: a component's number, if plus adds up the components before this one, and takes this one and all later
        ones from the value in which this one is greater: then less has to be compiled.

    Example:
      >>> import jax.numpy as jnp, apgrad as ap
      >>> paths = ap.tracing.Semiring(
      ...     "paths", lift=lambda w: ((w != 0).astype(w.dtype),), times=lambda a, b: (a[0] * b[0],),
      ...     plus=lambda a, b: (a[0] + b[0],), zero=(0.0,), one=(1.0,), kind="add")
      >>> float(ap.semiring_grad(lambda x: jnp.sum((x * x) * x), paths)(2.0))
      3.0
    """

    name: str
    lift: Callable[[jax.Array], Value]
    times: Callable[[Value, Value], Value]
    plus: Callable[[Value, Value], Value]
    zero: tuple[float | int, ...]
    one: tuple[float | int, ...]
    finish: Callable[[Value], Any] = lambda value: value[0] if len(value) == 1 else value
    kind: Literal["add", "max", "gradient"] | None = None
    settle: Callable[[Value], Value] = lambda value: value
    compared: int | None = None


def require_semiring(semiring: Any) -> None:
    if not isinstance(semiring, Semiring):
        hint = " Call it, as ap.tracing.max_product()." if callable(semiring) else ""
        raise TypeError(f"semiring_grad takes a semiring (ap.tracing.Semiring), got {describe(semiring)}.{hint}")
    name, zero, one, kind = semiring.name, semiring.zero, semiring.one, semiring.kind
    dtypes = [np.uint32 if isinstance(x, int) else np.float32 for x in zero] if isinstance(zero, tuple) else []
    if np.float32 not in dtypes or not isinstance(one, tuple) or len(one) != len(zero):
        raise TypeError(
            f"the semiring {name!r} has zero={zero} and one={one}: each is a tuple with one number for each component, "
            "a float for an array of the variable's dtype and an int for one of uint32; at least one is a float"
        )

    def called(function, *values):
        made = getattr(semiring, function)(*values)
        got = [(jnp.shape(x), jnp.result_type(x)) for x in made] if isinstance(made, tuple) else describe(made)
        forms = [((1, 2), d) for d in dtypes]
        if function == "lift" and not isinstance(got, str):  # any number of components, of which some may be masks
            forms = [((1, 2), d if d.kind in "bui" else np.float32) for _, d in got]
        if got != forms:
            raise TypeError(
                f"the semiring {name!r} has a function {function} that returns {got}. It must return a tuple of "
                "arrays, one for each component, of the shape and the dtypes of what it is given."
            )
        return made

    def same(got, wanted, what):
        close = lambda pair: np.allclose(*pair, rtol=1e-4, equal_nan=True)
        if not all(meets(pair, close) for pair in zip(got, wanted, strict=True)):
            raise ValueError(f"the semiring {name!r} is not what it says: {what}. At one place {wanted} became {got}.")

    with jax.ensure_compile_time_eval():
        add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
        filled = lambda scalars: tuple(np.full((1, 2), x, d) for x, d in zip(scalars, dtypes, strict=True))
        p, q = (called("lift", np.array([[x, -2 * x]], np.float32)) for x in (0.5, 3.0))
        if [x.dtype for x in p] == dtypes:  # what is lifted may have other components than a message, as in top_k
            same(called("times", p, filled(one)), p, "one is the one of times, so that times(p, one) is p")
        a, b = (called("settle", called("times", x, filled(one))) for x in (p, q))
        total = called("plus", a, b)
        same(called("plus", a, filled(zero)), a, "zero is the value of no path, so that plus(a, zero) is a")
        if kind in ("add", "gradient"):
            same(total, add(a, b), f"kind={kind!r} says that plus adds each component")
            same(called("times", p, total), add(called("times", p, a), called("times", p, b)), _BILINEAR)
            same(called("times", add(p, q), a), add(called("times", p, a), called("times", q, a)), _BILINEAR)
        elif kind == "max":
            greatest = tuple(map(jnp.maximum, a, b)) if len(a) == 1 else ()
            same(total, greatest, "kind='max' is of one component, its maximum")
        elif kind is not None:
            raise ValueError(f"the kind of a semiring is 'add', 'max', 'gradient' or None, got {kind!r}")


_BILINEAR = "kind='add' or 'gradient' says that times is linear in each of its arguments"


def ordinary() -> Semiring:
    """Sums of products: the gradient.

    Example:
      >>> import apgrad as ap
      >>> float(ap.semiring_grad(lambda x: x**2, ap.tracing.ordinary())(3.0))
      6.0
    """
    return Semiring("ordinary", lambda w: (w,), _multiply, _add, (0.0,), (1.0,), kind="gradient")


def max_product() -> Semiring:
    """The weight of the heaviest path, the greatest product of |derivatives| (Viterbi).

    Example:
      >>> import apgrad as ap
      >>> float(ap.semiring_grad(lambda x: 3.0 * x - 2.0 * x, ap.tracing.max_product())(1.0))
      3.0
    """
    plus = lambda a, b: (greater(a[0], b[0]),)
    return Semiring("max-product", lambda w: (jnp.abs(w),), _multiply, plus, (0.0,), (1.0,), kind="max")


def absolute_sum() -> Semiring:
    """The sum over all paths of their weights, the products of |derivatives|.

    Example:
      >>> import apgrad as ap
      >>> float(ap.semiring_grad(lambda x: 3.0 * x - 2.0 * x, ap.tracing.absolute_sum())(1.0))
      5.0
    """
    return Semiring("absolute sum", lambda w: (jnp.abs(w),), _multiply, _add, (0.0,), (1.0,), kind="add")


def entropy() -> Semiring:
    """The entropy, in nats, of the path when each is drawn in proportion to its weight.

    The expectation semiring (Eisner, "Parameter estimation for probabilistic finite-state transducers", ACL 2002): of
    each path's weight p it sums p and r = p log p, by (p, r)(p', r') = (pp', pr' + rp'). With Z the sum of the p, the
    entropy is log Z - (sum of r) / Z. It is zero where there is one path, or none. The weights are numbers of the
    variable's dtype: beyond its range they are 0 or inf, and the entropy is 0 or NaN. Then use float64.

    Example:
      >>> import apgrad as ap
      >>> float(ap.semiring_grad(lambda x: 3.0 * x - 3.0 * x, ap.tracing.entropy())(1.0))  # log 2
      0.6931...
    """

    def finish(value):
        p, r = value
        some = p > 0
        safe = jnp.where(some, p, jnp.ones_like(p))
        return jnp.where(some | jnp.isnan(p), jnp.log(safe) - r / safe, jnp.zeros_like(p)) + 0 * p

    return Semiring(
        "entropy",
        lambda w: (jnp.abs(w), -jax.scipy.special.entr(jnp.abs(w))),
        lambda a, b: (a[0] * b[0], a[0] * b[1] + a[1] * b[0]),
        _add,
        (0.0, 0.0),
        (1.0, 0.0),
        finish,
        kind="add",
    )


def top_k(k: int) -> Semiring:
    """The weights of the k heaviest paths, in descending order on a last axis; zero where there are fewer.

    Args:
      k: at least 1.

    Example:
      >>> import apgrad as ap
      >>> ap.semiring_grad(lambda x: 3.0 * x - 2.0 * x, ap.tracing.top_k(2))(1.0)
      Array([3., 2.], dtype=float32)
    """
    k = whole("k of top_k", k)

    def plus(a, b):
        # Of two descending lists: the n-th of both is the greatest that is below n - 1 others, min(a_i, b_(n-i)).
        best = [greater(a[0], b[0])]
        for n in range(1, k):
            below = (jnp.minimum(a[i], b[n - 1 - i]) for i in range(n))
            best.append(functools.reduce(jnp.maximum, below, jnp.maximum(a[n], b[n])))
        return tuple(best)

    return Semiring(
        f"top {k}",
        lambda w: (jnp.abs(w),),
        lambda a, b: tuple(a[0] * x for x in b),
        plus,
        k * (0.0,),
        (1.0, *(k - 1) * (0.0,)),
        lambda value: jnp.stack(value, axis=-1),
    )


def greater(a: jax.Array, b: jax.Array) -> jax.Array:
    """The greater of two, the first of equals; NaN if one is NaN, which XLA's maximum on a CPU may pass over."""
    return jnp.where((b > a) | (b != b), b, a)


def _multiply(a, b):
    return (a[0] * b[0],)


def _add(a, b):
    return tuple(x + y for x, y in zip(a, b, strict=True))
