"""JAX's own functions, one by one: `ordinary` against `jax.grad`, and what other semirings must satisfy."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax

import apgrad as ap
from tests.cases import cases

RNG = np.random.default_rng(1)


def r(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def p(*shape):
    return jnp.asarray(np.abs(RNG.normal(size=shape)) + 0.2, jnp.float32)


def u(*shape):
    return jnp.asarray(RNG.uniform(0.1, 0.9, size=shape), jnp.float32)


def spd():
    a = r(3, 3)
    return a @ a.T + 3 * jnp.eye(3)


def named(module, names, *args):
    return {name: (getattr(module, name), args) for name in names.split()}


KEY = jax.random.key(0)
INDEX = jnp.array([0, 2, 2])
GROUPS = {
    "jnp of any number": named(
        jnp,
        """abs sin cos tan tanh exp expm1 sinc arctan sign floor cbrt nan_to_num flip sort nanmean var mean median ptp
        prod cumsum cumprod max trapezoid diff gradient triu diagonal trace""",
        r(3, 3),
    ),
    "jnp of fractions": named(jnp, "arcsin arccos arctanh log log2 log1p sqrt reciprocal", u(3)),
    "jnp of two": named(
        jnp,
        """add subtract multiply divide maximum minimum arctan2 hypot logaddexp power mod copysign outer dot kron cross
        convolve""",
        p(3),
        p(3) + 0.05,
    ),
    "nn": named(
        jax.nn,
        """relu softplus soft_sign silu leaky_relu hard_sigmoid elu gelu glu squareplus mish logsumexp softmax
        log_softmax standardize""",
        r(4, 4),
    ),
    "special": named(jsp.special, "gammaln digamma erf erfc erfinv logit log_ndtr i0e i1e entr", u(3))
    | named(jsp.special, "betaln gammainc xlogy kl_div", u(3), p(3)),
    "indices": {
        "min": (lambda a, b: a.at[INDEX].min(b), (p(5), p(3))),
        "max": (lambda a, b: a.at[INDEX].max(b), (p(5), p(3))),
        "multiply": (lambda a, b: a.at[INDEX[:2]].multiply(b, unique_indices=True), (p(5), p(2))),
        "take": (lambda a: jnp.take(a, jnp.array([0, -1, 7]), axis=0, mode="clip"), (r(3, 2),)),
        "interp": (lambda x, f: jnp.interp(x, jnp.arange(5.0), f), (u(4) * 4, r(5))),
        "bincount": (lambda w: jnp.bincount(jnp.array([0, 1, 1]), w, length=3), (r(3),)),
        "quantile": (lambda x: jnp.quantile(x, jnp.array([0.1, 0.5]), axis=0), (r(5, 2),)),
        "one_hot": (lambda a: a * jax.nn.one_hot(jnp.arange(3), 3), (r(3, 3),)),
        "map_coordinates": (lambda a, c: jsp.ndimage.map_coordinates(a, [c], 1), (r(6), u(3) * 4)),
        "resize": (lambda a: jax.image.resize(a, (5, 7), "cubic"), (r(3, 4),)),
    },
    "lax": {
        "reduce": (lambda a: lax.reduce(a, np.float32(1), lax.mul, (0,)), (r(3, 2),)),
        "associative_scan": (lambda a: lax.associative_scan(jnp.multiply, a), (r(5),)),
        "map": (lambda a: lax.map(jnp.sin, a, batch_size=2), (r(5),)),
        "conv_transpose": (lambda a, k: lax.conv_transpose(a, k, (2,), "SAME"), (r(1, 4, 2), r(3, 2, 3))),
        "pow at zero": (jnp.power, (jnp.array([0.0, 2.0]), jnp.array([2.0, 0.0]))),
        "gamma": (lambda a: jax.random.gamma(KEY, a), (p(3),)),
        "multivariate_normal": (lambda m: jax.random.multivariate_normal(KEY, m, jnp.eye(3)), (r(3),)),
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
        "sort": (lambda a, b: jnp.sum(jnp.sort(a)) + b, (r(0), r())),
        "cumprod": (lambda a, b: jnp.sum(jnp.cumprod(a)) + b, (r(0), r())),
        "cumsum": (lambda a, b: jnp.sum(jnp.cumsum(a)) + b, (r(0), r())),
        "prod": (lambda a, b: jnp.prod(a) + b, (r(0), r())),
        "cholesky": (lambda a, b: jnp.sum(jnp.linalg.cholesky(a)) + b, (r(0, 0), r())),
        "gather": (lambda a, b: jnp.sum(a[jnp.zeros(0, int)]) + b, (r(3), r())),
        "scatter": (lambda a, b: a.at[jnp.zeros(0, int)].set(b), (r(3), r(0))),
        "concatenate": (lambda a, b: jnp.concatenate([a, b]), (r(0), r(3))),
        "split": (lambda a: jnp.split(a, [0], 0)[1], (r(3),)),
        "pad": (lambda a, b: jnp.pad(a, 1) * b, (r(0), r())),
        "top_k": (lambda a, b: jnp.sum(lax.top_k(a, 0)[0]) + b, (r(3), r())),
        "conv": (lambda a, k: lax.conv(a, k, (1,), "VALID"), (r(0, 2, 5), r(3, 2, 3))),
        "window": (lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"), (r(0, 4),)),
        "scan": (lambda a, b: lax.scan(lambda c, x: (c * 2 + jnp.sum(jnp.cumprod(x)), x), b, a), (r(4, 0), r())),
        "cond": (lambda a, b: lax.cond(b > 0, lambda a, b: (a * 2, b), lambda a, b: (a, b * 2), a, b), (r(0), r())),
    },
}
T = ap.tracing


def loss_of(function):
    def loss(*args):
        arrays = [y for y in jax.tree.leaves(function(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        weigh = lambda y: jnp.sum(y * (1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) / 7))
        return sum((weigh(y) for y in arrays), jnp.float32(0))

    return loss


@pytest.mark.filterwarnings("ignore:tracing has no rule:UserWarning")
@cases("functions", GROUPS, long=GROUPS.keys() - {"lax"})
def test_functions_of_jax(functions):
    entropy = T.entropy()
    both = entropy._replace(finish=lambda value: (value[0], entropy.finish(value)))  # the sum of all paths with it
    semirings = [T.ordinary(), T.max_product(), both]

    @jax.jit  # one program for the group
    def of_all(given):
        found = {}
        for name, args in given.items():
            loss, numbers = loss_of(functions[name][0]), tuple(range(len(args)))
            propagated = [ap.semiring_grad(loss, s, numbers)(*args) for s in semirings]
            found[name] = list(zip(jax.grad(loss, numbers)(*args), *propagated, strict=True))
        return found

    found = jax.tree.map(np.asarray, of_all({name: args for name, (_, args) in functions.items()}))
    for name, arguments in found.items():
        for gradient, got, heaviest, (total, entropy) in arguments:
            assert got.dtype == gradient.dtype and got.shape == gradient.shape, name
            np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-5, err_msg=name)
            assert np.all(np.isfinite(gradient)) and np.all(np.isfinite(total)), name
            assert np.all(total >= heaviest * (1 - 1e-4) - 1e-6), name
            assert np.all(total >= np.abs(gradient) * (1 - 1e-3) - 1e-4), name
            # The entropy is at least minus the logarithm of the heaviest path's share.
            assert np.all(np.isfinite(entropy)) and np.all(entropy >= -1e-3), name
            some = total > 0
            assert np.all(entropy[some] >= np.log(total[some] / heaviest[some]) - 1e-2), name
