"""Messages clipped lane by lane: a bound on what one lane can do to a gradient.

A node on the state bounds the length of each lane's message m by a multiple of the typical length:

    m' = m min(1, T / |m|),     T = factor exp(mean of log |m_j| over lanes j),

with the mean over living lanes whose message is finite and not zero. One exploded lane hardly moves a geometric mean. T
scales with the messages: units and horizon do not matter, and where all explode alike none is cut.

*Bias.* The expected message is off by E[(1 - T / |m|)_+ m], which is no longer than E[(|m| - T)_+], and no objective
has this gradient. The bias does not fall with more lanes. It is largest where few lanes rightly have long messages.

*What grows.* A lane whose cost is far from the others' has a long message from the beginning. In the few lanes where a
settled policy still fails, T cuts what would teach it. With `growth_only` the limit is max(T, |m_last|), with m_last
the lane's message at the program's last call, made of later costs alone: what grew on the way back from there is cut.

*What overflows.* An infinite message is cut to the limit, in the direction of its infinite components. NaN passes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from apgrad._ground.arguments import meets
from apgrad._ground.norms import largest, real_dtype
from apgrad._ground.propagator import Propagator, Static, first_order, node
from apgrad._programs.jaxprs import is_inexact, require_undivided
from apgrad.expectations import _channels as channels
from apgrad.expectations._lanes import over, require_lanes, require_mask
from apgrad.expectations._ports import Port
from apgrad.expectations._tape import Tape, require_tape


def clip_lanes(
    tape: Tape,
    x: Any,
    factor: Any = 4.0,
    *,
    parts: bool | None = None,
    mask: jax.Array | None = None,
    counts: jax.Array | None = None,
    growth_only: bool = False,
) -> tuple[Tape, Any]:
    """The same state; on the way back a lane's message is cut where it is much longer than the typical lane's.

    For gradients through many steps of a chaotic program, where few lanes explode and drown the others. Call it on the
    state once a step. The gradient is then **biased**, by what was cut; see `ap.multilevel`.

    Args:
      tape: the current tape.
      x: the lanes' state, a pytree with the lanes as leading axis. All of it is one message, whose length is taken; for
        a limit for each array call the function for each. Arrays that are not floating point pass.
      factor: how many times the typical length a message may have: a positive number, also infinity, or a scalar array
        (if it is traced and not positive, messages are NaN). Below 1, most messages are cut at every call, and decay.
      parts: the second axis numbers parts, as in `stochastic`; each is cut by itself, by the typical length of all.
      mask: Booleans (lanes,), or (lanes, parts) with `parts`; False takes a finished episode out of the typical length.
      counts: `jnp.zeros(2)`, an argument of the program: its derivative counts messages cut, and messages not finite.
      growth_only: cut no message below its length at the program's last call, to which it comes back first. This is for
        a call at every step. A message that is infinite at the last call is cut all the same. Calls on states of equal
        shapes are taken for calls on one state.

    Raises:
      TypeError, ValueError: at trace time, for arrays without the lanes, fewer than 2 lanes, or a factor not above 0.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> def program(tape, theta, counts):
      ...     tape, x = ap.clip_lanes(tape, theta * jnp.ones(tape.lanes), 2.0, counts=counts)
      ...     return tape.cost(jnp.array([1.0, 1.0, 1.0, 1e30]) * x)
      >>> [int(n) for n in jax.jit(ap.grad(program, lanes=4, argnums=(1, 2)))(jax.random.key(0), 1.0, jnp.zeros(2))[1]]
      [1, 0]
    """
    what = "clip_lanes"
    require_tape(what, tape)
    tape._require_current(what)
    require_lanes(what, tape.lanes, x)
    if tape.lanes < 2 * tape._plan.folds:
        instead = "Use more lanes, or clip the gradient by its norm, as optax.clip_by_global_norm does."
        raise ValueError(f"{what} compares lanes, and needs at least 2, got lanes={tape.lanes}. {instead}")
    if jnp.shape(factor) != () or not meets(factor, lambda f: f > 0):
        raise ValueError(f"{what}: factor is a positive number, for all lanes the same, got {factor}")
    if counts is not None and (jnp.shape(counts) != (2,) or not is_inexact(counts)):
        raise ValueError(f"{what}: counts is a port of two floating-point numbers, jnp.zeros(2), got {counts}")
    floats = [leaf for leaf in jax.tree.leaves(x) if is_inexact(leaf)]
    by_part = [channels.declare_parts(tape, leaf.shape, what, parts, True) for leaf in floats]
    shape = floats[0].shape[: 1 + by_part[0]] if floats else (tape.lanes,)
    if any(leaf.shape[: len(shape)] != shape for leaf in floats):
        raise ValueError(f"{what}: with parts=True all arrays start with the same axes, {shape}")
    living = jnp.ones(shape, bool) if mask is None else jnp.broadcast_to(require_mask(what, mask, shape), shape)
    factor = lax.stop_gradient(jnp.asarray(factor, real_dtype(floats)))
    log_factor = jnp.where(factor > 0, jnp.log(factor), jnp.nan)
    counts = jnp.zeros(2) if counts is None else counts
    if not floats:
        return tape._follow(), x
    port = Port(f"clip_lanes {[leaf.shape for leaf in floats]}", shape, dtype=factor.dtype)
    if growth_only:
        require_undivided("clip_lanes(growth_only=True)", x, 1)
    last = channels.request(tape, port, what) if growth_only else None
    x, last = _clip(x, last, counts, living, log_factor, Static(tape._plan.folds))
    return channels.put(tape, port, last, what), x


@jax.numpy_dtype_promotion("standard")  # of complex messages and real lengths
def _backward(memory, messages):
    (living, log_factor, folds), (message, last) = memory, messages
    shape, leaves = living.shape, [m for m in jax.tree.leaves(message) if is_inexact(m)]
    sizes = [jnp.abs(m).astype(log_factor.dtype).reshape(*shape, -1) for m in leaves]
    size = largest([jnp.max(x, -1, initial=0) for x in sizes])
    infinite, usable = jnp.isinf(size), jnp.isfinite(size) & (size > 0)
    scale = jnp.where(usable, size, 1)

    def direction(m):
        m = m.astype(np.promote_types(m.dtype, log_factor.dtype))
        infinities = lambda x: jnp.where(jnp.isinf(x), jnp.sign(x), 0)
        ends = lax.complex(infinities(m.real), infinities(m.imag)) if jnp.iscomplexobj(m) else infinities(m)
        return jnp.where(over(infinite, m.ndim), ends, m / over(scale, m.ndim))

    squares = sum(jnp.sum(jnp.square(jnp.abs(direction(m))).reshape(*shape, -1), -1) for m in leaves)
    half = jnp.log(jnp.where(usable | infinite, squares, 1)) / 2
    length = jnp.log(scale) + half  # its logarithm
    counted = (usable & living).reshape(folds.value, -1)
    mean = jnp.mean(length.reshape(counted.shape), 1, where=counted)
    limit = jnp.where(counted.any(1), log_factor + mean, jnp.inf)
    limit = jnp.broadcast_to(limit[:, None], counted.shape).reshape(shape)
    if last is not None:
        first = last == 0
        known = jnp.where(first, jnp.where(usable, length, -jnp.inf), jnp.log(jnp.where(first, 1, last)))
        limit = jnp.maximum(limit, known)
    cut = (usable & ~(length <= limit)) | (infinite & (limit != jnp.inf))  # a limit of NaN (factor <= 0) cuts
    if last is not None:
        most = math.log(jnp.finfo(last.dtype).max) - 9  # so that a sum over the branches of `parallel` is finite
        sent = jnp.exp(jnp.minimum(jnp.where(cut, limit, length), most))
        last = jnp.where(first & (usable | cut), sent, last)

    def answer(m):
        if not is_inexact(m):
            return None
        return jnp.where(over(cut, m.ndim), (direction(m) * over(jnp.exp(limit - half), m.ndim)).astype(m.dtype), m)

    counts = jnp.stack([cut.sum(), (~jnp.isfinite(size)).sum()])
    return jax.tree.map(answer, message), last, counts, None, None, None


_ONCE = "clip_lanes has no second derivative, since a cut message is no derivative: use it for first derivatives alone"
_clip = node(first_order(Propagator(lambda x, last, counts, *rest: ((x, last), rest), _backward), _ONCE))
