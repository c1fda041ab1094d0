"""Does GRPO learn? A tiny random Qwen2 that was shown nothing but the answers' format, with a grade at random, is
trained on R3A's reward; what has to be found out is which word of the document means which grade.

    .venv/bin/python benchmarks/grpo_learns.py [--steps 60] [--labeler r1|r3a|graph-grpo]

Prints the mean reward by step. A device with two cores takes under two minutes.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from relabel.distill.teachers.rewards import GoldRow, each, grade_score, graph_score
from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues, longest_answer
from relabel.distill.teachers.spec import CreditSection, RolloutSection, RolloutTraining
from relabel.distill.training.output import TrainingPlace
from relabel.labelers.engines.tokens import PromptEncoder
from relabel.labelers.registry import labeler_class
from relabel.manifests.labels import Pair
from relabel.manifests.specs import validate_spec

WORDS = (("mud", "sand", "clay"), ("boot", "lace", "sole"), ("rose", "bush", "leaf"))
"""Words of documents, by the grade that they mean."""
ANSWERS = {
    "r1": ("<think></think><score>{grade}</score>",),
    "r3a": (
        "<think></think><intent>x</intent>",
        "<think></think><extract>none</extract><score>{grade}</score>",
    ),
    "graph-grpo": (
        "<preliminary>{other}</preliminary><query_subject>x</query_subject><query_attribute>x</query_attribute>"
        "<product_subject>x</product_subject><product_attribute>x</product_attribute>"
        "<subject_score>{s}</subject_score><attribute_score>{a}</attribute_score><score>{grade}</score>",
    ),
}
TEMPLATES = {
    "r1": {"system.j2": "Grade.", "user.j2": "{{ query }}: {{ document }}"},
    "r3a": {
        "system.j2": "Grade.",
        "intent.j2": "{{ query }}{% for text in context %}{{ text }}{% endfor %}",
        "verdict.j2": "{{ document }}",
    },
    "graph-grpo": {"system.j2": "Grade.", "user.j2": "{{ query }}: {{ document }}"},
}
PLAIN = ("none", "Grade.", "system", "user", "assistant", "garden", "shoes")
"""Further words of one token, to keep prompts short."""
RATE = 1e-3
SPREAD = 0.1
"""Standard deviation of the first weights: at 0.02 so small a model attends to nothing for far more than 60 steps."""
KNOWN = 0.1
"""Share of the shown answers whose grade is gold's; the others' is drawn at random."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Setting(NamedTuple):
    """All that a training needs."""

    model: Any
    tokenizer: Any
    dialogues: Dialogues
    rows: Sequence[GoldRow]


def make_tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level tokenizer that knows these texts, some of them tags, as one token each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(vocab_size: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {
        "initializer_range": SPREAD,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, eos_token_id=None, **shape, **heads))


def make_rows(count: int, *, seed: int = 1) -> list[GoldRow]:
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        grade = rng.randrange(3)
        pair = Pair(number, f"q{number}", rng.choice(("garden", "shoes")), f"d{number}", rng.choice(WORDS[grade]))
        rows.append(GoldRow(pair, {"grade": grade, "subject": 2 * grade, "attribute": 4 - grade}))
    return rows


def make_setting(name: str, folder: Path, *, num_rows: int = 96) -> Setting:
    """A model as it was made, and rows."""
    templates = folder / f"templates-{name}"
    templates.mkdir(parents=True, exist_ok=True)
    for file, text in TEMPLATES[name].items():
        (templates / file).write_text(text, encoding="utf-8")
    kind = labeler_class(name)
    options = {"name": name, "grades": 3, "templates": str(templates)}
    options |= dict.fromkeys({"max_think_tokens", "max_text_tokens"} & kind.Options.model_fields.keys(), 4)
    labeler = kind(validate_spec(kind.Options, options, where="benchmark"))
    tags = [section.tag for ask in labeler.probe() if ask.format is not None for section in ask.format.sections]
    closed = [form.format(tag) for tag in dict.fromkeys(tags) for form in ("<{}>", "</{}>")]
    tokenizer = make_tokenizer([*closed, *(word for words in WORDS for word in words), *PLAIN])
    tokens = AnswerTokens(tokenizer, end_ids=[tokenizer.eos_token_id])
    dialogues = Dialogues(labeler, PromptEncoder(tokenizer), tokens, max_prompt_tokens=400)
    return Setting(make_model(len(tokenizer)), tokenizer, dialogues, make_rows(num_rows))


def show_format(setting: Setting, name: str, *, steps: int = 200, batch: int = 32) -> None:
    """Supervised steps on answers in the format, whose grades are drawn at random."""
    rng = random.Random(5)
    model, tokenizer = setting.model.train(), setting.tokenizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        examples = [_formatted(setting, name, rng) for _ in range(batch)]
        longest = max(len(ids) for ids, _ in examples)
        ids = torch.full((batch, longest), tokenizer.pad_token_id)
        labels = torch.full((batch, longest), -100)
        for place, (example, is_own) in enumerate(examples):
            ids[place, : len(example)] = torch.tensor(example)
            wanted = [token if own else -100 for token, own in zip(example, is_own, strict=True)]
            labels[place, : len(example)] = torch.tensor(wanted)
        attention = (torch.arange(longest) < torch.tensor([[len(one)] for one, _ in examples])).long()
        model(input_ids=ids, attention_mask=attention, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _formatted(setting: Setting, name: str, rng: random.Random) -> tuple[list[int], list[bool]]:
    """A conversation with made-up answers, and which of its tokens are the answers'."""
    row = rng.choice(setting.rows)
    grade = row.gold["grade"] if rng.random() < KNOWN else rng.randrange(3)
    numbers = {"grade": grade, "other": rng.randrange(3), "s": rng.randrange(5), "a": rng.randrange(5)}
    texts = [text.format(**numbers) for text in ANSWERS[name]]

    def write(contexts: Sequence[list[int]]) -> list[list[int]]:
        ids = setting.tokenizer(texts.pop(0), add_special_tokens=False)["input_ids"]
        return [[*ids, setting.tokenizer.eos_token_id] for _ in contexts]

    (rollout,) = setting.dialogues.roll([row.pair], write)
    assert rollout.label is not None, rollout.detail
    prompt = rollout.prompt_ids
    return prompt + rollout.completion_ids, [False] * len(prompt) + rollout.is_own


def train(
    setting: Setting, name: str, folder: Path, *, steps: int, group: int = 16, rate: float = RATE, **options: Any
) -> Any:
    """GRPO, two steps on each group's rollouts of 16 prompts; the training, with its curve."""
    from relabel.distill.teachers.grpo_trainer import CreditTrainer, RolloutTrainer, grpo_arguments
    from relabel.distill.training.loop import Training

    settings = RolloutTraining(
        max_steps=steps, batch_size=16 * group, accumulation=1, learning_rate=rate, schedule="constant", warmup=0,
        device="cpu", precision="fp32",
    )  # fmt: skip
    most = longest_answer(setting.dialogues.labeler)
    args = grpo_arguments(settings, RolloutSection(group=group, updates=2), folder, max_answer_tokens=min(most, 64))
    trainer_class = CreditTrainer if "credit" in options else RolloutTrainer
    trainer = trainer_class(
        model=setting.model,
        processing_class=setting.tokenizer,
        args=args,
        dialogues=setting.dialogues,
        rows=setting.rows,
        scored=each(graph_score() if name == "graph-grpo" else grade_score(0.0)),
        place=TrainingPlace(folder, 1, lambda _: None, [row.name for row in setting.rows]),
        **options,
    )
    training = Training(trainer, settings)
    training.run()
    return training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tags", choices=("none", "grade"), default="grade", help="graph-grpo: what tags earn")
    parser.add_argument("--labeler", choices=sorted(ANSWERS), default="r1")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        setting = make_setting(chosen.labeler, Path(name))
        began = time.perf_counter()
        show_format(setting, chosen.labeler)
        shown = time.perf_counter()
        print(f"format shown in {shown - began:.1f} s")
        options: dict[str, Any] = {}
        if chosen.labeler == "graph-grpo":
            from relabel.distill.teachers.credit import Credit

            options["credit"] = Credit(CreditSection(tags=chosen.tags))
        curve = train(setting, chosen.labeler, Path(name), steps=chosen.steps, **options).curve
        print(f"{chosen.steps} steps in {time.perf_counter() - shown:.1f} s")
        names = ("reward", "accuracy", "format_rate")
        series = [dict(curve.series("train", name)) for name in names]
        for step in range(1, chosen.steps + 1):
            if step == 1 or step % 5 == 0:
                print(
                    f"step {step:3}  "
                    + "  ".join(f"{n} {s.get(step, s.get(step - 1)):.3f}" for n, s in zip(names, series, strict=True))
                )


if __name__ == "__main__":
    main()
