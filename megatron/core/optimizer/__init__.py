"""Optimizers and what they need: gradient norms, learning-rate schedules, parameter groups."""
