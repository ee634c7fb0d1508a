"""What a learned rule is made for: its sites and options, and the checks of both."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from apgrad._ground.arguments import closest, whole
from apgrad._ground.messages import describe
from apgrad.mplp._protocol import Site

LARGEST = 2**24  # size of anything in a rule; above it, a size is a mistake


def role(site: Site) -> str:
    return re.sub(r"\d+", "", site.name)


def first_sites(sites: Sequence[Site], key: Callable[[Site], str]) -> dict[str, Site]:
    """For each key the first of the sites that share networks; refuses sites of a key that ask different questions."""
    found: dict[str, Site] = {}
    for site in sites:
        first = found.setdefault(key(site), site)
        if any(getattr(first, name) != getattr(site, name) for name in ("family", "features", "shared")):
            raise ValueError(
                f"the places {first.name!r} ({first.kind}) and {site.name!r} ({site.kind}) would share networks, as "
                f"{key(site)!r}, but ask different questions. Numbers in names do not count: give one another name."
            )
    return found


class MadeForSites(nnx.Module):
    """A rule for the sites of a network. It knows what it is made of and, once trained, how far it reaches."""

    message_size: int
    places: Any
    sums_uses = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # `help` and editors show the arguments of `__init__`, not the `(*args, **kwargs)` of NNX's metaclass.
        signature = inspect.signature(cls.__init__)
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def remember(self, sites: Sequence[Site], **options: Any) -> list[Site]:
        """Keeps what a card needs to build the rule again, and returns the sites at which the rule will be asked."""
        if not (isinstance(sites, list | tuple) and sites and all(isinstance(site, Site) for site in sites)):
            wanted = "a rule is made for the sites of a network, mplp.sites(network, params, batch)"
            raise TypeError(f"{wanted}, got {describe(sites)}")
        if not self.sums_uses:
            sites = [site._replace(shared=False) for site in sites if site.family != "shared"]
        self.reach: Any = None
        self.told = True  # whether it knows the number of updates, or needs none
        self.options = tuple(options.items())
        self.sites = tuple(sorted({site._replace(batch=1, shape=(1,) * len(site.shape)) for site in sites}))
        return list(sites)

    def require(self, site: Site, *, by_name: bool) -> None:
        key = lambda site: (site.form, by_name and site.name)
        fits = lambda site: key(site) in map(key, self.sites)
        if fits(site):
            return
        told = lambda s: f"{s.name!r} ({'shared ' * s.shared}{s.kind}, features {s.features}, bias {s.bias})"
        if fits(site._replace(bias=not site.bias)):
            hint = " without a bias: leave it out." if site.bias else " with a bias: give it one, of zeros at first."
            raise ValueError(f"the rule was not made for {told(site)}, but for such a node" + hint)
        losses = {known.kind for known in self.sites if known.begins}
        if site.begins and site.kind not in losses:
            raise ValueError(
                f"the rule was made for the loss {' or '.join(sorted(losses))}, got {told(site)}. Take a rule that was "
                "trained for this loss (mplp.pretrained_card), or make one for this network's mplp.sites."
            )
        close = closest(site.name, dict.fromkeys(known.name for known in self.sites))
        nearest = ", ".join(told(known) for known in self.sites if known.name in close)
        raise ValueError(
            f"the rule was not made for {told(site)}; the nearest of its {len(self.sites)} places are {nearest}. Make "
            f"one for this network's mplp.sites{', or one that shares across places of a kind' * by_name}."
        )

    def of(self, site: Site, key: str, *, by_name: bool = False) -> Any:
        self.require(site, by_name=by_name)
        if key not in self.places:
            raise ValueError(
                f"the rule has the roles {sorted(self.places)}; the network asks for {site.name!r} ({key!r}). Numbers "
                'do not count. from_nnx(..., names="role") names an MLP so; else see "A layer of your own" in the docs.'
            )
        return self.places[key]


def require_sizes(least: int, **sizes: Any) -> None:
    for name, value in sizes.items():
        whole(name, value, least, LARGEST)
