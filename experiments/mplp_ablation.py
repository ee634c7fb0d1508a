"""What each part of the normalized rule is worth: rules without it, meta-trained alike.

    python -m experiments.mplp_ablation                                    # digits and 20 outer steps, two minutes
    APGRAD_DATA=... python -m experiments.mplp_ablation --preset paper     # 400 outer steps, some hours of one core

No paper has this study. Each rule lacks one part from the start: "gradient alone" has no messages but the gradient's,
and so no corrections; "one number" has messages of one number; "no whitening" multiplies by the inputs as they are; "no
averages" forgets the last update. All are trained for the same outer steps, with the same keys, on those members of the
family of `experiments.meta_train` that make 20 updates, and judged on settings of `experiments.mplp_settings`, in
networks that have a derivative, before and after training. The rule that comes with apgrad was trained for ten times as
long.

Given is how many points of test accuracy a rule lies ahead of the whole one in the mean over settings and runs, with an
interval of 95 % over settings by Student's t.
"""

import itertools
from typing import Any

import numpy as np
import optax
from flax import nnx

from apgrad import meta, mplp
from experiments import harness, meta_train, mplp_settings
from experiments.parts import meta_curves

PARTIAL = True
WHOLE = "whole"
RULES: dict[str, dict[str, Any]] = {WHOLE: {}, "gradient alone": {"message_size": 0}, "one number": {"message_size": 1}}
RULES |= {"no whitening": {"whiten": False}, "no averages": {}}


class Config(harness.Config, least={"runs": 2, "settings": 2}, among={"rules": RULES}):
    """Options of this experiment."""

    rules: tuple[str, ...] = (WHOLE, "gradient alone")  # of RULES.
    data: tuple[str, ...] = ("digits",)  # names of the images of the family's members.
    steps: int = 20  # outer steps.
    # names and sides of the images that settings are drawn of.
    images: tuple[tuple[str, int | None], ...] = (("digits", None),)
    settings: int = 2  # how many.
    horizons: tuple[int, ...] = (20,)  # updates.
    runs: int = 4  # networks and tasks of each setting.


IMAGES = mplp_settings.IMAGES[:2]
PAPER = Config(
    rules=tuple(RULES), data=("digits", "mnist"), steps=400, images=IMAGES, settings=8, horizons=(20, 100), runs=20
)


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(rule=config.rules)


def made(name: str, sites: Any) -> mplp.Normalized:
    """A rule without a part, before training."""
    rule = mplp.Normalized(sites, rngs=nnx.Rngs(0), **RULES[name])
    if name == "no averages":  # beta is the sigmoid of -20
        for place in rule.places.values():
            controller = place.controller
            if controller is not None and "beta" in controller.controls:
                controller.base[...] = controller.base[...].at[controller.controls.index("beta")].set(-20.0)
    return rule


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """By setting and updates the accuracies of the runs, before and after training."""
    family = meta_train.members("images", config.data)
    outer = meta_train.family_gradient([member for member in family if member[1] == 20])
    sites = meta_train.places(family)  # of deeper networks, too
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(meta_train.schedule(config.steps, 2e-3)))
    saved, begun = harness.checkpoint(config, cell), made(cell["rule"], sites)
    trained, _, skipped = meta_curves.train(outer, optimizer, begun, config.seed, config.steps, 1, saved)
    drawn = mplp_settings.Config(images=config.images, runs=config.runs)
    numbers = (i for i in itertools.count() if mplp_settings.draw_setting(i, config.images).activation != "step")
    found = {}
    for number in itertools.islice(numbers, config.settings):
        task, _, _, judged = mplp_settings.prepared(drawn, number)
        run = mplp_settings.learn(task, meta.message_passing(task.network))
        for when, rule in (("before", begun), ("after", trained)):
            rules = mplp_settings.repeated(rule, config.runs)
            found[f"{number} {when}"] = {str(steps): run(rules, judged, steps).tolist() for steps in config.horizons}
    return {"accuracy": found, "skipped": skipped}


def means(accuracy: dict[str, Any], when: str, steps: int) -> np.ndarray:
    """The mean accuracy in each setting."""
    found = (runs[str(steps)] for name, runs in accuracy.items() if name.endswith(when))
    return np.array([mplp_settings.learned(runs).mean() for runs in found])


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    given = {cell["rule"]: result["accuracy"] for cell, result in records}
    rows, figures = [], {}
    figure, axes = harness.panels(1, len(config.horizons), (4.6 * len(config.horizons), 3.6))
    for ax, steps in zip(axes.flat, config.horizons, strict=True):
        for at, (rule, when) in enumerate(itertools.product(given, ("before", "after"))):
            mine, whole = (means(given[name], when, steps) for name in (rule, WHOLE))
            ahead = mine - whole
            row = {"rule": rule, "training": when, "updates": steps, "accuracy": mine.mean()}
            row |= {"ahead": ahead.mean(), "interval": mplp_settings.half_interval(ahead), "settings": len(ahead)}
            rows.append(row)
            figures[f"{rule}, {when}, {steps} updates"] = {k: row[k] for k in ("accuracy", "ahead", "interval")}
            ax.errorbar(row["ahead"], at, xerr=row["interval"], fmt="o", color=f"C{int(when == 'after')}")
        labels = [f"{rule}, {when} training" for rule, when in itertools.product(given, ("before", "after"))]
        ax.set_yticks(range(len(labels)), labels)
        ax.set(xlabel="points ahead of the whole rule", title=f"{steps} updates")
        ax.axvline(0, color="black", lw=0.8)
    table = harness.table(rows, "rule", "training", "updates", "accuracy", "ahead")
    return harness.Report(figures, rows, table, figure)


if __name__ == "__main__":
    harness.main()
