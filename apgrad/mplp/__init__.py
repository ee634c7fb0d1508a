"""MPLP: networks whose backward pass is a learned protocol of messages.

A network is a function that calls nodes; a rule says what a node does with a message; `apgrad.meta` trains rules.
"""

from apgrad.mplp._elementwise import *
from apgrad.mplp._fit import Fitted as Fitted, fit as fit
from apgrad.mplp._layers import Layer as Layer, layer as layer
from apgrad.mplp._losses import *
from apgrad.mplp._nodes import *
from apgrad.mplp._places import Parameter as Parameter, Place as Place, Places as Places
from apgrad.mplp._pretrained import *
from apgrad.mplp._protocol import *
from apgrad.mplp._sequential import *
from apgrad.mplp._step import *
from apgrad.mplp.rules._exact import Exact as Exact
from apgrad.mplp.rules._normalized import Normalized as Normalized
from apgrad.mplp.rules._per_synapse import *
from apgrad.mplp.rules._separable import Separable as Separable
from apgrad.mplp.rules._thesis import Thesis as Thesis
