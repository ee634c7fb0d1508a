"""Derivatives of expectations: what a random choice sends backward."""

from apgrad.expectations import diagnostics as diagnostics, variational as variational, weights as weights
from apgrad.expectations._adaptive import Adaptive as Adaptive, AdaptiveState as AdaptiveState, adaptive as adaptive
from apgrad.expectations._choose import choose as choose
from apgrad.expectations._clip_lanes import clip_lanes as clip_lanes
from apgrad.expectations._expectation import expectation as expectation, grad as grad, value_and_grad as value_and_grad
from apgrad.expectations._multilevel import MultilevelState as MultilevelState, multilevel as multilevel
from apgrad.expectations._score import score as score
from apgrad.expectations._stochastic import sample as sample, stochastic as stochastic
from apgrad.expectations._tape import Tape as Tape
from apgrad.expectations.estimators._arm import arm as arm
from apgrad.expectations.estimators._arms import arms as arms
from apgrad.expectations.estimators._baselines import (
    LearnedBaseline as LearnedBaseline,
    learned_baseline as learned_baseline,
)
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator as ChoiceEstimator
from apgrad.expectations.estimators._disarm import disarm as disarm
from apgrad.expectations.estimators._disarm_stick_breaking import disarm_stick_breaking as disarm_stick_breaking
from apgrad.expectations.estimators._double_control_variates import double_control_variates as double_control_variates
from apgrad.expectations.estimators._enumeration import enumeration as enumeration
from apgrad.expectations.estimators._estimator import Estimator as Estimator, Mixer as Mixer
from apgrad.expectations.estimators._gaussian_resampling import gaussian_resampling as gaussian_resampling
from apgrad.expectations.estimators._gaussian_shaping import gaussian_shaping as gaussian_shaping
from apgrad.expectations.estimators._gumbel_softmax import gumbel_softmax as gumbel_softmax
from apgrad.expectations.estimators._likelihood_ratio import likelihood_ratio as likelihood_ratio
from apgrad.expectations.estimators._measure_valued import measure_valued as measure_valued
from apgrad.expectations.estimators._rao_blackwellized import rao_blackwellized as rao_blackwellized
from apgrad.expectations.estimators._rebar import rebar as rebar
from apgrad.expectations.estimators._reinmax import reinmax as reinmax
from apgrad.expectations.estimators._relax import relax as relax
from apgrad.expectations.estimators._reparameterization import reparameterization as reparameterization
from apgrad.expectations.estimators._rloo import rloo as rloo
from apgrad.expectations.estimators._straight_through import straight_through as straight_through
from apgrad.expectations.estimators._total_propagation import total_propagation as total_propagation
