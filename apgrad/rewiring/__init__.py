"""Other ways back: any node of any function, rewired; and taps, which show the messages that pass."""

from apgrad.rewiring._feedback_alignment import feedback_alignment as feedback_alignment
from apgrad.rewiring._rewire import Rewired as Rewired, Rule as Rule, rewire as rewire
from apgrad.rewiring._sites import Site as Site
from apgrad.rewiring._taps import Tapped as Tapped, tap as tap, with_taps as with_taps
