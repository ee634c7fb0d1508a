"""What a learned rule is, and what a node hands it: two methods, three kinds of question.

A *message passing learning protocol* (Randazzo, Niklasson & Mordvintsev, "MPLP: learning a message passing learning
protocol", 2020) keeps backpropagation's walk over the graph and learns what a node does with the message
that arrives: which messages it passes on, how it changes its parameters, what it remembers. A node sees only
what is local: its message, its inputs and output, its parameters, its own state.

There are three families of node, so a rule answers three questions:

* `Dense`: a matrix of synapses between all inputs and all outputs (dense layers; convolutions, by patches);
* `Diagonal`: one parameter for each output (biases, scales, rows of an embedding);
* `Elementwise`: no parameters (activations, softmax, pooling, normalisation, and losses, where messages begin).

Gradients appear here scaled by the batch size, as the gradient of one example's own loss: then a loss that is a
mean over the batch gives messages of the same size for every batch size, and an update is a mean over the batch.
"""

from typing import Any, NamedTuple, Protocol

import jax


class Site(NamedTuple):
    """A place in a network where a rule works: all that is known before the data.

    Attributes:
      name: of the place; a rule may have parameters for each name.
      kind: of the node: "dense", "bias", "activation", "softmax", "squared_error", ...; a rule may share parameters
        among places of a kind.
      family: "dense", "diagonal" or "elementwise".
      batch: size of the minibatch.
      shape: dense: (rows, inputs, outputs), where rows are batch times positions; else that of the input value.
      features: elementwise: names of the arrays in `Elementwise.features`, in order.
      bias: dense: whether the node has a bias too.
    """

    name: str
    kind: str
    family: str
    batch: int
    shape: tuple[int, ...]
    features: tuple[str, ...] = ()
    bias: bool = False

    @property
    def form(self) -> tuple[str, tuple[str, ...], bool]:
        """What a rule's parameters depend on besides the name: not on the sizes."""
        return self.kind, self.features, self.bias


class Dense(NamedTuple):
    """The question of a dense node, `output = inputs @ weight`, then `+ bias` where it has one.

    Attributes:
      message: (rows, M, k), what arrived at the output.
      gradient: (rows, M), the loss's true gradient there, of one example.
      inputs: (rows, N).
      output: (rows, M), before the bias.
      weight: (N, M).
      bias: (M,) or None.
    """

    message: jax.Array
    gradient: jax.Array
    inputs: jax.Array
    output: jax.Array
    weight: jax.Array
    bias: jax.Array | None


class Diagonal(NamedTuple):
    """The question of a node whose parameter acts on each output by itself.

    Attributes:
      message: (..., M, k), what arrived at the output.
      gradient: (..., M), the loss's true gradient there, of one example.
      inputs: (..., M); zeros where the node has no input (an embedding).
      parameter: broadcasts against the inputs: (M,), or for an embedding the rows looked up.
      slope: (..., M), derivative of the output with respect to the parameter.
      through: broadcasts against the inputs, derivative of the output with respect to the input.
    """

    message: jax.Array
    gradient: jax.Array
    inputs: jax.Array
    parameter: jax.Array
    slope: jax.Array
    through: jax.Array


class Elementwise(NamedTuple):
    """The question of a node without parameters.

    Attributes:
      message: (..., k), what arrived, at the input's elements. Where the output has another shape (pooling), each
        channel is led there by the node's transposed Jacobian. None at a loss: messages begin here.
      gradient: (...), the true gradient with respect to the input, of one example.
      features: arrays (...) by name.
      exact: (...), what backpropagation passes on: the transposed Jacobian applied to channel 0 of the message; at
        a loss, its derivative.
    """

    message: jax.Array | None
    gradient: jax.Array
    features: dict[str, jax.Array]
    exact: jax.Array


class Answer(NamedTuple):
    """What a rule answers.

    Attributes:
      message: to the input, the question's shapes with k channels last: dense (rows, N, k).
      update: dense: (N, M), added to the weight. Diagonal: (..., M), for each element of the output; the node
        takes the mean over the batch and the sum over positions. None where there are no parameters.
      bias: dense: (M,), added to the bias; None if there is none.
      state: of the same structure, shapes and dtypes as the one given.
    """

    message: jax.Array
    update: jax.Array | None = None
    bias: jax.Array | None = None
    state: Any = ()


class Learner(Protocol):
    """What a rule does at one place: a pytree that is called, such as a `jax.tree_util.Partial`."""

    def __call__(self, site: Site, question: Any, state: Any, /) -> Answer:
        """Answers a `Dense`, `Diagonal` or `Elementwise` question at the place that it was made for."""
        ...


class Rule(Protocol):
    """A learning rule: a pytree (usually a stateless Flax NNX module) with two methods.

    Attributes:
      channels: size k of a message, for each element of a value.
    """

    channels: int

    def init(self, site: Site) -> Any:
        """The state at the start of a task: a pytree of floating-point arrays, or ()."""
        ...

    def at(self, site: Site) -> Learner:
        """The learner of a place; raises ValueError, naming both sides, for a place that the rule does not know."""
        ...
