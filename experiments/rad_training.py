"""Training with randomized memory (Oktay et al., 2021, Fig. 6, 8, 9 and 10).

An MLP on MNIST, a ConvNet on CIFAR-10 or the identity RNN on sequential MNIST, trained by reverse mode, the samplers,
rounding (through `ap.randomize` of the unchanged network) and a smaller batch of the same memory. Adam with the
paper's tuned learning rates and weight decays (SGD at 1e-4 with clipping at 1 for the RNN); the rate falls by .6
every tenth of the run; each seed trains on its own bootstrap of the training set. Figures are over seeds.

    python -m experiments.rad_training
    python -m experiments.rad_training --preset paper --network convnet
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from experiments import harness, images, rad_networks

DATA = {"mlp": "mnist", "convnet": "cifar10", "rnn": "mnist"}
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
}


@dataclasses.dataclass(frozen=True)
class Config(harness.Config):
    """Options of this experiment.

    Attributes:
      network: "mlp", "convnet" or "rnn".
      data: "auto" for the paper's data set where it is at hand; "digits" for scikit-learn's.
      methods: "baseline", "reduced", those of `rad_networks.methods`, "rounding 8", "rounding 4", "rounding 2".
      fraction: of the entries kept.
      batch: examples.
      reduced: examples of the smaller batch.
      steps: of training.
      seeds: runs of each method.
      evaluations: how often train and test sets are looked at.
      examples: of the training set, 0 for all.
    """

    network: str = "mlp"
    data: str = "digits"
    methods: tuple[str, ...] = ("baseline", "reduced", "different", "same", "rounding 4", "rounding 2")
    fraction: float = 0.1
    batch: int = 150
    reduced: int = 22
    steps: int = 300
    seeds: int = 2
    evaluations: int = 6
    examples: int = 0

    def __post_init__(self):
        """Refuses what cannot be trained."""
        if self.network not in rad_networks.NAMES or self.seeds < 1 or self.steps < self.evaluations:
            raise ValueError(f"networks are {rad_networks.NAMES}; seeds at least 1; steps not fewer than evaluations")


PAPER = Config(
    data="auto",
    methods=("baseline", "reduced", "different", "same", "project", "rounding 8", "rounding 4", "rounding 2"),
    steps=20_000,
    seeds=5,
    evaluations=20,
)


def cells(config: Config) -> list[harness.Cell]:
    """Seed by seed, so that a run cut short has all methods."""
    return [
        {"network": config.network, "method": m, "run": seed} for seed in range(config.seeds) for m in config.methods
    ]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Losses and accuracies along one run. The start and the bootstrap depend on the run only, not on the method."""
    data = images.load(DATA[config.network] if config.data == "auto" else config.data)
    rng = np.random.default_rng([config.seed, cell["run"]])
    pool = len(data.train) if config.examples == 0 else config.examples
    boot = rng.integers(pool, size=pool)
    x, y = jnp.asarray(data.train[boot]), jnp.asarray(data.train_labels[boot])
    method = cell["method"]
    loss = rad_networks.method_loss(config.network, method, config.fraction)
    size = config.reduced if method == "reduced" else config.batch
    params = rad_networks.parameters(config.network, jax.random.key(cell["run"]), x.shape[1:])
    optimizer = _optimizer(config, method)

    @jax.jit
    def train(params, state, keys):
        def step(carry, key):
            params, state = carry
            pick, noise = jax.random.split(key)
            chosen = jax.random.randint(pick, (size,), 0, len(x))
            value, gradient = jax.value_and_grad(loss, argnums=1)(noise, params, x[chosen], y[chosen])
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, state), keys)

    run = jax.jit(rad_networks.logits(config.network, None))

    def evaluate(images, labels):
        scores = np.concatenate(
            [np.asarray(run(jax.random.key(0), params, images[i : i + 500])) for i in range(0, len(images), 500)]
        )
        return float(np.mean(scores.argmax(1) == np.asarray(labels)))

    state = optimizer.init(params)
    every = config.steps // config.evaluations
    curve = []
    for i, key in enumerate(jax.random.split(jax.random.key(seed), config.evaluations)):
        (params, state), values = train(params, state, jax.random.split(key, every))
        train_accuracy = evaluate(x[:5000], y[:5000])
        curve.append([(i + 1) * every, float(jnp.mean(values)), train_accuracy, evaluate(data.test, data.test_labels)])
    return {"curve": curve, "data": data.name}


def _optimizer(config: Config, method: str) -> optax.GradientTransformation:
    tenth = max(config.steps // 10, 1)
    if config.network == "rnn":
        return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-4))
    tuned = TUNED[config.network]
    rate, decay = tuned.get(method, tuned["baseline"] if method.startswith("rounding") else tuned["different"])
    schedule = optax.exponential_decay(rate, tenth, 0.6, staircase=True)
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(schedule))


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    """Final accuracies, over seeds, and their difference from the baseline's of the same seed."""
    runs = {(c["method"], c["run"]): np.array(r["curve"]) for c, r in records}
    rows = []
    for method in config.methods:
        last = np.array([runs[method, s][-1] for s in range(config.seeds)])
        base = (
            np.array([runs["baseline", s][-1] for s in range(config.seeds)]) if "baseline" in config.methods else last
        )

        def error(v):
            return float(np.std(v, ddof=1) / np.sqrt(len(v))) if len(v) > 1 else None

        rows.append(
            {
                "method": method,
                "train_loss": last[:, 1].mean(),
                "train_accuracy": last[:, 2].mean(),
                "test_accuracy": last[:, 3].mean(),
                "test_accuracy_se": error(last[:, 3]),
                "less_than_baseline": (base[:, 3] - last[:, 3]).mean(),
                "less_than_baseline_se": error(base[:, 3] - last[:, 3]),
                "seeds": config.seeds,
            }
        )
    lines = [
        f"{config.network} on {records[0][1]['data']}, {config.steps} steps: test accuracy, and less than baseline, %"
    ]
    lines += [
        f"{r['method']:12} {100 * r['test_accuracy']:6.2f} ± {100 * (r['test_accuracy_se'] or np.nan):.2f}  "
        f"{100 * r['less_than_baseline']:6.2f} ± {100 * (r['less_than_baseline_se'] or np.nan):.2f}"
        for r in rows
    ]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in config.methods:
        mean = np.mean([runs[method, s] for s in range(config.seeds)], 0)
        left.plot(mean[:, 0], mean[:, 1], label=method)
        right.plot(mean[:, 0], mean[:, 3], label=method)
    left.set(yscale="log", xlabel="step", ylabel="training loss")
    right.set(xlabel="step", ylabel="test accuracy")
    right.legend(fontsize=7, frameon=False)
    return harness.Report({"data": records[0][1]["data"]}, rows, "\n".join(lines), figure)


EXPERIMENT = harness.Experiment(
    "rad_training",
    "Training with randomized memory (RAD, Fig. 6 to 10).",
    {"quick": Config(), "paper": PAPER},
    cells,
    measure,
    report,
)


if __name__ == "__main__":
    harness.main(EXPERIMENT)
