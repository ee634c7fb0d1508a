"""Training with randomized memory (Oktay et al., 2021, Fig. 6, 8, 9 and 10).

An MLP on MNIST, a ConvNet on CIFAR-10, the identity RNN on sequential MNIST or a small transformer on MNIST's rows,
trained by reverse mode, by `ap.randomize` with the samplers or with rounding, and with a smaller batch.
Adam, the rate falls by .6 every tenth of the run (SGD at 1e-4 with clipping at 1 for the RNN). Learning rate and weight
decay are chosen for each method by a validation split. Each seed trains on its own bootstrap of the training set; a
seed's runs have the same start, bootstrap and batches whatever the method, so differences of accuracy are of pairs.
Along the way the noise of the method is measured: |g - exact g| / |exact g| on one batch, root mean square over draws,
in all and by layer.

    python -m experiments.rad_training
    python -m experiments.rad_training --preset paper --networks mlp --steps 20000 --data mnist

The preset paper is the paper's: 20,000 steps of the MLP, 100,000 of the ConvNet, 200,000 of the RNN; batch 150; the
methods of Figure 6, "project" of Figure 8, the fractions of Figure 10 with the rate and decay found for "different";
20 pairs of rate and decay, log-uniform, for each method; 5,000 validation images; 5 bootstraps. It differs from the
paper in this:

* the 20 pairs, the same for each method, are trained for a tenth of the steps, with the rate falling in a tenth of the
  time; the best three, and the pair that the paper found, are trained in full. The paper trains all 20 in full;
* "reduced" has as many examples as fit into the memory of "different", both measured (residual bytes of `jax.vjp`): 16
  for the MLP. Reverse mode keeps the derivatives of relu, too, which the paper computes anew: by its count the samples
  have the memory of 18. "reduced published" has the paper's 22 (20 for the ConvNet, 21 for the RNN), tuned as
  "reduced"; its code has 20 for the MLP and 22 for the ConvNet;
* the RNN has 5 bootstraps, as the others; the paper trains it 3 times on all images;
* in a convolution "different" draws positions for each example, its code for each example and channel;
* the RNN has one bias between states, its code two;
* Figure 9's "different project" is missing;
* images are all that are at hand: a CIFAR-10 of fewer than 50,000 is described as such in the results;
* training loss is drawn as the mean over the batches since the last point, and given of 5,000 training images; its
  code has that of the whole training set, every 400 steps (every 4,000, the paper says of the RNN);
* "rounding" is not in the paper.
"""

import bisect
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from apgrad import meta
from experiments import harness
from experiments.parts import rad_networks
from experiments.parts.rad_networks import BATCH

PUBLISHED_BATCH = {"mlp": 22, "convnet": 20, "rnn": 21, "transformer": 22}
# Learning rate and weight decay that the paper's search found.
FOUND = {
    "mlp": ((1.35e-3, 4.1e-7), (4.52e-4, 4.1e-6), (9.34e-4, 1.3e-6), (5.27e-4, 1.0e-3), (6.45e-4, 5.7e-5)),
    "convnet": ((1.24e-3, 4.3e-5), (1.16e-3, 1e-3), (2.14e-3, 7.5e-4), (4.35e-4, 5.5e-5), (4.3e-4, 2e-6)),
}
SEARCHED: tuple[str, ...] = ("baseline", "same", "different", "project", "reduced")
TUNED: dict[str, Any] = {network: dict(zip(SEARCHED, pairs, strict=True)) for network, pairs in FOUND.items()}
TUNED["transformer"] = {"baseline": (1e-3, 1e-4), "different": (1e-3, 1e-4)}


class Config(harness.Config, least={"pairs": 0, "finalists": 0}, among={"networks": rad_networks.NAMES}):
    """Options of this experiment."""

    networks: tuple[str, ...] = ("mlp",)  # of "mlp", "convnet", "rnn" and "transformer".
    steps: tuple[int, ...] = (300,)  # of training, for each network.
    data: tuple[str, ...] = ("digits",)  # for each network: "mnist" or "cifar10" where they are at hand, or "digits".
    # "baseline", "reduced", "reduced published", those of `rad_networks.SAMPLERS`, each also with another fraction
    # ("different 0.5"), "rounding 8", "rounding 4", "rounding 2".
    methods: tuple[str, ...] = ("baseline", "reduced", "different", "rounding 4")
    pairs: int = 3  # of rate and decay that are tried for each method; with none, those that the paper found are used.
    finalists: int = 1  # of the pairs, trained in full, as the paper's pair is.
    validation: int = 300  # examples of the training set that choose among pairs.
    seeds: int = 2  # runs of each method.
    evaluations: int = 6  # how often train and test sets are looked at.
    draws: int = 4  # for the noise, at each evaluation.

    def __post_init__(self):
        super().__post_init__()
        if {len(self.steps), len(self.data)} != {len(self.networks)}:
            raise ValueError("one number of steps and one data set for each network")
        if min(self.steps) < self.evaluations:
            raise ValueError("not fewer steps than evaluations")
        if self.pairs and not 1 <= self.finalists <= self.pairs:
            raise ValueError(f"1 to {self.pairs} finalists, as there are so many pairs; got {self.finalists}")


PARTIAL = True
METHODS = ("baseline", "different", "reduced", "same", "project", "reduced published", "rounding 4", "rounding 2")
METHODS += ("different 0.05", "different 0.3", "different 0.5", "different 0.8")
TRAINED: dict[str, Any] = {"networks": ("mlp", "convnet", "rnn"), "steps": (20_000, 100_000, 200_000)}
TRAINED |= {"data": ("mnist", "cifar10", "mnist"), "methods": METHODS}
PAPER = Config(**TRAINED, pairs=20, finalists=3, validation=5000, seeds=5, evaluations=20)


def cells(config: Config) -> list[harness.Cell]:
    """The searches, then seed by seed, so that a run cut short has all methods."""
    cells = []
    for network in config.networks:
        searched = dict.fromkeys(map(_tuned_as, config.methods)) if _is_searched(config, network) else ()
        cells += harness.grid(network=[network], search=searched)
        for run in range(config.seeds):
            cells += harness.grid(network=[network], method=config.methods, run=[run])
    return cells


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    network = cell["network"]
    data = meta.data.load_bytes(config.data[config.networks.index(network)], or_digits=True)
    if "search" in cell:
        return _search(config, cell, data)
    method, steps = cell["method"], config.steps[config.networks.index(network)]
    rng = np.random.default_rng([config.seed, cell["run"]])
    boot = rng.integers(len(data.x_train), size=len(data.x_train))
    pair = TUNED.get(network, {}).get(_tuned_as(method), TUNED.get(network, {}).get("baseline", (1e-4, 0.0)))
    if _is_searched(config, network):
        search = {"network": network, "search": _tuned_as(method)}
        pair = harness.finished(config, search)["chosen"]
    start = jax.random.key(int(rng.integers(2**31)))
    sets = (data.x_train[boot], data.y_train[boot], data.x_test, data.y_test)
    how, saved = (steps, pair, config.evaluations, config.draws), harness.checkpoint(config, cell)
    result = train(network, method, *how, (start, jax.random.key(seed)), sets, saved)
    size = size_of(network, method, shape := data.x_train.shape[1:])
    result |= {"rate_and_decay": pair, "data": data.description, "batch": size}
    return result | {"residual_bytes": rad_networks.residual_bytes(network, method, size, shape)}


def _search(config: Config, cell: harness.Cell, data: meta.data.Images) -> dict[str, Any]:
    """The pair of rate and decay with the highest validation accuracy; see the top of the file."""
    network, method = cell["network"], cell["search"]
    steps = config.steps[config.networks.index(network)]
    rng = np.random.default_rng([config.seed, 2**20])
    order = rng.permutation(len(data.x_train))
    held, rest = order[: config.validation], order[config.validation :]
    sets = (data.x_train[rest], data.y_train[rest], data.x_train[held], data.y_train[held])
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))))
    drawn = 10 ** rng.uniform([-6, -7], [-2, -3], size=(config.pairs, 2))
    tuned = TUNED[network]
    pairs = [tuple(map(float, pair)) for pair in drawn] + [tuned.get(method, tuned["baseline"])]
    checkpoint = harness.checkpoint(config, cell)
    (scores,) = checkpoint.load((np.zeros(0),))

    def score(pair, steps):
        # A diverged run's scores are argmaxes of NaN, an accuracy near 10 %.
        return train(network, method, steps, pair, 1, 0, keys, sets, None)["curve"][-1][-1]

    def finalists():
        # Short runs favour high rates, so the paper's pair, which is the last, needs none to be a finalist.
        best = np.argsort(-scores[: config.pairs], kind="stable")[: config.finalists]
        return [*map(int, best), config.pairs]

    for i in range(len(scores), config.pairs + config.finalists + 1):
        long = i >= config.pairs
        pair = pairs[finalists()[i - config.pairs] if long else i]
        scores = np.append(scores, score(pair, steps if long else max(steps // 10, 1)))
        checkpoint.save((scores,))
    short, full = np.split(scores, [config.pairs])
    found = {"pairs": pairs, "short_accuracies": short, "finalists": finalists(), "full_accuracies": full}
    return found | {"chosen": pairs[finalists()[int(np.argmax(full))]]}


def _is_searched(config: Config, network: str) -> bool:
    return config.pairs > 0 and network != "rnn"


def _tuned_as(method: str) -> str:
    """The method whose rate and decay it takes: the fractions take those of the method, all smaller batches too."""
    return method if method.startswith("rounding") else method.split()[0]


@functools.cache
def reduced(network: str, shape: tuple[int, ...]) -> int:
    """The largest batch of reverse mode that remembers no more than "different" of a batch; 1 at least."""
    budget = rad_networks.residual_bytes(network, "different", BATCH, shape)
    # Bytes rise with the examples: the last size that fits.
    measured = lambda n: rad_networks.residual_bytes(network, "baseline", n, shape)
    return max(1, bisect.bisect_right(range(1, BATCH + 1), budget, key=measured))


@functools.cache
def _compiled(network: str, method: str, size: int, steps: int) -> Any:
    """The compiled step, pairs of exact and noisy gradients, and scores; cached, for all pairs and seeds."""
    loss, exact = (rad_networks.method_loss(network, m) for m in (method, "baseline"))

    # A call for each step, not a scan: XLA's convolutions on the CPU are 7 to 64 times slower inside a loop; nor many
    # seeds in one program: products of matrices take nearly all of the time.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, total, x, y, start, noise, t, rate, decay):
        chosen = jax.random.randint(jax.random.fold_in(start, t), (size,), 0, len(x))
        key = jax.random.fold_in(noise, t)
        value, gradient = jax.value_and_grad(loss, argnums=1)(key, params, x[chosen], y[chosen])
        updates, state = _optimizer(network, steps, rate, decay).update(gradient, state, params)
        return optax.apply_updates(params, updates), state, total + value

    @jax.jit
    def gradients(params, x, y, noise, pick):
        chosen = jax.random.randint(pick, (BATCH,), 0, len(x))
        return [jax.grad(f, argnums=1)(noise, params, x[chosen], y[chosen]) for f in (exact, loss)]

    return step, gradients, jax.jit(rad_networks.logits(network))


def _optimizer(network: str, steps: int, rate: Any, decay: Any) -> optax.GradientTransformation:
    if network == "rnn":
        return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))
    schedule = optax.exponential_decay(rate, max(steps // 10, 1), 0.6, staircase=True)
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(schedule))


def size_of(network: str, method: str, shape: tuple[int, ...]) -> int:
    """Examples of a batch, of images of a shape."""
    if method == "reduced published":
        return PUBLISHED_BATCH[network]
    return reduced(network, shape) if method == "reduced" else BATCH


def train(
    network: str, method: str, steps: int, pair: Any, evaluations: int, draws: int, keys: Any, sets: Any, saved: Any
) -> dict[str, Any]:
    """A training by a rate and a decay on the first two arrays of `sets`, looked at on them and on the last two.

    It goes on where it was saved, if `saved` is a checkpoint; the noise has so many draws at each look. The keys are
    of the start and the batches, and of the noise.

    Returns:
      A row of "curve" is the step, the mean loss of the batches since the last row, loss and accuracy of the training
      set (5,000 of it) and of the test set (all of it in the last row, 2,000 before); "noise" has for each of them, and
      the start, the squared noise over signal by layer and in all.
    """
    (start, key), x, y = keys, jnp.asarray(sets[0]), jnp.asarray(sets[1])
    step, gradients, scores = _compiled(network, method, size_of(network, method, x.shape[1:]), steps)
    params = rad_networks.parameters(network, start, x.shape[1:])
    rate, decay = (jnp.float32(v) for v in pair)
    state = _optimizer(network, steps, rate, decay).init(params)
    every = steps // evaluations
    names = [*(str(name) for name in rad_networks.layers(params)), "all"]
    noisy = draws > 0 and not method.startswith(("baseline", "reduced"))

    def noise(params, key):
        pick, key = jax.random.split(key)
        found = []
        for k in jax.random.split(key, draws):
            one, two = (rad_networks.layers(g) for g in gradients(params, x, y, k, pick))
            squares = np.array([(np.sum((one[n] - two[n]) ** 2), np.sum(one[n] ** 2)) for n in one])
            found.append([*(squares[:, 0] / squares[:, 1]), squares[:, 0].sum() / squares[:, 1].sum()])
        return np.mean(found, 0)[None]

    def evaluate(images, labels):
        parts = [scores(params, images[i : i + 500]) for i in range(0, len(images), 500)]
        logs = np.concatenate([np.asarray(jax.nn.log_softmax(p)) for p in parts])
        labels = np.asarray(labels)
        return -logs[np.arange(len(labels)), labels].mean(), (logs.argmax(1) == labels).mean()

    begun = (params, state, np.zeros((0, 6)), noise(params, key) if noisy else np.zeros((0, len(names))))
    params, state, curve, noises = saved.load(begun) if saved else begun
    for i in range(len(curve), evaluations):
        total = jnp.zeros(())
        for t in range(i * every, (i + 1) * every):
            params, state, total = step(params, state, total, x, y, start, key, t, rate, decay)
        test = slice(None if i + 1 == evaluations else 2000)
        row = [(i + 1) * every, float(total) / every, *evaluate(x[:5000], y[:5000])]
        curve = np.append(curve, [[*row, *evaluate(sets[2][test], sets[3][test])]], 0)
        if noisy:
            noises = np.append(noises, noise(params, jax.random.fold_in(key, i)), 0)
        if saved:
            saved.save((params, state, curve, noises))
    return {"curve": curve.tolist(), "noise": [dict(zip(names, n, strict=True)) for n in noises.tolist()]}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    found = {(c["network"], c["method"], c["run"]): r for c, r in records if "run" in c}
    searches = {f"{c['network']} {c['search']}": r["chosen"] for c, r in records if "search" in c}
    rows, described, curves, noises = [], {}, {}, {}
    if not found:
        raise SystemExit("searches are finished, but no run is")
    for (network, steps), method in itertools.product(zip(config.networks, config.steps, strict=True), config.methods):
        runs = {run: r for (n, m, run), r in found.items() if (n, m) == (network, method)}
        if not runs:
            continue
        last, first = np.array([r["curve"][-1] for r in runs.values()]), next(iter(runs.values()))
        described[network] = harness.common(r for (n, *_), r in found.items() if n == network)
        noises[network, method] = [_noise(runs.values(), i, "all") for i in range(len(first["noise"]))]
        curves[network, method] = np.mean([r["curve"] for r in runs.values()], 0)
        row = {"network": network, "data": described[network], "steps": steps, "method": method}
        row |= {name: first[name] for name in ("batch", "residual_bytes", "rate_and_decay")} | {"seeds": len(runs)}
        for i, name in enumerate(("batch_loss", "train_loss", "train_accuracy", "test_loss", "test_accuracy"), 1):
            row[name] = last[:, i].mean()
            if name in ("train_loss", "test_accuracy"):
                row[f"{name}_se"] = harness.standard_error(last[:, i])
        for name, other, sign in (("less_than_baseline", "baseline", 1), ("more_than_reduced", "reduced", -1)):
            both = [(found[network, other, i], r) for i, r in runs.items() if (network, other, i) in found]
            differences = sign * np.array([a["curve"][-1][5] - b["curve"][-1][5] for a, b in both])
            row |= {name: differences.mean() if both else None, f"{name}_se": harness.standard_error(differences)}
        row |= {f"noise_over_signal_{end}": _noise(runs.values(), i, "all") for end, i in (("start", 0), ("end", -1))}
        by_layer = {layer: _noise(runs.values(), -1, layer) for layer in (first["noise"] or [{}])[-1]}
        rows.append(row | {"noise_over_signal_end_by_layer": by_layer})
    columns = ("train_loss", "test_accuracy", "less_than_baseline", "more_than_reduced")
    ends = ("noise_over_signal_start", "noise_over_signal_end")
    table = harness.table(rows, "network", "method", "batch", "residual_bytes", *columns, *ends)
    losses = {f"{n} {m}": [[int(step), float(loss)] for step, loss in c[:, :2]] for (n, m), c in curves.items()}
    figures = {"data": described, "searches": searches, "batch_loss_by_step": losses}
    return harness.Report(figures, rows, table, _figure(rows, curves, noises))


def _figure(rows, curves, noises):
    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure, panels = harness.panels(len(networks), 4, (14, 3.2 * len(networks)))
    for (losses, errors, lost, noise), network in zip(panels, networks, strict=True):
        drawn = [row for row in rows if row["network"] == network]
        for number, row in enumerate(drawn):
            mean, found = (of[network, row["method"]] for of in (curves, noises))
            style: Any = {"color": f"C{number % 10}", "ls": "-" if number < 10 else "--"}
            losses.plot(mean[:, 0], mean[:, 1], label=row["method"], **style)
            errors.plot(mean[:-1, 0], 1 - mean[:-1, 5], **style)
            # The last row is of other images than those before it, so no line leads to it.
            errors.plot(mean[-1, 0], 1 - mean[-1, 5], "o", color=style["color"])
            if row["less_than_baseline"] is not None:
                less, spread = row["less_than_baseline"], row["less_than_baseline_se"]
                lost.errorbar(number, 100 * less, 100 * (spread or 0), fmt="o", color=style["color"])
            if found:
                noise.plot([0, *mean[:, 0]], found, **style)
        losses.set(yscale="log", xlabel="step", ylabel="loss of the batches", title=network)
        errors.set(yscale="log", xlabel="step", ylabel="test error", title="lines: the first 2,000 images; dots: all")
        lost.axhline(0, color="k", alpha=0.3, lw=0.8)
        lost.set_xticks(range(len(drawn)), [row["method"] for row in drawn], rotation=90, fontsize=7)
        lost.set_ylabel("test accuracy lost, %")
        noise.set(yscale="log", xlabel="step", ylabel="noise / signal of a gradient")
        noise.legend(*losses.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1, 1.05))
    return figure


def _noise(runs, evaluation, layer):
    """Root mean square over draws and runs of |g - exact g| / |exact g|."""
    squares = [r["noise"][evaluation][layer] for r in runs if r["noise"]]
    return float(np.sqrt(np.mean(squares))) if squares else 0.0


if __name__ == "__main__":
    harness.main()
