"""Megatron-hybrid: GPT training with the optimizer's state in host memory."""
