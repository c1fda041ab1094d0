"""`python -P -m relabel` is `relabel`, for environments whose scripts are not on the path."""

import os
import sys

# without -P the working directory comes first on the path, and a `numpy.py` that lies there would be run
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):  # noqa: PTH120
    del sys.path[0]

from relabel.jobs.cli import main

main()
