"""A GGUF file as an ordinary model directory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from relabel.manifests.errors import MissingExtraError, ModelError


def dequantize(gguf: Path, target: Path, reference: str) -> None:
    """Write a GGUF's weights as an ordinary directory in bfloat16, in a process of its own: its peak of memory ends
    with it.
    """
    for module in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            # looked for, not imported: this process may have no other use for it
            raise MissingExtraError(
                f"The GGUF in {reference} needs the package {module}: run `pip install 'relabel-ir[cpu]'`."
            )
    done = subprocess.run(
        [sys.executable, "-P", "-c", _DEQUANTIZE, str(gguf), str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"model {reference!r}: {gguf.name} can't be turned into a model directory: {last}")


# transformers refuses to save what it thinks is still quantized, so the marks of the quantizer are taken off first.
_DEQUANTIZE = """
import os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name = os.path.split(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
model.hf_quantizer, model.is_quantized = None, False
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(sys.argv[2])
"""
