"""Measurements and comparisons, one module per question."""
