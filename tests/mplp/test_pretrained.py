"""Rules on disk: what is read is what was written, or an error says what does not belong together."""

import contextlib
import functools
import inspect
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from apgrad import meta, mplp
from apgrad.mplp import _pretrained as pretrained, _reach
from experiments import mplp_published
from tests.compiled import listening
from tests.mplp.graphs import close
from tests.refusals import refused

OPTIONS = {"message_size": 2, "rank": 2, "hidden": 3, "neuron_state": 1}
OPTIONS |= {"whiten": True, "share": "role", "normalize": True}


def network():
    made, prior = meta.mlp((2, 3, 1), jnp.tanh, mplp.squared_error)
    return made, prior(jax.random.key(0)), (jnp.ones((4, 2)), jnp.ones((4, 1)))


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


def not_saved(words, rule, about, folder, error=ValueError):
    refused(error, words, mplp.save_trained, rule, about, folder / "rule")
    assert not list(folder.iterdir())


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


class Halved(mplp.Separable):
    """What it does beside a separable rule a card does not say."""

    at = None


@pytest.mark.parametrize("made", [mplp.Exact, Halved])
def test_a_rule_of_another_class_is_refused(made, rule, tmp_path):
    other = nnx.eval_shape(lambda: made(0.1) if made is mplp.Exact else made(rule.sites, rngs=nnx.Rngs(0)))
    words = f"Separable and Normalized rules, got {made.__name__}.*meta.Checkpoints"
    not_saved(words, other, {"trained": "here"}, tmp_path, TypeError)


def test_a_number_that_is_not_finite_and_real_is_refused(rule, tmp_path):
    leaves, tree = jax.tree.flatten(rule)
    for value in (np.float32(np.inf), np.float64(1e300), np.complex64(1 + 1j), np.int32(3)):
        odd = tree.unflatten([np.full(leaves[0].shape, value), *leaves[1:]])
        not_saved("numbers are finite and real, of float32; got", odd, card(), tmp_path)


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
    refused(OSError, "no space left", mplp.save_trained, scaled(rule, 2.0), card(), tmp_path / "rule")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rule.json", "rule.npz"]
    if dies == 1:
        jax.tree.map(np.testing.assert_array_equal, mplp.load_trained(tmp_path / "rule")[0], rule)
    else:
        refused(ValueError, "were not written together", mplp.load_trained, tmp_path / "rule")


# Some change what the rule does, though not the shapes of its arrays.
OTHERS = {"normalize": False, "share": False, "full": 3, "window": 5}
CARDS = [
    *[(card(**{name: value}), f"differs in .*{name}") for name, value in OTHERS.items()],
    (card() | {"sites": card()["sites"][1:]}, "differs in sites"),
    ([], "a card is a dictionary .* got \\[\\]"),
    ({}, "a card is a dictionary .* got {}"),
    (card() | {"rule": [1]}, "makes no rule"),
    (card() | {"sites": [[]]}, "makes no rule"),
    (card(hidden=10**7), "differs in .*hidden"),
    (card(hidden=10**12), "hidden must be an integer from 1 to"),
    (card(share="rol"), "share must be one of .* got 'rol'"),
    (card(unknown=1), "unknown"),
    (card(rngs=1), "rngs"),
    (card(learning_rate=-1.0), "learning_rate must be a finite number above 0, got -1.0"),
    (card() | {"sites": [sites()[0]._asdict() | {"more": 1}]}, "makes no rule: .*more"),
]


def test_a_card_that_makes_no_rule_or_another_one_is_refused(rule, tmp_path):
    for wrong, match in CARDS:
        not_saved(match, rule, wrong, tmp_path)
    mplp.save_trained(rule, card(), tmp_path / "rule")
    alone = {"rule": OPTIONS}, "makes no rule: KeyError: 'sites'"
    for wrong, match in (alone, (card(hidden=10**7), "do not belong")):  # written by hand, with the right digest
        digest = pretrained.digest(wrong, (tmp_path / "rule.npz").read_bytes())
        (tmp_path / "rule.json").write_text(json.dumps(wrong | {pretrained.DIGEST: digest}))
        refused(ValueError, rf"rule\.json is not a trained rule.*{match}", mplp.load_trained, tmp_path / "rule")


def test_rules_want_inputs_and_targets_standardized_as_their_card_says():
    x, rng = jnp.linspace(0.0, 1.0, 100), np.random.default_rng(0)
    standardized = (x - x.mean()) / x.std()
    load = mplp.load_pretrained
    refused(ValueError, r"standardized inputs, got a mean of 0.5 .* the training inputs", load, "image_mlp", x)
    far = "regression", standardized, 10 * standardized
    refused(ValueError, r"standardized targets, got a mean of .* the training targets", load, *far)
    load("image_mlp", standardized, x)  # whose card says nothing of targets
    load("sinusoid", x, x)  # nor of inputs
    for few in rng.standard_normal((8, 8)):  # their mean and deviation are off by chance
        load("regression", few[:4], few[4:])
    load("regression", standardized, jnp.ones((1, 1)))  # alike, as classes of ±1 can be
    for scale in (0.001, 100.0):
        refused(ValueError, "standardized targets", load, "regression", standardized, scale * few[4:])
    four = meta.data.load_bytes("digits").x_train[:4] / 255  # few images have many pixels
    refused(ValueError, "standardized inputs", load, "images", four)


def test_a_rule_shows_its_arguments_and_what_it_holds():
    assert "message_size" in inspect.signature(mplp.Separable).parameters
    made = lambda: mplp.PerSynapse(sites(), message_size=2, hidden=2, rngs=nnx.Rngs(0))
    for rule in (made(), jax.eval_shape(made)):  # Flax shows the form of an array in its place
        assert "shift=Fixed(" in repr(rule)


def test_a_changed_card_and_files_that_hold_something_else_are_refused(rule, tmp_path):
    """The digest is of the card too, and the error names the file."""
    path = tmp_path / "rule"
    mplp.save_trained(rule, card(), path)
    about, data = json.loads((tmp_path / "rule.json").read_text()), (tmp_path / "rule.npz").read_bytes()
    without = {name: value for name, value in about.items() if name != pretrained.DIGEST}
    for changed in (about | {"more": 2}, about | {"rule": about["rule"] | {"window": 65}}, without):
        (tmp_path / "rule.json").write_text(json.dumps(changed))
        refused(ValueError, r"rule\.json is not a trained rule.*not written together", mplp.load_trained, path)
    for text, arrays in [("{", data), ("[1]", data), ("", data), (json.dumps(about), data[:999]), ("\xff", data)]:
        (tmp_path / "rule.json").write_text(text, encoding="latin-1")
        (tmp_path / "rule.npz").write_bytes(arrays)
        refused(ValueError, r"rule\.json is not a trained rule as save_trained writes it", mplp.load_trained, path)


def test_an_activation_is_recognised_by_its_values_under_vmap_too():
    """What jax.nn compiles has tracers for values there, even of constants."""
    mine, said = lambda z: jnp.where(z > 0, z, 0.0), []
    known = lambda function: _reach._known(function, ("sigmoid", "relu"))
    asked = lambda x: said.extend(map(known, [mine, lambda z: z / 2, lambda z: x * z])) or x
    jax.eval_shape(jax.vmap(asked), jnp.ones(2))
    assert said == [True, False, False]


def test_every_option_of_every_rule_is_checked():
    small = {"message_size": 2, "hidden": 1, "layers": (3,)}
    flags = "one of .*, got {!r}"
    for rule, fixed, options in (
        (mplp.PerSynapse, small, {"cell share gradient": flags}),
        (mplp.PerSynapse, small, {"message_size hidden layers": ""}),
        (mplp.Separable, {}, {"whiten share normalize": flags}),
        (mplp.Separable, {}, {"message_size rank hidden neuron_state full window learning_rate": ""}),
        (mplp.Normalized, {}, {"whiten": flags, "message_size rank hidden full window settle": ""}),
        (mplp.Thesis, {}, {"batch_norm learn_rate start see_loss": flags, "message_size hidden learning_rate": ""}),
    ):
        for names, match in options.items():
            for value in ("rol", None, 2) if match else (-1, "3", float("nan"), True):
                for name in names.split():
                    given = fixed | {name: (value,) if name == "layers" else value}
                    words = f"^{name}.* must be {match.format(value)}"
                    refused(ValueError, words, rule, sites(), **given, rngs=nnx.Rngs(0))


def test_a_rule_is_made_for_sites():
    for make in (mplp.PerSynapse, mplp.Separable, mplp.Normalized, mplp.Thesis):
        for wrong, got in (((), "a tuple of 0"), (sites()[0], "a tuple of 9"), (trace, "function"), ("fc", "str")):
            refused(TypeError, rf"the sites of a network, mplp\.sites.*got {got}", make, wrong, rngs=nnx.Rngs(0))


class Gather(nnx.Module):
    def __call__(self, x):
        return x[:, :3]


def test_roles_are_those_of_an_mlp_and_of_layers_with_parameters():
    mplp.layer.register(Gather, lambda part: mplp.Layer("gather", {}, lambda place, p, s: mplp.wire(part, s)))
    first, second = nnx.Linear(3, 50, rngs=nnx.Rngs(0)), nnx.Linear(50, 2, rngs=nnx.Rngs(1))
    model = nnx.Sequential(Gather(), first, nnx.sigmoid, second)
    batch = jnp.arange(40.0).reshape(8, 5) / 40, jax.nn.one_hot(jnp.arange(8) % 2, 2)
    network, params = mplp.from_nnx(model, mplp.softmax_cross_entropy, names="role", x=batch[0])
    assert [made.name for made in network.layers] == ["0_gather", "dense_in", "activation_0", "dense_out"]
    rule = mplp.load_pretrained("image_mlp")
    assert set(mplp.init_state(rule, network, params, batch)) == {"dense_in", "activation_0", "dense_out", "loss"}
    learned = mplp.to_nnx(model, jax.tree.map(lambda x: x + 1, params), names="role")
    np.testing.assert_array_equal(learned.layers[3].kernel[...], second.kernel[...] + 1)
    refused(ValueError, "1_dense", mplp.to_nnx, model, params)
    numbered = mplp.from_nnx(model, mplp.softmax_cross_entropy)
    refused(ValueError, r"asks for '1_dense'.*A layer of your own", mplp.init_state, rule, *numbered, batch)
    sliced = [lambda x: x[:, :3], *model.layers[1:]], "before the first dense layer to x yourself"
    for parts, match in (([*model.layers, nnx.softmax], "for MLPs"), sliced):
        refused(TypeError, match, mplp.from_nnx, nnx.Sequential(*parts), mplp.softmax_cross_entropy, names="role")


def test_a_rule_says_what_a_node_needs_where_only_its_bias_is_another():
    made, params, batch = network()
    with_bias = mplp.sites(made, params, batch)
    without = [site._replace(bias=False) for site in with_bias]
    hints = {"without a bias: leave it out": (without, with_bias), "give it one": (with_bias, without)}
    for hint, (known, asked) in hints.items():
        rule = mplp.Separable(known, rngs=nnx.Rngs(0))
        refused(ValueError, rf"'dense_in' \(dense.*{hint}", rule.at, next(s for s in asked if s.name == "dense_in"))


REACH = {"activations": ["tanh", "step", "softplus"], "minibatches": [4, 8], "depths": [1, 2], "widths": [3, 5]}
TRIED = {"trained": "here"} | REACH


def trace(rule, made, params, batch):
    """As a user's first step does."""
    state = jax.eval_shape(lambda p: mplp.init_state(rule, made, p, batch), params)
    jax.eval_shape(functools.partial(mplp.backward, rule, made), params, state, batch)


def test_a_rule_says_once_where_its_card_does_not_reach(tmp_path):
    """With the network and minibatch outside the card, in words; nothing within."""
    rule = mplp.Separable(sites(), rngs=nnx.Rngs(0), **OPTIONS | {"share": True})  # of which any depth has the kinds
    mplp.save_trained(rule, TRIED | {"updates": 9}, tmp_path / "rule")  # which it is not told
    rule, about = mplp.load_trained(tmp_path / "rule")
    assert REACH.items() <= about.items()
    mplp.save_trained(rule, {"trained": "again"}, tmp_path / "again")
    assert REACH.items() <= mplp.load_trained(tmp_path / "again")[1].items()

    def call(sizes, function, batch, rule=rule):
        made, prior = meta.mlp(sizes, function, mplp.squared_error)
        trace(rule, made, jax.eval_shape(prior, jax.random.key(0)), (jnp.ones((batch, 2)), jnp.ones((batch, 1))))

    call((2, 3, 3, 1), [lambda z: jnp.maximum(0, jnp.sign(z)), jax.nn.softplus], 8)
    tried = "tried with the activations tanh, step, softplus, 1 to 2 hidden.*the activation relu"
    for case, match in [
        (((2, 3, 1), jax.nn.relu, 4), tried),
        (((2, 3, 1), lambda z: z, 4), "the activation <lambda>"),
        (((2, 3, 1), functools.partial(jax.nn.standardize, axis=1), 4), "the activation partial"),
        (((2, 3, 3, 3, 1), jnp.tanh, 4), "3 hidden layers"),
        (((2, 9, 1), jnp.tanh, 4), "a hidden layer of 9 units"),
        (((2, 3, 1), jnp.tanh, 1), "minibatches of 1"),
    ]:
        with pytest.warns(UserWarning, match=match) as found:
            call(*case)
        assert [w.filename for w in found] == [__file__]
        call(*case)  # said already
    with pytest.warns(UserWarning, match="minibatches of 1"):  # not of this rule
        call((2, 3, 1), jnp.tanh, 1, rule=mplp.load_trained(tmp_path / "rule")[0])
    wrong = [{"widths": [3]}, {"widths": 3}, {"depths": [2, 1]}, {"depths": [1.5, 2]}, {"activations": "tanh"}]
    for each in ({"activations": ["tanh"]}, *[REACH | some for some in [*wrong, {"activations": [1]}]]):
        refused(ValueError, "has all four", _reach.Reach.of, {"trained": "here"} | each)


def test_a_rule_that_is_read_knows_its_updates_and_how_many_it_was_tried_with(tmp_path):
    """So that it does not warn that it was not told; one that was not told still does."""
    made, params, batch = network()
    new = mplp.Normalized(sites(), rngs=nnx.Rngs(0), message_size=1, rank=1, hidden=2)
    for steps in (0, 2.5, True, jnp.array(0), jnp.array(2.5), jnp.array(jnp.nan), jnp.array([3, 4])):
        refused((TypeError, ValueError), "steps", new.for_steps, steps)
    not_saved("largest number of updates, got 'many'", new, TRIED | {"updates": "many"}, tmp_path)
    for rule, told in ((new.for_steps(5), True), (new, False)):
        mplp.save_trained(rule, TRIED | {"updates": 9}, tmp_path / "rule")
        found, about = mplp.load_trained(tmp_path / "rule")
        assert (found.told, found.horizon[...], about["class"]) == (told, 5 * told, "Normalized")
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(rule))
        with contextlib.nullcontext() if told else pytest.warns(UserWarning, match="for_steps"):
            trace(found, made, params, batch)
    found.for_steps(9)
    with pytest.warns(UserWarning, match="at most 9 updates, got 10") as warned:
        found.for_steps(10)
    assert [w.filename for w in warned] == [__file__]
    found.for_steps(10).for_steps(jnp.asarray(12))  # said already; an array may be of any value


activated = lambda function: lambda at, a, b: mplp.activation(at["tanh"], jnp.tanh, mplp.wire(function, a, b))
LINEAR = lambda at, a, b: a, lambda at, a, b: mplp.wire(lambda x: x[:, ::-1], a)
BETWEEN = [(activated(jnp.add), None), (activated(jnp.multiply), "a product or other")]
BETWEEN += [(between, "two dense nodes without an activation between") for between in LINEAR]


@pytest.mark.parametrize(("between", "match"), BETWEEN)
def test_a_rule_says_where_a_network_is_no_mlp(between, match):
    """Two dense nodes side by side, what is between them and two outputs, and a loss of each."""
    exact = mplp.Exact(0.1)
    exact.reach = _reach.Reach.of(REACH)  # pyright: ignore[reportAttributeAccessIssue]

    def network(places, params, batch):
        pair = (mplp.dense(places[name], places.signal(batch[0]), params[name]) for name in ("in", "in2"))
        hidden = between(places, *pair)
        outputs = [mplp.dense(places[name], hidden, params["out"]) for name in ("out", "out2")]
        return sum(mplp.squared_error(places[f"loss{i}"], output, batch[1]) for i, output in enumerate(outputs))

    params = {"in": jnp.ones((2, 3)), "in2": jnp.ones((2, 3)), "out": jnp.ones((3, 1))}
    with contextlib.nullcontext() if match is None else pytest.warns(UserWarning, match=match):
        trace(exact, network, params, (jnp.ones((4, 2)), jnp.ones((4, 1))))


# The published checkpoints: golden inner steps, as the authors' code computed them.
DATA = os.environ.get("APGRAD_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="APGRAD_DATA, the folder with mplp_published/, is not set")

TASKS = {
    "sinusoid": lambda: mplp_published.build((1, 20, 20, 1), nnx.relu, nnx.relu, loss=mplp.squared_error),
    "mnist": lambda: mplp_published.build((144, 50, 10), nnx.sigmoid, nnx.softmax, loss=mplp.cross_entropy),
}


def load(task):
    return dict(np.load(Path(DATA or "") / "mplp_published" / f"{task}.npz"))


@needs_data
@pytest.mark.parametrize("task", ["sinusoid", pytest.param("mnist", marks=pytest.mark.long)])
@pytest.mark.quick
def test_golden_steps(task):
    arrays = load(task)
    network, draw = TASKS[task]()
    dense = list(draw(jax.random.key(0)))
    golden = lambda step, j: {"kernel": arrays[f"golden/{step}/W{j}"], "bias": arrays[f"golden/{step}/b{j}"]}
    at = lambda step: {name: golden(step, j) for j, name in enumerate(dense)}
    params = jax.tree.map(jnp.asarray, at("init"))
    x, y = jnp.asarray(arrays["golden/x"]), jnp.asarray(arrays["golden/y"])
    sites = mplp.sites(network, params, (x[0], y[0]))
    with listening() as compiled:
        rule = mplp.load_published(arrays, sites)
    assert not compiled  # nothing is drawn that the file's arrays replace
    state = mplp.init_state(rule, network, params, (x[0], y[0]))
    step = jax.jit(lambda p, s, b: mplp.backward(rule, network, p, s, b))
    for t in range(5):
        updates, state, _ = step(params, state, (x[t], y[t]))
        params = jax.tree.map(jnp.add, params, updates)
        close(params, at(f"step{t + 1}"), rtol=0, atol=2e-5)


@needs_data
def test_checkpoints_that_are_not_this_version_s_are_refused_naming_both_sides():
    arrays, name = load("sinusoid"), "loss/gru/W_update_c"
    network, draw = TASKS["sinusoid"]()
    sites = mplp.sites(network, draw(jax.random.key(0)), (jnp.ones((2, 1)), jnp.ones((2, 1))))
    of_synapse = lambda name: "_dense" in name and "/gru/" in name
    shared = {k.replace("0_dense", "shared"): v for k, v in arrays.items() if k.startswith("0_") and of_synapse(k)}
    shared |= {k: v for k, v in arrays.items() if not of_synapse(k)}
    for words, wrong in (
        (r"different numbers for 1_activation/gru/\S+ and 3_activation/gru/", shared),
        (r"for the nodes .*'3_softmax'.*the network has .*'4_dense/bias'", load("mnist")),
        (f"has no '{name}'", {k: v for k, v in arrays.items() if k != name}),
        (r"does not know: \['loss/gru/more'\]", arrays | {"loss/gru/more": np.ones(2)}),
        (rf"{name} has shape \(2, 2\), the rule wants \(23, 23\)", arrays | {name: np.ones((2, 2))}),
    ):
        refused(ValueError, words, mplp.load_published, wrong, sites)


@needs_data
@pytest.mark.long
def test_the_published_rule_on_a_few_sinusoids():
    """Its figures over 100 tasks are .0253 before and .0013 after 5 steps."""
    result = mplp_published.measure(mplp_published.Config(runs=20), {"task": "sinusoid", "method": "MPLP"}, 0)
    curve = np.array(result["eval"])
    assert curve.shape == (20, 6)
    mean, error = curve.mean(axis=0), curve.std(axis=0, ddof=1) / np.sqrt(20)
    assert abs(mean[0] - 0.0253) < 4 * error[0]
    assert abs(mean[5] - 0.0013) < 4 * error[5]


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "rule.npz"
    np.save(tmp_path / "array.npy", np.ones(3))
    for data in (b"", b"PK", b"something else", (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(data)
        refused(ValueError, r"rule\.npz is no \.npz file that", mplp.load_published, path, ())


def test_without_data_the_experiment_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("APGRAD_DATA", raising=False)
    refused(SystemExit, r"set APGRAD_DATA to a folder with Keras' mnist\.npz and", mplp_published.folder)
