"""The content of a checkpoint: a model's, an optimizer's and a trainer's tensors by canonical key.

collect.py finds them, entries.py describes this rank's part of them, param_groups.py has the
optimizer's options, dcp_state.py the same for PyTorch DCP.
"""
