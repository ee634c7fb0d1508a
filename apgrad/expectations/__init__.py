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
from apgrad.expectations.estimators._antithetic import *
from apgrad.expectations.estimators._baselines import *
from apgrad.expectations.estimators._choice_estimator import ChoiceEstimator as ChoiceEstimator
from apgrad.expectations.estimators._control_variate import rebar as rebar, relax as relax
from apgrad.expectations.estimators._enumeration import *
from apgrad.expectations.estimators._estimator import Estimator as Estimator, Mixer as Mixer
from apgrad.expectations.estimators._gaussian import *
from apgrad.expectations.estimators._leave_one_out import *
from apgrad.expectations.estimators._measure_valued import measure_valued as measure_valued
from apgrad.expectations.estimators._relaxed import *
from apgrad.expectations.estimators._total_propagation import *
