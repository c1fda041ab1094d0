"""Probabilities of pairs from a Triton server, by its HTTP endpoint."""

import json
import sys
import urllib.request
from pathlib import Path

dest, url = sys.argv[1:]
bundle = (Path(dest) / "current").resolve()
sys.path.insert(0, str(bundle))
from load import Encoder, read_manifest

encoder = Encoder(bundle, read_manifest(bundle)["inputs"])
batch = encoder.collate(
    encoder.encode([("red running shoe", "A red shoe for runners"), ("red running shoe", "A blue lamp")])
)
inputs = [
    {"name": name, "shape": ids.shape, "datatype": "INT64", "data": ids.ravel().tolist()} for name, ids in batch.items()
]
request = urllib.request.Request(url, json.dumps({"inputs": inputs}).encode(), {"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=10) as reply:
    answers = {output["name"]: output for output in json.load(reply)["outputs"]}
rows, grades = answers["relevance"]["shape"]
for row in range(rows):
    print(" ".join(f"{p:.3f}" for p in answers["relevance"]["data"][row * grades : (row + 1) * grades]))
