"""The report says what takes each array, what the remedies save and cost, and which policies keep nothing."""

import contextlib
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import apgrad as ap
from apgrad.memory._report import MemoryBytes
from tests.refusals import refused

R = ap.memory
X, W = jnp.ones((64, 32)), jnp.ones((32, 32)) / 32


def layer(x, w):
    with jax.named_scope("layer"):
        return checkpoint_name(jnp.tanh(x @ w), "hidden")


def test_consumers_and_remedies():
    loss = lambda w, x: jnp.sum(jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=3)[0])
    (carry,) = [r for r in R.residuals(loss, W, X) if "dot_general" in "".join(r.consumers)]
    assert carry.count == 3 and carry.linear and "layer" in carry.consumers[0]
    saved = carry.remedies()
    assert saved["recompute"][0] == saved["offload"][0] == carry.nbytes == 3 * 4 * X.size
    kept = R.nbytes(R.rounding(4), jax.ShapeDtypeStruct((3, *X.shape), X.dtype))
    assert saved["round to 4 bits"] == (carry.nbytes - kept, "variance 0.021")
    assert "round to 4 bits" in str(ap.memory_report(loss, W, X))
    small = str(ap.memory_report(lambda x: jnp.sum(jnp.sin(x) ** 2), jnp.ones(20)))
    assert "residuals kB" in small and "  80 bytes  cos" in small and "0.000" not in small.split("\nthe largest")[1]


def test_a_number_of_python_leaves_arrays_in_their_precision():
    found = R.residuals(lambda x, scale: jnp.sum(jnp.sin(x * scale)), X.astype(jnp.bfloat16), 0.5)
    assert {r.dtype for r in found if r.shape} == {jnp.dtype(jnp.bfloat16)}


def test_what_is_not_linear_or_a_number_is_not_rounded_and_work_is_that_of_its_product():
    def loss(w, x):
        h = x @ w
        return jnp.sum(jnp.sqrt(jnp.exp(h)))

    exact_remedies = {"recompute", "offload"}
    found = R.residuals(loss, W, X)
    assert all(r.linear or set(r.remedies()) == exact_remedies for r in found)
    assert max(r.work for r in found) >= 2 * X.size * 32
    number = next(r for r in R.residuals(lambda w, x: jnp.sum(x @ w) ** 2, W, X) if r.shape == () and r.linear)
    assert set(number.remedies()) == exact_remedies


@pytest.mark.parametrize("name, idle", [("hidden", False), ("hiden", True)])
def test_a_policy_that_keeps_nothing_is_warned_of(name, idle):
    """Also of what stands in a call or in a loop of the block."""
    rest = {"names_which_can_be_offloaded": [], "offload_src": "device", "offload_dst": "pinned_host"}
    policies = (
        jax.checkpoint_policies.save_only_these_names(name),
        jax.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_saved=[name], **rest),
    )
    loop = lambda x, w: jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=2)[0]
    for policy, inside in zip((*policies, policies[0]), (layer, jax.jit(layer), loop), strict=True):
        block = jax.checkpoint(inside, policy=policy)
        with pytest.warns(UserWarning, match="keeps nothing") if idle else contextlib.nullcontext():
            ap.memory_report(lambda w, x, block=block: jnp.sum(block(x, w) ** 2), W, X)


def calls(function, *args):
    """How many functions apgrad's code calls, or is called, while a function runs."""
    count, ours = 0, str(pathlib.Path(ap.__file__).parent)

    def counting(frame, event, _):
        nonlocal count
        count += event in ("call", "c_call") and frame.f_code.co_filename.startswith(ours)

    sys.setprofile(counting)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def blocks(ws, x):
    for w in ws:
        x = x + jax.nn.gelu(x @ w)
    return jnp.sum(x**2)


def table(residual, temp, *arrays):
    return str(R.MemoryReport({"reverse mode": MemoryBytes(residual, temp, arrays)}, ""))


def test_arrays_of_one_name_for_numbered_consumers_are_one_line():
    a, b = (R.Residual("x/mul", (8,), jnp.dtype("float32"), 32, consumers=(f"dense_{i}/dot_general",)) for i in (1, 2))
    assert "2 x 32 bytes  x/mul" in table(64, 64, a, b) and "for dense_*/dot_general" in table(64, 64, a, b)
    assert "2 x" not in table(64, 64, a)


def test_equal_arrays_of_numbered_scopes_are_one_line():
    def named(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"blocks_{i}"):
                x = jnp.sin(x @ w)  # of which every version of JAX remembers the cosine
        return jnp.sum(x**2)

    table = str(ap.memory_report(named, [W] * 3, X))
    assert "  3 x 8192 bytes  blocks_*/cos " in table
    assert "blocks_* (3 scopes)" in table and "blocks_0" not in table
    assert "of residuals, each: recompute -8192 bytes" in table


def test_a_report_names_what_is_kept_and_has_no_ratio_to_nothing():
    loss = lambda w, x: jnp.sum(jax.named_scope("layer")(jnp.tanh)(x @ w) ** 2)
    report = ap.memory_report(loss, W, X, variants={"checkpoint": jax.checkpoint(loss)})
    # Reverse mode keeps the value of tanh, and in newer versions of JAX 1 less its square.
    kept = "one_minus_square" if "one_minus_square" in str(jax.make_jaxpr(jax.grad(jnp.tanh))(0.5)) else "tanh"
    assert f"layer/{kept}  float32[64, 32]  test_report.py:" in str(report)
    assert report.rows["checkpoint"].residual_bytes == 0
    row = next(line for line in str(report).splitlines() if line.startswith("checkpoint"))
    assert "-" in row and "e+" not in row and len(row) < 60


@pytest.mark.parametrize("loop", [False, True])
def test_what_a_policy_moves_to_the_host_is_not_kept_on_the_device(loop):
    names = {"names_which_can_be_saved": [], "offload_src": "device", "offload_dst": "pinned_host"}
    host = jax.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_offloaded=["hidden"], **names)

    def loss(policy, w, x):
        block = jax.checkpoint(lambda x: jnp.sin(layer(x, w) @ w), policy=policy)
        return jnp.sum(jax.lax.scan(lambda x, _: (block(x), None), x, length=2)[0] if loop else block(jnp.sin(x)))

    kept = [[r.nbytes for r in R.residuals(functools.partial(loss, policy), W, X)] for policy in (host, None)]
    assert kept[0] == kept[1]
    assert len(R.residuals(functools.partial(loss, jax.checkpoint_policies.everything_saveable), W, X)) > len(kept[0])


@pytest.mark.parametrize("residual, temp, told", [(200, 100, True), (100, 200, False), (100, -1, False)])
def test_where_the_peak_falls_by_less_the_table_says_so(residual, temp, told):
    assert ("ap.memory.plan measures it" in table(residual, temp)) == told


def test_a_program_is_read_in_linear_time():
    for function in (blocks, functools.partial(ap.randomize(blocks, R.rounding(4)), jax.random.key(0))):
        small, middle, large = (calls(R.residuals, function, [W] * size, X) for size in (2, 4, 8))
        assert large - middle < 2.5 * (middle - small)


def test_without_floating_arrays_there_is_nothing_to_measure():
    words = "a floating-point array to differentiate with respect to, got "
    loss = lambda w, at, key: jnp.sum(w) * at * jax.random.normal(key)
    args, key = (jnp.ones(3), jnp.arange(2)), jax.random.key(0)
    refused(TypeError, rf"{words}int32", R.plan, loss, *args, key, budget_bytes=10, argnums=1)
    refused(TypeError, rf"{words}key<fry>.*argnums", R.plan, loss, *args, key, budget_bytes=10, argnums=2)
    refused(TypeError, rf"{words}int. Give", ap.memory_report, lambda n: n * 1.0, 3)


def test_a_function_with_an_auxiliary_output_is_an_error_that_says_what_to_do():
    both = lambda x: (jnp.sum(x), {"statistics": x})
    words = r"scalar output, got .*\[\(\), \(3,\)\].*function\(\*args\)\[0\]"
    refused(TypeError, words, ap.memory_report, both, jnp.ones(3))
