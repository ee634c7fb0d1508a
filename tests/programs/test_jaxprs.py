"""Jaxprs: each nested equation is seen, evaluated and rebuilt as JAX has it, on the floor and the newest JAX alike."""

import gc
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from apgrad import rewiring  # noqa: F401  (its primitives are named too)
from apgrad._programs import jaxprs, kinds, pure
from apgrad._programs.flow import flow
from apgrad._programs.linearity import CONSTANT, LINEAR, OTHER, ZERO, linearity
from tests.refusals import refused

pytestmark = pytest.mark.quick


def scan(x):
    return jax.lax.scan(lambda c, y: (jnp.sin(c) * y + x, c * y), x, jnp.arange(12.0).reshape(4, 3), reverse=True)


def while_loop(x):
    limit, step = jnp.sum(x) + 9, x + 1
    return jax.lax.while_loop(lambda c: jnp.sum(c) < limit, lambda c: c + step, x)


def cond(x):
    return jax.lax.switch(jnp.array(1), [jnp.sin, jnp.cos, jnp.tan], x)


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), None), lambda _, m: (jnp.clip(m, -1, 1),))

PROGRAMS = {
    "call": (jax.jit(lambda x: jnp.sin(x) + 1), ()),
    "remat": (jax.checkpoint(lambda x: jnp.sin(x) + 1), ()),
    "scan": (scan, (1, 1, 1)),
    "while": (while_loop, (1, 1, 1)),
    "cond": (cond, ()),
    "custom": (clipped, ()),
}
X = jnp.array([0.3, -0.2, 1.0])


def equation(function, kind):
    program, _ = jaxprs.trace(function, X)
    (found,) = [e for e in program.jaxpr.eqns if (inside := jaxprs.nested(e)) is not None and inside.kind == kind]
    return program, found


@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_kind_is_seen_and_rebuilt(kind):
    function, counts = PROGRAMS[kind]
    program, eqn = equation(function, kind)
    inside = jaxprs.nested(eqn)
    assert inside.counts == counts
    assert all(len(program.consts) == len(program.jaxpr.constvars) for program in inside.jaxprs)
    assert (inside.length, inside.reverse) == ((4, True) if kind == "scan" else (0, False))
    seen = []

    def apply(eqn, inputs):
        inside = jaxprs.nested(eqn)
        if inside is None or inside.kind == "custom":
            return jaxprs.caller(eqn)(*inputs)
        seen.append(inside.kind)
        drop = 1 if inside.kind == "scan" else 0
        functions = [lambda *values, p=p: jaxprs.evaluate(p, values[drop:], apply) for p in inside.jaxprs]
        return jaxprs.rebuild(inside, functions, inputs)

    rebuilt = lambda x: jaxprs.evaluate(program, [x], apply)
    chex.assert_trees_all_close(jax.jit(rebuilt)(X), jax.tree.leaves(function(X)), rtol=1e-6)
    assert seen[:1] == ([] if kind == "custom" else [kind])
    if kind != "while":
        total = lambda f: lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(f(x)))
        chex.assert_trees_all_close(jax.grad(total(rebuilt))(X), jax.grad(total(function))(X), rtol=1e-5)


def test_the_steps_of_a_scan_are_numbered_as_they_run():
    _, eqn = equation(scan, "scan")
    inside = jaxprs.nested(eqn)

    body = lambda step, *inputs: (inputs[1], jnp.full(3, step))
    *_, ys = jaxprs.rebuild(inside, [body], [X, X, jnp.zeros((4, 3))])
    np.testing.assert_array_equal(ys[:, 0], [3, 2, 1, 0])


def test_inline_enters_calls_and_keeps_names():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def outer(x):
        with jax.named_scope("outer"):
            return inner(x) + 1

    program, _ = jaxprs.trace(outer, X)
    flat = lambda x: jaxprs.inline(program, [x])
    eqns = jaxprs.trace(flat, X)[0].jaxpr.eqns
    assert [eqn.primitive.name for eqn in eqns] == ["sin", "add"]
    assert jaxprs.scope(eqns[0]).endswith("inner") and "outer" in jaxprs.scope(eqns[0])


def test_parameters_that_are_not_known_are_an_error_with_the_version():
    _, eqn = equation(scan, "scan")
    strange = types.SimpleNamespace(primitive=eqn.primitive, params={"jaxpr": eqn.params["jaxpr"]}, invars=eqn.invars)
    refused(NotImplementedError, jax.__version__, jaxprs.nested, strange)

    del strange.params["jaxpr"]
    with pytest.raises(NotImplementedError, match=f"{jax.__version__} gives the primitive 'scan' .*no 'permutation'"):
        jaxprs.Parameters(strange)["permutation"]


# Names that JAX has had, or has, in another version between the floor and the newest.
ELSEWHERE = {"copy_p", "expand_dims", "log2", "one_minus_square", "polynomial"}


def test_every_primitive_that_is_named_exists():
    """A primitive of another name would change its class without a word."""
    names = set().union(*(value for value in vars(kinds).values() if isinstance(value, frozenset)), kinds.LINEAR_IN)
    assert len(names) > 100
    known = {x.name for x in gc.get_objects() if isinstance(x, Primitive)}
    assert names - known <= ELSEWHERE, sorted(names - known)


def test_a_search_is_looked_into():
    """In JAX 0.12 it is a primitive of its own, and those for two shapes are equal."""
    for shape in ((), (2,), (4,)):
        program = jaxprs.inlined(lambda x: jnp.searchsorted(jnp.arange(3.0), x), jnp.ones(shape))
        assert "call_hi_primitive" not in {eqn.primitive.name for eqn in jaxprs.all_equations(program)}
        np.testing.assert_array_equal(*jaxprs.evaluate(program, [jnp.full(shape, 1.5)]), np.full(shape, 2))


def reaches(function, *facts):
    """Which outputs of a function depend on the inputs with a True; the transfer leaves programs inside to the flow."""
    program, _ = jaxprs.trace(function, *([X] * len(facts)))

    transfer = lambda eqn, facts: [any(facts)] * len(eqn.outvars) if jaxprs.nested(eqn) is None else None
    return flow(program, facts, transfer, lambda a, b: a or b, lambda value: False)


def test_facts_go_through_loops_until_they_rest_and_branches_are_joined():
    rotate = lambda *xyz: jax.lax.scan(lambda c, _: ((c[1], c[2], c[0] * 2), c[0]), xyz, length=3)
    assert reaches(rotate, False, False, True) == [True] * 4
    still = lambda x, y: jax.lax.scan(lambda c, _: ((c[0] + 1, c[1] + 1), None), (x, y), length=3)[0]
    assert reaches(still, True, False) == [True, False]
    looped = lambda x, y: jax.lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] + 1, c[0] * c[1]), (x, y))
    assert reaches(looped, True, False) == [True, True]
    assert reaches(looped, False, True) == [False, True]
    branch = lambda x, y: jax.lax.cond(x.sum() > 0, lambda y: (y, 0 * X), lambda y: (X, 0 * X), y)
    assert reaches(branch, False, True) == [True, False]


def test_a_loop_without_steps_hands_on_what_it_was_given():
    linear = lambda c, m: jax.lax.scan(lambda _, x: (m, None), c, jnp.zeros((0, 3)))[0]
    program, _ = jaxprs.trace(linear, X, X)
    assert linearity(program, [CONSTANT, LINEAR]) == [OTHER]
    assert linearity(program, [ZERO, LINEAR]) == [LINEAR]


def test_what_a_scan_makes_of_an_array_is_not_the_array():
    """A function that leaves it in the array's place changes its argument; the entries stacked again change nothing."""
    last = lambda x: jax.lax.scan(lambda _, entry: (entry, None), 0.0, x)[0]
    copies = lambda x: jax.lax.scan(lambda x, _: (x, x), x, length=2)[1]
    entries = lambda x: jax.lax.scan(lambda _, entry: (None, entry), None, x)[1]
    trace = lambda of: pure.trace("f", lambda given: given.update(x=of(given["x"])), lambda x: {"x": x}, [X])
    for of in (last, copies):
        refused(ValueError, "f is given a function that changes its arguments in place", trace, of)
    trace(entries)


def test_hoist_takes_out_every_traced_value():
    def around(key, n, x):
        converted, arrays = jaxprs.hoist(lambda y: y * n + jax.random.normal(key) * x + X, X)
        return converted(X, *arrays), len(arrays)

    key = jax.random.key(0)
    value, count = jax.jit(around)(key, 3, X)
    assert count == 3
    chex.assert_trees_all_close(value, X * 3 + jax.random.normal(key) * X + X, rtol=1e-6)
