"""Checkpoints that PyTorch DCP itself writes and reads."""
