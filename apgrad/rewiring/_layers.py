"""What rules share: the linear parts of a layer, and the choice of sites.

A layer y = f(x, w), dense or a convolution, is linear in x and in w: messages go back by two transposes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apgrad._ground.keys import normal, require_key
from apgrad._ground.propagator import Propagator, backpropagation, chain
from apgrad._programs.jaxprs import require_unchecked, require_undivided
from apgrad.rewiring._sites import ProgramSite

Where = Callable[[ProgramSite], bool] | str | tuple[str, ...] | None
"""Which sites a rule takes: a name, a tuple of names, a function `ProgramSite -> bool`, or None for the rule's default.
The page of the wing says what a name may be ("Which sites a rule takes")."""


@jax.numpy_rank_promotion("allow")
def affine(x: jax.Array, params: Sequence[jax.Array]) -> jax.Array:
    return x @ params[0] + params[1]


class Chosen(NamedTuple):
    """The `where` of a rule, a function or names; if the user has `given` names, one that takes no site is an error.

    A rule of `inputs` changes the message to a layer's input. For it the name of a scope, call or module stands for the
    layers inside, and a function is asked about layers only.
    """

    function: Callable[[ProgramSite], bool] | None
    names: tuple[str, ...]
    given: bool
    inputs: bool

    def __call__(self, site: ProgramSite) -> bool:
        if self.function is not None:
            return (is_layer(site) or not self.inputs) and self.function(site)
        return any(self.fits(site, name) for name in self.names)

    def fits(self, site: ProgramSite, name: str) -> bool:
        if not self.inputs:
            return site.label == name
        if site.kind in ("function", "scope", "call"):
            return False
        path = site.name.rpartition("[")[0]
        return site.label == name or (is_layer(site) and f"/{name}/" in f"/{path}/")

    def unknown(self, sites: Sequence[ProgramSite]) -> list[str]:
        return [n for n in self.names if self.given and not any(self.fits(site, n) for site in sites)]

    def idle(self, taken: Sequence[ProgramSite], offered: Sequence[ProgramSite]) -> bool:
        """Whether the data are the input of all taken layers, so that the rule changes nothing that a parameter learns.

        If the user named no layer, the function may have only one, which is no mistake. Then it is true only if there
        are other products whose messages teach something, none of which is a layer.
        """
        products = {site.kind for site in offered if site.teaches} & {"dense", "conv", "matmul"}
        wrong = self.inputs and (self.given or products == {"matmul"})
        return wrong and bool(taken) and all(is_layer(site) and not site.teaches for site in taken)


def is_layer(site: ProgramSite) -> bool:
    return site.kind in ("dense", "conv")


def _require_layer(site: ProgramSite) -> None:
    if not is_layer(site):
        raise ValueError(
            f"the rule is for layers, products of an input and a weight made of parameters alone; got {site}. Choose "
            "the sites by where=, and the arguments that are parameters by argnums."
        )


def require_one_layer(site: ProgramSite) -> None:
    _require_layer(site)
    if site.stacked:
        raise ValueError(
            f"{site} is another layer at each step of a scan, and the rule has parameters of its own for each layer, "
            "but only one set for a site. Call the layers in a Python loop, or leave the site out (where=)."
        )


def require_one_array(site: ProgramSite, rule: str) -> None:
    if len(site.inputs) != 1 or getattr(site.output, "shape", None) != site.inputs[0].shape:
        raise ValueError(
            f"{rule} is for a function of one array to one of its shape, and arrays that it closes over count; got "
            f"{site}. For such a function write a propagator (ap.node), or a rule of your own (ap.rewiring.Rule)."
        )


def chosen(where: Where, default: Where = None, *, inputs: bool = False) -> Chosen:
    taken = default if where is None else where
    names = (taken,) if isinstance(taken, str) else taken
    if isinstance(names, tuple) and names and all(isinstance(name, str) for name in names):
        return Chosen(None, names, where is not None, inputs)
    if not callable(taken):
        raise TypeError(f"where is a name, a tuple of names or a function of a site, got {where!r}")
    return Chosen(taken, (), where is not None, inputs)


def chosen_layers(where: Where) -> Chosen:
    return chosen(where, is_layer, inputs=True)


def to_input(site: ProgramSite, w: jax.Array, message: jax.Array) -> jax.Array:
    return jax.linear_transpose(lambda x: site.function(x, w), site.inputs[0])(message)[0]


def layer(site: ProgramSite, answer: Callable[..., tuple[Any, ...]]) -> Propagator:
    """A propagator at a layer, which sends `answer(x, w, message, the usual update of w)`."""
    _require_layer(site)

    def backward(remembered, message, *result):
        require_unchecked("a function is rewired by a rule of layers", message)
        require_undivided("ap.rewire by a rule of layers", (remembered, message))
        x, w = remembered
        (update,) = jax.linear_transpose(lambda w: site.function(x, w), site.inputs[1])(message)
        return answer(x, w, message, update, *result)

    return Propagator(lambda x, w: (site.function(x, w), (x, w)), backward)


def on_message(site: ProgramSite, transform: Callable[[jax.Array], jax.Array]) -> Propagator:
    change = lambda message: message if message.dtype == jax.dtypes.float0 else transform(message)
    changed = Propagator(lambda y: (y, None), lambda _, message: (jax.tree.map(change, message),))
    return chain(backpropagation(site.function), changed)


def random_feedback(rule: str, key: Any) -> Callable[[ProgramSite], jax.Array]:
    key = require_key(f"the key of {rule}", key)

    def init(site):
        require_one_layer(site)
        if not site.output.size:
            raise ValueError(f"the output of {site} has no entries: give init more data, or a where= without it")
        # The entries are small: in float16 a sum of so many ones may exceed the largest number, 65504.
        x, w = (jnp.full(s.shape, 1 / 64, s.dtype) for s in site.inputs)
        deviation = jnp.max(jnp.abs(site.function(x, w))) ** -0.5 / 64
        return deviation.astype(w.dtype) * normal(jax.random.fold_in(key, site.number), w.shape, w.dtype)

    return init
