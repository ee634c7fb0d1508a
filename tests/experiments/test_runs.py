"""A tiny run of each experiment: it ends, has the rows it promises, and intervals that hold their values.

What an experiment's figures must satisfy beside that is tested with its mathematics, in the other files.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from experiments import outer_training, policy_search_clipped, policy_search_contacts
from experiments.parts import chaotic_network, meta_curves


class Run(NamedTuple):
    experiment: str
    options: str
    rows: int
    holds: Callable[[Any], Any] = lambda results: True  # of results.json
    smaller: Mapping[str, Any] = MappingProxyType({})  # names of the module that are replaced
    trained: bool = True  # if not, rules are judged without a step of training, which other tests take


def module(name):
    return importlib.import_module(f"experiments.{name}")


def only(experiment, *names):
    return {"METHODS": {name: module(experiment).METHODS[name] for name in names}}


def cells(*some):
    return {"cells": lambda config: list(some)}


def has(*figures):
    return lambda results: set(figures) <= set(results)


def no_corrections_before_training(results):
    found = {(row["rule"], row["training"]): row["ahead"] == 0 for row in results["rows"]}
    each = [(rule, training) for rule in ("whole", "gradient alone") for training in ("before", "after")]
    return list(found.items()) == list(zip(each, (True, True, True, False), strict=True))


def reparameterization_is_the_better_one_so_early(results):
    exact = chaotic_network.exact(1.5, [4])[4].gradient
    found = results["bias_decoupled-CF_H4_B10"]["exact"] == pytest.approx(exact, abs=1e-8)
    return found and {row["better"] for row in results["rows"]} == {"RP"} and "worst_ratio_decoupled-CF_P5" in results


def second_derivatives_are_exact(results):
    return results["worst_distance_in_standard_errors"] == max(abs(row["off"]) for row in results["rows"]) < 5


def plain_is_the_baseline_of_the_chain(results):
    ratios = {row["method"]: row["ratio"] for row in results["rows"] if row["benchmark"] == "chain"}
    measured = results["ratio_H2, called: TP"]["value"] > 0 and results["policy of 41, adaptive"]["bytes"] > 0
    known = "added_bytes_per_node" in results["node_in_chain_of_100, LR"]
    return measured and known and ratios["plain"] == 1 and set(ratios) == {"plain", "RP", "LR", "TP"}


def rules_are_timed_beside_sgd(results):
    timed = all(row["cpu_ms"] > 0 and row["fraction_of_matmul"] > 0 for row in results["rows"])
    return timed and {row["rule"] for row in results["rows"]} == {"SGD", "exact", "separable", "separable, whitening"}


def trained_rules_warn_outside_of_their_cards(results):
    counts = {results[name]["settings"] for name in ("image_mlp, 2 steps", "images, surrogate, 2 steps")}
    warned = all(row["warned"] != (row["rule"] == "untrained") and row["finite"] for row in results["rows"])
    return counts == {1} and warned


def each_start_has_a_finite_loss(results):
    starts = [row["start"] for row in results["rows"]]
    finite = all(np.isfinite(row["loss"]) and row["seconds_a_step"] > 0 for row in results["rows"])
    return finite and starts == [*outer_training.STARTS, outer_training.BALANCE]


def penalties_are_of_entropies(results):
    (row,) = results["rows"]
    trained = results["random start, batch entropy"]["of"] == 1 and "Adam" in results
    return trained and row["entropy"] > 0 and row["penalty"] >= 0


def errors_are_of_the_better_unclipped_estimator(results):
    rows = {row["method"]: row for row in results["rows"] if row["stage"] == 1}
    cut, better = rows["clipped at 4"], min(rows[name]["variance"] for name in ("RP", "LR"))
    worst = results["after 1"]["clipped at 4"]["worst"] == cut["ratio"] and rows["RP"]["squared_bias"] == 0
    return worst and cut["ratio"] == pytest.approx((cut["variance"] + cut["squared_bias"]) / better)


def digits_are_learned(results):
    return all(row["test_accuracy"] > 0.5 for row in results["rows"])


def total_propagation_is_compared_with_the_same_without(results):
    costs = {row["method"]: row["cost_long"] for row in results["rows"]}
    plain = next(row for row in results["rows"] if row["method"] == "RP")
    assert all(plain[f"{which}_in_time"] == plain[which] for which in ("cost", "cost_long"))
    more = {cut: costs[f"TP, {cut} clipped"] - costs[f"RP, {cut} clipped"] for cut in ("lanes", "growth")}
    found = {cut: results["last step"]["total_propagation"][f"{cut}_after_6"]["more"] for cut in more}
    return found == pytest.approx(more, abs=1e-6)


def gradients_stand_beside_the_exact_one(results):
    exact = {beta: chaotic_network.exact(beta, [4])[4].gradient for beta in (1.5, 2.5)}
    rows = all(row["exact"] == exact[row["beta"]] and row["nonfinite"] == 0 for row in results["rows"])
    return rows and "variance_ratio_decoupled-CF_H4_beta2.5" in results


SMALL = "--horizons 4 --betas 1.5 2.5 --estimates 8 --lanes 50"
TOTAL = "--horizons 4 --betas 2.5 --estimates 8 --lanes 50 --bias-points 4 10 20 --parameters 5"
SECOND = "--estimates 20 --families bernoulli --graphs 'one node'"
TIMED = "--horizons 2 --rounds 3 --nodes 100 --chain-rounds 3 --policy-rounds 3"
SETTINGS = "--settings 1 --horizons 2 --draws 2 --tuning 1 --runs 2"  # setting 0 has step functions
OUTER = "--rule 'reverse mode' --balanced 'PES, K = 10' --points 2 --pace 0.1 --length 10 --chains 4 "
OUTER += "--tasks 2 --judged 2"
META = "--steps 2 --points 1 --length 4 --segment 2 --hidden 3"
DYNAMICS = f"{META} --tasks 1 --judged 2"
ENTROPIES = f"{META} --judged 2 --batch 4 --message-size 2"
SINUSOID = "--runs 2 --sizes 1 --steps 2 --points 1 --hidden 1"
DIGITS = "--data digits --methods baseline 'rounding 4' --steps 40 --evaluations 1 --seeds 1 --pairs 0"
POLICY = "--lanes 4 --rates 0.001 0.01"
SEARCH = f"{POLICY} --horizon 3 --units 4 --iterations 5 --evaluations 5 --seeds 2"
CLIPPED = f"{POLICY} --horizon 3 --tasks 'last step' --units 4 --steps 5 --long 6 --seeds 2 --warm_up 2"
CONTACTS = f"{POLICY} --horizon 10 --units 4 --steps 5 --estimates 3 "
CONTACTS += f"--methods RP {policy_search_contacts.SHAC} multilevel --warm_up 2"
CARTPOLE = "--episodes 2 --iterations 3 --particles 4 --repetitions 2"
ERRORS = "--policies 1 --stages 0 1 --units 4 --horizon 3 --lanes 4 --estimates 5 --reference 6"

FEW_TIMED = {"ROLLOUT_METHODS": ("RP", "TP", "decoupled-CF"), "POLICIES": {41: ((3, 8, 1), 2)}}
FEW_DYNAMICS = cells({"optimizer": "Adam"}, {"k": 8, "norm": False, "rate": True, "seed": 0})
FEW_ENTROPIES = cells({"optimizer": "Adam"}, {"arm": "random start, batch entropy", "seed": 0})
FEW_SINUSOIDS = cells({"k": 1, "share": "all", "seed": 0})
FEW_CONTACTS = {"METHODS": ("RP", "LR", "mean test"), "POINTS": {"ball": (0.3, 0.5), "pendulum": (0.2, 0.4)}}
CLIPPED_METHODS = [name for name in policy_search_clipped.METHODS if name != "RP, short"]
FEW_CLIPPED = only("policy_search_clipped", *CLIPPED_METHODS) | {"EVERY": 1}
FEW_ERRORS = only("gradient_errors", "RP", "LR", "clipped at 4")
FEW_ERRORS |= {"BASELINES": ("RP", "LR"), "UNBIASED": ("RP", "LR"), "TP": ()}

RUNS = (
    Run("chaos", SMALL, 2 * 4, gradients_stand_beside_the_exact_one),
    Run("gaussian_shaping", SMALL, 2 * 6),
    Run("total_propagation", TOTAL, 9, reparameterization_is_the_better_one_so_early),
    Run("second_derivatives", SECOND, 4, second_derivatives_are_exact),
    Run("benchmarks.estimators", TIMED, 23, plain_is_the_baseline_of_the_chain, FEW_TIMED),
    Run("benchmarks.mplp", "--rounds 2", 4, rules_are_timed_beside_sgd, cells({"benchmark": "width", "size": 8})),
    Run("mplp_settings", SETTINGS, 4, trained_rules_warn_outside_of_their_cards),
    Run("mplp_ablation", "--steps 2 --horizons 2 --runs 2", 4, no_corrections_before_training),
    Run("mplp_architectures", "--horizons 2 --draws 2 --runs 2 --batch 4", 7),
    Run("outer_training", OUTER, len(outer_training.STARTS) + 1, each_start_has_a_finite_loss),
    Run("mplp_dynamics", DYNAMICS, 1, has("k = 8, none, learned rate", "Adam"), FEW_DYNAMICS, trained=False),
    Run("mplp_batch_entropy", ENTROPIES, 1, penalties_are_of_entropies, FEW_ENTROPIES, trained=False),
    Run("mplp_sinusoid", SINUSOID, 2, has("k = 1, shared: all"), FEW_SINUSOIDS, trained=False),
    Run("mplp_maml", "--steps 2 --tasks 1 --runs 2", 6, smaller=cells({"method": "MAML"})),
    Run("mplp_sgd", f"{META} --tasks 1 --judged 2 --visited 2", 3, has("SGD", "MPLP"), trained=False),
    Run("rad_training", DIGITS, 2, digits_are_learned),
    Run("benchmarks.randomized", "--layers 2 --width 64 --batch 32 --side 2 --rounds 1", 17),
    Run("contact", "--lanes 10 --estimates 8 --reference 20000", 2 * 3 * 2, smaller=FEW_CONTACTS),
    Run("policy_search", SEARCH, 2, smaller=only("policy_search", "RP", "TP adaptive")),
    Run("policy_search_clipped", CLIPPED, 7, total_propagation_is_compared_with_the_same_without, FEW_CLIPPED),
    Run("policy_search_contacts", CONTACTS, 3, has("explosion"), {"EVERY": 1}),
    Run("policy_search_cartpole", CARTPOLE, 1, smaller={"METHODS": ("RP",), "HORIZON": 4}),
    Run("gradient_errors", ERRORS, 6, errors_are_of_the_better_unclipped_estimator, FEW_ERRORS),
)


def untrained(outer, optimizer, theta, seed, steps, points, judge, checkpoint):
    return meta_curves.Judged(theta, np.stack([judge(theta)] * (points + 1)), np.ones(points), 0)


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.experiment.split(".")[-1])
def test_a_tiny_run_of_each_experiment(case, run, monkeypatch):
    experiment = module(case.experiment)
    for name, value in case.smaller.items():
        monkeypatch.setattr(experiment, name, value)
    if not case.trained:
        monkeypatch.setattr(meta_curves, "judged_training", untrained)
    results = run(experiment, case.options)
    assert len(results["rows"]) == case.rows
    assert case.holds(results)
    for row in results["rows"]:
        assert row.get("nonfinite", 0) == 0 and 0 <= row.get("accuracy", 0) <= 100
        if "better" in row and row["better"] == row["method"]:
            assert row["ratio"] == 1
        for name, value in row.items():
            if f"{name}_low" in row and value is not None:
                assert row[f"{name}_low"] <= value <= row[f"{name}_high"], (name, row)
