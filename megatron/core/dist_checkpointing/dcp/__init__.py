"""Checkpoints in PyTorch DCP's own format: torch_dcp.py saves and loads them.

dcp_checkpoint.py reads them without running anything; plain_dcp.py finds weights in a folder that
another program wrote.
"""
