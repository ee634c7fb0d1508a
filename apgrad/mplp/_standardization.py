"""Standardizers: what a learned network sees is shifted and scaled to numbers of about size one.

*Fitted* ones (MPLP, appendix A; published code) have one pair of numbers for each group of features v: `(v + shift) *
scale`, the scale 1 where std < 1e-5. As published this has a fault: biases are 0 at first and about 1e-3 while the
standardizer is fitted, so their scale comes out near 1000; `max_scale` bounds it. *Batch norm* (thesis, section 5.2.1)
standardizes at each call by this call's own statistics.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from apgrad.mplp._rule_parts import Fixed
from apgrad.mplp._step import init_state, inner_step, scan_steps


class Standardizer(nnx.Module):
    """A fitted shift and a fitted scale for each group of features; the identity at first."""

    def __init__(self, groups: int):
        self.shift = Fixed(jnp.zeros(groups, float))
        self.scale = Fixed(jnp.ones(groups, float))

    def pair(self) -> tuple[jax.Array, jax.Array]:
        """Shift and scale, which are not meta-trained."""
        return jax.lax.stop_gradient((self.shift[...], self.scale[...]))


def apply(parts: list[jax.Array], shift: jax.Array, scale: jax.Array) -> list[jax.Array]:
    return [(part + shift[i]) * scale[i] for i, part in enumerate(parts)]


def statistics(parts: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Shift and scale of each part, as published: two arrays (parts,)."""
    means = jnp.stack([jnp.mean(part) for part in parts])
    deviations = jnp.stack([jnp.std(part) for part in parts])
    return -means, jnp.where(deviations < 1e-5, 1.0, 1 / jnp.maximum(deviations, 1e-5))


class BatchNorm(nnx.Module):
    """`(v - mean) / sqrt(var + 1e-8) * gain + shift` over all rows of one call, for each feature; var has ddof 1.

    Where it is zero, the output is the shift and the derivative is finite: the square root never sees zero.
    """

    def __init__(self, features: int):
        self.gain = nnx.Param(jnp.ones(features, float))
        self.shift = nnx.Param(jnp.zeros(features, float))

    def __call__(self, *parts: jax.Array) -> list[jax.Array]:
        """Normalizes parts that broadcast against each other, without broadcasting them."""
        rows = math.prod(jnp.broadcast_shapes(*[part.shape[:-1] for part in parts]))
        out, start = [], 0
        for part in parts:
            stop, axes = start + part.shape[-1], tuple(range(part.ndim - 1))
            centred = part - jnp.mean(part, axis=axes)
            variance = jnp.mean(centred**2, axis=axes) * (rows / max(rows - 1, 1))
            gain = self.gain[start:stop] * jax.lax.rsqrt(variance + 1e-8)
            out.append(centred * gain + self.shift[start:stop])
            start = stop
        return out


def fit_standardizers(
    rule: Any, network: Any, params: Any, batches: Any, *, blend: float = 1.0, max_scale: float | None = 30.0
) -> Any:
    """Fits a rule's standardizers on the first steps of a task, each of which is standardized by its own statistics.

    Args:
      rule: a rule with standardizers (`PerSynapse`).
      network: the network that learns.
      params: pytree of floating-point arrays, the parameters at the start.
      batches: the minibatches, stacked: pytree of arrays (steps, batch, ...).
      blend: the weight of the new statistics, against those that the rule has. Published: 1 on one task of 5 steps
        (sinusoid); .5 in each of 5 rounds of 20 steps (MNIST).
      max_scale: the largest scale; None as published, with the published fault.
    """
    recording = rule.recording()
    state = init_state(recording, network, params, jax.tree.map(lambda x: x[0], batches))

    def step(carry, batch):
        params, state = carry
        params, state, _ = inner_step(recording, network, params, state, batch)
        seen = {
            name: {part: {k: s[k] for k in s if k != "carry"} for part, s in at.items()} for name, at in state.items()
        }
        return (params, state), seen

    _, seen = scan_steps(step, (params, state), batches)
    return rule.fitted(jax.tree.map(lambda x: jnp.mean(x, axis=0), seen), blend, max_scale)
