"""Models of random weights in the shapes of well-known ones, their tokenizers and pairs, all made here: a GPU host may
have no hub. `tiny` makes each shape a model of two layers, for rehearsals on a CPU.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.labels import Pair

WORDS = ["".join(random.Random(number).choices("aeioubcdfglmnprstv", k=3 + number % 7)) for number in range(4000)]
ROOT = Path(__file__).parents[1]
SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "qwen-1.5b": (1536, 8960, 28, 12, 2, 151_936),
    "qwen-7b": (3584, 18_944, 28, 28, 4, 152_064),
    "bert-base": (768, 3072, 12, 12, 12, 30_522),
    "minilm-l6": (384, 1536, 6, 12, 12, 30_522),
}
"""Width, width of the feed-forward layer, layers, heads, heads of keys and values, vocabulary."""
TINY = (64, 96, 2, 2, 1)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def made_up_pairs(num_queries: int, docs_per_query: int, *, doc_words: int = 60, context_words: int = 30) -> list[Pair]:
    """Queries of four words with four context documents each, and documents; words are made up."""
    rng = random.Random(11)
    pairs = []
    for query in range(num_queries):
        text = " ".join(rng.choices(WORDS, k=4))
        context = tuple(" ".join(rng.choices(WORDS, k=context_words)) for _ in range(4))
        for number in range(docs_per_query):
            document = " ".join(rng.choices(WORDS, k=doc_words))
            pairs.append(Pair(len(pairs), f"q{query}", text, f"d{query}-{number}", document, context))
    return pairs


def write_pairs(path: Path, pairs: Iterable[Pair]) -> Path:
    """Pairs as a Parquet file, with a column `grade` of 0, 1 and 2 in turn."""
    columns = ("query_id", "query", "doc_id", "document")
    rows = [{name: getattr(pair, name) for name in columns} | {"grade": pair.row_id % 3} for pair in pairs]
    for row, pair in zip(rows, pairs, strict=True):
        row["context"] = list(pair.context)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=16_384)
    return path


def write_model(folder: Path, shape: str, *, tiny: bool) -> Path:
    """A model directory; left as it is where it was made before."""
    import torch
    import transformers as tf

    if (folder / "config.json").is_file():
        return folder
    is_decoder = shape.startswith("qwen")
    width, inner, layers, heads, kv_heads, vocab = SHAPES[shape]
    tokenizer = decoder_tokenizer() if is_decoder else encoder_tokenizer()
    if tiny:
        width, inner, layers, heads, kv_heads = TINY
        vocab = len(tokenizer) + 5  # wider than the tokenizer, as real ones are
    values: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "max_position_embeddings": 8192 if is_decoder else 512,
    }  # fmt: skip
    torch.manual_seed(7)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        if is_decoder:
            tied = shape != "qwen-7b"
            config = tf.Qwen2Config(
                **values, num_key_value_heads=kv_heads, tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id
            )
            model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        else:
            model = tf.BertModel(tf.BertConfig(**values))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="2GB")
    return folder


def _fast(backend: Any, **named: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def decoder_tokenizer() -> Any:
    """A byte-level BPE of 8,000 tokens, trained on the labelers' templates and the made-up words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    templates = sorted((ROOT / "labelers" / "templates").rglob("*.j2"))
    backend.train_from_iterator([*(path.read_text() for path in templates), " ".join(WORDS)], trainer)
    backend.add_tokens([AddedToken("</think>", normalized=False)])
    tokenizer = _fast(backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def encoder_tokenizer() -> Any:
    """BERT's normaliser and WordPiece, trained on the made-up words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=5000, special_tokens=special, show_progress=False)
    backend.train_from_iterator([" ".join(WORDS), "abcdefghijklmnopqrstuvwxyz 0123456789"], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return _fast(
        backend, **names, model_max_length=512, model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    )
