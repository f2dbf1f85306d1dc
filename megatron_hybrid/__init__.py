"""The programs that `python -m megatron_hybrid` and the scripts of a clone run.

A package of its own beside `megatron`, so that it can say so where `megatron` is another project's.
"""
