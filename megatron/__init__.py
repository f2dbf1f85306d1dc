"""Megatron-hybrid: GPT training with the optimizer's state in host memory."""

from megatron.installation import check_installation

check_installation()
