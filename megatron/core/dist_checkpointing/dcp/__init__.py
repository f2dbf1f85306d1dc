"""Checkpoints in PyTorch DCP's format: torch_dcp.py saves and loads ours and other programs'."""
