"""The rows of the tables of single runs: functions of a run's results that return rows of text, the head first."""

from experiments.report.verdicts import Value, figure

Rows = list[list[str]]


def _with_error(row, name):
    return figure(Value(row[name], row[f"{name}_se"]))


def chaos(results) -> Rows:
    """Variance of the gradient against beta at 50 steps."""
    methods = ("RP", "LR", "TP", "decoupled-CF")
    found = {(r["beta"], r["method"]): r for r in results["rows"] if r["H"] == 50}
    rows = [
        ["beta", "RP", "LR", "TP, as published", "TP, default, cross-fitted", "bias, as published", "bias, default"]
    ]
    for beta in (1.0, 1.5, 2.0, 2.4, 2.5, 2.75, 3.0, 3.5):
        variances = [f"{found[beta, m]['variance']:.2g}" for m in methods]
        biases = [f"{found[beta, m]['bias_in_standard_errors']:+.1f} s.e." for m in methods[2:]]
        rows.append([f"{beta:g}", *variances, *biases])
    return rows


def swarms(results) -> Rows:
    """Errors of gradients with and without Gaussian shaping."""
    methods = ("RP", "LR, no baseline", "LR", "GS-LR", "TP", "GS-TP", "GR")
    rows, found = [["swarm", "cost", *methods]], {}
    for r in results["rows"]:
        if (r["H"], r["B"]) == (25, 1000):
            bias = f" (bias {r['bias']:.2g})" if r["bias"] > r["bias_limit"] else ""
            found.setdefault((r["swarm"], r["cost"]), {})[r["method"]] = f"{r['rms_error']:.2g}{bias}"
    return rows + [[*place, *(errors[m] for m in methods)] for place, errors in found.items()]


def growth_with_the_policy(results) -> Rows:
    """What total propagation costs over a plain gradient."""
    rows = [["parameters", "default, cross-fitted", "`ap.adaptive`", '`target="parameters"`, cross-fitted']]
    for size in (41, 4866, 100444):
        ratio = [results[f"policy of {size}, {m}"]["ratio"] for m in ("decoupled-CF", "adaptive", "parameters-CF")]
        rows.append([f"{size:,}", *(f"{r:.2f}" for r in ratio)])
    return rows


def policy_search(results) -> Rows:
    """Cost of the learned policy, and steps to success."""
    rows = [["method", "cost at the end (95 %)", "seconds a step over RP's", "runs that succeed"]]
    for r in sorted(results["rows"], key=lambda r: r["cost"]):
        cost = f"{r['cost']:.3f} ({r['cost_low']:.3f} to {r['cost_high']:.3f})"
        rows.append([r["method"], cost, f"{r['seconds_over_RP']:.2f}", f"{100 * r['success']:.0f} %"])
    return rows


def clipped_lanes(results) -> Rows:
    """Cost of the learned policy on both tasks, after few steps of Adam and after many."""
    rows = [["task", "method", "rate", "after 60", "after 240 steps (95 %)", "median", "after 720", "steps to success"]]
    for r in results["rows"]:
        cost = f"{r['cost']:.3f} ({r['cost_low']:.3f} to {r['cost_high']:.3f})"
        steps = f"{r['steps']:.0f}" if r["steps"] is not None else "none"
        numbers = f"{r['rate']:g}", f"{r['after_60']:.3f}", cost, f"{r['cost_median']:.3f}", f"{r['cost_long']:.3f}"
        rows.append([r["task"], r["method"], *numbers, steps])
    return rows


def cart_pole(results) -> Rows:
    """Cost of a real episode, episodes to success."""
    rows = [["method", "cost of the eighth episode (95 %)", "runs that succeed", "episodes to success (95 %)"]]
    for r in sorted(results["rows"], key=lambda r: r["cost"]):
        cost = f"{r['cost']:.2f} ({r['cost_low']:.2f} to {r['cost_high']:.2f})"
        episodes = f"{r['episodes']:.1f} ({r['episodes_low']:.1f} to {r['episodes_high']:.1f})"
        rows.append([r["method"], cost, f"{100 * r['success']:.0f} % of {r['runs']}", episodes])
    return rows


def rule_beside_adam(results) -> Rows:
    """Accuracy after 20 steps of 8 images."""
    rows = [["network", "trained rule", "tuned Adam", "tuned SGD"]]
    for setting in ("144-50-10", "144-50-50-10", "144-50-10, step", "784-100-10", "784-256-128-10", "digits 64-50-10"):
        values = [results[f"{setting}, {m}"] for m in ("MPLP", "Adam", "SGD")]
        rows.append([setting, *(figure(Value(v["mean"], v["standard_error"])) for v in values)])
    return rows


def rule_beside_optimizers(results) -> Rows:
    """Accuracy after 20 steps of 8 images, with momentum and Muon."""
    methods = {"MPLP": "trained rule", "Muon": "Muon", "momentum": "SGD, momentum .9", "Adam": "Adam", "SGD": "SGD"}
    rows = [["network", *methods.values()]]
    for setting in ("144-50-10", "784-100-10"):
        values = [results[f"{setting}, {m}"] for m in methods]
        rows.append([setting, *(figure(Value(v["mean"], v["standard_error"])) for v in values)])
    return rows


def rule_for_long(results) -> Rows:
    """Accuracy over 1,000 steps, for rule, Adam and SGD."""
    rows = [["network", "learner", *(f"{t} steps" for t in (20, 100, 200, 1000))]]
    for setting in ("784-32-20-10, B=32, long", "144-50-10, long", "digits 64-50-10, long"):
        for method in ("MPLP", "Adam", "SGD"):
            at = results[f"{setting}, {method}"]["at steps"]
            name = setting.removesuffix(", long") if method == "MPLP" else ""
            rows.append([name, method, *(figure(Value(*at[t])) for t in ("20", "100", "200", "1000"))])
    return rows


def outer_gradients(results) -> Rows:
    """Variance and bias of outer gradients, tame and chaotic."""
    found = {(r["estimator"], r["theta"]): r for r in results["rows"] if r["T"] == 40}
    rows = [["outer gradient", "variance, tame", "bias", "variance, chaotic", "bias"]]
    for name in dict.fromkeys(r["estimator"] for r in results["rows"]):
        row = [name]
        for theta in (0.1, 0.9):
            r = found.get((name, theta), {"variance": None})
            variance = r["variance"]
            row.append("-" if variance is None else f"{variance:.2g}")
            tame = variance is not None and variance < 1e6
            row.append(figure(Value(r["bias"], r["bias_standard_error"])) if tame else "-")
        rows.append(row)
    return rows


def outer_training(results) -> Rows:
    """Validation loss after the same seconds, and the seconds to the threshold, of each outer gradient."""
    rows = [["bed", "outer gradient", "validation loss", "seconds to the threshold", "bias of the gradient"]]
    seen = set()
    for r in results["rows"]:
        begun = results[r["start"]]
        name = f"{r['start']}, {begun['seconds']:.2g} s, threshold {begun['threshold']:.2g}"
        shown = figure(Value(r["loss"], r["standard_error"])) if r["loss"] is not None else "not finite"
        when = "never" if r["seconds_to_threshold"] is None else f"{r['seconds_to_threshold']:.2g}"
        off = "" if r["bias"] is None else figure(Value(r["bias"], r["bias_standard_error"]))
        rows.append(["" if name in seen else name, r["method"], shown, when, off])
        seen.add(name)
    return rows


def residuals(results) -> Rows:
    """How many times fewer bytes are kept than by reverse mode."""
    methods = ("different 0.1", "rounding 4", "rounding 2", "checkpoint")
    found = {(r["network"], r["method"]): r["times_fewer"] for r in results["rows"]}
    rows = [["network", "a sample of .1", "rounding, 4 bits", "rounding, 2 bits", "nested checkpoint, exact"]]
    for network in ("mlp", "convnet", "rnn", "transformer"):
        rows.append([network, *(f"1/{found[network, m]:.1f}" if (network, m) in found else "" for m in methods)])
    return rows


def compiled_memory(results) -> Rows:
    """Compiled scratch memory and time."""
    rows = [["network", "method", "MB", "reverse mode's MB", "time over reverse mode's"]]
    for r in results["rows"]:
        rows.append([r["network"], r["method"], f"{r['temp_MB']:.1f}", f"{r['temp_MB_reverse_mode']:.1f}",
                     f"{r['time_ratio']:.2f}"])  # fmt: skip
    return rows


def training(results) -> Rows:
    """Accuracy that random memory trains to."""
    rows = [["network", "steps", "method", "test accuracy, %", "less than reverse mode, points"]]
    for r in results["rows"]:
        accuracy = figure(Value(100 * r["test_accuracy"], 100 * r["test_accuracy_se"]))
        less = figure(Value(100 * r["less_than_baseline"], 100 * r["less_than_baseline_se"]))
        rows.append([r["network"], f"{r['steps']:,}", r["method"], accuracy, "" if r["method"] == "baseline" else less])
    return rows


def training_at_equal_memory(results) -> Rows:
    """Loss of the training set and accuracy on test images, beside what reverse mode keeps."""
    rows = [["method", "examples", "residual kB", "training loss", "test accuracy, %", "seeds"]]
    for r in results["rows"]:
        loss, error = Value(r["train_loss"], r["train_loss_se"]), r["test_accuracy_se"]
        accuracy = Value(100 * r["test_accuracy"], None if error is None else 100 * error)
        sizes = [str(r["batch"]), f"{r['residual_bytes'] / 1e3:.0f}"]
        rows.append([r["method"], *sizes, figure(loss), figure(accuracy), str(r["seeds"])])
    return rows


def noise(results) -> Rows:
    """Squared error of gradients over that of a smaller batch of equal memory."""
    times = sorted({r["steps"] for r in results["rows"]})
    columns = [f"{layers}, after {t:,} steps" for t in times for layers in ("before the last layer", "last layer")]
    rows = [["method", "batch", "residual kB", *columns]]
    for method, batch in dict.fromkeys((r["method"], r["batch"]) for r in results["rows"]):
        mine = [r for r in results["rows"] if (r["method"], r["batch"]) == (method, batch)]
        if method == "baseline" or batch != results["config"]["batch"]:
            continue
        cells = []
        for t in times:
            *others, last = sorted((r for r in mine if r["steps"] == t), key=lambda r: r["layer"])
            found = [r["against_smaller_batch"] for r in others]
            cells += [f"{min(found):.2f} to {max(found):.2f}", f"{last['against_smaller_batch']:.2f}"]
        rows.append([method, str(batch), f"{mine[0]['residual_bytes'] / 1e3:.0f}", *cells])
    return rows


def pde(results) -> Rows:
    """Loss and noise by kept fraction."""
    rows = [["kept fraction", "starts", "iterations", "final loss", "noise over signal", "residual MB", "scratch MB"]]
    for r in results["rows"]:
        sizes = [f"{r[k] / 1e6:.2f}" for k in ("residual_bytes", "temp_bytes")]
        rows.append([str(r["fraction"]), str(r["starts"]), str(r["iterations"]), f"{r['final_loss']:.3g}",
                     f"{r['noise_over_signal']:.2g}", *sizes])  # fmt: skip
    return rows


def ablation(results) -> Rows:
    """Rank correlation of influence with what removing a component costs."""
    rows = [["path", "removed from the trained network", "trained without it"]]
    for kind in ("greedy", "viterbi", "gradient share"):
        values = [results[f"correlation {kind} {how}"] for how in ("ablated", "retrained")]
        rows.append([kind, *(figure(Value(v["value"], v["standard_error"])) for v in values)])
    return rows


def tracing_time(results) -> Rows:
    """Time of tracing over jitted `jax.grad`."""
    semirings = list(dict.fromkeys(r["semiring"] for r in results["rows"]))
    found = {(r["model"], r["semiring"]): r for r in results["rows"]}
    rows = [["model", *semirings]]
    for model in dict.fromkeys(r["model"] for r in results["rows"]):
        cells = [found[model, s] for s in semirings]
        rows.append([model, *(figure(Value(c["ratio"], c["standard_error"])) for c in cells)])
    return rows


def ways_back(results) -> Rows:
    """Accuracy, angle, time and operations by network and rule."""
    rows = [
        [
            *("network", "rule", "seeds", "test accuracy, %", "angle to the gradient, first layer"),
            *("time over backpropagation's", "operations over backpropagation's", "published, on MNIST"),
        ]
    ]
    for r in results["rows"]:
        accuracy = figure(Value(100 * r["test_accuracy"], 100 * r["test_accuracy_se"]))
        measured = [accuracy, _with_error(r, "angle_first_layer") + "°", f"{r['time_ratio']:.2f}"]
        rows.append(
            [r["network"], r["rule"], str(r["seeds"]), *measured, f"{r['flops_ratio']:.2f}", r["published"] or "-"]
        )
    return rows


def predictive_coding(results) -> Rows:
    """Accuracy by method and number of steps."""
    rows = [["method", "steps", "test accuracy, %", "JPC's notebook, one seed, %"]]
    for r in results["rows"]:
        accuracy = figure(Value(100 * r["test_accuracy"], 100 * r["test_accuracy_se"]))
        known = r["jpc_notebook"]
        rows.append([r["method"], str(r["steps"]), accuracy, f"{100 * known:.2f}" if known else "-"])
    return rows


def collectives(results) -> Rows:
    """What devices exchange in a step."""
    rows = [
        ["devices", "sharded", "collectives once", "in each turn of the loop", "bytes a step", "scratch MB a device"]
    ]
    for r in results["rows"]:
        size = r["bytes_once"] + r["turns"] * r["bytes_each_turn"]
        scratch = f"{r['temp_bytes_per_device'] / 1e6:.1f}"
        rows.append([str(r["devices"]), r["sharded"], r["once"], r["each_turn"], f"{size:,}", scratch])
    return rows


def choice_peers(results) -> Rows:
    """Variance at equal evaluations over the best peer's, with intervals."""
    found = {(r["problem"], r["method"]): r for r in results["rows"]}
    methods = ("ap.enumeration", "ap.rloo, 4", "ap.disarm", "ap.arms, 4", "ap.rebar", "TraceGraph_ELBO")
    rows = [["problem", "best peer", *(f"`{m}`" for m in methods)]]
    for problem in dict.fromkeys(r["problem"] for r in results["rows"]):
        of = [found.get((problem, m)) for m in methods]
        ratios = ["" if r is None else f"{r['over_best_peer']:.2g} ({r['low']:.2g} to {r['high']:.2g})" for r in of]
        ratios = ["0" if r is not None and r["over_best_peer"] < 1e-9 else x for r, x in zip(of, ratios, strict=True)]
        rows.append([problem, found[problem, "ap.disarm"]["best_peer"], *ratios])
    return rows


def autoencoders(results) -> Rows:
    """Test bound, variance of the encoder's gradient and time of each method."""
    rows = [["network", "method", "runs", "test bound", "variance", "ms a step"]]
    for r in results["rows"]:
        bound = figure(Value(r["bound"], r["standard_error"]))
        rest = [f"{r['variance_last']:.3g}", f"{r['milliseconds_a_step']:.2g}"]
        rows.append([r["network"], r["method"], str(r["runs"]), bound, *rest])
    return rows
