"""Other ways back: any node of any function, rewired; and taps, which show the messages that pass.

`ap.rewire(f, rule)` is f with another backward pass at the nodes that a rule takes: one of this module's, or a
`ap.rewiring.Rule` of your own. `ap.tap(x, "name")` and `ap.with_taps(jax.grad(f))` show what passes a place.
"""

from apgrad.rewiring._difference_target_propagation import (
    difference_target_propagation as difference_target_propagation,
)
from apgrad.rewiring._direct_feedback_alignment import direct_feedback_alignment as direct_feedback_alignment
from apgrad.rewiring._feedback_alignment import feedback_alignment as feedback_alignment
from apgrad.rewiring._forward_gradient import forward_gradient as forward_gradient
from apgrad.rewiring._gradient_reversal import gradient_reversal as gradient_reversal
from apgrad.rewiring._kolen_pollack import kolen_pollack as kolen_pollack
from apgrad.rewiring._layers import Where as Where
from apgrad.rewiring._message_size import clip_messages as clip_messages, normalize_messages as normalize_messages
from apgrad.rewiring._predictive_coding import predictive_coding as predictive_coding
from apgrad.rewiring._rewire import Rewired as Rewired, Rule as Rule, first_of as first_of, rewire as rewire
from apgrad.rewiring._sign_symmetry import sign_symmetry as sign_symmetry
from apgrad.rewiring._sites import ProgramSite as ProgramSite
from apgrad.rewiring._skip import skip as skip
from apgrad.rewiring._surrogate_gradient import surrogate_gradient as surrogate_gradient
from apgrad.rewiring._synthetic_gradients import synthetic_gradients as synthetic_gradients
from apgrad.rewiring._taps import Tapped as Tapped, tap as tap, with_taps as with_taps
