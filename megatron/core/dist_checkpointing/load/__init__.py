"""Loading: published checkpoints, verified before use and read in parts."""
