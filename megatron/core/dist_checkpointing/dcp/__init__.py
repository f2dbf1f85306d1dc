"""Checkpoints in PyTorch DCP's format: torch_dcp.py saves them, and loads them and
the checkpoints of other programs.
"""
