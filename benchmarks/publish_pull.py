"""Seconds of `publish`, `pull` and both rollbacks, as whole commands in fresh processes, on a bundle of BERT-base size.

python benchmarks/publish_pull.py                       # to a folder
python benchmarks/publish_pull.py s3://bucket/bench     # to S3; credentials and endpoint from the usual variables
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from relabel.export.bundles import seal_bundle

WEIGHTS_MB = 440
"""BERT-base in fp32."""
ROLLBACKS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = sys.argv[1] if len(sys.argv) > 1 else str(folder / "store")
        target = str(folder / "dest")
        print(f"{WEIGHTS_MB} MB of weights, {url}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        for version in ("first", "second"):
            bundle = str(write_bundle(folder / version, version))
            print(f"publish, {version} version         {seconds('publish', bundle, url, '--channel', 'stable'):6.2f} s")
            print(f"publish again, nothing to do      {seconds('publish', bundle, url, '--channel', 'stable'):6.2f} s")
            print(f"pull, {version} version            {seconds('pull', f'{url}/bench', target):6.2f} s")
            print(f"pull again, nothing to do         {seconds('pull', f'{url}/bench', target):6.2f} s")
        times = []
        for _ in range(ROLLBACKS):
            times.append(seconds("pull", "--rollback", target))
            seconds("pull", f"{url}/bench", target, "--unhold")
        print(f"pull --rollback, {ROLLBACKS} times           {min(times):6.2f} to {max(times):.2f} s")
        print(f"rollback of the channel           {seconds('rollback', f'{url}/bench', 'stable'):6.2f} s")
        print(f"pull of what is kept here         {seconds('pull', f'{url}/bench', target):6.2f} s")


def write_bundle(folder: Path, version: str) -> Path:
    folder.mkdir()
    with (folder / "model.onnx").open("wb") as file:
        for _ in range(WEIGHTS_MB):
            file.write(os.urandom(1_000_000))
    (folder / "tokenizer.json").write_text("{}")
    seal_bundle(folder, {"name": "bench", "lineage": {"version": version}})
    return folder


def seconds(*arguments: str) -> float:
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "relabel", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 10), done.stderr
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
