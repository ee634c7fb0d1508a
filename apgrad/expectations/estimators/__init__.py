"""Estimators of the derivative of an expectation, one a file."""
