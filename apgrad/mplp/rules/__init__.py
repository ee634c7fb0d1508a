"""Learning rules: one file a rule."""

from apgrad.mplp.rules.exact import Exact as Exact
