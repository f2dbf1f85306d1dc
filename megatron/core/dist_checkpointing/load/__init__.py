"""Loading: checkpoint.py opens and verifies a published checkpoint, reader.py loads it in place.

small_files.py reads and compares marker, metadata and manifests, chunk_data.py the data itself.
"""
