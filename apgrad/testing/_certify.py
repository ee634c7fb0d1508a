"""Certificates: a function that claims to be a gradient is one, and behaves as JAX functions do.

* `bias`: the mean of many estimates is the exact gradient, as far as chance explains the difference (`bias.py`).
* `resolution`: a bias of a tenth of the gradient would be seen, else "undecided". Of 0 it names the bias it would see.
* `variance`: the variance is not above the bound that is claimed, if one is.
* `order two`: the derivative of the estimate is an unbiased estimate of the Hessian, if that is claimed.
* `jit`, `vmap`, `scan`: the estimate for a key is the same under each; under `vmap` copies' arguments differ by 1/64.
  With order two the derivative of a `scan`, where JAX may drop custom rules, is the same as under `vmap`.
* `keys`: an estimate is a function of its key, consumes no key twice (`jax.debug_key_reuse`), and is not the same for
  every key, unless `max_variance=0` claims that it is exact.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from apgrad._ground import bias
from apgrad._ground.arguments import number, require_one_of, unlike
from apgrad._ground.bias import largest_size
from apgrad.testing._moments import STANDARD_ERRORS, Moments, draw, moments_of
from apgrad.testing._transformable import nearby, stacked

__all__ = ["Certificate", "Check", "NotCertifiedError", "certify"]

_NOTHING_RANDOM = (
    ": nothing random was tested. Is it exact? Then claim max_variance=0. Or was the random part never called? "
    "ap.randomize keeps arrays of fewer than min_size entries exactly"
)


class Check(NamedTuple):
    """One test of a certificate: its name, whether the function passed, and what was found, in words."""

    name: str
    passed: bool
    found: str


class Certificate(NamedTuple):
    """What `certify` found: the function's name, the tests in the order of this module's text, and the moments."""

    name: str
    checks: tuple[Check, ...]
    moments: Moments

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        failed = [check for check in self.checks if not check.passed]
        verdict = "not certified" if failed else "certified"
        if failed and all(check.name == "resolution" for check in failed):
            verdict = f"undecided: {failed[-1].found.rpartition(': ')[2]}"
        words = {check: "open" if check.name == "resolution" else "FAIL" for check in failed}
        lines = [f"  {words.get(check, 'pass')}  {check.name:11} {check.found}" for check in self.checks]
        return "\n".join([f"{self.name}: {verdict}", *lines])


class NotCertifiedError(AssertionError):
    """Raised by `certify`: its text is the certificate, and `certificate` holds it."""

    def __init__(self, certificate: Certificate):
        super().__init__(str(certificate))
        self.certificate = certificate


def certify(
    estimate: Callable[..., Any],
    truth: Any,
    *args: Any,
    key: jax.Array | None = None,
    num_estimates: int = 10_000,
    order: int = 1,
    max_variance: Any = None,
    resolution: float = 0.1,
    batch_size: int = 100,
    rtol: float = 1e-4,
    key_reuse: bool = True,
) -> Certificate:
    """Tests a function that claims to be an unbiased estimate of a gradient, and says what it found.

    It is tested at the given arguments. What happens less than once in `num_estimates`, such as a NaN, is not seen.

    Args:
      estimate: `(key, *args) -> gradient` with respect to the first of `args`, a pytree of its structure.
      truth: the exact expectation, `(*args) -> scalar`, differentiated in float64; or, for order one, its gradient.
      *args: where the gradient is taken; the first of them is a pytree of floating-point arrays.
      key: a PRNG key, not of "rbg"; `jax.random.key(0, impl="threefry2x32")` by default.
      num_estimates: how many estimates are made, at least 2.
      order: 1, or 2 for a function whose derivative is claimed to be an estimate of the Hessian.
      max_variance: the claimed variance of one estimate: a number for all elements, or a pytree like the gradient.
      resolution: the smallest bias that the test must be able to see, in units of the largest element of the truth.
      batch_size: how many estimates are computed at once.
      rtol: how far estimates may differ between compilations, relative to each array's largest element or mean
        size; ten float32 roundings of the largest of all arrays always pass, since zeros may come out as roundings.
      key_reuse: whether to look for keys that are used twice, by JAX's checker (experimental; blind to `fold_in`).

    Raises:
      NotCertifiedError: an `AssertionError` that names the tests that failed. "Undecided" means that `resolution` alone
        failed; the certificate then says about how many samples would decide.
      ValueError, TypeError: for an order, a bound, a truth or a first argument with which nothing can be tested.

    Example:
      >>> import jax, apgrad as ap
      >>> def gradient(key, theta):
      ...     return 2 * (theta + jax.random.normal(key))
      >>> print(ap.testing.certify(gradient, lambda theta: theta**2 + 1, 1.5))
      gradient: certified
        pass  bias        ... standard errors off (10000 samples)
        pass  resolution  a bias of ... % would be seen
        pass  jit         the same
        pass  vmap        the same
        pass  scan        the same
        pass  keys        a function of the key; no key is used twice
    """
    require_one_of((1, 2), order=order)
    if order == 2 and not callable(truth):
        raise ValueError("order=2 needs the exact expectation as a function, to differentiate it twice")
    for what, bound in {"resolution": resolution, "rtol": rtol}.items():
        number(what, bound, positive=True)
    if not all(np.isfinite(limit).all() for limit in jax.tree.leaves(max_variance)):
        raise ValueError(f"max_variance of certify must be finite, or it claims nothing; got {max_variance}")
    if found := unlike(args[:1]):
        raise TypeError(f"args{found}: give it in floating point, in which it can be differentiated")
    key = jax.random.key(0, impl="threefry2x32") if key is None else key
    if "rbg" in str(jax.random.key_impl(key)):
        raise ValueError('keys of "rbg" draw other numbers under vmap: give jax.random.key(0, impl="threefry2x32")')
    gradient = _exactly(jax.grad(truth), args) if callable(truth) else truth
    samples = draw(lambda key: estimate(key, *args), key, num_estimates, batch_size)
    checks = [*_unbiased("bias", samples, gradient, resolution)]
    if max_variance is not None:
        checks.append(_variance(samples, max_variance))
    if order == 2:
        second = jax.jacrev(estimate, argnums=1)
        try:
            curvature = draw(lambda key: second(key, *args), key, num_estimates, batch_size)
        except (TypeError, ValueError, NotImplementedError) as error:
            checks.append(Check("order two", False, f"refused: {_first_line(error)}"))
            order = 1
        else:
            checks += _unbiased("order two", curvature, _exactly(jax.hessian(truth), args), resolution)
    keys = jax.random.split(jax.random.fold_in(key, 1), 3)
    # Few estimates are compared, and all of them may be zero but for rounding.
    usual = jax.tree.map(lambda x: largest_size(np.mean(np.abs(x), axis=0)), samples)
    checks += _transformations(estimate, args, keys, functools.partial(_same, rtol=rtol, usual=usual), order)
    certain = max_variance is not None and not any(np.any(claim) for claim in jax.tree.leaves(max_variance))
    checks.append(_keys(estimate, args, keys[0], key_reuse, samples, certain))
    certificate = Certificate(getattr(estimate, "__name__", "estimate"), tuple(checks), moments_of(samples))
    if not certificate.passed:
        raise NotCertifiedError(certificate)
    return certificate


def _exactly(function, args):

    def widen(x):
        floating = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.asarray(x, jnp.float64) if floating else jnp.asarray(x)

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, function(*jax.tree.map(widen, args)))


def _unbiased(what, samples, truth, resolution: float) -> Iterator[Check]:
    worst, number = bias.distance(samples, truth, STANDARD_ERRORS), len(jax.tree.leaves(samples)[0])
    right = worst.off <= worst.bound
    yield Check(what, right, f"{worst.off:.1f} standard errors off ({number} samples)" if right else worst.words)
    scale, visible = largest_size(truth), worst.visible
    average = "; of elements that few samples reach, in their root mean square" if worst.on_average else ""
    if not right:
        return
    if scale == 0:
        yield Check("resolution", True, f"a bias of {visible:.2g} would be seen{average}, where the truth is 0")
        return
    of = " of the largest element" if sum(map(np.size, jax.tree.leaves(truth))) > 1 else ""
    words = f"a bias of {100 * visible / scale:.2g} %{of} would be seen{average}"
    if visible > resolution * scale:
        needed = number * min(visible / (resolution * scale), 1e9) ** 2
        digit = 10 ** max(0, int(np.log10(needed)) - 1)  # two digits say enough
        about = f"raise num_estimates to about {int(-(-needed // digit) * digit)}"
        advice = about if needed < 1e9 else "no number of estimates is enough"
        yield Check("resolution", False, f"only {words}, not one of {100 * resolution:g} %: {advice}")
    else:
        yield Check("resolution", True, words)


def _variance(samples, claimed) -> Check:
    if jax.tree.structure(claimed) != jax.tree.structure(samples):
        claimed = jax.tree.map(lambda _: claimed, samples)
    joined = lambda leaves: np.concatenate([np.reshape(x, (len(x), -1)) for x in leaves], axis=1)
    # In units of each array's largest number, whose square may be no float64 number.
    units = joined([np.full((1, *x.shape[1:]), largest_size(x) or 1.0) for x in jax.tree.leaves(samples)])
    each = joined(jax.tree.leaves(samples)) / units

    def limit_of(x, claim):
        try:
            return np.broadcast_to(np.asarray(claim, float), (1, *x.shape[1:]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"max_variance is a number, or of shape {x.shape[1:]} here; got {claim!r}") from error

    limits = jax.tree.map(limit_of, samples, claimed)
    (claim,), mean, variance = joined(jax.tree.leaves(limits)), each.mean(axis=0), each.var(axis=0, ddof=1)
    if not variance.size:
        return Check("variance", True, "no elements")
    # The variance of a sample variance is (fourth central moment - variance^2) / n, up to O(1 / n^2).
    error = np.sqrt(np.maximum(np.mean((each - mean) ** 4, axis=0) - variance**2, 0) / len(each))
    with np.errstate(over="ignore"):
        limit, unit = claim / units[0] / units[0], units[0]
    rounding = 1e-5 * np.abs(limit) + 1e-12
    excess = np.where(variance > limit + rounding, (variance - limit) / np.maximum(error, 1e-300), 0.0)
    at, bound = np.argmax(excess), -special.ndtri(special.ndtr(-STANDARD_ERRORS) / variance.size)
    with np.errstate(over="ignore"):
        variance, error = (x[at] * unit[at] * unit[at] for x in (variance, error))
    words = f"{variance:.4g} ± {error:.2g}, claimed {claim[at]:.4g}"
    return Check("variance", bool(excess[at] <= bound), words)


def _transformations(estimate, args, keys, same, order: int) -> Iterator[Check]:
    own = [estimate(key, *args) for key in keys]
    expected, copies = stacked(own), [nearby(args, number) for number in range(len(keys))]
    others = [estimate(key, *copy) for key, copy in zip(keys[1:], copies[1:], strict=True)]
    lanes = stacked([own[0], *others])  # the first copy is the arguments themselves

    def scanned(keys, *args):
        return jax.lax.scan(lambda carry, key: (carry, estimate(key, *args)), None, keys)[1]

    def slope_of_scan(*args):
        total = lambda *args: jax.tree.map(lambda x: jnp.sum(x, axis=0), scanned(keys, *args))
        return jax.jacrev(total)(*args)

    yield same("jit", lambda: stacked([jax.jit(estimate)(key, *args) for key in keys]), expected)
    yield same("vmap", lambda: jax.jit(jax.vmap(estimate))(keys, *stacked(copies)), lanes)
    yield same("scan", lambda: jax.jit(scanned)(keys, *args), expected)
    if order == 2:
        slope = jax.jit(lambda keys: jax.vmap(lambda key: jax.jacrev(estimate, argnums=1)(key, *args))(keys))
        slopes = jax.tree.map(lambda x: np.sum(x, axis=0), slope(keys))
        yield same("scan, two", lambda: jax.jit(slope_of_scan)(*args), slopes)


def _same(name: str, function, expected, *, rtol: float, usual: Any) -> Check:
    try:
        got = jax.tree.map(np.asarray, function())
    except Exception as error:  # whatever a transformation raises is the finding
        return Check(name, False, f"raises {type(error).__name__}: {_first_line(error)}")
    tiny = max(
        (float(jnp.finfo(x.dtype).tiny) for x in jax.tree.leaves(got) if jnp.issubdtype(x.dtype, jnp.floating)),
        default=1e-300,
    )
    floor = max(bias.ROUNDING / rtol * max(largest_size(expected), largest_size(usual)), tiny)

    def far_of(most, a, b):  # `a` and `b` are trees where they are derivatives of a leaf
        distances = jax.tree.map(lambda a, b: np.where(np.isnan(a - b), np.inf, a - b), a, b)
        pairs = zip(jax.tree.leaves(distances), jax.tree.leaves(b), strict=True)
        far = (float(np.max(abs(d), initial=0.0)) / max(largest_size(x), most, floor) for d, x in pairs)
        return max(far, default=0.0)

    far = max(jax.tree.leaves(jax.tree.map(far_of, usual, got, expected)), default=0.0)
    same = bool(far <= rtol)
    return Check(name, same, "the same" if same else f"other estimates, by {far:.2g} of the largest")


def _keys(estimate, args, key, key_reuse: bool, samples, exact: bool) -> Check:
    first, again = (jax.tree.leaves(jax.tree.map(np.asarray, estimate(key, *args))) for _ in range(2))
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again, strict=True)):
        return Check("keys", False, "two calls with one key differ: the estimate has a hidden state")
    if all(np.array_equal(x, np.broadcast_to(x[:1], x.shape), equal_nan=True) for x in jax.tree.leaves(samples)):
        return Check("keys", exact, "the same for every key" + ("" if exact else _NOTHING_RANDOM))
    if not key_reuse:
        return Check("keys", True, "a function of the key")
    data, implementation = jax.random.key_data(key), jax.random.key_impl(key)
    with jax.debug_key_reuse(True):
        try:
            # A new key, since the checker remembers which keys were consumed.
            jax.jit(lambda data: estimate(jax.random.wrap_key_data(data, impl=implementation), *args))(data)
        except jax.errors.KeyReuseError as error:
            return Check("keys", False, f"a key is used twice: {_first_line(error)}")
    return Check("keys", True, "a function of the key; no key is used twice")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
