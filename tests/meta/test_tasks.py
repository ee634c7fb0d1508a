"""Tasks, data, learners and losses against what they are defined as."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from apgrad import meta, mplp
from tests.refusals import refused


def test_the_two_papers_sinusoids():
    for options, low, high in (({}, 0.1, 0.5), ({"amplitude": (1.0, 5.0), "batch": 32, "deviation": None}, 1.0, 5.0)):
        task = meta.sinusoid(**options)
        drawn = jax.vmap(task.draw)(jax.random.split(jax.random.key(0), 2000))
        assert low <= drawn["amplitude"].min() < low + 0.05 * high and 0.95 * high < drawn["amplitude"].max() <= high
        assert drawn["phase"].min() >= 0 and 3.1 < drawn["phase"].max() <= jnp.pi
        one = jax.tree.map(lambda x: x[0], drawn)
        x, y = jax.jit(task.batch)(one, jax.random.key(1))
        np.testing.assert_allclose(y, one["amplitude"] * np.sin(x + one["phase"]), rtol=1e-5, atol=1e-6)


def test_image_tasks_draw_images_with_their_labels():
    data = meta.data.load("digits")
    task = meta.images(data, split="test", held_out=5)
    for batch, images, labels in (
        (task.held_out({}, jax.random.key(1)), data.x_test, data.y_test),
        (task.batch({}, jax.random.key(1)), data.x_train, data.y_train),
    ):
        for image, target in zip(*batch, strict=True):
            (at,) = np.flatnonzero(np.all(np.isclose(images, image, atol=1e-6), axis=1))[:1]
            assert labels[at] == jnp.argmax(target)


def test_data_are_standardized_and_missing_data_say_what_to_do(tmp_path, monkeypatch):
    data = meta.data.load("digits")
    assert abs(data.x_train.mean()) < 1e-5 and abs(data.x_train.std() - 1) < 1e-5
    monkeypatch.delenv("APGRAD_DATA", raising=False)
    import sklearn.datasets

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", offline)
    refused(FileNotFoundError, r"mnist.npz.*no network.*digits", meta.data.load, "mnist", folder=tmp_path)
    refused(ValueError, "got 'imagenet'", meta.data.load, "imagenet")
    np.savez(tmp_path / "fashion_mnist.npz", x_train=np.zeros((2, 28, 28)))
    refused(ValueError, "x_test", meta.data.load, "fashion_mnist", folder=tmp_path)
    images, labels = np.arange(6 * 32 * 32 * 3, dtype=np.uint8).reshape(6, 32, 32, 3), np.arange(6).reshape(6, 1)
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    assert meta.data.load("cifar10", size=8, folder=tmp_path).x_train.shape == (6, 8 * 8 * 3)
    meta.data._load.cache_clear()  # this test has loaded the digits
    monkeypatch.setitem(sys.modules, "sklearn", None)
    refused(ImportError, 'the extra "meta"', meta.data.load, "digits")


x, y = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4), np.arange(6) % 3


def write(folder, **some):
    np.savez(folder / "mnist.npz", **{"x_train": x, "y_train": y, "x_test": x, "y_test": y} | some)


def test_a_file_of_what_is_no_bytes_and_labels_or_is_damaged_is_named(tmp_path):
    """Images in [0, 1] became black and white, and the rows of one-hot labels ten labels each."""
    wrong = {"x_train": x / 255, "x_test": x + 200}, {"x_test": x.reshape(6, 16)}, {"y_train": np.eye(3)[y]}
    for some in (*wrong, {"y_test": y - 1}, {"y_train": y[:5]}, {"x_train": x[:0], "y_train": y[:0]}):
        write(tmp_path, **some)
        refused(ValueError, r"mnist.npz should have images .* of bytes", meta.data.load, "mnist", folder=tmp_path)
    write(tmp_path, x_train=x.astype(float), y_test=y[:, None])
    np.testing.assert_array_equal(meta.data.load_bytes("mnist", folder=tmp_path).x_train[..., 0], x)
    write(tmp_path, x_train=x * 0)
    refused(ValueError, "of mnist have all the same value", meta.data.load, "mnist", folder=tmp_path, size=4)
    (tmp_path / "mnist.npz").write_bytes((tmp_path / "mnist.npz").read_bytes()[:99])
    refused(ValueError, "mnist.npz is damaged", meta.data.load, "mnist", folder=tmp_path)


def test_images_are_loaded_from_the_folder_that_is_named_now_and_stay_as_they_are(tmp_path, monkeypatch):
    for classes in (2, 3):
        (folder := tmp_path / str(classes)).mkdir()
        write(folder, y_train=y % classes, y_test=y % classes)
        monkeypatch.setenv("APGRAD_DATA", str(folder))
        assert meta.data.load("mnist").classes == classes
    for place, classes in (("2", 2), ("3", 3)):
        monkeypatch.chdir(tmp_path / place)
        assert meta.data.load("mnist", folder=".").classes == classes
    assert meta.data.load("mnist", size=np.int64(4)) is meta.data.load("mnist", size=4)
    for array in meta.data.load("mnist")[2:]:
        refused(ValueError, "read-only", array.fill, 0)


def test_every_label_of_both_splits_is_a_class():
    """A label that only the test images have had a target of zeros, whose loss is 0 and whose argmax is class 0."""
    x, labels = np.ones((3, 4), np.float32), np.arange(3, dtype=np.int32)
    data = meta.data.Images("", "", x, labels % 2, x, labels)
    task = meta.images(data, split="test", held_out=20)
    assert data.classes == 3
    np.testing.assert_array_equal(jax.jit(lambda key: task.held_out({}, key)[1].sum(1))(jax.random.key(0)), np.ones(20))
    for wrong in (labels - 1, labels + 0.5, labels.astype(str)):
        refused(ValueError, "integers of at least 0", meta.images, data._replace(y_train=wrong))


def test_accuracy_is_of_one_hot_targets_and_two_classes_or_more():
    """Labels had one argmax in all, and a single class is always right."""
    x, classes, one = jnp.ones((4, 2)), jax.nn.one_hot(jnp.arange(4) % 3, 3), jnp.zeros((4, 1))
    for outputs, y in ((3, jnp.arange(4)), (3, classes[:1]), (1, one), (1, one[:, 0])):
        network, prior = meta.mlp((2, outputs), jnp.tanh, mplp.squared_error)
        task = meta.sinusoid()._replace(network=network)
        call = lambda key, task=task, prior=prior, y=y: meta.accuracy(task, prior(key), (x, y))
        refused(ValueError, rf"got \(4, {outputs}\) and .*one_hot", jax.eval_shape, call, jax.random.key(0))


def test_a_pool_has_so_many_members():
    _, prior = meta.mlp((1, 2, 1), jnp.tanh, mplp.squared_error)
    pooled = meta.pool(prior, 3, jax.random.key(0))
    draws = jax.vmap(pooled)(jax.random.split(jax.random.key(1), 100))["dense_in"]["kernel"]
    assert len(np.unique(np.asarray(draws).reshape(100, -1), axis=0)) == 3


def test_batch_entropy():
    network, prior = meta.mlp((4, 3, 3, 2), jnp.tanh, mplp.squared_error, deviation=0.3)
    params, x = prior(jax.random.key(0)), jax.random.normal(jax.random.key(1), (7, 4))
    first = np.tanh(x @ params["dense_in"]["kernel"] + params["dense_in"]["bias"])
    second = np.tanh(first @ params["dense_1"]["kernel"] + params["dense_1"]["bias"])
    others = network._replace(layers=tuple(layer._replace(kind="preactivation") for layer in network.layers))
    for form, constant in (("reference", 1.0), ("paper", 1e-5)):
        entropies = [np.mean(np.log(2 * np.pi * np.e * h.var(axis=0) + constant) / 2) for h in (first, second)]
        expected = np.mean([max(0, 0.5 - h) for h in entropies])
        assert expected > 0
        np.testing.assert_allclose(meta.entropy_penalty(network, params, x, form=form), expected, rtol=1e-4)
        refused(ValueError, "the network has none", meta.entropy_penalty, others, params, x, form=form)
    refused(ValueError, "form must be .* got 'Reference'", meta.batch_entropy, network, params, x, form="Reference")


def test_roles_fit_every_depth_and_normalized_steps_every_width():
    network, prior = meta.mlp((2, 3, 3, 1), jnp.tanh, mplp.squared_error)
    sites = mplp.sites(network, jax.eval_shape(prior, jax.random.key(1)), (jnp.ones((4, 2)), jnp.ones((4, 1))))
    small = {"message_size": 2, "rank": 2, "hidden": 3, "normalize": True}
    rules = [mplp.Separable(sites, share=share, rngs=nnx.Rngs(0), **small) for share in ("role", True)]
    deep, prior = meta.mlp((5, 4, 4, 4, 1), jnp.tanh, mplp.squared_error)
    batch = jnp.ones((4, 5)), jnp.ones((4, 1))

    @jax.jit
    def updates(rules):
        params = prior(jax.random.key(2))
        state = lambda rule: mplp.init_state(rule, deep, params, batch)
        return [mplp.backward(rule, deep, params, state(rule), batch)[0] for rule in rules]

    assert all(jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates(rules)))
    other, params = mplp.from_nnx(nnx.Sequential(nnx.Linear(5, 1, rngs=nnx.Rngs(0))), mplp.squared_error)
    refused(ValueError, "dense_in", mplp.init_state, rules[0], other, params, batch)


def test_trained_rules_are_read_as_they_were_written():
    for name in mplp.pretrained_names():
        assert mplp.load_pretrained(name)
        assert {"meta_steps", "seed", "apgrad", "results", "rule", "sites"} <= set(mplp.pretrained_card(name))


def test_a_learned_prior_comes_with_its_learner():
    task = meta.sinusoid(sizes=(1, 4, 1))
    problem = meta.inner_problem(task, meta.optimizer(optax.sgd, task.loss), 2, learn_prior=True)
    slope = jax.grad(lambda theta: problem.init(theta, jax.random.key(0)))
    for theta, words in ((task.prior(jax.random.key(0)), "got dict"), (1.0, "got an array")):
        refused(TypeError, f"WithPrior.* {words}", jax.eval_shape, slope, theta)


def test_an_inner_optimizer_trains_what_an_outer_one_does():
    """A variable that is no nnx.Param stays; one that the loss writes to is refused, since what is written is lost."""

    def loss(params, batch):
        return jnp.sum((params["w"][...] * batch - params["mean"][...]) ** 2)

    def counts(params, batch):
        params["mean"][...] = params["mean"][...] + batch
        return loss(params, batch)

    params = {"w": nnx.Param(jnp.ones(2)), "mean": nnx.BatchStat(jnp.full(2, 3.0))}
    params["key"] = nnx.RngKey(jax.random.key(0))
    make = lambda rate: optax.chain(optax.add_decayed_weights(0.5), optax.sgd(rate))
    step = lambda learner: learner.step(0.1, params, learner.init(0.1, params, 1.0), 1.0)[0]
    new = jax.jit(lambda: step(meta.optimizer(make, loss)))()
    np.testing.assert_array_equal(new["mean"], np.full(2, 3.0))
    assert np.all(new["w"][...] > 1.0) and new["key"][...] == params["key"][...]
    refused(ValueError, "loss of meta.optimizer .* changes its arguments", step, meta.optimizer(optax.sgd, counts))


def test_injected_hyperparameters_are_those_of_theta_at_every_step():
    """`optax.inject_hyperparams` keeps those of the start, which segments after it do not differentiate."""
    task, key = meta.sinusoid(sizes=(1, 4, 1)), jax.random.key(0)
    injected = optax.inject_hyperparams(lambda rate: optax.inject_hyperparams(optax.sgd)(rate, momentum=2 * rate))
    plain = lambda rate: optax.sgd(rate, momentum=2 * rate)

    def second_segment(make):
        outer = meta.truncated(meta.inner_problem(task, meta.optimizer(make, task.loss), 4), 2, stagger=False)
        carry = outer.init(0.1, key)
        *_, carry = outer.estimate(0.1, key, carry)
        return outer.estimate(0.2, key, carry)[:2]

    found, expected = jax.jit(lambda: [second_segment(make) for make in (injected, plain)])()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected[1] != 0


def test_an_inner_optimizer_that_is_called_otherwise_is_refused():
    task = meta.sinusoid(sizes=(1, 4, 1))
    sam = lambda rate: optax.contrib.sam(optax.sgd(rate), optax.sgd(rate), opaque_mode=True)
    for make in (lambda rate: optax.lookahead(optax.sgd(rate), 2, 0.5), sam):
        problem = meta.inner_problem(task, meta.optimizer(make, task.loss), 2)
        words = r"optimizer of meta.optimizer is called by init\(params\).*lookahead \(pairs of parameters\) and sam"
        refused(TypeError, words, jax.eval_shape, lambda key: meta.objective(problem, 0.1, key), jax.random.key(0))  # noqa: B023


def test_learning_is_judged_by_mean_and_standard_error_over_tasks():
    """64 tasks by default."""
    task, steps, key, theta = meta.sinusoid(sizes=(1, 20, 1)), 3, jax.random.key(3), jnp.float32(0.01)
    learner = meta.optimizer(optax.sgd, task.loss)

    @jax.jit
    def run(theta):
        one = lambda key: meta.evaluate(task, learner, theta, key, steps, tasks=None)
        return meta.evaluate(task, learner, theta, key, steps), jax.vmap(one)(jax.random.split(key, 64))

    (mean, error), curves = run(theta)
    assert mean.shape == error.shape == (steps + 1,) and np.all(np.diff(mean) < 0)
    np.testing.assert_allclose(mean, np.mean(curves, axis=0), rtol=1e-5)
    np.testing.assert_allclose(error, np.std(curves, axis=0, ddof=1) / 8, rtol=1e-4)
    refused(ValueError, "at least 2", meta.evaluate, task, learner, theta, key, steps, tasks=1)
    both = meta.WithPrior(theta, task.prior(key))
    refused(TypeError, "theta.learner.* prior=theta.prior", meta.evaluate, task, learner, both, key, steps)
    constant = lambda theta: meta.evaluate(task, learner, theta, key, steps, lambda params, batch: 1.0)
    assert jax.eval_shape(constant, theta).mean.shape == (steps + 1,)


def test_the_trained_sinusoid_rule_learns():
    rule, task = mplp.load_pretrained("sinusoid"), meta.sinusoid()
    run = lambda key: meta.evaluate(task, meta.message_passing(task.network), rule, key, 5, tasks=50)
    mean, _ = jax.jit(run)(jax.random.key(1))
    found = mplp.pretrained_card("sinusoid")["results"]["sinusoid"]
    assert abs(float(mean[-1]) - found["mean"]) < 4 * (found["deviation"] / 50**0.5)
