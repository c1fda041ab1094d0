"""`relabel score` of models that others made: the folder of a cross-encoder, and a server that reranks.

Scores are those that sentence-transformers and the server give; shards and a second call leave the bytes of one
undisturbed run; what reads labels knows that these only rank.
"""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.model import load_student
from relabel.jobs.api import read_labels
from tests.distill.conftest import encoder_dir, labels_file, pairs_file  # noqa: F401
from tests.export.conftest import student  # noqa: F401
from tests.score.conftest import WORDS

pytest.importorskip("sentence_transformers")


def tokenizer_of(words: Sequence[str]) -> Any:
    """Of whole words, as BERT's: `[CLS] a [SEP] b [SEP]`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *words))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    )


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`cross_encoder(num_labels=1)`: a BERT of two layers with random weights, as others save one."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    made: dict[int, Path] = {}

    def make(num_labels: int = 1) -> Path:
        if num_labels not in made:
            folder = tmp_path_factory.mktemp("models") / f"foreign-{num_labels}"
            tokenizer = tokenizer_of(WORDS)
            tokenizer.save_pretrained(folder)
            torch.manual_seed(4)
            config = BertConfig(
                vocab_size=len(tokenizer),
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=64,
                initializer_range=0.5,
                num_labels=num_labels,
            )
            BertForSequenceClassification(config).save_pretrained(folder)
            made[num_labels] = folder
        return made[num_labels]

    return make


def texts_of(pairs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["query"], f"{row['title']}\n\n{row['body']}") for row in pairs]


def test_a_folder_scores_as_sentence_transformers_does_and_its_labels_only_rank(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    pairs: list[dict[str, Any]],
    cross_encoder: Callable[..., Path],
) -> None:
    from sentence_transformers import CrossEncoder

    write_pairs()
    folder = cross_encoder()
    call = ("score", str(folder), "--input", "pairs.parquet", "--to", "out/theirs", "--chunk-rows", "8")
    assert relabel(*call, "--shards", "2", "--device", "cpu").code == 0
    labels = read_labels("out/theirs").sort_by("row_id")
    assert labels["grade"].null_count == labels.num_rows == len(pairs)
    wanted = CrossEncoder(str(folder), device="cpu").predict(texts_of(pairs), show_progress_bar=False)
    assert labels["score"].to_numpy() == pytest.approx(np.asarray(wanted), abs=1e-6)
    assert len(set(labels["score"].to_pylist())) > len(pairs) // 2

    found = relabel("evaluate", "out/theirs", "--qrels", "pairs.parquet", "--output", "json").json
    assert (found["labels"][0]["kind"], found["counts"]["judged"], found["confusion"]) == ("ranking", len(pairs), [])
    assert {"ndcg@10", "kendall_tau"} <= found["figures"].keys()
    assert "accuracy" not in found["figures"]
    assert found["baselines"]["lexical"]["ndcg@10"] is not None

    relabel("convert", "out/theirs", "theirs.qrels").refused(2, "gives no grades", "run file")
    assert relabel("convert", "out/theirs", "theirs.run").code == 0
    held = {tuple(line.split()[0:3:2]): float(line.split()[4]) for line in Path("theirs.run").read_text().splitlines()}
    assert list(held.values()) == pytest.approx(sorted_scores(labels, held), abs=1e-6)
    relabel("evaluate", "a=out/theirs", "b=out/theirs").refused(2, "only rank", "relabel systems")
    assert relabel("report", "out/theirs", "--to", "theirs.html").code == 0
    assert "reranker, without grades" in Path("theirs.html").read_text(encoding="utf-8")


def test_a_rerankers_output_is_a_system_and_a_baseline_in_the_order_of_its_scores(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    pairs: list[dict[str, Any]],
    cross_encoder: Callable[..., Path],
) -> None:
    write_pairs()
    call = ("score", str(cross_encoder()), "--input", "pairs.parquet", "--to", "out/theirs", "--device", "cpu")
    assert relabel(*call).code == 0
    assert relabel("convert", "out/theirs", "theirs.run").code == 0
    lines = [f"{row['query_id']} Q0 {row['doc_id']} 0 {len(pairs) - place} t" for place, row in enumerate(pairs)]
    Path("other.run").write_text("\n".join(lines), encoding="utf-8")

    def differences(system: str) -> Any:
        call = ("systems", f"theirs={system}", "other.run", "--labels", "pairs.parquet", "--output", "json")
        return relabel(*call).json["pairs"]

    assert differences("out/theirs") == differences("theirs.run")
    call = ("evaluate", "pairs.parquet", "--qrels", "gold.parquet", "--baseline", "out/theirs", "--output", "json")
    write_pairs(pairs, "gold.parquet")
    found = relabel(*call).json
    own = relabel("evaluate", "out/theirs", "--qrels", "pairs.parquet", "--output", "json").json
    assert found["baselines"]["rankings"]["theirs"]["ndcg@10"] == pytest.approx(own["figures"]["ndcg@10"]["value"])


def test_missing_columns_are_named_with_the_option_that_names_them(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], cross_encoder: Callable[..., Path]
) -> None:
    write_pairs()
    names = {"title": "name", "body": "text", "query": "words"}
    pq.write_table(pq.read_table("pairs.parquet").rename_columns(names), "own.parquet")
    call = ("score", str(cross_encoder()), "--input", "own.parquet", "--to", "out/own", "--device", "cpu")
    relabel(*call).refused(3, "no column for the document", "Name them by --columns document=NAME+NAME.")
    relabel(*call, "--columns", "document=name+text").refused(3, "no column `query` (--columns query=)")
    assert relabel(*call, "--columns", "document=name+text,query=words").code == 0


@pytest.mark.parametrize("form", ["modules", "bare", "renamed"])
def test_a_bi_encoder_is_refused_since_its_head_would_be_random(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], cross_encoder: Callable[..., Path], form: str
) -> None:
    """Its weights have no head, whatever its configuration says; nothing is labelled."""
    from transformers import AutoModel

    write_pairs()
    shutil.copytree(cross_encoder(), "bi")
    AutoModel.from_pretrained("bi", add_pooling_layer=False).save_pretrained("bi")
    if form == "modules":
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
        Path("bi/modules.json").write_text(json.dumps(modules))
        Path("bi/1_Pooling").mkdir()
        Path("bi/1_Pooling/config.json").write_text('{"word_embedding_dimension": 16}')
    if form == "renamed":
        config = json.loads(Path("bi/config.json").read_text())
        config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
        Path("bi/config.json").write_text(json.dumps(config))
    refused = relabel("score", "bi", "--input", "pairs.parquet", "--to", "out/dl", "--device", "cpu")
    why = {
        "modules": ("its modules end with a vector of the text",),
        "bare": ("BertModel has no head that scores a pair",),
        "renamed": ("its weights have no classifier.weight", "random"),
    }
    refused.refused(3, "bi: no cross-encoder: ", *why[form], "relabel pairs similar")
    assert not list(Path("out").rglob("*.parquet"))
    if form != "renamed":
        assert not Path("out").exists()


def test_a_teacher_is_not_taken_for_a_reranker(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], cross_encoder: Callable[..., Path]
) -> None:
    """A language model that sentence-transformers would ask without a prompt; its labels come of a job."""
    write_pairs()
    shutil.copytree(cross_encoder(), "teacher")
    config = json.loads(Path("teacher/config.json").read_bytes())
    Path("teacher/config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    refused = relabel("score", "teacher", "--input", "pairs.parquet", "--to", "out/dl", "--device", "cpu")
    refused.refused(3, "teacher: LlamaForCausalLM without modules.json: a language model", "engine.model of a job")
    assert not Path("out").exists()


@pytest.mark.parametrize(("knows", "maker"), [("judge", "student"), ("another", "other"), ("", None)])
def test_the_lineage_of_an_exported_student_says_whose_its_scores_are(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    cross_encoder: Callable[..., Path],
    knows: str,
    maker: str | None,
) -> None:
    """`relabel.json` of the folder that was scored; nothing is known of a folder without one."""
    write_pairs()
    assert relabel("run", write_job()).code == 0
    folder = shutil.copytree(cross_encoder(), "model")
    if knows:
        fingerprint = json.loads(Path("out/ecom/plan.json").read_bytes())["fingerprint"]
        learned = {"fingerprint": fingerprint if knows == "judge" else "f" * 64}
        lineage = {"student": {}, "labels": [learned], "split": None}
        Path(folder, "relabel.json").write_text(json.dumps({"lineage": lineage}))
    call = ("score", str(folder), "--input", "pairs.parquet", "--to", "out/theirs", "--device", "cpu")
    assert relabel(*call).code == 0
    done = relabel("systems", "out/theirs", "out/ecom", "--labels", "out/ecom", "--output", "json")
    assert [system["made_by"] for system in done.json["systems"]] == [maker, "judge"]


def test_a_folder_of_modules_is_scored_as_its_student(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    student: Path,  # noqa: F811
) -> None:
    """What `export --format rerank` writes of a student that pools by the mean: no config.json at its top."""
    write_pairs()
    assert relabel("export", str(student), "--to", "rerank", "--format", "rerank").code == 0
    assert not Path("rerank/config.json").exists()
    done = relabel("score", "rerank", "--input", "pairs.parquet", "--to", "out/theirs", "--device", "cpu")
    assert done.code == 0, done.err
    found = read_labels("out/theirs").sort_by("row_id")
    rows = pq.read_table("pairs.parquet").to_pylist()
    pairs = [(row["query"], f"{row['title']}\n\n{row['body']}") for row in rows]
    want_N = load_student(student).probabilities(pairs)["relevance"] @ [0, 0.5, 1]
    assert found["score"].to_pylist() == pytest.approx(want_N.tolist(), abs=1e-4)


def sorted_scores(labels: Any, held: dict[Any, float]) -> list[float]:
    by_pair = {(row["query_id"], row["doc_id"]): row["score"] for row in labels.to_pylist()}
    return [by_pair[pair] for pair in held]


def test_shards_and_a_second_call_end_with_the_scores_of_one_run(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], cross_encoder: Callable[..., Path]
) -> None:
    write_pairs()
    call = ("score", str(cross_encoder()), "--input", "pairs.parquet", "--chunk-rows", "4", "--device", "cpu")
    assert relabel(*call, "--shards", "2", "--to", "out/whole").code == 0
    assert relabel(*call, "--shards", "2", "--to", "out/parts", "--shard", "1/2").code in (0, 20)
    assert relabel(*call, "--shards", "2", "--to", "out/parts").code == 0
    assert relabel(*call, "--shards", "2", "--to", "out/parts").code == 10
    whole, parts = ({path.name: path.read_bytes() for path in Path(name, "labels").rglob("*.parquet")}
                    for name in ("out/whole", "out/parts"))  # fmt: skip
    assert whole == parts


def test_a_model_that_is_no_reranker_or_an_option_of_students_is_refused(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], cross_encoder: Callable[..., Path], folder: Path
) -> None:
    write_pairs()
    rest = ("--input", "pairs.parquet", "--to", "out/x")
    relabel("score", str(cross_encoder(3)), *rest, "--device", "cpu").refused(3, "3 numbers a pair")
    relabel("score", str(cross_encoder()), *rest, "--precision", "int8").refused(2, "--precision")
    relabel("score", str(cross_encoder()), *rest, "--dtype", "float16").refused(2, "--dtype")
    relabel("score", "http://127.0.0.1:9/v1", *rest).refused(2, "server that reranks", "--api")
    relabel("score", "http://me:secret@127.0.0.1:9/rerank", *rest).refused(3, "holds a password")
    (folder / "nothing").mkdir()
    relabel("score", "nothing", *rest).refused(3, "holds no student.json")
    relabel("score", "nothin", *rest).refused(3, "nothin: no such folder. Did you mean nothing?")


# A server.


def words(text: str) -> set[str]:
    return set(text.lower().split())


class Server(BaseHTTPRequestHandler):
    """Scores by shared words, in the form that its class names; refuses documents that say so, and now and then all."""

    form = "tei"
    fails = 0
    asked: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        documents = body.get("texts" if self.form == "tei" else "documents")
        if type(self).fails:
            type(self).fails -= 1
            return self._send(503, {"error": "busy"})
        if documents is None or not self.path.endswith("/rerank"):
            return self._send(422, {"error": "no such form"})
        if any("refuse me" in document for document in documents):
            return self._send(413, {"error": "too long"})
        self.asked.append(len(documents))
        shared = [len(words(body["query"]) & words(one)) / 7 for one in documents]
        name = "score" if self.form == "tei" else "relevance_score"
        items = [{"index": place, name: score} for place, score in enumerate(shared)][::-1]
        return self._send(200, items if self.form == "tei" else {"results": items})

    def _send(self, code: int, reply: Any) -> None:
        data = json.dumps(reply).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(params=["tei", "cohere"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, type[Server]]]:
    handler = type("Handler", (Server,), {"form": request.param, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/rerank", handler
        running.shutdown()


def test_a_server_is_asked_by_query_and_its_scores_come_back_in_order(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    pairs: list[dict[str, Any]],
    server: tuple[str, type[Server]],
) -> None:
    url, handler = server
    pairs[3]["body"] = "refuse me"
    write_pairs(pairs)
    done = relabel("score", url, "--input", "pairs.parquet", "--to", "out/served", "--chunk-rows", "12")
    assert done.code in (0, 30), done  # one of 24 rows is refused
    rows = read_labels("out/served").to_pylist() if done.code == 0 else []
    rows = rows or [
        row for path in Path("out/served/labels").rglob("*.parquet") for row in pq.read_table(path).to_pylist()
    ]
    wanted = {place: len(words(query) & words(text)) / 7 for place, (query, text) in enumerate(texts_of(pairs))}
    del wanted[3]
    assert {row["row_id"]: row["score"] for row in rows} == pytest.approx(wanted, abs=1e-6)
    assert max(handler.asked) > 1
    lost = [row for path in Path("out/served/quarantine").rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert [row["row_id"] for row in lost] == [3]


def test_a_server_that_is_busy_is_asked_again_and_one_that_is_gone_ends_the_run(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    server: tuple[str, type[Server]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relabel.jobs.rerankers.WAITS_S", (0.01, 0.01))
    url, handler = server
    write_pairs()
    call = ("score", url, "--api", handler.form, "--input", "pairs.parquet", "--to", "out/served", "--chunk-rows", "4")
    handler.fails = 2
    assert relabel(*call).code == 0
    handler.fails = 10**6
    gone = relabel(*call[:-4], "--to", "out/gone")
    assert gone.code not in (0, 10)
    handler.fails = 0
    assert relabel(*call[:-4], "--to", "out/gone").code == 0
