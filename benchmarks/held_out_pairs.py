"""The pairs of a student's test split as a Parquet file of their own, so that a comparison with the
teacher holds no row that anybody trained on.

    python benchmarks/held_out_pairs.py STUDENT PAIRS.parquet OUT.parquet [--limit 0]

The split is the one that STUDENT's manifest records; `--limit` is that of the labels' input.
"""

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.examples import TEST, split_facts, split_queries
from relabel.distill.students.spec import SplitSection, StudentManifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student")
    parser.add_argument("pairs")
    parser.add_argument("out")
    parser.add_argument("--limit", type=int, default=0)
    options = parser.parse_args()
    manifest = Path(options.student) / "manifest.json"
    split = StudentManifest.read(manifest.read_bytes(), str(manifest)).split
    table = pq.read_table(options.pairs)
    table = table.slice(0, options.limit) if options.limit else table
    queries = [str(query) for query in table["query_id"].to_pylist()]
    side = split_queries(queries, dev=split.shares["dev"], test=split.shares["test"], seed=split.seed)
    section = SplitSection(by=split.by, seed=split.seed, **split.shares)
    found = split_facts(section, queries, queries, side)
    if found.sha256 != split.sha256:
        raise SystemExit(
            "these are not the pairs that the student's split was made of; is --limit the one of its labels?"
        )
    pq.write_table(table.filter(pa.array(side == TEST)), options.out)
    print(json.dumps({"rows": found.test.rows, "queries": found.test.queries}))


if __name__ == "__main__":
    main()
