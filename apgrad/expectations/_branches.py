"""The branches of `tape.parallel`: how they fork and join a tape."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apgrad._programs.jaxprs import Program, inside_of, variables
from apgrad.expectations._ledger import Mark, marked


def run_branches(tape: Any, branches: tuple[Callable[[Any], tuple[Any, Any]], ...]) -> tuple[Any, tuple[Any, ...]]:
    ledger, fork = tape._require_current("parallel"), object()
    if not branches:
        raise ValueError("parallel needs at least one branch, got none")
    mark = lambda key, index: marked(key, Mark.BRANCH, (fork, index)) if ledger.collecting else key
    key, *keys = jax.random.split(tape._key, len(branches) + 1)

    def run(index, key, ports):
        total = jax.tree.map(jnp.zeros_like, tape._total)
        # With a token of its own a branch is traced anew: a `jit` that JAX has in its cache, from another branch, would
        # hide from the first trace what it does, and its sites where they are counted.
        fresh = ledger.collecting or tape._plan.sites is not None
        plan = tape._plan._replace(token=object()) if fresh else tape._plan
        ledger.branches += 1
        try:
            result = branches[index](type(tape)(plan, mark(key, index), total, ports))
        finally:
            ledger.branches -= 1
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], type(tape))):
            raise TypeError(f"branch {index} of parallel must return (tape, output), got {type(result).__name__}")
        result[0]._require_current(f"the end of branch {index}")
        return result

    total, outputs = tape._total, []
    ports = {port: (1 - len(branches)) * p if port.arithmetic.adds else p for port, p in tape._ports.items()}
    for index, branch_key in enumerate(keys):
        begin = {port: ports[port] if port.arithmetic.threads else p for port, p in tape._ports.items()}
        end, output = run(index, branch_key, begin)
        total = jax.tree.map(jnp.add, total, end._total)
        ports = {port: p + end._ports[port] if port.arithmetic.adds else p for port, p in ports.items()}
        ports |= {port: p for port, p in end._ports.items() if port.arithmetic.threads}
        outputs.append(output)
    return tape._follow(mark(key, None), total, ports), tuple(outputs)


def require_apart(program: Program) -> None:
    """Raises a `ValueError` where an equation of one branch reads what an equation of another branch made."""
    here: dict[Any, int] = {}  # for each fork that has begun and not ended, the number of the branch
    made: dict[Any, dict[Any, int]] = {}  # for each variable, the branches in which it was made
    elsewhere = lambda v: any(here.get(fork, index) != index for fork, index in made.get(v, {}).items())
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "mark" and eqn.params["kind"] is Mark.BRANCH:
            fork, index = eqn.params["label"]
            here = {other: number for other, number in here.items() if other is not fork}
            here |= {} if index is None else {fork: index}
        elif any(map(elsewhere, variables(eqn.invars))):
            raise ValueError(
                "a branch of tape.parallel uses a value made inside another branch, whose choices do not pay for it: "
                "return it as the branch's output and use it after the join, or make it before the fork"
            )
        made |= dict.fromkeys(eqn.outvars, here)
        # What a program inside closes over is an operand of its equation.
        for inner in inside_of(eqn):
            require_apart(inner)
