"""Repeat papers' claims on the data that RELABEL_DATA names, and write docs/claims: `make claims`."""

import argparse
import os
import time
from pathlib import Path

from benchmarks.claims import (
    equal_budget,
    few_humans,
    hardest_grade,
    overrating,
    prompt_noise,
    sections,
    stuffing,
    system_order,
    two_areas,
    untested,
)
from benchmarks.claims.page import render_index, write_page

CLAIMS = (
    hardest_grade,
    two_areas,
    overrating,
    system_order,
    few_humans,
    prompt_noise,
    stuffing,
    equal_budget,
    sections,
)


def main() -> None:
    """Write all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("docs/claims"))
    parser.add_argument("--index", action="store_true", help="Write the index alone, of the figures that are there.")
    options = parser.parse_args()
    folder = options.to
    if options.index:
        render_index(folder)
        return
    data = Path(os.environ["RELABEL_DATA"])
    for module in CLAIMS:
        started = time.process_time()
        claim = module.claim(data)
        write_page(claim, folder)
        print(f"{claim.name}: {claim.here}; {claim.there}; {time.process_time() - started:.0f} CPU s", flush=True)
    untested.write(folder)


if __name__ == "__main__":
    main()
