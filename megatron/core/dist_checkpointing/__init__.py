"""Checkpoints: state/ collects them, save/ writes and publishes, load/ reads them back.

plan/ is the arithmetic behind all three, format/ the content of the files, store.py the place they
are in, dcp/ the format that PyTorch DCP itself writes.
"""
