"""Arithmetic on the parts of tensors, without communication and without tensors.

Which rank holds and writes each part (holdings.py), which parts overlap (boxes.py), and whether
they tile a tensor (saved.py).
"""
