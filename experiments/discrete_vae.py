"""Variational autoencoders with binary latents: the test bound and gradient variance of every estimator in training.

    python -m experiments.discrete_vae                                 # linear, 20 latents, digits: under two minutes
    python -m experiments.discrete_vae --preset paper                  # MNIST if APGRAD_DATA has it, 200 latents: hours

The setting of Tucker et al. (2017), Grathwohl et al. (2018) and Dong et al. (2020): images, binarized anew in every
minibatch, an encoder to independent Bernoulli latents and a decoder back, either linear or with a hidden layer of tanh
units ("two-layer"). PAPER has a tenth of the million steps of Dong et al. The bound is

    log p(x)  >=  E_q[log p(x | z)] - KL(q(z | x) || p(z)),

whose second term is known exactly, so that an estimator has the reconstruction alone to deal with. Each image is a
lane; estimators look at several latent codes of the same image, and none at those of other images.

Every method has the same optimizer and the same minibatches. REBAR's and RELAX's control variates, the coefficient of
the double control variates and the learned baseline are trained beside the model, all but the last ten times as fast.
RELAX's control variate is that of Grathwohl et al. (section 5.2), REBAR's plus a network of relaxation and image;
"RELAX, black box" has the network alone. The variance is that of the encoder's gradient on one fixed minibatch, summed
over its parameters. Seconds are the processor's.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax.tree_util import Partial

import apgrad as ap
from experiments import harness
from experiments.parts.networks import Layers, apply, layers

METHODS: dict[str, Callable[[Any, Any, Any], Any]] = {  # of the control variate, the cost of a code, and the images
    "learned baseline": lambda control, cost, x: None,
    "RLOO, 2": lambda control, cost, x: ap.rloo(2),
    "RLOO, 4": lambda control, cost, x: ap.rloo(4),
    "ARM": lambda control, cost, x: ap.arm(),
    "DisARM": lambda control, cost, x: ap.disarm(),
    "REBAR": lambda control, cost, x: ap.rebar(jnp.exp(control["log_temperature"]), control["eta"]),
    "RELAX": lambda control, cost, x: ap.relax(Partial(functools.partial(rebar_and_network, cost), control), x),
    "RELAX, black box": lambda control, cost, x: ap.relax(Partial(of_relaxation, control), x),
    "double control variates, 2": lambda control, cost, x: ap.double_control_variates(2, control),
    "straight-through": lambda control, cost, x: ap.straight_through(),
    "Gumbel-softmax": lambda control, cost, x: ap.gumbel_softmax(0.5),
    "ReinMax": lambda control, cost, x: ap.reinmax(),
}
PUBLISHED_STEPS = 1_000_000
BATCH = 50
HIDDEN = 100


class Config(harness.Config):
    """Options of this experiment."""

    data: str = "digits"  # "digits" or "mnist"; the digits stand in for MNIST where it is missing.
    networks: tuple[str, ...] = ("linear",)  # "linear" and "two-layer".
    latents: tuple[int, ...] = (20,)  # how many.
    # names in METHODS.
    methods: tuple[str, ...] = ("learned baseline", "RLOO, 2", "DisARM", "REBAR", "straight-through")
    seeds: int = 1  # how many runs of each.
    steps: int = 1_000  # of training.
    records: int = 5  # how often bound and variance are measured in a run.
    learning_rate: float = 3e-3  # of Adam.


GRID: dict[str, Any] = {"networks": ("linear", "two-layer"), "latents": (20, 200), "methods": tuple(METHODS)}
PAPER = Config(data="mnist", **GRID, seeds=3, steps=100_000, records=20, learning_rate=1e-3)
PARTIAL = True


def images(name: str) -> tuple[jax.Array, jax.Array, str]:
    """Intensities between 0 and 1 of the training and the test images, as rows, and what they are."""
    data = ap.meta.data.load_bytes(name, or_digits=True)
    flat = [np.asarray(x, np.float32).reshape(len(x), -1) for x in (data.x_train, data.x_test)]
    train, test = (jnp.asarray(x / flat[0].max()) for x in flat)
    return train, test, data.description


def start(key: jax.Array, network: str, pixels: int, latents: int, method: str) -> Any:
    """The model's parameters, those of the baseline and those of the control variate."""
    hidden = (HIDDEN,) if network == "two-layer" else ()
    keys = jax.random.split(key, 4)
    rebar = {"log_temperature": jnp.float32(np.log(0.5)), "eta": jnp.float32(1.0)}
    *first, last = layers(keys[3], (latents + pixels, HIDDEN, 1))
    network_alone = [*first, (0 * last[0], last[1])]  # it starts as 0
    controls = {"REBAR": rebar, "RELAX": {**rebar, "network": network_alone}, "RELAX, black box": network_alone}
    controls["double control variates, 2"] = jnp.float32(1.0)
    model: Any = {"encoder": layers(keys[0], (pixels, *hidden, latents))}
    model["decoder"] = layers(keys[1], (latents, *hidden, pixels))
    model |= {"prior": jnp.zeros(latents), "baseline": layers(keys[2], (pixels, HIDDEN, 1))}
    return model | {"control": controls.get(method)}


def of_relaxation(network: Layers, z: jax.Array, x: jax.Array) -> jax.Array:
    """A network of the relaxation z of one lane's latents and the lane's image x, as a control variate."""
    return apply(network, jnp.concatenate([2 * jax.nn.sigmoid(2 * z) - 1, x]))[0]


def rebar_and_network(cost: Callable[..., Any], control: dict[str, Any], z: jax.Array, x: jax.Array) -> jax.Array:
    """REBAR's control variate, which is the cost of a relaxed code, plus a network."""
    relaxed = jax.nn.sigmoid(z / jnp.exp(control["log_temperature"]))
    return control["eta"] * cost(relaxed, x) + of_relaxation(control["network"], z, x)


def divergence(logits: jax.Array, prior: jax.Array) -> jax.Array:
    """KL of independent Bernoulli choices with these logits against others, summed over the last axis."""
    q = jax.nn.sigmoid(logits)
    return jnp.sum(q * (logits - prior) + jax.nn.softplus(prior) - jax.nn.softplus(logits), axis=-1)


def program(method: str) -> Callable[..., ap.Tape]:
    """`program(tape, parameters, x)`: the negative bound of each image."""

    def reconstruction(z, x, decoder):
        logits = apply(decoder, z.astype(jnp.float32))
        return jnp.sum(jax.nn.softplus(logits) - x * logits)

    def run(tape, parameters, x):
        logits = apply(parameters["encoder"], x)
        q, decoder = dist.Bernoulli(logits=logits), parameters["decoder"]
        tape = tape.cost(divergence(logits, parameters["prior"]))
        fixed = jax.lax.stop_gradient(decoder)
        made = METHODS[method](parameters["control"], lambda z, x: reconstruction(z, x, fixed), x)
        if isinstance(made, ap.ChoiceEstimator):
            return ap.choose(tape, q, lambda z, x: (reconstruction(z, x, decoder), None), made, x)[0]
        if made is None:
            made = ap.likelihood_ratio(ap.learned_baseline(lambda q: 20 * apply(parameters["baseline"], x)[:, 0]))
        tape, z = ap.sample(tape, q, made)
        return tape.cost(lambda z, x: reconstruction(z, x, decoder), z, x)

    return run


def binarized(key: jax.Array, intensities: jax.Array) -> jax.Array:
    """Black and white images."""
    return jax.random.bernoulli(key, intensities).astype(jnp.float32)


def cells(config: Config) -> list[harness.Cell]:
    names = {"network": config.networks, "latents": config.latents, "method": config.methods}
    return harness.grid(**names, run=range(config.seeds))


@functools.cache
def functions(config: Config, method: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Training from one record to the next, and a look at bound and variance: both compiled once for all runs."""
    train_images, test_images, _ = images(config.data)
    objective = ap.expectation(program(method), BATCH)
    tested = ap.expectation(program("RLOO, 2"), len(test_images))
    optimizer = optax.adam(config.learning_rate)

    def minibatch(key):
        chosen, pixel_key = jax.random.split(key)
        rows = jax.random.randint(chosen, (BATCH,), 0, len(train_images))
        return binarized(pixel_key, train_images[rows])

    @jax.jit
    def train(key, parameters, state, begin, end):
        data_key, noise = jax.random.split(key)

        def body(step, carry):
            parameters, state = carry
            x = minibatch(jax.random.fold_in(data_key, step))
            gradient = jax.grad(objective, argnums=1)(jax.random.fold_in(noise, step), parameters, x)
            updates: Any
            updates, state = optimizer.update(gradient, state)
            faster = jax.tree.map(lambda u: 10 * u, updates["control"])
            return optax.apply_updates(parameters, updates | {"control": faster}), state

        return jax.lax.fori_loop(begin, end, body, (parameters, state))

    @jax.jit
    def look(key, parameters):
        x = binarized(key, test_images)
        same_for_all = parameters | {"control": None}
        bounds = jax.lax.map(lambda key: -tested(key, same_for_all, x), jax.random.split(key, 5))
        x = minibatch(key)
        encoder = lambda key: jax.grad(objective, argnums=1)(key, parameters, x)["encoder"]
        gradients = jax.lax.map(encoder, jax.random.split(key, 50))
        return jnp.mean(bounds), sum(jnp.sum(jnp.var(g, axis=0, ddof=1)) for g in jax.tree.leaves(gradients))

    return train, look


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Bound and variance along one training. Runs of one number have the same start and minibatches."""
    train_images, _, description = images(config.data)
    init_key, train_key, look_key = jax.random.split(jax.random.key(cell["run"]), 3)
    parameters = start(init_key, cell["network"], train_images.shape[1], cell["latents"], cell["method"])
    state, seconds = optax.adam(config.learning_rate).init(parameters), 0.0
    train, look = functions(config, cell["method"])
    train(train_key, parameters, state, 0, 0)  # compiled before the clock starts
    curve = [(0, 0.0, *map(float, look(look_key, parameters)))]
    every = config.steps // config.records
    for record in range(config.records):
        begun = time.process_time()
        at = record * every
        parameters, state = jax.block_until_ready(train(train_key, parameters, state, at, at + every))
        seconds += time.process_time() - begun
        curve.append(((record + 1) * every, seconds, *map(float, look(look_key, parameters))))
    steps, clock, bounds, variances = map(list, zip(*curve, strict=True))
    return {"images": description, "steps": steps, "seconds": clock, "bound": bounds, "variance": variances}


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for cell, result in records:
        groups.setdefault((cell["network"], cell["latents"], cell["method"]), []).append(result)
    data = harness.common((r for _, r in records), "images")
    rows, figures = [], {"images": data, "share_of_published_steps": config.steps / PUBLISHED_STEPS}
    for (network, latents, method), results in groups.items():
        last = np.array([r["bound"][-1] for r in results])
        found = {"runs": len(results), "bound": float(last.mean()), "standard_error": harness.standard_error(last)}
        for name, i in (("variance_first", 1), ("variance_last", -1)):
            found[name] = float(np.mean([r["variance"][i] for r in results]))
        found["milliseconds_a_step"] = float(np.median([1e3 * r["seconds"][-1] / r["steps"][-1] for r in results]))
        rows.append({"network": network, "latents": latents, "method": method, **found})
        figures[f"{network}, {latents} latents: {method}"] = found
    return harness.Report(figures, rows, harness.table(rows, *rows[0]), _figure(groups))


def _figure(groups):
    settings = list(dict.fromkeys((network, latents) for network, latents, _ in groups))
    figure, panels = harness.panels(len(settings), 3, (12, 3.6 * len(settings)))
    colours = dict(zip(METHODS, [f"C{i}" for i in range(10)] + ["black", "gold"], strict=True))
    lines = dict(zip(settings, panels, strict=True))
    for (network, latents, method), results in groups.items():
        curves = {k: np.mean([r[k] for r in results], axis=0) for k in ("steps", "seconds", "bound", "variance")}
        pairs = (("steps", "bound"), ("seconds", "bound"), ("steps", "variance"))
        for axes, (x, y) in zip(lines[network, latents], pairs, strict=True):
            axes.plot(curves[x][1:], curves[y][1:], color=colours[method], label=method, linewidth=1)
            axes.set(xlabel=x, ylabel=f"test {y}" if y == "bound" else "variance of the encoder's gradient")
    for (network, latents), line in lines.items():
        line[0].set_title(f"{network}, {latents} latents")
        line[0].legend()
        line[2].set_yscale("log")
    return figure


if __name__ == "__main__":
    harness.main()
