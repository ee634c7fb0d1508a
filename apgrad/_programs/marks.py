"""How often a program comes past its marks."""

from collections import Counter

from apgrad._programs.control import Program, nested


def count_marks(program: Program) -> Counter[str]:
    """How often each mark is passed in one run of a program; marks in branches of `cond` as if all branches ran.

    Args:
      program: what is counted in; marks are made by `apgrad._ground.primitives.mark`.

    Raises:
      ValueError: for a mark inside a `while_loop`, whose number of steps is not known.

    Example:
      >>> import jax
      >>> from apgrad._ground.primitives import mark
      >>> from apgrad._programs.jaxprs import trace
      >>> body = lambda c, _: (mark(c, "step"), None)
      >>> count_marks(trace(lambda x: jax.lax.scan(body, mark(x, "start"), length=3)[0], 1.0)[0])
      Counter({'step': 3, 'start': 1})
    """
    found: Counter[str] = Counter()
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "mark":
            found[eqn.params["name"]] += 1
        inside = nested(eqn)
        if inside is None:
            continue
        for inner in inside.jaxprs:
            for name, number in count_marks(inner).items():
                if inside.kind == "while":
                    raise ValueError("a while_loop makes a number of steps that is not known in advance: use lax.scan")
                found[name] += number * (inside.length if inside.kind == "scan" else 1)
    return found
