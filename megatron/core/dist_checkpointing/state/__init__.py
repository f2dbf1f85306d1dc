"""The content of a checkpoint: a model's, an optimizer's and a trainer's tensors by canonical key.

collect.py finds them, entries.py has this rank's part of them and its bytes, param_groups.py the
optimizer's options, dcp_state.py the same for PyTorch DCP.
"""
