"""The files of a checkpoint, as bytes: their names and contents, without disk or ranks.

Written here: folder names, manifests and marker, blobs, DCP metadata. Read here: the same, and what
other programs may have prepared (metadata_reading.py, blob_reading.py).
"""
