"""Runs in the environment of optimum: loads a folder's graph, asks it, and prints what it answered and the file that it
ran. An export of another graph is an error.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from optimum.onnxruntime import ORTModelForSequenceClassification, modeling


def no_export(*_: Any, **__: Any) -> None:
    raise SystemExit("a graph was about to be exported")


def main() -> None:
    """Answer one question of stdin."""
    modeling.main_export = no_export
    asked = json.load(sys.stdin)
    pairs = [tuple(pair) for pair in asked["pairs"]]
    options = {"file_name": asked["file_name"]} if "file_name" in asked else {}
    batch_size = asked.get("batch_size", len(pairs))
    if asked["loader"] == "optimum":
        session_owner = ORTModelForSequenceClassification.from_pretrained(asked["place"], **options)
        scores = []
        for start in range(0, len(pairs), batch_size):
            scores += by_optimum(session_owner, asked["place"], pairs[start : start + batch_size])
    else:
        from sentence_transformers import CrossEncoder

        cross_encoder = CrossEncoder(
            asked["place"], backend="onnx", device="cpu", local_files_only=True, model_kwargs=options
        )
        scores = cross_encoder.predict(
            pairs, batch_size=batch_size, apply_softmax=asked.get("apply_softmax", False)
        ).tolist()
        session_owner = next(module.auto_model for module in cross_encoder.modules() if hasattr(module, "auto_model"))
    graph = Path(session_owner.session._model_path)
    digest = hashlib.sha256(graph.read_bytes()).hexdigest()
    print(json.dumps({"scores": scores, "graph": str(graph), "sha256": digest}))


def by_optimum(model: Any, place: str, pairs: list[tuple[str, str]]) -> list[Any]:
    """Logits of its own class."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place)
    batch = tokenizer(*map(list, zip(*pairs, strict=True)), truncation=True, padding=True, return_tensors="pt")
    with torch.inference_mode():
        return model(**batch).logits.tolist()


main()
