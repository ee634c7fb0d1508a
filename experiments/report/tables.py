"""Tables of single runs: what a reader must know, and their rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.report import rows
from experiments.report.rows import Rows


class Table(NamedTuple):
    """A table of the page.

    Attributes:
      title: its heading.
      run: the folder of the results.
      text: what a reader must know: the setting, and what it means.
      rows: a function of the results.
    """

    title: str
    run: str
    text: str
    rows: Callable[[dict[str, Any]], Rows]


TABLES = [
    Table(
        "Total propagation on the chaotic network",
        "chaos-paper",
        "Variance of the gradient of the expected loss after 50 steps with respect to beta, 1,000 lanes an estimate, "
        "800 estimates a point. RP is reparameterization, LR likelihood ratio, TP total propagation. The bias is "
        "against an exact float64 recursion, in standard errors.",
        rows.chaos,
    ),
    Table(
        "Gaussian shaping of swarms",
        "gaussian_shaping_swarm-paper",
        "Root-mean-square error of the gradient over its length, 25 steps, 1,000 lanes; GS is shaped, GR resampled.",
        rows.swarms,
    ),
    Table(
        "What total propagation costs",
        "benchmarks.estimators-paper",
        "Time of a gradient over plain `jax.grad` of the same rollout, 1,000 lanes, one CPU core, by the number of the "
        "policy's parameters.",
        rows.growth_with_the_policy,
    ),
    Table(
        "A policy learns to control a chaotic system",
        "policy_search-paper",
        "A policy of 64-64 units holds the noisy Lorenz system. Here simpler wins: reparameterization over short "
        "horizons (`RP, short`) has the lowest cost and is first.",
        rows.policy_search,
    ),
    Table(
        "Clipped lanes in policy search",
        "policy_search_clipped-paper",
        "Cost of the learned policy on two tasks, means over 20 seeds; each method's rate was tuned on two others. "
        "RP is reparameterization. `RP, lanes clipped` cuts messages lane by lane at 4 times the typical lane's; "
        "`multilevel` weighs levels of clipping by what repeats. Where every step costs, multilevel ends below all "
        "plain methods; clipped lanes do so with 19 seeds, and fail with one, which the mean shows and the median "
        "does not. Where the last step alone costs, plain RP ends lowest, multilevel does not differ from it beyond "
        "the paired interval, and clipped lanes stop at their bias.",
        rows.clipped_lanes,
    ),
    Table(
        "Cart-pole swing-up through a learned model",
        "policy_search_cartpole-paper",
        "Ten runs a method, eight real episodes each. By cost, total propagation with the published weights learns "
        "best; by episodes to the first success, where a run without one counts as nine, nothing is ahead of "
        "reparameterization.",
        rows.cart_pole,
    ),
    Table(
        "A trained rule beside tuned optimizers",
        "mplp_mnist-paper",
        "Accuracy in percent after 20 steps of 8 images, 100 random networks, 1,000 test images each. Adam and SGD at "
        "the best of five rates on the same tasks. The rule `image_mlp` was trained on 12x12 MNIST with 144-50-10 and "
        "similar networks; the others are transfers.",
        rows.rule_beside_adam,
    ),
    Table(
        "The same beside Muon and momentum",
        "mplp_mnist-optimizers",
        "The same setting, 50 random networks. Each optimizer has the best of five rates on the same tasks. The rules "
        "start as gradient descent and receive the gradient; like Muon, they whiten what makes an update.",
        rows.rule_beside_optimizers,
    ),
    Table(
        "The same for a thousand steps",
        "mplp_mnist-long",
        "The rule `image_mlp_long`, trained on unrolls of 1,000 steps, 20 runs. It is ahead for the first hundreds "
        "of steps, and has nothing ahead of Adam or SGD at 1,000.",
        rows.rule_for_long,
    ),
    Table(
        "Outer gradients",
        "outer_gradients-40",
        "Gradient descent in a rippled bowl, its learning rate as meta-parameter, 40 steps, segments of 5, 32 tasks an "
        "estimate.",
        rows.outer_gradients,
    ),
    Table(
        "Outer gradients that train",
        "outer_training-paper",
        "A learned optimizer of 147 meta-parameters, trained through 200 inner steps from a learning rate that is too "
        "small (tame) or too large (chaotic), and influence balancing: loss after the same seconds of one core, three "
        "seeds, of each method's best rate and deviation. The threshold of the rule is gradient descent at its best "
        "constant rate, that of influence balancing 1 % of the loss at the start.",
        rows.outer_training,
    ),
    Table(
        "What reverse mode keeps",
        "rad_table1-paper",
        "Residual bytes of 150 examples over reverse mode's.",
        rows.residuals,
    ),
    Table(
        "Compiled memory and time",
        "benchmarks.randomized-paper",
        "Scratch memory of a gradient, with XLA's optimization barriers kept (on a CPU they are dropped unless the "
        "compiler option of *Sharp bits* is given). `layers` is 17 ReLU layers of 300 with a batch of 2048, `rnn` an "
        "RNN of 784 steps.",
        rows.compiled_memory,
    ),
    Table(
        "Training with a random memory",
        "rad_training-small",
        "Five pairs of runs with the same start and batches. `reduced` is a batch of 22 of 150 examples, with a step "
        "size of its own; it is the paper's reduced batch. It keeps 22/150 of the activations' memory, 15 %, which is "
        "more than the 4/32 and 2/32 that rounding keeps of an array, besides the array's grid. The transformer and "
        "the ConvNet are far from converged.",
        rows.training,
    ),
    Table(
        "Training with a random memory: an MLP on MNIST, at equal memory",
        "rad_training-mlp",
        "20,000 steps of Adam on three bootstraps; rate and weight decay of each method are the best of six pairs by a "
        "validation split, which are the paper's for all but the smaller batch. `reduced` has as many examples as fit "
        "into the memory of a sample of .1, `reduced published` the paper's 22. A sample for each example "
        "(`different`) reaches a training loss 200 times below that of the smaller batch, as in the paper's Figure 6; "
        "one sample for all examples (`same`) and the projection come about as low as the smaller batch. On test "
        "images every one of them does worse than the smaller batch. Rounding to 2 bits, which keeps less than a "
        "sample of .1, does as well as the baseline in both.",
        rows.training_at_equal_memory,
    ),
    Table(
        "Training with a random memory: a ConvNet on a part of CIFAR-10, at equal memory",
        "rad_training-convnet",
        "800 steps of Adam, where the paper has 100,000, with the paper's rates and decays, on a bootstrap of 10,000 "
        "images. `reduced` has as many examples as fit into the memory of a sample of .1. In so few steps samples, one "
        "for all examples too, come far below the smaller batch, as in the paper's Figure 6, and not as low as the "
        "baseline; a sample for each example does as well as the baseline on test images.",
        rows.training_at_equal_memory,
    ),
    Table(
        "Training with a random memory: an RNN on MNIST's pixels one by one, at equal memory",
        "rad_training-rnn",
        "20,000 steps of SGD, where the paper has 200,000, at the paper's rate, on one bootstrap. `reduced` has as "
        "many examples as fit into the memory of a sample of .1. None has learned much by then: exact reverse mode "
        "leaves the flat phase after 13,000 steps, one sample for all examples (`same`) after 17,000, a sample for "
        "each example (`different`) and the smaller batch not at all. Along the way both samples have a lower loss "
        "than the smaller batch, which the paper says they match. With one run it is not known whether `same` is "
        "better than `different`, or was lucky.",
        rows.training_at_equal_memory,
    ),
    Table(
        "Noise of a random memory, and of a smaller batch: a ConvNet",
        "rad_noise-paper",
        "The paper's ConvNet on 10,000 images of CIFAR-10, batches of 150: the squared error of the gradient, over "
        "that of a smaller batch that keeps as many bytes in reverse mode. Below 1 the method is better. After 500 "
        "steps samples are 1.7 to 8.7 times better in the four convolutions, as the paper says; in the dense layer at "
        "the end they are better only as `distinct` and `stratified`, with .3 or .5 of the entries, and as `heavy`, "
        "with .1 or more. A tenth of the entries for 600 images (`different`) has less noise in the convolutions than "
        "all of them for 150, at less than half the memory, and 2.6 times as much in the dense layer. Rounding is 4 to "
        "11 times better everywhere.",
        rows.noise,
    ),
    Table(
        "Noise of a random memory, and of a smaller batch: an MLP",
        "rad_noise-mlp",
        "The same for an MLP on all of MNIST's training images. After 2,000 steps samples of the activations are as "
        "good as the smaller batch at best, `distinct` and `stratified` with half of the entries, but for `heavy`, "
        "which with half of them is better. At the start the last layer's samples are better, too. Rounding is 3 to 11 "
        "times better.",
        rows.noise,
    ),
    Table(
        "Control of a partial differential equation",
        "rad_pde-paper",
        "The paper's horizon and iterations, from four starts.",
        rows.pde,
    ),
    Table(
        "Influence and what a component is worth",
        "tracing_ablation-paper",
        "An RNN, an LSTM and a GRU side by side, 12 networks: rank correlation of a component's influence on the "
        "embedding with the rise of the held-out loss without the component. The networks differ in their seeds alone, "
        "and influence orders the three components alike in all of them: a correlation counts one order twelve times, "
        "and its standard error says only how well that one is known. Of training without a component influence says "
        "little.",
        rows.ablation,
    ),
    Table(
        "What tracing costs",
        "benchmarks.tracing-paper",
        "Time over that of jitted `jax.grad`, one process.",
        rows.tracing_time,
    ),
    Table(
        "Other ways back",
        "ways_back-paper",
        "Networks on MNIST, 1,500 steps of 100 images; the rate is tuned on held-out images. The published figures are "
        "of other networks, most of them trained for longer.",
        rows.ways_back,
    ),
    Table(
        "Predictive coding on JPC's example",
        "predictive_coding-paper",
        "A perceptron with two hidden layers of 300 units on MNIST, steps of 64 images.",
        rows.predictive_coding,
    ),
    Table(
        "What devices exchange",
        "collectives-paper",
        "Collective operations in the compiled program of one step, on simulated devices; [Scaling](scaling.md) says "
        "what each step is. Bytes are those of the results on one device, loops counted with their 20 turns.",
        rows.collectives,
    ),
    Table(
        "Discrete choices beside their peers",
        "benchmarks.choice_peers-paper",
        "Variance at equal evaluations over that of the best peer, with 95 % intervals. The peers are surrogate losses "
        "by hand and `TraceGraph_ELBO`; [Estimators](estimators.md) has the picture.",
        rows.choice_peers,
    ),
    Table(
        "Autoencoders with binary latents: MNIST",
        "discrete_vae-mnist",
        "A linear encoder and decoder with 200 latents, after half a percent of the published million steps. The "
        "variance is that of the encoder's gradient on one minibatch at the end.",
        rows.autoencoders,
    ),
    Table(
        "Autoencoders with binary latents: digits",
        "discrete_vae-small",
        "The same with 20 latents and 10,000 steps; 57 of 72 cells are finished.",
        rows.autoencoders,
    ),
]
