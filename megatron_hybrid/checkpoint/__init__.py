"""The checkpoint tool: list, show, verify, diff and export.

`python -m megatron_hybrid checkpoint`.
"""
