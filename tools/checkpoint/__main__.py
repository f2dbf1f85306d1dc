"""`python -m tools.checkpoint`: see command.py."""

import sys

from tools.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main())
