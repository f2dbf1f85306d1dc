"""The training loop and what surrounds it: configuration, tokenizers, metrics, recovery."""

from megatron.installation import check_installation

check_installation()
