"""Gradient tracing: which path taught this weight."""

from apgrad.tracing.backpropagation import backprop as backprop
from apgrad.tracing.drawing import draw as draw
from apgrad.tracing.drawing import graphviz as graphviz
from apgrad.tracing.drawing import heat_map as heat_map
from apgrad.tracing.drawing import influence_over_steps as influence_over_steps
from apgrad.tracing.influence import Influence as Influence
from apgrad.tracing.influence import every as every
from apgrad.tracing.influence import influence as influence
from apgrad.tracing.paths import Step as Step
from apgrad.tracing.semirings import Semiring as Semiring
from apgrad.tracing.semirings import absolute_sum as absolute_sum
from apgrad.tracing.semirings import entropy as entropy
from apgrad.tracing.semirings import max_product as max_product
from apgrad.tracing.semirings import ordinary as ordinary
from apgrad.tracing.semirings import top_k as top_k
from apgrad.tracing.trace import Trace as Trace
from apgrad.tracing.trace import trace_gradients as trace_gradients
