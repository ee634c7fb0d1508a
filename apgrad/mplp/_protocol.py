"""The protocol between nodes and learned rules: what a node asks a rule, and what the rule answers.

A *message passing learning protocol* (Randazzo, Niklasson & Mordvintsev, "MPLP: learning a message passing learning
protocol", 2020) keeps backpropagation's walk over the graph, and learns what a node does with the message that arrives:
which messages it passes on, how it changes its parameters, and what it remembers. `rules/_exact.py` is a short rule.

Arrays in questions are floating point, of the network's dtype; k is the size of a message. If the loss is a mean over
the batch, gradients in questions are those of one example's own loss, while an update is a mean over the batch.
"""

from typing import Any, Literal, NamedTuple, Protocol

import jax

__all__ = ["Answer", "Dense", "Diagonal", "Elementwise", "LearnedRule", "LocalRule", "Shared", "Site"]


class Site(NamedTuple):
    """A node of a network as a rule sees it: what is known of it before the data.

    Attributes:
      kind: the node's kind, such as "dense" or "squared_error"; a rule may share parameters among places of a kind.
      family: the kind of question that the node asks.
      batch: the number of examples in a minibatch.
      shape: for a dense node (rows, inputs, outputs), with a row for each position of each example; else the input's.
      features: the names of the arrays in `Elementwise.features`, in order.
      bias: whether a dense node has a bias.
      begins: whether messages begin at this place (a loss), so that none arrives.
      shared: whether the node's parameters come from `mplp.shared`, which adds up what the rule answers at their uses.
    """

    name: str
    kind: str
    family: Literal["dense", "diagonal", "elementwise", "shared"]
    batch: int
    shape: tuple[int, ...]
    features: tuple[str, ...] = ()
    bias: bool = False
    begins: bool = False
    shared: bool = False

    @property
    def form(self) -> tuple[str, tuple[str, ...], bool, bool]:
        """What a rule's parameters depend on besides the name: kind, features, bias and sharing, but no sizes."""
        return self.kind, self.features, self.bias, self.shared


class Dense(NamedTuple):
    """The question of a matrix of synapses, whose output is `inputs @ weight`, and `+ bias` if it has one.

    Attributes:
      message: (rows, M, k), which arrived at the output.
      gradient: (rows, M), the true gradient of one example's loss with respect to the output.
      inputs: (rows, N), patches in a convolution.
      output: (rows, M), before the bias is added.
      weight: (N, M).
      bias: (M,), or None.
    """

    message: jax.Array
    gradient: jax.Array
    inputs: jax.Array
    output: jax.Array
    weight: jax.Array
    bias: jax.Array | None


class Diagonal(NamedTuple):
    """The question of a node in which each parameter acts on one output: a bias, a scale, rows of an embedding.

    Attributes:
      message: (..., M, k), which arrived at the output.
      gradient: (..., M), the true gradient of one example's loss with respect to the output.
      inputs: (..., M); zeros for an embedding.
      parameter: (M,), or for an embedding (..., M), the rows that were looked up.
      slope: (..., M), the derivative of the output with respect to the parameter.
      through: (M,) or (..., M), the derivative of the output with respect to the input.
    """

    message: jax.Array
    gradient: jax.Array
    inputs: jax.Array
    parameter: jax.Array
    slope: jax.Array
    through: jax.Array


class Elementwise(NamedTuple):
    """The question of a node without parameters: activations, softmax, pooling, normalisation, losses.

    Attributes:
      message: (..., k), at the elements of the input; None at a loss, where messages begin.
      gradient: (...), the true gradient of one example's loss with respect to the input.
      features: arrays (...) by name.
      exact: (...), what backpropagation passes on: the node's transposed Jacobian applied to component 0 of the
        message, and at a loss the loss's derivative.
    """

    message: jax.Array | None
    gradient: jax.Array
    features: dict[str, jax.Array]
    exact: jax.Array


class Shared(NamedTuple):
    """The question of a parameter that is used in many steps, asked once for all of them.

    Attributes:
      update: of the parameter's shape, the sum of what the rule answered as its update at all uses.
    """

    update: jax.Array
    parameter: jax.Array


class Answer(NamedTuple):
    """What a rule answers. Message, update and bias are converted to the question's dtype.

    Attributes:
      message: to the input, of its shape and then k components; for a dense node (rows, N, k); None without an input.
      update: what is added to the parameters: for a dense node (N, M); for a diagonal node (..., M), of which the node
        takes the mean over the batch and the sum over positions; None without parameters.
      bias: (M,), what is added to a dense node's bias, or None.
      state: the new state, of the form of the old one.
    """

    message: jax.Array | None
    update: jax.Array | None = None
    bias: jax.Array | None = None
    state: Any = ()


class LocalRule(Protocol):
    """What a rule does at one place: a pytree that is called, such as a `jax.tree_util.Partial`."""

    def __call__(self, site: Site, question: Any, state: Any, /) -> Answer:
        """The answer to a `Dense`, `Diagonal`, `Elementwise` or `Shared`; `state` is from `init` or the last answer."""
        ...


class LearnedRule(Protocol):
    """A learning rule: a pytree (usually a Flax NNX module without state of its own) with two methods.

    A rule with a true attribute `sums_uses` answers each use of a shared parameter (`Site.shared`) with a term of a
    sum, and then the sum (`Shared`) with the update: so it can normalize the update. Other rules get no `Shared`.

    Attributes:
      message_size: the size k of a message, for each element of a value.
    """

    message_size: int

    def init(self, site: Site) -> Any:
        """The state of a place at the start of a task: a pytree of floating-point arrays, or ().

        Args:
          site: the place.
        """
        ...

    def at(self, site: Site) -> LocalRule:
        """The local rule of a place, or a ValueError that names the place and what the rule was made for.

        Args:
          site: the place.
        """
        ...
