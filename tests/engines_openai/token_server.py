"""What vLLM's server does with `/completions`, by a tiny torch model: token-id prompts, `logprob_token_ids`, grammars,
token ids back.
"""

import threading
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from .scripted_server import MODEL, Call, Json, error

OWN = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "logprobs", "stop"}
"""Fields of OpenAI's API."""
FIELDS = OWN | {
    *("top_k", "min_p", "repetition_penalty", "skip_special_tokens", "return_token_ids", "logprob_token_ids"),
    *("return_tokens_as_token_ids", "structured_outputs", "include_stop_str_in_output", "add_special_tokens"),
}


class TokenServer:
    """A script: answers as vLLM would, greedily. `can` may be emptied of what it shall not do.

    Args:
        strict: refuse fields outside the API's own, as OpenAI does.
    """

    def __init__(self, model: Any, tokenizer: Any, *, strict: bool = False) -> None:
        self.model, self.tokenizer, self.strict = model, tokenizer, strict
        self.can = {"token prompts", "logprob ids", "grammar", "token ids"}
        self.eos = tokenizer.eos_token_id
        self.special = set(tokenizer.all_special_ids)
        # vLLM's view: llguidance's own, for which any added token in angle brackets (`</think>`) is a control token
        self._words = llguidance.hf.from_tokenizer(tokenizer, n_vocab=model.config.vocab_size, eos_token=self.eos)
        self._lock = threading.Lock()

    def logits(self, ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0, -1].float().numpy()

    def _matcher(self, grammar: str) -> Any:
        return llguidance.LLMatcher(self._words, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)

    def __call__(self, call: Call) -> Json:
        body = call.body
        assert call.path == "/v1/completions", call.path
        assert body.keys() <= FIELDS, body.keys() - FIELDS
        assert body["model"] == MODEL
        if self.strict and not body.keys() <= OWN:
            return error(400, f"Unrecognized request argument supplied: {max(body)}")
        if "structured_outputs" in body and "grammar" not in self.can:
            return error(400, "structured_outputs is not known here")
        with self._lock:  # one torch thread is enough
            return self._answer(body)

    def _answer(self, body: dict[str, Any]) -> Json:
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt, add_special_tokens=body.get("add_special_tokens", True))["input_ids"]
        elif "token prompts" not in self.can:
            return error(400, "prompt: Input should be a valid string")
        matcher = self._matcher(body["structured_outputs"]["grammar"]) if "structured_outputs" in body else None
        if matcher is not None and matcher.is_error():
            return error(400, matcher.get_error())
        ids: list[int] = []
        first: np.ndarray | None = None
        finish = "length"
        while len(ids) < body["max_tokens"]:
            logits = self.logits(prompt + ids)
            first = logits if first is None else first
            if matcher is not None:
                allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                bits = np.unpackbits(allowed, bitorder="little")[: len(logits)].astype(bool)
                logits = np.where(bits, logits, -np.inf)
            ids.append(int(logits.argmax()))
            if ids[-1] == self.eos:
                finish = "stop"
                break
            if matcher is not None and not matcher.consume_token(ids[-1]):
                return error(500, f"the grammar got stuck at {self.tokenizer.decode(ids)!r}")
            if any(stop in self.tokenizer.decode(ids) for stop in body.get("stop", ())):
                finish = "stop"
                break
        text = self.tokenizer.decode([token for token in ids if token not in self.special])
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
        if body.get("return_token_ids") and "token ids" in self.can:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if "logprob_token_ids" in body and "logprob ids" in self.can:
            assert body["logprobs"] is not None, "vLLM wants both"
            assert body["return_tokens_as_token_ids"]
            wide = first.astype(np.float64)
            logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
            asked = [ids[0], *body["logprob_token_ids"]]
            choice["logprobs"] = {
                "top_logprobs": [{f"token_id:{token}": max(float(logprobs[token]), -9999.0) for token in asked}]
            }
        return Json({"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}})
