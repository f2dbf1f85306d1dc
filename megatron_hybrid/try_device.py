"""Exits with 0 if a device computes. `launch` starts it for each device: a lost device may hang, or
make others unusable for a process.
"""

from __future__ import annotations

import sys

import torch


def main() -> int:
    """Uses the first device of the kind that the command line names."""
    device = torch.device(sys.argv[1], 0)
    return int(torch.ones(1, device=device).add_(1).item() != 2)


if __name__ == "__main__":
    sys.exit(main())
