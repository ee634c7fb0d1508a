"""`shard_map` read as a plain program, on eight devices: the same values and derivatives as JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

import apgrad as ap
from apgrad._programs import jaxprs

auto = jax.sharding.AxisType.Auto
mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(auto, auto))
shapes = (8, 4), (4, 3), (4, 4)
x, w, square = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes))


def turned(x):
    next_one = [(i, (i + 1) % 4) for i in range(4)]
    return lax.ppermute(x, "d", next_one), lax.all_gather(x, "d", tiled=True), lax.pmean(x, ("d", "m"))


def moved(x):
    parts = jnp.arange(4.0)[:, None] * x.sum()
    return lax.psum_scatter(parts, "d"), lax.all_to_all(parts, "d", 0, 0), lax.pmax(lax.stop_gradient(x), "m")


def steps(vma):
    varying = (lambda x: lax.pcast(x, ("d",), to="varying")) if vma else lambda x: x

    def step(c, _):
        return jnp.tanh(varying(lax.psum(c @ square, "d"))), lax.psum(c.sum(), "d")

    return lambda x: lax.scan(step, x, None, length=3)


def branch(x, w):
    sine = lambda x: jnp.sin(x @ w)
    return lax.cond(lax.axis_index("d") > 1, sine, lambda x: x @ w, x)


def drawn(x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("d"))
    return x * jax.random.normal(key, x.shape)


def divided(x, w):
    large = lax.psum(jnp.where(x[0, 0] < 9, jnp.int8(100), jnp.int8(0)), ("d", "m"))  # 800 is no int8
    return lax.psum(jnp.tanh(x @ w), "m") + lax.axis_index("d") + large.astype(x.dtype)


def smooth(x, w):
    return jax.nn.relu(x @ w).sum()[None] + jax.nn.logsumexp(jax.nn.gelu(jax.nn.silu(x)))


cases = {
    "weights and batch": (divided, (P("d", "m"), P("m")), P("d")),
    "collectives": (turned, (P(("m", "d")),), (P(("m", "d")), P(("m", "d")), P())),
    "more collectives": (moved, (P(("d", "m")),), (P(("d", "m")), P(("d", "m")), P("d"))),
    "one axis": (lambda x: lax.pmean(jnp.tanh(x), "d"), (P("d"),), P()),
    "scan": (steps, (P("d"),), (P("d"), P())),
    "functions with rules": (smooth, (P("d"), P()), P("d")),
    "checkpoint": (jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w))), (P("d"), P()), P("d")),
    "cond": (branch, (P("d"), P()), P("d")),
    "random numbers": (drawn, (P("d"),), P("d")),
}


def check(name, vma):
    f, in_specs, out_specs = cases[name]
    f = f(vma) if name == "scan" else f
    options = {"axis_names": {"d"}} if name == "one axis" else {}
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=vma, **options)
    args = (x, w)[: len(in_specs)]
    program, _ = jaxprs.trace(mapped, *args)
    assert any(eqn.primitive.name == "shard_map" for eqn in program.jaxpr.eqns)
    plain = lambda *args: jaxprs.inline(program, args)

    def all_of(f):
        loss = lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args)))
        slope = lambda *args: jnp.sum(jax.grad(loss)(*args) ** 2)
        return jax.tree.leaves((f(*args), jax.grad(loss, range(len(args)))(*args), jax.grad(slope)(*args)))

    for a, b in zip(*jax.jit(lambda: (all_of(plain), all_of(mapped)))(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=f"{name}, {vma}")


for name in cases:
    check(name, True)
    with jax.set_mesh(mesh):
        check(name, False)


# The wings, on a network whose batch and whose weights are divided.
def net(ws, x):
    a, b = ws
    return lax.pmean(jnp.mean(jnp.tanh(lax.psum(jax.nn.relu(x @ a) @ b, "m")) ** 2), "d")


mapped = jax.shard_map(net, mesh=mesh, in_specs=((P(None, "m"), P("m")), P("d")), out_specs=P())
ws, key = (square, square.T), jax.random.key(0)


def over_seeds(ws):
    lean = ap.randomize(mapped, ap.memory.rounding(8), min_size=0)
    many = jax.vmap(lambda key: jax.grad(lean, argnums=1)(key, ws, x))(jax.random.split(key, 400))
    return jax.tree.map(lambda g: (g.mean(0), g.std(0) / 20), many)


def readers(ws):
    exact = ap.randomize(mapped, ap.memory.rounding(32), min_size=0)
    first = jax.grad(exact, argnums=1)(key, ws, x)
    rule = ap.rewiring.gradient_reversal("tanh", strength=-1.0)
    found = first, ap.semiring_grad(mapped, ap.tracing.ordinary())(ws, x), jax.grad(ap.rewire(mapped, rule))(ws, x)
    return *found, jax.grad(mapped)(ws, x), over_seeds(ws)


*found, truth, seeds = jax.jit(readers)(ws)
for gradient in found:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), tuple(gradient), truth)
for (mean, error), exact in zip(seeds, truth, strict=True):
    assert (error > 0).all() and (abs(mean - exact) < 5 * error + 1e-7).all()

# A path through a loop whose carry lies elsewhere after its first step.
begin = lambda x: lax.scan(lambda c, v: (c * v, c + v), lax.pcast(jnp.ones(4), "d", to="varying"), x)[1]
summed = jax.shard_map(begin, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
assert len(ap.trace_gradients(lambda x: jnp.sum(summed(2 * x) ** 2))(x).path("x", (3, 1))) > 3

# A random memory of a batch that is spread is drawn where the batch is: the devices exchange the gradient alone.
layers = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w))
lean = jax.grad(ap.randomize(layers, ap.memory.rounding(4)), argnums=1)
spread = jax.jit(lean, in_shardings=(None, None, jax.NamedSharding(mesh, P(("d", "m")))))
wide = jax.ShapeDtypeStruct((64, 64), jnp.float32)
compiled = spread.lower(key, wide, wide).compile().as_text()
exchanges = "all-reduce", "all-gather", "all-to-all", "collective-permute"
assert [name for name in exchanges if f" {name}(" in compiled] == ["all-reduce"]
print("as JAX has it")
