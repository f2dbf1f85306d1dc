"""`python -m megatron_hybrid`: see command_line.py."""

import sys

from megatron_hybrid.command_line import main

if __name__ == "__main__":
    sys.exit(main())
