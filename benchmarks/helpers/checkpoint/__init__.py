"""What the benchmark of checkpoints consists of."""
