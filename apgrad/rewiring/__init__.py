"""Other ways back: any node of any function, rewired; and taps, which show the messages that pass."""

from apgrad.rewiring._taps import Tapped as Tapped, tap as tap, with_taps as with_taps
