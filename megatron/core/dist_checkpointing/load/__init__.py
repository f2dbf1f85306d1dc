"""Loading: checkpoint.py opens, verifies and reads a published checkpoint, reader.py loads it in
place.
"""
