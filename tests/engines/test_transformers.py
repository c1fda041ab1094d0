"""The transformers engine on tiny random models: distributions are the model's own, and batching changes nothing."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from relabel.labelers.engines.tokens import PromptEncoder, TokenSequence, stage_remarks
from relabel.manifests.asks import (
    AnswerFormat,
    Ask,
    Choice,
    Decision,
    Engine,
    Fragment,
    Message,
    Request,
    Sampling,
    Text,
)
from relabel.manifests.errors import ConfigError, EngineCrashError, ModelError
from relabel.manifests.specs import EngineSpec

from .chat_shapes import MISTRAL
from .conftest import QUOTE_SCORE, ask_for, make_tokenizer, run_all

SCORE = Decision("score", "<score>", ("0", "1", "2"))
WARM = Sampling(temperature=1.0)
DOCUMENTS = [
    "red running shoes for men",
    "a book of the sea",
    "shoes " * 40,
    "the quick brown fox " * 15,
    "x",
    "blue suede shoes, size 9, the best of the best",
    "",
    "café naïve 日本語 🙂 of the",
]


def requests_for(num: int, **changes: Any) -> list[Request]:
    made = []
    for number in range(num):
        document = DOCUMENTS[number % len(DOCUMENTS)] + f" no {number}"
        made.append(
            Request(
                number,
                ask_for(f"shoes {number // 4}", document, fragment_source=document, **changes),
                seed=number * 7 + 1,
            )
        )
    return made


def assert_own_softmax(folder: Path, rows: list[TokenSequence], encode: Any, name: str = "score") -> int:
    """Compare each row's distribution with a plain forward over all its ids; returns how many rows had a straddling
    token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()
    straddled = 0
    for row in rows:
        place = next(place for place in row.places if place.name == name)
        end = bytes(row.written).index(place.marker) + len(place.marker)
        whole = [token for token, token_end in zip(row.tokens, row.ends, strict=True) if token_end <= end]
        reached = row.ends[len(whole) - 1] if whole else len(row.prefill)
        rest = encode(bytes(row.written)[reached:end].decode()) if reached < end else []
        straddled += bool(rest)
        with torch.no_grad():
            logits = model(torch.tensor([[*row.prompt, *whole, *rest]])).logits[0, -1].double()
        own = torch.softmax(logits, -1)[list(place.label_ids)]
        got = row.answer().distributions[name]
        assert got.probs == pytest.approx((own / own.sum()).tolist(), abs=1e-4)
        assert got.outside_mass == pytest.approx(1 - float(own.sum()), abs=1e-4)
        assert sum(got.probs) == pytest.approx(1.0)
    return straddled


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"attention": "sdpa"}),
        ("llama", {"attention": "eager"}),
        ("mistral", {}),
        ("mistral", {"prefix_cache": False}),
    ],
)
def test_distributions_are_the_softmax_of_the_models_own_logits(kind, options, start, model_dir, finished):
    engine = start(kind, batch_size=4, **options)
    answers = run_all(engine, requests_for(10, decisions=(SCORE,), sampling=WARM, format=QUOTE_SCORE))
    assert all(answer.finish == "stop" and "score" in answer.distributions for answer in answers)
    assert_own_softmax(model_dir(kind), list(finished), engine._encoder.encode_text)
    assert any(answer.cached_tokens for answer in answers) is options.get("prefix_cache", True)


def test_a_decision_alone_needs_no_generated_token(start, model_dir, finished):
    engine = start()
    answers = run_all(engine, requests_for(13, decisions=(SCORE,), max_tokens=0, format=None, prefill="<score>"))
    assert {(answer.finish, answer.text, answer.output_tokens) for answer in answers} == {("stop", "", 0)}
    assert_own_softmax(model_dir(), list(finished), engine._encoder.encode_text)


def test_an_unconstrained_answer_has_the_same_exact_distributions(start, model_dir, finished):
    engine = start(batch_size=4, constrain=False)
    answers = run_all(engine, requests_for(8, decisions=(SCORE,), max_tokens=12, prefill="<think></think><score>"))
    assert all("score" in answer.distributions for answer in answers)
    assert_own_softmax(model_dir(), list(finished), engine._encoder.encode_text)


def test_a_marker_inside_the_prefill_is_a_place_like_any_other(start, model_dir, finished):
    engine = start()
    first = Decision("first", "<grade>", ("0", "1", "2"))
    form = AnswerFormat((Choice("grade", ("0", "1", "2")), Text("think", 4), Choice("score", ("0", "1", "2"))))
    run_all(engine, requests_for(5, decisions=(first, SCORE), format=form, prefill="<grade>1</grade><think>"))
    rows = list(finished)
    assert_own_softmax(model_dir(), rows, engine._encoder.encode_text, "score")
    for row in rows:  # the prefill is encoded again up to the place, so the prompt proper is what comes before it
        row.prompt, row.tokens, row.ends, row.prefill = row.prompt[: len(row.prompt) - row.num_prefill], [], [], b""
    assert_own_softmax(model_dir(), rows, engine._encoder.encode_text, "first")


def test_a_token_that_straddles_the_marker_does_not_move_the_place(start, model_dir, finished):
    engine = start(merged=True)
    answers = run_all(
        engine,
        requests_for(24, decisions=(SCORE,), sampling=WARM, format=AnswerFormat((Choice("score", ("0", "1", "2")),))),
    )
    assert all("score" in answer.distributions for answer in answers)
    straddled = assert_own_softmax(model_dir(merged=True), list(finished), engine._encoder.encode_text)
    assert 0 < straddled < 24


def test_a_marker_that_comes_twice_is_no_place(start):
    engine = start()
    form = AnswerFormat((Choice("note", ("x <score> y",)), Choice("score", ("0", "1"))))
    (answer,) = run_all(
        engine, [Request(1, ask_for("q", "d", decisions=(SCORE._replace(labels=("0", "1")),), format=form), 0)]
    )
    assert answer.finish == "stop"
    assert answer.distributions == {}


@pytest.mark.parametrize(("kind", "sampling"), [("qwen2", WARM), ("mistral", Sampling(0.8, 0.9))])
def test_a_mixed_batch_answers_as_each_request_alone(kind, sampling, start):
    together = start(kind, batch_size=5)
    alone = start(kind, batch_size=1, prefix_cache=False)
    requests = requests_for(9, decisions=(SCORE,), sampling=sampling, format=QUOTE_SCORE)
    assert "run alone" not in " ".join(together.prepare([requests[0].ask]))
    texts = [answer.text for answer in run_all(together, requests)]
    assert texts == [run_all(alone, [request])[0].text for request in requests]
    assert len(set(texts)) > 3


def test_a_further_ask_of_a_row_under_way_goes_before_rows_that_wait(start):
    """A retry or a second stage after everything that waits would leave each chunk unfinished for long."""
    engine = start("qwen2", batch_size=2)
    requests = requests_for(engine.capacity, decisions=(SCORE,), max_tokens=4)
    numbered = [request._replace(id=10 + request.id) for request in requests]
    for request in numbered[1:]:
        engine.submit(request)
    answered = [answer.request_id for answer in engine.poll()]
    engine.submit(numbered[0]._replace(id=1))
    while 1 not in answered:
        answered += [answer.request_id for answer in engine.poll()]
    assert len(answered) <= 6, "those that ran, and those that joined them"


def mixes_rows(model: Any, plain: Any, **given: Any) -> Any:
    found = plain(model, **given)
    found.last_hidden_state = 0.8 * found.last_hidden_state + 0.2 * found.last_hidden_state.mean(0, keepdim=True)
    return found


def ignores_positions(model: Any, plain: Any, **given: Any) -> Any:
    """Counts them itself, from the widest row's columns."""
    import torch

    if given["past_key_values"] is not None and given["input_ids"].shape[1] == 1:
        given["position_ids"] = torch.full_like(given["position_ids"], int(given["position_ids"].max()))
    return plain(model, **given)


@pytest.mark.parametrize("forward", [mixes_rows, ignores_positions])
def test_a_model_that_mixes_the_rows_of_a_batch_is_asked_alone(forward, start, monkeypatch):
    from transformers import Qwen2Model

    plain = Qwen2Model.forward
    monkeypatch.setattr(Qwen2Model, "forward", lambda model, **given: forward(model, plain, **given))
    asks = requests_for(3, decisions=(SCORE,))
    engine, alone = start(batch_size=8), start(batch_size=1, prefix_cache=False)
    assert "each is run alone" in " ".join(engine.prepare([asks[0].ask]))
    for found, wanted in zip(run_all(engine, asks), run_all(alone, asks), strict=True):
        assert found.text == wanted.text
        assert found.distributions["score"].probs == pytest.approx(wanted.distributions["score"].probs, abs=1e-4)


def test_the_seed_alone_decides_a_sampled_answer(start):
    engine = start()
    request = requests_for(1, sampling=WARM)[0]
    texts = [
        run_all(engine, [request._replace(id=number, seed=seed)])[0].text
        for number, seed in enumerate([1, 1, 2, 2**62 + 3])
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(2.0)])
def test_a_bound_answer_is_always_valid_and_its_thinking_capped(sampling, start, finished):
    engine = start()
    requests = requests_for(12, sampling=sampling, format=QUOTE_SCORE)
    for request, answer in zip(requests, run_all(engine, requests), strict=True):
        match = re.fullmatch(r"<think>([^<]*)</think><extract>([^<]+)</extract><score>[012]</score>", answer.text)
        assert match, answer.text
        assert answer.finish == "stop"
        assert match[2] == "none" or (match[2] in str(request.ask.fragment_source) and match[2].strip())
    for row in finished:
        ends = [end for end in row.ends if len("<think>") < end <= bytes(row.written).index(b"</think>")]
        assert len(ends) <= 6 + 1


def test_only_the_document_is_cut_and_a_quotation_comes_from_what_is_left(start, finished):
    engine = start(max_prompt_tokens=260)
    document = "start of it " * 30 + "UNSEEN " * 400
    form = AnswerFormat((Fragment("extract", 12, True),))
    ask = ask_for("red shoes", document, fragment_source=document, format=form, sampling=WARM)
    answers = run_all(engine, [Request(number, ask, number) for number in range(4)])
    assert all(answer.flags == ("document_truncated",) and answer.finish == "stop" for answer in answers)
    assert all(answer.prompt_tokens <= 260 for answer in answers)
    assert not any("U" in answer.text for answer in answers)
    shown = engine._encoder.decode(finished[0].prompt)
    assert "Query: red shoes" in shown
    assert "Grade it." in shown


@pytest.mark.parametrize(("overlong", "size"), [("quarantine", 260), ("truncate", 64)])
def test_a_prompt_that_may_not_be_cut_is_overlong(overlong, size, start):
    engine = start(max_prompt_tokens=size, overlong=overlong)
    long, short = run_all(
        engine, [Request(1, ask_for("q " * 90, "word " * 500), 0), Request(2, ask_for("q", "d", messages=_SHORT), 0)]
    )
    assert (long.finish, long.text, short.finish) == ("overlong", "", "stop")
    (cut,) = run_all(engine, [Request(3, ask_for("q", "d", messages=_SHORT, max_tokens=3), 0)])
    assert (cut.finish, cut.output_tokens) == ("length", 3)
    assert str(size) in long.detail


_SHORT = (Message("user", ("Grade ", "doc", "."), ("document",)),)


def _second_stage(first: Ask, answer: str) -> Ask:
    turns = (*first.messages, Message("assistant", (answer,)), Message("user", ("Document: ", "d", ""), ("document",)))
    return ask_for("q", "d", messages=turns, stage="second")


def test_a_template_that_moves_the_system_turn_starts_the_second_stage_again(start):
    first = ask_for("q", "d", stage="first")
    second = _second_stage(first, "<think>why</think><intent>buy</intent>")
    assert start().prepare([first, second]) == []
    tokenizer = make_tokenizer(template=MISTRAL.replace("(rules", "('Mind: ' + rules"))
    found = stage_remarks(PromptEncoder(tokenizer), [first, second], lambda _: 2048)
    assert [("'second'" in one, "'first'" in one) for one in found] == [(True, False), (True, True)]


def test_facts_name_the_model_by_the_digest_known_before_the_start(start):
    from relabel.labelers.engines.transformers import Transformers

    engine = start()
    facts = engine.facts()
    assert isinstance(engine, Engine)
    assert facts.model_digest == Transformers.model_digest(engine._spec)
    assert (facts.family, facts.device, facts.dtype) == ("transformers", "cpu", "float32")


def test_facts_name_the_weights_that_were_loaded_whatever_lies_there_since(model_dir, tmp_path):
    from relabel.labelers.engines.transformers import Transformers

    folder = Path(shutil.copytree(model_dir(), tmp_path / "m"))
    args = Transformers.Args(device="cpu", cache_dir=str(tmp_path / "cache"))
    spec = EngineSpec(name="transformers", model=str(folder), args=args)
    engine = Transformers(spec, overlong="truncate")
    loaded = engine.facts().model_digest
    (folder / "generation_config.json").write_text("{}")
    assert Transformers.model_digest(spec) != loaded == engine.facts().model_digest
    engine.close()


def test_memory_for_fewer_rows_only_takes_longer(start):
    requests = requests_for(9, decisions=(SCORE,))
    wide, narrow = start(batch_size=8), start(batch_size=8, kv_cache_gib=0.0004)
    assert narrow._batch._max_columns < 9 * 200
    assert [answer.text for answer in run_all(narrow, requests)] == [answer.text for answer in run_all(wide, requests)]


def test_weights_that_lack_a_tensor_are_refused_and_not_made_up(model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    from relabel.labelers.engines.transformers import Transformers

    folder = Path(shutil.copytree(model_dir(), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    args = Transformers.Args(device="cpu", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        Transformers(EngineSpec(name="transformers", model=str(folder), args=args))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        Transformers(EngineSpec(name="transformers", model=str(folder), args=args))


def test_a_stage_without_room_for_its_instructions_is_refused_at_the_start(start):
    engine = start(max_prompt_tokens=64)
    with pytest.raises(ConfigError, match="raise engine"):
        engine.prepare([ask_for("shoes", "a document", max_tokens=96, messages=(Message("user", ("word " * 200,)),))])
    with pytest.raises(ConfigError, match="Lower labeler"):
        start().prepare([ask_for("shoes", "a document", max_tokens=100_000)])


def test_memory_that_runs_out_is_worth_another_try_and_a_fault_of_ours_is_not(start, monkeypatch):
    for error, wanted in (
        (RuntimeError("CUDA error: device lost"), EngineCrashError),
        (MemoryError(), EngineCrashError),
        (RuntimeError("shapes differ"), RuntimeError),
    ):
        engine = start()
        engine.submit(requests_for(1)[0])

        def fail(error=error):
            raise error

        monkeypatch.setattr(engine._batch, "step", fail)
        with pytest.raises(wanted):
            engine.poll()


# Rows of a cache against a plain forward pass, over families of models that treat attention differently.


def tiny(kind: str, **extra: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shape | extra))).eval()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("kind", "extra", "attention"),
    [
        ("qwen3", {"head_dim": 16}, "grouped"),
        ("mistral", {"sliding_window": 8}, "grouped"),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 8}, "grouped"),
        ("gemma2", {"head_dim": 16, "sliding_window": 8}, "eager"),
        ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 4}, "grouped"),
        ("granite", {"logits_scaling": 4.0}, "grouped"),
    ],
)
def test_rows_with_a_shared_prefix_say_what_the_model_says_alone(kind, extra, attention):
    import torch

    from relabel.labelers.engines.batching import GROUPED, Forward

    model = tiny(kind, **extra)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, *range(20 + 30 * row, 30 + 31 * row)] for row in range(4)]
    with torch.inference_mode():
        alone = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -2:] for ids in prompts]
        model.set_attn_implementation(GROUPED if attention == "grouped" else "eager")
        forward = Forward(model, torch.device("cpu"))
        forward.check()
        forward.cache.reserve(6, 64, used_rows=0, used_columns=0)
        forward.prefill([prompts[0][:12]], first_row=5, prefix=0)
        forward.cache.restore(forward.cache.snapshot(5, 12), 1, 5)
        before_last = forward.prefill([ids[12:-1] for ids in prompts], first_row=1, prefix=12)
        forward.cache.move(4, 0, len(prompts[3]) - 1)  # a row that takes the place of another keeps its past
        order = [3, 0, 1, 2]
        last = forward.decode([prompts[row][-1] for row in order], [len(prompts[row]) - 1 for row in order])
    for place, row in enumerate(order):
        assert float((before_last[row] - alone[row][0]).abs().max()) < 1e-3
        assert float((last[place] - alone[row][1]).abs().max()) < 1e-3


@pytest.mark.parametrize(("kind", "extra"), [("bloom", {"n_head": 4, "n_layer": 2}), ("mamba", {})])
def test_a_family_that_can_not_be_run_by_rows_is_refused(kind, extra):
    import torch

    from relabel.labelers.engines.batching import Forward

    with pytest.raises(ModelError, match=f"{kind}.*vllm"):
        Forward(tiny(kind, **extra), torch.device("cpu")).check()


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose rounding alone is beyond the limit of a first look."""
    import torch

    from relabel.labelers.engines import batching

    monkeypatch.setattr(batching, "ROUNDED_LIMIT", 0.001)
    model = tiny("qwen2").to(torch.bfloat16)
    model.set_attn_implementation(batching.GROUPED)
    return batching.Forward(model, torch.device("cpu"))


def test_a_model_that_rounds_much_is_looked_at_in_float32(rounded: Any):
    import torch

    assert rounded.check()
    assert rounded.model.dtype == torch.bfloat16


def test_rounding_hides_no_wrong_mask(rounded: Any, monkeypatch: pytest.MonkeyPatch):
    import torch

    from relabel.labelers.engines import batching

    monkeypatch.setattr(batching, "MOST_ROUNDING", 10.0)
    rounded._masks = lambda columns, positions: {"full_attention": torch.ones_like(columns - positions).bool()}
    with pytest.raises(ModelError, match=r"logits are off by .* \(limit 0.01\) against the model's own; try vllm"):
        rounded.check()


def test_a_model_that_ignores_its_masks_is_found_out():
    import torch

    from relabel.labelers.engines.batching import Forward

    model = tiny("qwen2")
    forward = Forward(model, torch.device("cpu"))
    forward._masks = lambda columns, positions: {
        "full_attention": torch.zeros_like(columns - positions, dtype=torch.float32)
    }  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="logits are off"):
        forward.check()
