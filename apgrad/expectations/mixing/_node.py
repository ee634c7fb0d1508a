"""Mixers: several estimators of one random choice, and weights that the node computes on its way back.

A mixer's node draws one sample, keeps each estimator's pullback, and in the backward pass

1. pulls the message back through each estimator, lane by lane, to the distribution's parameters and on to the
   *target*, the differentiated parameters: the *features*, (estimators, lanes, elements);
2. lets a rule (`weights.py`) make weights of them, one set for the message to the lanes' own arguments, another one
   for the contribution to the shared arguments;
3. adds up.

It is a rule of its own and no derivative, so second derivatives are refused.

*Folds.* With cross-fitting the lanes come in two folds, and the node sees the messages of two streams (see
`expectation.py`). All statistics are of the own stream and of one fold. In the own stream a fold is weighed by its
weights, in the output stream by the other fold's. Estimators without a pathwise derivative answer both
streams alike, and are evaluated once.

*Suffix.* A rule may look at the gradient that later nodes have gathered, lane by lane. It travels in a port of the
tape.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from apgrad._ground.propagator import Propagator, Static, first_order, node
from apgrad._programs.jaxprs import hoist
from apgrad.expectations._lanes import fold
from apgrad.expectations._tape import Tape
from apgrad.expectations.estimators._estimator import Mixer, divide, surrogates
from apgrad.expectations.mixing._cross_fitting import (
    add,
    drop_float0,
    join,
    mixture,
    shared_mixture,
    streams,
    swap,
    times,
)
from apgrad.expectations.mixing._features import Layout, Memory, by_chunks, find_target, inexact, leaves_or_none


def mix_lanes(
    mixer: Mixer, what: str, name: str, function: Callable[..., Any], tape: Tape, axes: Any, args: Any, keys: Any
) -> tuple[Tape, jax.Array, list[jax.Array]]:
    """A mixer's node for a per-lane function.

    Args:
      mixer: see there.
      what: for errors.
      name: of the function: calls of the same one gather a suffix together.
      function: one lane's arguments to a distribution.
      tape: the current tape.
      axes: for each argument, 0 or None (shared).
      args: of all lanes.
      keys: (lanes,).

    Returns:
      `(tape, x, zeros)`, a zero for each of `charged_baselines`.
    """
    _require(mixer, what, tape)
    folds = tape.folds  # no function of the node may hold the tape, whose arrays are of one trace
    leaves, treedef = jax.tree.flatten([x for x, axis in zip(args, axes, strict=True) if axis is None])
    lane = [x for x, axis in zip(args, axes, strict=True) if axis == 0]
    # Python's integers and bools stay what they are, so that a function may branch on them.
    static = [callable(leaf) or isinstance(leaf, str | int | np.bool_ | np.integer) for leaf in leaves]
    arrays = [leaf for leaf, is_static in zip(leaves, static, strict=True) if not is_static]

    def restore(arrays):
        arrays = iter(arrays)
        return tuple(treedef.unflatten([x if s else next(arrays) for x, s in zip(leaves, static, strict=True)]))

    def ordered(arrays, lane):
        shared, lane = iter(restore(arrays)), iter(lane)
        return function(*(next(shared if axis is None else lane) for axis in axes))

    one_lane = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), lane)
    converted, closed_over = hoist(ordered, arrays, one_lane)

    def build(shared, lane):
        return converted(shared[0], lane, *shared[1])

    def forward(shared, lane, keys, ports, perturbed):
        output, pullbacks = jax.vmap(lambda lane, key: surrogates(mixer, build(shared, lane), key))(lane, keys)
        # The function is differentiated again in the backward pass: cheaper to keep than its linearization,
        # which holds a copy of the shared arguments for each lane.
        flags = tuple(tuple(jax.tree.leaves(tree)) for tree in (*perturbed[0], perturbed[1]))
        given = None
        if "table" in ports:
            index = ports["count"].astype(jnp.int32)
            given = index, ports["table"][index]
            ports = ports | {"count": ports["count"] + 1}
        return (*output, ports), (shared, lane, pullbacks, given, Static(flags))

    def backward(memory, message):
        shared, lane, pullbacks, given, flags = memory
        to_x, to_zeros, ports = message
        own, output = streams(to_x, folds)
        row = None if given is None else given[1]
        memory = Memory(mixer, what, build, restore, shared, lane, pullbacks, flags.value, row)
        messages = _Messages(own, output, to_zeros, ports.get("suffix"), folds)
        compute = _by_parameters if mixer.target == "parameters" else _by_arguments
        if "kept" in ports:
            answer = _now_and_then(compute, memory, messages, ports["kept"])
        else:
            answer = compute(memory, messages)
        replies = {"suffix": answer.suffix, "kept": answer.kept, "count": None}
        if given is not None:
            table = ports["table"]
            replies["table"] = table.at[given[0]].add(answer.kept.astype(table.dtype))
        return (
            answer.shared,
            join(answer.own, answer.output, folds),
            None,
            {kind: replies[kind] for kind in ports},
        )

    requests, width, weights = {}, 0, mixer.weights
    if mixer.target != "parameters":
        mapping = mixer.target
        explicit = jax.eval_shape(lambda: mapping(restore(arrays))) if callable(mapping) else arrays
        width = Layout.of(inexact(explicit), tape.lanes).width
    if width and any(w is not None and w.suffix for w in weights[:2]):
        requests["suffix"] = (f"suffix:{name}:{width}", (tape.lanes, width))
    if weights.every > 1:
        requests["kept"] = (f"state:{name}", (1 + 2 * folds * len(mixer.estimators),))
    ports = {kind: tape.request_port(*request) for kind, request in requests.items()}
    tables = tape.request_table(name, len(mixer.estimators) * (1 + width))
    if tables and (weights.every > 1 or mixer.target == "parameters"):
        raise ValueError(f"{what}: keep_weights=True keeps weights of arguments, new at every node (every=1)")
    if tables:
        ports |= tables
        requests |= {kind: (f"{kind}:{name}", None) for kind in tables}
    x, zeros, ports = _mixer_node(mixer, forward, backward, perturbed=True)((arrays, closed_over), lane, keys, ports)
    for kind, (port, _) in requests.items():
        tape = tape.put_port(port, ports[kind])
    return tape, x, zeros


def mix_batch(
    mixer: Mixer, what: str, distribution: Any, tape: Tape, key: Any
) -> tuple[Tape, jax.Array, list[jax.Array]]:
    """A mixer's node for a distribution of all lanes: the target is its parameters that vary by lane.

    Args:
      mixer: only the weights of its message are used.
      what: for errors.
      distribution: its batch shape starts with the lanes.
      tape: the current tape.
      key: one PRNG key.

    Returns:
      `(tape, x, zeros)`, as `mix_lanes`.
    """
    _require(mixer, what, tape)
    lanes, folds, weighting = tape.lanes, tape.folds, mixer.weights.message
    led = [
        jnp.ndim(leaf) > 0 and jnp.shape(leaf)[0] == lanes and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        for leaf in jax.tree.leaves(distribution)
    ]
    if not any(led):
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(distribution)]
        raise ValueError(
            f"{what} weighs its estimators by the per-lane gradients of the distribution's parameters, "
            f"and none has the lanes ({lanes}) as leading axis; got shapes {shapes}. Broadcast a parameter to the "
            "lanes, or use ap.stochastic, whose target is the shared arguments."
        )
    if weighting.per != "node" or weighting.suffix or mixer.weights.every > 1 or tape.keeps:
        raise ValueError(
            f"{what} sees a distribution of all lanes, with one weight a node from that node alone; got per="
            f"{weighting.per!r}, suffix={weighting.suffix}, every={mixer.weights.every}, keep_weights={tape.keeps}. "
            "Use ap.stochastic for others."
        )

    def forward(distribution, key):
        return surrogates(mixer, distribution, key)

    def backward(pullbacks, message):
        to_x, to_zeros = message
        own, output = streams(to_x, folds)

        def weigh(to_x):
            messages = divide(mixer, to_x, to_zeros)
            answers = [pullback(m)[0] for pullback, m in zip(pullbacks, messages, strict=True)]
            rows = [[x for x, is_led in zip(jax.tree.leaves(a), led, strict=True) if is_led] for a in answers]
            return _weigh_rows(mixer, what, rows, folds)[1]

        weights = weigh(own)[..., 0]

        def mixed(to_x, weights):
            # Weighed before they are pulled back, lane by lane: a parameter that lanes share has no lanes to weigh.
            answers = []
            for weight, pullback, m in zip(weights.T, pullbacks, divide(mixer, to_x, to_zeros), strict=True):
                lane = jnp.repeat(weight, lanes // folds)
                answers.append(pullback(jax.tree.map(lambda m, w=lane: times(w, m), m))[0])
            return jax.tree.map(lambda *g: add(g), *map(drop_float0, answers))

        return join(mixed(own, weights), mixed(output, swap(weights)), folds), None

    return tape, *_mixer_node(mixer, forward, backward)(distribution, key)


class _Messages(NamedTuple):
    """What came back to a node: to the sample, by stream; to the zeros; the suffix. The lanes are first."""

    own: jax.Array
    output: jax.Array
    to_zeros: list[jax.Array]
    suffix: jax.Array | None
    folds: int


class _Answer(NamedTuple):
    """What a node answers: to the shared arguments; to the lanes', by stream; on its ports."""

    shared: Any
    own: Any
    output: Any
    suffix: jax.Array | None
    kept: jax.Array  # (2, folds, estimators): weights of message and contribution, one a node; or the row's gradient


def _by_arguments(memory: Memory, messages: _Messages) -> _Answer:
    """Weights from per-lane gradients of the arguments."""
    mixer, what, folds, lanes = memory.mixer, memory.what, messages.folds, len(messages.own)
    target = find_target(memory, lanes)
    contributing = mixer.weights.contribution or mixer.weights.message
    if callable(mixer.target):
        if contributing.per not in ("node", "auto"):
            raise ValueError(
                f"{what}: elements of a target that is a function are not those of the contribution: it has one weight "
                f"a node, got per={contributing.per!r}. Use per='node'."
            )
        contributing = contributing._replace(per="node")

    def one_lane(lane, pullbacks, own, output, to_zeros):
        _, to_arguments = jax.vjp(memory.build, memory.shared, lane)
        to_own, to_output = (divide(mixer, to_x, to_zeros) for to_x in (own, output))
        answers = [drop_float0(to_arguments(*pullback(m))) for pullback, m in zip(pullbacks, to_own, strict=True)]
        others = [
            # Without a pathwise derivative both streams are answered alike.
            drop_float0(to_arguments(*pullback(m))) if folds > 1 and e.pathwise is not None else a
            for e, pullback, m, a in zip(mixer.estimators, pullbacks, to_output, answers, strict=True)
        ]
        features = jnp.stack([target.layout.features(target.select(answer)) for answer in answers])
        return (features, [lane for _, lane in answers], [lane for _, lane in others]), [x for x, _ in others]

    def some_lanes(inputs):
        per_lane, to_shared = jax.vmap(jax.vmap(one_lane))(*inputs)
        return per_lane, jax.tree.map(lambda g: jnp.sum(g, axis=1), to_shared)

    inputs = fold((memory.lane, memory.pullbacks, messages.own, messages.output, messages.to_zeros), folds)
    held = sum(x.size for x, flag in zip(jax.tree.leaves(memory.shared), target.flags, strict=True) if flag)
    (features, own, output), to_shared = by_chunks(some_lanes, inputs, 2 * len(mixer.estimators) * held)
    features = jnp.moveaxis(features, 2, 1)  # (folds, estimators, lanes of a fold, width)

    suffix = jnp.zeros((folds, lanes // folds, target.layout.width), features.dtype)
    if messages.suffix is not None and target.of_shared:
        suffix = suffix.at[..., : messages.suffix.shape[1]].set(fold(messages.suffix, folds).astype(features.dtype))

    def weigh(weighting):
        looks = suffix if weighting.suffix else jnp.zeros_like(suffix)
        return jax.vmap(functools.partial(target.layout.weigh, what, weighting))(features, looks)

    weighting = mixer.weights.message._replace(per="node")
    message = weigh(weighting)
    contribution = weigh(contributing) if target.of_shared and contributing != weighting else message
    message = message[..., :1]
    kept = jnp.stack([message[..., 0], contribution[..., 0]])
    if memory.row is not None:
        message, contribution, kept = _given(memory.row, message, contribution if target.of_shared else message)
    message = message[..., 0]
    gathered = messages.suffix
    if gathered is not None and target.of_shared:
        more = jnp.sum(times(contribution[:, :, None], features), axis=1).reshape(lanes, -1)
        gathered = gathered + more[:, : gathered.shape[1]].astype(gathered.dtype)

    crossed = swap(contribution)
    parts = target.layout.split(crossed)
    to_shared = [
        shared_mixture(crossed[..., :1] if slot is None else parts[slot], answers)
        for slot, *answers in zip(target.slots, *map(leaves_or_none, to_shared), strict=True)
    ]
    return _Answer(
        jax.tree.unflatten(jax.tree.structure(memory.shared), to_shared),
        mixture(message, own),
        mixture(swap(message), output),
        gathered,
        kept,
    )


def _given(row, message, contribution):
    """The weights that the objective was given, in the place of the node's, and the difference as their gradient.

    Where they sum to 0 there are none yet. What the row has no weight for is weighed as the message.
    """
    row = row.reshape(message.shape[1], -1)
    rest = contribution.shape[-1] - (row.shape[-1] - 1)
    filled = jnp.concatenate([contribution, jnp.repeat(message, max(-rest, 0), axis=-1)], axis=-1)
    new = jnp.concatenate([message, filled[..., : row.shape[-1] - 1]], axis=-1).astype(row.dtype)
    total = jnp.sum(row, axis=0)
    used = jnp.where(total == 0, new, row / jnp.where(total == 0, 1, total)).astype(message.dtype)
    message = used[..., :1]
    return (
        message,
        jnp.concatenate([used[..., 1:], jnp.repeat(message, max(rest, 0), axis=-1)], -1),
        (row - new).ravel(),
    )


def _by_parameters(memory: Memory, messages: _Messages) -> _Answer:
    """Weights from the distribution's parameters, where the estimators are mixed: coordinates may differ."""
    own, output = _at_parameters(memory, messages)
    rows = [[z for z in leaves if z is not None] for leaves in own]
    layout, weights = _weigh_rows(memory.mixer, memory.what, rows, messages.folds)
    to_shared, to_own, to_output = _pull_mixture(memory, layout, own, output, weights, None)
    return _Answer(to_shared, to_own, to_output, None, jnp.stack([weights[..., 0]] * 2))


def _weigh_rows(mixer, what, rows, folds):
    """The layout and the weights (folds, estimators, width) of each estimator's gradients, arrays (lanes, ...)."""
    layout = Layout.of([leaf[0] for leaf in rows[0]], len(rows[0][0]) if rows[0] else 0)
    features = jnp.stack([jax.vmap(layout.features)(leaves) for leaves in rows])
    features = jnp.moveaxis(fold(jnp.moveaxis(features, 0, 1), folds), 2, 1)
    weigh = functools.partial(layout.weigh, what, mixer.weights.message)
    return layout, jax.vmap(weigh)(features, jnp.zeros_like(features[:, 0]))


def _now_and_then(compute, memory: Memory, messages: _Messages, state: jax.Array) -> _Answer:
    """New weights where the count of nodes says so, else those that the node after this one used."""
    weights, folds = memory.mixer.weights, messages.folds
    if any(w is not None and w.per != "node" for w in weights[:2]):
        raise ValueError(
            f"{memory.what}: weights kept over {weights.every} nodes are one number a node, got per="
            f"{[w.per for w in weights[:2] if w is not None]}. Use per='node', or every=1."
        )
    count = state[0]
    kept = state[1:].reshape(2, folds, -1)

    def again():
        own, output = _at_parameters(memory, messages)
        layout = Layout.of([z[0] for z in own[0] if z is not None], len(messages.own))
        message, contribution = (jnp.broadcast_to(w[..., None], (*w.shape, layout.width)) for w in kept)
        same = weights.contribution is None
        answer = _pull_mixture(memory, layout, own, output, message, None if same else contribution)
        return _Answer(*answer, messages.suffix, kept)

    answer = lax.cond(count == 0, lambda: _like(again, compute(memory, messages)), again)
    count = jnp.where(count + 1 == weights.every, 0, count + 1)
    return answer._replace(kept=jnp.concatenate([count[None], answer.kept.reshape(-1).astype(state.dtype)]))


def _like(function, tree):
    """The tree, in the dtypes of what the function would return."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, jax.eval_shape(function))


def _at_parameters(memory, messages):
    """Each estimator's message to the distribution's parameters, for both streams: lists of leaves."""

    def pull(message):
        def one(pullbacks, message, to_zeros):
            messages = divide(memory.mixer, message, to_zeros)
            return [[drop_float0(z) for z in jax.tree.leaves(p(m))] for p, m in zip(pullbacks, messages, strict=True)]

        return jax.vmap(one)(memory.pullbacks, message, messages.to_zeros)

    own = pull(messages.own)
    return own, own if messages.folds == 1 else pull(messages.output)


def _pull_mixture(memory, layout, own, output, message, contribution):
    """The answers from what is mixed at the parameters: `(to_shared, to_lane own, to_lane output)`.

    Weights are (folds, estimators, width); those of the contribution are the message's if None.
    """
    lanes, folds = len(jax.tree.leaves(own)[0]), len(message)

    def build(shared, lane):
        return jax.vmap(lambda x: jax.tree.leaves(memory.build(shared, x)), axis_size=lanes)(lane)

    leaves, pullback = jax.vjp(build, memory.shared, memory.lane)

    def pull(weights, answers):
        parts = iter(layout.split(weights))
        mixed = []
        for leaf, *estimators in zip(leaves, *answers, strict=True):
            if estimators[0] is None:
                mixed.append(np.zeros(leaf.shape, jax.dtypes.float0))
                continue
            part = next(parts)
            w = part if part.shape[-1] == leaf[0].size else part[..., :1]
            w = w.reshape(folds, -1, 1, *(leaf.shape[1:] if w.shape[-1] == leaf[0].size else [1] * (leaf.ndim - 1)))
            mixed.append(add(times(w[:, e], fold(z, folds)) for e, z in enumerate(estimators)).reshape(leaf.shape))
        return drop_float0(pullback(mixed))

    to_shared, to_output = pull(swap(message if contribution is None else contribution), output)
    if contribution is not None:
        to_output = pull(swap(message), output)[1]
    return to_shared, to_output if folds == 1 else pull(message, own)[1], to_output


def _require(mixer, what, tape):
    tape.require_current(what).weighing = what
    if tape.lanes < 2:
        raise ValueError(f"{what} takes the variance over lanes and needs at least 2, got lanes={tape.lanes}")


def _mixer_node(mixer, forward, backward, **options):
    reason = (
        f"{mixer.name} has no second derivative: its weights are no part of the objective, and differentiating "
        "them would be silently wrong. Use likelihood_ratio() or reparameterization() for higher orders."
    )
    return node(first_order(Propagator(forward, backward), reason), **options)
