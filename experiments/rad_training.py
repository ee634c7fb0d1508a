"""Training with randomized memory (Oktay et al., 2021, Fig. 6, 8, 9 and 10).

An MLP on MNIST, a ConvNet on CIFAR-10, the identity RNN on sequential MNIST or a small transformer on MNIST's rows,
trained by reverse mode, by `ap.randomize` with the samplers or with rounding, and with a smaller batch of the same
memory. Adam with the paper's tuned learning rates and weight decays (SGD at 1e-4 with clipping at 1 for the
RNN); the rate falls by .6 every tenth of the run; each seed trains on its own bootstrap of the training set. A seed's
runs have the same start, bootstrap and batches whatever the method, so differences of accuracy are of pairs. Figures
are over seeds. Along the way the noise of the method is measured: |g - exact g| / |exact g| on one batch, root mean
square over draws, in all and by layer.

    python -m experiments.rad_training
    python -m experiments.rad_training --preset paper

The paper trains the MLP for 20,000 steps and the ConvNet for 100,000; the preset paper is its
setting with fewer steps (see PAPER), and MNIST for the ConvNet as well (`--data cifar10` is the paper's): what a busy
core does in half an hour, and differences of .3 % can be seen there.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from experiments import harness, images, rad_networks

# Learning rate and weight decay that the paper's search found.
TUNED = {
    "mlp": {
        "baseline": (1.35e-3, 4.1e-7),
        "same": (4.52e-4, 4.1e-6),
        "different": (9.34e-4, 1.3e-6),
        "project": (5.27e-4, 1.0e-3),
        "reduced": (6.45e-4, 5.7e-5),
    },
    "convnet": {
        "baseline": (1.24e-3, 4.3e-5),
        "same": (1.16e-3, 1e-3),
        "different": (2.14e-3, 7.5e-4),
        "project": (4.35e-4, 5.5e-5),
        "reduced": (4.3e-4, 2e-6),
    },
    "transformer": {"baseline": (1e-3, 1e-4), "different": (1e-3, 1e-4)},
}


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      networks: of "mlp", "convnet", "rnn" and "transformer".
      steps: of training, for each network.
      data: for each network: "mnist" or "cifar10" where they are at hand, or "digits".
      methods: "baseline", "reduced", those of `rad_networks.methods`, "rounding 8", "rounding 4", "rounding 2".
      fraction: of the entries kept.
      batch: examples.
      reduced: examples of the smaller batch.
      seeds: runs of each method.
      evaluations: how often train and test sets are looked at.
      examples: of the training set, 0 for all.
      draws: for the noise, at each evaluation.
    """

    networks: tuple[str, ...] = ("mlp",)
    steps: tuple[int, ...] = (300,)
    data: tuple[str, ...] = ("digits",)
    methods: tuple[str, ...] = ("baseline", "reduced", "different", "same", "rounding 4", "rounding 2")
    fraction: float = 0.1
    batch: int = 150
    reduced: int = 22
    seeds: int = 2
    evaluations: int = 6
    examples: int = 0
    draws: int = 4

    def __post_init__(self):
        """Refuses what cannot be trained."""
        if not set(self.networks) <= set(rad_networks.NAMES):
            raise ValueError(f"networks are {rad_networks.NAMES}, got {self.networks}")
        if {len(self.steps), len(self.data)} != {len(self.networks)}:
            raise ValueError("one number of steps and one data set for each network")
        if min(self.steps) < self.evaluations or self.seeds < 1:
            raise ValueError("not fewer steps than evaluations; seeds at least 1")


PAPER = Config(
    networks=("mlp", "transformer", "convnet"),
    steps=(4000, 300, 150),
    data=("mnist", "mnist", "mnist"),
    methods=("baseline", "rounding 4", "rounding 2", "reduced"),
    seeds=5,
    evaluations=5,
)


def cells(config: Config) -> list[harness.Cell]:
    """Seed by seed, so that a run cut short has all methods."""
    return [
        {"network": network, "method": method, "run": run}
        for network in config.networks
        for run in range(config.seeds)
        for method in config.methods
    ]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Losses and accuracies along one run, and the method's noise."""
    network, method = cell["network"], cell["method"]
    index = config.networks.index(network)
    data = images.load(config.data[index])
    rng = np.random.default_rng([config.seed, cell["run"]])
    pool = len(data.train) if config.examples == 0 else config.examples
    boot = rng.integers(pool, size=pool)
    x, y = jnp.asarray(data.train[boot]), jnp.asarray(data.train_labels[boot])
    steps = config.steps[index]
    loss, exact = (rad_networks.method_loss(network, m, config.fraction) for m in (method, "baseline"))
    size = config.reduced if method == "reduced" else config.batch
    start = jax.random.key(int(rng.integers(2**31)))
    params = rad_networks.parameters(network, start, x.shape[1:])
    optimizer = _optimizer(network, method, steps)

    # A call for each step, not a scan: XLA's convolutions on the CPU are 7 to 64 times slower inside a loop.
    @jax.jit
    def step(params, state, pick, noise):
        chosen = jax.random.randint(pick, (size,), 0, len(x))
        value, gradient = jax.value_and_grad(loss, argnums=1)(noise, params, x[chosen], y[chosen])
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def gradients(params, noise, pick):
        chosen = jax.random.randint(pick, (config.batch,), 0, len(x))
        return [jax.grad(f, argnums=1)(noise, params, x[chosen], y[chosen]) for f in (exact, loss)]

    def noise(params, key):
        # Squared errors over squared gradients, by layer and in all.
        pick, key = jax.random.split(key)
        found = []
        for k in jax.random.split(key, config.draws):
            one, two = (rad_networks.layers(g) for g in gradients(params, k, pick))
            squares = {name: (np.sum((one[name] - two[name]) ** 2), np.sum(one[name] ** 2)) for name in one}
            squares["all"] = tuple(np.sum(list(squares.values()), 0))
            found.append({str(name): float(a / b) for name, (a, b) in squares.items()})
        return {name: float(np.mean([f[name] for f in found])) for name in found[0]}

    run = jax.jit(rad_networks.logits(network))

    def evaluate(images, labels):
        scores = np.concatenate([np.asarray(run(params, images[i : i + 500])) for i in range(0, len(images), 500)])
        return float(np.mean(scores.argmax(1) == np.asarray(labels)))

    state = optimizer.init(params)
    every = steps // config.evaluations
    noisy = method not in ("baseline", "reduced")
    curve, noises = [], [noise(params, jax.random.key(seed))] if noisy else []
    picks = jax.random.split(jax.random.fold_in(start, 1), config.evaluations * every)
    draws = jax.random.split(jax.random.key(seed), config.evaluations * every)
    for i in range(config.evaluations):
        values = []
        for t in range(i * every, (i + 1) * every):
            params, state, value = step(params, state, picks[t], draws[t])
            values.append(value)
        # All of the test set at the end only.
        test = slice(None if i + 1 == config.evaluations else 2000)
        accuracies = evaluate(x[:2000], y[:2000]), evaluate(data.test[test], data.test_labels[test])
        curve.append([(i + 1) * every, float(np.mean(values)), *accuracies])
        if noisy:
            noises.append(noise(params, jax.random.fold_in(jax.random.key(seed), i)))
    return {"curve": curve, "noise": noises, "data": data.name}


def _optimizer(network: str, method: str, steps: int) -> optax.GradientTransformation:
    if network == "rnn":
        return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-4))
    tuned = TUNED[network]
    rate, decay = tuned.get(method, tuned["baseline"] if method.startswith("rounding") else tuned["different"])
    schedule = optax.exponential_decay(rate, max(steps // 10, 1), 0.6, staircase=True)
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(schedule))


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Final accuracies, over seeds, and their difference from the baseline's of the same seed."""
    found = {(c["network"], c["method"], c["run"]): r for c, r in records}
    rows, lines = [], []

    def error(v):
        return float(np.std(v, ddof=1) / np.sqrt(len(v))) if len(v) > 1 else None

    for network, steps in zip(config.networks, config.steps, strict=True):
        data = found[network, config.methods[0], 0]["data"]
        lines += [f"{network} on {data}, {steps} steps: test accuracy, less than baseline in pairs (%), noise / signal"]
        for method in config.methods:
            runs = [found[network, method, run] for run in range(config.seeds)]
            last = np.array([r["curve"][-1] for r in runs])
            base = last
            if "baseline" in config.methods:
                base = np.array([found[network, "baseline", run]["curve"][-1] for run in range(config.seeds)])
            row = {
                "network": network,
                "data": data,
                "steps": steps,
                "method": method,
                "train_loss": last[:, 1].mean(),
                "train_accuracy": last[:, 2].mean(),
                "test_accuracy": last[:, 3].mean(),
                "test_accuracy_se": error(last[:, 3]),
                "less_than_baseline": (base[:, 3] - last[:, 3]).mean(),
                "less_than_baseline_se": error(base[:, 3] - last[:, 3]),
                "noise_over_signal_start": _noise(runs, 0, "all"),
                "noise_over_signal_end": _noise(runs, -1, "all"),
                "noise_over_signal_end_by_layer": {
                    layer: _noise(runs, -1, layer) for layer in (runs[0]["noise"] or [{}])[-1]
                },
                "seeds": config.seeds,
            }
            rows.append(row)
            less = f"{100 * row['less_than_baseline']:6.2f} ± {100 * (row['less_than_baseline_se'] or 0):.2f}"
            lines.append(
                f"{method:12} {100 * row['test_accuracy']:6.2f} ± {100 * (row['test_accuracy_se'] or 0):.2f}  "
                f"{'' if method == 'baseline' else less:13}  "
                + (
                    f"{row['noise_over_signal_start']:.3f} to {row['noise_over_signal_end']:.3f}"
                    * bool(runs[0]["noise"])
                )
            )
    figure = Figure(figsize=(11, 3.2 * len(config.networks)), layout="constrained")
    for axes, network in zip(figure.subplots(len(config.networks), 3, squeeze=False), config.networks, strict=True):
        for number, method in enumerate(config.methods):
            runs = [found[network, method, run] for run in range(config.seeds)]
            mean = np.mean([r["curve"] for r in runs], 0)
            axes[0].plot(mean[:, 0], mean[:, 1], f"C{number}", label=method)
            row = next(r for r in rows if (r["network"], r["method"]) == (network, method))
            less, spread = row["less_than_baseline"], row["less_than_baseline_se"]
            axes[1].errorbar(number, 100 * less, 100 * (spread or 0), fmt="o", color=f"C{number}")
            if runs[0]["noise"]:
                values = [_noise(runs, i, "all") for i in range(len(mean) + 1)]
                axes[2].plot([0, *mean[:, 0]], values, f"C{number}")
        axes[0].set(yscale="log", xlabel="step", ylabel="training loss", title=network)
        for percent in (0, 0.3, 1):
            axes[1].axhline(percent, color="k", alpha=0.3, lw=0.8)
        axes[1].set_xticks(range(len(config.methods)), config.methods, rotation=20, fontsize=7)
        axes[1].set_ylabel("test accuracy lost, %")
        axes[2].set(yscale="log", xlabel="step", ylabel="noise / signal of a gradient")
        axes[0].legend(fontsize=7, frameon=False)
    return harness.Report({}, rows, "\n".join(lines), figure)


def _noise(runs: list[dict[str, Any]], evaluation: int, layer: str) -> float:
    """Root mean square over draws and runs of |g - exact g| / |exact g|."""
    squares = [r["noise"][evaluation][layer] for r in runs if r["noise"]]
    return float(np.sqrt(np.mean(squares))) if squares else 0.0


if __name__ == "__main__":
    harness.main()
