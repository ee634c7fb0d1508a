"""What several experiments share, and what they start: no experiment by itself."""
