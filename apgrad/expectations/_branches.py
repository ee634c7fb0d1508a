"""The branches of `tape.parallel`: how they fork and join a tape."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from apgrad._ground.primitives import refuse_batching


def run_branches(tape: Any, branches: tuple[Callable[[Any], tuple[Any, Any]], ...]) -> tuple[Any, tuple[Any, ...]]:
    ledger = tape._require_current("parallel")
    if not branches:
        raise ValueError("parallel needs at least one branch, got none")
    key, *keys = jax.random.split(tape._key, len(branches) + 1)

    def run(index, key, ports):
        total = jax.tree.map(jnp.zeros_like, tape._total)
        # With a token of its own a branch is traced anew: a `jit` that JAX has in its cache, from a rehearsal or from
        # another branch, would hide from the first trace what it does, and its sites where they are counted.
        fresh = ledger.collecting or tape._plan.sites is not None
        plan = tape._plan._replace(token=object()) if fresh else tape._plan
        ledger.branches += 1
        try:
            result = branches[index](type(tape)(plan, key, total, ports))
        finally:
            ledger.branches -= 1
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], type(tape))):
            raise TypeError(f"branch {index} of parallel must return (tape, output), got {type(result).__name__}")
        result[0]._require_current(f"the end of branch {index}")
        return result

    if not (ledger.collecting or ledger.rehearsing):
        ledger.rehearsing, met = True, len(ledger.sites)
        try:
            _require_apart(run, keys, tape._ports)
        finally:
            ledger.rehearsing = False
            del ledger.sites[met:]
    total, outputs = tape._total, []
    ports = {port: (1 - len(branches)) * p if port.arithmetic.adds else p for port, p in tape._ports.items()}
    for index, branch_key in enumerate(keys):
        begin = {port: ports[port] if port.arithmetic.threads else p for port, p in tape._ports.items()}
        end, output = run(index, branch_key, begin)
        total = jax.tree.map(jnp.add, total, end._total)
        ports = {port: p + end._ports[port] if port.arithmetic.adds else p for port, p in ports.items()}
        ports |= {port: p for port, p in end._ports.items() if port.arithmetic.threads}
        outputs.append(output)
    return tape._follow(key, total, ports), tuple(outputs)


def _require_apart(run, keys, ports):
    """Raises a `ValueError` where an equation of one branch reads what an equation of another branch made."""
    begin, data = "a branch of tape.parallel begins", [jax.random.key_data(key) for key in keys]

    def rehearse():
        results = []
        for index, key in enumerate(keys):
            marked = refuse_batching(data[index], begin)
            wrapped = jax.random.wrap_key_data(marked, impl=jax.random.key_impl(key))
            end, output = run(index, wrapped, ports)
            arrays = [x for x in jax.tree.leaves(output) if isinstance(x, jax.Array)]
            results.append((marked, jax.tree.leaves(end), arrays))
        return results

    branch, made = -1, {}
    # What a nested jaxpr closes over is an operand of its equation, so that the outermost ones tell all.
    for eqn in jax.make_jaxpr(rehearse)().jaxpr.eqns:
        branch += eqn.params.get("reason") == begin
        if any(made.get(v, branch) != branch for v in eqn.invars if not isinstance(v, Literal)):
            raise ValueError(
                "a branch of tape.parallel uses a value made inside another branch, whose choices do not pay for it: "
                "return it as the branch's output and use it after the join, or make it before the fork"
            )
        made |= dict.fromkeys(eqn.outvars, branch)
