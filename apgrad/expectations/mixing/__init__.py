"""Mixers: several estimators of one random choice, and the weights of each."""
