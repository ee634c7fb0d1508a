"""Other ways back than backpropagation, on images: accuracy, angles to the true gradient, and seconds a step.

A perceptron with three hidden layers and a convolutional network with two learn to classify images, with the messages
of each rule of `apgrad.rewiring` in place of backpropagation's. The parameters of a rule (feedback weights, inverses,
guesses) learn with the same optimizer, AdamW, from the updates that come back as their cotangents. The first seed runs
with each rate of the grid; the rate that is best on held-out training images is the one of the other seeds too. The
test images are looked at once.

The angle at a hidden layer is the one between the rule's message and the true gradient, at the same parameters and
images: `ap.tap` shows both. Forward gradients and predictive coding take the function as one node, in which no message
of theirs passes; their angle is the one between the gradients of the layer's parameters. `time_ratio` is the median
processor time of the gradient of one batch over that of `jax.grad`, each in turn in one process; cells of their own
measure it. `last_layer` is no rule of `apgrad.rewiring`: the hidden layers stay at random, but for AdamW's decay, which
takes a third of their weights' length in 1,500 steps at a rate of .03, and a twentieth at .003; and the gradient of the
last one says what a rule has to beat whose messages are at right angles to the gradient.

    python -m experiments.ways_back
    python -m experiments.ways_back --preset paper

The preset paper is on MNIST (the digits if APGRAD_DATA names no folder with it), and the preset quick on the digits,
with one rate. There is no one paper that has all the rules: sizes, rates and the number of steps are ours, and the
figures of papers stand beside ours (`PUBLISHED`), with their settings, all on MNIST and most trained for longer.
Sign-symmetry and Kolen-Pollack have theirs on ImageNet. Target propagation is for the perceptron alone, since its
inverses are dense layers.

Four rules take more than 1.3 times the time of `jax.grad`, and `flops_ratio` says why: the floating-point operations
that XLA counts, over those of `jax.grad`. Synthetic gradients multiply each layer's input by a matrix of its own,
forward and for the matrix's update. Target propagation runs each layer again on a noisy input, and its inverse three
times. Both leave out the layer that reads the image, since nobody hears its message. A forward gradient needs a normal
draw for each parameter and pixel, which takes longer than `jax.grad`. Predictive coding goes through the network,
forward and back, once for each step of inference (XLA counts a loop once).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import apgrad as ap
from apgrad import meta, rewiring
from experiments import harness
from experiments.parts.turns import take_turns

RULES = ("backpropagation", "feedback_alignment", "direct_feedback_alignment", "sign_symmetry", "kolen_pollack")
RULES += ("synthetic_gradients", "difference_target_propagation", "predictive_coding", "forward_gradient", "last_layer")
BARTUNOV = "Bartunov et al. 2018, {} network, trained to the end"
FULL, LOCAL = BARTUNOV.format("fully connected"), BARTUNOV.format("locally connected")
NOKLAND = "Nokland 2016, seven hidden layers of 240 tanh units"
LILLICRAP = "Lillicrap et al. 2016, one hidden layer of 1000 units"
PUBLISHED = (  # rule, the network beside which it stands, test accuracy in percent on MNIST, source and setting
    ("backpropagation", "mlp", 98.52, FULL),
    ("feedback_alignment", "mlp", 98.15, FULL),
    ("direct_feedback_alignment", "mlp", 97.25, FULL),
    ("difference_target_propagation", "mlp", 98.17, f"{FULL}, inverses in turn with the weights"),
    ("difference_target_propagation", "mlp", 97.14, f"{FULL}, inverses together with the weights, as here"),
    ("backpropagation", "convnet", 98.99, BARTUNOV.format("convolutional")),
    ("backpropagation", "convnet", 98.83, LOCAL),
    ("feedback_alignment", "convnet", 98.74, LOCAL),
    ("direct_feedback_alignment", "convnet", 97.95, LOCAL),
    ("backpropagation", "mlp", 97.84, NOKLAND),
    ("feedback_alignment", "mlp", 97.80, NOKLAND),
    ("direct_feedback_alignment", "mlp", 97.68, NOKLAND),
    ("backpropagation", "mlp", 97.6, LILLICRAP),
    ("feedback_alignment", "mlp", 97.9, LILLICRAP),
    ("predictive_coding", "mlp", 95.90, "JPC's notebook, two hidden layers of 300 units, 300 steps of 64 images"),
)
WHOLE = ("predictive_coding", "forward_gradient")  # the rules whose one site is the function
PLAIN = ("backpropagation", "last_layer")  # functions that are not rewired
FIRST = ("hidden[0]", "hidden/dot_general[0]", "conv_general_dilated[0]")  # the layers that read the image


class Config(harness.Config):
    """Options of this experiment."""

    data: str = "digits"  # "mnist" (the digits stand in where it is missing) or "digits".
    networks: tuple[str, ...] = ("mlp", "convnet")  # of "mlp" and "convnet".
    rules: tuple[str, ...] = RULES  # of `RULES`.
    rates: tuple[float, ...] = (0.004,)  # the grid of learning rates, of which the first seed finds the best.
    seeds: int = 3  # of initial parameters, batches and rules; at least 3 for intervals.
    width: int = 64  # of the perceptron's hidden layers.
    channels: tuple[int, ...] = (8, 16)  # of the convolutions.
    steps: int = 150  # of training.
    batch: int = 50  # images a step.
    points: int = 4  # how often the angles are measured.


PARTIAL = True
PAPER = Config(data="mnist", rates=(0.0003, 0.001, 0.003), width=240, steps=1500, batch=100, points=8)


def cells(config: Config) -> list[harness.Cell]:
    pairs = harness.grid(network=config.networks, rule=config.rules)
    pairs = [p for p in pairs if p != {"network": "convnet", "rule": "difference_target_propagation"}]
    timed = [{**pair, "measure": "time"} for pair in pairs]
    tuned = [{**pair, "rate": rate, "trial": 0} for pair in pairs for rate in config.rates]
    return [*timed, *tuned, *({**pair, "rate": "best", "trial": t} for t in range(1, config.seeds) for pair in pairs)]


@jax.jit
def hidden(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """A hidden layer with its activation; a site of its own for target propagation."""
    return jnp.tanh(x @ w + b)


def scores(network: str, params: Any, x: jax.Array) -> jax.Array:
    """The scores (n, 10) of images (n, height, width, 1); the output of each hidden layer has a tap."""
    for i, (w, b) in enumerate(params[:-1]):
        if network == "mlp":
            x = hidden(x.reshape(len(x), -1), w, b)
        else:
            layout = ("NHWC", "HWIO", "NHWC")
            x = jnp.tanh(jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=layout) + b)
        x = ap.tap(x, f"layer {i + 1}")
    w, b = params[-1]
    return x.reshape(len(x), -1) @ w + b


def parameters(config: Config, network: str, key: jax.Array, shape: tuple[int, ...]) -> Any:
    """Initial parameters for images (height, width, channels)."""
    if network == "mlp":
        sizes = (int(np.prod(shape)), *(config.width,) * 3, 10)
        shapes: list[Any] = list(itertools.pairwise(sizes))
    else:
        channels = (shape[-1], *config.channels)
        shapes = [(3, 3, a, b) for a, b in itertools.pairwise(channels)]
        side = [-(-s // 2 ** len(config.channels)) for s in shape[:2]]
        shapes.append((side[0] * side[1] * channels[-1], 10))
    keys = jax.random.split(key, len(shapes))
    draw = lambda key, s: jax.random.normal(key, s) / np.sqrt(np.prod(s[:-1])).astype(np.float32)
    return [(draw(k, s), jnp.zeros(s[-1])) for k, s in zip(keys, shapes, strict=True)]


class Way(NamedTuple):
    """A rule on a network."""

    init: Callable[..., Any]  # (key, params, images) -> the rule's own parameters
    gradient: Callable[..., Any]  # (key, own, params, images, labels) -> updates of own and gradients of params
    messages: Callable[..., dict[str, rewiring.Tapped]]  # the same, to the messages at the hidden layers by name


def way(name: str, network: str) -> Way:
    """The rule of the given name on a network."""
    plain = functools.partial(scores, network)

    def total(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(plain(params, x), y).sum()

    def made(key):
        later = lambda *kinds: lambda site: site.kind in kinds and site.name not in FIRST
        if name == "difference_target_propagation":
            return rewiring.difference_target_propagation(key, later("call"))
        if name == "synthetic_gradients":
            return rewiring.synthetic_gradients(where=later("dense", "conv"))
        if name == "predictive_coding":
            return rewiring.predictive_coding("tanh", steps=6, rate=0.2)
        factory = getattr(rewiring, name)
        return factory() if name in ("sign_symmetry", "forward_gradient") else factory(key)

    rewired = lambda key: ap.rewire(total if name == "predictive_coding" else plain, made(key))

    def gradient(key, own, params, x, y):
        def loss(own, params):
            if name == "last_layer":
                params = [*jax.lax.stop_gradient(params[:-1]), params[-1]]
            if name in PLAIN:
                return total(params, x, y) / len(x)
            f = rewired(jax.random.key(0))  # this key is for `init` alone
            if name == "predictive_coding":
                return f(params, x, y) / len(x)
            before = ([key] if f.rule.random else []) + ([own] if f.rule.init else [])
            return optax.softmax_cross_entropy_with_integer_labels(f(*before, params, x), y).mean()

        return jax.grad(loss, argnums=(0, 1))(own, params)

    init = lambda key, params, x: {} if name in (*PLAIN, *WHOLE) else rewired(key).init(params, x)
    messages = lambda *args: ap.with_taps(gradient)(*args)[1]
    return Way(init, gradient, messages)


@functools.cache
def compiled(config: Config, name: str, network: str) -> tuple[Any, Any, Any, Any]:
    """A cell's `init`, `step`, `angles` and `accuracy`, compiled once for all rates, which are arguments, and seeds."""
    mine, plain = way(name, network), way("backpropagation", network)

    @jax.jit
    def step(key, number, rate, own, params, state, x, y):
        gradient = mine.gradient(jax.random.fold_in(key, number), own, params, x, y)
        updates, state = optax.adamw(rate, weight_decay=0.01).update(gradient, state, (own, params))
        updated: Any = optax.apply_updates((own, params), updates)
        return *updated, state

    @jax.jit
    def angles(key, own, params, x, y):
        if name in (*WHOLE, "last_layer"):
            got, exact = mine.gradient(key, own, params, x, y)[1], plain.gradient(key, {}, params, x, y)[1]
            pairs = list(zip(got, exact, strict=True))[:-1]
        else:
            got, exact = mine.messages(key, own, params, x, y), plain.messages(key, {}, params, x, y)
            pairs = [(got[n].message, exact[n].message) for n in sorted(exact)]
        return jnp.stack([_angle(a, b) for a, b in pairs])

    accuracy = jax.jit(lambda params, x, y: jnp.mean((scores(network, params, x).argmax(1) == y).astype(jnp.float32)))
    return jax.jit(mine.init), step, angles, accuracy


def times(config: Config, name: str, network: str) -> dict[str, Any]:
    """Processor milliseconds of the gradient of one batch, and their ratio to those of `jax.grad`."""
    mine, plain = way(name, network), way("backpropagation", network)
    x, y = (v[: config.batch] for v in images(config)[1][:2])
    params = parameters(config, network, jax.random.key(0), x.shape[1:])
    own = jax.jit(mine.init)(jax.random.key(2), params, x)
    all_args = [(w, (jax.random.key(1), o, params, x, y)) for w, o in ((mine, own), (plain, {}))]
    calls = [(jax.jit(w.gradient).lower(*args).compile(), args) for w, args in all_args]
    flops = [function.cost_analysis()["flops"] for function, _ in calls]  # pyright: ignore[reportOptionalSubscript]
    seconds = take_turns({str(i): lambda f=f, args=args: f(*args) for i, (f, args) in enumerate(calls)}, 60)
    first, second = (1e3 * float(np.median(found)) for found in seconds.values())
    ratios = {"time_ratio": first / second, "flops_ratio": flops[0] / flops[1]}
    return {**ratios, "milliseconds": first, "data": images(config)[0]}


def _angle(a, b):
    """The angle between two pytrees as vectors, in degrees."""
    a, b = (jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(t)]) for t in (a, b))
    cosine = jnp.vdot(a, b) / jnp.maximum(jnp.linalg.norm(a) * jnp.linalg.norm(b), 1e-30)
    return jnp.degrees(jnp.arccos(jnp.clip(cosine, -1, 1)))


@functools.cache
def images(config: Config) -> tuple[str, tuple[Any, ...]]:
    """A description, and images and labels to learn from, to choose by (a tenth) and to test by."""
    data = meta.data.load_bytes(config.data, or_digits=True)
    x, test = (v.astype(np.float32) / 255 - 0.5 for v in (data.x_train, data.x_test))
    order = np.random.default_rng(0).permutation(len(x))
    held, kept = order[: len(x) // 10], order[len(x) // 10 :]
    judged = map(jnp.asarray, (x[held], data.y_train[held], test, data.y_test))
    # What is learned from stays in NumPy, which takes a batch of rows faster.
    return data.description, (x[kept], data.y_train[kept], *judged)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Accuracies and angles of one run; runs of the same trial have the same first parameters and the same batches."""
    if cell.get("measure") == "time":
        return times(config, cell["rule"], cell["network"])
    description, (x, y, *rest) = images(config)
    rate = cell["rate"]
    if rate == "best":
        tuned = lambda rate: harness.finished(config, {**cell, "rate": rate, "trial": 0})["held_out"]
        rate = max(config.rates, key=tuned)
    init, step, angles, accuracy = compiled(config, cell["rule"], cell["network"])
    keys = jax.random.split(jax.random.key(harness.cell_seed(config.seed, {"trial": cell["trial"]})), 3)
    params = parameters(config, cell["network"], keys[0], x.shape[1:])
    own = init(keys[1], params, x[: config.batch])
    state = optax.adamw(0.0).init((own, params))
    rng = np.random.default_rng(cell["trial"])
    marks = {round(m) for m in np.linspace(0, config.steps - 1, config.points)}
    curve = []
    for i in range(config.steps):
        chosen = rng.integers(len(x), size=config.batch)
        if i in marks:
            key = jax.random.fold_in(keys[2], i)
            curve.append([i, *map(float, angles(key, own, params, x[: config.batch], y[: config.batch]))])
        own, params, state = step(keys[2], i, rate, own, params, state, x[chosen], y[chosen])
    held, test = (float(accuracy(params, *rest[i : i + 2])) for i in (0, 2))
    return {"rate": rate, "held_out": held, "test": test, "angles": curve, "data": description}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows, curves = [], {}
    timed = {(c["network"], c["rule"]): result for c, result in records if "measure" in c}
    data, records = harness.common(r for _, r in records), [(c, result) for c, result in records if "rate" in c]
    for network, rule in dict.fromkeys((c["network"], c["rule"]) for c, _ in records):
        mine = [(c, result) for c, result in records if (c["network"], c["rule"]) == (network, rule)]
        rate = max((result for c, result in mine if c["trial"] == 0), key=lambda result: result["held_out"])["rate"]
        runs = [result for _, result in mine if result["rate"] == rate]
        curve = curves[network, rule] = np.array([r["angles"] for r in runs])
        row = {"network": network, "rule": rule, "rate": rate, "seeds": len(runs)}
        values = {"test_accuracy": np.array([r["test"] for r in runs])}
        values |= {"angle_first_layer": curve[:, -1, 1], "angle_last_layer": curve[:, -1, -1]}
        for name, found in values.items():
            row |= {name: float(found.mean()), f"{name}_se": harness.standard_error(found)}
        times = timed.get((network, rule), {})
        row |= {name: times.get(name, np.nan) for name in ("time_ratio", "flops_ratio", "milliseconds")}
        known = [f"{accuracy} % ({source})" for n, m, accuracy, source in PUBLISHED if (n, m) == (rule, network)]
        rows.append({**row, "published": "; ".join(known)})
    columns = ("rate", "test_accuracy", "angle_first_layer", "angle_last_layer", "time_ratio")
    table = f"{data}\n{harness.table(rows, 'network', 'rule', *columns)}"
    return harness.Report({"data": data}, rows, table, _figure(rows, curves))


def _figure(rows, curves):
    networks, rules = (list(dict.fromkeys(r[k] for r in rows)) for k in ("network", "rule"))
    figure, axes = harness.panels(len(networks), 3, (13, 3.4 * len(networks)))
    for (accuracy, first, last), network in zip(axes, networks, strict=True):
        mine = [r for r in rows if r["network"] == network]
        for row in mine:
            place, rule = rules.index(row["rule"]), row["rule"]
            style = {"color": f"C{place}", "label": rule.replace("_", " ")}
            accuracy.barh(place, 100 * row["test_accuracy"], xerr=100 * (row["test_accuracy_se"] or 0), **style)
            text = f" {100 * row['test_accuracy']:.1f} %, {row['time_ratio']:.2f} x time"
            accuracy.text(1, place, text, va="center", fontsize=7, color="white")
            known = [a for n, m, a, _ in PUBLISHED if (n, m) == (rule, network)]
            accuracy.plot(known, [place] * len(known), "k|", ms=12)
            curve = curves[network, rule]
            for ax, layer in ((first, 1), (last, -1)):
                errors = [harness.standard_error(angles) or 0 for angles in curve[:, :, layer].T]
                ax.errorbar(curve[0, :, 0], curve[:, :, layer].mean(0), errors, marker="o", **style)
        accuracy.set_yticks([rules.index(r["rule"]) for r in mine], [r["rule"].replace("_", " ") for r in mine])
        accuracy.invert_yaxis()
        accuracy.set(xlim=(0, 101), xlabel="test accuracy, %; published: |", title=network)
        for ax, words in ((first, "first"), (last, "last")):
            ax.axhline(90, color="0.7", lw=0.8, zorder=0)
            ax.set(ylim=(-3, 120), xlabel="step", title=f"{network}: {words} hidden layer")
        first.set_ylabel("angle of message and gradient, degrees")
    return figure


if __name__ == "__main__":
    harness.main()
