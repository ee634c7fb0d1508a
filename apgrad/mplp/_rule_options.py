"""What a learned rule is made for: its sites and options, and the checks of both."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from apgrad._ground.arguments import closest, whole
from apgrad.mplp._protocol import Site

LARGEST = 2**24  # size of anything in a rule; above it, a size is a mistake
Known = tuple[tuple[str, tuple[str, tuple[str, ...], bool, bool]], ...]
"""Names and forms of the places that a rule was made for."""


def role(site: Site) -> str:
    """The role of a place: its name without digits."""
    return re.sub(r"\d+", "", site.name)


def first_sites(sites: Sequence[Site], key: Callable[[Site], str]) -> dict[str, Site]:
    """The first of the sites that share their networks, by what they share; refuses sites that ask other questions."""
    found: dict[str, Site] = {}
    for site in sites:
        first = found.setdefault(key(site), site)
        if any(getattr(first, name) != getattr(site, name) for name in ("family", "features", "begins", "shared")):
            raise ValueError(
                f"the places {first.name!r} ({first.kind}) and {site.name!r} ({site.kind}) would share networks, as "
                f"{key(site)!r}, but ask different questions. Numbers in names do not count: give one another name."
            )
    return found


class SavedRule(nnx.Module):
    """A rule that `save_trained` writes: it knows what it is made of and, once trained, how far it reaches."""

    places: Any

    def remember(self, sites: Sequence[Site], options: dict[str, Any]) -> None:
        """Keeps what a card needs to build the rule again: options, and sites without their sizes."""
        self.reach: Any = None
        self.told = True  # whether it knows the number of updates, if it asks for it
        self.known, self.options = known_forms(sites), tuple(options.items())
        self.sites = tuple(sorted({site._replace(batch=1, shape=(1,) * len(site.shape)) for site in sites}))

    def of(self, site: Site, key: str, *, by_name: bool = False) -> Any:
        """The local rule of a place, by the key under which it shares networks."""
        require_form(self.known, site, by_name=by_name)
        if key not in self.places:
            raise ValueError(
                f"the rule has the roles {sorted(self.places)}; the network asks for {site.name!r} ({key!r}). Numbers "
                'in names do not count: from_nnx(..., names="role") names the layers of an MLP so; write another '
                "network as a function of nodes named dense_in, activation_0, dense_1, ..., dense_out: see the wing's "
                'page, "A layer of your own".'
            )
        return self.places[key]


def shows_signature(cls: Any) -> Any:
    """Decorates an NNX module: `help` and editors show the arguments of its `__init__`, not `(*args, **kwargs)`."""
    signature = inspect.signature(cls.__init__)
    cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return cls


def of_each_use(sites: Sequence[Site]) -> list[Site]:
    """The sites for a rule that is asked at each use of a shared parameter, and not for the sum."""
    return [site._replace(shared=False) for site in sites if site.family != "shared"]


def known_forms(sites: Sequence[Site]) -> Known:
    return tuple(sorted({(site.name, site.form) for site in sites}))


def require_form(known: Known, site: Site, *, by_name: bool) -> None:
    """Refuses a place that a rule was not made for; `by_name`: the rule has parameters for each name."""
    fits = lambda form: (site.name, form) in known or (not by_name and any(form == other for _, other in known))
    if fits(site.form):
        return
    told = lambda name, kind, features, bias, shared: (
        f"{name!r} ({'shared ' * shared}{kind}, features {features}, bias {bias})"
    )
    close = closest(site.name, dict(known))
    places = ", ".join(told(name, *form) for name, form in known if name in close)
    if fits(site._replace(bias=not site.bias).form):
        hint = " without a bias: leave it out." if site.bias else " with a bias: give it one, of zeros at first."
        raise ValueError(f"the rule was not made for {told(site.name, *site.form)}, but for such a node" + hint)
    raise ValueError(
        f"the rule was not made for {told(site.name, *site.form)}; the nearest of its {len(known)} places are "
        f"{places}. Make the rule for this network's mplp.sites"
        + ("; one that shares everything across places of a kind fits other networks too." if by_name else ".")
    )


def require_one_of(choices: tuple[Any, ...], **options: Any) -> None:
    for name, value in options.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def require_sizes(least: int, **sizes: Any) -> None:
    for name, value in sizes.items():
        whole(name, value, least, LARGEST)
