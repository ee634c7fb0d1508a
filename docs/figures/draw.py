"""Draws the figures of the pages: `python docs/figures/draw.py`. Numbers come from experiments/results alone."""

import itertools
import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "experiments" / "results"
BLUE, ORANGE, GREEN, GRAY = "#1f6fb4", "#d95f02", "#1b7f3b", "#6b7280"
# The same bytes from the same numbers, and text that stays text.
mpl.rcParams.update({"svg.hashsalt": "apgrad", "svg.fonttype": "none", "font.size": 11})


def results(run):
    """The results of a run."""
    return json.loads((RESULTS / run / "results.json").read_text())


def front():
    """What three of the wings give, as the README shows it."""
    figure = Figure((12.5, 3.9), layout="constrained")
    chaos, rules, memory = figure.subplots(1, 3)

    learnt = results("policy_search_clipped-warm_up")
    for method, label, colour in (
        ("RP", "plain gradients", ORANGE),
        ("RP, short", "over short horizons", GRAY),
        ("RP, lanes clipped", "exploding lanes clipped", BLUE),
    ):
        low, median, high = np.array(learnt["every step"]["quartiles"][method])
        steps = learnt["config"]["long"] * np.arange(1, 1 + len(median)) / len(median)
        chaos.plot(steps, median, color=colour, label=label, lw=2.5 if "clipped" in method else 1.8)
        chaos.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
    chaos.set(xlabel="updates, on 100 trajectories each", ylabel="cost, quartiles", xlim=(0, 720), ylim=(0.2, 1.3))
    chaos.set_title("A policy learns through chaos", fontweight="bold", fontsize=11)
    chaos.legend(frameon=False, fontsize=9, loc="upper right")

    rows = [r for r in results("mplp_mnist-paper")["rows"] if r["setting"] == "784-100-10"]
    for method, label, colour in (
        ("MPLP", "a trained rule", BLUE),
        ("Adam", "tuned Adam", ORANGE),
        ("SGD", "tuned SGD", GRAY),
    ):
        points = [(r["step"], r["mean"], r["standard_error"]) for r in rows if r["method"] == method]
        x, y, error = zip(*points, strict=True)
        rules.errorbar(x, y, error, color=colour, label=label, lw=2.5 if method == "MPLP" else 1.8)
    rules.set(xlabel="updates, on 8 images each", ylabel="MNIST test accuracy, %", ylim=(0, 90))
    rules.set_title("A learned rule, given the gradient too", fontweight="bold", fontsize=11)
    rules.legend(frameon=False, fontsize=9, loc="upper left")

    found = {r["method"]: r for r in results("benchmarks.randomized-paper")["rows"] if r["network"] == "layers"}
    bars = [
        ("reverse mode", found["same"]["temp_MB_reverse_mode"], GRAY),
        ("checkpointing in blocks", found["checkpoint blocks"]["temp_MB"], GRAY),
        ("4-bit memory", found["rounding 4"]["temp_MB"], BLUE),
        ("a tenth, sampled", found["same"]["temp_MB"], BLUE),
    ]
    for i, (label, megabytes, colour) in enumerate(bars):
        memory.barh(-i, megabytes, color=colour, height=0.62)
        memory.text(megabytes + 1.5, -i, f"{label}, {megabytes:.0f} MB", va="center", fontsize=10)
    memory.set(yticks=[], xlabel="scratch memory of a gradient, MB", xlim=(0, 145))
    memory.set_title("A reverse pass that remembers less", fontweight="bold", fontsize=11)

    for axes in (chaos, rules, memory):
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(HERE / "front.png"), metadata={"Software": None})


class Board:
    """A drawing of boxes and arrows in units of its grid."""

    def __init__(self, width, height):
        self.figure = Figure((width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")

    def box(self, x, y, text, colour=GRAY, width=1.7, height=0.62):
        """A box with text, centred on a point."""
        style, corner = "round,pad=0.02,rounding_size=0.1", (x - width / 2, y - height / 2)
        shape = FancyBboxPatch(corner, width, height, boxstyle=style, fc="white", ec=colour, lw=1.6)
        self.axes.add_patch(shape)
        self.axes.text(x, y, text, ha="center", va="center", fontsize=10)

    def arrow(self, start, end, colour=GRAY, text="", above=0.16, style="-", bend=0.0, size=9):
        """An arrow between two points, with text at its middle."""
        arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=colour, lw=1.6, ls=style,
                                connectionstyle=f"arc3,rad={bend}")  # fmt: skip
        self.axes.add_patch(arrow)
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        self.axes.text(x, y + above, text, ha="center", va="center", fontsize=size, color=colour)

    def text(self, x, y, text, colour=GRAY, size=10, **options):
        """Text, centred on a point if not said otherwise."""
        self.axes.text(x, y, text, color=colour, fontsize=size, **{"ha": "center", "va": "center"} | options)

    def save(self, name):
        """Writes the drawing as SVG."""
        FigureCanvasSVG(self.figure).print_svg(str(HERE / name), metadata={"Date": None})


def message():
    """The life of a message: through a node, and through a port."""
    board = Board(9.4, 3.7)
    board.text(0.25, 3.4, "forward", BLUE, ha="left")
    board.text(0.25, 0.35, "backward", ORANGE, ha="left")
    for x, text in ((1.6, "f"), (4.7, "node"), (7.8, "loss")):
        board.box(x, 2.0, text, BLUE if text == "node" else GRAY, height=1.15 if text == "node" else 0.7)
    board.arrow((2.5, 2.25), (3.8, 2.25), BLUE, "value")
    board.arrow((5.6, 2.25), (6.9, 2.25), BLUE, "output")
    board.arrow((6.9, 1.75), (5.6, 1.75), ORANGE, "message", -0.2)
    board.arrow((3.8, 1.75), (2.5, 1.75), ORANGE, "message", -0.2)
    board.box(4.7, 3.25, "memory", GREEN, width=1.3, height=0.5)
    board.arrow((4.4, 2.62), (4.4, 2.97), GREEN)
    board.arrow((5.0, 2.97), (5.0, 2.62), GREEN)
    board.text(3.45, 3.25, "forward keeps", GREEN, 9)
    board.text(6.05, 3.25, "backward reads", GREEN, 9)
    board.text(
        4.7, 0.78, "zeros go forward through a port, beside the value; what comes back as their cotangent", GRAY, 9
    )
    board.text(4.7, 0.5, "is a message that need not be a gradient", GRAY, 9)
    board.save("message.svg")


def cost():
    """The life of a cost: from the tape to the random choices that came before it."""
    board = Board(9.4, 4.0)
    xs = (1.3, 3.6, 5.9, 8.2)
    for x, text in zip(xs, ("choice 1", "choice 2", "cost c", "choice 3"), strict=True):
        board.box(x, 2.55, text, ORANGE if "cost" in text else BLUE)
    for a, b in itertools.pairwise(xs):
        board.arrow((a + 0.87, 2.55), (b - 0.87, 2.55), GRAY)
    board.text(4.75, 3.5, "the tape goes forward, one lane a row: zeros p and the sum of the costs", GRAY)
    for x in xs[:2]:
        board.arrow((5.9, 2.18), (x, 2.18), ORANGE, bend=-0.33)
    board.text(4.3, 1.28, "c - baseline", ORANGE)
    board.text(8.2, 1.75, "chosen after c:\nnothing comes back", GRAY, 9)
    for x in xs[:2]:
        board.text(x, 0.72, "times the score,\nof its own lane", BLUE, 9)
    board.text(5.9, 0.72, "the pathwise derivative of c\ngoes back through the values", ORANGE, 9)
    board.text(4.75, 0.2, "total propagation weighs both at each choice, and sends on the mixture", GRAY)
    board.save("cost.svg")


def jaxpr():
    """The life of a jaxpr: what the wings that take any function do with it."""
    board = Board(10.6, 3.6)
    board.box(1.1, 1.8, "your\nfunction", GRAY, width=1.5, height=0.8)
    board.box(3.4, 1.8, "jaxpr", BLUE, width=1.4)
    board.arrow((1.88, 1.8), (2.65, 1.8), GRAY, "trace")
    for y, name, what, after in (
        (3.1, "tracing", "another sum on the way back", "paths, influence"),
        (1.8, "memory", "what each equation keeps", "a smaller memory"),
        (0.5, "rewiring", "sites with another way back", "another rule"),
    ):
        board.box(5.6, y, name, BLUE, width=1.5)
        board.arrow((4.12, 1.8), (4.83, y), BLUE)
        board.arrow((6.37, y), (8.75, y), GRAY, what, 0.2, size=9)
        board.text(8.85, y, after, GREEN, ha="left", size=10)
    board.save("jaxpr.svg")


if __name__ == "__main__":
    front(), message(), cost(), jaxpr()
