"""What the supports of NumPyro's distributions are, and what they depend on.

NumPyro's distributions wrap, transform and mix others. The support of a transformed distribution is the image of its
base's; where the image is not known, it counts as depending on all that the transforms hold.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.core import Tracer
from numpyro.distributions import constraints, transforms

_INVERSE = type(transforms.ExpTransform().inv)
WRAPPERS = (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)


def of_numpyro(kind: type) -> bool:
    return kind.__module__.startswith("numpyro.")


def components_of(part) -> list[Any]:
    one, more = (getattr(part, f"component_distribution{s}", None) for s in ("", "s"))
    return list(more) if isinstance(more, list | tuple) else [] if one is None else [one]


def parts_of(distribution) -> list[Any]:
    """The distribution, and all distributions whose samples it transforms or chooses from."""
    inner = [getattr(distribution, name, None) for name in ("base_dist", "marginal_dist")]
    found = [distribution]
    for part in [part for part in inner if part is not None] + components_of(distribution):
        found += parts_of(part)
    return found


def all_parts_of(distribution) -> list[Any]:
    """All distributions that its density may be made of: its parts, and what its pytree holds under any name."""
    other = lambda x: x is not distribution and callable(getattr(x, "log_prob", None))
    inside = parts_of(distribution)[1:] + [x for x in jax.tree.leaves(distribution, is_leaf=other) if other(x)]
    found = [distribution] + [part for x in inside for part in all_parts_of(x)]
    return list({id(part): part for part in found}.values())


def transforms_of(part) -> list[Any]:
    """The transforms of a distribution, one after the other, none of them composed."""

    def flatten(transform):
        if isinstance(transform, transforms.ComposeTransform):
            return [t for part in transform.parts for t in flatten(part)]
        if isinstance(transform, transforms.IndependentTransform):
            return flatten(transform.base_transform)
        if isinstance(transform, _INVERSE):
            parts = flatten(transform.inv)
            return [transform] if len(parts) == 1 else [t.inv for t in reversed(parts)]
        return [transform]

    return [t for transform in getattr(part, "transforms", ()) for t in flatten(transform)]


def folds(part) -> bool:
    return any(isinstance(transform, transforms.AbsTransform) for transform in transforms_of(part))


def declared(thing: Any, name: str) -> Any:
    """The constraint of this name, or None."""
    try:
        return getattr(thing, name, None)
    except (NotImplementedError, AssertionError):  # NumPyro asserts that what it wraps has a support
        return None


def constraint_of(thing, name):
    """The constraint of this name, without the number of its event's axes; None if there is none."""
    constraint = declared(thing, name)
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    half_lines = (constraints.nonnegative, constraints.softplus_positive)
    return constraints.positive if any(constraint is c for c in half_lines) else constraint


def is_discrete(part, key) -> bool:
    known, codomains = [], [constraint_of(transform, "codomain") for transform in transforms_of(part)]
    for constraint in [constraint_of(part, "support"), *codomains]:
        with contextlib.suppress(AttributeError, NotImplementedError):
            known.append(bool(constraint.is_discrete))  # pyright: ignore[reportOptionalMemberAccess]
    if known:
        return any(known)
    try:
        sample = jax.eval_shape(part.sample, key)
        return isinstance(sample, jax.ShapeDtypeStruct) and not jnp.issubdtype(sample.dtype, jnp.floating)
    except NotImplementedError:
        return False


def _is_fixed(support) -> bool:
    return isinstance(support, constraints.ParameterFreeConstraint)


def have_one_support(components) -> bool:
    """Whether the supports of a mixture's components are known to be the same set; True without components."""
    supports = [support_of(component) for component in components]
    return all(map(_is_fixed, supports)) and len({type(support) for support in supports}) <= 1


def _tells_its_support(distribution) -> bool:
    # A subclass with a support of its own knows it; the general class has its last transform's codomain for it.
    return getattr(type(distribution), "support", None) is not dist.TransformedDistribution.support


def support_of(distribution):
    """The set that samples lie in, if that is known. Transforms themselves tell it only for the domain they declare."""
    if isinstance(distribution, WRAPPERS):
        return support_of(distribution.base_dist)
    if components := components_of(distribution):
        return support_of(components[0]) if have_one_support(components) else None
    if isinstance(distribution, dist.FoldedDistribution):
        return constraints.positive if support_of(distribution.base_dist) is constraints.real else None
    return constraint_of(distribution, "support") if _tells_its_support(distribution) else _transformed(distribution)[0]


def _transformed(distribution):
    """The support of a transformed distribution, and what it depends on besides the support of the base."""
    support, bounds = support_of(distribution.base_dist), []
    for transform in transforms_of(distribution):
        affine = isinstance(transform, transforms.AffineTransform)
        if affine and support is constraints.real:
            continue
        if affine and support is constraints.positive:
            # A half-line from 0 keeps its bound under scaling.
            bounds.append(transform.loc)
            support = support if _is_zero(transform.loc) else None
        elif _is_fixed(support) and type(support) is type(constraint_of(transform, "domain")):
            support = constraint_of(transform, "codomain")
            bounds.append(transform if support is None else support)
        else:
            # The image of a set that is not all of the transform's domain moves with the transform.
            bounds.append(transform)
            support = None
    return support, bounds


def _is_zero(x) -> bool:
    return not isinstance(x, Tracer) and bool(np.all(np.asarray(x) == 0))


def bounds_of(distribution):
    """What the support of a distribution depends on, without what its parts' supports depend on."""
    if isinstance(distribution, dist.Delta):
        return [distribution.v, distribution.log_density]
    if isinstance(distribution, WRAPPERS):
        return []
    if _tells_its_support(distribution):
        return [constraint_of(distribution, "support")]
    return _transformed(distribution)[1]
