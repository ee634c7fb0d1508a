"""The protocol between nodes and learned rules: what a node asks a rule, and what the rule answers.

A rule is a pytree with two methods, `init(site)` and `at(site)`; write one and every node of `apgrad.mplp` works with
it. `rules/_exact.py` is the shortest example.

A *message passing learning protocol* (Randazzo, Niklasson & Mordvintsev, "MPLP: learning a message passing learning
protocol", 2020) keeps backpropagation's walk over the graph, and learns what a node does with the message that arrives:
which messages the node passes on, how the node changes its parameters, and what the node remembers. A node knows local
things only: the message that arrives, the node's inputs and output, its parameters and its state.

There are three families of nodes, so a rule answers three kinds of question:

* `Dense`: a node with a matrix of synapses between all inputs and all outputs (dense layers, and convolutions, which
  are dense layers on patches);
* `Diagonal`: a node with one parameter for each output (biases, scales, rows of an embedding);
* `Elementwise`: a node without parameters (activations, softmax, pooling, normalisation, and losses, where messages
  begin).

Gradients in questions are multiplied by the batch size: each is the gradient of one example's own loss. So messages
have the same size for every batch size if the loss is a mean over the batch, and an update is a mean over the batch.
"""

from typing import Any, Literal, NamedTuple, Protocol

import jax


class Site(NamedTuple):
    """A place in a network where a rule works: all that is known of the place before the data are.

    Attributes:
      name: the place's name. A rule may have parameters for each name.
      kind: the node's kind: "dense", "bias", "activation", "softmax", "squared_error", ... A rule may share parameters
        among the places of a kind.
      family: the family of the node, and so the kind of question that it asks.
      batch: the number of examples in a minibatch.
      shape: for a dense node (rows, inputs, outputs), where the rows are all positions of all examples. For other nodes
        the shape of the input value.
      features: for an elementwise node the names of the arrays in `Elementwise.features`, in order.
      bias: for a dense node whether the node has a bias too.
      begins: for an elementwise node whether messages begin at this place (a loss), so that no message arrives.
    """

    name: str
    kind: str
    family: Literal["dense", "diagonal", "elementwise"]
    batch: int
    shape: tuple[int, ...]
    features: tuple[str, ...] = ()
    bias: bool = False
    begins: bool = False

    @property
    def form(self) -> tuple[str, tuple[str, ...], bool]:
        """What the shapes of a rule's parameters depend on besides the name: kind, features and bias, but no sizes."""
        return self.kind, self.features, self.bias


class Dense(NamedTuple):
    """The question of a dense node, whose output is `inputs @ weight`, and then `+ bias` if the node has a bias.

    All arrays are floating point, of the network's dtype. k is the size of a message.

    Attributes:
      message: (rows, M, k), the message that arrived at the output.
      gradient: (rows, M), the true gradient of one example's loss with respect to the output.
      inputs: (rows, N).
      output: (rows, M), before the bias is added.
      weight: (N, M).
      bias: (M,), or None if the node has no bias.
    """

    message: jax.Array
    gradient: jax.Array
    inputs: jax.Array
    output: jax.Array
    weight: jax.Array
    bias: jax.Array | None


class Diagonal(NamedTuple):
    """The question of a node in which each parameter acts on one output only.

    All arrays are floating point, of the network's dtype. k is the size of a message.

    Attributes:
      message: (..., M, k), the message that arrived at the output.
      gradient: (..., M), the true gradient of one example's loss with respect to the output.
      inputs: (..., M); zeros if the node has no input (an embedding).
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
    """The question of a node without parameters.

    All arrays are floating point, of the network's dtype. k is the size of a message.

    Attributes:
      message: (..., k), the message that arrived, at the elements of the input. If the output has another shape
        (pooling), the node's transposed Jacobian leads each component to the input's elements. None at a loss, where
        messages begin.
      gradient: (...), the true gradient of one example's loss with respect to the input.
      features: arrays (...) by name.
      exact: (...), what backpropagation passes on: the node's transposed Jacobian applied to component 0 of the
        message, and at a loss the loss's derivative.
    """

    message: jax.Array | None
    gradient: jax.Array
    features: dict[str, jax.Array]
    exact: jax.Array


class Answer(NamedTuple):
    """What a rule answers. Arrays have the question's dtype.

    Attributes:
      message: the message to the input, with the input's shape and then k components; for a dense node (rows, N, k).
      update: what is added to the parameters. For a dense node (N, M). For a diagonal node (..., M), one update for
        each element of the output: the node takes the mean over the batch and the sum over positions. None if the node
        has no parameters.
      bias: (M,), what is added to a dense node's bias; None if the node has no bias.
      state: the new state, with the structure, shapes and dtypes of the old one.
    """

    message: jax.Array
    update: jax.Array | None = None
    bias: jax.Array | None = None
    state: Any = ()


class LocalRule(Protocol):
    """What a rule does at one place: a pytree that is called, such as a `jax.tree_util.Partial`."""

    def __call__(self, site: Site, question: Any, state: Any, /) -> Answer:
        """Answers a question at the place that the local rule was made for.

        Args:
          site: the place.
          question: a `Dense`, `Diagonal` or `Elementwise`.
          state: the state at this place, of `LearnedRule.init` or of the answer before.
        """
        ...


class LearnedRule(Protocol):
    """A learning rule: a pytree (usually a Flax NNX module without state of its own) with two methods.

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
        """The local rule of a place.

        Args:
          site: the place.

        Raises:
          ValueError: if the rule does not know the place. The message names the place and what the rule was made for.
        """
        ...
