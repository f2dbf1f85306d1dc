"""Saving: manager.py starts and ends saves, writer.py writes a rank's part, publisher.py publishes.

A rank's data goes through the buffers of data_file.py into the store.
"""
