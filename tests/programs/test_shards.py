"""`shard_map` read as a plain program: the same values and derivatives as JAX's own, on eight devices."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import apgrad as ap
from apgrad import mplp
from tests import devices
from tests.expectations.programs import walk
from tests.refusals import refused

PROGRAM = (Path(__file__).parent / "on_eight_devices.py").read_text()
AUTO, EXPLICIT = (
    jax.make_mesh((1,), ("d",), axis_types=(kind,))
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
)
loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
aligned = ap.rewire(loss, ap.rewiring.feedback_alignment(jax.random.key(0)))
symmetric = ap.rewire(loss, ap.rewiring.sign_symmetry())  # of one layer, so that it is backpropagation
W = jnp.ones((4, 3))
FEEDBACK = aligned.init(W, jnp.ones((8, 4)))
by_alignment = lambda w, x: jax.grad(lambda w: aligned(FEEDBACK, w, x))(w)


@pytest.mark.long
def test_values_derivatives_and_all_wings_are_as_jax_has_them_on_eight_devices():
    assert devices.run(PROGRAM, 8) == ["as JAX has it"]


def mapped(f, mesh=AUTO):
    return jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), check_vma=False)


def gradient_shape(f):
    lean = ap.randomize(lambda x: jnp.sum(f(x)), ap.memory.rounding(8), min_size=0)
    return jax.eval_shape(jax.grad(lean, argnums=1), jax.random.key(0), jnp.ones((64, 4)))


def test_what_cannot_be_read_within_a_mesh_is_refused_with_what_helps():
    explicit = mapped(jnp.sin, EXPLICIT)
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P("d"))
    with pytest.raises(NotImplementedError, match=r"axes \('d',\) of the types \(.*Explicit.*\).* axis_types="):
        gradient_shape(lambda x: explicit(jax.device_put(x, sharding)))
    groups = lambda x: jax.lax.psum(x, "d", axis_index_groups=[[0]])
    with pytest.raises(NotImplementedError, match=r"axis_index_groups.* Apply ap.randomize to the function inside"):
        gradient_shape(mapped(groups))
    assert gradient_shape(mapped(jnp.sin)).shape == (64, 4)


def test_a_loop_whose_lanes_end_apart_is_read_within_a_mesh():
    lane = lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x + 1, x)
    assert gradient_shape(lambda x: x * jax.lax.stop_gradient(mapped(jax.vmap(lane))(x))).shape == (64, 4)


def test_what_cannot_be_read_is_one_function_where_nobody_has_to_read_it():
    """A mesh of explicit axes, JAX's default: in the mean of a node, in a report, and where no message goes."""
    explicit = jax.shard_map(jnp.sin, mesh=EXPLICIT, in_specs=jax.P(), out_specs=jax.P())
    assert ap.memory.residuals(lambda x: jnp.sum(explicit(x)), jnp.ones(64))
    rollout = walk(ap.total_propagation(), lambda theta, x: dist.Normal(explicit(theta * x), 0.1), 2, jnp.square)
    jax.eval_shape(ap.grad(rollout, lanes=8), jax.random.key(0), 2.0)
    gradient_shape(lambda x: x * explicit(jnp.ones(4)))


def test_a_report_names_what_is_within_a_mesh():
    report = ap.memory_report(lambda x: jnp.sum(mapped(lambda x: jnp.tanh(jnp.sin(x)))(x)), jnp.ones((64, 4)))
    assert "test_shards.py" in str(report)


def test_a_mesh_of_explicit_axes_is_refused_by_name_where_programs_lose_the_types_and_what_helps_does():
    x, rectified = jnp.ones((64, 4)), lambda x: jnp.sum(jax.nn.relu(jnp.sin(x)))
    lean = jax.grad(lambda x: ap.randomize(rectified, ap.memory.rounding(32), min_size=0)(jax.random.key(0), x))
    with jax.set_mesh(EXPLICIT):
        for f in (lean, ap.semiring_grad(rectified, ap.tracing.ordinary())):
            refused(NotImplementedError, r"Explicit.* wrap the function .*auto_axes", jax.eval_shape, f, x)
            wrapped = jax.sharding.auto_axes(f, axes="d", out_sharding=jax.P())
            np.testing.assert_allclose(jax.jit(wrapped)(x), jax.grad(rectified)(x), rtol=1e-6)


def test_arrays_that_are_divided_along_explicit_axes_are_refused_by_name_where_nodes_lose_the_types():
    turned = ap.rewire(loss, ap.rewiring.gradient_reversal(where="tanh"))
    layer = lambda places, w, x: mplp.dense(places["layer"], places.signal(x), w)
    network = lambda places, w, x: mplp.squared_error(places["loss"], layer(places, w, x), jnp.zeros((8, 3)))
    rule = mplp.Exact(0.1)
    learned = lambda w, x: mplp.backward(rule, network, w, mplp.init_state(rule, network, w, x), x)[0]
    noisy = ap.stochastic(ap.reparameterization())(lambda w, x: dist.Normal(x @ w, 0.1).to_event(1))
    cost = lambda tape, x: tape.cost(jnp.sum(x**2, axis=1))
    rollout = lambda tape, w, x: cost(*noisy(tape, w, x))
    grown = lambda tape, w, x: cost(*ap.clip_lanes(tape, x @ w, growth_only=True))
    expected = lambda program: functools.partial(ap.grad(program, lanes=8), jax.random.key(0))
    ways = by_alignment, jax.grad(symmetric), learned, expected(rollout), expected(grown)
    w, x = W, jax.random.normal(jax.random.key(1), (8, 4))
    with jax.set_mesh(EXPLICIT):
        divided = jax.device_put(x, jax.P("d"))
        for way in ways:
            refused(NotImplementedError, r"Explicit.* wrap the function .*auto_axes", jax.eval_shape, way, w, divided)
            wrapped = jax.jit(jax.sharding.auto_axes(way, axes="d", out_sharding=jax.P()))
            np.testing.assert_allclose(wrapped(w, divided), jax.jit(way)(w, x), rtol=1e-6)
        jax.eval_shape(jax.grad(turned), w, divided)  # a rule without them needs no types, and no output does
        np.testing.assert_allclose(jax.jit(aligned)(FEEDBACK, w, divided), loss(w, x), rtol=1e-6)
        turned_lanes = jax.device_put(x, jax.P(None, "d"))
        along = lambda tape, x: cost(*ap.clip_lanes(tape, x, growth_only=True))
        np.testing.assert_allclose(expected(along)(turned_lanes), expected(along)(x), rtol=1e-6)
        for estimator in (ap.reparameterization(), ap.total_propagation()):
            node = ap.stochastic(estimator)(lambda w, x: dist.Normal(x @ w, 0.1).to_event(1))
            way = expected(lambda tape, w, x, node=node: cost(*node(tape, w, x)))
            if isinstance(estimator, ap.Estimator):  # which needs those of the lanes' axis alone
                split = jax.device_put(w, jax.P(None, "d"))
                np.testing.assert_allclose(jax.jit(way)(split, x), jax.jit(way)(w, x), rtol=1e-5)
            else:
                refused(NotImplementedError, "Explicit", jax.eval_shape, way, jax.device_put(w, jax.P(None, "d")), x)


def test_where_shard_map_checks_what_varies_readers_that_cannot_are_refused_and_the_advice_is_right():
    paths = lambda f: ap.semiring_grad(f, ap.tracing.ordinary())
    product = ap.node(ap.Propagator(lambda w, x: (x @ w, (w, x)), lambda given, m: (given[1].T @ m, m @ given[0].T)))
    by_node = jax.grad(lambda w, x: jnp.sum(jnp.tanh(product(w, x)) ** 2))
    ways = paths(loss), lambda w, x: paths(lambda w: loss(w, x))(w), by_alignment, jax.grad(symmetric), by_node
    w, x = W, jax.random.normal(jax.random.key(1), (2, 4))
    for way in ways:
        specs = {"mesh": AUTO, "in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P()}
        every = lambda w, x, way=way: jax.lax.psum(way(w, x), "d")
        refused(TypeError, "check_vma=False only", jax.eval_shape, jax.shard_map(every, **specs), w, x)
        mapped = jax.shard_map(every, **specs, check_vma=False)
        np.testing.assert_allclose(jax.jit(mapped)(w, x), jax.grad(loss)(w, x), rtol=1e-5, atol=1e-6)
