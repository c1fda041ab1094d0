"""Our own grammars inside vLLM: each request brings a matcher that is compiled already, and vLLM only asks it for
masks.

vLLM's guidance backend compiles every request's grammar anew (twice, to check it first), takes an added token in angle
brackets such as `</think>` for a control token, and refuses long documents as sources. So its backend is replaced by
one that hands out our matchers; what a request carries as its "grammar" is only the number of its matcher. Imported by
the vLLM engine's constructor.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import llguidance.torch
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputBackend

from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.manifests.errors import ModelError


class GrammarRegistry:
    """Matchers on their way from a request to vLLM's scheduler, by grammar id. vLLM fetches them in its own threads."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._held: dict[str, Any] = {}
        self._lock = threading.Lock()

    def leave(self, matcher: Any) -> str:
        """Leave a matcher, and return its grammar id: itself a grammar, which passes vLLM's check in no time."""
        grammar_id = f'start: "{next(self._numbers)}"'
        with self._lock:
            self._held[grammar_id] = matcher
        return grammar_id

    def fetch(self, grammar_id: str) -> Any:
        """Take a matcher; each can be taken once."""
        with self._lock:
            return self._held.pop(grammar_id)


class RegistryBackend(StructuredOutputBackend):  # type: ignore[misc]
    """Structured output as vLLM's scheduler wants it, from the registry's matchers."""

    def __init__(self, grammars: GrammarRegistry, ll_tokenizer: Any, vocab_size: int) -> None:
        self.grammars = grammars
        self.ll_tokenizer = ll_tokenizer
        self.vocab_size = vocab_size

    def compile_grammar(self, request_type: Any, grammar_spec: str, stop_token_ids: Any = None) -> Any:
        return GuidanceGrammar(
            ll_matcher=self.grammars.fetch(grammar_spec), ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size
        )

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        return llguidance.torch.allocate_token_bitmask(max_num_seqs, self.vocab_size)

    def destroy(self) -> None:
        """There is nothing to destroy."""


def install_grammars(engine: Any, compiler: GrammarCompiler) -> GrammarRegistry:
    """Make vLLM's scheduler, which runs in this process, take its grammars from a registry.

    Raises:
        ModelError: this vLLM keeps its structured output elsewhere than 0.26 to 0.32 do.
    """
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    manager = getattr(core, "structured_output_manager", None)
    if manager is None or not hasattr(manager, "backend"):
        raise ModelError(
            "this version of vLLM keeps its grammars where we do not find them; 0.26 to 0.32 are known to work."
        )
    grammars = GrammarRegistry()
    manager.backend = RegistryBackend(grammars, compiler.tokenizer, compiler.vocab_size)
    return grammars
