"""The checkpoint tool: list, show, verify, diff, convert and export.

`megatron-hybrid checkpoint`, in a clone `python -m tools.checkpoint`.
"""
