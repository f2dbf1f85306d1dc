"""A run's checkpoints: what they cover, which one is loaded, and how a run resumes."""
