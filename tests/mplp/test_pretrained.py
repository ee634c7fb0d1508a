"""Rules on disk: what is read is what was written, or an error says what does not belong together."""

import contextlib
import functools
import inspect
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from apgrad import meta, mplp
from apgrad.mplp import _pretrained as pretrained, _reach

OPTIONS = {
    "message_size": 2,
    "rank": 2,
    "hidden": 3,
    "neuron_state": 1,
    "whiten": True,
    "share": "role",
    "normalize": True,
}


def network():
    made, prior = meta.mlp((2, 3, 1), jnp.tanh, mplp.squared_error)
    batch = jnp.ones((4, 2)), jnp.ones((4, 1))
    return made, prior(jax.random.key(0)), batch


@functools.cache
def sites():
    return mplp.sites(*network())


@pytest.fixture(scope="module")
def rule():
    return mplp.Separable(sites(), rngs=nnx.Rngs(0), **OPTIONS)


def card(**changed):
    return {"rule": OPTIONS | changed, "sites": [site._asdict() for site in sites()], "more": 1}


def scaled(rule, factor):
    return jax.tree.map(lambda x: factor * x, rule)


def signed(path, about):
    """A card that someone wrote by hand, with the right digest."""
    if isinstance(about, dict):
        about = about | {pretrained.DIGEST: pretrained.digest(about, path.with_suffix(".npz").read_bytes())}
    path.with_suffix(".json").write_text(json.dumps(about))


def test_names_with_dots_are_names(rule, tmp_path):
    """One name is not another's suffix, and two rules of one beginning are two rules."""
    names = ["rule_v1.1", "rule_v1.2", "rule", "rule.json", "a.b/c.d"]
    for i, name in enumerate(names):
        mplp.save_trained(scaled(rule, i + 1.0), card() | {"number": i}, tmp_path / name)
    for i, name in enumerate(names):
        found, about = mplp.load_trained(tmp_path / name)
        assert about["number"] == i and about.keys() == card().keys() | {"number"}
        jax.tree.map(np.testing.assert_array_equal, found, scaled(rule, i + 1.0))
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 2 * len(names)  # nothing else is left behind


def test_a_card_of_other_options_is_refused(rule, tmp_path):
    """Options that change what the rule does, though not the shapes of its arrays."""
    for changed in ({"normalize": False}, {"share": False}, {"full": 3}, {"window": 5}):
        with pytest.raises(ValueError, match=rf"differs in .*{next(iter(changed))}"):
            mplp.save_trained(rule, card(**changed), tmp_path / "rule")
    with pytest.raises(ValueError, match="differs in sites"):
        mplp.save_trained(rule, card() | {"sites": card()["sites"][1:]}, tmp_path / "rule")
    assert not list(tmp_path.iterdir())


def test_what_is_read_does_what_was_written(rule, tmp_path):
    """What the card lacks is taken from the rule."""
    made, params, batch = network()
    mplp.save_trained(rule, {"trained": "here"}, tmp_path / "rule")
    again, about = mplp.load_trained(tmp_path / "rule")
    assert OPTIONS.items() <= about["rule"].items()
    assert jax.tree.structure(again) == jax.tree.structure(rule)
    step = jax.jit(lambda r: mplp.backward(r, made, params, mplp.init_state(r, made, params, batch), batch)[0])
    jax.tree.map(np.testing.assert_array_equal, step(rule), step(again))


def test_a_number_that_is_not_finite_and_real_is_refused(rule, tmp_path):
    leaves, tree = jax.tree.flatten(rule)
    for value in (np.float32(np.inf), np.float64(1e300), np.complex64(1 + 1j), np.int32(3)):
        odd = tree.unflatten([np.full(leaves[0].shape, value), *leaves[1:]])
        with pytest.raises(ValueError, match="numbers are finite and real, of float32; got"):
            mplp.save_trained(odd, card(), tmp_path / "rule")
        assert not list(tmp_path.iterdir())


def test_double_precision_is_kept(tmp_path, x64):
    rule = mplp.Separable(sites(), rngs=nnx.Rngs(0), **OPTIONS)
    assert jax.tree.leaves(rule)[0].dtype == jnp.float64
    mplp.save_trained(rule, card(), tmp_path / "rule")
    jax.tree.map(np.testing.assert_array_equal, mplp.load_trained(tmp_path / "rule")[0], rule)


@pytest.mark.parametrize("dies", [1, 2])
def test_a_write_that_fails_leaves_what_was_there_or_says_so(rule, dies, tmp_path, monkeypatch):
    """At the first file nothing has changed; between the two, arrays and card are not of one rule, and this is seen."""
    mplp.save_trained(rule, card(), tmp_path / "rule")
    replace, calls = os.replace, []

    def fails(*args):
        calls.append(args)
        if len(calls) == dies:
            raise OSError("no space left")
        replace(*args)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        mplp.save_trained(scaled(rule, 2.0), card(), tmp_path / "rule")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rule.json", "rule.npz"]
    if dies == 1:
        jax.tree.map(np.testing.assert_array_equal, mplp.load_trained(tmp_path / "rule")[0], rule)
    else:
        with pytest.raises(ValueError, match="were not written together"):
            mplp.load_trained(tmp_path / "rule")


def site(**changed):
    made = card()
    made["sites"][0] = made["sites"][0] | changed
    return made


CARDS = [
    ([], "a card is a dictionary .* got \\[\\]"),
    ({}, "a card is a dictionary .* got {}"),
    (card() | {"rule": [1]}, "makes no rule"),
    (card() | {"sites": [[]]}, "makes no rule"),
    (card() | {"sites": []}, "differs in .*sites"),
    (card(hidden=10**7), "differs in .*hidden"),
    (card(hidden=10**12), "hidden must be an integer from 1 to"),
    (card(rank=2.0), "rank must be an integer"),
    (card(share="rol"), "share must be one of .* got 'rol'"),
    (card(unknown=1), "unknown"),
    (card(rngs=1), "rngs"),
    (card(learning_rate=-1.0), "learning_rate must be a finite number above 0, got -1.0"),
    (site(shape=12), "makes no rule"),
    (site(more=1), "makes no rule: .*more"),
]


def test_a_card_that_makes_no_rule_is_refused(rule, tmp_path):
    for wrong, match in CARDS:
        with pytest.raises(ValueError, match=match):
            mplp.save_trained(rule, wrong, tmp_path / "other")
    assert not list(tmp_path.iterdir())
    mplp.save_trained(rule, card(), tmp_path / "rule")
    for wrong, match in [
        ({"rule": OPTIONS}, "makes no rule: KeyError: 'sites'"),
        (card(hidden=10**7), "do not belong"),
    ]:
        signed(tmp_path / "rule", wrong)
        with pytest.raises(ValueError, match=rf"rule\.json is not a trained rule.*{match}"):
            mplp.load_trained(tmp_path / "rule")


def per_synapse(**options):
    return mplp.PerSynapse(sites(), **({"message_size": 2, "hidden": 1, "layers": (3,)} | options), rngs=nnx.Rngs(0))


def separable(**options):
    return mplp.Separable(sites(), **options, rngs=nnx.Rngs(0))


def thesis(**options):
    return mplp.Thesis(sites(), **options, rngs=nnx.Rngs(0))


WRONG = {
    per_synapse: {
        ("cell", "share", "share_standardizers", "share_scales", "gradient"): "one of .*, got {!r}",
        ("message_size", "hidden", "output_scale", "layers"): "",
    },
    separable: {
        ("whiten", "share", "normalize", "gradient"): "one of .*, got {!r}",
        ("message_size", "rank", "hidden", "neuron_state", "full", "window", "learning_rate"): "",
    },
    thesis: {
        ("batch_norm", "learn_rate", "start", "see_loss"): "one of .*, got {!r}",
        ("message_size", "hidden", "learning_rate"): "",
    },
}


def test_every_option_of_every_rule_is_checked():
    for make, options in WRONG.items():
        for names, match in options.items():
            for value in ("rol", "False", "", None, 2) if match else (-1, "3", None, float("nan"), True):
                for name in names:
                    given = (value,) if name == "layers" else value
                    with pytest.raises(ValueError, match=f"^{name}.* must be {match.format(value)}"):
                        make(**{name: given})


def test_rules_for_images_want_standardized_inputs():
    x = jnp.linspace(0.0, 1.0, 100)
    with pytest.raises(ValueError, match="standardized inputs, got a mean"):
        mplp.load_pretrained("image_mlp", x)
    mplp.load_pretrained("image_mlp", (x - x.mean()) / x.std())
    mplp.load_pretrained("sinusoid", x)  # whose card says nothing of it


def test_a_trained_rule_learns_in_a_flax_model_and_gives_it_back():
    first, second = nnx.Linear(3, 50, rngs=nnx.Rngs(0)), nnx.Linear(50, 2, rngs=nnx.Rngs(1))
    model = nnx.Sequential(first, nnx.sigmoid, second)
    network, params = mplp.from_nnx(model, mplp.softmax_cross_entropy, names="role")
    batch = jax.random.normal(jax.random.key(0), (8, 3)), jax.nn.one_hot(jnp.arange(8) % 2, 2)
    rule = mplp.load_pretrained("image_mlp", batch[0])

    @jax.jit
    def learn(params):
        state = mplp.init_state(rule, network, params, batch)
        return mplp.inner_step(rule, network, params, state, batch)[0]

    params = learn(params)
    learned = mplp.to_nnx(model, params, names="role")
    np.testing.assert_allclose(learned(batch[0]), network.predict(params, batch[0]), rtol=1e-6)
    assert not np.allclose(model(batch[0]), learned(batch[0]))
    with pytest.raises(ValueError, match="0_dense"):
        mplp.to_nnx(model, params)
    with pytest.raises(TypeError, match="for MLPs"):
        mplp.from_nnx(nnx.Sequential(model, nnx.softmax), mplp.cross_entropy, names="role")
    with pytest.raises(TypeError, match="before the first dense layer to x yourself"):
        mplp.from_nnx(nnx.Sequential(lambda x: x[:, :3], *model.layers), mplp.softmax_cross_entropy, names="role")


def test_a_layer_without_parameters_has_no_role():
    class Gather(nnx.Module):
        def __call__(self, x):
            return x[:, :3]

    mplp.layer.register(Gather, lambda part: mplp.Layer("gather", {}, lambda place, p, s: mplp.wire(part, s)))
    first, second = nnx.Linear(3, 50, rngs=nnx.Rngs(0)), nnx.Linear(50, 2, rngs=nnx.Rngs(1))
    model = nnx.Sequential(Gather(), first, nnx.sigmoid, second)
    batch = jnp.arange(40.0).reshape(8, 5) / 40, jax.nn.one_hot(jnp.arange(8) % 2, 2)
    network, params = mplp.from_nnx(model, mplp.softmax_cross_entropy, names="role", x=batch[0])
    assert [made.name for made in network.layers] == ["0_gather", "dense_in", "activation_0", "dense_out"]
    rule = mplp.load_pretrained("image_mlp")
    assert set(mplp.init_state(rule, network, params, batch)) == {"dense_in", "activation_0", "dense_out", "loss"}
    jax.tree.map(np.testing.assert_array_equal, mplp.to_nnx(model, params, names="role").layers[3], second)
    with pytest.raises(ValueError, match=r"asks for '1_dense'.*A layer of your own"):
        mplp.init_state(rule, *mplp.from_nnx(model, mplp.softmax_cross_entropy), batch)


def test_a_rule_shows_its_arguments():
    assert "message_size" in inspect.signature(mplp.Separable).parameters


def test_a_rule_says_what_a_node_needs_where_only_its_bias_is_another():
    for use_bias in (True, False):
        first, second = (nnx.Linear(n, m, use_bias=b, rngs=nnx.Rngs(0)) for n, m, b in ((3, 3, use_bias), (3, 2, True)))
        model = nnx.Sequential(first, nnx.tanh, second)
        network, params = mplp.from_nnx(model, mplp.softmax_cross_entropy, names="role")
        batch = jnp.ones((8, 3)), jnp.ones((8, 2))
        rule = mplp.load_pretrained("image_mlp")
        if use_bias:  # and a rule for nodes without one
            sites = [site._replace(bias=False) for site in mplp.sites(network, params, batch)]
            rule = mplp.Separable(sites, rngs=nnx.Rngs(0))
        hint = "without a bias: leave it out" if use_bias else "with a bias: give it one, of zeros"
        with pytest.raises(ValueError, match=rf"'dense_in' \(dense.*{hint}"):
            mplp.init_state(rule, network, params, batch)


REACH = {"activations": ["tanh", "step"], "minibatches": [4, 8], "depths": [1, 2], "widths": [3, 5]}


def test_a_changed_card_and_files_that_hold_something_else_are_refused(rule, tmp_path):
    """The digest is of the card too, and the error names the file."""
    mplp.save_trained(rule, card(), tmp_path / "rule")
    about, data = json.loads((tmp_path / "rule.json").read_text()), (tmp_path / "rule.npz").read_bytes()
    without = {name: value for name, value in about.items() if name != pretrained.DIGEST}
    for changed in (about | {"more": 2}, about | {"rule": about["rule"] | {"window": 65}}, without):
        (tmp_path / "rule.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"rule\.json is not a trained rule.*not written together"):
            mplp.load_trained(tmp_path / "rule")
    for text, arrays in [("{", data), ("[1]", data), ("", data), (json.dumps(about), data[:999]), ("\xff", data)]:
        (tmp_path / "rule.json").write_text(text, encoding="latin-1")
        (tmp_path / "rule.npz").write_bytes(arrays)
        with pytest.raises(ValueError, match=r"rule\.json is not a trained rule as save_trained writes it"):
            mplp.load_trained(tmp_path / "rule")


def test_a_rule_says_once_where_its_card_does_not_reach(tmp_path):
    """With the first network and minibatch outside the card, in words; nothing within."""
    deep, prior = meta.mlp((2, 3, 3, 1), jnp.tanh, mplp.squared_error)
    sites = mplp.sites(deep, jax.eval_shape(prior, jax.random.key(0)), (jnp.ones((4, 2)), jnp.ones((4, 1))))
    rule = mplp.Separable(sites, rngs=nnx.Rngs(0), **OPTIONS)
    mplp.save_trained(rule, {"trained": "here"} | REACH, tmp_path / "rule")
    rule, about = mplp.load_trained(tmp_path / "rule")
    assert REACH.items() <= about.items()
    mplp.save_trained(rule, {"trained": "again"}, tmp_path / "again")
    assert REACH.items() <= mplp.load_trained(tmp_path / "again")[1].items()

    def call(sizes, function, batch, backward=False):
        made, prior = meta.mlp(sizes, function, mplp.squared_error)
        params = jax.eval_shape(prior, jax.random.key(0))
        batch = jax.ShapeDtypeStruct((batch, 2), float), jax.ShapeDtypeStruct((batch, 1), float)
        state = jax.eval_shape(lambda: mplp.init_state(rule, made, params, batch))
        if backward:
            jax.eval_shape(functools.partial(mplp.backward, rule, made), params, state, batch)

    for inside in [((2, 3, 1), jnp.tanh, 4), ((2, 3, 5, 1), lambda z: jnp.maximum(0, jnp.sign(z)), 8)]:
        call(*inside)
    outside = [
        (((2, 3, 1), jax.nn.relu, 4), "tried with the activations tanh, step, 1 to 2 hidden.*the activation relu"),
        (((2, 3, 1), lambda z: z, 4), "the activation <lambda>"),
        (((2, 3, 3, 3, 1), jnp.tanh, 4), "3 hidden layers"),
        (((2, 9, 1), jnp.tanh, 4), "a hidden layer of 9 units"),
        (((2, 3, 1), jnp.tanh, 1), "minibatches of 1"),
    ]
    for case, match in outside:
        with pytest.warns(UserWarning, match=match):
            call(*case)
    call(*outside[-1][0], backward=True)  # said already
    rule = mplp.load_trained(tmp_path / "rule")[0]
    with pytest.warns(UserWarning, match="minibatches of 1") as found:  # not of this rule
        call(*outside[-1][0], backward=True)
    assert [w.filename for w in found] == [__file__]

    def joined(places, params, batch, join):
        signal = places.signal(batch[0])
        wide = [mplp.dense(places[name], signal, params[name]["kernel"], params[name]["bias"]) for name in names]
        hidden = mplp.activation(places["activation_0"], jnp.tanh, mplp.wire(join, *wide))
        output = mplp.dense(places["dense_out"], hidden, params["dense_out"]["kernel"], params["dense_out"]["bias"])
        return mplp.squared_error(places["loss"], output, batch[1])

    names = ("dense_in", "dense_in2")
    like = lambda n, m: {"kernel": jnp.zeros((n, m)), "bias": jnp.zeros(m)}
    params, batch = (
        {name: like(2, 3) for name in names} | {"dense_out": like(3, 1)},
        (jnp.ones((4, 2)), jnp.ones((4, 1))),
    )
    exact = mplp.Exact(0.1)
    exact.reach = rule.reach  # pyright: ignore[reportAttributeAccessIssue]
    for join in (jnp.add, jnp.multiply):
        network = functools.partial(joined, join=join)
        with (
            contextlib.nullcontext() if join is jnp.add else pytest.warns(UserWarning, match="a product or other nonl")
        ):
            state = mplp.init_state(exact, network, params, batch)
            jax.eval_shape(functools.partial(mplp.backward, exact, network), params, state, batch)
    between = {
        "dense": lambda places, signal: signal,
        "wire": lambda places, signal: mplp.wire(lambda x: x[:, ::-1], signal),
        "activation": lambda places, signal: mplp.activation(places["activation_1"], jnp.tanh, signal),
    }
    params = {"dense_in": like(2, 3), "dense_1": like(3, 3), "dense_out": like(3, 1)}

    def low_rank(places, params, batch, name):
        call = lambda name, signal: mplp.dense(places[name], signal, params[name]["kernel"], params[name]["bias"])
        hidden = call("dense_1", between[name](places, call("dense_in", places.signal(batch[0]))))
        hidden = mplp.activation(places["activation_0"], jnp.tanh, hidden)
        return mplp.squared_error(places["loss"], call("dense_out", hidden), batch[1])

    for name in between:
        exact.reach = _reach.Reach(*exact.reach)
        network = functools.partial(low_rank, name=name)
        warns = pytest.warns(UserWarning, match="two dense nodes without an activation between")
        with contextlib.nullcontext() if name == "activation" else warns:
            state = mplp.init_state(exact, network, params, batch)
            jax.eval_shape(functools.partial(mplp.backward, exact, network), params, state, batch)
    for wrong in (REACH | {"widths": [3]}, REACH | {"depths": [2, 1]}, {"activations": "tanh"}):
        with pytest.raises(ValueError, match="has all four"):
            mplp.save_trained(rule, {"trained": "here"} | wrong, tmp_path / "wrong")


def test_an_activation_is_recognised_by_its_values_under_vmap_too():
    """What jax.nn compiles has tracers for values there, even of constants."""
    mine, said = lambda z: jnp.where(z > 0, z, 0.0), []
    known = lambda function: _reach._known(function, ("sigmoid", "relu"))
    jax.eval_shape(jax.vmap(lambda x: said.extend([known(mine), known(lambda z: z / 2)]) or x), jnp.ones(2))
    assert said == [True, False]
