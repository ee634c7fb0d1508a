"""A program over a mesh of devices (`jax.shard_map`) as a plain program: each axis of the mesh is an axis of arrays.

What a device computes of its blocks is what `jax.vmap` with a name for the axis computes of an array of all blocks, and
the collectives (`psum`, `ppermute`, `all_gather`) become sums, permutations and copies of that array. So code that
reads, transposes or rebuilds programs needs no rule for a mesh. Each device of the mesh holds one block of the array.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding


class Shards(NamedTuple):
    jaxpr: Any
    mesh: Any
    axes: tuple[str, ...]  # over which the program is mapped
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    check_vma: bool


def of_whole_arrays(shards: Shards, evaluate: Callable[[Sequence[Any]], Sequence[Any]]) -> Callable[..., list[Any]]:
    """The function of whole arrays; `evaluate(blocks)` is what one device does, where the mesh's axes have names."""
    mesh, axes = shards.mesh, shards.axes
    sizes = {name: mesh.shape[name] for name in axes}

    def laid(x, names):
        free = [jax.P.UNCONSTRAINED] * (x.ndim - len(names))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(*names, *free)))

    def split(x, spec):
        names = _names(spec, x.ndim)
        shape, place = [], {}
        for size, some in zip(x.shape, names, strict=True):
            place |= {name: len(shape) + i for i, name in enumerate(some)}
            shape += [*(sizes[name] for name in some), size // math.prod(sizes[name] for name in some)]
        used = [name for name in axes if name in place]
        return laid(jnp.moveaxis(x.reshape(shape), [place[name] for name in used], range(len(used))), used)

    def merged(x, spec):
        rank = x.ndim - len(axes)
        names = _names(spec, rank)
        used = [name for name in axes if any(name in some for some in names)]
        # Along an axis of the mesh that the output's spec does not name, all blocks are equal: the first is enough.
        x = laid(x[tuple(slice(None) if name in used else 0 for name in axes)], used)
        sizes_of = x.shape[len(used) :]
        shape = [size * math.prod(sizes[name] for name in some) for size, some in zip(sizes_of, names, strict=True)]
        order = [i for n, some in enumerate(names) for i in (*map(used.index, some), len(used) + n)]
        return jnp.transpose(x, order).reshape(shape)

    def call(*inputs):
        mapped: Callable[..., Any] = lambda *blocks: tuple(evaluate(blocks))
        for name in reversed(axes):
            over = tuple(0 if any(name in some for some in _names(spec, 0)) else None for spec in shards.in_specs)
            mapped = jax.vmap(mapped, over, axis_name=name, axis_size=sizes[name])
        blocks = map(split, inputs, shards.in_specs)
        return [merged(x, spec) for x, spec in zip(mapped(*blocks), shards.out_specs, strict=True)]

    return call


def _names(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """For each axis of an array the names of the axes of the mesh over which it is divided."""
    parts = [part if isinstance(part, tuple) else () if part is None else (part,) for part in spec]
    return parts + [()] * (rank - len(parts))
