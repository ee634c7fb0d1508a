"""`ap.rewire`: a rule that rebuilds each site's own derivative changes nothing; what cannot be seen is an error."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings, strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas

import apgrad as ap
from apgrad.rewiring import Rule
from tests.refusals import refused
from tests.tracing.models import MLP

KEY = jax.random.key(0)
W = 0.5 * jax.random.normal(KEY, (3, 3))
X = jax.random.normal(jax.random.key(1), (4, 3))
SINGLE = ("dense", "conv", "matmul", "elementwise", "name")


def rebuilding(kinds):
    """Each site's own derivative, for the kinds given; `messages` counts the messages that sites got."""
    messages = []

    def at(site, params):
        def backward(pullback, message):
            messages.append(site.name)
            return pullback(message)

        return ap.Propagator(lambda *inputs: jax.vjp(site.function, *inputs), backward)

    return Rule(lambda site: site.kind in kinds, at), messages


def scanned(f):
    return lambda w, x: jax.lax.scan(lambda h, _: (f(w, h), None), x, length=2)[0]


STEPS = {
    "dense": lambda w, x: x @ w,
    "flipped": lambda w, x: (w.T @ x.T).T,
    "tanh": lambda w, x: jnp.tanh(x),
    "relu": lambda w, x: jax.nn.relu(x),
    "softmax": lambda w, x: jax.nn.softmax(x),
    "attention": lambda w, x: jax.nn.softmax(x @ (x @ w).T) @ x,
    "bias": lambda w, x: x + w[0],
    "scan": scanned(lambda w, x: jnp.sin(x @ w)),
    "remat": jax.checkpoint(lambda w, x: jnp.sin(x @ w)),
    "jit": jax.jit(lambda w, x: jnp.sin(x) * (x @ w)),
    "vmap": lambda w, x: jax.vmap(lambda x: jnp.sin(w @ x))(x),
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ w), lambda x: 2 * x, x),
    "scan of remat": scanned(jax.checkpoint(lambda w, x: jnp.cos(x @ w))),
    "name": lambda w, x: checkpoint_name(x @ w, "here") * x,
    "scope": jax.named_scope("block")(lambda w, x: jnp.sin(x @ w) + x),
    "conv": lambda w, x: jax.lax.conv(x[:, :, None], w[:, :, None], (1,), "SAME")[:, :, 0] * x,
    "integers": lambda w, x: x * jnp.argmax(x, axis=1)[:, None].astype(x.dtype),
}


@pytest.mark.optimized
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    st.sampled_from([SINGLE, (*SINGLE, "call"), (*SINGLE, "scope"), ("function",)]),
)
@example(["scope", "dense"], (*SINGLE, "scope"))
def test_rebuilding_every_site_changes_no_bit(names, kinds):
    """Under `jit`, value and gradient are those of the function, to the last bit, and every site got a message."""

    def f(ws, x):
        for w, name in zip(ws, names, strict=True):
            x = STEPS[name](w, x)
        return jnp.sum(x**2)

    rule, messages = rebuilding(kinds)
    ws = [W * (1 + 0.1 * i) for i in range(len(names))]
    rewired = ap.rewire(f, rule)
    planned = rewired._plan((ws, X))[1].taken
    assert set(planned) and {s.kind for s in planned} <= set(kinds)
    assert not any(isinstance(s.output, tuple) for s in planned)  # what a scope makes for itself is no output
    got, expected = (jax.jit(jax.value_and_grad(g, argnums=(0, 1)))(ws, X) for g in (rewired, f))
    assert {s.name for s in planned} == set(messages)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_rule_sees_what_a_node_is():
    def f(w, x):
        h = checkpoint_name(jnp.tanh(x @ w["in"]), "hidden")
        h, _ = jax.lax.scan(lambda h, _: (jax.nn.relu(h @ w["loop"].T), None), h, length=2)
        return jnp.sum(h @ h.T), jnp.arange(3)

    sites = {s.name: s for s in ap.rewire(f, rebuilding(())[0]).sites({"in": W, "loop": W}, X)}
    kinds = {name: (s.kind, s.label, s.weights) for name, s in sites.items() if s.kind != "function"}
    assert kinds == {
        "dot_general[0]": ("dense", "dot_general", 1),
        "tanh[0]": ("elementwise", "tanh", 0),
        "hidden[0]": ("name", "hidden", 0),
        "scan/dot_general[0]": ("dense", "dot_general", 1),
        "scan/relu[0]": ("elementwise", "relu", 0),
        "scan/relu/relu[0]": ("elementwise", "relu", 0),
        "scan/relu/relu/max[0]": ("elementwise", "max", 0),
        "dot_general[1]": ("matmul", "dot_general", 0),
    }
    assert all(s.repeated == name.startswith("scan/") for name, s in sites.items())
    site = sites["scan/dot_general[0]"]
    np.testing.assert_array_equal(site.function(X, W.T), X @ W.T)  # the input first, then the weight
    assert site.result[0].shape == () and site.result[1].dtype == jnp.int32


def test_weights_are_made_of_parameters_alone_and_activations_are_not():
    mask = np.eye(3, dtype=np.float32)

    def f(w, x):
        w = w * mask / jnp.linalg.norm(w)  # normalised and masked
        x = jnp.zeros((4, 3)) @ w + x @ w  # a state that begins at zero
        return x @ w @ jnp.ones((3, 1))

    found = [(s.kind, s.weights) for s in ap.rewire(f, rebuilding(())[0]).sites(W, X) if s.label == "dot_general"]
    assert found == [("dense", 1), ("dense", 1), ("dense", 1), ("matmul", 0)]


MODELS = {
    "nnx": lambda: (nnx.Sequential(*LAYERS), lambda model, x: model(x)),
    "linen": lambda: (MLP().init(KEY, X), MLP().apply),
    "equinox": lambda: (eqx.nn.MLP(3, 2, 4, 2, key=KEY), lambda model, x: jax.vmap(model)(x)),
}
LAYERS = [layer for i in range(3) for layer in (nnx.Linear(3, 3, rngs=nnx.Rngs(i)), nnx.relu)]


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_libraries_unchanged(kind):
    (params, f), (rule, messages) = MODELS[kind](), rebuilding(SINGLE)
    loss = lambda f: eqx.filter_jit(eqx.filter_grad(lambda params: jnp.sum(f(params, X) ** 2)))
    got, expected = (jax.tree.leaves(eqx.filter(loss(g)(params), eqx.is_array)) for g in (ap.rewire(f, rule), f))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert sum("dot_general" in name for name in messages) == 3
    if kind == "linen":  # each module is a scope
        scopes = [s.name for s in ap.rewire(f, rebuilding(())[0]).sites(params, X) if s.kind == "scope"]
        assert sorted(scopes) == [*(f"MLP/Dense_{i}[0]" for i in range(3)), "MLP[0]"]


@pytest.mark.parametrize("around", ["plain", "scan", "cond", "remat", "jit"])
def test_parameters_of_a_rule_get_updates_and_every_node_the_message_of_the_output(around):
    # At a site y = x w, with parameter p: the update is the sum of x, and the message to x is p times the output's.
    def at(site, p):
        backward = lambda x, message, result: (jnp.sum(x), p * result["out"], 0 * message)
        return ap.Propagator(lambda x, w: (x * w, x), backward)

    rule = Rule(lambda s: s.label == "mul" and s.weights == 1, at, lambda site: jnp.float32(3), direct=True)

    def f(w, x):
        step = {"jit": jax.jit, "remat": jax.checkpoint}.get(around, lambda f: f)(lambda x: x * w + 1)
        if around == "scan":
            return {"out": jax.lax.scan(lambda x, _: (step(x), None), x, length=2)[0], "n": jnp.int32(7)}
        if around == "cond":
            return {"out": jax.lax.cond(x > 0, lambda x: step(step(x)), lambda x: x, x), "n": jnp.int32(7)}
        return {"out": step(step(x)), "n": jnp.int32(7)}

    rewired = ap.rewire(f, rule)
    params = rewired.init(2.0, 5.0)
    assert rewired(params, 2.0, 5.0) == {"out": 23, "n": 7}
    update, to_w, to_x = jax.grad(lambda *a: rewired(*a)["out"] * 10, argnums=(0, 1, 2))(params, 2.0, 5.0)
    assert to_w == 0 and to_x == 30  # 3 times the output's 10, not 3 * 3 * 10
    assert sum(update.values()) == 5 + 11  # the inputs of both uses


def test_a_function_that_is_one_site_may_return_constants_its_inputs_and_an_array_twice():
    def loss(w, x):
        y = jnp.sum(jnp.tanh(w) * x)
        return y, (3, 0.5, jnp.int32(7), w, y, jnp.arange(2))

    rule = rebuilding(("function",))[0]
    rewired, whole = ap.rewire(loss, rule), ap.rewire(loss, ap.rewiring.clip_messages(1e3, where="loss"))
    used = lambda f: lambda w, x: (lambda y, rest: (y + jnp.sum(rest[3] + rest[4]), rest))(*f(w, x))
    gradients = jax.jit(lambda *args: [jax.grad(used(f), (0, 1), has_aux=True)(*args) for f in (loss, rewired, whole)])
    expected, *found = gradients(W, W)
    for got in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
        assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, expected)
    forward = ap.rewire(loss, ap.rewiring.forward_gradient())
    gradient, (*constants, _, _, _) = jax.eval_shape(jax.grad(forward, 1, has_aux=True), KEY, W, W)
    assert gradient.shape == W.shape and all(c.shape == () for c in constants)
    assert [s.output.shape for s in ap.rewire(lambda w: (jnp.sum(w), 3), rule).sites(W)[:1]] == [()]


def test_a_random_rule_draws_anew_at_each_site_and_step():
    def at(site, _):
        return ap.Propagator(lambda *xs: (site.function(*xs), None), lambda _, m: (m, jax.random.normal(site.key)))

    powers = lambda ws, x: jax.lax.scan(lambda x, w: (x * w * w, None), x, ws)[0]
    rewired = ap.rewire(powers, Rule(lambda site: site.label == "mul", at, random=True))
    draws, again, other = (jax.grad(rewired, argnums=1)(key, jnp.ones(3), 1.0) for key in (KEY, KEY, jax.random.key(1)))
    np.testing.assert_array_equal(draws, again)
    assert len({*draws.tolist(), *other.tolist()}) == 6
    refused(TypeError, "is one PRNG key", rewired, jnp.ones(3), 1.0)


@jax.custom_vjp
def own_rule(w, x):
    return x @ w


own_rule.defvjp(lambda w, x: (x @ w, None), lambda _, m: (m, m))


def test_what_a_function_closes_over_is_data_if_the_parameters_are_named():
    ways = {1: lambda w, x: jnp.sum(jnp.tanh(x @ w[0] + W[0]) @ w[1]), 0: lambda w: ways[1](w, X)}
    ws = (W, jnp.cos(W.T))
    for rule in (ap.rewiring.sign_symmetry(), ap.rewiring.clip_messages(0.01), ap.rewiring.feedback_alignment(KEY)):
        found = []
        for data, function in ways.items():
            args, rewired = (ws, X)[: 1 + data], ap.rewire(function, rule, argnums=0)
            before = () if rule.init is None else (rewired.init(*args),)
            found.append(jax.grad(rewired, len(before))(*before, *args))
        jax.tree.map(np.testing.assert_array_equal, *found)
        words = "argnums=: then all that the function closes over is data"
        refused(ValueError, words, ap.rewire(ways[0], rule).init, ws)


def test_tokens_that_a_function_closes_over_are_data_if_the_parameters_are_named():
    """The embedding was a weight, so that the layer after it was none, without a word where there are others."""
    loss = lambda ws, tokens: jnp.sum(jnp.tanh(ws[1].T[tokens] @ ws[1]) @ ws[0])
    ws, tokens = (W, jnp.cos(W.T)), jnp.array([1, 0, 1])
    rule = ap.rewiring.sign_symmetry()
    found = jax.grad(ap.rewire(lambda ws: loss(ws, tokens), rule, argnums=0))(ws)
    jax.tree.map(np.testing.assert_array_equal, found, jax.grad(ap.rewire(loss, rule, argnums=0))(ws, tokens))


def test_what_cannot_be_seen_is_an_error_but_the_sum_of_a_scatter_is_no_site():
    dense, mesh = rebuilding(("dense",))[0], jax.make_mesh((1,), ("i",))
    lean = ap.randomize(lambda w, x: x @ w, ap.memory.rounding(bits=4), min_size=0)
    mapped = jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    for function, error, words in (
        (lambda w, x: jnp.sin(x @ W), ValueError, "the rule takes no site"),  # the weights are closed over
        (lambda w, x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x), ValueError, "inside while"),
        (lambda w, x: own_rule(w, x) @ w, ValueError, "inside custom_vjp_call"),
        (lambda w, x: scanned(own_rule)(w, x), ValueError, "inside custom"),
        (lambda w, x: lean(KEY, w, x), ValueError, "ap.randomize, rewire the function that is mapped or randomized"),
        (lambda w, x: X @ w + x, ValueError, r"closes over the array of shape \(4, 3\)"),
        (lambda w, x: mapped(w, x) @ w, NotImplementedError, "cannot see into the primitive 'shard_map'"),
    ):
        refused(error, words, ap.rewire(function, dense), W, X)
    halve = ap.rewiring.gradient_reversal(("tanh", "add"), strength=-0.5)
    mapped = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    solved = lambda x: jax.lax.custom_linear_solve(lambda v: v * jnp.tanh(x), x, lambda _, b: b / x, symmetric=True)
    for inner, words in ((mapped, "inside shard_map"), (solved, "inside custom_linear_solve")):
        refused(ValueError, words, ap.rewire(lambda w, x, inner=inner: jnp.tanh(inner(w * x)), halve), 0.5, 1.0)
    auto = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    read = jax.shard_map(jnp.tanh, mesh=auto, in_specs=jax.P(), out_specs=jax.P())
    plain = jax.grad(lambda w: jnp.tanh(jnp.tanh(w)))(0.5)
    both = ap.rewiring.gradient_reversal("tanh", strength=-0.5)
    np.testing.assert_allclose(jax.grad(ap.rewire(lambda w: jnp.tanh(read(w)), both))(0.5), plain / 4, rtol=1e-6)
    scattered = lambda w, x: jnp.sum(jnp.zeros(3).at[jnp.array([0, 0, 1])].add(w * x) + w)
    halve = ap.rewiring.gradient_reversal("add", strength=-0.5)
    assert jax.grad(ap.rewire(scattered, halve))(0.5, jnp.ones(3)) == 3  # half of 6


def test_a_kernel_that_cannot_be_seen_is_kept_by_a_rule_that_takes_the_call_around_it():
    def run(kernel, *inputs):
        return pallas.pallas_call(kernel, out_shape=jax.typeof(inputs[0]), interpret=True)(*inputs)

    def double(x, out):
        out[...] = 2 * x[...]

    @jax.custom_vjp
    def flash(x):
        return run(double, x)

    flash.defvjp(lambda x: (flash(x), None), lambda _, m: (run(double, m),))
    function = lambda w, x: jnp.sum(jnp.sin(flash(jnp.sin(x @ w)) @ w))
    dense = rebuilding(("dense",))[0]
    words = r"cannot see into the primitive 'pallas_call' .*first_of\(.*site.label == 'flash'"
    refused(NotImplementedError, words, ap.rewire(function, dense), W, X)
    kept = Rule(lambda site: site.label == "flash", lambda site, params: ap.backpropagation(site.function))
    rewired = ap.rewire(function, ap.rewiring.first_of(dense, kept))
    np.testing.assert_allclose(*[jax.jit(jax.grad(f))(W, X) for f in (rewired, function)], rtol=1e-6)


@pytest.mark.parametrize("take", [jax.grad, jax.value_and_grad, lambda f: jax.jit(jax.grad(f))])
def test_a_gradient_that_is_given_in_place_of_its_function_is_warned_of(take):
    """It stays as it is; a gradient that the function uses inside is as good as any."""
    loss = lambda w, x: jnp.sum(jnp.sin(x @ w) @ w)
    rewired = ap.rewire(take(loss), ap.rewiring.clip_messages(1e-3))
    random = functools.partial(ap.randomize(take(loss), ap.memory.rounding(bits=4), min_size=0), KEY)
    for call in (rewired, rewired.init, random):
        with pytest.warns(UserWarning, match=r"jax.grad\(ap\.(rewire|randomize)\(f, \.\.\.\)\)"):
            call(W, X)
    inside = lambda w, x: jnp.sum(jax.grad(loss)(w, x) * w)
    assert jax.grad(ap.rewire(inside, ap.rewiring.clip_messages(1e-3)))(W, X).shape == W.shape


def test_modules_that_change_themselves_are_rewired_as_a_function_of_their_state():
    for layer in (nnx.Dropout(0.5, rngs=nnx.Rngs(1)), nnx.BatchNorm(3, rngs=nnx.Rngs(1))):
        graph, params, state = nnx.split(nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), layer), nnx.Param, ...)

        def pure(params, x, state, graph=graph):
            model = nnx.merge(graph, params, state, copy=True)
            return model(x), nnx.state(model, (nnx.BatchStat, nnx.RngCount))

        rewired = ap.rewire(pure, rebuilding(("dense",))[0])
        jax.tree.map(np.testing.assert_array_equal, rewired(params, X, state), pure(params, X, state))


def test_the_message_of_the_output_under_vmap_is_each_examples_own():
    """`vmap` does not map constants: a port of plain zeros would bring each example the sum of all messages."""

    at = lambda site, _: ap.Propagator(lambda x, w: (x * w, None), lambda _, message, result: (result, None))
    rule = Rule(lambda site: site.label == "mul" and site.weights == 1, at, direct=True)
    plain = lambda w, x: (x * w) ** 2
    scan = lambda w, x: jax.lax.scan(lambda x, _: (x * w, None), x, length=2)[0] ** 2
    branch = lambda w, x: jax.lax.cond(x > 0, lambda x: (x * w) ** 2, lambda x: x, x)
    xs, weights = jnp.array([1.0, 2.0, -3.0]), jnp.array([1.0, 10.0, 100.0])

    @functools.partial(jax.jit, static_argnums=0)
    def both(f, xs):
        rewired = ap.rewire(f, rule)
        mapped = jax.grad(lambda xs: jnp.sum(weights * jax.vmap(rewired, (None, 0))(2.0, xs)))(xs)
        return mapped, jnp.stack([jax.grad(rewired, argnums=1)(2.0, xs[i]) * weights[i] for i in range(3)])

    for f in (plain, scan, branch):
        np.testing.assert_array_equal(*both(f, xs))
    shared = ap.rewire(lambda v, x: (v * v) * x, rule._replace(where=lambda s: s.weights == 2 and s.label == "mul"))
    to_v = jax.grad(lambda v: jnp.sum(weights * jax.vmap(shared, (None, 0))(v, xs)))(2.0)
    assert to_v == 111  # a node that the examples share gets the sum of their messages


def test_errors_of_rules_and_arguments():
    f = lambda w, x: x @ w
    at = lambda forward, backward: lambda site, p: ap.Propagator(forward, backward)
    good = at(lambda x, w: (x @ w, None), lambda _, m: (m, None))
    rule = functools.partial(Rule, lambda site: site.kind == "dense")
    one, ones = rule(good, lambda site: jnp.ones(1)), {"dot_general[0]": jnp.ones(1)}
    grad = lambda rewired, *args: jax.grad(lambda w: jnp.sum(rewired(*args, w, X)))(W)
    answers = lambda back: grad(ap.rewire(f, rule(at(lambda x, w: (x @ w, None), lambda _, m: back(m)))))
    clip = ap.rewiring.clip_messages(1.0, where=("tanh", "cosh"))
    named = rule(good)._replace(where="dense")  # pyright: ignore[reportArgumentType]
    by_label = r"functions of a site, got where='dense'; .* site\.label == 'dense'$"
    sine, no_node = rule(lambda site, p: jnp.sin), r"return an ap\.Propagator.*got .* at the"
    swapped, with_params = rule(at(lambda x, w: (w, None), lambda _, m: (m, None))), ap.rewire(f, one)
    scaled = lambda w: grad(ap.rewire(lambda v, x: x @ v * w, rule(good)))
    no_second, sites = "no second derivative of a rewired function", r"dictionary with the sites \['dot_general\[0\]'\]"
    for call, error, words in (
        (lambda: ap.rewire(f, good), TypeError, "takes a rule"),  # pyright: ignore[reportArgumentType]
        (lambda: ap.rewire(3, rule(good)), TypeError, "rewire takes a function, got int"),  # pyright: ignore
        (lambda: ap.rewire(f, ap.rewiring.sign_symmetry), TypeError, "got function. Call it"),  # pyright: ignore
        (lambda: ap.rewire(f, named), TypeError, by_label),
        (lambda: ap.rewire(f, rule(3)), TypeError, "functions of a site, got at=3$"),
        (lambda: grad(ap.rewire(f, sine)), TypeError, no_node),
        (lambda: ap.rewire(f, rule(good), argnums=1.0), TypeError, "argnums must be an integer"),  # pyright: ignore
        (lambda: ap.rewire(f, rule(good), argnums=5)(W, X), ValueError, "argnums has 5"),
        (lambda: ap.rewire(jnp.tanh, clip).init(X), ValueError, "name 'cosh'; did you mean .*'tanh'.*name_modules"),
        (lambda: answers(lambda m: (m,)), TypeError, "one message for each of its 2 input.*got a tuple of 1"),
        (lambda: answers(lambda m: (m[0], None)), ValueError, r"input 0 of the site <dense .*has shape \(3,\)"),
        (lambda: grad(with_params, ones), TypeError, "input 0 is the rule's parameters, and its message their update"),
        (lambda: grad(ap.rewire(f, swapped)), ValueError, r"must return .*\(4, 3\).*, got .*\(3, 3\)"),
        (lambda: with_params({"other[0]": 1}, W, X), ValueError, rf"{sites}, got \['other\[0\]'\]"),
        (lambda: ap.rewire(f, rule(good))({}, W, X), TypeError, r"too many positional.*rewired\(\*args\)"),
        (lambda: with_params({"a[0]": X}, W), TypeError, r"missing a required.*\(params, \*args\)"),
        (lambda: jax.grad(lambda w: jnp.sum(scaled(w) ** 2))(1.0), TypeError, no_second),
        (lambda: jax.hessian(lambda w: jnp.sum(ap.rewire(f, rule(good))(w, X)))(W), TypeError, no_second),
    ):
        refused(error, words, call)
    for wrong in ((), (W, X), ({"w": W}, X), (None, W, X)):
        refused(TypeError, "parameters, which come before", with_params, *wrong)
    assert ap.rewire(f, rule(good), argnums=np.int64(0)).init(W, X) == {}


@pytest.mark.parametrize("rule", ["feedback_alignment", "direct_feedback_alignment", "synthetic_gradients"])
def test_parameters_of_another_form_are_refused(rule):
    """Another shape, dtype or structure, also where arrays would broadcast or be reshaped without a word."""
    make = getattr(ap.rewiring, rule)
    rewired = ap.rewire(lambda w, x: x @ w, make() if rule == "synthetic_gradients" else make(KEY))
    params = rewired.init(W, X)
    half = lambda b: b.astype(jnp.bfloat16)
    for change in (lambda b: b[:2], jnp.ravel, lambda b: jnp.float32(1), half, lambda b: (b, b)):
        refused(ValueError, "is expected", jax.eval_shape, rewired, jax.tree.map(change, params), W, X)
    assert rewired(jax.tree.map(np.asarray, params), W, X).shape == (4, 3)
