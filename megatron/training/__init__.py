"""The training loop and what surrounds it: configuration, tokenizers, metrics, recovery."""
