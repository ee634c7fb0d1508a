"""Names for the modules of an NNX model, by subclasses: `nnx.split` and `nnx.merge` keep each module's class."""

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import jax

if TYPE_CHECKING:
    from flax import nnx

Model = TypeVar("Model", bound="nnx.Module")


def name_modules(model: Model) -> Model:
    """A copy of a Flax NNX model that computes the same, each module in a `jax.named_scope` of its attribute's name.

    A module in a list or dictionary has its place in the name: `blocks_0`. The model itself has no scope; a module used
    in several places has the name of the first.

    Args:
      model: an NNX module. Its modules stay instances of their classes; calls other than `module(...)` have no scope.

    Example:
      >>> import jax.numpy as jnp, flax.nnx as nnx, apgrad as ap
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
      >>> graph, params = nnx.split(ap.tracing.name_modules(model))
      >>> ap.tracing.influence(lambda params: nnx.merge(graph, params)(jnp.ones(2))[0])(params).components
      ('layers_0', 'layers_1')
    """
    from flax import nnx  # here, since it takes a second, which is lost if other functions are traced

    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"name_modules takes a Flax NNX module, got {type(model).__name__}. Linen names its modules itself; "
            "elsewhere write `with jax.named_scope('encoder'):`."
        )
    model = nnx.clone(model)
    modules = {path: module for path, module in nnx.iter_modules(model) if callable(module)}
    paths = {(), *modules}
    for path, module in modules.items():
        if not path:
            continue
        parent = next(n for n in range(len(path) - 1, -1, -1) if path[:n] in paths)
        object.__setattr__(module, "__class__", _scoped(type(module), "_".join(map(str, path[parent:]))))
    return model


@functools.cache
def _scoped(base: Any, name: str) -> Any:
    """The subclass whose calls are in a scope; cached, since a GraphDef compares classes by identity."""

    def call(self, *args, **kwargs):
        with jax.named_scope(name):
            return base.__call__(self, *args, **kwargs)

    names = {"__call__": functools.wraps(base.__call__)(call), "__module__": base.__module__}
    return type(base)(base.__name__, (base,), names | {"__qualname__": base.__qualname__})
