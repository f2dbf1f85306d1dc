"""The checkpoint tool: list, show, verify, diff, convert and export.

`python -m megatron_hybrid checkpoint`.
"""
