"""Several rules on one function: the first one that takes a site has it."""

from typing import NamedTuple

from apgrad._ground.propagator import Propagator
from apgrad.rewiring._rewire import Rule, require_rule
from apgrad.rewiring._sites import ProgramSite


class _Any(NamedTuple):
    rules: tuple[Rule, ...]

    def __call__(self, site: ProgramSite) -> bool:
        return any(rule.where(site) for rule in self.rules)


def first_of(*rules: Rule) -> Rule:
    """Each site goes to the first rule that takes it. To compose rules *at* a site, `ap.chain` their propagators.

    The rule has parameters, draws or is direct if one of its rules does. Where a rule has no parameters they are None.
    A rule that takes nothing is an error at trace time, unless rules before it took all that it would take.

    Args:
      *rules: at least one.

    Example:
      >>> import jax, jax.numpy as jnp, apgrad as ap
      >>> rule = ap.rewiring.first_of(ap.rewiring.clip_messages(1.0, where="sin"), ap.rewiring.skip())
      >>> float(jax.grad(ap.rewire(lambda x: 5 * jnp.sin(jnp.round(x)), rule))(0.2))
      1.0
    """
    if not rules:
        raise ValueError("first_of needs at least one rule, got none")
    for rule in rules:
        require_rule("first_of", rule)
    parameters, direct = any(r.init is not None for r in rules), any(r.direct for r in rules)

    def of(site):
        return next(r for r in rules if r.where(site))

    def init(site):
        make = of(site).init
        return None if make is None else make(site)

    def at(site, params):
        rule = of(site)
        forward, backward = rule.at(site, params)

        def answered(memory, message, *result):
            messages = backward(memory, message, *(result if rule.direct else ()))
            return (None, *messages) if parameters and rule.init is None else messages

        return Propagator(forward, answered)

    return Rule(_Any(rules), at, init if parameters else None, any(r.random for r in rules), direct)
