"""What the files of a checkpoint look like: names, manifests, blobs and DCP metadata. Bytes
only.
"""
