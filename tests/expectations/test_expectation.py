import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flax import nnx

import apgrad as ap
from tests.expectations.programs import paid
from tests.refusals import refused

KEY = jax.random.key(0)
COMPILED = []
listen = lambda name, *_, **__: COMPILED.append(name) if "backend_compile" in name else None
jax.monitoring.register_event_duration_secs_listener(listen)
ESTIMATORS = {"rp": ap.reparameterization, "lr": ap.likelihood_ratio, "tp": ap.total_propagation}


def stepper(estimator):
    return ap.stochastic(ESTIMATORS[estimator]())(lambda theta, x: dist.Normal(theta + x, 1.0))


def squared(estimator):
    """A program of one step, which costs the square of the sample."""

    def program(tape, theta):
        tape, x = stepper(estimator)(tape, theta, jnp.zeros(4))
        return tape.cost(x**2), x

    return program


@pytest.mark.parametrize("estimator", ["lr", pytest.param("tp", marks=pytest.mark.long)])
def test_calls_without_jit_compile_nothing_again(estimator):
    gradient = jax.grad(ap.expectation(squared(estimator), 4, has_aux=True), argnums=1, has_aux=True)
    for i in range(2):
        gradient(jax.random.key(i), 1.0)
    before = len(COMPILED)
    for i in range(3):
        gradient(jax.random.key(i), 1.0)
    # What is compiled again at each call is also kept by JAX at each call: memory would grow.
    assert before > 0 and len(COMPILED) == before


def closed_over(step, theta, tape):
    return jax.vmap(lambda a: step(tape, theta, jnp.zeros(4) + a), out_axes=(None, 0))(jnp.arange(3.0))[0]


def scanned_inside(step, theta, tape):
    each = lambda tape, a: jax.lax.scan(lambda t, _: step(t, theta, jnp.zeros(4) + a), tape, length=2)
    return jax.vmap(each, (None, 0), (None, 0))(tape, jnp.arange(3.0))[0]


def stacked(step, theta, tape):
    def body(tape, _):
        tape, x = step(tape, theta, jnp.zeros(4))
        tape = tape.cost(x)
        return tape, tape

    return jax.lax.scan(body, tape, length=2)[1]


def as_an_argument(step, theta, tape, out=None):
    each = lambda tape, a: step(tape, theta, jnp.zeros(4) + a)
    return jax.vmap(each, (None, 0), (out, 0))(tape, jnp.arange(3.0))[0]


MAPPED = {
    "as_an_argument": as_an_argument,
    "as_an_argument_that_comes_back_mapped": functools.partial(as_an_argument, out=0),
    "closed_over": closed_over,
    "scanned_inside": scanned_inside,
    "stacked": stacked,
    "cost": lambda step, theta, tape: jax.vmap(lambda a: tape.cost(a * jnp.ones(4)))(jnp.arange(3.0)),
    "compiled_cost": lambda step, theta, tape: jax.vmap(jax.jit(lambda a: tape.cost(a * jnp.ones(4))))(jnp.arange(3.0)),
    "key": lambda step, theta, tape: jax.vmap(lambda _: tape.next_key()[0], out_axes=None)(jnp.arange(3.0)),
    "made_by_hand": lambda step, theta, tape: jax.tree.map(lambda x: jnp.stack([x, x]), tape),
}


@pytest.mark.parametrize("estimator", ["rp", "tp"])
@pytest.mark.parametrize("form", MAPPED)
def test_a_tape_with_a_batch_axis_is_refused(estimator, form):
    def program(tape, theta):
        tape = MAPPED[form](stepper(estimator), theta, tape.cost(theta * jnp.ones(4)))
        return tape.cost(jnp.ones(4))

    gradient = jax.grad(ap.expectation(program, 4), argnums=1)
    for call, theta in ((gradient, 1.0), (jax.vmap(gradient, (None, 0)), jnp.ones(2))):
        refused(ValueError, "cannot have a batch axis", jax.eval_shape, call, KEY, theta)


@pytest.mark.parametrize("estimator", ["rp", "lr"])
def test_compiled_functions_of_the_tape_within_a_program_that_is_not(estimator):
    step = stepper(estimator)
    outer = jax.jit(lambda tape, theta: step(tape, theta, jnp.zeros(4))[0].cost(theta * jnp.ones(4)))

    inner = jax.jit(lambda tape, theta: step(tape, theta, jnp.zeros(4)))
    program = paid(lambda tape, theta: inner(outer(outer(tape, theta), theta), theta), lambda x: 0 * x)
    for _ in range(2):
        assert ap.value_and_grad(program, 4)(KEY, 3.0)[0] == 6.0


def test_a_branch_of_parallel_that_uses_another_ones_sample_is_refused():
    flip = ap.stochastic(ap.likelihood_ratio())(lambda theta: dist.Bernoulli(probs=theta))

    def program(tape, theta, within=lambda f: f):
        found = {}

        def draw(tape):
            tape, found["x"] = flip(tape, theta)
            return tape, None

        def pay(tape):
            x = found["x"].astype(jnp.float32)
            return within(lambda tape: tape.cost(x))(tape), None

        return tape.parallel(draw, pay)[0]

    nested = lambda tape, theta: tape.parallel(lambda t: (program(t, theta), None), lambda t: (t, None))[0]
    in_scan = lambda tape, theta: jax.lax.scan(lambda t, _: (program(t, theta), None), tape, length=2)[0]
    for wrong in (program, lambda t, theta: program(t, theta, jax.jit), nested, in_scan):
        gradient = jax.grad(ap.expectation(wrong, 4), argnums=1)
        refused(ValueError, "made inside another branch", jax.eval_shape, gradient, KEY, 0.3)

    def right(tape, theta):
        shared = jnp.arange(4.0)
        branch = lambda tape: (lambda tape, x: (tape.cost(shared * x.astype(jnp.float32)), x))(*flip(tape, theta))
        tape, (x, y) = tape.parallel(branch, lambda tape: tape.parallel(branch, branch))
        return tape.cost((x + y[0] + y[1]).astype(jnp.float32))

    # d/dtheta of three branches' E[1.5 x], and of E[3 x].
    gradient = jax.jit(jax.grad(ap.expectation(right, 4), argnums=1))
    ap.testing.assert_unbiased(lambda key: gradient(key, 0.3), 7.5, KEY, 2000)


@pytest.mark.parametrize("estimator, options", [("rp", {}), ("lr", {}), ("tp", {}), ("tp", {"cross_fit": True})])
def test_a_derivative_of_aux_is_refused_where_it_would_lack_the_choices(estimator, options):
    def program(tape, theta):
        tape, x = squared(estimator)(tape, theta)
        return tape, {"x": x, "count": 3, "found": jnp.arange(3)}

    objective = ap.expectation(program, 4, has_aux=True, **options)
    both = ap.value_and_grad(program, 4, has_aux=True, **options)
    alone = jax.grad(lambda theta: objective(KEY, theta)[0])
    (value, gradient), found = jax.jit(lambda theta: (both(KEY, theta), alone(theta)))(1.0)
    assert value[1]["count"] == 3 and jnp.isfinite(gradient)
    np.testing.assert_allclose(found, gradient, rtol=1e-5)
    for call in (objective, jax.jit(objective)):
        of_aux = jax.grad(lambda theta, call=call: call(KEY, theta)[1]["x"].mean())
        if estimator == "rp":
            assert jax.jit(of_aux)(1.0) == 1
            continue
        refused(TypeError, "aux has no derivative", jax.eval_shape, of_aux, 1.0)


@pytest.mark.parametrize("estimator", ["rp", "lr"])
def test_a_forward_mode_derivative_of_aux_is_nan_where_it_would_lack_the_choices(estimator):
    objective = ap.expectation(squared(estimator), 4, has_aux=True)

    def derivatives(theta):
        means = lambda theta: jax.tree.map(jnp.mean, objective(KEY, theta))
        # Where aux is put aside nothing is refused, at any order.
        first, second = (d(objective, argnums=1, has_aux=True) for d in (jax.jacfwd, jax.hessian))
        return jax.jvp(means, (theta,), (1.0,))[1], first(KEY, theta), second(KEY, theta)

    (to_value, to_aux), (gradient, x), (second, _) = jax.jit(derivatives)(1.0)
    assert jnp.isfinite(to_value) and (to_aux == 1 if estimator == "rp" else jnp.isnan(to_aux))
    np.testing.assert_allclose(gradient, to_value, rtol=1e-5)
    assert jnp.isfinite(second) and jnp.isfinite(x).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_python_integers_and_bools_of_shared_arguments_are_not_traced(estimator):
    @ap.stochastic(ESTIMATORS[estimator]())
    def step(p, x):
        return dist.Normal(p["w"] * x if p["flag"] else 0 * x, float(range(1, 4)[p["n"]]))

    program = paid(lambda tape, w: step(tape, {"w": w, "flag": True, "n": 0}, jnp.ones(4)))
    jax.eval_shape(jax.grad(ap.expectation(program, 4), argnums=1), KEY, 2.0)


@pytest.mark.filterwarnings("ignore:.*the baseline averages over other data")
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_keyword_arguments_of_a_stochastic_function(estimator):
    step = stepper(estimator)

    found = lambda call: jax.jit(ap.value_and_grad(paid(call), 4, check_nan=False)).lower(KEY, 2.0).as_text()
    z = jnp.arange(4.0)
    by_position = found(lambda t, theta: step(t, theta, z))
    for by_name in (lambda t, theta: step(t, theta, x=z), lambda t, theta: step(t, x=z, theta=theta)):
        assert found(by_name) == by_position
    alone = ap.stochastic(ap.reparameterization())(lambda theta, *, x: dist.Normal(theta + x, 1.0))
    for wrong, message in (
        (lambda t, theta: step(t, theta, x=z, y=z), "unexpected keyword argument 'y'"),
        (lambda t, theta: alone(t, theta, x=z), r"by position, and \['x'\] have none"),
    ):
        refused(TypeError, message, found, wrong)


def test_argnums_are_any_integers():
    program = lambda tape, a, b: tape.cost(a * b * jnp.ones(4))
    for one in (np.int64(2), 2):
        assert jax.jit(ap.value_and_grad(program, 4, argnums=one))(KEY, 3.0, 5.0) == (15, 3)
    assert jax.jit(ap.value_and_grad(program, 4, argnums=[np.int32(2), 1]))(KEY, 3.0, 5.0)[1] == (3, 5)
    refused(TypeError, "argnums must be an integer or a sequence", ap.value_and_grad, program, 4, argnums=1.0)
    refused(ValueError, "names an argument twice", ap.grad, program, 4, argnums=(1, 2, 1))
    refused(ValueError, "argnums=3, but the objective got the key and 2", ap.grad(program, 4, argnums=3), KEY, 3.0, 5.0)
    refused(TypeError, r"argument 1\['f'\] is no array but", ap.grad(program, 4), KEY, {"f": jnp.tanh}, 5.0)
    module = nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # with a key and a count
    refused(TypeError, r"dtype uint32, which has no gradient.*nnx.split", ap.grad(program, 4), KEY, module, 5.0)


@pytest.mark.parametrize("estimator", ["lr", "tp"])
def test_no_tracer_is_kept(estimator):
    with jax.checking_leaks():
        jax.eval_shape(jax.grad(ap.expectation(squared(estimator), 4, has_aux=True), argnums=1, has_aux=True), KEY, 1.0)
