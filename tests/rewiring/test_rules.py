"""Each rule equals a backward pass by hand, to float precision; predictive coding has the gradients of its energy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import apgrad as ap
from apgrad import rewiring
from tests.cases import cases
from tests.refusals import refused

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
# NumPy's, so that what is computed by hand need not be compiled.
WS = [RNG.normal(size=shape).astype(np.float32) for shape in itertools.pairwise((5, 4, 3, 2))]
X, TARGET = (RNG.normal(size=shape).astype(np.float32) for shape in ((6, 5), (6, 2)))


def network(ws, x, activation=jnp.tanh):
    for w in ws[:-1]:
        x = activation(x @ w)
    return x @ ws[-1]


def close(got, expected, rtol=2e-5):
    """To float precision: relative to the largest element of each array."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(np.max(np.abs(b))))


def learned(rule, f=network, args=(WS, X), key=()):
    """The rule's parameters, their updates and the gradients of the arguments, under `jit`, for a squared error."""
    rewired = ap.rewire(f, rule)
    loss = lambda *a: jnp.sum((rewired(*key, *a) - TARGET) ** 2) / 2

    @jax.jit
    def of(args):
        params = (rewired.init(*args),) if rule.init else ()
        return [*params, *jax.grad(loss, argnums=tuple(range(len(params) + len(args))))(*params, *args)]

    return jax.tree.map(np.asarray, of(args))


def by_hand(feedback):
    """Gradients of the weights and the message to x, by `feedback(i, message to the output of layer i, error)`."""
    hs = [X]
    for w in WS[:-1]:
        hs.append(np.tanh(hs[-1] @ w))
    error = message = hs[-1] @ WS[-1] - TARGET
    gradients = []
    for i in (2, 1, 0):
        gradients.insert(0, hs[i].T @ message)
        message = feedback(i, message, error) * (1 - hs[i] ** 2 if i else 1)
    return gradients, message


def names(n=3):
    return [f"dot_general[{i}]" for i in range(n)]


@pytest.mark.quick
def test_rules_with_feedback_weights():
    for make in (rewiring.feedback_alignment, rewiring.kolen_pollack):
        params, update, *gradients = learned(make(KEY))
        close(gradients, by_hand(lambda i, m, e, params=params: m @ params[names()[i]].T))
        learn = gradients[0] if make is rewiring.kolen_pollack else [np.zeros_like(w) for w in WS]
        close([update[n] for n in names()], learn, 0)
    params, _, *gradients = learned(rewiring.direct_feedback_alignment(KEY))
    close(gradients, by_hand(lambda i, m, e: e @ params[names()[i]]))
    wide = ap.rewire(lambda w, x: x @ w, rewiring.feedback_alignment(KEY))
    draw = jax.jit(wide.init)(np.ones((400, 300), "float32"), np.ones((2, 400), "float32"))["dot_general[0]"]
    assert abs(float(np.std(draw)) * 20 - 1) < 4 / np.sqrt(2 * draw.size)


def test_sign_symmetry():
    for scale, size in ((None, lambda w: np.sqrt(np.mean(w**2))), (2.0, lambda w: 2.0)):
        gradients = learned(rewiring.sign_symmetry(scale=scale))
        close(gradients, by_hand(lambda i, m, e, size=size: m @ (size(WS[i]) * np.sign(WS[i])).T))


def test_feedback_in_half_precision():
    """Of more inputs than the largest number of float16, and of weights whose squares it rounds to 0."""
    w, x = np.full((2**17, 1), 1e-4, "float16"), np.ones((1, 2**17), "float16")
    rewired = lambda rule: ap.rewire(lambda w, x: x @ w, rule)
    weights = jax.jit(rewired(rewiring.feedback_alignment(KEY)).init)(w, x)["dot_general[0]"]
    np.testing.assert_allclose(np.std(np.asarray(weights, float)), 2**-8.5, rtol=0.01)
    signs = rewired(rewiring.sign_symmetry())
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: signs(w, x)[0, 0]))(x), w.T, rtol=1e-3)


def test_synthetic_gradients():
    plain = rewiring.synthetic_gradients()
    begun = plain.init
    params, update, *gradients = learned(plain._replace(init=lambda s: jax.tree.map(lambda p: p + 0.3, begun(s))))
    seen = {}

    def guess(i, m, e):
        h = X
        for w in WS[:i]:
            h = np.tanh(h @ w)
        a, c = params[names()[i]]
        off = h @ a + c - m @ WS[i].T
        seen[names()[i]] = h.T @ off, off.sum(0)
        return h @ a + c

    close(gradients, by_hand(guess))
    close(update, seen)


@jax.jit
def tanh_layer(w, x):
    return jnp.tanh(x @ w)


def test_difference_target_propagation():
    """By the paper's algorithm 1, in targets: t = h + g(t') - g(h')."""
    step, noise = 0.5, 1.0
    f = lambda ws, x: tanh_layer(ws[1], tanh_layer(ws[0], x)) @ ws[2]
    rule = rewiring.difference_target_propagation(KEY, "tanh_layer", step=step, noise=noise)
    params, _, *gradients = learned(rule, f, key=(jax.random.key(3),))
    (v1, c1), (v2, c2) = (params[f"tanh_layer[{i}]"] for i in range(2))
    h1 = np.tanh(X @ WS[0])
    h2 = np.tanh(h1 @ WS[1])
    error = h2 @ WS[2] - TARGET
    inverse = lambda h, v, c: np.tanh(h @ v + c)
    t2 = h2 - step * error @ WS[2].T
    t1 = h1 + inverse(t2, v2, c2) - inverse(h2, v2, c2)
    t0 = X + inverse(t1, v1, c1) - inverse(h1, v1, c1)
    # Of |tanh(h w) - t|^2 / 2.
    local = lambda h, after, t: h.T @ ((after - t) * (1 - after**2)) / step
    close(gradients, ([local(X, h1, t1), local(h1, h2, t2), h2.T @ error], (X - t0) / step), 1e-4)

    # The inverse's update in the mean over the noise: a gradient, so that following it lowers the loss.
    rewired, forever = ap.rewire(f, rule), jax.random.split(KEY, 300)

    def loss(params, key):
        v, c = params["tanh_layer[0]"]
        x = X + noise * jax.random.normal(key, X.shape)
        return jnp.sum((jnp.tanh(jnp.tanh(x @ WS[0]) @ v + c) - x) ** 2) / 2

    mine = lambda k: jax.grad(lambda p: jnp.sum(rewired(k, p, WS, X)))(params)["tanh_layer[0]"]
    expected = lambda k: jax.grad(loss)(params, k)["tanh_layer[0]"]
    pairs = jax.jit(jax.vmap(lambda k: list(zip(mine(k), expected(k), strict=True))))(forever)
    for a, b in jax.tree.map(np.asarray, pairs):
        assert np.all(np.abs(a.mean(0) - b.mean(0)) < 4 * np.sqrt((a.var(0) + b.var(0)) / len(forever)))


@jax.jit
def spike(v):
    return (v > 0).astype(v.dtype)


def test_sites_that_a_rule_is_not_for():
    product = lambda w, x: x @ w
    of = lambda rule, x=X: ap.rewire(product, rule)(WS[0], x)
    empty = ap.rewire(product, rewiring.feedback_alignment(KEY)).init
    summed = ap.rewire(lambda ws, x: network(ws, x).sum(), rewiring.direct_feedback_alignment(KEY))
    for call, words in (
        (lambda: learned(rewiring.difference_target_propagation(KEY, "tanh")), "takes layers with one array"),
        (lambda: of(rewiring.surrogate_gradient(where="dot_general")), "one array to one of its shape"),
        (lambda: of(rewiring.surrogate_gradient()), "takes 'spike' or 'heaviside'; where= names a primitive or jit"),
        (lambda: of(rewiring.skip(where="dot_general")), "skip is for a function of one array .* write a propagator"),
        (lambda: empty(WS[0], X[:0]), "has no entries: give init more data"),
        (lambda: empty(WS[0][:, :0], X), "has no entries: .* a where= without it"),
        (lambda: summed.init(WS, X), "Leave the loss outside of the function"),
    ):
        refused(ValueError, words, call)


def test_direct_feedback_does_not_take_the_examples_for_the_outputs():
    """An output of one number for each example, without its last axis: messages were mixtures of the examples'."""
    direct, one = rewiring.direct_feedback_alignment(KEY), [*WS[:2], WS[2][:, :1]]
    shapes = lambda f, *args: {n: b.shape for n, b in jax.eval_shape(ap.rewire(f, direct).init, *args).items()}
    layer = lambda w, x: jnp.tanh(x @ w)
    recurrent = lambda w, x: jax.lax.scan(lambda h, _: (layer(w, h), None), x, length=2)[0].sum(-1)
    for f, args in (
        (lambda ws, x: network(ws, x)[:, 0], (one, X)),
        (lambda ws, x: jnp.mean((network(ws, x) - TARGET) ** 2, -1), (WS, X)),  # a loss for each example
        (recurrent, (np.ones((5, 5)), X)),
    ):
        refused(ValueError, r"for each of 6 examples.*Keep its last axis, \(6, 1\)", shapes, f, *args)
    for x in X[0], X[:1]:  # a function of one example
        assert shapes(lambda ws, x: network(ws, x).reshape(-1), WS, x)["dot_general[0]"] == (2, *x.shape)
    assert shapes(lambda ws, x: network(ws, x[None])[0], one, X[0])["dot_general[0]"] == (1, 1, 5)


def test_rules_that_change_a_message_where_it_passes():
    exact, floats = 2 * X @ WS[0], lambda *shape: np.zeros(shape, "float32")
    norm, row = np.linalg.norm(exact), np.float32([[1, 0, 0, 0, 0]])
    rounded = lambda w, x: jnp.sum(checkpoint_name(jnp.round(x @ w), "here") ** 2)
    square = lambda w, x: jnp.sum(checkpoint_name(x @ w, "here") ** 2)
    times = lambda x, a: jnp.sum(a * checkpoint_name(x, "here"))
    spiking, currents = lambda w, x: jnp.sum(spike(x @ w) ** 2), X @ WS[0]
    fired, surrogate = 2 * np.float32(currents > 0), rewiring.surrogate_gradient
    pair = jax.jit(lambda x: (jnp.sin(x), jnp.argmax(x)))  # several arrays, with integers
    of_pair, call = lambda w, x: 5 * jnp.sum(pair(w * x)[0]), lambda site: site.kind == "call"
    clip, normalize, reverse = rewiring.clip_messages, rewiring.normalize_messages, rewiring.gradient_reversal
    both = lambda norm, where: (clip(norm, where=where), normalize(norm, where=where))
    cases = [  # (function, rule, arguments, gradient)
        (rounded, rewiring.skip(), (WS[0], X), X.T @ (2 * np.round(X @ WS[0]))),
        (spiking, surrogate(beta=5.0), (WS[0], X), X.T @ (fired / (1 + 5 * np.abs(currents)) ** 2)),
        (spiking, surrogate(derivative=jnp.cos), (WS[0], X), X.T @ (fired * np.cos(currents))),
        (square, reverse("here", strength=jnp.float32(0.3)), (WS[0], X), X.T @ (-0.3 * exact)),
        (square, clip(1.5), (WS[0], X), X.T @ (1.5 * exact / norm)),
        (square, clip(1e6), (WS[0], X), X.T @ exact),
        (square, normalize(1e6, where="here"), (WS[0], X), X.T @ (1e6 * exact / norm)),
        (square, normalize(), (floats(5, 4), X), floats(5, 4)),
        (lambda w, x: 1e30 * jnp.sum(x @ w), clip(1.0), (WS[0], row), row.T @ np.full((1, 4), 0.5, "float32")),
        (of_pair, reverse(call, strength=-0.5), (floats(), np.ones(1, "float32")), np.float32(2.5)),
        (of_pair, clip(1, where=call), (floats(), np.ones(1, "float32")), np.float32(1)),
        # A bound that is infinite in half precision clips nothing, and an infinite message has no direction.
        (times, clip(1e5, where="here"), (np.zeros(3, "float16"), np.float16(1)), np.ones(3, "float16")),
        *((times, r, (floats(2), np.float32([np.inf, 1])), np.full(2, np.nan, "float32")) for r in both(1.0, "here")),
    ]
    # Neither the message's norm nor its inverse need be a number of its dtype.
    for dtype, size, count in (("float32", 3e38, 1), ("float32", 1e37, 10_000), ("float16", 6e4, 10_000)):
        args, wanted = (np.zeros(count, dtype), np.asarray(size, dtype)), np.full(count, count**-0.5, dtype)
        cases += [(times, rule, args, wanted) for rule in both(1.0, "here")]
    of_all = jax.jit(lambda given: [jax.grad(ap.rewire(f, r))(*a) for (f, r, *_), a in zip(cases, given, strict=True)])
    for got, (*_, wanted) in zip(of_all([args for _, _, args, _ in cases]), cases, strict=True):
        assert got.dtype == wanted.dtype
        size = np.max(np.abs(wanted.astype("float32")), initial=0, where=~np.isnan(wanted))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=size * (2e-5 if got.dtype == "float32" else 1e-3))


def test_options_are_finite_numbers():
    r, nan, inf = rewiring, float("nan"), float("inf")
    norms = [0.0, -1.0, nan, "1", jnp.ones(2)]
    for make in (
        *(lambda f=f, n=norm: f(n) for f in (r.clip_messages, r.normalize_messages) for norm in norms),
        *(lambda x=x: r.sign_symmetry(scale=x) for x in (0.0, nan, inf, "a")),
        lambda: r.surrogate_gradient(beta=-1.0),
        lambda: r.gradient_reversal("x", strength=jnp.ones(3)),
        lambda: r.difference_target_propagation(KEY, "x", step=0.0),
        lambda: r.predictive_coding("x", rate=0.0),
    ):
        refused(ValueError, "must be a finite number", make)
    for make in (r.feedback_alignment, r.direct_feedback_alignment, r.kolen_pollack):
        refused(TypeError, f"the key of {make.__name__} is one PRNG key", make, 3)
    for steps in (0, 2.5):
        refused(ValueError, "must be an integer", r.predictive_coding, "x", steps=steps)
    refused(ValueError, "got beta=3.0 and a derivative", r.surrogate_gradient, derivative=jnp.abs, beta=3.0)
    refused(TypeError, r"first_of takes a rule .*, got function. Call it", r.first_of, r.sign_symmetry)
    refused(ValueError, "first_of needs at least one rule", r.first_of)
    assert jax.jit(lambda s: jax.grad(ap.rewire(jnp.sin, r.gradient_reversal("sin", strength=s)))(0.0))(2.0) == -2


def test_layers_without_outputs_are_layers():
    shapes = lambda rule, f: jax.tree.map(jnp.shape, ap.rewire(f, rule).init(jnp.ones((3, 0)), jnp.ones((4, 3))))
    targets = shapes(rewiring.difference_target_propagation(KEY, "tanh_layer"), tanh_layer)
    direct = shapes(rewiring.direct_feedback_alignment(KEY), lambda w, x: x @ w)
    assert targets == {"tanh_layer[0]": ((0, 3), (3,))} and direct == {"dot_general[0]": (0, 3)}


COMPLEX = rewiring.sign_symmetry, rewiring.synthetic_gradients


def test_complex_weights_have_messages_as_those_of_jax():
    """Which are conjugates of directions: a length has no conjugate, and an error's square has one in its message."""
    w, x = (RNG.normal(size=(2, *shape)).astype(np.float32) for shape in ((3, 2), (4, 3)))
    w, x = w[0] + 1j * w[1], x[0] + 1j * x[1]
    symmetric, guessed = (ap.rewire(lambda w, x: x @ w, rule()) for rule in COMPLEX)
    real = lambda f: lambda *args: jnp.sum(jnp.real(f(*args)))
    guess = guessed.init(w, x)
    both = lambda w, x: (jax.grad(real(symmetric), 1)(w, x), jax.grad(real(guessed))(guess, w, x))
    message, update = jax.jit(both)(w, x)
    size = np.sqrt(np.mean(np.abs(w) ** 2))
    close(message, np.broadcast_to(np.sum(size * w / np.abs(w), 1), x.shape))
    close(update["dot_general[0]"][1], -np.conj(4 * w.sum(1)))


def test_forward_gradients_of_complex_sites_are_unbiased():
    @jax.jit
    def square(z):
        return jnp.abs(z) ** 2

    spectrum = lambda w: jnp.sum(jnp.arange(1.0, 4.0) * square(jnp.fft.fft(w)))
    w = jnp.array([1.0, -2.0, 0.5])
    of_real = jax.grad(ap.rewire(spectrum, rewiring.forward_gradient(where="square")), argnums=1)
    of_complex = jax.grad(ap.rewire(lambda z: jnp.abs(z) ** 2, rewiring.forward_gradient()), argnums=1)

    def estimate(key):
        g = of_complex(key, jnp.complex64(1 + 2j))
        return of_real(key, w), g.real, g.imag

    ap.testing.assert_unbiased(estimate, (jax.jit(jax.grad(spectrum))(w), 2.0, -4.0), KEY, 20_000)


def test_forward_gradients_are_unbiased_of_the_whole_and_layer_by_layer():
    loss = lambda ws, x, n: jnp.sum((network(ws, x) - TARGET) ** 2) / 2 + n.astype(jnp.float32)
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(WS, X, jnp.int32(1))
    layers = rewiring.forward_gradient(where=lambda site: site.kind == "dense")
    for rule in (rewiring.forward_gradient(), layers):
        estimate = jax.grad(ap.rewire(loss, rule), argnums=(1, 2))
        ap.testing.assert_unbiased(lambda key, e=estimate: e(key, WS, X, jnp.int32(1)), expected, KEY, 4000)
    # The gradient of a sum is (sum of v) v, whose mean is the variance of v. In bfloat16 JAX draws v with mean -.01.
    estimate = jax.grad(ap.rewire(jnp.sum, rewiring.forward_gradient()), argnums=1)
    found = jax.jit(lambda key: [estimate(key, jnp.ones(64, dtype)) for dtype in ("float32", "bfloat16")])(KEY)
    np.testing.assert_allclose(np.asarray(found[1], np.float32), found[0], rtol=0.02, atol=0.1)


WITH_FEEDBACK = rewiring.feedback_alignment, rewiring.direct_feedback_alignment, rewiring.kolen_pollack
OF_LAYERS = {make.__name__: functools.partial(make, KEY) for make in WITH_FEEDBACK}
OF_LAYERS |= {make.__name__: make for make in (rewiring.synthetic_gradients, rewiring.sign_symmetry)}
of_layers = cases("make", OF_LAYERS)


def run(f, rule, args=(WS, X)):
    rewired = ap.rewire(f, rule)
    params = [jax.eval_shape(rewired.init, *args)] if rewired.rule.init else []
    jax.eval_shape(rewired, *params, *args)


@of_layers
def test_a_rule_that_changes_only_the_messages_to_the_data_warns_once(make):
    """At the layers that see the data, though in a scope or a scan; not at others, nor where no layer was named."""

    def f(ws, x):
        bias = jnp.sum(ws[0])
        for i, w in enumerate(ws):
            with jax.named_scope(f"l{i}"):
                x = jnp.tanh(x @ w) if i else jnp.tanh(2 * x @ w) + bias
        return x

    def recurrent(ws, xs):
        def step(h, x):
            with jax.named_scope("l1"):
                h = h @ ws[1]
            return jnp.tanh(jax.named_scope("l0")(lambda: x @ ws[0])() + h[:, :4] + ws[2][0, 0]), None

        return jax.lax.scan(step, jnp.zeros((6, 4)), xs)[0]

    of_two = [WS[0], jnp.ones((4, 4)), WS[2]], jnp.stack([X, X])
    for where in ("l1", ("l0", "l1"), None, lambda site: site.name.startswith("l2")):
        run(f, make(where=where))
    run(recurrent, make(where="l1"), of_two)
    run(lambda ws, x: x @ ws[0] + (x + ws[0][0, 0]) @ ws[0], make(where="dot_general"))
    rule = make(where="l0")
    several = rewiring.first_of(rule, rewiring.clip_messages(1.0, where="tanh"))
    for case in ((f, rule), (f, several), (recurrent, rule, of_two)):
        with pytest.warns(UserWarning, match=r"the messages to the inputs of .*l0/dot_general\[0\], which") as found:
            run(*case)
        assert [w.filename for w in found] == [__file__]


@of_layers
def test_data_named_as_parameters_warn_where_no_layer_is_named(make):
    """The data are the weight of the first layer, and the other products are no layers; one layer does not tell."""
    first, x = lambda x, ws: network(ws, x), X[:5]
    with pytest.warns(UserWarning, match=r"the inputs of dot_general\[0\], .*argnums") as found:
        run(first, make(), (x, WS))
    assert [w.filename for w in found] == [__file__]
    run(lambda x, ws: (x.T @ x) @ ws[0], make(), (x, WS))  # products of data
    run(lambda w, ws, x: network([*ws, w], x), make(), (WS[2], WS[:2], X))  # frozen features
    ap.rewire(first, make(), argnums=1).init(x, WS)


@of_layers
def test_the_name_of_a_scope_takes_the_layers_inside(make):
    """A name that takes none is an error, with the nearest names."""

    def f(ws, x):
        with jax.named_scope("encoder"):
            with jax.named_scope("first"):
                x = jnp.tanh(x @ ws[0])
            x = jnp.tanh(x @ ws[1])
        return jax.named_scope("head")(lambda x: x @ ws[2])(x)

    taken = lambda where: [s.name for s in ap.rewire(f, make(where=where))._plan((WS, X))[1].taken]
    first, second, head = "encoder/first/dot_general[0]", "encoder/dot_general[0]", "head/dot_general[0]"
    for where, wanted in {
        "encoder": [first, second],
        "first": [first],
        "encoder/first": [first],
        ("head", "first"): [first, head],
        "dot_general": [first, second, head],
        None: [first, second, head],
    }.items():
        assert taken(where) == wanted
    assert taken(lambda site: site.inputs[0].shape[-1] < 5) == [second, head]  # a function is asked of layers alone
    for where in ("encodr", ("head", "encodr")):
        refused(ValueError, "'encodr'; did you mean 'encoder'", ap.rewire(f, make(where=where)).init, WS, X)
    f = lambda w, x: jnp.tanh(x @ x.T) @ (x @ w)
    for where in ("tanh", "dot_general"):
        refused(ValueError, "the rule is for layers", run, f, make(where=where), (WS[0], X))


@pytest.mark.parametrize("make", list(OF_LAYERS.values())[:4])
def test_layers_that_a_scan_runs_one_after_the_other_are_not_one_layer(make):
    """Stacked weights would share what a rule learns or draws for each layer; a weight that stays is one layer."""
    stacked = lambda ws, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
    again = lambda w, x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=2)[0]
    carried = lambda w, x: jax.lax.scan(lambda c, _: ((c[0], c[1] @ c[0]), None), (w, x), length=2)[0][1]
    turns = lambda ws, x: jax.lax.scan(lambda c, _: ((c[1], c[0], c[2] @ c[0]), None), (*ws, x), length=2)[0][2]
    w, x = jnp.ones((3, 3)), X[:, :3]
    for several in (stacked, turns):
        refused(ValueError, "another layer at each step of a scan", run, several, make(), (jnp.stack([w, w]), x))
    for one in (again, carried):
        assert ap.rewire(one, make()).init(w, x)


def conv(x, w, stride):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=layout)


def test_convolutions():
    convnet = lambda ps, x: conv(jnp.tanh(conv(x, ps[0], 1)), ps[1], 2).reshape(len(x), -1) @ ps[2]
    shapes = [(3, 3, 1, 2), (3, 3, 2, 3), (12, 2), (6, 4, 4, 1)]
    *params, images = (RNG.normal(size=shape).astype(np.float32) for shape in shapes)

    @jax.jit
    def by_hand(direct, aligned):
        error = convnet(params, images) - TARGET
        _, pullback = jax.vjp(lambda w: jnp.tanh(conv(images, w, 1)), params[0])
        fed = (error @ direct["conv_general_dilated[1]"].reshape(2, -1)).reshape(6, 4, 4, 2)
        back = lambda h: conv(h, aligned["conv_general_dilated[1]"], 2).reshape(6, -1) @ aligned["dot_general[0]"]
        (sent,) = jax.linear_transpose(back, jax.ShapeDtypeStruct((6, 4, 4, 2), jnp.float32))(error)
        return pullback(fed)[0], pullback(sent)[0]

    rules = rewiring.direct_feedback_alignment(KEY), rewiring.feedback_alignment(KEY)
    found = [learned(rule, convnet, (params, images)) for rule in rules]
    close([gradients[0] for _, _, gradients, _ in found], by_hand(*(fed for fed, *_ in found)))


def test_rules_compose():
    """By site with `first_of`, and at a site with `ap.chain`."""
    alignment = rewiring.feedback_alignment(KEY, where=lambda s: s.kind == "dense" and s.inputs[1].shape[1] > 2)
    direct = rewiring.direct_feedback_alignment(KEY)
    rule = rewiring.first_of(alignment, rewiring.clip_messages(0.1, where="tanh"), direct)
    params, update, gradients, _ = learned(rule)
    assert params["tanh[0]"] is None and update["tanh[0]"] is None
    clip = lambda m: m * (0.1 / np.maximum(np.linalg.norm(m), 0.1))
    back = lambda i, m, e: clip(e @ params["dot_general[2]"] if i == 2 else m @ params[names()[i]].T)
    close(gradients, by_hand(back)[0])

    halve = ap.Propagator(lambda x: (x, None), lambda _, m: (m / 2,))
    plain = rewiring.feedback_alignment(KEY)
    chained = plain._replace(at=lambda site, params: ap.chain(plain.at(site, params), halve))
    params, _, *gradients = learned(chained)
    expected, to_x = by_hand(lambda i, m, e: m / 2 @ params[names()[i]].T)
    close(gradients[1], to_x)
    close(gradients[0], [g / 2 for g in expected])


def test_a_rule_among_several_that_takes_nothing_is_named():
    """As it is an error alone, unless rules before it took all of its sites."""
    r = rewiring
    plain = lambda w, x: (x @ w > 0).astype(x.dtype)
    scoped = lambda w, x: jax.jit(lambda w, x: jnp.heaviside(x @ w, 0.0))(w, x)
    init = lambda f, *rules: ap.rewire(f, r.first_of(*rules)).init(WS[0], X)
    layers, spikes = r.clip_messages(1.0), r.surrogate_gradient()
    whole, around = r.forward_gradient(), r.clip_messages(1.0, where="<lambda>")
    for number, rules in (0, (spikes, layers)), (2, (layers, r.first_of(layers, spikes))), (1, (whole, spikes)):
        refused(ValueError, rf"rule {number} of first_of .* site.*'spike' or 'heaviside'; where", init, plain, *rules)
    refused(ValueError, r"rule 0 of first_of .* sites around .* later", init, scoped, spikes, around)
    inside = r.clip_messages(1.0, where=lambda site: site.label == "exp")
    assert init(lambda w, x: jax.nn.softplus(x @ w), r.clip_messages(1.0, where="softplus"), inside) == {}
    assert init(scoped, around, spikes) == init(scoped, layers, spikes, layers, r.clip_messages(2.0)) == {}
    assert init(scoped, around, r.surrogate_gradient(where="heaviside")) == {}  # by a name, too
    misspelt = r.surrogate_gradient(where="heavyside")
    refused(ValueError, "rule 1 of first_of .* 'heavyside'; did you mean 'heaviside'", init, scoped, around, misspelt)


SMALL = [0.7 * w for w in WS]


def squared_error(ws, x, target, **options):
    return jnp.sum(jnp.abs(network(ws, x, **options) - target) ** 2) / 2


def energy(values, ws, x, target):
    total, square = 0.0, lambda x: jnp.sum(jnp.abs(x) ** 2) / 2
    for z, w in zip(values, ws[:-1], strict=True):
        total, x = total + square(z - jnp.tanh(x @ w)), z
    return total + square(x @ ws[-1] - target)


def after_inference(ws, x, target, steps, rate):
    values, h = [], x
    for w in ws[:-1]:
        values.append(h := jnp.tanh(h @ w))
    for _ in range(steps):
        down = jax.grad(energy)(values, ws, x, target)
        values = [z - rate * jnp.conj(g) for z, g in zip(values, down, strict=True)]
    return jax.grad(energy, argnums=(1, 2, 3))(values, ws, x, target)


@pytest.mark.parametrize("steps, rate, factor", [(2, 0.1, 1), (7, 0.3, 1), (5, 0.2, 1 + 0.4j)])
def test_gradients_of_the_energy_after_inference(steps, rate, factor):
    """Hidden values in a branch, which an integer takes, and in a checkpointed block."""

    @jax.checkpoint
    def in_branch(x, n):
        return jax.lax.cond(n > 0, jnp.tanh, lambda x: x, x)

    @jax.jit
    def both(n, *args):
        loss = lambda *args: squared_error(*args[:3], activation=lambda x: in_branch(x, args[3]))
        rewired = ap.rewire(loss, ap.rewiring.predictive_coding("tanh", steps=steps, rate=rate))
        found = jax.value_and_grad(rewired, argnums=(0, 1, 2))(*args, n)
        return found, (squared_error(*args), after_inference(*args, steps, rate))

    typed = lambda x: x.astype(np.result_type(np.float32, type(factor)(0)))
    weights = [typed(factor * w) for w in SMALL]
    (value, gradients), (wanted, expected) = both(1, weights, typed(X), typed(TARGET))
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    close(gradients, expected)


def test_a_value_that_no_message_reaches_stays_its_prediction():
    """Behind a stop_gradient the first hidden values are inputs to the others; they were 0, forward too."""

    stopped = lambda ws, x, target: squared_error(ws[1:], jax.lax.stop_gradient(jnp.tanh(x @ ws[0])), target)
    rewired = ap.rewire(stopped, ap.rewiring.predictive_coding("tanh", steps=5, rate=0.2))

    @jax.jit
    def both(ws):
        return jax.grad(rewired)(ws, X, TARGET), after_inference(ws[1:], jnp.tanh(X @ ws[0]), TARGET, 5, 0.2)[0]

    (first, *others), expected = both(SMALL)
    assert not np.any(first)
    close(others, expected)


def test_gradients_are_nan_where_inference_more_than_doubles_the_energy():
    """A descent that is too fast ends anywhere, with gradients of any size. At the least energy it stays."""
    # The energy has the curvature 1 + a^2. A relu of NaN has the derivative 0.
    loss = lambda w, a, x: jnp.sum((a * jnp.tanh(x @ jax.nn.relu(w)) - 1) ** 2) / 2
    coded = lambda f, rate: jax.grad(ap.rewire(f, ap.rewiring.predictive_coding("tanh", rate=rate)))
    half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

    @jax.jit
    def gradients(ws, a, x):
        each = jax.vmap(coded(loss, 0.1), (None, 0, 0))(ws[0], a, x)
        least = ws, x, network(ws, x)
        return each, coded(loss, 0.05)(ws[0], a, x), [coded(squared_error, 0.2)(*args) for args in (least, half(least))]

    a = np.float32([[0], [2], [4], [5], [30], [1e15]])  # the least one that diverges at the rate 0.1 is the root of 19
    each, slow, least = gradients(SMALL, a, X)
    np.testing.assert_array_equal(np.isnan(each).all((1, 2)), [False, False, False, True, True, True])
    assert not np.isnan(each[:3]).any() and np.isnan(slow).all() and not any(np.isnan(g).any() for g in least[0])
    assert not any(np.isnan(np.float32(g)).any() for g in least[1])


def test_message_scales_all_and_examples_are_inferred_apart():
    """The mean outside is the sum divided, and `vmap` over examples gives what the batch gives."""
    rewired = ap.rewire(squared_error, ap.rewiring.predictive_coding("tanh", steps=5))
    whole = lambda ws: rewired(ws, X, TARGET)
    mean = lambda ws: jnp.mean(jax.vmap(rewired, (None, 0, 0))(ws, X, TARGET))
    of_mean, batch = jax.jit(lambda ws: [jax.grad(f)(ws) for f in (mean, whole)])(SMALL)
    close([6 * np.asarray(g) for g in of_mean], batch)


def test_what_it_cannot_take_is_an_error():
    rule = ap.rewiring.predictive_coding("tanh")
    for function, words in (
        (lambda ws, x, t: jnp.tanh(x @ ws[0]), "needs the loss"),
        (lambda ws, x, t: jnp.sum(jax.lax.map(jnp.tanh, x)), "is in a scan"),
        (lambda ws, x, t: jnp.sum(x @ ws[0]), "no site by the name 'tanh'"),
    ):
        refused(ValueError, words, jax.grad(ap.rewire(function, rule)), SMALL, X, TARGET)
    beside = lambda ws, x, t: jnp.sum(jnp.tanh(x @ ws[0])) + jax.jit(lambda w: jnp.sum(jnp.tanh(w)))(ws[0])
    branch = lambda ws, x, t: jax.lax.cond(jnp.sum(x) > 0, lambda: beside(ws, x, t), lambda: squared_error(ws, x, t))
    for function, row in (squared_error, 2), (beside, 1), (branch, 2):
        few = lambda steps, f=function: jax.grad(ap.rewire(f, ap.rewiring.predictive_coding("tanh", steps=steps)))
        if row > 1:
            refused(ValueError, f"has {row} hidden values in a row", jax.eval_shape, few(1), SMALL, X, TARGET)
        jax.eval_shape(few(row), SMALL, X, TARGET)
