"""vLLM's step loop with precompiled grammars: sequences join and leave between steps until their decisions are
complete. Importing this module loads vLLM."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance.torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputBackend

from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import DecisionPlace, TokenSequence, distribution_of_logprobs
from relabel.manifests.asks import Ask, Finish
from relabel.manifests.errors import ConfigError, ModelError

# ------------------------------------------------------------------------------
# Our own grammars inside vLLM: each request brings a matcher that is compiled already, and vLLM only asks it for
# masks.
#
# vLLM's guidance backend compiles the grammar of every request (twice, to check it first), takes an added token in
# angle brackets such as `</think>` for a control token, and refuses long documents as sources. So its backend is
# replaced by one that hands out our matchers; what a request carries as its "grammar" is only the number of its
# matcher. Imported by the vLLM engine's constructor.


class GrammarRegistry(StructuredOutputBackend):  # type: ignore[misc]
    """Structured output as vLLM's scheduler wants it, from matchers on their way from a request, by grammar id. vLLM
    fetches them in its own threads.
    """

    def __init__(self, ll_tokenizer: Any, vocab_size: int) -> None:
        self.ll_tokenizer = ll_tokenizer
        self.vocab_size = vocab_size
        self._numbers = itertools.count()
        self.held: dict[str, Any] = {}
        """One insertion or removal of a dict is atomic."""

    def leave(self, matcher: Any) -> str:
        """Leave a matcher, and return its grammar id: a JSON schema, which vLLM checks in 0.02 ms where a grammar of
        one word takes it 0.5 ms, each time, between two steps.
        """
        grammar_id = f'{{"const": {next(self._numbers)}}}'
        self.held[grammar_id] = matcher
        return grammar_id

    def compile_grammar(self, request_type: Any, grammar_spec: str, stop_token_ids: Any = None) -> Any:
        """The matcher, which can be taken once."""
        matcher = self.held.pop(grammar_spec)
        return GuidanceGrammar(ll_matcher=matcher, ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        return llguidance.torch.allocate_token_bitmask(max_num_seqs, self.vocab_size)

    def destroy(self) -> None:
        """There is nothing to destroy."""


# ------------------------------------------------------------------------------
# vLLM's step loop: sequences go in as requests of token ids, join and leave between steps, and come out when their
# decisions are there.
#
# A sequence whose grammar binds it shows itself only when it is done; one that writes freely shows every token, so that
# it can be stopped at its closing tag. Decisions are taken with every token (`inline`), or by a probe: a request of one
# token on the cached prefix. Imported by the vLLM engine's constructor.


FINISHES: Mapping[str | None, Finish] = {"stop": "stop", "length": "length"}
"""Every other reason of vLLM's is an error of the one request."""


REFUSALS = (ValueError, VLLMValidationError)
"""What vLLM raises when it refuses one request; from 0.32 on its own error is no ValueError any more."""


class StepLoop:
    """Sequences in flight over one vLLM engine.

    Args:
        engine: vLLM's `LLMEngine`, in this process.
        compiler: knows what is text of an answer, and what ends it.
        lora: the adapter that every request runs with, as vLLM's `LoRARequest`.
        is_inline: take decisions with every token of sequences that write freely.
        slots: requests that vLLM is given at a time; the others wait here, so that probes go first while their prefix
            is cached.
    Raises:
        ModelError: this vLLM keeps its structured output elsewhere than 0.26 to 0.32 do.
    """

    def __init__(
        self,
        engine: Any,
        compiler: GrammarCompiler,
        encode_text: Callable[[str], list[int]],
        *,
        lora: Any,
        is_inline: bool,
        slots: int,
    ) -> None:
        self._engine = engine
        self._compiler = compiler
        self._encode_text = encode_text
        self._lora = lora
        self._is_inline = is_inline
        self._slots = slots
        core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
        manager = getattr(core, "structured_output_manager", None)
        if manager is None or not hasattr(manager, "backend"):
            raise ModelError(
                "this version of vLLM keeps its grammars where we do not find them; 0.26 to 0.32 are known to work."
            )
        self._grammars = GrammarRegistry(compiler.tokenizer, compiler.vocab_size)
        manager.backend = self._grammars
        self._waiting: deque[TokenSequence] = deque()
        self._sequences: dict[str, TokenSequence] = {}
        self._bound: set[str] = set()
        self._names = map(str, itertools.count())
        self._done: list[TokenSequence] = []
        self.num_open = 0
        """Rows that were added and are not done; probes do not count."""

    @staticmethod
    def check(ask: Ask) -> None:
        """Whether vLLM takes an ask's sampling.

        Raises:
            ConfigError: it does not (a temperature above 2, for one).
        """
        try:
            SamplingParams(
                max_tokens=max(ask.max_tokens, 1), temperature=ask.sampling.temperature, top_p=ask.sampling.top_p
            )
        except REFUSALS as exc:
            raise ConfigError(f"stage {ask.stage!r}: vLLM refuses its sampling: {exc}") from exc

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait its turn."""
        self.num_open += 1
        if sequence.max_new == 0 and not sequence.places_here():
            self._leave(sequence, "stop")  # nothing is wanted after the prompt itself
        else:
            self._waiting.append(sequence)

    def step(self) -> list[TokenSequence]:
        """Hand over what waits, do one step, and return the sequences that it finished."""
        while self._waiting and len(self._sequences) < self._slots:
            self._begin(self._waiting.popleft())
        if self._sequences:
            for output in self._engine.step():
                self._take(output)
        done = self._done
        self._done = []
        self.num_open -= len(done)
        return done

    def _begin(self, sequence: TokenSequence) -> None:
        name = next(self._names)
        grammar_id = self._grammars.leave(sequence.matcher) if sequence.matcher is not None else None
        try:
            self._engine.add_request(
                name,
                tokens_input(sequence.prompt),
                self._params(sequence, grammar_id),
                lora_request=self._lora,
            )
        except REFUSALS as exc:
            if grammar_id is not None:
                self._grammars.held.pop(grammar_id)
            sequence.detail = f"vLLM refuses the request: {str(exc)[:300]}"
            self._leave(sequence, "error")
            return
        sequence.matcher = None  # vLLM's from here on
        self._sequences[name] = sequence
        if grammar_id is not None:
            self._bound.add(name)

    def _params(self, sequence: TokenSequence, grammar_id: str | None) -> SamplingParams:
        sampling = sequence.request.ask.sampling
        is_free = grammar_id is None
        if sequence.max_new == 0:
            return _reading_params(tuple(sequence.places_here()))
        takes_logprobs = is_free and self._is_inline and bool(sequence.places)
        return SamplingParams(
            max_tokens=sequence.max_new,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            # A request with a seed has a generator of its own, which costs a greedy one time for nothing.
            seed=sequence.request.seed if sampling.temperature > 0.0 else None,
            stop_token_ids=sorted(self._compiler.eos_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if is_free else RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if is_free else StructuredOutputsParams(json=grammar_id),
            logprob_token_ids=_label_ids(sequence.places) if takes_logprobs else None,
            skip_clone=True,  # nobody else has them, and a copy takes vLLM longer than all that we do for a request
        )

    def _take(self, output: Any) -> None:
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return  # stopped at its closing tag while the step was under way
        sequence.cached = max(sequence.cached, output.num_cached_tokens or 0)
        made = output.outputs[0]
        if sequence.max_new == 0:
            self._note(sequence, made.logprobs[-1] if made.logprobs else None, sequence.places_here())
            finish: Finish | None = "stop"
        else:
            finish = FINISHES.get(made.finish_reason, "error") if output.finished else None
            if self._write(sequence, made) and (output.finished or output.request_id not in self._bound):
                if not output.finished:
                    self._engine.abort_request([output.request_id])
                finish = "stop"
        if finish == "error":
            sequence.detail = f"vLLM ended the request: {made.finish_reason} {made.stop_reason or ''}".rstrip()
        if finish is not None:
            del self._sequences[output.request_id]
            self._bound.discard(output.request_id)
            self._leave(sequence, finish)

    def _write(self, sequence: TokenSequence, made: Any) -> bool:
        """Add the tokens that were made; True if the answer ends with them."""
        tokens = list(made.token_ids)
        bytes_of = self._compiler.token_bytes
        if made.logprobs is None:
            sequence.extend(tokens, [*map(bytes_of, tokens)])
        else:
            for token, logprobs in zip(tokens, made.logprobs, strict=True):
                self._note(sequence, logprobs, sequence.places_here())
                sequence.append(token, bytes_of(token))
        if not tokens:
            return False
        since = sequence.ends[-len(tokens)] - len(bytes_of(tokens[0]))  # where the first of them begins
        return sequence.has_closing(since=since)

    @staticmethod
    def _note(sequence: TokenSequence, logprobs: Any, here: Sequence[DecisionPlace]) -> None:
        for place in here:
            if logprobs is not None and all(token in logprobs for token in place.label_ids):
                sequence.note(place, distribution_of_logprobs([logprobs[token].logprob for token in place.label_ids]))

    def _leave(self, sequence: TokenSequence, finish: Finish) -> None:
        sequence.finish = finish
        done, probes = sequence.settle(self._encode_text)
        self._done += done
        self._waiting.extendleft(reversed(probes))


@functools.lru_cache(maxsize=256)
def _reading_params(places: tuple[DecisionPlace, ...]) -> SamplingParams:
    """What reads the distributions after a prompt. vLLM writes nothing into them that depends on the request, so all
    of a kind share one object.
    """
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprob_token_ids=_label_ids(places),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _label_ids(places: Sequence[DecisionPlace]) -> list[int]:
    return list(dict.fromkeys(itertools.chain.from_iterable(place.label_ids for place in places)))
