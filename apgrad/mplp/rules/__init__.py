"""Learning rules: each rule has a file."""
