"""The GPT decoder-only language model and its cost in floating point operations."""
