"""A tiny run of each experiment: it ends, has the rows it promises, and intervals that hold their values.

What an experiment's figures must satisfy beside that is tested with its mathematics, in the other files.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from experiments import (
    chaos,
    contact,
    gaussian_shaping,
    gradient_errors,
    mplp_ablation,
    mplp_architectures,
    mplp_batch_entropy,
    mplp_dynamics,
    mplp_maml,
    mplp_settings,
    mplp_sgd,
    mplp_sinusoid,
    outer_training,
    policy_search,
    policy_search_cartpole,
    policy_search_clipped,
    policy_search_contacts,
    rad_training,
    second_derivatives,
    total_propagation,
)
from experiments.benchmarks import estimators, randomized
from experiments.parts import chaotic_network, meta_curves


class Run(NamedTuple):
    experiment: ModuleType
    options: str
    rows: int
    figures: tuple[str, ...] = ()  # some that results.json has beside its rows
    smaller: Mapping[str, Any] = MappingProxyType({})  # names of the module that are replaced
    trained: bool = True  # if not, rules are judged without a step of training, which other tests take
    holds: Callable[[Any], Any] = lambda results: True  # of results.json


def only(experiment, *names):
    return {"METHODS": {name: experiment.METHODS[name] for name in names}}


def cells(*some):
    return {"cells": lambda config: list(some)}


def no_corrections_before_training(results):
    found = {(row["rule"], row["training"]): row["ahead"] == 0 for row in results["rows"]}
    return list(found.items()) == [
        (("whole", "before"), True),
        (("whole", "after"), True),
        (("gradient alone", "before"), True),
        (("gradient alone", "after"), False),
    ]


def reparameterization_is_the_better_one_so_early(results):
    exact = chaotic_network.exact(1.5, [4])[4].gradient
    found = results["bias_decoupled-CF_H4_B10"]["exact"]
    return {row["better"] for row in results["rows"]} == {"RP"} and found == pytest.approx(exact, abs=1e-8)


def second_derivatives_are_exact(results):
    worst = max(abs(row["off"]) for row in results["rows"])
    return results["worst_distance_in_standard_errors"] == worst < 5


def plain_is_the_baseline_of_the_chain(results):
    ratios = {row["method"]: row["ratio"] for row in results["rows"] if row["benchmark"] == "chain"}
    measured = results["ratio_H2, called: TP"]["value"] > 0 and results["policy of 41, adaptive"]["bytes"] > 0
    known = "added_bytes_per_node" in results["node_in_chain_of_100, LR"]
    return measured and known and ratios["plain"] == 1 and set(ratios) == {"plain", "RP", "LR", "TP"}


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
    return row["entropy"] > 0 and row["penalty"] >= 0 and results["random start, batch entropy"]["of"] == 1


def the_median_is_no_more_than_the_largest(results):
    return results["explosion"]["RP"]["median"] <= results["explosion"]["RP"]["largest"]


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
    more = costs["TP, lanes clipped"] - costs["RP, lanes clipped"]
    return results["last step"]["total_propagation"]["after_6"]["more"] == pytest.approx(more, abs=1e-6)


def gradients_stand_beside_the_exact_one(results):
    exact = {beta: chaotic_network.exact(beta, [4])[4].gradient for beta in (1.5, 2.5)}
    return all(row["exact"] == exact[row["beta"]] and row["nonfinite"] == 0 for row in results["rows"])


SMALL = "--horizons 4 --betas 1.5 2.5 --estimates 8 --lanes 50 --resamples 50"
META = "--steps 2 --points 1 --length 4 --segment 2 --hidden 3"
POLICY = "--horizon 3 --lanes 4 --rates 0.001 0.01 --resamples 20"
ERRORS = only(gradient_errors, "RP", "LR", "clipped at 4")
CONTACT = {"METHODS": ("RP", "LR", "mean test"), "POINTS": {"ball": (0.3, 0.5), "pendulum": (0.2, 0.4)}}
RUNS = (
    Run(
        chaos,
        SMALL,
        rows=2 * 4,
        figures=("variance_ratio_decoupled-CF_H4_beta2.5",),
        holds=gradients_stand_beside_the_exact_one,
    ),
    Run(gaussian_shaping, SMALL, rows=2 * 6),
    Run(
        total_propagation,
        "--horizons 4 --betas 2.5 --estimates 8 --lanes 50 --resamples 50 --bias-points 4 10 20 --parameters 5",
        rows=9,
        figures=("worst_ratio_decoupled-CF_P5", "bias_decoupled-CF_H4_B10"),
        holds=reparameterization_is_the_better_one_so_early,
    ),
    Run(
        second_derivatives,
        "--estimates 20 --families bernoulli --graphs 'one node'",
        rows=4,
        holds=second_derivatives_are_exact,
    ),
    Run(
        estimators,
        "--horizons 2 --rounds 3 --nodes 100 --chain-rounds 3 --policy-rounds 3",
        rows=23,
        figures=("ratio_H2, called: TP", "policy of 41, adaptive", "node_in_chain_of_100, LR"),
        smaller={"ROLLOUT_METHODS": ("RP", "TP", "decoupled-CF"), "POLICIES": {41: ((3, 8, 1), 2)}},
        holds=plain_is_the_baseline_of_the_chain,
    ),
    Run(
        mplp_settings,
        "--settings 1 --horizons 2 --draws 2 --tuning 1 --runs 2",
        rows=4,
        figures=("image_mlp, 2 steps", "images, surrogate, 2 steps"),  # setting 0 has step functions
        holds=trained_rules_warn_outside_of_their_cards,
    ),
    Run(mplp_ablation, "--steps 2 --horizons 2 --runs 2", rows=4, holds=no_corrections_before_training),
    Run(mplp_architectures, "--horizons 2 --draws 2 --runs 2 --batch 4", rows=7),
    Run(
        outer_training,
        "--rule 'reverse mode' --balanced 'PES, K = 10' --points 2 --pace 0.1 --length 10 --tasks 2 --judged 2 "
        "--chains 4",
        rows=len(outer_training.STARTS) + 1,
        holds=each_start_has_a_finite_loss,
    ),
    Run(
        mplp_dynamics,
        f"{META} --tasks 1 --judged 2",
        rows=1,
        figures=("k = 8, none, learned rate", "Adam"),
        smaller=cells({"optimizer": "Adam"}, {"k": 8, "norm": False, "rate": True, "seed": 0}),
        trained=False,
    ),
    Run(
        mplp_batch_entropy,
        f"{META} --judged 2 --batch 4 --message-size 2",
        rows=1,
        figures=("random start, batch entropy", "Adam"),
        smaller=cells({"optimizer": "Adam"}, {"arm": "random start, batch entropy", "seed": 0}),
        trained=False,
        holds=penalties_are_of_entropies,
    ),
    Run(
        mplp_sinusoid,
        "--runs 2 --sizes 1 --steps 2 --points 1 --hidden 1",
        rows=2,
        figures=("k = 1, shared: all",),
        smaller=cells({"k": 1, "share": "all", "seed": 0}),
        trained=False,
    ),
    Run(mplp_maml, "--steps 2 --tasks 1 --runs 2", rows=6, smaller=cells({"method": "MAML"})),
    Run(mplp_sgd, f"{META} --tasks 1 --judged 2 --visited 2", rows=3, figures=("SGD", "MPLP"), trained=False),
    Run(
        rad_training,
        "--data digits --methods baseline 'rounding 4' --steps 40 --evaluations 1 --seeds 1 --pairs 0",
        rows=2,
        holds=digits_are_learned,
    ),
    Run(randomized, "--layers 2 --width 64 --batch 32 --side 2 --rounds 1", rows=17),
    Run(contact, "--lanes 10 --estimates 8 --reference 20000", rows=2 * 3 * 2, smaller=CONTACT),
    Run(
        policy_search,
        f"{POLICY} --policies 4 --iterations 5 --evaluations 5 --seeds 2",
        rows=2,
        smaller=only(policy_search, "RP", "TP adaptive"),
    ),
    Run(
        policy_search_clipped,
        f"{POLICY} --tasks 'last step' --units 4 --steps 5 --long 6 --seeds 2",
        rows=4,
        smaller=only(policy_search_clipped, "RP", "RP, lanes clipped", "multilevel", "TP, lanes clipped")
        | {"EVERY": 1},
        holds=total_propagation_is_compared_with_the_same_without,
    ),
    Run(
        policy_search_contacts,
        f"--methods RP {policy_search_contacts.SHAC} multilevel --units 4 --horizon 10 --lanes 4 --steps 5 "
        "--rates 0.001 0.01 --estimates 3 --resamples 20",
        rows=3,
        figures=("explosion",),
        smaller={"EVERY": 1},
        holds=the_median_is_no_more_than_the_largest,
    ),
    Run(
        policy_search_cartpole,
        "--episodes 2 --iterations 3 --particles 4 --repetitions 2 --resamples 20",
        rows=1,
        smaller={"METHODS": ("RP",), "HORIZON": 4},
    ),
    Run(
        gradient_errors,
        "--policies 1 --stages 0 1 --units 4 --horizon 3 --lanes 4 --estimates 5 --reference 6",
        rows=6,
        figures=("after 1",),
        smaller=ERRORS | {"BASELINES": ("RP", "LR"), "UNBIASED": ("RP", "LR"), "TP": ()},
        holds=errors_are_of_the_better_unclipped_estimator,
    ),
)


def untrained(outer, optimizer, theta, seed, steps, points, judge, checkpoint):
    return meta_curves.Judged(theta, np.stack([judge(theta)] * (points + 1)), np.ones(points), 0)


@pytest.mark.long
@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.experiment.__name__.split(".")[-1])
def test_a_tiny_run_of_each_experiment(case, run, monkeypatch):
    for name, value in case.smaller.items():
        monkeypatch.setattr(case.experiment, name, value)
    if not case.trained:
        monkeypatch.setattr(meta_curves, "judged_training", untrained)
    results = run(case.experiment, case.options)
    assert len(results["rows"]) == case.rows
    assert set(case.figures) <= set(results) and case.holds(results)
    for row in results["rows"]:
        assert row.get("nonfinite", 0) == 0 and 0 <= row.get("accuracy", 0) <= 100
        if "better" in row and row["better"] == row["method"]:
            assert row["ratio"] == 1
        for name, value in row.items():
            if f"{name}_low" in row and value is not None:
                assert row[f"{name}_low"] <= value <= row[f"{name}_high"], (name, row)


@pytest.mark.long
def test_an_experiment_that_is_begun_again_with_some_of_its_cells_comes_out_the_same(run, tmp_path):
    results = run(chaos, SMALL)
    for cell in ("method=exact,beta=1.5", "method=TP,H=4,beta=2.5"):
        (tmp_path / "run" / "cells" / f"{cell}.json").unlink()
    chaotic_network._compiled.cache_clear()
    assert run(chaos, SMALL) == results
