"""Saving: the manager, the file of each rank, and the publication by rank 0."""
