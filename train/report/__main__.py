"""`python -m train.report <run>`."""

import sys

from train.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
