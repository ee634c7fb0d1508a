"""Influence: how much of each parameter is taught through each named component.

The influence of a component on a parameter is the share of the parameter's elements whose path runs through it (DuSell,
"Analyzing neural network optimization with gradient tracing", section 1.2.5, counts examples, by element). Messages
carry sets of components along, as bits, to which each equation adds its own; where they meet, the greatest one's stays.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import require_one_of, whole
from apgrad._ground.norms import real_dtype
from apgrad._programs import jaxprs
from apgrad.tracing._interpreter import Context
from apgrad.tracing._paths import SEMIRINGS
from apgrad.tracing._scopes import components_of, scopes, warn_of_residual_adds
from apgrad.tracing._semiring_grad import Loss, original, propagated, traced, values
from apgrad.tracing._semirings import ordinary

PathKind = Literal["greedy", "viterbi"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Influence:
    """Components by parameters: a pytree of two arrays, with the names of rows and columns as static data.

    Attributes:
      share: (..., components, parameters), floating point: of the parameter's elements that have a path, the share
        whose path runs through the component. NaN for a parameter without such elements, or with a path weight of NaN.
      gradient: the same share, with each element weighed by its |gradient|.
      kind: which paths: "viterbi" or "greedy".
    """

    share: jax.Array
    gradient: jax.Array
    components: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    parameters: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    kind: PathKind = dataclasses.field(metadata={"static": True})

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The shares by parameter and component, as means over leading axes that leave out NaN."""
        columns = mean(self.share).T.tolist()
        return {p: dict(zip(self.components, x, strict=True)) for p, x in zip(self.parameters, columns, strict=True)}

    def __str__(self) -> str:
        widths = lambda names: sum(1 + max(6, len(name)) for name in names)
        share, rows, columns, left = mean(self.share), self.components, self.parameters, 0
        if max(9, *map(len, rows)) + widths(columns) > 100:
            few = self
            while len(few.components) > 1 and max(map(len, columns)) + widths(few.components) > 100:
                few = few.top(len(few.components) - 1)
            left = len(rows) - len(few.components)
            share, rows, columns = mean(few.share).T, columns, few.components
        width, sizes = max([9, *map(len, rows)]), [max(6, len(c)) for c in columns]
        lines = [f"{self.kind:<{width}} " + " ".join(c.rjust(w) for c, w in zip(columns, sizes, strict=True))]
        for name, row in zip(rows, share, strict=True):
            cells = ("-" if np.isnan(v) else f"{v:.3f}" for v in row)
            lines.append(f"{name:<{width}} " + " ".join(c.rjust(w) for c, w in zip(cells, sizes, strict=True)))
        more = f"... and {left} components more: to_dict() has all, top(n) the n that say most"
        return "\n".join(lines + [more] * (left > 0))

    def top(self, count: int) -> "Influence":
        """At most so many components, in the order of the program: those with the greatest mean share of elements.

        If there are more, these are left out: components that all or none of each parameter's paths run through (such
        as a scope that holds a residual add), and a component with the same shares as an earlier one.

        Args:
          count: how many, at least 1.

        Example:
          >>> import jax, jax.numpy as jnp, apgrad as ap
          >>> loss = lambda w: jax.named_scope("sine")(jnp.sin)(w) + jax.named_scope("cosine")(jnp.cos)(w)
          >>> ap.tracing.influence(loss)(3.0).top(1).components
          ('sine',)
        """
        if len(self.components) <= whole("the count of top", count):
            return self
        share = np.nan_to_num(mean(self.share))
        rows = np.flatnonzero(np.any((share > 0) & (share < 1), axis=1))
        rows = rows if rows.size else np.arange(len(share))
        rows = rows[np.sort(np.unique(share[rows], axis=0, return_index=True)[1])]
        return self._kept(np.sort(rows[np.argsort(-share[rows].sum(axis=1), kind="stable")[:count]]))

    def _kept(self, rows: np.ndarray) -> "Influence":
        components = tuple(self.components[i] for i in rows)
        kept = lambda x: jax.device_put(np.asarray(x)[..., rows, :])  # on the host, where nothing is compiled
        return dataclasses.replace(self, share=kept(self.share), gradient=kept(self.gradient), components=components)


def mean(shares: Any) -> np.ndarray:
    """The mean over leading axes, which leaves out NaN; it is NaN where all shares are."""
    values = np.asarray(shares, float)
    return np.ma.masked_invalid(values.reshape(-1, *values.shape[-2:])).mean(axis=0).filled(np.nan)


def influence(
    f: Callable[..., Any], kind: PathKind = "viterbi", *, depth: int | None = None, argnums: int | Sequence[int] = 0
) -> Callable[..., Influence]:
    """A function of f's arguments that returns how much of each parameter is taught through each component.

    It works under `jit`, `vmap` (shares get leading axes), `scan` and `cond`. A scope that holds a residual add, and so
    has influence 1, is a `UserWarning`; a function without scopes is a ValueError.

    Args:
      f: the loss, as for `ap.semiring_grad`, with named scopes. Flax Linen names modules itself,
        `ap.tracing.name_modules` does it for Flax NNX; elsewhere use `jax.named_scope`.
      kind: which path an element has: "viterbi", the heaviest, or "greedy", DuSell's Algorithm 1.
      depth: how many names of a scope, counted from the outside, make a component; by default all levels do.
      argnums: which positional arguments are the parameters, as for `jax.grad`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> weak = jax.named_scope("weak")(lambda w: jnp.sum(0.1 * w))
      >>> strong = jax.named_scope("strong")(lambda w: jnp.sum(2.0 * w))
      >>> print(ap.tracing.influence(lambda w: weak(w) + strong(w))(jnp.ones(3)))
      viterbi        x
      weak       0.000
      strong     1.000
    """
    require_options(kind, depth)
    f = original(f)

    def influence_of(*args, **kwargs):
        loss = traced("ap.tracing.influence", f, args, kwargs, argnums)
        found = influence_in(loss, kind, depth)
        warn_of_residual_adds(loss, found.components)
        return found

    return influence_of


def require_options(kind: Any, depth: Any = None) -> None:
    require_one_of(SEMIRINGS, kind=kind)
    if depth is not None:
        whole("depth, a number of names counted from the outside,", depth)


def influence_in(loss: Loss, kind: PathKind, depth: int | None = None, own: bool = False) -> Influence:
    """Influence in a loss's program; with `own`, rows "scope/" too, of what is in a scope but in no scope inside it."""
    found = scopes(loss.program)
    around = {name.rpartition("/")[0] for scope in found for name in components_of(scope, depth)} if own else ()

    def rows_of(scope):
        names = components_of(scope, depth)
        return [*names, *(f"{name}/" for name in names[-1:] if name in around)]

    components = tuple(dict.fromkeys(name for scope in found for name in rows_of(scope)))
    if not components:
        raise ValueError(
            "nothing is named: the function has no named scopes. Linen modules name themselves, for an NNX model "
            "use ap.tracing.name_modules(model); elsewhere write `with jax.named_scope('encoder'):`."
        )
    words = -(-len(components) // 32)
    number = {name: i for i, name in enumerate(components)}

    def enter(message, scope):
        bits, rest = sum(1 << number[name] for name in rows_of(scope)), len(message) - words
        words_of_bits = (bits >> 32 * i & 0xFFFFFFFF for i in range(words))
        masks = (m | jnp.uint32(b) if b else m for m, b in zip(message[rest:], words_of_bits, strict=True))
        return (*message[:rest], *masks)

    semiring = SEMIRINGS[kind](words)
    messages = values(Context(semiring, enter=enter), loss)
    gradients = [v[0] for v in messages] if kind == "greedy" else propagated(ordinary(), loss)
    # Counts above 65,504, and sums, may exceed the range of float16.
    sizes = [jnp.abs(g).ravel().astype(real_dtype(gradients)) for g in gradients]
    columns = [_column(semiring, v, size, len(components), words) for v, size in zip(messages, sizes, strict=True)]
    share, weighed = (jnp.stack(c, axis=1) for c in zip(*columns, strict=True))
    return Influence(share, weighed, components, loss.names, kind)


def at_depth(found: Influence, program: jaxprs.Program, depth: int | None) -> Influence:
    """What `influence` gives with this depth, taken from the influence of all scopes with `own` rows."""
    components = tuple(dict.fromkeys(n for scope in scopes(program) for n in components_of(scope, depth)))
    row = {name: i for i, name in enumerate(found.components)}
    own = lambda name: f"{name}/" if depth is not None and name.count("/") + 1 < depth else name
    rows = np.array([row.get(own(name), row[name]) for name in components])
    return dataclasses.replace(found._kept(rows), components=components)


def every(n: int, traced: Callable[..., Any]) -> Callable[..., Any]:
    """Each n-th step of a jitted loop: `(step, *args) -> traced(*args)` where n divides step, NaN at no cost elsewhere.

    Args:
      n: how many steps there are from one traced step to the next, at least 1.
      traced: a function of arrays that returns floating-point arrays, such as `influence(loss)`.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> loss = lambda w: jnp.sum(jax.named_scope("cube")(lambda w: w**3)(w))
      >>> look = ap.tracing.every(2, ap.tracing.influence(loss))
      >>> train = lambda w, step: (w - 0.1 * jax.grad(loss)(w), look(step, w))
      >>> _, seen = jax.jit(lambda w: jax.lax.scan(train, w, jnp.arange(4)))(jnp.ones(2))
      >>> seen.share[:, 0, 0]
      Array([ 1., nan,  1., nan], dtype=float32)
    """
    n = whole("n of every", n)

    def at(step, *args):
        shape = jax.eval_shape(traced, *args)
        if wrong := [s.dtype for s in jax.tree.leaves(shape) if not jnp.issubdtype(s.dtype, jnp.inexact)]:
            raise TypeError(f"every returns NaN at the steps between: traced must return floats, got {wrong[0]}")
        nothing = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shape)
        return jax.lax.cond(step % n == 0, lambda args: traced(*args), lambda _: nothing, args)

    return at


def _column(semiring, value, size, components, words):
    strength = value[semiring.compared].ravel()
    masks = jnp.stack([m.ravel() for m in value[-words:]])
    alive, unknown = strength > float(semiring.zero[semiring.compared]), jnp.any(jnp.isnan(strength))
    place = jnp.arange(components)
    bits = (masks[place // 32] >> (place % 32).astype(jnp.uint32)[:, None]) & 1
    through = (bits == 1) & alive
    share = jnp.sum(through, axis=1, dtype=size.dtype) / jnp.sum(alive, dtype=size.dtype)
    weighed = jnp.sum(jnp.where(through, size, jnp.zeros_like(size)), axis=1) / jnp.sum(size)
    return jnp.where(unknown, jnp.nan, share), jnp.where(unknown, jnp.nan, weighed)
