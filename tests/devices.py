"""Programs on several simulated devices, in one process or in two."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

BEGIN = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
if len(sys.argv) > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from apgrad import meta
"""


def run(program, devices, processes=1):
    """The last line that each process prints which runs the program, after `BEGIN`, on its share of the devices."""
    # XLA ends a process in which a device waits 40 seconds for another's collective, as it does on a busy machine.
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices // processes} "
        "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + program]
    # The port stays ours while the coordinator, which allows it too, listens there: nobody else is given it meanwhile.
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("", 0))
        port = str(s.getsockname()[1])
        of_each = [[port, str(i)] if processes > 1 else [] for i in range(processes)]
        started = [subprocess.Popen([*command, *own], **pipes, env=environment) for own in of_each]
        outputs = [process.communicate(timeout=300) for process in started]
    for process, (_, err) in zip(started, outputs, strict=True):
        assert process.returncode == 0, err[-2000:]
    return [out.splitlines()[-1] for out, _ in outputs]  # collectives print lines of their own before it
