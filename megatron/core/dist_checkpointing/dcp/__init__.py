"""Checkpoints in PyTorch DCP's own format: torch_dcp.py saves and loads them.

dcp_checkpoint.py reads them without executing code; plain_dcp.py finds weights in a directory that
another program wrote.
"""
