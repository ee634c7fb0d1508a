"""MPLP: networks whose backward pass is a learned protocol of messages.

    network, params = mplp.from_nnx(model, loss=mplp.softmax_cross_entropy)
    rule = mplp.Separable(mplp.sites(network, params, batch), rngs=rngs)
    state = mplp.init_state(rule, network, params, batch)
    updates, state, metrics = mplp.backward(rule, network, params, state, batch)  # pure: jit, scan, vmap, grad

A network is a function that calls nodes; a rule says what a node does with a message; `apgrad.meta` trains rules.
"""

from apgrad.mplp._elementwise import (
    activation as activation,
    max_pool as max_pool,
    mean_pool as mean_pool,
    normalize as normalize,
    softmax as softmax,
    transform as transform,
)
from apgrad.mplp._fit import Fitted as Fitted, fit as fit
from apgrad.mplp._layers import Layer as Layer, layer as layer
from apgrad.mplp._losses import (
    absolute_error as absolute_error,
    cross_entropy as cross_entropy,
    readout as readout,
    softmax_cross_entropy as softmax_cross_entropy,
    squared_error as squared_error,
)
from apgrad.mplp._nodes import (
    bias as bias,
    conv as conv,
    dense as dense,
    embedding as embedding,
    parameter as parameter,
    scale as scale,
    shared as shared,
)
from apgrad.mplp._places import Parameter as Parameter, Place as Place, Places as Places
from apgrad.mplp._pretrained import (
    load_pretrained as load_pretrained,
    load_trained as load_trained,
    pretrained_card as pretrained_card,
    pretrained_names as pretrained_names,
    save_trained as save_trained,
)
from apgrad.mplp._protocol import (
    Answer as Answer,
    Dense as Dense,
    Diagonal as Diagonal,
    Elementwise as Elementwise,
    LearnedRule as LearnedRule,
    LocalRule as LocalRule,
    Shared as Shared,
    Site as Site,
)
from apgrad.mplp._published import load_published as load_published
from apgrad.mplp._sequential import (
    NamedLayer as NamedLayer,
    Sequential as Sequential,
    from_nnx as from_nnx,
    to_nnx as to_nnx,
)
from apgrad.mplp._step import (
    Network as Network,
    backward as backward,
    init_state as init_state,
    inner_step as inner_step,
    scan_steps as scan_steps,
    sites as sites,
    unroll as unroll,
)
from apgrad.mplp._wiring import fork as fork, wire as wire
from apgrad.mplp.rules._exact import Exact as Exact
from apgrad.mplp.rules._normalized import Normalized as Normalized
from apgrad.mplp.rules._per_synapse import PerSynapse as PerSynapse, fit_standardizers as fit_standardizers
from apgrad.mplp.rules._separable import Separable as Separable
from apgrad.mplp.rules._thesis import Thesis as Thesis
