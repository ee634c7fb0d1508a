"""Jaxprs: each nested equation is seen, evaluated and rebuilt as JAX has it, on the floor and the newest JAX alike."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apgrad._programs import jaxprs


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
class TestEveryKind:
    def test_is_seen(self, kind):
        function, counts = PROGRAMS[kind]
        _, eqn = equation(function, kind)
        inside = jaxprs.nested(eqn)
        assert inside.counts == counts
        assert all(len(program.consts) == len(program.jaxpr.constvars) for program in inside.jaxprs)
        assert (inside.length, inside.reverse) == ((4, True) if kind == "scan" else (0, False))

    def test_is_evaluated(self, kind):
        function, _ = PROGRAMS[kind]
        program, _ = jaxprs.trace(function, X)
        got = jaxprs.evaluate(program, [X], lambda eqn, inputs: jaxprs.caller(eqn)(*inputs))
        chex.assert_trees_all_equal(got, jax.tree.leaves(function(X)))

    def test_is_rebuilt(self, kind):
        function, _ = PROGRAMS[kind]
        seen = []

        def apply(eqn, inputs):
            inside = jaxprs.nested(eqn)
            if inside is None or inside.kind == "custom":
                return jaxprs.caller(eqn)(*inputs)
            seen.append(inside.kind)
            drop = 1 if inside.kind == "scan" else 0
            functions = [lambda *values, p=p: jaxprs.evaluate(p, values[drop:], apply) for p in inside.jaxprs]
            return jaxprs.rebuild(eqn, inside, functions, inputs)

        def rebuilt(x):
            return jaxprs.evaluate(program, [x], apply)

        program, _ = jaxprs.trace(function, X)
        chex.assert_trees_all_close(jax.jit(rebuilt)(X), jax.tree.leaves(function(X)), rtol=1e-6)
        assert seen[:1] == ([] if kind == "custom" else [kind])
        if kind != "while":

            def total(f):
                return lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(f(x)))

            chex.assert_trees_all_close(jax.grad(total(rebuilt))(X), jax.grad(total(function))(X), rtol=1e-5)


def test_the_steps_of_a_scan_are_numbered_as_they_run():
    _, eqn = equation(scan, "scan")
    inside = jaxprs.nested(eqn)

    def body(step, *inputs):
        return inputs[1], jnp.full(3, step)

    *_, ys = jaxprs.rebuild(eqn, inside, [body], [X, X, jnp.zeros((4, 3))])
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
    flat = lambda x: jaxprs.inline(program, [x], lambda eqn, inputs: jaxprs.caller(eqn)(*inputs))
    eqns = jaxprs.trace(flat, X)[0].jaxpr.eqns
    assert [eqn.primitive.name for eqn in eqns] == ["sin", "add"]
    assert jaxprs.scope(eqns[0]).endswith("inner") and "outer" in jaxprs.scope(eqns[0])


def test_a_function_with_its_own_rule_is_not_rebuilt():
    _, eqn = equation(clipped, "custom")
    with pytest.raises(ValueError, match="derivative rule of its own"):
        jaxprs.rebuild(eqn, jaxprs.nested(eqn), [lambda x: [x]], [X])


def test_parameters_that_are_not_known_are_an_error_with_the_version():
    _, eqn = equation(scan, "scan")
    strange = types.SimpleNamespace(primitive=eqn.primitive, params={"jaxpr": eqn.params["jaxpr"]}, invars=eqn.invars)
    with pytest.raises(NotImplementedError, match=jax.__version__):
        jaxprs.nested(strange)
