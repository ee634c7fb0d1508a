"""Meta-training: tasks, inner learners, unrolls, outer gradients, and the loop that trains meta-parameters."""

from apgrad.meta import data as data
from apgrad.meta._checkpoints import Checkpoints as Checkpoints
from apgrad.meta._evolution import *
from apgrad.meta._outer import *
from apgrad.meta._partition import merge as merge, partition as partition
from apgrad.meta._perturbed import perturbed as perturbed
from apgrad.meta._tasks import *
from apgrad.meta._training import *
from apgrad.meta._unroll import *
