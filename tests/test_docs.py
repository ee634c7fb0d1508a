"""The Python in the README and the contributors' guide runs."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import apgrad as ap

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_readme_shows_a_gradient_in_twenty_lines():
    example, clip, policy, learned, apply, train = blocks("README.md")
    assert len([line for line in example.splitlines() if line]) <= 20
    names = {}
    exec(example, names)
    assert abs(names["gradient"] + 0.2213) < 5 * 0.06  # the exact value, and the standard deviation of an estimate
    exec(clip, names)
    assert jax.grad(lambda x: 5 * names["clip"](x))(1.0) == 1
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it
        exec(policy, names)
    assert names["costs"][-5:].mean() < 0.5 * names["costs"][0]
    exec(learned, names)
    assert jax.tree.map(jnp.shape, names["updates"]) == jax.tree.map(jnp.shape, names["params"])
    assert len(apply.splitlines()) <= 10
    exec(apply, names)
    assert names["curve"][20] > names["curve"][0] + 0.3  # data that the rule never saw
    exec("import optax\n" + train, names)


@pytest.mark.quick
def test_the_readme_names_every_public_function():
    text = (ROOT / "README.md").read_text()
    missing = {n for n in ap.__all__ if n[0].islower() and n not in text}
    assert missing <= {"zero_with_gradient", "refuse_derivative"}


@pytest.mark.parametrize("number", [0, 1])
def test_the_contributors_skeletons_run(number):
    names = {"__name__": "skeleton"}
    exec(blocks("CONTRIBUTING.md")[number], names)
    if number == 0:
        clip = ap.node(names["clip_messages"](1.0))
        message = jax.grad(lambda x: jnp.sum(3 * clip(x)["a"]))({"a": jnp.ones(4)})["a"]
        assert jnp.allclose(message, 0.5)
        with pytest.raises(ValueError, match="positive bound"):
            names["clip_messages"](0.0)
    else:
        assert isinstance(names["straight_through"](), ap.Estimator)
