"""Monte Carlo gradient estimators: what a random choice sends backward."""

from apgrad.estimators import weights as weights
from apgrad.estimators.baselines import LearnedBaseline as LearnedBaseline
from apgrad.estimators.baselines import learned_baseline as learned_baseline
from apgrad.estimators.estimator import Estimator as Estimator
from apgrad.estimators.estimator import Mixer as Mixer
from apgrad.estimators.gaussian_resampling import gaussian_resampling as gaussian_resampling
from apgrad.estimators.gaussian_shaping import gaussian_shaping as gaussian_shaping
from apgrad.estimators.likelihood_ratio import likelihood_ratio as likelihood_ratio
from apgrad.estimators.reparameterization import reparameterization as reparameterization
from apgrad.estimators.stochastic import sample as sample
from apgrad.estimators.stochastic import stochastic as stochastic
from apgrad.estimators.total_propagation import total_propagation as total_propagation
