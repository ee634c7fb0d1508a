"""apgrad: automatic propagation for JAX, backpropagation with its parts made replaceable."""

from apgrad import diagnostics as diagnostics
from apgrad import meta as meta
from apgrad import mplp as mplp
from apgrad import randomized as randomized
from apgrad import testing as testing
from apgrad import tracing as tracing
from apgrad.estimators import Estimator as Estimator
from apgrad.estimators import LearnedBaseline as LearnedBaseline
from apgrad.estimators import Mixer as Mixer
from apgrad.estimators import gaussian_resampling as gaussian_resampling
from apgrad.estimators import gaussian_shaping as gaussian_shaping
from apgrad.estimators import learned_baseline as learned_baseline
from apgrad.estimators import likelihood_ratio as likelihood_ratio
from apgrad.estimators import reparameterization as reparameterization
from apgrad.estimators import sample as sample
from apgrad.estimators import stochastic as stochastic
from apgrad.estimators import total_propagation as total_propagation
from apgrad.estimators import weights as weights
from apgrad.expectation import expectation as expectation
from apgrad.expectation import initial_weights as initial_weights
from apgrad.expectation import value_and_grad as value_and_grad
from apgrad.port import Signal as Signal
from apgrad.port import port as port
from apgrad.primitives import refuse_derivative as refuse_derivative
from apgrad.primitives import zero_with_gradient as zero_with_gradient
from apgrad.propagator import Propagator as Propagator
from apgrad.propagator import backpropagation as backpropagation
from apgrad.propagator import chain as chain
from apgrad.propagator import combine as combine
from apgrad.propagator import first_order as first_order
from apgrad.propagator import node as node
from apgrad.propagator import skip as skip
from apgrad.randomized import memory_report as memory_report
from apgrad.randomized import randomize as randomize
from apgrad.tape import Tape as Tape
from apgrad.tracing import backprop as backprop
from apgrad.tracing import trace_gradients as trace_gradients

__version__ = "0.1.0"
