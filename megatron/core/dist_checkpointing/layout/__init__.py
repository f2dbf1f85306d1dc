"""Arithmetic on the parts of tensors, without communication and without tensors.

Who holds and who writes which part (holdings.py), where it lies in a rank's file (file_layout.py),
which parts overlap (boxes.py), and whether they tile a tensor (coverage.py).
"""
