"""The GPT decoder-only language model and what it costs in floating point operations."""
