"""Uses of parameters: gradients and sketches from the uses alone, against `jax.vjp` of the whole program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from apgrad._programs.jaxprs import trace
from apgrad.expectations._programs import uses
from apgrad.expectations._programs.signs import inner, random_signs
from apgrad.expectations._programs.uses import Value, ValueKind

KEY = jax.random.key(0)


draw = lambda *shape: np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape, "float32") / 2


@jax.custom_vjp
def custom(w, x):
    return x @ w


custom.defvjp(lambda w, x: (x @ w, (w, x)), lambda memory, m: (jnp.outer(memory[1], m), m @ memory[0].T))


def recurrent(p, x):
    def body(h, t):
        h = jnp.tanh(h @ p[0] + t @ p[1] + p[2])
        return h, h

    return lax.scan(body, p[3], x, reverse=True)[1]


stacked = lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w[0] + w[1]), None), x, p)[0]

views = lambda w, b: (jnp.sin(w), jnp.broadcast_to(b, (4, 5))[1:])


def carried(p, x):
    def body(carry, i):
        h, p = carry
        return (jnp.tanh(h @ p[0][i] + p[1]), p), None

    return lax.scan(body, (x, p), jnp.arange(3))[0][0]


looped = lambda w, x: lax.while_loop(lambda h: h[0] < 5, lambda h: h + w**2 * x + 1, w * x)
LINEAR = nnx.split(nnx.Sequential(nnx.Linear(5, 8, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(8, 3, rngs=nnx.Rngs(1))))
HEADS = nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=False, rngs=nnx.Rngs(0))
ATTENTION = nnx.split(HEADS, nnx.Param, ...)

W = draw(5, 7) + 1j * draw(7, 5).T
# Name: function of parameters and one lane, parameters, lane.
PROGRAMS = {
    "dense": (lambda p, x: jnp.tanh(x @ p[0] + p[1]) @ p[2], [draw(5, 7), draw(7), draw(7, 3)], draw(5)),
    "tied": (lambda p, x: jnp.tanh(x @ p[0] + p[1]) @ p[0].T, [draw(5, 7), draw(7)], draw(5)),
    "along a sequence": (lambda p, x: jax.nn.relu(2 * (x @ p[0]) - p[1]), [draw(24, 40), draw(40)], draw(9, 24)),
    "recurrent": (recurrent, [draw(4, 4), draw(5, 4), draw(4), draw(4)], draw(9, 5)),
    "stacked layers": (stacked, [draw(3, 24, 24), draw(3, 24)], draw(24)),
    "views of layers": (lambda p, x: stacked(views(*p), x), [draw(3, 5, 5), draw(5)], draw(5)),
    "parameters in the carry": (carried, [draw(3, 4, 4), draw(4)], draw(4)),
    "vmapped": (lambda p, x: jax.vmap(jnp.dot)(x, p[0]), [draw(3, 5, 20)], draw(3, 5)),
    "convolution": (lambda p, x: lax.conv(x[None], p[0], (1, 1), "SAME"), [draw(3, 2, 3, 3)], draw(2, 5, 5)),
    "embedding": (lambda p, x: p[0][jnp.array([1, 2, 1])] * x, [draw(6, 4)], draw(3, 4)),
    "normalised": (lambda p, x: x @ (p[0] / jnp.linalg.norm(p[0], axis=0)), [draw(5, 7)], draw(5)),
    "scaled view": (lambda p, x: x @ (0.3 * -p[0][:, 1:5:2].T / 2)[None, :, :], [draw(5, 7)], draw(2)),
    "reshaped": (lambda p, x: x @ p[0].reshape(5, 7) * p[1][0, None][0], [draw(35), draw(1, 7)], draw(5)),
    "loop without a message": (lambda p, x: x * p[0] + lax.stop_gradient(looped(p[0], x)), [draw(5)], draw(5)),
    "scalars": (lambda p, x: p[0] * jnp.sin(x) + p[1] ** 2, [jnp.float32(0.3), jnp.float32(2.0)], draw(5)),
    "compared with the lane": (lambda p, x: jnp.where(x > p[0], x * p[1], p[0]), [draw(5), draw(5)], draw(5)),
    "several outputs": (lambda p, x: lax.optimization_barrier((x, p[0]))[1] * x, [draw(5)], draw(5)),
    "custom_vjp": (lambda p, x: jnp.tanh(custom(p[0], x)), [draw(5, 7)], draw(5)),
    "difference": (lambda p, x: jnp.sin(x - p[0]) - p[1], [draw(5), draw(5)], draw(5)),
    "stopped gradient": (lambda p, x: jnp.tanh(x @ lax.stop_gradient(p[0])) + 2 * (x @ p[0]), [draw(4, 5)], draw(4)),
    "remat": (lambda p, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p[0], x), [draw(5, 7)], draw(5)),
    "layer norm": (lambda p, x: jax.nn.standardize(x @ p[0]) * p[1] + p[2], [draw(5, 7), draw(7), draw(7)], draw(5)),
    "an output of its own": (lambda p, x: (jnp.exp(p[0]), 2 * x, jnp.argmax(p[0])), [draw(5)], draw(5)),
    "without elements": (lambda p, x: x * p[0] + jnp.sum(p[1]), [draw(5), draw(0, 3)], draw(5)),
    "complex filter": (lambda p, x: jnp.fft.irfft(jnp.fft.rfft(x) * (p[0] + 1j * p[1])), [draw(4), draw(4)], draw(6)),
    "complex view": (lambda p, x: x * jnp.abs(p[0] + 1j * p[1]), [draw(5), draw(5)], draw(5)),
    "complex parameters": (lambda p, x: jnp.abs((x + 1j) @ p[0] + p[1] / 2j), [W, W[0]], draw(5)),
    "NNX": (lambda p, x: nnx.merge(LINEAR[0], p)(x), LINEAR[1], draw(5)),
    "attention": (lambda p, x: nnx.merge(ATTENTION[0], p, ATTENTION[2])(x), ATTENTION[1], draw(6, 4)),
}
THIN = ("dense", "tied", "along a sequence", "recurrent", "stacked layers", "vmapped", "NNX", "scaled view")


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


inputs_of = lambda leaves, lane: [*(Value(ValueKind.VIEW, p) for p in leaves), Value(ValueKind.LANE, lane)]


def parts_of(function, leaves, lane):
    """A program's operands and messages of one lane, and its gradient of the parameters, by `jax.vjp`."""
    program, shapes = trace(function, leaves, lane)
    inputs = inputs_of(leaves, lane)
    floats = [i for i, x in enumerate(jax.tree.leaves(shapes)) if jnp.issubdtype(x.dtype, jnp.floating)]

    def exposed(ports):
        outputs, operands, made = uses.expose(program, inputs, ports)
        return [outputs[i] for i in floats], (operands, made)

    made = uses.expose(program, inputs)[2]
    outputs, pullback, (operands, _) = jax.vjp(exposed, jax.tree.map(jnp.zeros_like, made), has_aux=True)
    to_outputs = [jax.random.normal(KEY, x.shape) for x in outputs]
    wanted = lambda p: [jax.tree.leaves(function(p, lane))[i] for i in floats]
    return (operands, pullback(to_outputs)[0]), jax.vjp(wanted, leaves)[1](to_outputs)[0]


signs_of = lambda leaves: [random_signs(jnp.uint32(7), i, x) for i, x in enumerate(leaves)]


def both(function, leaves, lane):
    """The gradient and the sketch by the uses, and what they are."""
    program, _ = trace(function, leaves, lane)
    parts, truth = parts_of(function, leaves, lane)
    signs, given = signs_of(leaves), (program, inputs_of(leaves, lane), *parts)
    return (uses.gradient(*given), uses.sketch(*given, signs)), (truth, inner(truth, signs))


def of_program(name):
    function, parameters, lane = PROGRAMS[name]
    leaves, structure = jax.tree.flatten(parameters)
    return lambda leaves, x: function(structure.unflatten(leaves), x), leaves, lane


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradient_and_sketch_are_those_of_the_program(name):
    function, leaves, lane = of_program(name)
    (gradient, sketch), (truth, expected) = jax.jit(lambda *args: both(function, *args))(leaves, lane)
    for array, wanted in zip(gradient, truth, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sketch, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", THIN)
def test_no_gradient_of_a_lane_is_made(name):
    # Mapped over 50 lanes: no array of the lanes times an array of parameters, nor derivatives along signs.
    function, leaves, lane = of_program(name)
    given = trace(function, leaves, lane)[0], inputs_of(leaves, lane)
    of_lanes = jax.vmap(lambda operands, messages: uses.sketch(*given, operands, messages, signs_of(leaves)))
    parts = jax.eval_shape(lambda *args: parts_of(function, *args)[0], leaves, lane)
    text = str(jax.make_jaxpr(of_lanes)(*jax.tree.map(lambda x: jax.ShapeDtypeStruct((50, *x.shape), x.dtype), parts)))
    largest = max(leaves, key=jnp.size).shape
    derivatives = [(8, *message.shape) for message in jax.tree.leaves(parts[1]) if message.ndim]
    for shape in {largest, largest[::-1], *derivatives}:
        assert f"[50,{','.join(map(str, shape))}]" not in text


def test_a_sketch_keeps_inner_products_on_average():
    # Over the signs: the mean of f . f' / 16 is the inner product, and no array's sketch correlates with another's.
    x = [draw(6, 8), draw(8), draw(), draw(8, 8), draw(5, 9) + 1j * draw(5, 9).T.reshape(5, 9)]
    y = [a + np.flip(a) / 2 for a in x]

    def product(seed):
        signs = [random_signs(seed, i, a) for i, a in enumerate(x)]
        return jnp.mean(inner(x, signs) * inner(y, signs))

    found = jax.jit(lambda: jax.vmap(product)(jax.random.bits(KEY, (10_000,), jnp.uint32)))()
    truth = sum(np.vdot(a, b).real for a, b in zip(x, y, strict=True))
    assert abs(np.mean(found) - truth) < 4 * np.std(found) / 100
    assert np.std(found) < 0.6 * truth
