"""The parts of the benchmark of checkpoints."""
