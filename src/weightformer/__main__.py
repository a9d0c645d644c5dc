"""``python -m weightformer`` is the command line; torchrun starts it this way."""

import sys

from weightformer.cli import main

sys.exit(main())
