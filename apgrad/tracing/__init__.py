"""Gradient tracing: which path taught this weight."""

from apgrad.tracing._drawing import draw as draw, heat_map as heat_map
from apgrad.tracing._influence import Influence as Influence, every as every, influence as influence
from apgrad.tracing._modules import name_modules as name_modules
from apgrad.tracing._paths import PathStep as PathStep
from apgrad.tracing._semiring_grad import semiring_grad as semiring_grad
from apgrad.tracing._semirings import *
from apgrad.tracing._trace import Trace as Trace, trace_gradients as trace_gradients
