"""What cannot be randomized rightly is refused: backward passes that are not linear. Keys of both kinds are taken."""

import contextlib
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

import apgrad as ap
from apgrad.memory._randomize import recorded
from apgrad.memory._recompute import choices
from tests.memory.unbiased import KEY, Own, assert_exact, computed_again, normal
from tests.refusals import refused

pytestmark = pytest.mark.quick

R = ap.memory
W, X = 0.3 * normal(0, 8, 8), normal(1, 16, 8)


def rule(backward):
    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, m: (backward(x, m),))
    return function


def loss(backward):
    return lambda w, x: jnp.sum(rule(backward)(x @ w) @ w)


# Of 16 rows the last seven and nine rows of a number.
filled = lambda x, number: x.at[jnp.arange(9, 25)].get(mode="fill", fill_value=number)
NOT_LINEAR = {
    "clip": lambda x, m: jnp.clip(m, -1, 1),
    "normalise": lambda x, m: m / jnp.linalg.norm(m),
    "branch": lambda x, m: jax.lax.cond(jnp.sum(m) > 1, lambda m: m / 2, lambda m: m, m),
    "constant": lambda x, m: m + x,
    "replaced": lambda x, m: jnp.where(x > 0, m, x),
    "replaced by a number": lambda x, m: jnp.where(x > 0, m, 1.0),
    "relu": lambda x, m: jax.nn.relu(m),
    "square": lambda x, m: m * m,
    "a chain of two": lambda x, m: m * jnp.cos(x) * (m * x),
    "filled": lambda x, m: m + filled(m, 1.0),
    "integers": lambda x, m: m.astype(jnp.int32).astype(m.dtype),
    "scan": lambda x, m: jax.lax.scan(lambda c, _: (c * m, None), m, length=2)[0],
    "divided by its sum": lambda x, m: m / jnp.sum(m),
    "a branch that is constant": lambda x, m: jax.lax.cond(x[0, 0] > 0, lambda m: m, lambda m: x, m),
    "halved until it is small": lambda x, m: jax.lax.while_loop(lambda m: jnp.sum(m) > 1, lambda m: m / 2, m),
}
clipped = rule(NOT_LINEAR["clip"])
around = jax.custom_jvp(clipped)
around.defjvp(lambda primals, tangents: jax.jvp(clipped, primals, tangents))
within = jax.custom_jvp(jnp.sin)
within.defjvp(lambda primals, tangents: jax.jvp(clipped, primals, tangents))
REFUSED = {name: loss(backward) for name, backward in NOT_LINEAR.items()} | {
    "without a message": lambda w, x: jnp.sum(rule(lambda x, m: jnp.cos(x))(x @ w)),  # no other meets the constant one
    "zeros that are filled": lambda w, x: jnp.sum(rule(lambda x, m: filled(jnp.zeros_like(x), 1.0))(x @ w)),
    "within a custom_jvp function": lambda w, x: jnp.sum(around(x @ w) @ w),
    "in the tangents of a custom_jvp function alone": lambda w, x: jnp.sum(within(x @ w) @ w),
}
SEEN: list[float] = []
LINEAR = {
    "printed": lambda x, m: (jax.debug.callback(lambda m: SEEN.append(float(m)), jnp.sum(m)), m * x)[1],
    "scaled": lambda x, m: jnp.cos(x) * m,
    "masked": lambda x, m: jnp.where(x > 0, m, 0.0),
    "scan": lambda x, m: jax.lax.scan(lambda c, _: (c * x, None), m, length=2)[0],
    "branch": lambda x, m: jax.lax.cond(jnp.sum(x) > 1, lambda m: m / 2, lambda m: m, m),
    "filled": lambda x, m: m + filled(m, 0.0),
    "scaled in part": lambda x, m: m.at[0].multiply(x[0, 0]),
    "sum": lambda x, m: jnp.broadcast_to(jnp.sum(m, 0), m.shape) / x.shape[0],
    "solve": lambda x, m: jnp.linalg.solve(jnp.eye(len(x)) + x @ x.T, m),
    "substitution": lambda x, m: jax.scipy.linalg.solve_triangular(jnp.eye(len(x)) + x @ x.T, m, lower=True),
}


def gradient_shape(function, *args, **options):
    random = ap.randomize(function, **({"sampler": R.rounding(4), "min_size": 16} | options))
    return jax.eval_shape(jax.grad(random, argnums=1), KEY, *args).shape


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_a_backward_pass_that_is_not_linear_is_refused(function):
    words = "not linear in the message.*fori_loop of a fixed number of steps"
    refused(TypeError, words, gradient_shape, function, W, X)
    traced = ap.semiring_grad(lambda w: function(w, X), ap.tracing.ordinary())
    refused(TypeError, words, traced, W)


def test_a_rule_without_a_custom_vjp_is_not_looked_into():
    """A sum over devices is not known to be linear."""
    summed = lambda w, x: jnp.sum(jax.lax.psum(jax.nn.relu(x @ w), "devices") @ w)
    copies = jax.vmap(lambda x: gradient_shape(summed, W, x) and x, axis_name="devices")
    assert jax.eval_shape(copies, X[None]).shape == X[None].shape


def test_zeros_that_are_kept_in_forward_are_a_message():
    kept = jax.custom_vjp(lambda x, y: x * y)
    kept.defvjp(lambda x, y: (x * y, (y, jnp.zeros_like(y))), lambda kept, m: (m * kept[0], kept[1]))
    function = lambda w, x: jnp.sum(kept(x @ w, jnp.sin(x @ w)) @ w)
    assert gradient_shape(function, W, X) == W.shape
    traced = ap.semiring_grad(lambda w: function(w, X), ap.tracing.ordinary())
    assert jax.eval_shape(traced, W).shape == W.shape


def test_linear_ones_are_not():
    total = lambda w, x: sum(loss(backward)(w, x) for backward in LINEAR.values())
    assert_exact(ap.randomize(total, R.rounding(32), min_size=16), total, W, X, rtol=1e-4, atol=1e-5)
    jax.effects_barrier()
    np.testing.assert_allclose(*SEEN, rtol=1e-5)  # by each of the two


in_part = jax.custom_vjp(lambda a, b: a * b)
in_part.defvjp(lambda a, b: (a * b, b), lambda b, m: (m * b, jnp.cos(b)))
constant = rule(lambda x, m: jnp.cos(x))
NO_MESSAGE = {"whole": REFUSED["without a message"], "filled": REFUSED["zeros that are filled"]} | {
    "in a scan": lambda w, x: jnp.sum(jax.lax.scan(lambda x, _: (constant(x @ w), None), x, length=2)[0]),
    "in part": lambda w, x: jnp.sum(jax.lax.scan(lambda w, x: (in_part(x, w), None), w, x[:, None] + 0 * w)[0]),
}


def test_what_is_exact_takes_any_backward_pass_of_messages():
    steps = lambda w, x: jnp.sum(jax.lax.scan(lambda x, _: (clipped(x @ w), None), x, length=3)[0])
    ways = [f for f in [*REFUSED.values(), steps] if f not in NO_MESSAGE.values()]
    stays = [choices(recorded(f, (W, X), [0, 1], 16))[-1].stays for f in ways]
    ours = [jax.grad(computed_again(f, s), (1, 2)) for f, s in zip(ways, stays, strict=True)]
    blocks = [lambda w, x, f=f: jax.checkpoint(f)(w, x @ w) for f in ways]
    ours += [jax.grad(ap.randomize(f, boundaries=R.rounding(32), min_size=16), (1, 2)) for f in blocks]
    run = jax.jit(lambda *args: ([f(KEY, *args) for f in ours], [jax.grad(f, (0, 1))(*args) for f in ways + blocks]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *run(W, X))
    for function in NO_MESSAGE.values():
        refused(TypeError, "not linear in the message", recorded, function, (W, X), [0, 1], 16)
        boundaries = functools.partial(gradient_shape, sampler=None, boundaries=R.rounding(8))
        refused(TypeError, "not linear in the message", boundaries, function, W, X)


def test_a_randomized_part_is_linear():
    part = ap.randomize(lambda w, x: jax.nn.relu(x @ w), R.same_sample(0.5), min_size=16)
    assert gradient_shape(lambda w, x: jnp.sum(part(KEY, w, x) @ w), W, X) == W.shape


def test_a_rule_that_is_refused_is_named():
    solved = lambda x: jnp.sum(odeint(lambda y, t: jnp.tanh(y @ W), x, jnp.linspace(0.0, 1.0, 3)))
    refused(TypeError, r"'solver/_odeint'.*\(odeint\)", gradient_shape, jax.named_scope("solver")(solved), X)


def test_what_is_no_array_reaches_the_function_as_it_is():
    def function(w, n, name, activation, *, flag=False, scale=None):
        assert (type(n), name, flag, scale) == (int, "sum", True, 2.5)
        rows = X[:n] if scale > 1 else X
        return getattr(jnp, name)(activation(rows @ w) @ w)

    args, options = (W, 3, "sum", jnp.tanh), {"flag": True, "scale": 2.5}
    random = ap.randomize(function, R.rounding(32), min_size=8)
    found = jax.jit(lambda w: jax.grad(random, argnums=1)(KEY, w, *args[1:], **options))(W)
    np.testing.assert_allclose(found, jax.grad(function)(*args, **options), rtol=1e-5, atol=1e-6)
    refused(TypeError, "first argument of a randomized function is one PRNG key", random, *args, **options)
    kept = R.residuals(functools.partial(function, **options), *args)
    assert kept and len(R.coefficients(functools.partial(function, **options), *args, min_size=8)) > 0


def test_a_number_is_a_message():
    function = lambda w: jnp.sum(jnp.sin(X @ w) @ w)
    random = functools.partial(ap.randomize(function, R.rounding(32), min_size=16), KEY)
    np.testing.assert_allclose(*[jax.vjp(f, W)[1](1.0)[0] for f in (random, function)], rtol=1e-5)
    halve = ap.node(ap.Propagator(lambda x: (x, None), lambda _, m: (m.astype(m.dtype) / 2,)))
    assert jax.vjp(halve, 3.0)[1](1.0) == (0.5,)


FOUR = R.rounding(4)
BUDGET = {"sampler": None, "budget_bytes": 9}
WRONG = {
    "not hashable": ({"sampler": SimpleNamespace(keep=FOUR.keep, restore=FOUR.restore)}, TypeError, "not hashable"),
    "half": ({"sampler": SimpleNamespace(keep=1)}, TypeError, "keep and restore, .*got .*keep=1.*, without restore$"),
    "no axis": ({"sampler": Own(lambda key, x: x)}, TypeError, r"keep of sampler is called with \(key, x, axis\)"),
    "not called": ({"sampler": R.rounding}, TypeError, "sampler is rounding itself: call it"),
    "a class": ({"sampler": type(FOUR)}, TypeError, "sampler is Rounding itself: call it"),
    "a number": ({"sampler": 4}, TypeError, "sampler must have keep and restore"),
    "through": ({"sampler": R.stratified(0.1), "through": 8}, TypeError, "through must have keep and restore"),
    "boundaries": ({"boundaries": R.rounding}, TypeError, "boundaries is rounding itself"),
    "chosen": ({"sampler": lambda c: 4}, TypeError, r"the choice for 'dot_general\[0\]' must have keep"),
    "neither": ({"sampler": None}, ValueError, "got none of them"),
    "too small a budget": (BUDGET, ValueError, "a budget of 9 bytes cannot be kept.* lower min_size"),
    "through, a budget": (BUDGET | {"through": R.rounding(8)}, ValueError, "leave out budget_bytes=9 or through="),
    "not a number": (BUDGET | {"budget_bytes": float("nan")}, ValueError, "budget_bytes must be a finite"),
    "a word": ({"min_size": "1 MB"}, ValueError, "min_size must be a finite"),
}


@pytest.mark.parametrize("options, error, words", WRONG.values(), ids=WRONG.keys())
def test_wrong_options_are_named(options, error, words):
    refused(error, words, gradient_shape, loss(LINEAR["scaled"]), W, X, **options)


def standing(where, sampler):
    """A function, its two arguments and options of `ap.randomize`, by which a sampler stands there."""
    function, args = loss(LINEAR["scaled"]), (W, X)
    if where == "an image":
        function = lambda w, x: jnp.sum(jax.lax.conv(x, w, (1, 1), "SAME") ** 2)
        args = jnp.ones((2, 3, 2, 2)), jnp.ones((4, 3, 6, 6))
    if where == "a block":
        block = jax.checkpoint(function)
        return lambda w, x: block(w, jnp.sin(x)), *args, {"sampler": R.rounding(8), "boundaries": sampler}
    return function, *args, {"sampler": sampler}


OTHER_FORMS = {r"float16\[": lambda memory: memory.astype("float16"), r"float32\[1,": lambda memory: memory[:1]}


def kept(memory, shared=False, first=lambda memory: jax.tree.leaves(memory)[0]):
    """A sampler whose memory, of every second entry, has a form of the caller's."""
    keep = lambda key, x, axis=-1: memory(jnp.take(x, jnp.arange(0, x.shape[axis], 2), axis))
    zeros = lambda like: jnp.zeros(like.shape, like.dtype)
    return Own(keep, lambda key, memory, like, axis=-1: zeros(like).at[..., ::2].set(first(memory)), shared)


@pytest.mark.parametrize("where", ["a product", "shared", "a block", "an image"])
def test_what_a_sampler_gives_in_another_form_names_the_sampler(where):
    for got, form in OTHER_FORMS.items():
        wrong = Own(restore=lambda key, memory, like, axis=-1, f=form: f(memory), shared=where == "shared")
        function, *args, options = standing(where, wrong)
        words = rf"restore of the sampler Own\(.* `like`, float32\[.* got {got}"
        refused(ValueError, words, gradient_shape, function, *args, **options)
    function, *args, options = standing(where, kept(lambda half: (half, "half"), where == "shared"))
    words = r"keep of the sampler Own\(.* is to return a pytree of arrays, got 'half'"
    refused(TypeError, words, gradient_shape, function, *args, **options)


NOT_FIRST = {
    "dict": lambda half: {"kept": half},
    "nested": lambda half: ((half,), half[:1]),
    "nothing": lambda half: (),
    "rows": lambda half: half[:1],
    "flat": lambda half: (half.reshape(-1), half[:1]),
}


@pytest.mark.parametrize("name", NOT_FIRST)
def test_a_shared_memory_that_begins_with_no_array_names_its_sampler(name):
    function = lambda w, x: jnp.sum(jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=2)[0])
    words = r"memory of the sampler Own\(.*shared=True\) is to be, or to begin with, an array .*float32\[16, \.\.\.\]"
    refused(TypeError, words, gradient_shape, function, W, X, sampler=kept(NOT_FIRST[name], shared=True))
    gradient_shape(function, W, X, sampler=kept(NOT_FIRST["dict"]))


def test_a_shared_memory_may_be_a_sequence():
    function = lambda w, x: jnp.sum(jnp.sin(x) @ w * jnp.arange(8.0))
    forms = (lambda half: (half,)), (lambda half: [half]), (lambda half: [half, jnp.ones(1)])
    first = lambda memory: memory[0]
    samplers = [kept(lambda half: half), *(kept(form, shared, first) for form in forms for shared in (False, True))]
    gradients = [jax.grad(ap.randomize(function, s, min_size=0), 1)(KEY, W, X) for s in samplers]
    np.testing.assert_allclose(gradients[1:], gradients[:1] * 6, rtol=1e-5)


def test_a_sampler_that_closes_over_a_traced_array_is_refused():
    function = lambda w, x: jnp.sum(jnp.sin(x) @ w)

    def step(scale):
        double, half = lambda key, x: x * scale, lambda memory, like: memory / scale
        for pair in ((double, lambda memory, like: memory / 2), (lambda key, x: x * 2, half)):
            refused(TypeError, "over an array that JAX tr", gradient_shape, function, W, X, sampler=R.packing(*pair))
        return scale

    jax.eval_shape(step, 2.0)


MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def test_what_shard_map_maps_can_be_randomized_and_a_linear_rule_within():
    function, specs = loss(LINEAR["scaled"]), {"mesh": MESH, "out_specs": jax.P("i")}
    random = ap.randomize(function, R.rounding(32), min_size=16)

    def mapped(f):
        each = jax.shard_map(lambda *args: f(*args)[None], in_specs=(jax.P(), jax.P("i")), check_vma=False, **specs)
        return lambda *args: jnp.sum(each(*args))

    of_key = lambda key, *args: mapped(functools.partial(random, key))(*args)
    assert_exact(of_key, mapped(function), W, X, rtol=1e-4, atol=1e-5)
    within = jax.shard_map(rule(lambda x, m: 3 * jnp.cos(x) * m), in_specs=jax.P("i"), **specs)
    total = lambda x: jnp.sum(within(jnp.tanh(jnp.sin(x))))
    assert_exact(ap.randomize(total, R.rounding(32), min_size=0), total, X)


layer = lambda w, x: jnp.tanh(x @ w)
block, policy = jax.checkpoint(layer), jax.checkpoint_policies.everything_saveable
small = lambda w, x: layer(w, x)[:2] + block(w, x[:2])
chosen = lambda name: lambda coefficient: FOUR if name in coefficient.name else None
BOUNDED, NO_BLOCK = {"min_size": 0, "boundaries": FOUR}, "boundaries have no effect: .* jax.checkpoint blocks"
FOR_NONE = "= has no effect: .* None for every array, .* with 120 "
EFFECTS = [  # a layer, options, and the words of a warning or None
    (layer, {"min_size": 512}, "nothing is sampled: .* min_size=512 .* the largest .* has 120"),
    (layer, {"min_size": 0, "sampler": chosen("misspelt")}, f"sampler{FOR_NONE}"),
    (layer, {"min_size": 0}, None),
    (layer, {"min_size": 0, "sampler": chosen("chain")}, None),
    (layer, {"min_size": 512, "sampler": None, "budget_bytes": 10_000}, None),
    (layer, BOUNDED, NO_BLOCK),
    (layer, BOUNDED | {"sampler": None, "budget_bytes": 10_000}, NO_BLOCK),
    (layer, BOUNDED | {"sampler": None, "min_size": 10_000}, NO_BLOCK),
    (jax.checkpoint(layer, policy=policy), BOUNDED, NO_BLOCK),
    (small, BOUNDED | {"min_size": 64}, NO_BLOCK),  # outside the block something is sampled
    (block, BOUNDED, None),
    (block, BOUNDED | {"sampler": chosen("misspelt")}, None),
    (block, BOUNDED | {"boundaries": chosen("misspelt")}, f"boundaries{FOR_NONE}"),
]


def test_samplers_and_boundaries_without_an_effect_are_a_warning():
    for part, options, words in EFFECTS:
        with pytest.warns(UserWarning, match=words) if words else contextlib.nullcontext():
            function = lambda w, x, part=part: jnp.sum(part(w, jnp.sin(x)) ** 2)
            gradient_shape(function, jnp.ones((6, 4)), jnp.ones((20, 6)), **options)
    powers = lambda w, x: jax.lax.scan(lambda c, _: (jnp.sin(c * w), None), x, length=600)[0]
    gradient_shape(powers, 1.0, 1.0, sampler=lambda coefficient: FOUR)  # no warning: numbers are not sampled
