"""What the estimators cost: time against plain `jax.grad`, and time and memory of a node.

    python -m experiments.benchmarks.estimators                   # about a minute
    python -m experiments.benchmarks.estimators --preset paper    # about five

*Rollout.* The gradient of the chaotic network's loss (`experiments.parts.chaotic_network`) by each method, against
`jax.grad` of the same rollout written without apgrad, which draws the same numbers in the same way: a key split
at each step, one key a lane. RP's gradient equals the baseline's to float32 rounding, which is checked.
Methods take turns, a round each, and a ratio is the median over rounds of a method's time over the
baseline's in the same round, so that a machine whose speed drifts does not change it. It is measured called
from Python, a gradient a call (with and without `check_nan`), and in a loop inside one compiled program, as
training runs it.

*Chain.* Chains of 1e3 to 1e6 nodes `x <- N(sin(theta x), .1)` in a scan, forward and backward, with 2 lanes. What a
node adds to the baseline, drawing the same numbers: microseconds, and bytes of the compiled program's
temporary memory (`memory_analysis().temp_size_in_bytes`, which counts what the scan keeps for its backward pass).

*Policies.* Networks of 41, 4,866 and 100,444 parameters that move a state of 3 or 8 numbers for 50, 20 and 10 steps, on
1,000 lanes: the gradient of plain `jax.grad`, and of total propagation, cross-fitted, by `ap.adaptive`, the same by
state, and with `target="parameters"`. Seconds, and bytes of temporary memory.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import apgrad as ap
from experiments import harness
from experiments.parts import chaotic_network, networks
from experiments.parts.turns import take_turns

BETA = 2.5
LANES = 1000
POLICIES = {41: ((3, 8, 1), 50), 4_866: ((8, 64, 64, 2), 20), 100_444: ((8, 310, 310, 4), 10)}  # sizes, horizon
CHAIN_METHODS = ("RP", "LR", "TP")
ROLLOUT_METHODS = ("RP", "LR", "TP", "TP-CF", "decoupled", "decoupled-CF", "GS-LR", "GS-TP")


class Config(harness.Config):
    """Options of the benchmark."""

    horizons: tuple[int, ...] = (50,)  # of the rollouts.
    rounds: int = 60  # how often each rollout is timed.
    nodes: tuple[int, ...] = (1_000, 10_000, 100_000)  # lengths of the chains.
    chain_rounds: int = 7  # how often each chain is timed.
    policy_rounds: int = 5  # how often the policies are timed.


PAPER = Config(horizons=(10, 25, 50, 100), rounds=200, nodes=(1_000, 10_000, 100_000, 1_000_000), policy_rounds=25)


def plain(mean: Any, deviation: float, start: jax.Array, lanes: int, length: int) -> Callable[..., jax.Array]:
    """`(key, theta) -> ` the last states (lanes, ...) of a Gaussian chain, of the same numbers that apgrad draws."""

    def last(key, theta):
        def body(carry, _):
            key, x = carry
            key, fresh = jax.random.split(key)
            noise = jax.vmap(lambda key: jax.random.normal(key, start.shape))(jax.random.split(fresh, lanes))
            return (key, jax.vmap(mean, (None, 0))(theta, x) + deviation * noise), None

        return jax.lax.scan(body, (key, jnp.broadcast_to(start, (lanes, *start.shape))), length=length)[0][1]

    return last


def plain_rollout(horizon: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The rollout's loss without apgrad."""
    weights = jnp.array(chaotic_network.WEIGHTS)
    mean = lambda beta, x: jax.nn.sigmoid(beta * weights @ x)
    last = plain(mean, chaotic_network.SIGMA, jnp.array(chaotic_network.START), LANES, horizon)
    return lambda key, beta: jnp.mean(0.5 * jnp.sum((last(key, beta) - 1) ** 2, axis=-1))


def chain(method: str, nodes: int, lanes: int = 2) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The last state of a chain of nodes, squared; `plain` is without apgrad."""
    if method == "plain":
        last = plain(lambda theta, x: jnp.sin(theta * x), 0.1, jnp.ones(()), lanes, nodes)
        return lambda key, theta: jnp.mean(last(key, theta) ** 2)

    @ap.stochastic(chaotic_network.METHODS[method].estimator())
    def step(theta, x):
        return dist.Normal(jnp.sin(theta * x), 0.1)

    def program(tape, theta):
        carry = (tape, jnp.ones(tape.lanes))
        (tape, x), _ = jax.lax.scan(lambda c, _: (step(c[0], theta, c[1]), None), carry, length=nodes)
        return tape.cost(x**2)

    return ap.expectation(program, lanes)


def cells(config: Config) -> list[harness.Cell]:
    sizes = {"rollout": config.horizons, "chain": config.nodes, "policy": POLICIES}
    return [cell for name, some in sizes.items() for cell in harness.grid(benchmark=[name], size=some)]


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    key = jax.random.key(seed)
    measures = {"rollout": _measure_rollout, "chain": _measure_chain, "policy": _measure_policy}
    return measures[cell["benchmark"]](config, cell["size"], key)


def _measure_rollout(config, horizon, key):
    beta = jnp.float32(BETA)
    losses = {"plain": plain_rollout(horizon)}
    for method in ROLLOUT_METHODS:
        losses[method] = chaotic_network.objective(method, horizon, LANES)
        losses[f"{method}, check_nan=False"] = chaotic_network.objective(method, horizon, LANES, check_nan=False)
    gradients = {name: jax.grad(loss, argnums=1) for name, loss in losses.items()}
    gradients["adaptive"] = adaptive(chaotic_network.program("adaptive", horizon), key, beta)
    calls = {name: jax.jit(g) for name, g in gradients.items()}
    np.testing.assert_allclose(calls["RP"](key, beta), calls["plain"](key, beta), rtol=1e-3)

    keys = jax.random.split(key, 10)
    looped = lambda g: jax.jit(lambda keys, beta: jax.lax.map(lambda key: g(key, beta), keys))
    loops = {name: looped(g) for name, g in gradients.items() if "," not in name}
    called = take_turns(calls, config.rounds, arguments=(key, beta))
    looped = take_turns(loops, config.rounds, arguments=(keys, beta))
    rows = [_row(f"called: {name}", seconds, called["plain"]) for name, seconds in called.items()]
    rows += [_row(f"in a loop: {name}", seconds / 10, looped["plain"] / 10) for name, seconds in looped.items()]
    return {"rows": rows}


def _measure_chain(config, nodes, key):
    theta = jnp.float32(1.1)
    gradient = lambda method: jax.jit(jax.grad(chain(method, nodes), argnums=1))
    compiled: dict[str, Any] = {m: gradient(m).lower(key, theta).compile() for m in ("plain", *CHAIN_METHODS)}
    seconds = take_turns(compiled, config.chain_rounds, arguments=(key, theta))
    memory = {name: f.memory_analysis().temp_size_in_bytes for name, f in compiled.items()}
    rows = []
    for name in compiled:
        added = (seconds[name] - seconds["plain"]) / nodes * 1e6
        row = _row(name, seconds[name], seconds["plain"]) | {"added_us_per_node": float(np.median(added))}
        row |= {"added_us_interval": _median_interval(added), "bytes_per_node": memory[name] / nodes}
        rows.append(row | {"added_bytes_per_node": (memory[name] - memory["plain"]) / nodes})
    return {"rows": rows}


def _measure_policy(config, size, key):
    sizes, horizon = POLICIES[size]
    parameters = networks.layers(key, sizes)
    of = lambda estimator: policy(sizes, horizon, estimator)
    total = {"decoupled-CF": ap.total_propagation(), "parameters-CF": ap.total_propagation(target="parameters")}
    objectives = {"plain": plain_policy(sizes, horizon), "RP": ap.expectation(of(ap.reparameterization()), LANES)}
    objectives |= {name: ap.expectation(of(e), LANES, cross_fit=True) for name, e in total.items()}
    gradients = {name: jax.grad(f, argnums=1) for name, f in objectives.items()}
    for name, by_state in (("adaptive", False), ("adaptive, by state", True)):
        gradients[name] = adaptive(of(ap.total_propagation()), key, parameters, by_state=by_state)
    compiled: dict[str, Any] = {name: jax.jit(f).lower(key, parameters).compile() for name, f in gradients.items()}
    seconds = take_turns(compiled, config.policy_rounds, arguments=(key, parameters))
    rows = [_row(name, seconds[name], seconds["plain"]) for name in compiled]
    memory = [f.memory_analysis().temp_size_in_bytes for f in compiled.values()]
    return {"rows": [row | {"bytes": size} for row, size in zip(rows, memory, strict=True)]}


def adaptive(program: Any, key: jax.Array, parameters: Any, **options: Any) -> Callable[..., Any]:
    """`(key, parameters) -> ` value, gradient and state of `ap.adaptive`, from the state that the key makes."""
    made = ap.adaptive(program, LANES, **options)
    state = jax.jit(made.init)(key, parameters)
    return lambda key, parameters: made.value_and_grad(key, state, parameters)


def _next_mean(parameters, x):
    action = networks.apply(parameters, x)
    effect = 0.3 * jax.random.normal(jax.random.key(5), (x.shape[0], action.shape[0]))
    return 0.9 * x + effect @ action


def plain_policy(sizes: tuple[int, ...], horizon: int) -> Callable[[jax.Array, Any], jax.Array]:
    """The cost of a policy that moves a state, `(key, parameters) -> scalar`, without apgrad."""

    def cost(key, parameters):
        def body(x, key):
            noise = jax.vmap(lambda key: jax.random.normal(key, sizes[:1]))(jax.random.split(key, LANES))
            x = jax.vmap(_next_mean, (None, 0))(parameters, x) + 0.05 * noise
            return x, jnp.mean(jnp.sum(x**2, axis=-1))

        return jnp.sum(jax.lax.scan(body, jnp.ones((LANES, sizes[0])), jax.random.split(key, horizon))[1])

    return cost


def policy(sizes: tuple[int, ...], horizon: int, estimator: Any) -> Callable[[ap.Tape, Any], ap.Tape]:
    """The same as a program of apgrad's."""
    step = ap.stochastic(estimator)(lambda parameters, x: dist.Normal(_next_mean(parameters, x), 0.05).to_event(1))

    def program(tape, parameters):
        def body(carry, _):
            tape, x = step(carry[0], parameters, carry[1])
            return (tape.cost(jnp.sum(x**2, axis=-1)), x), None

        (tape, _), _ = jax.lax.scan(body, (tape, jnp.ones((tape.lanes, sizes[0]))), length=horizon)
        return tape

    return program


def _row(name, seconds, baseline):
    row = {"method": name, "milliseconds": float(np.median(seconds) * 1e3)}
    return row | {"ratio": float(np.median(seconds / baseline)), "ratio_interval": _median_interval(seconds / baseline)}


def _median_interval(values):
    """Percentile-bootstrap 95 % interval of the median over rounds."""
    return harness.interval(harness.bootstrap(values, lambda x: np.median(x, axis=-1), 0, 2000))


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    empty = dict.fromkeys(("added_us_per_node", "added_us_interval", "bytes_per_node", "added_bytes_per_node", "bytes"))
    rows = [{**cell, **empty, **row} for cell, result in records for row in result["rows"]]
    last = {name: max((r["size"] for r in rows if r["benchmark"] == name), default=0) for name in ("rollout", "chain")}
    figures, of_a_node = {}, ("added_us_per_node", "added_us_interval", "added_bytes_per_node")
    for row in rows:
        size, method = row["size"], row["method"]
        if row["benchmark"] == "rollout":
            figures[f"ratio_H{size}, {method}"] = {"value": row["ratio"], "interval": row["ratio_interval"]}
        elif row["benchmark"] == "policy":
            figures[f"policy of {size}, {method}"] = {k: row[k] for k in ("milliseconds", "ratio", "bytes")}
        elif size == last["chain"] and method != "plain":
            figures[f"node_in_chain_of_{size}, {method}"] = {k: row[k] for k in of_a_node}
    columns = ("milliseconds", "ratio", "added_us_per_node", "added_bytes_per_node", "bytes")
    shown = [{**row, "ratio_low": row["ratio_interval"][0], "ratio_high": row["ratio_interval"][1]} for row in rows]
    table = harness.table(shown, "benchmark", "size", "method", *columns)

    return harness.Report(figures, rows, table, _picture(rows, last))


def _picture(rows, last):
    """Bars of the longest rollout and of each policy, as far as they were measured, and what a node of a chain adds."""
    mine = [r for r in rows if "plain" not in r["method"]]
    of = lambda name, size: [r for r in mine if (r["benchmark"], r["size"]) == (name, size)]
    bars = {f"Rollout, H={last['rollout']}": of("rollout", last["rollout"])}
    bars |= {f"Policy of {size:,} parameters": of("policy", size) for size in POLICIES}
    bars = {title: found for title, found in bars.items() if found}
    nodes = {"added_us_per_node": "Microseconds", "added_bytes_per_node": "Bytes, of 2 lanes,"} if last["chain"] else {}
    figure, (axes,) = harness.panels(1, max(1, len(bars) + len(nodes)), (3.7 * (len(bars) + len(nodes)), 4))
    for ax, (title, found) in zip(axes, bars.items(), strict=False):
        values = [r["ratio"] for r in found]
        errors = np.abs(np.array([r["ratio_interval"] for r in found]).T - values)
        harness.bars(ax, [r["method"] for r in found], {"": values}, xerr=errors, color="0.7")
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set(xlabel=f"time / plain jax.grad, {LANES} lanes", title=title)
        ax.tick_params(axis="y", labelsize=7)
    for ax, (name, title) in zip(axes[len(bars) :], nodes.items(), strict=False):
        for method, marker in zip(CHAIN_METHODS, "os^", strict=True):
            chain = [r for r in rows if (r["benchmark"], r["method"]) == ("chain", method)]
            ax.plot([r["size"] for r in chain], [r[name] for r in chain], marker=marker, label=method)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(xscale="log", xlabel="nodes in the chain", title=f"{title} that a node adds")
        ax.legend()
    return figure


if __name__ == "__main__":
    harness.main()
