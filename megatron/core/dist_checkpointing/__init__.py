"""Checkpoints: what is saved, how it is published, how it is found and read again."""
