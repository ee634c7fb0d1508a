"""Every option of every layer: the network is what the model is, or `from_nnx` refuses it."""

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from apgrad import mplp
from tests.mplp.graphs import close, first_step, jit
from tests.refusals import refused

X = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
TOKENS = np.asarray([[0, 3, 1], [2, 2, -1]])


network_of = functools.partial(mplp.from_nnx, loss=mplp.squared_error)


def assert_descends(network, params, batch, rate, **tolerance):
    """The exact rule's updates are the gradient times the rate, and its metrics have loss and prediction."""

    @jit
    def both(params):
        updates, _, metrics = first_step(mplp.Exact(rate), network, params, batch)
        value, gradient = jax.value_and_grad(network.mean_loss)(params, batch)
        expected = {"loss": value, "output": network.predict(params, batch[0])}
        return (updates, metrics), (jax.tree.map(lambda g: -rate * g, gradient), expected)

    close(*both(params), **tolerance)


def doubled(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


DOT = {"dot_general": [doubled(jax.lax.dot_general)]}
INIT, FLAGS = [nnx.initializers.normal(1.0)], [True, False]
COMMON = {name: [jnp.bfloat16, jnp.float32] for name in ("dtype", "param_dtype")}
COMMON |= {"promote_dtype": [lambda arrays, dtype=None, inexact=True: tuple(a if a is None else a / 2 for a in arrays)]}
SYNAPSES = COMMON | {"use_bias": FLAGS, "kernel_init": INIT, "bias_init": INIT, "precision": [None, "highest"]}
SYNAPSES |= {"preferred_element_type": [None, jnp.float16]}
DILATION = [1, (1,), None, 2, (2,)]
CONV = {
    "strides": [1, 2, (2,), None],
    "padding": ["SAME", "VALID", "CIRCULAR", "CAUSAL", 1, ((1, 0),), (2,)],
    "kernel_dilation": DILATION,
    "input_dilation": DILATION,
    "feature_group_count": [1, 2],
    "mask": [None, jnp.ones((3, 4, 4)).at[0].set(0.0)],
    "conv_general_dilated": [doubled(jax.lax.conv_general_dilated)],
}
NORM = {"epsilon": [1e-6, 0.5], "bias_init": INIT, "scale_init": INIT}
NORM |= dict.fromkeys(("use_bias", "use_scale", "use_fast_variance"), FLAGS)
AXES = {"reduction_axes": [-1, (-1,), (1, 2), 1], "feature_axes": [-1, (-1,)]}
AXES |= {"axis_name": [None, "devices"], "axis_index_groups": [None, ((0,),)]}
TIMES = dict.fromkeys(("time_major", "return_carry", "reverse", "keep_order"), FLAGS)
KEPT = {"use_bias", "kernel_init", "bias_init"}
PADDED = {("padding", value) for value in ("VALID", 1, ((1, 0),), (2,))} | {("kernel_dilation", (1,)), "strides"}
RNN = functools.partial(nnx.RNN, nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0)))
# (a layer, its input, values of each option, and which of them the network has too)
LAYERS = {
    "Linear": (functools.partial(nnx.Linear, 4, 3), X, SYNAPSES | DOT, KEPT),
    "Conv": (functools.partial(nnx.Conv, 4, 4, (3,)), X, SYNAPSES | CONV, KEPT | PADDED),
    "Embed": (functools.partial(nnx.Embed, 4, 3), TOKENS, COMMON | {"embedding_init": INIT}, {"embedding_init"}),
    "LayerNorm": (functools.partial(nnx.LayerNorm, 4), X, COMMON | NORM | AXES, {*NORM, ("reduction_axes", (-1,))}),
    "RNN": (RNN, X, TIMES | {"unroll": [1, 2]}, {"unroll"}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_option_is_kept_or_refused(name):
    make, x, options, supported = LAYERS[name]
    kept = {}
    with jax.numpy_dtype_promotion("standard"):
        for option, values in options.items():
            for i, value in enumerate(values):
                model = nnx.Sequential(make(rngs=nnx.Rngs(0), **{option: value}))
                try:
                    kept[option, i] = model, *mplp.from_nnx(model, mplp.squared_error)
                except TypeError as error:
                    assert option in str(error)
                    default = inspect.signature(type(model.layers[0]).__init__).parameters[option].default
                    if not isinstance(value, jax.Array):
                        assert option not in supported and (option, value) not in supported
                        assert value is not None and value != default

        @jit
        def both(x):
            return {case: (network.predict(p, x), nnx.clone(model)(x)) for case, (model, network, p) in kept.items()}

        outputs = both(jnp.asarray(x))
    assert len(kept) >= len(supported)
    for got, expected in outputs.values():
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_the_options_are_all_there_are():
    """An option of a later Flax that this table does not have is refused unless it is at its default."""
    for make, _, options, _ in LAYERS.values():
        layer = make(rngs=nnx.Rngs(0))
        layer.an_option_of_a_later_flax = 3
        refused(TypeError, "an_option_of_a_later_flax=3", mplp.from_nnx, nnx.Sequential(layer), mplp.squared_error)
        assert set(options) <= set(inspect.signature(type(layer).__init__).parameters)


GATED = pytest.param(nnx.GRUCell, {"gate_fn": nnx.tanh}, marks=pytest.mark.long)


@pytest.mark.parametrize(("cell", "functions"), [(nnx.SimpleCell, {}), GATED])
def test_recurrence_is_flaxs_and_its_gradient_exact(cell, functions):
    def model(**options):
        rngs = nnx.Rngs(0)
        rnn = nnx.RNN(cell(4, 3, rngs=rngs, bias_init=INIT[0], **options), rngs=rngs)
        return nnx.Sequential(rnn, nnx.RNN(cell(3, 5, rngs=rngs), rngs=rngs), lambda x: x[:, -1])

    batch = jnp.asarray(X), jnp.ones((2, 5))
    network_of(model(activation_fn=nnx.relu, **functions), x=batch[0])
    network, params = network_of(model())
    assert_descends(network, params, batch, 0.5, rtol=1e-4, atol=1e-6)
    moved = jax.tree.map(lambda p: p + 1, params)
    jax.tree.map(np.testing.assert_array_equal, network_of(mplp.to_nnx(model(), moved))[1], moved)
    refused(TypeError, r"got an nnx.* with .*dtype=.*bfloat16", network_of, model(dtype=jnp.bfloat16))
    residual = nnx.Sequential(nnx.RNN(nnx.SimpleCell(4, 3, residual=True, rngs=nnx.Rngs(0))))
    refused(TypeError, r"got an nnx\.SimpleCell with residual=True", network_of, residual)


def test_half_precision_is_flaxs():
    """Statistics and states are in float32 at least, and a function may change the precision."""
    rngs, half = nnx.Rngs(0), lambda x: (300 * x).astype(jnp.float16)
    norms = nnx.LayerNorm(4, rngs=rngs), half, nnx.LayerNorm(4, use_scale=False, use_bias=False, rngs=rngs)
    model = nnx.Sequential(*norms, nnx.RNN(nnx.SimpleCell(4, 3, rngs=rngs), rngs=rngs), half)
    x = half(X)
    network, params = network_of(model, x=x)
    updates = jax.eval_shape(lambda p: first_step(mplp.Exact(0.1), network, p, (x, x[..., 1:]))[0], params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


GLOBAL = {"linear": nnx.Linear(4, 4, rngs=nnx.Rngs(0))}
SCALES = {"half": jnp.asarray(0.5)}


def test_frozen_variables_stay_as_they_are():
    """A variable that is no `nnx.Param` is a constant of the network, and messages pass it."""
    first, second = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    norm, table = nnx.LayerNorm(3, rngs=nnx.Rngs(0)), nnx.Embed(5, 4, rngs=nnx.Rngs(0))
    second.kernel, norm.scale = nnx.Variable(second.kernel[...]), nnx.Variable(2 * norm.scale[...])
    table.embedding = nnx.BatchStat(table.embedding[...])
    model = nnx.Sequential(table, first, norm, second)
    batch = jnp.asarray([0, 3, 1]), jnp.ones((3, 2))
    network, params = mplp.from_nnx(model, mplp.squared_error, batch[0])
    names = {name: sorted(p) for name, p in params.items()}
    assert names == {"1_dense": ["bias", "kernel"], "2_normalize": ["bias"], "3_dense": ["bias"]}
    assert_descends(network, params, batch, 0.1, rtol=1e-4, atol=1e-6)
    learned = mplp.to_nnx(model, jax.tree.map(lambda p: p + 1, params))
    np.testing.assert_array_equal(learned.layers[3].kernel[...], second.kernel[...])
    np.testing.assert_array_equal(learned.layers[3].bias[...], second.bias[...] + 1)


def linear(i=0):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(i))


def own(base):
    """A subclass that does something else."""
    return type("Own", (base,), {"__call__": lambda self, x: x + base.__call__(self, x)})


def sharing():
    a, b = linear(), linear(1)
    b.kernel = a.kernel
    return a, jnp.tanh, b


def sharing_within():
    cell = nnx.SimpleCell(4, 4, rngs=nnx.Rngs(0))
    cell.dense_h.kernel = cell.dense_i.kernel
    return nnx.RNN(cell, rngs=nnx.Rngs(0))


class Holder:
    def __init__(self):
        self.parts = [GLOBAL["linear"]]

    def __call__(self, x):
        return self.parts[0](x)


this, inner, held = sys.modules[__name__], GLOBAL["linear"], {"parts": (GLOBAL["linear"],)}
WAYS = [  # by which a function reaches a module: a frozen constant otherwise, without a word
    inner.__call__,
    lambda x: GLOBAL["linear"](x),
    lambda x: held["parts"][0](x),
    lambda x: [GLOBAL["linear"](x) for _ in range(2)],
    lambda x: this.GLOBAL["linear"](x),
    lambda x, layer=inner: layer(x),
    lambda x, *, layer=inner: layer(x),
    lambda x: x @ inner.kernel[...],
    functools.partial(lambda x, layers: layers[0](x), layers=[inner]),
    functools.partial(jnp.add, inner.bias),
    functools.partial(lambda x, n: n * inner(x), n=2),
    jax.jit(lambda x: inner(x)),
    Holder(),
]
NORM_INSIDE = nnx.Sequential(jnp.tanh, nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
NORM_WORDS = r"^model\.layers\[1\]\.layers\[1\]: an MPLP network has layers Conv, .* and functions, got BatchNorm\."
LSTM = nnx.RNN(nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
NO_LAYERS = [
    ((own(nnx.Linear)(4, 4, rngs=nnx.Rngs(0)),), "got Own, a subclass of Linear that may do something else"),
    ((own(nnx.Sequential)(inner),), "got Own"),
    ((nnx.Dropout(0.5, rngs=nnx.Rngs(0)),), "no Dropout that drops: make it deterministic"),
    ((inner, NORM_INSIDE), NORM_WORDS),
    ((LSTM,), "the cell of an nnx.RNN is an nnx.SimpleCell or an nnx.GRUCell here, got LSTMCell"),
    (sharing(), r"\['0_dense'\]\.kernel and \['2_dense'\]\.kernel are one parameter"),
    ((sharing_within(),), r"cell\.dense_h\.kernel and \['0_recurrent'\]\.cell\.dense_i\.kernel are one parameter"),
    *[((way,), "holds a module, (Linear|List|Param)") for way in WAYS],
]


def test_parameters_of_another_model_are_refused():
    network, params = mplp.from_nnx(nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0))), mplp.squared_error)
    kernel = {"kernel": params["0_dense"]["kernel"]}  # without a bias it would be another network
    for wrong in ({}, {"0_dense": kernel}, {"0_dense": params["0_dense"] | {"scale": jnp.ones(2)}}):
        refused(ValueError, r"'0_dense' has the parameters .*bias.*kernel", network.predict, wrong, jnp.ones((4, 3)))
    refused(TypeError, "are a dictionary of layers.*got list", network.predict, [params], jnp.ones((4, 3)))


def test_what_is_no_layer_is_refused():
    for parts, match in NO_LAYERS:
        refused(TypeError, match, network_of, nnx.Sequential(*parts))
    refused(ValueError, r"at least one layer, got an empty nnx\.Sequential", network_of, nnx.Sequential())
    refused(TypeError, r"take an nnx.Sequential, got Own", network_of, own(nnx.Sequential)(inner))
    refused(TypeError, r"take an nnx.Sequential, got Linear", mplp.to_nnx, inner, {})
    model = nnx.Sequential(nnx.Dropout(0.5, deterministic=True), nnx.Dropout(0.0, rngs=nnx.Rngs(0)))
    network_of(model, x=jnp.asarray(X))
    network_of(nnx.Sequential(jax.nn.gelu, lambda x: jnp.tanh(x) * SCALES["half"]))


def test_a_loss_of_arrays_reads_the_prediction():
    model, batch = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0))), (jnp.asarray(X[0]), jnp.arange(6) % 3)
    loss = optax.softmax_cross_entropy_with_integer_labels
    for wrong in (loss, lambda place, prediction, y: loss(prediction, y), lambda prediction, y: loss(prediction, y)):
        network, params = mplp.from_nnx(model, wrong)
        init = functools.partial(mplp.init_state, mplp.Exact(0.5), network, params, batch)
        error = refused((TypeError, AttributeError), "Signal|Place|arguments", init)
        assert any("mplp.readout(place, prediction)" in note for note in error.__notes__)
    network, params = mplp.from_nnx(model, lambda place, prediction, y: loss(mplp.readout(place, prediction), y))
    mean = lambda p: jnp.mean(loss(network.predict(p, batch[0]), batch[1]))
    np.testing.assert_allclose(network.mean_loss(params, batch), mean(params), rtol=1e-6)
    assert_descends(network, params, batch, 0.5, rtol=1e-5)


def test_a_layer_used_twice_is_one_layer():
    """Its update is the sum over its uses, as its gradient is."""
    shared = linear()
    inner = nnx.Sequential(shared, jnp.tanh)
    batch = jnp.asarray(X[:, 0]), jnp.asarray(X[:, 1])
    network, params = network_of(nnx.Sequential(inner, linear(1), inner, shared), x=batch[0])
    names = "0_dense 1_activation 2_dense 0_dense 4_activation 0_dense"
    assert [layer.name for layer in network.layers] == names.split()
    assert sorted(params) == ["0_dense", "2_dense"]
    assert_descends(network, params, batch, 1.0, rtol=1e-4, atol=1e-5)


def test_a_layer_is_what_its_node_is():
    """The model that is compared may change itself."""

    class Shift(nnx.Module):
        def __init__(self):
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return x + 1.0

    nodes = [lambda x: x + 1.0, lambda x: 1.0 - x, lambda x: jnp.concatenate([x, x], axis=-1)]
    mplp.layer.register(Shift, lambda part: mplp.Layer("shift", {}, lambda at, _, s: mplp.wire(nodes[-1], s)))
    model = nnx.Sequential(Shift())
    for words in (r"float32\(2, 6, 8\) in place of float32\(2, 6, 4\)", r"values that differ by.*layer\.register"):
        refused(ValueError, words, network_of, model, x=jnp.asarray(X))
        nodes.pop()
    network_of(model, x=jnp.asarray(X))
    assert model.layers[0].calls[...] == 0


def test_messages_go_where_a_function_moves_elements():
    """A linear function that moves them has no place, also where it keeps the shape; any other that does has one."""
    moving = [
        lambda x: jnp.where(jnp.arange(4) > 1, x[:, ::-1], 0.0),
        lambda x: jnp.swapaxes(x, 1, 2),
        lambda x: jnp.roll(x, 1, 1),
        lambda x: x[:, :2],
    ]
    moving.insert(0, lambda x: jax.lax.scan(lambda before, x: (x, before), jnp.zeros((4, 4)), x)[1])
    others = [nnx.leaky_relu, jnp.sign, lambda x: jnp.where(x > 0, x, 0.0), lambda x: x + 1.0, nnx.log_softmax]
    others += [lambda x: x + jnp.cumsum(jnp.ones(4)), lambda x: jax.lax.map(lambda row: 2 * row, x)]
    network, params = network_of(nnx.Sequential(*moving, *others))
    batch = jnp.ones((2, 4, 4)), jnp.ones((2, 2, 4))
    wanted = [*(f"{i}_activation" for i in range(5, 12)), "loss"]
    assert [site.name for site in mplp.sites(network, params, batch)] == wanted


def test_tokens_are_those_of_flax():
    """Negative ones too, and those of a table of a single row; where they are out of range, never another row."""
    for rows in (1, 4):
        network, params = network_of(nnx.Sequential(nnx.Embed(rows, 3, rngs=nnx.Rngs(0))), x=jnp.asarray(TOKENS))
    for tokens in (jnp.asarray([[0, 4]]), jnp.asarray([[0, -5]])):
        refused(ValueError, r"has 4 rows; got tokens from (0 to 4|-5 to 0)", network.predict, params, tokens)
        got = jax.jit(network.predict)(params, tokens)  # where the tokens are not known, as Flax
        assert jnp.all(jnp.isnan(got[0, 1])) and jnp.all(jnp.isfinite(got[0, 0]))
    network, params = network_of(nnx.Sequential(linear(), nnx.Embed(4, 3, rngs=nnx.Rngs(0))))
    refused(TypeError, "embedding takes integers, got a signal", network.predict, params, jnp.asarray(X))
