"""What the papers say, and what was measured; `verdicts.py` says how the two are compared."""

import statistics
from collections.abc import Callable

from experiments.report.verdicts import Claim, Results, Value, figure


def _named(key: str) -> Callable[[Results], Value]:
    return lambda results: Value(results[key]["mean"], results[key]["standard_error"])


def _interval(key: str) -> Callable[[Results], Value]:
    """The value with a quarter of its 95 % interval's width, about its standard error."""

    def read(results):
        low, high = results[key]["interval"]
        return Value(results[key]["value"], (high - low) / 4)

    return read


def _megabytes(network: str, method: str) -> Callable[[Results], Value]:
    def read(results):
        row = next(r for r in results["rows"] if (r["network"], r["method"]) == (network, method))
        return Value(row["with_weights_MB"])

    return read


def _largest_ratio(method: str) -> Callable[[Results], Value]:
    def read(results):
        found = {k: v["value"] for k, v in results.items() if k.startswith(f"variance_ratio_{method}_H50_")}
        return _interval(max(found, key=lambda k: found[k]))(results)

    return read


def _loss_at_equal_memory(*ordered: tuple[str, str]) -> Callable[[Results], tuple[str, bool]]:
    """Final losses; whether the first method of each pair comes lower than the second."""

    def read(results):
        of = {r["method"]: r for r in results["rows"]}
        shown = [m for m in ("baseline", "different", "same", "project", "reduced", "rounding 4") if m in of]
        words = ", ".join(f"{m} {of[m]['train_loss']:.3g} ({100 * of[m]['test_accuracy']:.1f} %)" for m in shown)
        holds = all(of[a]["train_loss"] < of[b]["train_loss"] for a, b in ordered)
        return f"training loss (test accuracy): {words}", holds

    return read


def _noise(last: bool) -> Callable[[Results], tuple[str, bool]]:
    """Squared errors over those of smaller batches of equal memory, in the last layer or in those before it."""

    def read(results):
        config, final = results["config"], max(r["layer"] for r in results["rows"])
        measured = (max(config["training_steps"]), config["batch"], last)
        rows = [r for r in results["rows"] if (r["steps"], r["batch"], r["layer"] == final) == measured]
        ratios = {
            name: [r["against_smaller_batch"] for r in rows if r["method"].split()[0] == name]
            for name in ("same", "different", "stratified", "rounding")
        }
        words = ", ".join(f"{name} {min(each):.2f} to {max(each):.2f}" for name, each in ratios.items())
        most = max(max(ratios[name]) for name in ("same", "different"))
        return f"squared error over that of a smaller batch of equal memory: {words}", most < 1

    return read


def _pde_losses(results: Results) -> tuple[str, bool]:
    losses = {r["fraction"]: r["final_losses"] for r in results["rows"] if r["iterations"] == 800}
    ratios = {f: [a / b for a, b in zip(ends, losses[1.0], strict=True)] for f, ends in losses.items() if f != 1.0}
    words = ", ".join(f"{f:g}: {min(each):.3f} to {max(each):.3f}" for f, each in ratios.items())
    starts = f"final loss over exact reverse mode's from {len(losses[1.0])} starts, by fraction"
    return f"{starts}: {words}", all(abs(r - 1) < 0.1 for each in ratios.values() for r in each)


def _path_variance(results: Results) -> tuple[str, bool]:
    factors = results["variance_factor_of_a_layer"]
    independent = max(v for k, v in factors.items() if k.startswith("independent"))
    interleaved = min(v for k, v in factors.items() if k.startswith("interleaved"))
    words = f"a layer multiplies it by at most {independent:.2f} and at least {interleaved:.2f}"
    return words, independent < 1.05 and interleaved > 1.2


def _flat_phase(results: Results) -> tuple[str, bool]:
    arms = ("random start", "random start, batch entropy", "started as gradient descent")
    words = []
    for arm in filter(results.__contains__, arms):
        begun = [f"{phase:,}" for phase in results[arm]["flat_phase"] if phase is not None]
        after = f" (after {', '.join(begun)} outer steps)" if begun else ""
        last = f"held-out loss at the end {results[arm]['held_out']:.2f}"
        words.append(f"{arm}: {len(begun)} of {results[arm]['of']} seeds start{after}, {last}")
    words.append(f"SGD {results['SGD']['held_out']:.2f}, Adam {results['Adam']['held_out']:.2f}")
    return "; ".join(words), results[arms[1]]["seeds_started"] > results[arms[0]]["seeds_started"]


def _influence_balancing(results: Results) -> tuple[str, bool]:
    rows = {r["method"]: r for r in results["rows"] if r["start"] == "influence balancing"}
    begun, biased, unbiased = results["influence balancing"], rows["truncated, K = 1"], rows["PES, K = 1"]
    words = (
        f"loss {begun['loss at the start']:.2g} at first, {biased['loss']:.2g} by truncated reverse mode, "
        f"{unbiased['loss']:.2g} by PES, which once reaches {begun['threshold']:.2g} on average; "
        f"PES's bias {figure(Value(unbiased['bias'], unbiased['bias_standard_error']))} of 24"
    )
    holds = biased["loss"] > begun["loss at the start"] and unbiased["seconds_to_threshold"] is not None
    return words, holds and abs(unbiased["bias"]) < 4 * unbiased["bias_standard_error"]


def _dynamics(results: Results) -> tuple[str, bool]:
    losses = {k: v for k, v in results.items() if k.startswith("k = ")}
    least = lambda part: min(loss for name, loss in losses.items() if part in name)
    best = min(losses, key=lambda k: losses[k])
    words = f"best: {best} ({losses[best]:.2f}); best with k = 1 {least('k = 1,'):.2f}, without batch norm "
    words += f"{least('none'):.2f}; SGD {results['SGD']['judged']:.2f}, Adam {results['Adam']['judged']:.2f}"
    return words, best == "k = 8, batch norm, learned rate"


def _message_sizes(results: Results) -> tuple[str, bool]:
    found = {name: seeds for name, seeds in results.items() if name.startswith("k = ")}
    words, means = [], {}
    for share in dict.fromkeys(name.partition(", ")[2] for name in found):
        sizes = {name.partition(", ")[0]: seeds for name, seeds in found.items() if name.endswith(share)}
        errors = {size: [seed["mean"] for seed in seeds.values()] for size, seeds in sizes.items()}
        means[share] = list(map(statistics.fmean, errors.values()))
        words.append(f"{share}: " + ", ".join(f"{k} {' and '.join(f'{e:.4f}' for e in v)}" for k, v in errors.items()))
    by_size = all(each == sorted(each, reverse=True) for each in means.values())
    by_sharing = all(own < shared for own, shared in zip(means["shared: none"], means["shared: all"], strict=True))
    return "; ".join(words), by_size and by_sharing


def _between(results: Results) -> tuple[str, bool]:
    rule, sgd, adam = (results[name]["outer_loss"] for name in ("MPLP", "SGD", "Adam"))
    return f"rule {rule:.1f}, SGD {sgd:.1f}, Adam {adam:.1f}", adam < rule < sgd


def _functions(results: Results) -> tuple[str, bool]:
    start = "correlation, "
    found = {key.removeprefix(start): value for key, value in results.items() if key.startswith(start)}
    words = ", ".join(f"{name} {value:+.2f}" for name, value in found.items())
    return f"correlations with those of gradient descent: {words}", min(map(abs, found.values())) > 0.5


def _shaping(results: Results) -> tuple[str, bool]:
    rows = {(r["H"], r["beta"], r["method"]): r["variance"] for r in results["rows"]}
    ratios = [v / rows[h, b, "LR"] for (h, b, method), v in rows.items() if method == "GS-LR"]
    return f"{min(ratios):.2g} to {max(ratios):.2g} times the variance without it", min(ratios) > 0.5


def _largest_gain(method: str, baseline: str) -> Callable[[Results], tuple[str, bool]]:
    def read(results):
        least, most = (
            results[f"{which} gain of {method} over {baseline}"]["value"] for which in ("smallest", "largest")
        )
        low = results[f"largest gain of {method} over {baseline}"]["interval"][0]
        return f"squared error over that of {method}: {least:.2g} to {most:,.{0 if most > 10 else 1}f}", low >= 100

    return read


def _accuracy(steps: int) -> Callable[[Results], Value]:
    def read(results):
        row = next(r for r in results["rows"] if (r["method"], r["steps"]) == ("predictive coding", steps))
        return Value(100 * row["test_accuracy"], 100 * row["test_accuracy_se"])

    return read


NOTES = {
    "Persistent evolution strategies": "Eight pairs and Adam, where the published code has 500 pairs and plain SGD.",
    "JPC: predictive coding": "JPC's notebook is one run. Its error here is the standard deviation over our seeds.",
    "Proppo and PIPPS: total propagation": "The published code was run 60 times at each point, which is where its "
    "standard errors come from. The swarms are ours, where states are Gaussian; LR has a leave-one-out baseline.",
    "MPLP": "Accuracies are in percent over 100 random networks. The checkpoint that the authors published is a little "
    "better than the paper's figure, in their code as in ours. *More weight on held-out data* means that "
    ".7 of the outer loss is on 64 held-out points or images and .3 on the minibatches just learned from. In the "
    "published code .3 is on held-out data, 50 points or 8 images, and .7 on the minibatches.",
    "The MPLP thesis": "Losses of 5.1 are those after the last inner step.",
    "Randomized automatic differentiation": "The paper's table is a count by hand of what has to be kept. Ours is "
    "measured: the arrays that `jax.vjp` keeps, which are more in the ConvNet and in the RNN. With samples the "
    "ConvNet's are more because the paper counts the bits of two relus after the pools that follow them, and its code, "
    "as ours, has them before: .58 MB for 150 examples, nearly all of the difference.",
}

# The two trainings of the published rule: what is said of the weights, and the run.
TRAINED_HERE = (
    ("", "mplp_from_random-paper"),
    (", more weight on held-out data", "mplp_from_random-held_out"),
)

CLAIMS = {
    "Proppo and PIPPS: total propagation": [
        Claim(
            "Proppo, Fig. 4",
            "largest gain over the better of reparameterization and likelihood ratio, 50 steps: "
            "default weights, cross-fitted; the paper says up to about 100",
            "chaos-paper",
            Value(100),
            _largest_ratio("decoupled-CF"),
            "higher",
        ),
        Claim(
            "published code",
            "the same gain with the published weights",
            "chaos-paper",
            Value(49, 12.6),
            _largest_ratio("TP"),
            "higher",
        ),
        *(
            Claim("published code", what, "chaos-paper", Value(*value), _interval(f"variance_{method}_H50_beta2.5"))
            for what, method, value in (
                ("variance at beta 2.5, 50 steps: reparameterization", "RP", (0.25, 0.046)),
                ("likelihood ratio", "LR", (0.175, 0.032)),
                ("total propagation, as published", "TP", (0.0036, 0.00066)),
            )
        ),
        Claim(
            "Proppo, App. C.3",
            "Gaussian shaping of likelihood ratio on the chaotic network",
            "gaussian_shaping-paper",
            "no clear gain",
            _shaping,
        ),
        *(
            Claim(
                "Proppo, sec. 4",
                f"Gaussian shaping of swarms with a cost at each step: gain of {method} on {baseline}",
                "gaussian_shaping_swarm-paper",
                "orders of magnitude in some situations",
                _largest_gain(method, baseline),
            )
            for method, baseline in (("GS-LR", "LR, no baseline"), ("GS-LR", "LR"), ("GS-TP", "LR"), ("GS-TP", "TP"))
        ),
    ],
    "MPLP": [
        Claim(
            "Fig. 2",
            "sinusoids after 5 steps, half squared error: published checkpoint",
            "mplp_published-paper",
            Value(0.0013),
            _named("sinusoid, MPLP"),
        ),
        *(
            Claim(
                "Fig. 2",
                f"the same, the published rule trained here from its random start{weights}",
                folder,
                Value(0.0013),
                _named("sinusoid, trained here"),
            )
            for weights, folder in TRAINED_HERE
        ),
        Claim(
            "Fig. 2",
            "the same, the rule that comes with apgrad",
            "mplp_sinusoid-part",
            Value(0.0013),
            _named("apgrad's rule"),
            same=True,
        ),
        Claim(
            "Fig. 3",
            "sinusoids after 2 steps, half squared error: published rule and prior",
            "mplp_maml-paper",
            Value(0.0010),
            _named("published, learned prior"),
        ),
        Claim(
            "Fig. 3",
            "the same, MAML with as many outer steps as the rule",
            "mplp_maml-paper",
            Value(0.0010),
            _named("MAML, learned prior"),
        ),
        Claim(
            "Fig. 3",
            "sinusoids after 2 steps, rule and prior learned together",
            "mplp_maml-part",
            Value(0.0010),
            _named("MPLP, learned prior"),
        ),
        Claim(
            "App. B",
            "sinusoids after 5 steps, half squared error by message size and sharing",
            "mplp_sinusoid-part",
            "the larger the messages, the faster; faster without sharing",
            _message_sizes,
        ),
        Claim(
            "Fig. 4",
            "12x12 MNIST after 20 steps of 8 images, accuracy: published checkpoint",
            "mplp_published-paper",
            Value(48.95, 0.635),
            _named("mnist, MPLP"),
            "higher",
        ),
        Claim(
            "authors' code",
            "the same checkpoint, run by the authors' code",
            "mplp_published-paper",
            Value(50.3, 0.68),
            _named("mnist, MPLP"),
            "higher",
        ),
        Claim(
            "Table 1",
            "with a step function",
            "mplp_published-paper",
            Value(43.1, 0.74),
            _named("mnist, MPLP, step"),
            "higher",
        ),
        Claim(
            "Table 1",
            "784-100-10, 28x28 MNIST",
            "mplp_published-paper",
            Value(37.6, 0.96),
            _named("mnist, MPLP, 784-100-10"),
            "higher",
        ),
        *(
            Claim(
                paper,
                f"{what}, the published rule trained here from its random start{weights}",
                folder,
                Value(*value),
                _named(f"mnist, trained here{name}"),
                "higher",
            )
            for weights, folder in TRAINED_HERE
            for paper, what, name, value in (
                ("Fig. 4", "12x12 MNIST", "", (48.95, 0.635)),
                ("Table 1", "with a step function", ", step", (43.1, 0.74)),
                ("Table 1", "784-100-10", ", 784-100-10", (37.6, 0.96)),
            )
        ),
        Claim("Fig. 4", "tuned Adam", "mplp_published-paper", Value(39.5), _named("mnist, Adam"), "higher"),
        Claim("Fig. 4", "SGD at the paper's rate", "mplp_published-paper", Value(14.7), _named("mnist, SGD"), "higher"),
        Claim(
            "Fig. 4",
            "SGD at the best of five rates",
            "mplp_from_random-held_out",
            Value(14.7),
            _named("mnist, SGD"),
            "higher",
            same=True,
        ),
        Claim(
            "Fig. 4",
            "12x12 MNIST, the rule that comes with apgrad",
            "mplp_mnist-paper",
            Value(48.95, 0.635),
            _named("144-50-10, MPLP"),
            "higher",
            same=True,
        ),
        Claim(
            "Table 1",
            "with a step function, the same rule",
            "mplp_mnist-paper",
            Value(43.1, 0.74),
            _named("144-50-10, step, MPLP"),
            "higher",
            same=True,
        ),
        Claim(
            "Table 1",
            "784-100-10, the same rule",
            "mplp_mnist-paper",
            Value(37.6, 0.96),
            _named("784-100-10, MPLP"),
            "higher",
            same=True,
        ),
    ],
    "The MPLP thesis": [
        Claim(
            "5.1",
            "messages of one number, outer loss of the learned rule",
            "mplp_sgd-paper",
            "better than tuned SGD, worse than tuned Adam",
            _between,
        ),
        Claim(
            "5.1",
            "shapes of the four functions that it has learned",
            "mplp_sgd-paper",
            "those of gradient descent",
            _functions,
        ),
        Claim(
            "5.1",
            "the same after 105,000 outer steps; the thesis takes a rule from 100,000 to 130,000",
            "mplp_sgd-part",
            "those of gradient descent",
            _functions,
        ),
        Claim(
            "5.2",
            "message size, batch norm, learned step size",
            "mplp_dynamics-part",
            "best: all three together",
            _dynamics,
        ),
        Claim(
            "5.3",
            "batch entropy against the flat phase",
            "mplp_batch_entropy-part",
            "with it every seed starts, without it four of five",
            _flat_phase,
        ),
    ],
    "Randomized automatic differentiation": [
        Claim(
            "Table 1",
            f"{network}, {label}: MB of 150 examples, weights included",
            "rad_table1-paper",
            Value(published),
            _megabytes(network, method),
        )
        for network, label, method, published in (
            ("mlp", "reverse mode", "baseline", 2.69),
            ("mlp", "a sample of .1", "different 0.1", 1.80),
            ("convnet", "reverse mode", "baseline", 23.08),
            ("convnet", "a sample of .1", "different 0.1", 3.28),
            ("rnn", "reverse mode", "baseline", 47.93),
            ("rnn", "a sample of .1", "different 0.1", 7.01),
        )
    ]
    + [
        Claim(
            "Fig. 2",
            "variance of path sampling with depth",
            "rad_paths-paper",
            "constant for independent paths, exponential for interleaved ones",
            _path_variance,
        ),
        *(
            Claim(
                "Fig. 5",
                f"gradient noise in {layers} of a ConvNet, after 500 steps",
                "rad_noise-paper",
                "samples have significantly less variance than a smaller batch of equal memory",
                _noise(last),
            )
            for layers, last in (("the convolutions", False), ("the last layer, which is dense,", True))
        ),
        Claim(
            "Fig. 6",
            "the MLP on MNIST after 20,000 steps at equal memory",
            "rad_training-mlp",
            "the loss decreases faster with samples than with a smaller batch; one sample for all examples is worse",
            _loss_at_equal_memory(("different", "reduced"), ("different", "same")),
        ),
        Claim(
            "Fig. 6",
            "the ConvNet on a part of CIFAR-10 after 800 steps at equal memory",
            "rad_training-convnet",
            "the loss decreases faster with samples than with a smaller batch, with one sample for all examples, too",
            _loss_at_equal_memory(("different", "reduced"), ("same", "reduced")),
        ),
        Claim(
            "Fig. 6",
            "the RNN on MNIST's pixels one by one after 20,000 steps at equal memory",
            "rad_training-rnn",
            "the loss decreases as fast with samples, other ones at each time step, as with a smaller batch",
            _loss_at_equal_memory(("different", "reduced")),
        ),
        Claim(
            "Fig. 7",
            "control of a reaction-diffusion equation",
            "rad_pde-paper",
            "small samples train as well",
            _pde_losses,
            same=True,
        ),
    ],
    "Gradient tracing": [
        Claim(
            "Fig. 1.3",
            "exponent of time against the size of the graph, max-product, batches",
            "tracing_scaling-paper",
            Value(1.0),
            lambda r: Value(r["batch max-product"]["exponent"], r["batch max-product"]["exponent_standard_error"]),
        ),
    ],
    "Persistent evolution strategies": [
        Claim(
            "influence balancing",
            "truncations of one step",
            "outer_training-paper",
            "reverse mode diverges, PES is unbiased and comes near the best theta",
            _influence_balancing,
        ),
    ],
    "JPC: predictive coding": [
        Claim(
            "notebook 'Discriminative predictive coding'",
            f"test accuracy on MNIST after {steps} steps, %",
            "predictive_coding-paper",
            Value(*published),
            _accuracy(steps),
            "higher",
        )
        for steps, published in {100: (93.31, 0.51), 200: (95.46, 0.18), 300: (95.90, 0.12)}.items()
    ],
}
