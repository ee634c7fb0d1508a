"""Learning rules: one file a rule."""
