"""Places: where a network's nodes meet the rule, their states and their ports.

A network is a Python function `(places, params, batch) -> loss`. It calls nodes, and gives each a name:
`mplp.dense(places["hidden"], signal, params["w"])`. Under that name the node finds what the rule does there and its
state. An answer leaves the backward pass through ports only:

* the message through the signal's port, the update through the parameter's;
* the new state through a port of the state's form, and a 1 through a scalar port `uses`.

Uses are counted because reverse mode adds things up: a place used n times (in a `scan` over time, say) would come
back as the sum of n states, and one in a branch not taken as zeros. With the count it is the mean of what the uses made
of it, or the state as it was. For the same reason a node at which no message arrives (all zeros: a branch not taken,
an output that nothing depends on) does nothing: no message, no update, the same state.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apgrad._ground.port import Signal, port
from apgrad.mplp._protocol import Answer, Learner, Rule, Site


class Parameter(NamedTuple):
    """A parameter with the port by which its update leaves.

    What is done with it besides handing it to a node must be linear and done to both: `jax.tree.map(jnp.transpose, w)`.

    Attributes:
      value: an array. Its cotangent is the true gradient.
      port: zeros of the same shape. Its cotangent is the update.
    """

    value: jax.Array
    port: jax.Array


class Use(NamedTuple):
    """What a node needs from its place: all arrays that go into its `custom_vjp`."""

    learner: Learner
    state: Any
    state_port: Any
    uses_port: jax.Array


class Place(NamedTuple):
    """A name in `Places`; the first argument of every node with a rule."""

    places: "Places"
    name: str


class Places:
    """The places of a network, for one backward pass.

    Args:
      rule: what is done there.
      state: by name; None to find the names out, as `sites` and `init_state` do.
      state_port: of the same form.
      uses_port: scalars by name.
      ended: whether losses are constants, for finding out what else a network's loss depends on.

    Attributes:
      sites: what the network asked for so far, by name.
      batch: the network's batch size, the first axis of its first input; None before that.
    """

    def __init__(
        self, rule: Rule, state: Any = None, state_port: Any = None, uses_port: Any = None, *, ended: bool = False
    ):
        self.rule, self.state, self.state_port, self.uses_port = rule, state, state_port, uses_port
        self.ended = ended
        self.sites: dict[str, Site] = {}
        self.batch: int | None = None

    @property
    def channels(self) -> int:
        """The size of the rule's messages."""
        return self.rule.channels

    def __getitem__(self, name: str) -> Place:
        return Place(self, name)

    def signal(self, x: jax.Array) -> Signal:
        """The network's input, with a port of the rule's channels; floating point, the batch first."""
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"a signal is floating point, since messages go back along it; got {x.dtype}{x.shape}. Convert it, "
                "for instance by x.astype(jnp.float32), or look it up by mplp.embedding."
            )
        if x.ndim == 0 or x.shape[0] == 0:
            raise ValueError(
                f"a signal has the batch as its first axis, with at least one example; got shape {x.shape}"
            )
        if (batch := self.batch_size(x)) != x.shape[0]:
            raise ValueError(
                f"a network has one batch size: its first input has {batch} examples, this one, of shape {x.shape}, "
                f"has {x.shape[0]}. Broadcast it to (batch, ...); or, where no message needs to go back to it, hand "
                "it to mplp.wire as a plain array, in the function's closure."
            )
        return Signal.of(x, self.channels)

    def batch_size(self, value: jax.Array) -> int:
        """The number of examples, one number for the whole network.

        A loss multiplies its gradient by this number, and a node with parameters divides its update by it. Both must
        be the same number, also where the network moves the batch to another axis, or merges it with another, between
        the two. So the number is taken once, from the first input.

        Args:
          value: of the node that asks; its first axis is the batch if no input came before.
        """
        if self.batch is None:
            self.batch = value.shape[0]
        return self.batch

    def use(self, site: Site) -> Use:
        """Opens a place; called by the nodes."""
        name = site.name
        known = self.sites.setdefault(name, site)
        if known != site:
            raise ValueError(
                f"the place {name!r} is used by two nodes that differ: {_describe(known)}, and {_describe(site)}. "
                "Give each its own name."
            )
        fresh = jax.eval_shape(lambda: self.rule.init(site))
        if self.state is None:
            state = self.rule.init(site)
            return Use(self.rule.at(site), state, port(fresh), jnp.zeros(()))
        if name not in self.state:
            raise ValueError(
                f"the network uses the place {name!r}, the state has {sorted(self.state)}. Make the state for this "
                "network: mplp.init_state(rule, network, params, batch)."
            )
        _check_state(site, fresh, self.state[name])
        return Use(self.rule.at(site), self.state[name], self.state_port[name], self.uses_port[name])


def check_answer(site: Site, answer: Answer, wanted: Answer) -> None:
    """Refuses an answer whose shapes are not the question's.

    Args:
      site: the place.
      answer: what the rule said.
      wanted: an `Answer` of shapes and of the given state.
    """
    for field in ("message", "update", "bias"):
        got, want = getattr(answer, field), getattr(wanted, field)
        if (None if got is None else got.shape) != want:
            got = "none" if got is None else f"shape {got.shape}"
            raise ValueError(f"at {_describe(site)}, the rule's {field} must have shape {want}, got {got}")
    _check_state(site, wanted.state, answer.state, "the rule's new state")


def _check_state(site: Site, wanted: Any, got: Any, what: str = "the state") -> None:
    form = lambda tree: (jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)])
    if form(wanted) != form(got):
        raise ValueError(
            f"{what} at {_describe(site)} should be {_shapes(wanted)}, got {_shapes(got)}. A state belongs to one "
            "rule, one network and, where the rule remembers each example, one batch size: make it by mplp.init_state."
        )


def _shapes(tree: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return "empty"
    return ", ".join(f"{jax.tree_util.keystr(path) or 'an array'} {x.dtype}{list(x.shape)}" for path, x in leaves)


def _describe(site: Site) -> str:
    return f"{site.name!r} ({site.kind}, batch {site.batch}, shape {site.shape})"
