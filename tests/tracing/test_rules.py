"""Each primitive's rule against the sum over the edges of its Jacobian and `jax.vjp`; JAX's functions, one by one."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax

import apgrad as ap
from apgrad._programs import jaxprs
from apgrad._programs.kinds import NO_DERIVATIVE
from apgrad.tracing import _sums as sums
from apgrad.tracing._equation import cast
from apgrad.tracing._interpreter import Context, walk_equation
from apgrad.tracing._paths import greedy, viterbi
from experiments.benchmarks.tracing import LOGARITHMS
from tests.cases import cases
from tests.tracing.models import MINE

RNG = np.random.default_rng(0)


def r(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def p(*shape):
    return jnp.asarray(np.abs(RNG.normal(size=shape)) + 0.2, jnp.float32)


UNARY = {
    "tanh": jnp.tanh,
    "abs": jnp.abs,
    "integer_pow": lambda x: x**-3,
    "neg": lambda x: -x,
    "convert_element_type": lambda x: x.astype(jnp.float16).astype(jnp.float32),
}
POSITIVE = {"log": jnp.log, "rsqrt": lax.rsqrt, "lgamma": lax.lgamma}
BINARY = {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "max": lax.max, "pow": lax.pow}
AT, BATCHED, window = (jnp.int32(1), jnp.int32(1)), (((2, 0), (0, 2)), ((1,), (1,))), lax.reduce_window
WINDOW = lax.GatherDimensionNumbers((1,), (), (0,))
promised = lambda x: lax.gather(x, jnp.array([[0], [2]]), WINDOW, (2,), mode="promise_in_bounds")
CONV = (2, 1), ((1, 2), (0, 1)), (1, 2), (2, 1), ("NHWC", "HWIO", "NHWC"), 2  # strides, padding, dilations, ..., groups
# family: name: (function, arguments); all floating-point arguments are active.
FAMILIES = {
    "elementwise": {
        **{name: (f, (r(2, 3),)) for name, f in UNARY.items()},
        **{name: (f, (p(2, 3),)) for name, f in POSITIVE.items()},
        **{name: (f, (p(2, 3), p(2, 3))) for name, f in BINARY.items()},
        "scalar operand": (lambda x, s: lax.mul(x, jnp.broadcast_to(s, (2, 3))), (r(2, 3), r())),
        "clamp": (lambda x: lax.clamp(-0.5, x, 0.5), (r(2, 5),)),
        "stop_gradient": (lambda x: lax.stop_gradient(x) * x, (r(3),)),
        "zero_with_gradient": (ap.zero_with_gradient, (r(3),)),
    },
    "moves": {
        "select_n": (lambda a, b: lax.select_n(jnp.array([True, False, True]), a, b), (r(3), r(3))),
        "select_n, three": (lambda a, b, c: lax.select_n(jnp.array([0, 2, 1, 2]), a, b, c), (r(4), r(4), r(4))),
        "reshape": (lambda x: x.reshape(3, 2), (r(2, 3),)),
        "squeeze": (lambda x: lax.squeeze(x, (1,)), (r(2, 1, 3),)),
        "expand_dims": (lambda x: x[:, None], (r(3),)),
        "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (r(2, 3, 4),)),
        "rev": (lambda x: lax.rev(x, (0,)), (r(3, 2),)),
        "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)), (r(1, 3),)),
        "slice": (lambda x: lax.slice(x, (1, 0), (6, 3), (2, 1)), (r(7, 4),)),
        "pad": (lambda x, v: lax.pad(x, v, ((1, 2, 1), (-1, 0, 0))), (r(3, 4), r())),
        "concatenate": (lambda a, b: lax.concatenate([a, b, a], 1), (r(2, 3), r(2, 1))),
        "split": (lambda x: lax.split(x, (1, 3), 0), (r(4, 2),)),
        "unstack": (lambda x: jnp.stack(jnp.unstack(x, axis=1)[:2], axis=1), (r(2, 3),)),
        "tile": (lambda x: jnp.tile(x, (2, 3)), (r(2, 2),)),
        "dynamic_slice": (lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(9)), (2, 2)), (r(4, 3),)),
        "dynamic_update_slice": (lambda x, u: lax.dynamic_update_slice(x, u, AT), (r(4, 3), r(2, 2))),
    },
    "moves by an index": {
        "gather": (lambda x: x[jnp.array([0, 2, 0, 2])], (r(3, 2),)),
        "gather, out of bounds": (lambda x: x.at[jnp.array([0, 7, 2])].get(mode="fill", fill_value=0.0), (r(3, 2),)),
        "gather, promised": (lambda x: x[jnp.array([0, 7, 2, -9])], (r(3, 2),)),
        "gather, a window that is promised": (promised, (r(3),)),
        "scatter-add, promised": (lambda x, u: x.at[jnp.array([0, 9])].add(u, mode="promise_in_bounds"), (r(3), r(2))),
        "scatter": (lambda x, u: x.at[jnp.array([0, 2, 0])].set(u), (r(4, 2), r(3, 2))),
        "scatter, promised": (lambda x, u: x.at[jnp.array([0, 2])].set(u, unique_indices=True), (r(4), r(2))),
        "scatter-add": (lambda x, u: x.at[jnp.array([0, 2, 0, 9])].add(u, mode="drop"), (r(4, 2), r(4, 2))),
        "scatter-sub": (lambda x, u: x.at[jnp.array([0, 2, 0])].subtract(u), (r(4), r(3))),
        "sort": (lambda x: lax.sort(x, dimension=0), (r(4, 2),)),
        "sort, two": (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (r(4), r(4))),
        "top_k": (lambda x: lax.top_k(x, 2)[0], (r(2, 4),)),
    },
    "reductions": {
        "reduce_sum": (lambda x: lax.reduce_sum(x, (0, 2)), (r(2, 3, 2),)),
        "reduce_max": (lambda x: jnp.max(x, 1), (r(2, 4),)),
        "reduce_max, tied": (lambda x: jnp.max(x, 0), (jnp.ones((3, 2)),)),
        "reduce_min": (lambda x: jnp.min(x, 0), (r(4, 2),)),
        "reduce_prod": (lambda x: jnp.prod(x, 1), (r(2, 3),)),
        "cumsum": (lambda x: lax.cumsum(x, 0), (r(4, 2),)),
        "cumsum, reversed": (lambda x: lax.cumsum(x, 1, reverse=True), (r(2, 4),)),
        "cumprod": (lambda x: lax.cumprod(x, 1), (r(2, 4),)),
        "cummax": (lambda x: lax.cummax(x, 0), (r(4, 2),)),
        "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 0), (r(4, 2),)),
    },
    "products": {
        "dot_general": (lambda a, b: lax.dot_general(a, b, BATCHED), (r(3, 2, 4), r(4, 2, 3, 2))),
        "dot_general, wide": (lambda a, b: a @ b, (r(5, 40), r(40, 3))),
        "dot_general, outer": (lambda a, b: lax.dot_general(a, b, (((), ()), ((), ()))), (r(3), r(2))),
        "ragged_dot": (lambda a, b: lax.ragged_dot(a, b, jnp.array([2, 0, 3])), (r(6, 2), r(3, 2, 4))),
    },
    "without a rule": {"cholesky": (lambda x: jnp.linalg.cholesky(x + 3 * jnp.eye(3)), (p(3, 3),))},
    "windows": {
        "conv_general_dilated": (lambda x, k: lax.conv_general_dilated(x, k, *CONV), (r(2, 5, 3, 4), r(2, 2, 2, 4))),
        "conv_general_dilated, 1d": (lambda x, k: lax.conv(x, k, (1,), "SAME"), (r(2, 2, 4), r(3, 2, 2))),
        "reduce_window_sum": (lambda x: window(x, 0.0, lax.add, (2, 3), (1, 2), ((1, 0), (0, 1))), (r(4, 6),)),
        "reduce_window_max": (lambda x: window(x, -jnp.inf, lax.max, (3, 2), (1, 2), "VALID"), (r(5, 6),)),
        "reduce_window_max, tied": (lambda x: window(x, -jnp.inf, lax.max, (2,), (1,), "VALID"), (jnp.ones(4),)),
        "reduce_window_min": (lambda x: window(x, jnp.inf, lax.min, (2,), (1,), "SAME"), (r(5),)),
    },
}
SEMIRINGS = {
    "mine": MINE,
    "max": ap.tracing.max_product(),
    "entropy": ap.tracing.entropy(),
    "logarithms": LOGARITHMS,
    "top 2": ap.tracing.top_k(2),
    "greedy, masks": greedy(1),
    "viterbi, masks": viterbi(2),
}


OUTPUTS, INPUTS = 128, 256  # the most elements that a case has on each side


def equations(function, args):
    """The equations of a function that have edges, with values for their inputs, inside calls too."""
    found = []

    def apply(eqn, values):
        real = [jnp.issubdtype(jnp.result_type(v), jnp.inexact) for v in values]
        active = tuple(a and not hasattr(v, "val") for a, v in zip(real, eqn.invars, strict=True))
        if any(active) and eqn.primitive.name not in NO_DERIVATIVE:
            found.append((eqn, values, active))
        return jaxprs.caller(eqn)(*values)

    program, _ = jaxprs.trace(function, *args)
    jaxprs.inline(program, list(args), apply)
    assert found
    return found


@functools.cache
def random_messages(name):
    """What a sum of two edges from one gives, `OUTPUTS` of them."""
    semiring = SEMIRINGS[name]
    with jax.ensure_compile_time_eval():
        one = sums.constant(semiring.one, OUTPUTS, jnp.float32)
        edges = [semiring.times(semiring.lift(r(OUTPUTS)), one) for _ in range(2)]
        return jax.tree.map(np.asarray, semiring.settle(semiring.plus(*edges)))


def messages(name, outputs):
    """Random ones to the outputs of an equation, None to integers."""
    made, first = [], 0
    for y in outputs:
        of_elements = [x[first : first + y.size].reshape(y.shape) for x in random_messages(name)]
        floats = jnp.issubdtype(y.dtype, jnp.inexact)
        made.append(cast(SEMIRINGS[name], tuple(map(jnp.asarray, of_elements)), y.dtype) if floats else None)
        first += y.size
    return made


def rule_and_edges(eqn, values, active):
    """What the rule makes of messages, by semirings, and the equation's edges: Jacobians (outputs, input)."""
    call, chosen = jaxprs.caller(eqn), [i for i, a in enumerate(active) if a]
    floats = lambda *values: [y for y in call(*values) if jnp.issubdtype(y.dtype, jnp.inexact)]
    function, primals = jaxprs.restrict(floats, values, chosen)
    outputs, pullback = jax.vjp(function, *primals)
    basis = jnp.eye(sum(y.size for y in outputs))
    ends = np.cumsum([y.size for y in outputs])[:-1]
    split = lambda row: [x.reshape(y.shape).astype(y.dtype) for x, y in zip(jnp.split(row, ends), outputs, strict=True)]
    edges = [x.reshape(len(basis), -1) for x in lax.map(lambda row: pullback(split(row)), basis)]
    answers = {}
    for name, semiring in SEMIRINGS.items():
        walked = walk_equation(Context(semiring), eqn, values, active)
        assert walked.pull is not None
        arrived = messages(name, walked.outputs)
        got = walked.pull(arrived)
        assert [m is not None for m in got] == list(active)
        answers[name] = [m for m in arrived if m], [m for m in got if m]
    return answers, edges, pullback([g for (g,) in answers["mine"][0]])


@functools.partial(jax.jit, static_argnums=0)
def over_edges(semiring, edges, message):
    """The plus, in order, of what each edge brings: from (outputs, inputs) and (outputs,) to (inputs,)."""
    brought = semiring.times(semiring.lift(edges), tuple(jnp.broadcast_to(x[:, None], edges.shape) for x in message))
    first, others = (tuple(x[part] for x in brought) for part in (0, slice(1, None)))
    return jax.lax.scan(lambda total, each: (semiring.plus(total, each), None), first, others)[0]


def padded(x, shape, filled=0):
    full = np.full(shape, filled, x.dtype)
    full[tuple(map(slice, x.shape))] = x
    return full


@pytest.mark.filterwarnings("ignore:tracing has no rule:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_rules_are_sums_over_edges(family):
    """By the definition, and with the gradient's sum by `jax.vjp` too. A case may have several equations."""
    functions = {name: function for name, (function, _) in FAMILIES[family].items()}
    of_case = lambda name, args: [rule_and_edges(*each) for each in equations(functions[name], args)]
    of_all = jax.jit(lambda given: {name: of_case(name, args) for name, args in given.items()})
    found = jax.tree.map(np.asarray, of_all({name: args for name, (_, args) in FAMILIES[family].items()}))
    for case, (answers, edges, cotangents) in ((case, each) for case, made in found.items() for each in made):
        close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6, err_msg=case)
        for name, (arrived, got) in answers.items():
            flat = [np.concatenate([x.ravel() for x in parts]) for parts in zip(*arrived, strict=True)]
            full = tuple(padded(x, OUTPUTS, zero) for x, zero in zip(flat, SEMIRINGS[name].zero, strict=True))
            for weights, message in zip(edges, got, strict=True):
                wide = padded(weights.astype(flat[0].dtype), (OUTPUTS, INPUTS))
                wanted = over_edges(SEMIRINGS[name], wide, full)
                for x, y, zero in zip(message, wanted, SEMIRINGS[name].zero, strict=True):
                    assert x.dtype == sums.form(zero, weights.dtype), case
                    close(x.ravel(), y[: x.size].astype(x.dtype))
        for (x,), wanted in zip(answers["mine"][1], cotangents, strict=True):
            close(x, wanted)


def test_unknown_primitive_is_right_with_a_warning_or_refused():
    x = jnp.eye(3) * 2 + 0.1
    loss = lambda x: jnp.sum(jnp.linalg.cholesky(x) ** 2)
    with pytest.warns(UserWarning, match="no rule for the primitive 'cholesky'"):
        got = ap.semiring_grad(loss, MINE)(x)
    for found in (got, ap.semiring_grad(loss, ap.tracing.ordinary())(x)):
        np.testing.assert_allclose(found, jax.grad(loss)(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"16,777,216.*Trace a smaller input"):
        jax.eval_shape(ap.semiring_grad(loss, MINE), jax.ShapeDtypeStruct((70, 70), jnp.float32))


def test_programs_of_scalars_and_of_cumulative_operations_are_no_larger_than_their_operations():
    program = lambda f, x: str(jax.make_jaxpr(ap.semiring_grad(f, ap.tracing.max_product()))(x))
    assert "reshape" not in program(lambda x: jnp.sin(x) * x, 0.5)
    lengths = [program(lambda x, f=f: jnp.sum(f(x)), jnp.ones(64)).count(" = ") for f in (lax.cumprod, lax.cumsum)]
    assert lengths[0] <= lengths[1]


def test_a_rounded_number_has_a_rounded_message_as_jax_grad():
    loss = lambda x, w: jnp.sum(jnp.sin(lax.reduce_precision(x * w, 5, 3) ** 2))
    args = r(20), r(20)
    found = ap.semiring_grad(loss, ap.tracing.ordinary(), (0, 1))(*args)
    jax.tree.map(np.testing.assert_array_equal, found, jax.grad(loss, (0, 1))(*args))
    # An edge of weight 1 elsewhere: rounded part by part, a message of several parts would be no message.
    assert ap.semiring_grad(lambda x: 3.0 * lax.reduce_precision(x, 5, 0), ap.tracing.max_product())(1.0) == 3.0


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["max", "top 2"])
def test_not_a_number_is_not_passed_over(name):
    """XLA's maximum on a CPU may, at a fan-out, over an axis, by an index and in products of every form."""
    semiring = SEMIRINGS[name]
    place = jnp.arange(600) % 2

    def loss(x, w):
        paths = x[0] * 2.0 + w * x[0], jnp.broadcast_to(x[1], (600,)) * w, x[2:4][place] * w
        return jnp.sum(jnp.stack(paths)) + jnp.sum((w[None, :] * jnp.ones((30, 1))) @ jnp.outer(w, x[4:]))

    at = jax.jit(ap.semiring_grad(lambda x, w: jnp.sum(loss(x, w)), semiring))
    got = at(jnp.ones(6), jnp.ones(600).at[400].set(jnp.nan)).reshape(6, -1)
    assert jnp.isnan(got[:, 0]).tolist() == [True, True, True, False, True, True]


def test_products_of_every_size():
    factors = [(p(2, count, 3), p(2, count, 4)) for count in (1, 3, 17, 64)]
    each = lambda pairs: [[sums.contract(SEMIRINGS["max"], a, (m,), s)[0] for s in (False, True)] for a, m in pairs]
    for (a, m), (plain, swapped) in zip(factors, jax.jit(each)(factors), strict=True):
        wanted = np.max(a[:, :, :, None] * m[:, :, None, :], axis=1)
        np.testing.assert_allclose(plain, wanted, rtol=1e-6)
        np.testing.assert_array_equal(np.swapaxes(swapped, 1, 2), plain)


def u(*shape):
    return jnp.asarray(RNG.uniform(0.1, 0.9, size=shape), jnp.float32)


def named(module, names, *args):
    return {name: (getattr(module, name), args) for name in names.split()}


KEY = jax.random.key(0)
INDEX = jnp.array([0, 2, 2])
OF_ANY = """abs sin cos tan tanh exp expm1 sinc arctan sign floor cbrt nan_to_num flip sort nanmean var mean median ptp
prod cumsum cumprod max trapezoid diff gradient triu diagonal trace"""
OF_TWO = """add subtract multiply divide maximum minimum arctan2 hypot logaddexp power mod copysign outer dot kron cross
convolve"""
OF_NN = """relu softplus soft_sign silu leaky_relu hard_sigmoid elu gelu glu squareplus mish logsumexp softmax
log_softmax standardize"""
GROUPS = {
    "jnp of any number": named(jnp, OF_ANY, r(3, 3)),
    "jnp of fractions": named(jnp, "arcsin arccos arctanh log log2 log1p sqrt reciprocal", u(3)),
    "jnp of two": named(jnp, OF_TWO, p(3), p(3) + 0.05),
    "nn": named(jax.nn, OF_NN, r(4, 4)),
    "special": named(jsp.special, "gammaln digamma erf erfc erfinv logit log_ndtr i0e i1e entr", u(3))
    | named(jsp.special, "betaln gammainc xlogy kl_div", u(3), p(3)),
    "indices": {
        "min": (lambda a, b: a.at[INDEX].min(b), (p(5), p(3))),
        "max": (lambda a, b: a.at[INDEX].max(b), (p(5), p(3))),
        "multiply": (lambda a, b: a.at[INDEX[:2]].multiply(b, unique_indices=True), (p(5), p(2))),
        "take": (lambda a: jnp.take(a, jnp.array([0, -1, 7]), axis=0, mode="clip"), (r(3, 2),)),
        "interp": (lambda x, f: jnp.interp(x, jnp.arange(5.0), f), (u(4) * 4, r(5))),
        "map_coordinates": (lambda a, c: jsp.ndimage.map_coordinates(a, [c], 1), (r(6), u(3) * 4)),
    },
    "lax": {
        "pow at zero": (jnp.power, (jnp.array([0.0, 2.0]), jnp.array([2.0, 0.0]))),
        "gamma": (lambda a: jax.random.gamma(KEY, a), (p(3),)),
        "dot_product_attention": (jax.nn.dot_product_attention, (r(1, 3, 2, 4), r(1, 3, 2, 4), r(1, 3, 2, 4))),
        "vmap of cond": (jax.vmap(lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x)), (r(3),)),
        "derivatives": (lambda a: jax.jvp(jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 3)), (a,), (a,))[1], (r(3),)),
        "scan, none": (lambda a: lax.scan(lambda c, x: (c * x, c), a[0], a[:0])[0], (r(3),)),
        "integers": (lambda a: a.astype(jnp.int32).astype(jnp.float32) * a, (3 * r(3),)),
    },
    # Arrays without elements, beside a scalar.
    "empty": {
        "parameter": (lambda a, b: jnp.sum(a) + b, (r(0), r())),
        "product": (lambda a, b: jnp.tanh(a @ b), (r(2, 0), r(0, 3))),
        "rows": (lambda a, b, c: jnp.sum(jnp.tanh(a @ b)) + c, (r(0, 2), r(2, 3), r())),
        "gather": (lambda a, b: jnp.sum(a[jnp.zeros(0, int)]) + b, (r(3), r())),
        "scatter": (lambda a, b: a.at[jnp.zeros(0, int)].set(b), (r(3), r(0))),
        "concatenate": (lambda a, b: jnp.concatenate([a, b]), (r(0), r(3))),
        "split": (lambda a: jnp.split(a, [0], 0)[1], (r(3),)),
        "conv": (lambda a, k: lax.conv(a, k, (1,), "VALID"), (r(0, 2, 5), r(3, 2, 3))),
        "scan": (lambda a, b: lax.scan(lambda c, x: (c * 2 + jnp.sum(jnp.cumprod(x)), x), b, a), (r(4, 0), r())),
        "cond": (lambda a, b: lax.cond(b > 0, lambda a, b: (a * 2, b), lambda a, b: (a, b * 2), a, b), (r(0), r())),
    },
}


def loss_of(function):
    def loss(*args):
        arrays = [y for y in jax.tree.leaves(function(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        weigh = lambda y: jnp.sum(y * (1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) / 7))
        return sum((weigh(y) for y in arrays), jnp.float32(0))

    return loss


@pytest.mark.filterwarnings("ignore:tracing has no rule:UserWarning")
@cases("functions", GROUPS, long=GROUPS.keys() - {"lax"})
def test_functions_of_jax(functions):
    """The sum over all paths is the gradient; of their magnitudes it is at least that, and the heaviest path's.

    The entropy is at least minus the logarithm of the heaviest path's share.
    """
    entropy = ap.tracing.entropy()
    both = entropy._replace(finish=lambda value: (value[0], entropy.finish(value)))  # the sum of magnitudes with it

    @jax.jit  # one program for the group
    def of_all(given):
        found = {}
        for name, args in given.items():
            loss, numbers = loss_of(functions[name][0]), tuple(range(len(args)))
            semirings = MINE, ap.tracing.max_product(), both
            propagated = [ap.semiring_grad(loss, semiring, numbers)(*args) for semiring in semirings]
            found[name] = list(zip(jax.grad(loss, numbers)(*args), *propagated, strict=True))
        return found

    found = jax.tree.map(np.asarray, of_all({name: args for name, (_, args) in functions.items()}))
    for name, arguments in found.items():
        for gradient, got, heaviest, (total, entropies) in arguments:
            assert got.dtype == gradient.dtype and got.shape == gradient.shape, name
            np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-5, err_msg=name)
            assert np.all(np.isfinite(gradient)) and np.all(np.isfinite(total)), name
            assert np.all(total >= heaviest * (1 - 1e-4) - 1e-6), name
            assert np.all(total >= np.abs(gradient) * (1 - 1e-3) - 1e-4), name
            assert np.all(np.isfinite(entropies)) and np.all(entropies >= -1e-3), name
            some = total > 0
            assert np.all(entropies[some] >= np.log(total[some] / heaviest[some]) - 1e-2), name
