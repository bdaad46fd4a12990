"""`python -m decod` is `decod`."""

import sys

from decod.cli.main import main

sys.exit(main())
