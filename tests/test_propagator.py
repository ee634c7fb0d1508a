import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apgrad as ap
from tests.cases import TRANSFORMS, cases
from tests.refusals import refused

identity = ap.Propagator(lambda x: (x, None), lambda _, m: (m,))


def scale(factor):
    return ap.Propagator(lambda x: (x, None), lambda _, m: (factor * m,))


def test_messages_add_up_at_a_fan_out_and_none_is_lost_or_counted_twice():
    # A diamond with a tail: x -> a, x -> b, (a, b) -> c, and c used twice. Paths: 2 * (2 * 3 + 5) = 22.
    double, triple, quintuple = (ap.node(scale(s)) for s in (2.0, 3.0, 5.0))

    def f(x):
        c = double(triple(x)) + quintuple(x)
        return c + c

    assert jax.grad(f)(1.0) == 22.0


@cases("way", TRANSFORMS)
@pytest.mark.parametrize("perturbed", [False, True])
def test_copies_that_differ_in_what_they_remember_alone_have_a_message_each(way, perturbed):
    """As random memories of one function by many keys: the message to a value that is not mapped is the sum of all."""
    back = lambda n, m: (m * n.astype(m.dtype), None)
    times = ap.node(ap.Propagator(lambda x, n, perturbed=None: (x, n), back), perturbed=perturbed)
    each = jax.vmap(jax.vmap(lambda x, n: way(lambda x: times(x, n))(x), (None, 0)), (None, 0))
    weights, numbers = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), np.array([[10, 0], [1, 5]], np.int32)
    mapped = jax.jit(jax.grad(lambda x: jnp.sum(weights * each(x, numbers))))
    np.testing.assert_allclose(mapped(2.0), np.sum(weights * numbers), rtol=1e-6)


@pytest.mark.parametrize("perturbed", [False, True])
def test_copies_that_differ_in_what_a_forward_closes_over_have_a_message_each(perturbed):
    def times(x, n):
        remember = lambda x, perturbed=None: (x, n)
        return ap.node(ap.Propagator(remember, lambda n, m: (m * n,)), perturbed=perturbed)(x)

    numbers = jnp.array([1.0, 2.0, 5.0])
    assert jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(times, (None, 0))(x, numbers))))(2.0) == 8.0


def test_a_backward_that_closes_over_a_mapped_array_is_told_to_take_it_from_memory():
    def times(x, n):
        return ap.node(ap.Propagator(lambda x, perturbed: (x, None), lambda _, m: (m * n,)), perturbed=True)(x)

    gradient = jax.grad(lambda x: jnp.sum(jax.vmap(times, (None, 0))(x, jnp.ones(3))))
    error = refused(jax.errors.UnexpectedTracerError, "tracer", gradient, 2.0)
    assert "such as one that jax.vmap maps" in error.__notes__[0]


def test_integer_inputs_and_keys_get_no_message():
    forward = lambda x, n, key: (x * n.astype(x.dtype) + jax.random.normal(key), n)
    f = ap.node(ap.Propagator(forward, lambda n, m: (m * n.astype(m.dtype), n, None)))
    assert jax.grad(f)(2.0, jnp.int32(3), jax.random.key(0)) == 3.0


WRONG_MESSAGES = [
    (lambda m: m, TypeError, "tuple with one message for each of its 1"),
    (lambda m: (m, m), TypeError, "each of its 1 input.*tuple of 2"),
    (lambda m: (m[:1],), ValueError, r"has shape \(1,\), the input has shape \(2,\)"),
    (lambda m: ({"a": m},), ValueError, "structure"),
    (lambda m: (jax.lax.complex(m, m),), TypeError, r"dtype complex64, the input is real.*jnp.real"),
    (lambda m: (jax.random.split(jax.random.key(0)),), TypeError, "array of numbers"),
]


@pytest.mark.parametrize("name", ["node", "chain", "combine"])
def test_wrong_messages_are_named(name):
    for answer, error, words in WRONG_MESSAGES:
        propagator = ap.Propagator(lambda x: (x, {}), lambda _, m, answer=answer: answer(m))
        if name != "node":
            same = ap.Propagator(lambda x: (x, {}), lambda _, m: (m,))
            propagator, words = getattr(ap, name)(same, propagator, same), f"propagator 1 in {name} .*{words}"
        f = ap.node(propagator)
        refused(error, words, jax.grad(lambda x, f=f: jnp.sum(f(x))), jnp.ones(2))


@pytest.mark.parametrize("wrap", [lambda p: p, ap.chain, ap.combine, ap.skip, lambda p: ap.first_order(p, "once")])
def test_forward_must_return_a_pair(wrap):
    refused(TypeError, "pair", lambda: ap.node(wrap(ap.Propagator(lambda x: x, lambda _, m: (m,))))(1.0))


@pytest.mark.parametrize("what, words", [("a", "got str"), (lambda m: 2 * m, "got function")])
def test_a_memory_of_what_is_no_array_is_named(what, words):
    f = ap.node(ap.Propagator(lambda x: (x, {"kept": what}), lambda _, m: (m,)))
    assert f(1.0) == 1.0  # which remembers nothing
    refused(TypeError, rf"memory\['kept'\] is no array.*{words}.*close over", jax.grad(f), 1.0)


class Scale:
    """An object that is no pytree, with an array in an attribute."""

    def __init__(self, t):
        self.t = t

    def forward(self, x):
        return x * self.t, None

    def __call__(self, _, m):
        return (m * self.t,)


@pytest.mark.parametrize("in_object", [False, True])
@cases("around", TRANSFORMS)
def test_a_closed_over_array_that_would_get_no_message_is_an_error(around, in_object):
    def f(t, x):
        propagator = ap.Propagator(lambda x: (x * t, None), lambda _, m: (m * t,))
        scale = Scale(t)
        return around(ap.node(ap.Propagator(scale.forward, scale) if in_object else propagator))(x)

    for g in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(lambda t, x: f(jnp.sin(t), x)))):
        words = r"closes over .* Make the array an argument of the function"
        refused(TypeError, words, g, jnp.float32(3.0), jnp.float32(2.0))


def test_closures_may_have_dictionaries_whose_keys_have_no_order():
    """Of which JAX makes no pytree; a Flax Linen module within another has one."""

    def f(t, x):
        kept = [{1: t, "one": None}]
        return ap.node(ap.Propagator(lambda x: (x * kept[0][1], None), lambda _, m: (m * kept[0][1],)))(x)

    assert jax.jit(jax.grad(f, argnums=1))(jnp.float32(3.0), jnp.float32(2.0)) == 3
    refused(TypeError, "closes over", jax.grad(f), jnp.float32(3.0), jnp.float32(2.0))


@cases("around", TRANSFORMS)
def test_arrays_that_are_only_traced_may_be_closed_over(around):
    """Of any dtype: backward's by the product rule, forward's as constants."""

    def f(t, n, x):
        kept = Scale(n)
        scale = functools.partial(lambda t, x: t * kept.t.astype(x.dtype) * x, t)
        propagator = ap.Propagator(lambda x: (scale(x), {"x": x}), lambda memory, m: (2 * scale(m) + 0 * memory["x"],))
        return around(ap.node(ap.chain(identity, propagator)))(x)

    slope = lambda t, n, x: jax.grad(lambda x: f(t, n, x))(x)
    args = jnp.array([1.5, 0.5]), jnp.array([3, 2]), jnp.array([2.0, 1.0])
    wanted = 2 * args[0] * args[1].astype(jnp.float32)
    for batched in (jax.vmap(slope), jax.jit(jax.vmap(slope)), lambda *a: jax.lax.map(lambda a: slope(*a), a)):
        np.testing.assert_allclose(batched(*args), wanted, rtol=1e-6)
    # Outside the node t is differentiated through what backward computes: d/dt of the slope.
    back = lambda t, x: around(ap.node(ap.Propagator(lambda x: (x, None), lambda _, m: (m * t**3,))))(x)
    second = jax.jit(jax.grad(lambda t: jax.grad(back, argnums=1)(t, jnp.float32(2.0))))
    np.testing.assert_allclose(second(jnp.float32(1.5)), 3 * 1.5**2, rtol=1e-6)


def test_messages_of_any_pytree_and_none_for_a_subtree_without_message():
    tree = {"a": (jnp.ones(2), jnp.ones((2, 3))), "b": jnp.ones(4, jnp.bfloat16), "n": jnp.arange(2)}
    back = lambda m, answer: {"a": answer, "b": m["x"].astype(jnp.float32), "n": m["y"]}
    f = ap.node(ap.Propagator(lambda t, x: ({"x": t["b"], "y": x}, None), lambda _, m: (back(m, None), None)))
    loss = lambda t, x: sum(map(jnp.sum, jax.tree.leaves(f(t, x)))).astype(jnp.float32)
    got, to_x = jax.grad(loss, argnums=(0, 1), allow_int=True)(tree, jnp.ones(4, jnp.bfloat16))
    chex.assert_trees_all_equal(got["a"], (jnp.zeros(2), jnp.zeros((2, 3))))
    chex.assert_trees_all_equal((got["b"], to_x), (tree["b"], 0 * tree["b"]))  # in the dtype of the input
    assert got["n"].dtype == jax.dtypes.float0


def test_a_complex_input_takes_a_real_message():
    to_complex = ap.node(ap.Propagator(lambda x: (jnp.real(x), None), lambda _, m: (m,)))
    got = jax.grad(lambda z: jnp.sum(to_complex(z)), holomorphic=False)(jnp.array([1j, 2.0]))
    assert got.dtype == jnp.complex64 and got.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("output", [lambda x: x > 0, lambda x: x.astype(jnp.int32), lambda x: (), lambda x: [x > 0]])
def test_an_output_to_which_no_message_can_come_is_an_error_where_it_is_differentiated(output):
    f = ap.node(ap.Propagator(lambda x: (output(x), None), lambda _, m: (m,)))
    f(jnp.ones(2))
    loss = lambda x: sum((jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(f(x))), jnp.sum(x))
    for g in (jax.grad(loss), jax.jit(jax.grad(loss))):
        refused(ValueError, r"no floating-point array.*ap\.skip", g, jnp.ones(2))


def test_the_message_of_an_integer_output_is_no_message():
    f = ap.node(ap.Propagator(lambda x: ((x, x > 0), None), lambda _, m: (m[1],)))
    refused(TypeError, "sent to an integer is lost", jax.grad(lambda x: jnp.sum(f(x)[0])), jnp.ones(2))


def test_an_integer_output_of_steps_goes_into_another_node():
    double = ap.node(ap.Propagator(lambda x: ((2 * x, x > 0), None), lambda _, messages: (2 * messages[0],)))
    total = lambda i: jnp.sum(jnp.where(i, 1.0, 0.0))
    times = ap.node(ap.Propagator(lambda x, i: (x * total(i), i), lambda i, m: (m * total(i), None)))
    assert jax.grad(lambda x: times(*jax.lax.scan(lambda x, _: double(x), x, length=2)))(1.0) == 8


def test_chain_gives_each_its_own_memory_nests_and_takes_several_inputs():
    square = ap.Propagator(lambda x: (x**2, x), lambda x, m: (2 * x * m,))
    assert jax.grad(ap.node(ap.chain(square, ap.chain(square, scale(3.0)))))(2.0) == 3 * 4 * 2.0**3
    f = ap.node(ap.chain(ap.backpropagation(jnp.multiply), scale(2.0)))
    assert jax.grad(f, argnums=(0, 1))(3.0, 5.0) == (10.0, 6.0)


def shared(backward):
    return ap.Propagator(lambda x: (x, {}), lambda _, m: (backward(m),))


def test_between_propagators_none_is_zeros_integers_get_nothing_and_dtypes_are_those_that_went_forward():
    pair = ap.backpropagation(lambda x: {"a": x**2, "b": (x, x**3), "n": jnp.int32(3)})
    through = ap.Propagator(lambda t: (t["a"] * 5 + t["b"][1], t["n"]), lambda n, m: ({"a": 5 * m, "b": None, "n": m},))
    ste = ap.chain(ap.skip(ap.backpropagation(lambda x: x > 0)), scale(3.0))
    seen = []
    narrow = ap.Propagator(lambda x: (x.astype(jnp.bfloat16), None), lambda _, m: (seen.append(m.dtype), m)[1:])
    for wanted, chained in (
        (0.0, ap.chain(ap.backpropagation(jnp.sin), shared(lambda m: None), scale(2.0))),
        (5 * 4.0, ap.chain(pair, through)),
        (3 * 4.0, ap.chain(ap.backpropagation(jnp.square), ste)),
        (0.0, ap.combine(shared(lambda m: 3 * m), shared(lambda m: None))),
        (1.0, ap.chain(narrow, ap.Propagator(lambda x: (x.astype(jnp.float32), None), lambda _, m: (m,)))),
    ):
        assert jax.grad(ap.node(chained))(jnp.float32(2.0)) == wanted
    assert seen == [jnp.bfloat16]
    part = ap.node(ap.combine(shared(lambda m: m), shared(lambda m: {"a": None})))
    assert jax.grad(lambda x: sum(part(x).values()))({"a": 1.0, "b": 1.0}) == {"a": 0.0, "b": 1.0}


def test_combine_refuses_a_key_written_twice_and_a_memory_that_is_no_dict():
    writes = ap.Propagator(lambda x: (x, {"k": x}), lambda memory, m: (m,))
    refused(ValueError, "same memory key 'k'", lambda: ap.node(ap.combine(writes, writes))(1.0))
    refused(TypeError, "dicts", lambda: ap.node(ap.combine(identity))(1.0))


def test_combine_merges_dict_messages_and_passes_on_what_is_not_answered():
    both = shared(lambda m: {"a": 10 * m["a"], "b": 10 * m["b"]})
    f = ap.node(ap.combine(both, shared(lambda m: {"a": 2 * m["a"]})))
    assert jax.grad(lambda x: f(x)["a"] + f(x)["b"])({"a": 1.0, "b": 1.0}) == {"a": 20.0, "b": 10.0}
    f = ap.node(ap.combine(shared(lambda m: m), shared(lambda m: {"typo": m["a"]})))
    refused(ValueError, "structure", jax.grad(lambda x: f(x)["a"]), {"a": 1.0})


def test_skip_refuses_what_it_cannot_pass_over():
    skipped = lambda f: ap.node(ap.skip(ap.backpropagation(f)))
    refused(ValueError, "same shapes", lambda: skipped(jnp.sum)(jnp.ones(3)))
    refused(TypeError, "one input, got 2", lambda: skipped(jnp.add)(1.0, 2.0))
    refused(TypeError, "complex", lambda: skipped(lambda x: x + 1j)(1.0))
    keys = ap.skip(ap.Propagator(lambda x: (jax.random.split(jax.random.key(0), 3), None), lambda _, m: (m,)))
    refused(TypeError, "no messages", lambda: ap.node(keys)(jnp.ones(3)))
    assert skipped(lambda n: n > 1)(jnp.arange(3)).dtype == bool


TO_INTEGERS = {jnp.bfloat16: lambda x: x.astype(jnp.int8), jnp.complex64: lambda x: x.real.astype(jnp.uint4)}


@pytest.mark.parametrize("dtype, function", [(jnp.float32, lambda x: x > 0), *TO_INTEGERS.items()])
def test_skip_is_straight_through_for_integers_and_booleans(dtype, function):
    x, weights = jnp.array([-1.5, 0.25, 2.0], dtype), jnp.arange(3.0).astype(dtype)
    tree = ap.node(ap.skip(ap.backpropagation(lambda t: {"a": function(t["a"]), "n": t["n"]})))
    ste = ap.node(ap.skip(ap.backpropagation(function)))
    ways = {name: TRANSFORMS[name](ste) for name in ("plain", "jit", "checkpoint")}
    ways |= {"tree": lambda x: tree({"a": x, "n": jnp.arange(2)})["a"], "vmap": jax.vmap(ste)}
    loss = lambda x, f: (jnp.sum(f(x) * weights).real, f(x))
    each = lambda x: {name: jax.grad(lambda x, f=f: loss(x, f), has_aux=True)(x) for name, f in ways.items()}
    for got, y in jax.jit(each)(x).values():
        chex.assert_trees_all_equal((got, y), (weights, function(x).astype(dtype)))


def test_all_of_empty_arrays_and_trees():
    f = ap.node(ap.chain(ap.backpropagation(lambda t: (t[0] * 2, t[1], None)), identity))
    got = jax.grad(lambda t: jnp.sum(f(t)[0]) + jnp.sum(f(t)[1]))((jnp.ones(2), jnp.ones((0, 3)), None))
    chex.assert_trees_all_equal(got, (jnp.full(2, 2.0), jnp.ones((0, 3)), None))
    ste = ap.node(ap.skip(ap.backpropagation(lambda t: (t[0] > 0, {}))))
    chex.assert_trees_all_equal(jax.grad(lambda t: jnp.sum(ste(t)[0]))((jnp.ones(0), {})), (jnp.ones(0), {}))


@pytest.mark.parametrize("make", [ap.node, ap.skip, lambda p: ap.first_order(p, "once"), ap.chain, ap.combine])
def test_what_is_no_propagator_is_named(make):
    refused(TypeError, r"takes propagators, got PjitFunction.*backpropagation", make, jnp.square)
    if make in (ap.chain, ap.combine):
        refused(ValueError, "at least one", make)
    refused(TypeError, "backpropagation takes a function", ap.backpropagation, 3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("remat", [False, True])
def test_first_order_refuses_the_second_derivative_in_a_scan_too(remat):
    f = ap.node(ap.first_order(ap.backpropagation(jnp.multiply), "once only"))
    f = jax.checkpoint(f) if remat else f
    loop = lambda x: jax.lax.scan(lambda c, _: (f(c, x), None), 1.0, length=4)[0]
    assert jax.grad(loop)(2.0) == 4 * 2.0**3
    of_the_message = jax.grad(lambda scale: jax.grad(lambda x: scale * f(x, 1.0))(2.0))  # the node's input stays
    for second in (jax.grad(jax.grad(loop)), jax.hessian(loop), jax.jit(jax.grad(jax.grad(loop))), of_the_message):
        refused(TypeError, "once only", jax.eval_shape, second, 2.0)


def test_a_learned_backward_is_differentiated_right(x64):
    # In a custom_vjp's fwd the wrapped function would be differentiated by its own, learned, rule: silently
    # wrong. The meta-gradient through five steps of a learned rule equals a finite difference.
    def backward(memory, m):
        rule, w, x = memory
        return None, jnp.tanh(rule * m * x), m * w

    learned = ap.node(ap.Propagator(lambda rule, w, x: (w * x, (rule, w, x)), backward))

    def outer(rule):
        loss = lambda w, x: (learned(rule, w, x) - jnp.sin(x)) ** 2
        w, _ = jax.lax.scan(lambda w, x: (w - 0.3 * jax.grad(loss)(w, x), None), 0.5, jnp.linspace(0.2, 1.5, 5))
        return (w - 0.9) ** 2 + w

    finite = (outer(0.7 + 1e-6) - outer(0.7 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(outer)(0.7), finite, rtol=1e-8)


REMEMBERED = ap.Propagator(lambda x: (jnp.sin(x), {"x": x}), lambda memory, m: (m * jnp.cos(memory["x"]),))
SINE = ap.backpropagation(jnp.sin)
SINES = [ap.chain(scale(2.0), SINE), ap.combine(REMEMBERED), ap.first_order(SINE, "once")]


@pytest.mark.parametrize("propagator", SINES)
def test_propagators_run_under_all_transformations(propagator):
    ap.testing.assert_transformable(ap.node(propagator), jnp.float32(0.7))
