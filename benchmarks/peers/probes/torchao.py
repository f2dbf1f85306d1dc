"""Builds torchao's offloaded optimizer; run by the interpreter of its environment."""

import torch
from torchao.optim import CPUOffloadOptimizer

CPUOffloadOptimizer([torch.nn.Parameter(torch.ones(8192))], torch.optim.AdamW)
