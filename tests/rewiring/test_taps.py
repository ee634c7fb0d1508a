"""Taps: the message that passes a place equals the derivative with respect to the place, wherever JAX moves it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import apgrad as ap
from tests.refusals import refused

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
XS = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_vmap_outside_and_inside():
    norm = lambda value, message: (jnp.sum(value), jnp.sqrt(jnp.sum(message**2)))

    def loss(w, x):
        h = ap.tap(jnp.tanh(x @ ap.tap(jnp.sin(w), "shared", norm)), "hidden", norm)
        return jnp.sum(h**2)

    def by_hand(x):
        h, pullback = jax.vjp(lambda s: jnp.tanh(x @ s), jnp.sin(W))
        return jnp.sum(h), jnp.linalg.norm(2 * h), pullback(2 * h)[0]

    @jax.jit
    def found(w):
        inside = ap.with_taps(jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, XS))))(w)[1]
        outside = ap.with_taps(jax.vmap(jax.grad(loss), (None, 0)))(w, XS)[1]
        around = jax.vmap(ap.with_taps(jax.grad(loss)), (None, 0))(w, XS)[1]
        return (inside, outside, around), jax.vmap(by_hand)(XS)

    (inside, outside, around), (values, norms, messages) = jax.tree.map(np.asarray, found(W))
    for taps in (inside, outside, around):
        close(taps["hidden"][0], values)
        close(taps["hidden"][1], norms)
    # The examples share one array: one message in the gradient of the sum, a message for each example otherwise.
    close(inside["shared"][1], np.linalg.norm(np.sum(messages, 0)))
    for taps in (outside, around):
        close(taps["shared"][1], np.linalg.norm(messages, axis=(1, 2)))


@pytest.mark.quick
def test_branches_share_a_name_and_a_branch_that_is_not_taken_is_zeros():
    def loss(x, positive):
        sine = lambda x: ap.tap(ap.tap(jnp.sin(x), "both"), "sine")
        return jax.lax.cond(positive, sine, lambda x: 3 * ap.tap(x, "both"), x)

    taken, other = (ap.with_taps(jax.grad(loss))(0.5, p)[1] for p in (True, False))
    assert (taken["both"].message, taken["sine"].message) == (1, 1)
    assert (other["both"].message, other["sine"].message, other["sine"].value) == (3, 0, 0)


def test_a_branch_that_one_example_does_not_take_is_zeros_for_it():
    """`jax.vmap` of a `cond` evaluates all branches; of what an example does not take it has another's numbers."""

    def loss(x, steps):
        def step(carry, x):
            h, t = carry
            more = lambda h: ap.tap(jnp.tanh(h + x), "state")
            return (jax.lax.cond(t < steps, more, lambda h: ap.tap(jnp.sin(h), "after") ** 2, h), t + 1), None

        return jax.lax.scan(step, (0.0, 0), x)[0][0]

    @jax.jit
    def both(steps):
        x = jnp.arange(1.0, 4.0)
        one = lambda n: jax.grad(loss)(x, n)
        inside, outside = ap.with_taps(jax.vmap(one))(steps)[1], jax.vmap(lambda n: ap.with_taps(one)(n)[1])(steps)
        return jax.tree.map(jnp.transpose, inside), outside

    inside, outside = both(jnp.array([3, 1]))
    jax.tree.map(close, inside, outside)
    assert not np.any(inside["state"].message[1, 1:]) and not np.any(inside["after"].value[0])


def test_nested_scans_stack_twice_and_dtypes_stay():
    def loss(x):
        inner = lambda h, _: (ap.tap(h * 2, "inner"), None)
        outer = lambda h, _: (jax.lax.scan(inner, h, length=2)[0], None)
        return jax.lax.scan(outer, x, length=3)[0].astype(jnp.float32)

    message = ap.with_taps(jax.grad(loss))(jnp.bfloat16(1))[1]["inner"].message
    assert message.dtype == jnp.bfloat16
    np.testing.assert_array_equal(message, 2.0 ** np.arange(5, -1, -1).reshape(3, 2))


def test_without_with_taps_a_tap_is_the_identity():
    f = lambda x: jnp.sum(ap.tap(jnp.sin(x), "a") ** 2)
    g = lambda x: jnp.sum(jnp.sin(x) ** 2)
    x = jnp.arange(3.0)
    for derive in (lambda f: f, jax.grad, jax.hessian, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        np.testing.assert_array_equal(jax.jit(derive(f))(x), jax.jit(derive(g))(x))
    np.testing.assert_array_equal(jax.vmap(jax.grad(f))(x), jax.vmap(jax.grad(g))(x))


def test_a_product_of_the_hessian_taps_the_first_message():
    f = lambda x: ap.tap(x**2, "square") ** 2
    hvp = lambda x: jax.jvp(jax.grad(f), (x,), (1.0,))
    (gradient, second), taps = ap.with_taps(hvp)(3.0)
    assert (gradient, second, taps["square"].message) == (108, 108, 18)


WRAPS = {
    "plain": lambda body: body,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "remat": jax.checkpoint,
    "remat of jit": lambda body: jax.checkpoint(jax.jit(body), policy=jax.checkpoint_policies.dots_saveable),
    "cond": lambda body: lambda h, x: jax.lax.cond(h[0] < 1e9, body, lambda h, x: (h, h), h, x),
}


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(sorted(WRAPS)), st.booleans()), min_size=1, max_size=4))
@example([(wrap, True) for wrap in WRAPS])
def test_messages_are_derivatives_with_respect_to_the_values_in_any_nest_of_transformations(steps):
    """Each value, or each of a scan, is offset: the derivative with respect to the offset is what its tap must see."""

    def run(w, offsets, mark):
        h, values = np.float32([0.3, 0.7]), []
        for i, ((wrap, in_scan), offset) in enumerate(zip(steps, offsets, strict=True)):

            def body(h, offset, i=i):
                h = mark(jnp.sin(w * h) + offset, f"step {i}")
                return h, h

            body = WRAPS[wrap](body)
            h, value = jax.lax.scan(body, h, offset) if in_scan else body(h, offset)
            values.append(value)
        return jnp.sum(h**2), values

    @jax.jit
    def both(w, offsets):
        gradient = lambda w, mark: jax.grad(run, (0, 1), has_aux=True)(w, offsets, mark)
        return ap.with_taps(lambda w: gradient(w, ap.tap))(w), gradient(w, lambda x, _: x)

    offsets = [np.zeros((3, 2) if in_scan else 2, np.float32) for _, in_scan in steps]
    ((found, _), taps), (wanted, values) = both(1.5, offsets)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    for i, (message, value) in enumerate(zip(wanted[1], values, strict=True)):
        close(taps[f"step {i}"].message, message)
        close(taps[f"step {i}"].value, value)


def test_with_taps_within_with_taps_takes_its_own():
    """The inner one takes the taps of its own derivative; names may come again, and the rest is for the outer one."""

    def recurrence(w, x, offsets):
        step = lambda h, offset: (ap.tap(jnp.tanh(h * w) + offset, "state"), None)
        return jnp.sum(jax.lax.scan(step, x, offsets)[0] ** 2)

    def loss(w, offset, inner_taps):
        x = ap.tap(jnp.sin(w), "state") + offset
        derivative = jax.grad(lambda w, o: recurrence(ap.tap(w, "weight"), x, o), argnums=(0, 1))
        if inner_taps:
            (to_w, _), taps = ap.with_taps(derivative)(w, jnp.zeros(3))
            return to_w + jnp.sum(taps["state"].message)
        to_w, messages = derivative(w, jnp.zeros(3))
        return to_w + jnp.sum(messages)

    gradient = lambda w: jax.value_and_grad(lambda w: loss(w, 0.0, True))(w)
    got, taps = jax.jit(ap.with_taps(gradient))(0.5)
    expected = jax.value_and_grad(loss, argnums=(0, 1))(0.5, 0.0, False)
    close(got, (expected[0], expected[1][0]))
    assert taps.keys() == {"state"}
    close(taps["state"].message, expected[1][1])

    def left(w):  # a tap within the inner function, whose message passes in the outer one
        return ap.with_taps(lambda w: ap.tap(w**2, "left") * jax.grad(lambda v: ap.tap(v**3, "own"))(w))(w)[0]

    assert ap.with_taps(jax.grad(left))(2.0)[1]["left"].message == 12
    refused(ValueError, "no message passed the tap 'left'", lambda: ap.with_taps(left)(2.0))


@jax.custom_vjp
def opaque(x):
    return jnp.sum(ap.tap(x, "inside") ** 2)


opaque.defvjp(lambda x: (opaque(x), x), lambda x, m: (m * x,))


coded = ap.rewire(lambda x: ap.tap(jnp.tanh(x), "h") ** 2, ap.rewiring.predictive_coding("tanh", steps=1))


def unused(x):
    def step(c, _):
        ap.tap(2 * c, "unused")
        return ap.tap(c, "used"), None

    return jax.lax.scan(step, x, length=2)[0]


looped = lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: x + jax.grad(lambda x: ap.tap(x, "f"))(x), x)
UNSEEN = [
    (jax.grad(lambda x: x**2), "without taps"),
    (lambda x: ap.tap(x, "a"), "no message passed the tap 'a'"),
    (jax.grad(lambda x: jax.lax.stop_gradient(ap.tap(x, "b")) * x), "no message passed the tap 'b'"),
    (jax.grad(lambda x: ap.tap(jnp.ones(2), "c").sum() * x), "no message passed the tap 'c'"),
    (jax.grad(opaque), "no message passed the tap 'inside'"),
    (jax.grad(unused), "no message passed the tap 'unused'"),
    (jax.grad(lambda x: ap.tap(ap.tap(x, "d") * 2, "d")), "two messages passed the tap 'd'"),
    (jax.grad(coded), "two messages passed the tap 'h'.*several messages through one place.*compare the gradients"),
    (jax.grad(jax.grad(lambda x: ap.tap(x**3, "e") ** 2)), "two messages passed the tap 'e'"),
    (looped, "the tap 'f' passes inside the primitive 'while'"),
]


@pytest.mark.parametrize("function, words", UNSEEN)
def test_what_cannot_be_seen_is_an_error_that_names_the_tap(function, words):
    refused(ValueError, words, lambda: ap.with_taps(function)(1.0))


def test_what_is_tapped_is_one_array_of_floats_by_a_name():
    for tapped, words in (
        (lambda: ap.tap({"a": jnp.ones(2)}, "x"), "'x' is on a dict; tap one array"),
        (lambda: ap.tap(jnp.ones(2), "x", 3), "statistic of the tap 'x' is a function"),  # pyright: ignore
        (lambda: ap.tap(jnp.ones(2), 3), "named by a string"),  # pyright: ignore
        (lambda: ap.tap(jnp.arange(3), "n"), "the tap 'n' is on an array of dtype int32"),
    ):
        refused(TypeError, words, tapped)
