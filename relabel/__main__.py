"""Entry point of the console script, and of `python -P -m relabel` where scripts are not on the path."""

import os
import sys


def main() -> None:
    """Run `relabel`; its own help is shown without importing click."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        from relabel.jobs.root_help import root_help

        try:
            os.write(1, f"{root_help()}\n".encode())
            return
        except OSError:
            pass  # stdout is full or closed: `cli.main` reports it
    from relabel.jobs.cli import main as run

    run()


if __name__ == "__main__":
    # without -P the working directory comes first on the path, and a `numpy.py` that lies there would be run
    if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):  # noqa: PTH120
        del sys.path[0]
    main()
