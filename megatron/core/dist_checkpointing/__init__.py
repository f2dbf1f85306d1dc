"""Checkpoints: state/ collects them, save/ writes and publishes, load/ reads them back.

layout/ is the arithmetic behind all three, format/ the content of the files, store.py the directory
they are in, dcp/ the format that PyTorch DCP itself writes.
"""
