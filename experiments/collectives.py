"""What devices exchange in a step: collectives counted in the compiled program, by what is sharded.

    python -m experiments.collectives                   # 1 and 8 devices
    python -m experiments.collectives --preset paper    # 1, 8 and 64 devices

No time is measured: the devices are threads of one CPU. What is counted is what XLA's partitioner has put into the
program for that many devices: how many collective operations, and the bytes of their results on one device; an
operation in the body of a loop counts once for each turn of the loop.
"""

import json
import math
import os
import re
import subprocess
import sys
from typing import Any

from experiments import harness

MODELS = ("gradient", "randomized model")
WHAT = ("lanes", "outer tasks", *(f"{what} of a {model}" for what in ("batch", "weights") for model in MODELS))
STEPS = 20  # of the rollout


class Config(harness.Config):
    """Options."""

    devices: tuple[int, ...] = (1, 8)  # numbers of simulated devices.


PAPER = Config(devices=(1, 8, 64))


def cells(config: Config) -> list[harness.Cell]:
    return harness.grid(devices=config.devices, sharded=WHAT)


def measure(config: Config, cell: harness.Cell, seed: int) -> dict[str, Any]:
    """Counts in a process of its own, since the number of devices is fixed when JAX starts."""
    flags = f"--xla_force_host_platform_device_count={cell['devices']}"
    command = [sys.executable, "-m", "experiments.parts.collectives_worker", cell["sharded"]]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


COLLECTIVE = re.compile(
    r"= (?P<shape>\(?[^=]*?\)?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
ARRAY = re.compile(r"\b(?P<type>pred|[subf]\w*?(?P<bits>\d+))\[(?P<sizes>[\d,]*)\]")


def count(text: str) -> dict[str, Any]:
    r"""The collectives of a compiled program.

    Returns:
      The number of operations by kind outside of loops and in each turn of a loop, and their bytes in all.

    Example:
      >>> found = count("ENTRY main {\n  %a = f32[4,2]{1,0} all-reduce(%b), to_apply=%sum\n}")
      >>> found["once"], found["each turn"], found["bytes once"]
      ({'all-reduce': 1}, {}, 32)
    """
    bodies = {name for pair in re.findall(r"condition=%?([\w.-]+), body=%?([\w.-]+)", text) for name in pair}
    found: dict[str, Any] = {"once": {}, "each turn": {}, "bytes once": 0, "bytes each turn": 0}
    inside = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$", line):
            inside = header[1]
        if operation := COLLECTIVE.search(line):
            when = "each turn" if inside in bodies else "once"
            found[when][operation["kind"]] = found[when].get(operation["kind"], 0) + 1
            for array in ARRAY.finditer(operation["shape"]):
                entries = math.prod(int(n or 1) for n in array["sizes"].split(","))
                found[f"bytes {when}"] += entries * max(1, int(array["bits"] or 8) // 8)
    return found


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none"


def report(config: Config, records: list[tuple[harness.Cell, dict[str, Any]]]) -> harness.Report:
    rows = []
    for cell, result in records:
        row = {**cell, "once": _words(result["once"]), "each_turn": _words(result["each turn"])}
        row["turns"] = STEPS if result["each turn"] else 0
        row |= {k.replace(" ", "_"): result[k] for k in ("bytes once", "bytes each turn", "parameter bytes")}
        rows.append(row | {f"{k}_bytes_per_device": result[f"{k} bytes"] for k in ("argument", "temp")})
    most = max(config.devices)
    figure, ((axes,),) = harness.panels(size=(7, 3.2))
    shown = [r for r in rows if r["devices"] == most][::-1]
    axes.barh([r["sharded"] for r in shown], [r["bytes_once"] + r["turns"] * r["bytes_each_turn"] for r in shown])
    axes.set(xscale="log", xlabel=f"bytes that a device exchanges in a step, {most} devices")
    return harness.Report({}, rows, harness.table(rows, "devices", "sharded", "once", "each_turn"), figure)


if __name__ == "__main__":
    harness.main()
