"""Estimators of the derivative of an expectation, a file for each family that shares its mathematics."""
