"""The programs behind `python -m megatron_hybrid` and the scripts of a clone.

They are separate from `megatron`, so that they can report that `megatron` is another project's.
"""
