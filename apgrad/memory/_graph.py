"""The equations of a pullback, sorted by what they need.

Those that depend on a message run in the backward pass; what they take from the others are the coefficients.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from apgrad._programs.jaxprs import Program, needed, run_all, variables
from apgrad._programs.kinds import LINEAR_ELEMENTWISE


class PullbackGraph:
    """The equations of a pullback, a program of some residuals, its first inputs, and of messages."""

    def __init__(self, program: Program, leaves: int):
        self.jaxpr, self.consts = program
        self.leaves = self.jaxpr.invars[:leaves]
        self.dependent = set(self.jaxpr.invars[leaves:])
        self.backward, self.forward = [], []
        for eqn in self.jaxpr.eqns:
            if self.messages(eqn):
                self.dependent.update(eqn.outvars)
                self.backward.append(eqn)
            else:
                self.forward.append(eqn)

    def coefficients(self, eqn: Any) -> list[Any]:
        return [v for v in variables(eqn.invars) if v not in self.dependent]

    def messages(self, eqn: Any) -> list[Any]:
        return [v for v in variables(eqn.invars) if v in self.dependent]

    def frontier(self) -> list[Any]:
        """All that the backward pass takes from equations that depend on no message."""
        found = [v for eqn in self.backward for v in self.coefficients(eqn)]
        outs = [v for v in variables(self.jaxpr.outvars) if v not in self.dependent]
        return list(dict.fromkeys(found + outs))

    def chains(self) -> dict[Any, tuple[Any, list[Any]]]:
        """The elementwise chains that begin at one message, the root: `{output: (root, equations)}`.

        An equation goes into a chain if it multiplies the message. The real part of a complex one is no product; and of
        float16 a product of derivatives may underflow where a large message, multiplied by each, does not.
        """

        def multiplies(eqn, messages):
            dtypes = [v.aval.dtype for v in (*messages, *eqn.outvars)]
            kinds = [jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes]
            return eqn.primitive.name in LINEAR_ELEMENTWISE and any(kinds) == kinds[-1] and jnp.float16 not in dtypes

        root: dict[Any, Any] = {}
        for eqn in self.backward:
            messages = self.messages(eqn)
            roots = {root.get(v, v) for v in messages}
            shapes = {v.aval.shape for v in (*messages, *eqn.outvars)}
            if multiplies(eqn, messages) and len(roots) == 1 and len(shapes) == 1:
                root[eqn.outvars[0]] = roots.pop()
        elementwise = [eqn for eqn in self.backward if eqn.outvars[0] in root]
        outside = set(variables(self.jaxpr.outvars))
        for eqn in self.backward:
            outside |= {v for v in variables(eqn.invars) if v in root and root.get(eqn.outvars[0]) is not root[v]}
        return {v: (root[v], needed(elementwise, [v])) for v in root if v in outside}

    def known(self, leaves: Sequence[Any], frontier: Sequence[Any], chains: dict[Any, Any]) -> Any:
        values = dict(zip(self.leaves, leaves, strict=True))
        values |= dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        run_all(self.forward, values)
        derivatives = []
        for out, (root, eqns) in chains.items():
            local = values | {root: jnp.ones(root.aval.shape, root.aval.dtype)}
            run_all(eqns, local)
            derivatives.append(local[out])
        return [values[v] for v in frontier], derivatives

    def needed(self, collapsed: dict[Any, Any]) -> list[tuple[Any, Any, int]]:
        wanted = set(variables(self.jaxpr.outvars))
        chosen = []
        for eqn in reversed(self.backward):
            if wanted.isdisjoint(eqn.outvars):
                continue
            root = collapsed.get(eqn.outvars[0])
            sources = variables(eqn.invars) if root is None else [root]
            chosen.append((eqn, root, sources))
            wanted.update(sources)
        before: dict[Any, int] = {}
        found = []
        for i, (eqn, root, sources) in enumerate(reversed(chosen)):
            ancestors = 0
            for v in sources:
                ancestors |= before.get(v, 0)
            found.append((eqn, root, ancestors))
            before |= dict.fromkeys(eqn.outvars, ancestors | (1 << i))
        return found
