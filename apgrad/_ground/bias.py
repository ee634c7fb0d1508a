"""Whether the mean of many estimates is the truth: one decision for all the elements of a pytree.

An unbiased estimate is called biased as rarely as a normal number is beyond ±`bound`, for any number of elements.

*Many elements.* The samples come in m blocks, with sums S_b of (estimate - truth). An element's statistic T,

    T^2 = (sum_b S_b)^2 / sum_b S_b^2,

is a growing function of Student's t with m - 1 degrees of freedom. Without bias, random signs for the blocks' sums
leave its distribution nearly as it is (the wild bootstrap). A block's elements have one sign, so that the largest T in
1,000 draws of signs shows how many independent elements, k, have so large a T. The smallest p-value is multiplied by k.

*Elements that few samples reach.* Fewer than 30 samples unlike the median make no standard error. All the elements of
such an element's array (and of any array of 30 or more) are judged together, by the U-statistic of the squared bias

    U = sum over b != c of <S_b, S_c> = sum over b != c of G_bc,

of mean 0 without bias; its tail is a chi-square's with U's moments under random signs, 0, 2 sum G^2, 8 tr G^3.

*Such elements one by one.* An element may have jumps as large as R, the largest in its array, that no sample shows. So
its mean may be off by sqrt(2 V L / n) + R L / n, L = log(2 elements / p), V the mean square of (estimate - truth)
(Bernstein's inequality). Where nothing varies, the mean may be off by ten float32 roundings: of the element, or of the
array's norm, if all the elements that are off by so little in every sample are so together.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import special

NEEDED = 30  # how many samples unlike the median make a standard error
BLOCKS = 100
TINY = 1e-150
ROUNDING = 10 * float(np.finfo(np.float32).eps)


class Distance(NamedTuple):
    """How far the mean of estimates is off where it is farthest."""

    off: float  # in standard errors; infinite for a mean that is not finite
    bound: float  # how many standard errors chance explains
    words: str  # what an error says
    visible: float = 0.0  # the smallest bias that would have been found
    # Whether `visible` is the root mean square bias of an array, some of whose elements few samples reach.
    on_average: bool = False


class _Leaf(NamedTuple):
    """One array of the estimate: samples (n, elements), and each element's truth, mean and standard error."""

    name: str
    exponent: int  # all numbers are divided by 2**exponent, so that the largest's square is a float64 number
    shape: tuple[int, ...]
    samples: np.ndarray
    truth: np.ndarray
    mean: np.ndarray
    error: np.ndarray
    rounded: np.ndarray  # off by rounding alone in every sample
    exact: np.ndarray  # off by rounding alone in every sample, or in the mean

    def sized(self, x: Any) -> Any:
        return np.ldexp(x, self.exponent)

    def mean_of(self, index: int) -> str:
        at = np.unravel_index(index, self.shape)
        where = self.name + (str(list(map(int, at))) if self.shape else "")
        mean, error, truth = (self.sized(x[index]) for x in (self.mean, self.error, self.truth))
        mean = f"mean {mean} ± {error} against {truth}"
        return f"biased{' at ' + where if where else ''}: {mean}"

    def words(self, index: int, off: float, bound: float) -> str:
        distance = f"off by {off:.1f} standard errors" if off < 1e6 else "and never near it"
        return f"{self.mean_of(index)}, {distance} ({len(self.samples)} samples; {bound:.2g} are chance)"


def distance(samples: Any, truth: Any, bound: float) -> Distance:
    """The distance of the mean of samples, float64 with the samples as leading axis, from a real and finite truth."""
    leaves = list(_leaves(samples, truth))
    for leaf in leaves:
        if not np.isfinite(leaf.mean).all():
            index = int(np.argmin(np.isfinite(leaf.mean)))
            number = np.sum(~np.isfinite(leaf.samples[:, index]))
            found = f"{number} of {len(leaf.samples)} samples are not finite" if number else "the sum overflowed"
            return Distance(np.inf, bound, f"{leaf.mean_of(index)}: {found}", np.inf)
    level = 2 * special.ndtr(-bound)
    found, dense = [Distance(0.0, bound, "no elements")], []
    for leaf in leaves:
        unlike = np.sum(leaf.samples != np.median(leaf.samples, axis=0), axis=0)
        found.append(Distance(0.0, bound, "", float(leaf.sized(ROUNDING * np.linalg.norm(leaf.truth)))))
        few = unlike < min(NEEDED, len(leaf.samples) - 1)
        dense.append((leaf, np.flatnonzero(~few)))
        together = unlike.sum() >= NEEDED and len(few) > 1
        if few.any():
            alone = _alone(leaf, few, level / len(leaves), bound)
            found.append(alone._replace(visible=0.0, on_average=True) if together else alone)
        if together and (few.any() or len(few) >= NEEDED):
            found.append(_together(leaf, level / len(leaves), few.any()))
    if any(len(where) for _, where in dense):
        found.append(_largest(dense, level))
    worst = max(found, key=lambda each: (each.off > each.bound, each.off))
    return worst._replace(visible=max(d.visible for d in found), on_average=any(d.on_average for d in found))


def _leaves(samples, truth) -> Iterator[_Leaf]:
    if jax.tree.structure(samples) != jax.tree.structure(truth):
        raise ValueError(f"estimate and truth differ: {jax.tree.structure(samples)}, {jax.tree.structure(truth)}")
    for (path, x), wanted in zip(jax.tree_util.tree_leaves_with_path(samples), jax.tree.leaves(truth), strict=True):
        name, wanted = jax.tree_util.keystr(path), np.asarray(wanted)
        if np.iscomplexobj(wanted):
            raise TypeError(f"the truth{name} is complex; give real and imaginary parts, of the estimate too")
        wanted = wanted.astype(np.float64)
        if x.shape[1:] != wanted.shape:
            raise ValueError(f"estimate{name} has shape {x.shape[1:]}, the truth {wanted.shape}")
        if not np.isfinite(wanted).all():
            raise ValueError(f"the truth{name} is not finite, so that nothing can be compared with it: {wanted}")
        if wanted.size == 0:
            continue
        exponent = int(np.frexp(largest_size((x, wanted)))[1])
        flat, wanted = (np.ldexp(y, -exponent) for y in (x.reshape(len(x), -1), wanted.reshape(-1)))
        with np.errstate(invalid="ignore"):
            mean, error = flat.mean(0), flat.std(0, ddof=1) / np.sqrt(len(flat))
            exact = np.abs(mean - wanted) <= ROUNDING * np.abs(wanted)
        rounded = _rounded(flat, wanted)
        yield _Leaf(name, exponent, x.shape[1:], flat, wanted, mean, error, rounded, exact | rounded)


def largest_size(tree: Any) -> float:
    """The largest finite size of an element."""
    sizes = (np.max(np.abs(x), initial=0.0, where=np.isfinite(x)) for x in jax.tree.leaves(tree))
    return float(max(sizes, default=0.0))


def _rounded(samples: np.ndarray, truth: np.ndarray) -> np.ndarray:
    most = np.max(np.abs(samples - truth), axis=0)
    near = most <= ROUNDING * np.linalg.norm(truth)
    return (most <= ROUNDING * np.abs(truth)) | near & (np.linalg.norm(most[near]) <= ROUNDING * np.linalg.norm(truth))


def _blocks(deviations: np.ndarray) -> np.ndarray:
    """Sums over blocks of samples, (blocks, elements). One element needs no blocks."""
    n, size = deviations.shape
    return np.add.reduceat(deviations, np.linspace(0, n, (n if size == 1 else min(n, BLOCKS)) + 1).astype(int)[:-1])


def _largest(dense, level: float) -> Distance:
    joined = lambda of: np.concatenate([of(leaf)[..., at] for leaf, at in dense], axis=-1)
    sums = _blocks(joined(lambda leaf: leaf.samples - leaf.truth))
    m, scale = len(sums), np.maximum(np.sqrt(np.sum(sums**2, axis=0)), TINY)
    T = np.where(joined(lambda leaf: leaf.exact), 0.0, np.abs(sums.sum(0)) / scale)
    k = 1.0
    if len(T) > 1:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(1000, m))
        common = np.quantile(np.max(np.abs(signs @ (sums / scale)), axis=1), 0.95)
        k = float(np.clip(np.log(0.95) / np.log1p(-2 * special.stdtr(m - 1, -_student(common, m))), 1, len(T)))
    at = int(np.argmax(T))
    off, bound = float(_student(T[at], m)), float(-special.stdtrit(m - 1, level / k / 2))
    leaf, index = [(leaf, index) for leaf, where in dense for index in where][at]
    visible = bound * float(np.max(joined(lambda leaf: leaf.sized(leaf.error))))
    return Distance(off, bound, leaf.words(index, off, bound), visible)


def _student(T: Any, m: int) -> Any:
    """Student's t of m block sums: t^2 / (m - 1) = T^2 / (m - T^2)."""
    return np.sqrt((m - 1) * T**2 / np.maximum(m - T**2, TINY))


def _together(leaf: _Leaf, level: float, seen: bool) -> Distance:
    """The test of the squared bias of all elements of an array, by U; with `seen` it says which bias it would find."""
    bound = float(-special.ndtri(level / 2))
    # An element that is off by rounding alone in every sample counts as right; if only its mean is, this may be chance.
    sums = _blocks(np.where(leaf.rounded, 0.0, leaf.samples - leaf.truth))
    G = sums @ sums.T
    np.fill_diagonal(G, 0)
    second, third = 2 * np.sum(G**2), 8 * np.trace(G @ G @ G)
    if second == 0:
        return Distance(0.0, bound, "nothing is off")
    z, freedom = G.sum() / np.sqrt(second), 8 / max(third / second**1.5, 1e-3) ** 2
    chance = special.chdtrc(freedom, max(freedom + np.sqrt(2 * freedom) * z, 0))
    off = float(-special.ndtri(chance / 2))
    rms = leaf.sized(np.sqrt(np.mean((leaf.mean - leaf.truth) ** 2)))
    words = (
        f"biased{' at ' + leaf.name if leaf.name else ''}: the {len(leaf.mean)} means are off by {rms:.3g} (root mean "
        f"square), together {off:.1f} standard errors ({len(leaf.samples)} samples; {bound:.2g} are chance)"
    )
    visible = np.sqrt(bound * np.sqrt(second) / len(leaf.mean)) / len(leaf.samples)
    return Distance(off, bound, words, float(leaf.sized(visible)) if seen else 0.0)


def _alone(leaf: _Leaf, few: np.ndarray, level: float, bound: float) -> Distance:
    n, L = len(leaf.samples), np.log(2 * few.sum() / level)
    jump = np.max(np.abs(leaf.samples - np.median(leaf.samples, axis=0)))
    square = np.mean((leaf.samples - leaf.truth) ** 2, axis=0)
    allowed = np.sqrt(2 * square * L / n) + jump * L / n if jump else np.zeros(len(few))
    off = bound * np.abs(leaf.mean - leaf.truth) / np.maximum(allowed, TINY)
    off = np.where(few & ~leaf.exact, off, 0.0)
    index = int(np.argmax(off))
    visible = float(leaf.sized(np.max(allowed[few])))
    return Distance(float(off[index]), bound, leaf.words(index, off[index], bound), visible)
