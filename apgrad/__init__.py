"""apgrad: automatic propagation for JAX, backpropagation with its parts made replaceable.

The public names of apgrad, sorted by wing. A module is loaded when one of its names is first used, so that `import
apgrad` costs nothing: not even JAX is imported.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from apgrad import (
        expectations as expectations,
        memory as memory,
        meta as meta,
        mplp as mplp,
        rewiring as rewiring,
        testing as testing,
        tracing as tracing,
    )
    from apgrad._ground.port import *
    from apgrad._ground.primitives import *
    from apgrad._ground.propagator import *
    from apgrad.expectations import *
    from apgrad.memory import memory_report as memory_report, randomize as randomize
    from apgrad.rewiring import rewire as rewire, tap as tap, with_taps as with_taps
    from apgrad.tracing import semiring_grad as semiring_grad, trace_gradients as trace_gradients

__version__ = "0.1.0"

# The public names of each module, which the module defines or imports.
_GROUND = {
    "_ground.port": "Signal port",
    "_ground.primitives": "refuse_derivative zero_with_gradient",
    "_ground.propagator": "Propagator backpropagation chain combine first_order node skip",
}
_WINGS = {
    "expectations": """
        Adaptive AdaptiveState ChoiceEstimator Estimator LearnedBaseline Mixer MultilevelState Tape adaptive arm arms
        choose clip_lanes diagnostics disarm disarm_stick_breaking double_control_variates enumeration expectation
        gaussian_resampling gaussian_shaping grad gumbel_softmax learned_baseline likelihood_ratio measure_valued
        multilevel rao_blackwellized rebar reinmax relax reparameterization rloo sample score stochastic
        straight_through total_propagation value_and_grad variational weights
    """,
    "memory": "memory_report randomize",
    "meta": "",
    "mplp": "",
    "rewiring": "rewire tap with_taps",
    "testing": "",
    "tracing": "semiring_grad trace_gradients",
}
_MODULE_OF = {name: module for module, names in (_GROUND | _WINGS).items() for name in names.split()}
__all__ = [*_WINGS, *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _typing.Any:
    """Loads a module when a name of it is first asked for (PEP 562)."""
    if name in _WINGS:
        return _importlib.import_module(f"apgrad.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'apgrad' has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(f"apgrad.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
