"""The command `python -m thesis`."""

import sys
from .build import main

if __name__ == '__main__':
    sys.exit(main())
