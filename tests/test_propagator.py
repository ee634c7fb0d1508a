import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap

identity = ap.Propagator(lambda x: (x, None), lambda _, m: (m,))


def scale(factor):
    return ap.Propagator(lambda x: (x, None), lambda _, m: (factor * m,))


def test_backpropagation_is_jax_grad():
    def f(a, b):
        return jnp.sin(a["x"]) * b[0] + b[1]

    args = ({"x": jnp.arange(3.0)}, (jnp.float32(2.0), jnp.ones(3)))
    got = jax.grad(lambda *a: jnp.sum(ap.node(ap.backpropagation(f))(*a)), argnums=(0, 1))(*args)
    chex.assert_trees_all_equal(got, jax.grad(lambda *a: jnp.sum(f(*a)), argnums=(0, 1))(*args))


def test_messages_add_up_at_a_fan_out_and_none_is_lost_or_counted_twice():
    # A diamond with a tail: x -> a, x -> b, (a, b) -> c, and c used twice. Paths: 2 * (2 * 3 + 5) = 22.
    double, triple, quintuple = (ap.node(scale(s)) for s in (2.0, 3.0, 5.0))

    def f(x):
        a, b = double(triple(x)), quintuple(x)
        c = a + b
        return c + c

    assert jax.grad(f)(1.0) == 22.0


def test_messages_of_any_pytree():
    swap = ap.node(
        ap.Propagator(lambda tree: ({"l": tree["r"], "r": tree["l"]}, None), lambda _, m: ({"l": m["r"], "r": m["l"]},))
    )
    tree = {"l": (jnp.ones(2), jnp.zeros((2, 3))), "r": jnp.ones(4)}
    _, pullback = jax.vjp(swap, tree)
    message = {"l": jnp.arange(4.0), "r": (jnp.arange(2.0), jnp.full((2, 3), 7.0))}
    (got,) = pullback(message)
    chex.assert_trees_all_equal(got, {"l": message["r"], "r": message["l"]})


def test_none_stands_for_no_message():
    f = ap.node(ap.Propagator(lambda x, t: (x + t["a"], None), lambda _, m: (None, {"a": m, "b": None})))
    to_x, to_tree = jax.grad(f, argnums=(0, 1))(1.0, {"a": 2.0, "b": 3.0})
    assert (to_x, to_tree) == (0.0, {"a": 1.0, "b": 0.0})


def test_integer_inputs_and_keys_get_no_message():
    def forward(x, n, key):
        return x * n.astype(x.dtype) + jax.random.normal(key), n

    f = ap.node(ap.Propagator(forward, lambda n, m: (m * n.astype(m.dtype), n, None)))
    assert jax.grad(f)(2.0, jnp.int32(3), jax.random.key(0)) == 3.0


def test_messages_take_the_dtype_of_their_input():
    f = ap.node(ap.Propagator(lambda x: (x, None), lambda _, m: (m.astype(jnp.float32) * 2,)))
    assert jax.grad(lambda x: f(x).sum())(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "backward, error, words",
    [
        (lambda _, m: m, TypeError, "tuple with one message for each of its 1"),
        (lambda _, m: (m, m), TypeError, "tuple of 2"),
        (lambda _, m: (m[:1],), ValueError, r"message for input 0 has shape \(1,\), the input has shape \(2,\)"),
        (lambda _, m: ({"a": m},), ValueError, "structure"),
    ],
)
def test_wrong_messages_are_named(backward, error, words):
    f = ap.node(ap.Propagator(lambda x: (x, None), backward))
    with pytest.raises(error, match=words):
        jax.grad(lambda x: jnp.sum(f(x)))(jnp.ones(2))


def test_forward_must_return_a_pair():
    with pytest.raises(TypeError, match="pair"):
        ap.node(ap.Propagator(lambda x: x, lambda _, m: (m,)))(1.0)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_closed_over_array_that_would_get_no_message_is_an_error(wrap):
    def f(t):
        return wrap(ap.node(ap.Propagator(lambda x: (x * t, None), lambda _, m: (m * t,))))(2.0)

    with pytest.raises(Exception, match=r"closes over|closed-over"):
        jax.grad(f)(3.0)


def test_chain_gives_each_its_own_memory_and_nests():
    square = ap.Propagator(lambda x: (x**2, x), lambda x, m: (2 * x * m,))
    f = ap.node(ap.chain(square, ap.chain(square, scale(3.0))))
    assert jax.grad(f)(2.0) == 3 * 4 * 2.0**3


def test_chain_takes_several_inputs_at_its_head():
    f = ap.node(ap.chain(ap.backpropagation(jnp.multiply), scale(2.0)))
    assert jax.grad(f, argnums=(0, 1))(3.0, 5.0) == (10.0, 6.0)


def test_combine_shares_memory_and_refuses_a_key_written_twice():
    writes = ap.Propagator(lambda x: (x, {"k": x}), lambda memory, m: (m,))
    reads = ap.Propagator(lambda x: (x, {}), lambda memory, m: (m * memory["k"],))
    assert jax.grad(ap.node(ap.combine(reads, writes)))(4.0) == 4.0
    with pytest.raises(ValueError, match="same memory key 'k'"):
        ap.node(ap.combine(writes, writes))(1.0)
    with pytest.raises(TypeError, match="dicts"):
        ap.node(ap.combine(identity))(1.0)


def test_combine_merges_dict_messages_and_passes_on_what_is_not_answered():
    double_a = ap.Propagator(lambda x: (x, {}), lambda _, m: ({"a": 2 * m["a"]},))
    both = ap.Propagator(lambda x: (x, {}), lambda _, m: ({"a": 10 * m["a"], "b": 10 * m["b"]},))
    f = ap.node(ap.combine(both, double_a))
    got = jax.grad(lambda x: f(x)["a"] + f(x)["b"])({"a": 1.0, "b": 1.0})
    assert got == {"a": 20.0, "b": 10.0}


def test_skip_passes_the_message_over():
    f = ap.node(ap.skip(ap.backpropagation(jnp.sign)))
    assert jax.value_and_grad(lambda x: 7 * f(x))(0.3) == (7.0, 7.0)
    with pytest.raises(ValueError, match="same shapes"):
        ap.node(ap.skip(ap.backpropagation(jnp.sum)))(jnp.ones(3))


@pytest.mark.parametrize("combinator", [ap.chain, ap.combine])
def test_combinators_name_what_they_take(combinator):
    with pytest.raises(ValueError, match="at least one"):
        combinator()
    with pytest.raises(TypeError, match="backpropagation"):
        combinator(jnp.sin)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    "second", [lambda f: jax.grad(jax.grad(f)), jax.hessian, lambda f: jax.jit(jax.grad(jax.grad(f)))]
)
def test_first_order_refuses_the_second_derivative_in_a_scan_too(second, remat):
    f = ap.node(ap.first_order(ap.backpropagation(jnp.multiply), "once only"))
    f = jax.checkpoint(f) if remat else f

    def loop(x):
        return jax.lax.scan(lambda c, _: (f(c, x), None), 1.0, length=4)[0]

    assert jax.grad(loop)(2.0) == 4 * 2.0**3
    with pytest.raises(TypeError, match="once only"):
        second(loop)(2.0)


def test_a_learned_backward_is_differentiated_right(x64):
    # In a custom_vjp's fwd the wrapped function would be differentiated by its own, learned, rule: silently
    # wrong. The meta-gradient through five steps of a learned rule equals a finite difference.
    def learned(rule):
        def forward(rule, w, x):
            return w * x, (rule, w, x)

        def backward(memory, m):
            rule, w, x = memory
            return None, jnp.tanh(rule * m * x), m * w

        return ap.node(ap.Propagator(forward, backward))

    def outer(rule):
        f = learned(rule)

        def step(w, x):
            gradient = jax.grad(lambda w: (f(rule, w, x) - jnp.sin(x)) ** 2)(w)
            return w - 0.3 * gradient, None

        w, _ = jax.lax.scan(step, jnp.array(0.5), jnp.linspace(0.2, 1.5, 5))
        return (w - 0.9) ** 2 + w

    h = 1e-6
    finite = (outer(0.7 + h) - outer(0.7 - h)) / (2 * h)
    np.testing.assert_allclose(jax.grad(outer)(0.7), finite, rtol=1e-8)


@pytest.mark.parametrize(
    "propagator",
    [
        ap.backpropagation(jnp.sin),
        ap.chain(scale(2.0), ap.backpropagation(jnp.sin)),
        ap.combine(ap.Propagator(lambda x: (jnp.sin(x), {"x": x}), lambda memory, m: (m * jnp.cos(memory["x"]),))),
        ap.skip(ap.backpropagation(jnp.sign)),
        ap.first_order(ap.backpropagation(jnp.sin), "once"),
    ],
    ids=["backpropagation", "chain", "combine", "skip", "first_order"],
)
def test_propagators_run_under_all_transformations(propagator):
    ap.testing.assert_transformable(ap.node(propagator), jnp.float32(0.7))
