"""Derivatives of expectations: what a random choice sends backward."""

from apgrad.expectations import diagnostics as diagnostics, variational as variational, weights as weights
from apgrad.expectations._adaptive import (
    Adaptive as Adaptive,
    AdaptiveState as AdaptiveState,
    adaptive as adaptive,
)
from apgrad.expectations._expectation import (
    expectation as expectation,
    grad as grad,
    value_and_grad as value_and_grad,
)
from apgrad.expectations._stochastic import sample as sample, stochastic as stochastic
from apgrad.expectations._tape import Tape as Tape
from apgrad.expectations.estimators._baselines import (
    LearnedBaseline as LearnedBaseline,
    learned_baseline as learned_baseline,
)
from apgrad.expectations.estimators._estimator import Estimator as Estimator, Mixer as Mixer
from apgrad.expectations.estimators._gaussian_resampling import gaussian_resampling as gaussian_resampling
from apgrad.expectations.estimators._gaussian_shaping import gaussian_shaping as gaussian_shaping
from apgrad.expectations.estimators._likelihood_ratio import likelihood_ratio as likelihood_ratio
from apgrad.expectations.estimators._reparameterization import reparameterization as reparameterization
from apgrad.expectations.estimators._total_propagation import total_propagation as total_propagation
