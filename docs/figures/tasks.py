"""Draws the figure of each page in docs/tasks from the page's program: `python docs/figures/tasks.py [PAGE ...]`."""

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PAGES = HERE.parent / "tasks"


def hard_attention(ax, names):
    for name, losses in names["losses"].items():
        ax.plot(jnp.convolve(losses, jnp.ones(10) / 10, "valid"), label=name)
    ax.set(xlabel="step", ylabel="squared error", yscale="log")
    ax.legend()


def language_model(ax, names):
    ax.plot(names["rewards"])
    ax.set(xlabel="update", ylabel="reward of a sentence")


def policy(ax, names):
    for name, costs in names["costs"].items():
        ax.plot(costs, label=name)
    ax.set(xlabel="update", ylabel="cost of an episode")
    ax.legend()


def transformer_memory(ax, names):
    ax.barh(list(names["kept"]), [size / 1e6 for size in names["kept"].values()])
    ax.invert_yaxis()
    ax.set(xlabel="MB that are remembered for the backward pass")


def which_component(ax, names):
    table = names["trace"].influence(depth=1).to_dict()
    scopes = ["recurrent", "shortcut"]
    ax.bar(scopes, [table["embed"][scope] for scope in scopes])
    ax.set(ylabel="share of the embedding's elements", ylim=(0, 1))


def without_backpropagation(ax, names):
    ways = names["accuracy"]
    ax.barh(list(ways), [100 * float(found) for found in ways.values()])
    ax.invert_yaxis()
    ax.set(xlabel="accuracy on test images, %", xlim=(50, 100))


def learn_a_schedule(ax, names):
    steps = jnp.linspace(0, names["STEPS"], len(names["learned"]))
    ax.plot(steps, jnp.exp(names["theta"]), label="before")
    ax.plot(steps, jnp.exp(names["learned"]), label="learned")
    ax.set(xlabel="inner step", ylabel="step size", yscale="log")
    ax.legend()


def own_estimator(ax, names):
    found, exact = names["found"], names["exact"]
    truth = names["jax"].grad(exact)(names["logits"])
    ax.bar(jnp.arange(3), truth, color="lightgray", label="exact")
    ax.errorbar(jnp.arange(3), found.mean, 2 * found.standard_error, fmt="o", label="500 estimates, 2 standard errors")
    ax.set(xlabel="logit", ylabel="derivative", xticks=range(3))
    ax.legend()


def vae(ax, names):
    ax.plot(names["bounds"])
    ax.set(xlabel="update", ylabel="nats an image")


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        if sys.argv[1:] and page.stem not in sys.argv[1:]:
            continue
        names = {"__name__": page.stem}
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            exec(block, names)
        figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
        globals()[page.stem](ax, names)
        (HERE / "tasks").mkdir(exist_ok=True)
        figure.savefig(HERE / "tasks" / f"{page.stem}.png", dpi=110)
