"""A run's checkpoints: their content, the choice of one to load, and resuming a run."""
