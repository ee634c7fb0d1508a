"""What a network depends on comes back as a message, or the network is refused when it is traced."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import apgrad as ap
from apgrad import mplp
from tests.mplp.graphs import close, first_step
from tests.refusals import refused

P = {name: jax.random.normal(jax.random.key(i), s) for i, (name, s) in enumerate({"w": (3, 3), "v": (3, 3)}.items())}
P |= {"c": jnp.asarray([1.0, 2.0, 0.5]), "d": jnp.full(3, 1.0), "pos": jnp.ones((4, 3))}
BATCH = jnp.arange(12.0).reshape(4, 3) / 10, jnp.ones((4, 3))
RULE = mplp.Exact(0.1)
sine = jax.custom_vjp(jnp.sin)
sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, m: (jnp.cos(x) * m,))
first_order = ap.node(ap.first_order(ap.backpropagation(jnp.tanh), "no second derivative"))
lean = ap.randomize(jax.nn.softmax, ap.memory.rounding(bits=4), min_size=0)
rewired = ap.rewire(lambda x: jnp.tanh(jnp.sin(x)), ap.rewiring.skip(where="tanh"))


def own_tanh(signal, gain=1.0):
    """A node of the user's own that takes a signal and sends a message of its own."""
    value = lambda s, gain: ap.Signal.of(gain * jnp.tanh(s.value), s.port.shape[-1])
    forward = lambda s, gain: (value(s, gain), gain * (1 - jnp.tanh(s.value) ** 2))
    backward = lambda slope, m: (ap.Signal(slope * m.value, slope[..., None] * m.port), jnp.zeros(slope.shape[-1:]))
    return ap.node(ap.Propagator(forward, backward))(signal, jnp.broadcast_to(gain, signal.value.shape[-1:]))


def exchanged(a, b):
    """Two signals through a node of the user's own, each with the other's port."""
    added = lambda *signals: (each(jnp.add, *signals), None)
    both = ap.node(ap.Propagator(added, lambda _, message: (message, message)))
    return both(a._replace(port=b.port), b._replace(port=a.port))


class Net:
    """The parts of a small network, with short names."""

    def __init__(self, places, p, batch):
        self.at, self.p, (self.x, self.y) = places, p, batch

    def dense(self, name="1", signal=None, w=None):
        signal = self.at.signal(self.x) if signal is None else signal
        return mplp.dense(self.at[name], signal, self.p["w"] if w is None else w)

    def act(self, function, signal=None):
        return mplp.activation(self.at["a"], function, self.dense() if signal is None else signal)

    def loss(self, signal, y=None):
        return mplp.squared_error(self.at["loss"], signal, self.y if y is None else y)


def through_a_scan(net, step):
    signal, stacked = jax.lax.scan(lambda s, _: (step(s), s), net.at.signal(net.x), length=3)
    return net.loss(mplp.wire(lambda last, each: last + each[-1], signal, stacked))


def copied(net):
    return each(lambda a: jnp.stack([a, a]), net.at.signal(net.x))


def twice(net, function, **axes):
    """A function of a signal, under vmap of two copies of it."""
    return jax.vmap(lambda signal: function(signal=signal), **axes)(copied(net))


def in_shard_map(net, dense):
    at = functools.partial(jax.shard_map, mesh=jax.make_mesh((1,), ("i",)), in_specs=jax.P(), out_specs=jax.P())
    return net.loss(at(dense)(net.at.signal(net.x), net.p["w"]))


def scanned(net):
    """Two layers in a scan: the signal before, the signal after, and the sum of their losses."""

    def body(carry, _):
        signal, total = carry
        signal = net.act(jnp.tanh, net.dense("2", signal, net.p["v"]))
        return (signal, total + jnp.mean(net.loss(signal))), None

    first = net.dense()
    (last, loss), _ = jax.lax.scan(body, (first, jnp.zeros(())), length=2)
    return first, last, loss


def beside(extra):
    """A network whose loss is that of the scan, and something of its signals."""

    def make(net):
        first, last, loss = scanned(net)
        return loss + extra(net, first, last)

    return make


each = jax.tree.map
flipped = lambda a: jax.lax.cond(jnp.sum(a) > 0, jnp.negative, lambda a: a, a)
positive = lambda a: jnp.where(a > 0, a, 0)
stacked = functools.partial(each, lambda *arrays: jnp.stack(arrays)[0])
branch = lambda n, first, last: jax.lax.cond(last.value[0, 0] > 0, lambda: last.value[0, 1], lambda: 0.0)
value_in_scan = lambda n: through_a_scan(n, lambda s: n.at.signal(jnp.tanh(n.dense(signal=s).value)))
of_value = lambda n: lambda s, w: mplp.dense(n.at["1"], n.at.signal(s.value * w.value[0, 0]), w)
of_a_value = lambda n: lambda s: n.at.signal(s.value)
in_a_branch = lambda n, remake, pair: jax.lax.cond(n.x[0, 0] < 1, remake, lambda s: s, pair)
weight_again = lambda n: in_a_branch(n, lambda w: mplp.parameter(w.value), n.p["w"])
of_one_size = lambda n: mplp.wire(lambda a: jnp.stack([a[:3]] * 3), n.dense())
added = lambda n, pair: each(jnp.add, n.at.signal(pair.value), pair)
biased = lambda n: mplp.bias(n.at["b"], mplp.bias(n.at["b"], n.dense(), n.p["c"]), n.p["d"])
CUBE = jnp.ones((3, 3, 3))
LAST = {  # of a port, which has one axis more, the components of a message are the last, of one component here
    "backwards": lambda a: a[..., ::-1],
    "and cut": lambda a: a[:2],
    "and added to itself": lambda a: a + a,
    "doubled for each of its axes": lambda a: jax.lax.fori_loop(0, a.ndim, lambda _, a: 2 * a, a),
    "over the root of its width": lambda a: a / a.shape[-1] ** 0.5,
    "and mixed up": lambda a: a.T.reshape(a.shape),
    "and turned": lambda a: a.swapaxes(0, -2),
    "and repeated": lambda a: jnp.broadcast_to(a[..., None, :], (*a.shape[:-1], 3, a.shape[-1])),
    "and dropped out": lambda a: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, a.shape), a, 0.0),
    "and dropped by an array": lambda a: jnp.where(np.ones(a.shape, bool), a, 0.0),
    "and masked along its last axis": lambda a: jnp.where(jnp.zeros(a.shape[-1]).at[0].set(1) > 0, a, 0.0),
    "and turned for each of its axes": lambda a: jax.lax.fori_loop(0, a.ndim, lambda _, a: a.swapaxes(0, 1), a),
    "and turned in a branch": lambda a: jax.lax.cond(a.ndim > 3, lambda a: a.swapaxes(0, 1), lambda a: a, a),
}
mapped_by = lambda f: lambda n: n.loss(each(f, of_one_size(n)), f(CUBE))
forked = lambda signal: mplp.fork(signal, 1)[0]
OUTSIDE = r"outside the loss nodes.*mplp\.readout"
PENALTY = r"depends on params\['w'\] outside the loss nodes.*penalty.*rate \* jax\.grad"
REFUSED = {
    "a value in the loss": (beside(lambda n, first, last: 0.1 * jnp.sum(first.value**2)), OUTSIDE),
    "a value from a scan in the loss": (beside(lambda n, first, last: jnp.mean(last.value)), OUTSIDE),
    "a parameter in the loss": (beside(lambda n, first, last: 1e-3 * jnp.sum(n.p["w"].value ** 2)), PENALTY),
    "a condition in the loss": (beside(branch), OUTSIDE),
    "a weight of a loss": (lambda n: jnp.mean(n.dense("3").value) * n.loss(n.dense()), OUTSIDE),
    "an input": (lambda n: n.loss(n.dense(signal=n.at.signal(n.x + n.p["pos"].value))), r"params\['pos'\]"),
    "a value again": (lambda n: n.loss(n.dense("2", n.at.signal(jax.nn.relu(n.dense().value)))), "the dense node '1'"),
    "a closure of wire": (lambda n: n.loss(mplp.wire(lambda v: v * n.p["c"].value, n.dense())), r"wire closes .*'c'"),
    "a closure of a node": (lambda n: n.loss(n.act(lambda v: v * n.p["c"].value)), r"the activation node 'a' closes"),
    "a target": (lambda n: n.loss(n.dense(), n.y * n.p["c"].value), r"the squared_error node 'loss' takes data .*'c'"),
    "a parameter made again": (lambda n: n.loss(n.dense(w=mplp.parameter(2 * n.p["w"].value))), r"params\['w'\]"),
    "a parameter mapped": (lambda n: n.loss(n.dense(w=each(jnp.tanh, n.p["w"]))), r"params\['w'\]"),
    "a signal mapped": (lambda n: n.loss(each(jnp.tanh, n.dense())), "is not linear"),
    "a signal chosen by itself": (lambda n: n.loss(each(positive, n.dense())), "is not linear"),
    "a branch chosen by its signal": (lambda n: n.loss(each(flipped, n.dense())), "is not linear"),
    **{f"a signal mapped {how}": (mapped_by(f), "of mplp.wire") for how, f in LAST.items()},
    "a parameter chosen by itself": (lambda n: n.loss(n.dense(w=each(positive, n.p["w"]))), r"params\['w'\]"),
    "a branch chosen by its parameter": (lambda n: n.loss(n.dense(w=each(flipped, n.p["w"]))), r"params\['w'\]"),
    "a product of parameters": (lambda n: n.loss(n.dense(w=each(jnp.multiply, n.p["w"], n.p["v"]))), "'v'.*and.*'w'"),
    "a parameter times a value": (lambda n: n.loss(n.dense(w=each(lambda a: a * n.p["c"].value, n.p["w"]))), "'c'"),
    "a value scaled, its port not": (lambda n: n.loss(n.dense()._replace(value=2 * n.dense().value)), "node '1'"),
    "a value in a scan": (value_in_scan, "the dense node '1'"),
    "a value in a branch": (lambda n: n.loss(in_a_branch(n, of_a_value(n), n.dense())), r"takes data .*node '1'"),
    "a signal of one size": (lambda n: n.loss(stacked(n.dense(), ap.Signal.of(n.x, 1))), "size 1 alone.*places.signal"),
    "a value and its signal": (lambda n: n.loss(added(n, n.dense())), r"signal takes data .*dense node '1'"),
    "a parameter in a branch": (lambda n: n.loss(n.dense(w=weight_again(n))), r"mplp\.parameter takes data .*'w'"),
    "a port of another signal": (lambda n: n.loss(forked(n.dense()._replace(port=n.dense("2").port))), "'1'.*'2'"),
    "ports exchanged": (lambda n: n.loss(exchanged(n.dense(), n.dense("2"))), "'1'.*'2'"),
    "a parameter's value in one's own node": (lambda n: n.loss(own_tanh(n.dense(), n.p["c"].value)), "'c'"),
    "a value in shard_map": (lambda n: in_shard_map(n, of_value(n)), r"params\['w'\]"),
    # Two nodes of one name, which would share a state.
    "two weights": (lambda n: n.loss(n.dense(signal=n.dense(), w=n.p["v"])), r"several parameters, .*'w'\], and .*'v'"),
    "two biases": (lambda n: n.loss(biased(n)), r"bias node 'b'.*params\['c'\], and params\['d'\].*place\.within"),
    "in a scan": (lambda n: through_a_scan(n, lambda s: n.dense("1", n.dense("1", s), n.p["v"])), "'w'.*, and .*'v'"),
    "a constant": (lambda n: n.loss(n.dense("1", n.dense(), mplp.parameter(jnp.eye(3)))), r"'w'\], and a constant"),
}
after_a_step = lambda n: n.dense("2", n.act(lambda v: jnp.where(v > 0, 1.0, 0.0)), n.p["v"])
again = lambda n: jax.lax.scan(lambda s, _: (n.dense("1", s), 0), n.dense(), None, 2)[0]
weighted = lambda n: jax.vmap(lambda w: n.dense(w=w))(each(lambda a: jnp.stack([a, 2 * a]), n.p["w"]))
RIGHT = {
    "one node twice": lambda n: n.loss(jax.checkpoint(n.dense, static_argnums=0)("1", n.dense(), n.p["w"])),
    "a node in a scan and before": lambda n: n.loss(again(n)),
    "a readout beside a loss": beside(lambda n, first, last: 0.1 * jnp.mean(mplp.readout(n.at["r"], first) ** 2)),
    "a constant in the loss": beside(lambda n, first, last: jnp.sum(jax.lax.stop_gradient(first.value))),
    "a comparison in the loss": beside(lambda n, first, last: jnp.mean(jnp.where(first.value > 0, 1.0, 2.0))),
    "data": lambda n: n.loss(n.dense(signal=n.at.signal(n.x + jax.lax.stop_gradient(n.p["pos"].value)))),
    "linear maps": lambda n: n.loss(n.dense(w=each(lambda a, b: 2 * a.T - b / 3, n.p["w"], n.p["v"]))),
    "a choice": lambda n: n.loss(mplp.wire(lambda a, b: jnp.where(n.x[0, 0] < 1, a, b), n.dense(), n.dense("2"))),
    "a branch": lambda n: n.loss(in_a_branch(n, lambda s: each(lambda a: a.swapaxes(0, 1), s), of_one_size(n)), CUBE),
    "axes that come and go": lambda n: n.loss(each(jax.jit(lambda a: jnp.squeeze(a[None], 0)), n.dense())),
    "a name of a signal": lambda n: n.loss(each(lambda a: jax.ad_checkpoint.checkpoint_name(a, "h"), n.dense())),
    "copies under vmap, moved": lambda n: n.loss(mplp.wire(lambda a: a[:, 0], twice(n, n.dense, out_axes=1))),
    "copies of weights under vmap": lambda n: n.loss(mplp.wire(lambda a: a.sum(0), weighted(n))),
    "two nodes of one's own": lambda n: n.loss(n.dense("2", own_tanh(own_tanh(n.dense())))),
    "a scan": lambda n: through_a_scan(n, lambda s: n.act(jnp.tanh, n.dense(signal=s))),
    "shard_map": lambda n: in_shard_map(n, lambda s, w: mplp.dense(n.at["1"], s, w)),
    "weak types": lambda n: n.loss(mplp.wire(jnp.add, mplp.bias(n.at["b"], n.dense(), n.p["d"]), after_a_step(n))),
    "wire": lambda n: n.loss(mplp.wire(jnp.tanh, n.dense())),
    "wire of a custom_vjp": lambda n: n.loss(mplp.wire(sine, n.dense())),
    "wire of a node of first order": lambda n: n.loss(mplp.wire(jax.jit(first_order), n.dense())),
    "wire of other rules": lambda n: n.loss(mplp.wire(lambda x: rewired(lean(jax.random.key(0), x)), n.dense())),
}


def steps(net, step, weights=None):
    return jax.lax.scan(lambda s, w: (step(s, w), None), net.at.signal(net.x), weights, 2)[0]


def share(net):
    return mplp.shared(net.at["shared"], net.p["w"])


def branches(net):
    return jax.lax.cond(jnp.sum(net.x) > 0, lambda: net.dense("1"), lambda: net.dense("1"))


def nested(net, weights):
    return steps(net, lambda s, w: jax.lax.scan(lambda s, _: (net.dense("1", s, w), None), s, None, 2)[0], weights)


def copies(net, w):
    return mplp.wire(lambda a: a[0], twice(net, lambda signal: net.dense("1", signal, w)))


both = lambda n: each(lambda w, v: jnp.stack([w, v]), n.p["w"], n.p["v"])
dense = lambda n: lambda signal, w: n.dense("1", signal, w)
recomputed = lambda n: jax.checkpoint(n.dense, static_argnums=0)
AGAIN = {
    "a scan": lambda n: steps(n, lambda s, _: n.dense("1", s)),
    "a call in a scan": lambda n: steps(n, lambda s, _: recomputed(n)("1", s, n.p["w"])),
    "a scan in a scan": lambda n: nested(n, both(n)),
    "copies under vmap": lambda n: copies(n, n.p["w"]),
    "one node twice": lambda n: n.dense("1", n.dense()),
    "a call twice": lambda n: recomputed(n)("1", recomputed(n)("1", n.dense("2", w=n.p["v"]), n.p["w"]), n.p["w"]),
    "two nodes": lambda n: n.dense("1", n.dense("2")),
    "a transpose": lambda n: n.dense("1", n.dense("2"), each(lambda a: jnp.swapaxes(a, 0, 1), n.p["w"])),
}
ONCE = {
    "two parameters": lambda n: n.dense("1", n.dense("2", w=n.p["v"])),
    "a shared one, twice": lambda n: (lambda w: n.dense("1", n.dense("1", w=w), w))(share(n)),
    "a shared one, in a scan": lambda n: (lambda w: steps(n, lambda s, _: n.dense("1", s, w)))(share(n)),
    "a shared one, in copies": lambda n: copies(n, share(n)),
    "branches": branches,
    "copies with weights of their own": lambda n: mplp.wire(lambda a: a[0], jax.vmap(dense(n))(copied(n), both(n))),
    "layers in a scan": lambda n: steps(n, lambda s, w: n.dense("1", s, w), both(n)),
}


def network(make):
    return lambda places, p, batch: make(Net(places, p, batch))


def updates(net, params=P, batch=BATCH):
    return first_step(RULE, net, params, batch)[0]


def test_what_would_lose_its_message_is_refused():
    for make, match in REFUSED.values():
        refused((TypeError, ValueError), match, jax.eval_shape, lambda p, make=make: updates(network(make), p), P)


def test_what_goes_with_its_messages_is_right():
    """With the exact rule, updates are the gradient times the rate."""

    @jax.jit
    def both(params):
        found = {name: updates(network(make), params) for name, make in RIGHT.items()}
        loss = lambda params, net: jnp.mean(net(mplp.Places(RULE), jax.tree.map(mplp.parameter, params), BATCH))
        gradients = {name: jax.grad(loss)(params, network(make)) for name, make in RIGHT.items()}
        return found, jax.tree.map(lambda g: -0.1 * g, gradients)

    found, expected = both(P)
    close(found, expected, rtol=1e-5, atol=1e-7)
    close(found["wire of a node of first order"], found["wire"], rtol=1e-5, atol=1e-7)
    assert all(jnp.any(made["w"] != 0) for made in found.values())


def test_a_parameter_that_is_taken_again_warns_where_it_is_not_shared():
    """But not under rules whose answers add up."""
    for name, make in {**AGAIN, **ONCE}.items():
        net = network(lambda n, make=make: n.loss(make(n)))
        rule = mplp.Normalized(mplp.sites(net, P, BATCH), message_size=0, rngs=nnx.Rngs(0))
        jax.eval_shape(lambda p, net=net: updates(net, p), P)
        warned = pytest.warns(UserWarning, match=r"'1'.*mplp\.shared first")
        with warned if name in AGAIN else contextlib.nullcontext():
            jax.eval_shape(lambda p, net=net, rule=rule: first_step(rule, net, p, BATCH), P)


def test_data_and_weights_of_different_precision():
    """A node computes in the wider of the two; an update has its parameter's dtype; a rule is asked in its own."""

    def net(n):
        h = n.dense("2", n.act(jnp.tanh), n.p["v"])
        h = mplp.activation(n.at["gate"], jnp.multiply, mplp.scale(n.at["s"], h, n.p["c"]), n.at.signal(n.x))
        kernel = jax.tree.map(lambda w: w[None], n.p["w"])
        h = mplp.wire(lambda s: s[:, 0], mplp.conv(n.at["k"], mplp.wire(lambda s: s[:, None], h), kernel))
        return n.loss(mplp.bias(n.at["b"], h, n.p["c"]))

    low = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    run = jax.jit(lambda p, b: updates(network(net), p, b))
    exact = run(jax.tree.map(lambda x: x.astype(jnp.float32), low(P)), low(BATCH))
    for params, batch in [(P, low(BATCH)), (low(P), BATCH), (low(P), low(BATCH))]:
        got = run(params, batch)
        for name in ("w", "v", "c"):
            assert got[name].dtype == params[name].dtype
            np.testing.assert_allclose(got[name].astype(jnp.float32), exact[name], rtol=0.1, atol=0.005)
    same = run(low(P), jax.tree.map(lambda x: x.astype(jnp.float32), low(BATCH)))
    rounded = functools.partial(np.testing.assert_allclose, rtol=2.0**-7)  # once, or twice where updates are added up
    jax.tree.map(lambda a, b: rounded(a.astype(jnp.float32), b), same, exact)
