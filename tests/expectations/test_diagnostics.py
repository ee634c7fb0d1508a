import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad.expectations import diagnostics
from tests.expectations.instruments import KEY
from tests.expectations.programs import paid, walk
from tests.refusals import refused

# An objective whose gradient at 0 is a sample of `gradient(key)`.
of_gradient = lambda gradient: lambda key, x: jnp.sum(x * gradient(key))


def one_node(estimator):
    draw = ap.stochastic(estimator)(lambda theta: dist.Normal(theta, 0.5))
    return paid(lambda tape, theta: draw(tape, 10 * theta), jnp.square)


recommended = lambda **rows: diagnostics.recommend(diagnostics.Comparison(rows, {}, 100))


def row_of(samples, truth=None, cuts=()):
    """What is found of samples, against an exact gradient, or an array of a reference's estimates."""
    truth = np.stack([truth, truth]) if np.ndim(truth) == 1 else truth
    return diagnostics._row(samples, np.ones(3), truth, cuts)


def test_moments_of_a_known_gradient_and_the_error_of_the_variance():
    deviations = jnp.array([1.0, 3.0])
    objective = of_gradient(lambda key: 5 + deviations * jax.random.normal(key, (2,)))
    found = diagnostics.compare({"a": objective}, KEY, jnp.zeros(2), num_estimates=4000, truth=np.full(2, 5.0))
    row = found.rows["a"]
    np.testing.assert_allclose(row.standard_error, deviations / np.sqrt(4000), rtol=0.05)
    assert (np.abs(row.bias) < 4 * row.standard_error).all() and not row.biased and not row.heavy_tailed
    np.testing.assert_allclose(row.uncertainty, np.sqrt(2 * (1 + 81) / 4000), rtol=0.15)  # the d_i's, exactly
    assert abs(row.variance - 10) < 4 * row.uncertainty
    np.testing.assert_allclose(row.efficiency, 1 / (row.squared_error * row.seconds))
    assert "norm 7.0" in str(found) and "4000 estimates" in str(found)


def test_a_bias_is_found_against_truth_and_against_a_reference():
    objectives = {"sound": of_gradient(jax.random.normal), "off": of_gradient(lambda key: 0.3 + jax.random.normal(key))}
    against_truth = diagnostics.compare(objectives, KEY, 0.0, num_estimates=1000, truth=0.0).rows
    against_sound = diagnostics.compare(objectives, KEY, 0.0, num_estimates=1000, reference="sound").rows
    for rows in (against_truth, against_sound):
        assert rows["off"].biased and not rows["sound"].biased
    assert against_sound["sound"].bias is None
    bias = against_truth["off"].mean - against_truth["sound"].mean
    error = np.hypot(against_truth["off"].standard_error, against_truth["sound"].standard_error)
    np.testing.assert_allclose(against_sound["off"].off, bias / error)  # the reference's error counts too
    np.testing.assert_allclose(against_sound["off"].squared_bias, bias**2 - error**2)
    assert np.isnan(against_sound["sound"].squared_bias)
    # E (z + .3)^2 is 1.09, and its square's variance 2 + 4 x .09; a mean of 1,000 as the truth adds 4 x .09 / 1,000.
    for row, more in ((against_truth["off"], 0), (against_sound["off"], 0.36)):
        np.testing.assert_allclose(row.squared_error, row.variance + row.squared_bias)
        assert abs(row.squared_error - 1.09) < 4 * row.uncertainty
        np.testing.assert_allclose(row.uncertainty, np.sqrt((2.36 + more) / 1000), rtol=0.15)


def test_the_squared_bias_has_its_noise_taken_off():
    rng, truth, n, m = np.random.default_rng(0), np.array([0.3, -0.4]), 20, 30
    draw = lambda size: np.array([0.5, 1.0]) * rng.normal(size=(size, 2))
    rows = [row_of(truth + draw(n), draw(m)) for _ in range(800)]
    raw = np.array([row.bias @ row.bias for row in rows])
    noise = 1.25 * (1 / n + 1 / m)
    error = np.sqrt((4 * 0.25 * 1.0 * noise + 2 * noise**2) / 800)  # an upper bound of the standard error
    assert abs(raw.mean() - noise - 0.25) < 4 * error
    found = np.array([row.squared_bias for row in rows])
    assert (found >= 0).all()  # and elsewhere the raw one less what the rows say of noise
    assert abs(found.mean() - 0.25) < 4 * error and abs(raw.mean() - 0.25) > 6 * error


def test_cosines_and_shares_are_those_of_the_definition():
    # Two of 200 estimates at 1 and the others at 0, with a mean of .01.
    samples = np.zeros((200, 1))
    samples[:2] = 1
    row = row_of(samples)
    np.testing.assert_allclose(row.share, 0.99)
    np.testing.assert_allclose(row.variance, 0.0198 / 1.99)
    assert row.cosine == 0 and np.isnan(row.squared_bias) and row.squared_error == row.variance
    # Against (1, 0) the vectors (1, z) have the cosines (1 + z^2)^-1/2.
    samples = np.stack([np.full(101, 2.0), np.linspace(-2, 2, 101)], 1)
    row = row_of(samples, np.array([3.0, 0]))
    np.testing.assert_allclose(row.cosine, 0.8944, atol=0.01)
    np.testing.assert_allclose(row.bias, [-1, 0], atol=1e-12)
    np.testing.assert_allclose(row.squared_error, 1 + row.variance * (1 - 1 / 101), rtol=1e-12)  # with the noise off
    # Without a truth each is compared with the mean of the others: (1, 0) with (0, 1), and so on.
    np.testing.assert_allclose(row_of(np.eye(2)).cosine, 0, atol=1e-12)
    np.testing.assert_allclose(row_of(np.eye(3) + 1).cosine, 5 / np.sqrt(6 * 5.5))


def test_exploding_gradients_are_flagged_and_not_recommended():
    objectives = {
        "normal": of_gradient(lambda key: 20 * jax.random.normal(key)),
        "lognormal": of_gradient(lambda key: jnp.exp(4 * jax.random.normal(key))),  # true variance e^32
        "infinite": of_gradient(lambda key: jnp.where(jax.random.uniform(key) < 0.1, jnp.inf, 1.0)),
    }
    found = diagnostics.compare(objectives, KEY, 1.0, num_estimates=500, truth=0.0)
    assert [row.heavy_tailed for row in found.rows.values()] == [False, True, True]
    assert found.rows["infinite"].efficiency == 0
    assert diagnostics.recommend(found).startswith("Use normal: it is the only one without heavy tails.")


def test_roundings_of_a_gradient_are_no_bias():
    # An element of 1e-3 or 0 among others of 1 is off by as much as they are.
    truth = np.array([1.0, -2.0, 1e-3, 0.0])
    noisy = np.random.default_rng(0).normal(size=(200, 4)) * np.array([1.0, 0, 0, 0])

    found = lambda error, samples: row_of(truth + error + samples + np.zeros((200, 4)), truth, [1])
    for samples in (0.0, noisy):  # whatever the noise of other elements is
        row = found(np.array([0.0, 1e-7, 2e-7, -1e-7]), samples)
        assert row.rounding and not row.biased and row.off < 4 and np.all(row.bias[1:] == 0)
        row = found(np.array([0.0, 1e-4, 0, 0]), samples)
        assert row.biased and row.off > 1e3 and not row.rounding
    small = 1e-7 * np.random.default_rng(1).normal(1, 1, size=(200, 100))  # too little to be seen in one element
    row = row_of(1 + small, np.ones(100))
    assert row.rounding and not row.biased and row.off < 6
    # What is small in each element may be much in all of them.
    ones = np.ones(10_000)
    row = row_of(np.tile(ones + 1e-4, (20, 1)), ones)
    assert row.biased and not row.rounding


def test_few_estimates_of_many_elements_call_no_unbiased_gradient_biased():
    # Rounding to one of two neighbours, some of them seldom: standard errors of 50 estimates are far off.
    rng, size = np.random.default_rng(0), 20_000
    chance, truth = rng.uniform(0.001, 0.999, size), rng.normal(size=size)
    draws = lambda: truth + (rng.random((50, size)) < chance) - chance
    row = row_of(draws(), truth)
    assert not row.biased and row.off > 6  # one in 20,000 normal numbers is not at 6
    assert not row_of(draws(), draws()).biased
    assert row_of(draws() + 0.3, truth).biased


def compared_with_a_broken_one(error, **options):
    def broken(key, x):
        raise error

    objectives = {"fine": lambda key, x: x * jax.random.normal(key), "broken": broken}
    return diagnostics.compare(objectives, KEY, 1.0, num_estimates=4, rounds=2, **options)


def test_an_error_of_a_gradient_names_the_objective():
    error = refused(RuntimeError, "no simulator", compared_with_a_broken_one, RuntimeError("no simulator"))
    assert any("objective 'broken'" in note for note in error.__notes__)


def test_a_bar_of_progress_says_what_is_compiled_and_run(capsys):
    assert list(compared_with_a_broken_one(TypeError("no gradient")).rows) == ["fine"]
    shown = capsys.readouterr().err
    assert all(words in shown for words in ("compiling fine", "compiling broken", "running fine", "6/6"))
    compared_with_a_broken_one(TypeError("no gradient"), progress=False)
    assert capsys.readouterr().err == ""


def test_tables_are_narrow_where_nothing_varies():
    exact = lambda off: lambda key, x: jnp.sum(x * jnp.array([3.0 + off, 1e-3])) + 0 * jax.random.normal(key)
    objectives = {"exact": exact(0.0), "rounded": exact(1e-6), "off": exact(0.1)}
    found = diagnostics.compare(objectives, KEY, jnp.zeros(2), num_estimates=20, truth=np.array([3.0, 1e-3]))
    table, words, row = str(found).splitlines(), diagnostics.recommend(found), found.rows["exact"]
    assert row.variance == 0 and row.efficiency == np.inf and row.off == 0
    assert max(map(len, table)) < 120 and max(map(len, words.splitlines())) < 200
    assert "rounding" in table[2] and "biased" not in table[2]
    assert " inf " in table[3] and table[3].endswith("biased")
    assert "off is biased by 0.1 (at worst inf standard errors)" in words
    assert table[4].endswith("; ms without compiling")


def test_what_has_no_gradient_is_refused_with_its_reason():
    coins = lambda estimator: ap.stochastic(estimator)(lambda p: dist.Bernoulli(probs=p))
    objective = lambda e: ap.expectation(paid(coins(e), lambda x: x.astype(jnp.float32)), lanes=10)
    objectives = {"RP": objective(ap.reparameterization()), "LR": objective(ap.likelihood_ratio())}
    found = diagnostics.compare(objectives, KEY, 0.3, num_estimates=100, truth=1.0)
    assert list(found.rows) == ["LR"] and "RP: refused, " in str(found)
    text = diagnostics.recommend(found)
    assert text.startswith("Use LR") and "RP is refused" in text
    words = r"nothing to go by, refused are .*TypeError: reparameterization needs"
    refused(ValueError, words, diagnostics.compare, {"RP": objectives["RP"]}, KEY, 0.3)
    refused(ValueError, "no reference to go by", diagnostics.compare, objectives, KEY, 0.3, reference="RP")
    wrong = lambda words, objective: refused(ValueError, words, diagnostics.compare, {"A": objective}, KEY, 0.3)
    wrong("keeps a state from call to call.*judge it by training", ap.adaptive(lambda tape, p: tape, lanes=10))
    wrong("got int", 3)
    normal = ap.stochastic(ap.total_propagation())(lambda p: dist.Normal(p, 1.0))
    pair = ap.value_and_grad(paid(normal, jnp.square), lanes=10)
    wrong(r"returns a scalar, as that of ap.expectation.*got the shapes \(\(\), \(\)\)", pair)


def test_bad_comparisons():
    compare = functools.partial(diagnostics.compare, {"a": lambda key, x: x}, KEY, 0.0)
    refused(ValueError, "not both", compare, truth=0.0, reference="a")
    refused(ValueError, "none of the objectives", compare, reference="b")
    refused(ValueError, "a round and 2 estimates", compare, rounds=0)
    for truth, words in ((np.zeros(2), r"\(2,\)"), ([0.0], r"\[\(\)\]"), (3j, r"complex \(\)")):
        refused(ValueError, rf"has the form \(\), the truth {words}", compare, truth=truth, num_estimates=10)
    for truth in (np.inf, np.nan):
        refused(ValueError, "truth that is finite", compare, truth=truth)
    refused(ValueError, "no arrays", diagnostics.compare, {"a": lambda key, x: 1.0}, KEY, {}, num_estimates=10)


def test_what_is_not_finite_is_no_reference_and_is_said_to_be_so():
    sometimes = lambda value: lambda key, x: x * jnp.where(jax.random.uniform(key) < 0.5, value, 1.0)
    objectives = {"inf": sometimes(jnp.inf), "nan": sometimes(jnp.nan), "one": sometimes(1.0)}
    compare = lambda **options: diagnostics.compare(objectives, KEY, 1.0, num_estimates=20, rounds=2, **options)
    for name in ("inf", "nan"):
        refused(ValueError, f"'{name}'.*20 estimates are not finite", compare, reference=name)
    found = compare(truth=1.0)
    assert str(found).count("not finite") == 2 and "heavy tails" not in str(found)
    assert "inf is not finite in some estimates" in diagnostics.recommend(found)


def test_a_complex_gradient_counts_with_both_its_parts():
    objectives = {"square": lambda key, z: jnp.abs(z) ** 2}
    row = diagnostics.compare(objectives, KEY, 1 + 2j, num_estimates=10, truth=np.array(2 - 5j)).rows["square"]
    np.testing.assert_allclose([row.mean, row.bias], [[2, -4], [0, 1]], rtol=1e-6)


X = np.zeros(1)
ROW = diagnostics.Row(X, X, X, 0.0, False, 1.0, 0.0, 1.0, 0.1, 0.0, 0.1, False, 1.0, 1.0, np.ones(10))


def test_recommendations_say_when_nothing_is_better():
    of = lambda *others: recommended(A=ROW, **dict(zip("BCD", others, strict=False)))

    def worse(factor):
        return ROW._replace(variance=factor, squared_error=factor, uncertainty=0.1 * factor, efficiency=1 / factor)

    # 3.29 standard errors of the logarithm, .1 each: a factor of 1.59.
    assert of(worse(1.5)).startswith("Use A or B, the simplest of them: no difference is significant (A is 1.5 times")
    assert of(worse(1.7)).startswith("Use A: it is 1.7 (1.07 to 2.71) times as efficient as B")
    assert of(worse(1.2), worse(1.5), worse(3.0)).startswith("Use A, B or C, the simplest")
    biased = ROW._replace(off=9.0, biased=True, bias=X + 0.5, squared_bias=0.25, variance=0.5)
    text = of(biased._replace(squared_error=0.75, efficiency=1 / 0.75))
    assert text.startswith("Use B or A") and "B is biased by 0.5 (at worst 9 standard errors)" in text
    best = biased._replace(squared_error=0.01, uncertainty=0.001, squared_bias=0.005, variance=0.005)
    text = of(best._replace(efficiency=100.0))
    assert text.startswith("Use B: it is 100 (") and "more than 2e+02 estimates of A" in text  # .005 + .005 = 1 / 199
    heavy = of(ROW._replace(heavy_tailed=True, share=0.96, cosine=0.9))
    assert heavy.startswith("Use A: it is the only one without heavy tails.")
    assert "B has heavy tails: 96% of its variance" in heavy and "median cosine is 0.90: cut what few lanes" in heavy
    unknown = ROW._replace(bias=None, off=np.nan)
    assert "Biases are not known" in recommended(A=unknown, B=unknown)
    exact = ROW._replace(variance=0.0, squared_error=0.0, uncertainty=0.0, efficiency=np.inf)
    assert of(exact).startswith("Use B: it has no error, and A, the next, has one.")
    assert recommended(A=exact, B=exact).startswith("Use A or B")


@pytest.mark.parametrize("busy", [0.0, 0.5, 2.0])
def test_no_clock_makes_a_difference_between_equal_objectives(busy, monkeypatch):
    # Each look at the clock comes later by a time of our own making, however busy the machine that runs the test is:
    # a gradient takes a second, and up to e^busy times as long, now and then ten times.
    rng, now = np.random.default_rng(0), [0.0]

    def clock():
        now[0] += np.exp(busy * rng.exponential()) * (10 if busy and rng.random() < 0.2 else 1)
        return now[0]

    monkeypatch.setattr(diagnostics.time, "perf_counter", clock)

    compiled = lambda objective, argnums, keys, args: lambda keys, *args: np.asarray(objective(keys, *args))

    monkeypatch.setattr(diagnostics, "_compile", compiled)
    normal = lambda deviation: lambda keys, x: deviation * rng.normal(size=len(keys))
    found = lambda **of: diagnostics.compare(of, KEY, 0.0, num_estimates=100, truth=0.0, progress=False)
    for _ in range(10):
        equal = found(a=normal(1.0), b=normal(1.0), c=normal(1.0))
        assert "no difference is significant" in diagnostics.recommend(equal)
    assert diagnostics.recommend(found(a=normal(1.0), b=normal(300.0))).startswith("Use a: it is")


def test_seconds_count_as_much_as_variance():
    times = np.linspace(0.9, 1.1, 10)
    a = ROW._replace(uncertainty=0.01, times=times)
    b = a._replace(seconds=3.0, efficiency=1 / 3, times=3 * times[::-1])
    # 3 * .9 / 1.1 and 1.1 / .9, and 4.7 % of variance
    assert recommended(b=b, a=a).startswith("Use a: it is 3 (2.34 to 3.84) times")
    few = recommended(b=b._replace(times=b.times[:5]), a=a._replace(times=times[:5]))
    assert "no difference is significant" in few


def test_growth_of_a_linear_map_is_its_singular_values(x64):
    matrices = np.random.default_rng(0).normal(size=(6, 4, 4))
    exact = np.linalg.svd(np.linalg.multi_dot(matrices[::-1]), compute_uv=False)

    def step(state, matrix):
        z = matrix @ jnp.concatenate([state["a"], state["b"][0]])
        return {"a": z[:1], "b": (z[1:],)}

    state = {"a": jnp.ones(1), "b": (jnp.ones(3),)}
    for num in (1, 2, 4):
        found = diagnostics.perturbation_growth(step, state, matrices, num=num, rounds=60)
        np.testing.assert_allclose(found.log_singular_values, np.log(exact[:num]), atol=1e-8)
        np.testing.assert_allclose(found.steps.sum(0), found.log_singular_values)
        np.testing.assert_allclose(found.exponents * 6, found.log_singular_values)


def test_growth_neither_overflows_nor_needs_full_rank():
    # As the chaotic network: W has rank one, and u = x_2 - x_1 grows by its own factor.
    W = 1e3 * jnp.array([[-1.0, 1.0], [-5.0, 5.0]])
    found = diagnostics.perturbation_growth(lambda x, _: W @ x, jnp.zeros(2), length=50)
    exact = np.log(np.linalg.norm(W, 2)) + 49 * np.log(4e3)  # W^50 = W 4000^49
    np.testing.assert_allclose(found.log_singular_values[0], exact, rtol=1e-5)
    growth, still, x = diagnostics.perturbation_growth, lambda x, _: x, jnp.zeros(2)
    refused(ValueError, "num from 1", growth, still, x, length=3, num=3)
    refused(ValueError, "at least one step", growth, still, x, length=0)
    refused(ValueError, "state of the form", growth, lambda x, _: x[:1], x, length=3)
    refused(ValueError, "of the form.*got .*int32", growth, lambda x, _: jnp.round(x).astype(int), x, length=3)
    refused(ValueError, "of the form.*got .*bfloat16", growth, lambda x, _: x.astype(jnp.bfloat16), x, length=3)
    refused(ValueError, "without PRNG keys", growth, still, (x, KEY), length=3)
    # A float32 would round these, or qr does not take them.
    for other in (jax.random.key_data(KEY), jnp.int32(2**24), jnp.zeros(1, jnp.bfloat16), jnp.complex64(1)):
        words = rf"without .*state\['n'\] has dtype {other.dtype}.*in xs"
        refused(ValueError, words, growth, still, {"n": other, "x": x}, length=3)
    for steps in ((), (100,)):  # a length in the place of xs
        refused(ValueError, "give length", growth, still, x, *steps)


def test_variances_of_one_node_have_closed_forms():
    theta, s, lanes = 1.5, 0.5, 100_000
    found = diagnostics.node_variances(one_node, lanes, KEY, theta / 10)
    # With x = theta + s z: RP is 2 x; LR is (z / s) (x^2 - E x^2) = 2 theta z^2 + s (z^3 - z). They are gradients of
    # the node's own argument, without the factor 10 of the chain rule.
    np.testing.assert_allclose(found.rp * lanes, [4 * s**2], rtol=0.03)
    np.testing.assert_allclose(found.lr * lanes, [8 * theta**2 + 10 * s**2], rtol=0.05)
    np.testing.assert_allclose(found.tp_rp, found.rp, rtol=1e-5)  # the last node gets the same message
    assert found.tp <= found.lr and str(found).endswith("of each node's own arguments")


def test_variances_along_a_chain_come_in_the_order_of_the_program():
    theta, s, lanes, length = 0.8, 0.1, 20_000, 4

    chain = lambda estimator: walk(estimator, lambda theta, x: dist.Normal(theta * x, s), length)
    found = diagnostics.node_variances(chain, lanes, KEY, theta)
    # Node t's pathwise contribution is theta^(T - t) x_(t-1), and x_0 does not vary.
    t = np.arange(1, length + 1)
    exact = theta ** (2 * (length - t)) * s**2 * (theta ** (2 * (t - 1)) - 1) / (theta**2 - 1)
    np.testing.assert_allclose(found.rp * lanes, exact, rtol=0.05, atol=1e-9)
    assert (found.lr > found.rp).all() and (found.weight < 0.1).all()
    assert (found.tp <= np.minimum(found.tp_rp, found.lr) * 1.01).all()
    assert len(str(found).splitlines()) == 2 + length


def test_variances_come_in_the_order_of_the_program_where_nodes_do_not_depend_on_each_other():
    def build(estimator):
        draw = ap.stochastic(estimator)(lambda theta, n: dist.Normal(theta * n, 1.0))

        def program(tape, theta):
            def pay(tape, n):
                tape, x = draw(tape, theta, jnp.full(tape.lanes, n))
                return tape.cost(x**2 / 2), None

            steps = lambda tape, row: jax.lax.scan(pay, tape, row)
            tape, _ = jax.lax.scan(steps, tape, jnp.arange(1.0, 5.0).reshape(2, 2))
            tape = jax.lax.cond(theta > 0, lambda tape: pay(tape, 5.0)[0], lambda tape: tape, tape)
            tape, _ = jax.checkpoint(lambda tape: pay(tape, 6.0))(tape)
            tape, _ = tape.parallel(lambda tape: pay(tape, 7.0), lambda tape: pay(tape, 8.0))
            return pay(tape, 9.0)[0]

        return program

    found = diagnostics.node_variances(build, 2000, KEY, 1.0, weights=ap.weights.inverse_variance())
    for variances in (found.rp, found.tp_rp):  # of n x, where x has variance 1
        np.testing.assert_allclose(np.sqrt(variances * 2000), np.arange(1, 10), rtol=0.05)


def test_a_program_without_nodes_that_are_weighed_as_a_whole_is_refused():
    normal = lambda tape, theta: dist.Normal(jnp.full(tape.lanes, theta), 1.0)
    by_coordinate = lambda estimator: paid(lambda tape, theta: ap.sample(tape, normal(tape, theta), estimator))
    pathwise = lambda estimator: one_node(ap.reparameterization())
    for words, build in (("use ap.stochastic", by_coordinate), ("no node weighed", pathwise)):
        refused(ValueError, words, diagnostics.node_variances, build, 10, KEY, 1.0)


def test_growth_of_the_logistic_map(x64):
    # x = sin^2(angle) doubles the angle: the derivative of t steps is 2^t sin(2^(t+1) angle) / sin(2 angle).
    angle, t = 0.6, 20
    found = diagnostics.perturbation_growth(lambda x, _: 4 * x * (1 - x), jnp.sin(angle) ** 2, length=t)
    exact = t * np.log(2) + np.log(abs(np.sin(2 ** (t + 1) * angle) / np.sin(2 * angle)))
    np.testing.assert_allclose(found.log_singular_values[0], exact, atol=1e-6)
    found = diagnostics.perturbation_growth(lambda x, _: 4 * x * (1 - x), jnp.float64(0.3), length=20_000, rounds=1)
    np.testing.assert_allclose(found.exponents[0], np.log(2), atol=1e-3)
