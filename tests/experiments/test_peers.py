"""The benchmark of peers: exact values, verdicts and the table; the benchmark itself measures the peers."""

import jax
import jax.numpy as jnp
import numpy as np

import apgrad as ap
from experiments.benchmarks import peers


def test_the_exact_values_are_those_of_many_samples():
    for problem in ("data", "chain"):
        theta = peers.THETA[problem]
        gradient = peers.surrogate(problem, 64)
        truth = jax.grad(peers.exact(problem))(theta)
        ap.testing.assert_unbiased(lambda key, g=gradient, t=theta: g(key, t), truth, jax.random.key(0), 500)


def test_apgrad_is_right_in_a_scan():
    theta = peers.THETA["chain"]
    found = ap.testing.moments(lambda key: peers.program("chain in scan", 16)(key, theta), jax.random.key(0), 500)
    assert peers.verdict(found, np.asarray(jax.grad(peers.exact("chain"))(theta))) == "right"
    assert peers.verdict(found, np.asarray(theta)).startswith("wrong")


def test_the_table_has_a_row_for_each_method():
    right = {"variance": 2.0, "seconds": 1.0, "order 1": "right", "order 2": "wrong, 9 s.e."}
    result = dict.fromkeys(peers.METHODS, right) | {"GenJAX": {"order 1": "not run", "order 2": "not run"}}
    made = peers.report(peers.Config(), [({"problem": "data"}, result)])
    assert [row["method"] for row in made.rows] == list(peers.METHODS)
    assert made.rows[0]["variance_over_surrogate"] == 1 and made.rows[2]["variance"] is None
    assert jnp.isfinite(made.rows[1]["seconds_over_surrogate"])
