"""The files of a checkpoint, as bytes: their names and contents, without disk or ranks.

Written here: directory names, manifests and marker, blobs, DCP metadata. Read here: the same, and
files that other programs may have written (metadata.py, blob_reading.py).
"""
