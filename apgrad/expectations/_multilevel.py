"""A gradient between a biased one with little noise and an unbiased one with much, mixed for the least error.

Let g_0, ..., g_L be gradients of the same samples, from much bias and little noise to no bias and perhaps very much
noise. As in multilevel Monte Carlo (Giles, 2008) the last one is a telescoping sum, whose terms have weights here:

    g = g_0 + sum_l w_l D_l,    D_l = g_l - g_{l-1}.

D_l is the bias b = E D_l that this level takes off, and noise. Of all multiples w D_l the one nearest to b, by E |w D_l
- b|^2, has w = |b|^2 / E |D_l|^2 (James and Stein's shrinkage). Two calls with independent keys have independent noise,
so that E[D(now) . D(before)] is |b|^2 with no noise to take off, if b changes little from call to call. Hence

    w_l = mean of D_l(k) . D_l(k-1) / mean of |D_l(k)|^2,     no less than 0 and no more than 1,

over earlier calls: the share of the difference that repeats. Where gradients explode nothing repeats, w is near 0, and
the gradient is the clipped one. The weight does not depend on the samples that it weighs. A difference longer than the
typical length, the geometric mean over earlier calls, is cut to it, so that one call does not decide the weight of all
others; this is a bias, too. A difference that is not finite is left out, and counts as one that does not repeat.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apgrad._ground.arguments import meets, noted, number
from apgrad._ground.messages import tuple_of
from apgrad._ground.norms import real_dtype, scaled_norm
from apgrad.expectations._adaptive import Adaptive, require_state
from apgrad.expectations._lanes import over


class MultilevelState(NamedTuple):
    """What earlier calls of `multilevel` left: a pytree to be carried through training. D are the L differences.

    Attributes:
      difference: D of the last call in units of its typical length, a pytree like the gradient with a first axis (L,),
        all in one precision: the gradient's widest, and float32 at least.
      square: the mean of |D|^2 over earlier calls in these units, (L,), float32 or wider.
      product: likewise the mean of the inner product of D with the D of the call before, (L,).
      log_length: the mean of log |D|, (L,); infinite where there was no difference yet.
    """

    difference: Any
    square: jax.Array
    product: jax.Array
    log_length: jax.Array

    @property
    def weights(self) -> jax.Array:
        """The weight of each difference in the next call, (L,)."""
        return jnp.clip(self.product / jnp.where(self.square > 0, self.square, 1), 0, 1)


def multilevel(
    value_and_grad: Callable[..., tuple[Any, Any]],
    levels: Sequence[float] = (1.0, 4.0, 16.0, math.inf),
    *,
    window: float = 20.0,
) -> Adaptive:
    """Gradients for training, less biased than clipped ones: differences of levels, weighed by what repeats.

    A call takes one forward pass, and a reverse pass for each level. If the first level's gradient explodes, as it does
    where all lanes explode alike, the sum is worse than that level: take `likelihood_ratio` or `total_propagation`.

    Args:
      value_and_grad: `(key, *args, level) -> (value, gradient)`, as `ap.value_and_grad` of a program whose last
        argument is the factor of `ap.clip_lanes`, or with any knob for the gradient's bias that leaves the value alone.
      levels: at least two settings of the knob, from much bias and little noise to no bias; the order is not checked.
      window: over how many earlier calls, about, the weights are averaged.

    Raises:
      ValueError: for fewer than two levels, levels that are no numbers, or a window that is not finite or less than 1.
      TypeError: at trace time, for a state that is not from `init`, or a `value_and_grad` that returns no such pair.

    Example:
      >>> import jax, apgrad as ap, numpyro.distributions as dist
      >>> step = ap.stochastic(ap.reparameterization())(lambda theta: dist.Normal(theta, 0.1))
      >>> def program(tape, theta, factor):
      ...     tape, x = ap.clip_lanes(*step(tape, theta), factor)
      ...     return tape.cost(x**2)
      >>> training = ap.multilevel(ap.value_and_grad(program, lanes=100))
      >>> state = jax.jit(training.init)(jax.random.key(0), 2.0)
      >>> value, gradient, state = jax.jit(training.value_and_grad)(jax.random.key(1), state, 2.0)
      >>> gradient.shape, state.weights.shape
      ((), (3,))
    """
    number("the window of multilevel", window, positive=True)
    several = hasattr(levels, "__len__") and len(levels) >= 2
    if not (several and window >= 1 and meets(levels, lambda x: ~np.isnan(x))):
        raise ValueError(f"multilevel needs two levels, which are numbers, and window >= 1, got {levels}, {window=}")
    keep = 1 - 1 / window

    def differences(key, args):
        def each(level):
            with noted("multilevel calls value_and_grad(key, *args, level): the program's last argument is the level."):
                found = value_and_grad(key, *args, level)
            return tuple_of(2, "value_and_grad of multilevel must return (value, gradient)", found)

        values, gradients = jax.vmap(each)(jnp.asarray(levels, jnp.float32))
        value, first = jax.tree.map(lambda x: x[0], (values, gradients))
        found = jax.tree.map(lambda x: x[1:] - x[:-1], _wide(gradients))
        size, norm = jax.vmap(scaled_norm)(found)
        usable = jnp.isfinite(norm) & (norm > 0)
        scale = jnp.where(usable, size, 1)
        unit = lambda x: jnp.where(over(usable, x.ndim), x / over(scale, x.ndim), 0)
        scaled = jax.tree.map(unit, found)
        length = jnp.where(usable, jnp.log(scale) + jnp.log(jnp.where(usable, norm, 1)), -jnp.inf)
        return value, first, scaled, length, ~jnp.isfinite(norm), jnp.log(scale)

    def advance(state, scaled, length, lost, log_scale):
        """The differences, none longer than the typical one, and the next state."""
        known, begun = jnp.isfinite(length), jnp.isfinite(state.log_length)
        unit = jnp.where(begun, state.log_length, jnp.where(known, length, 0))
        by = lambda tree, log: jax.tree.map(lambda x: x * over(jnp.exp(log), x.ndim), tree)
        cut = by(scaled, log_scale - jnp.maximum(unit, length))  # in units of the typical length
        blend = lambda old, new: keep * old + (1 - keep) * new
        square = blend(state.square, jnp.where(lost, 1, _dot(cut, cut)))
        product = blend(state.product, _dot(cut, state.difference))
        # No less than e^-20 times the root of the mean square, so that nothing overflows in its unit.
        typical = jnp.maximum(blend(unit, length), unit - 20 + jnp.log(jnp.maximum(square, 1)) / 2)
        after = jnp.where(begun & known, typical, jnp.where(known, length, state.log_length))
        shift = jnp.where(jnp.isfinite(after), unit - after, 0)
        square, product = square * jnp.exp(2 * shift), product * jnp.exp(2 * shift)
        return by(cut, unit), MultilevelState(by(cut, shift), square, product, after)

    def init(key, *args):
        _, _, scaled, *rest = differences(key, args)
        zeros = jnp.zeros(len(levels) - 1, real_dtype(scaled))
        empty = MultilevelState(jax.tree.map(jnp.zeros_like, scaled), zeros, zeros, zeros + jnp.inf)
        return advance(empty, scaled, *rest)[1]

    def step(key, state, *args):
        if not isinstance(state, MultilevelState):
            raise TypeError(f"value_and_grad takes (key, state, *args), and the state is from init; got {type(state)}")
        value, first, *rest = differences(key, args)
        require_state(rest[0], state.difference)
        cut, after = advance(state, *rest)
        weights = lambda d: state.weights.astype(d.dtype)
        weighed = lambda g, d: g.astype(d.dtype) + jnp.tensordot(weights(d), d, 1, precision="highest")
        return value, jax.tree.map(lambda g, d: weighed(g, d).astype(g.dtype), first, cut), after

    return Adaptive(init, step)


def _wide(tree):
    """All arrays in one precision, the widest of theirs and float32, since one length scales all of them."""
    real = real_dtype(tree)
    return jax.tree.map(lambda x: x.astype(np.promote_types(x.dtype, real)), tree)


def _dot(a, b):
    dot = functools.partial(jnp.vdot, precision="highest")
    each = lambda x, y: jax.vmap(dot)(x, y).real
    return sum(jax.tree.leaves(jax.tree.map(each, a, b)), jnp.zeros((), real_dtype(a)))
