"""Data-parallel engines."""
