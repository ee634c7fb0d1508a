"""Samplers of images: positions are drawn, each with all its channels (Fig. 4 of the RAD paper)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from apgrad.memory._samplers import Sampler


@dataclasses.dataclass(frozen=True)
class OfPositions:
    """A sampler of an image's positions, each with all its channels, for images with any order of axes.

    Attributes:
      sampler: draws along the positions, row by row.
      order: the image's axes as (example, positions ..., channels).
    """

    sampler: Sampler
    order: tuple[int, ...]

    def keep(self, key: jax.Array, x: jax.Array, axis: int = -1) -> Any:
        """The sampler's memory of (examples, positions, channels)."""
        del axis
        return self.sampler.keep(key, self._rows(x), 1)

    def restore(self, key: jax.Array, memory: Any, like: jax.ShapeDtypeStruct, axis: int = -1) -> jax.Array:
        """The sampler's estimate, as an image."""
        del axis
        rows = jax.eval_shape(self._rows, like)
        return self._image(self.sampler.restore(key, memory, rows, 1), like)

    def variance(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """The sampler's variance, as an image."""
        del axis
        return self._image(self.sampler.variance(self._rows(x), 1), x)

    def _rows(self, x: jax.Array) -> jax.Array:
        ordered = jnp.transpose(x, self.order)
        return ordered.reshape(ordered.shape[0], -1, ordered.shape[-1])

    def _image(self, rows: jax.Array, like: Any) -> jax.Array:
        ordered = rows.reshape([like.shape[i] for i in self.order])
        return jnp.transpose(ordered, [self.order.index(i) for i in range(len(self.order))])
