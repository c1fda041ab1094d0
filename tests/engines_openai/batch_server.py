"""What a provider's batch API does: files, batches and what becomes of them, as a test says how each fares."""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from .batch_endings import PLAIN, Ending, Lines
from .scripted_server import Call, Json, Raw, Reset, error

Fate = Literal["completed", "held", "failed", "expired", "gone", "errors"]


class BatchServer:
    """A script for `ScriptedServer`, and its `gets`.

    Args:
        answers: what each line of a batch, and each request that comes alone, is answered.
        fate: of the nth batch, from 0; `held` ones wait for `release`.
        ending: what is odd about how batches are shown and end.
    """

    def __init__(
        self,
        answers: Callable[[Call], Json],
        fate: Callable[[int], Fate] = lambda nth: "completed",
        ending: Ending = PLAIN,
    ) -> None:
        self.answers = answers
        self.fate = fate
        self.ending = ending
        self.files: dict[str, str] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.paid = Counter[str]()
        """Lines by what they ask, of batches that were handed over and did not fail."""
        self.usage = 0
        self.looks = 0
        self.on_look: Callable[[], None] = lambda: None
        self.loses_reply = False
        self.is_held = True
        self.num_seen = Counter[str]()
        """Looks by batch and reads by file."""
        self._guard = threading.Lock()

    def __call__(self, call: Call) -> Json | Reset:
        with self._guard:
            if call.path.endswith("/files"):
                name = f"file-{len(self.files)}"
                assert b'name="purpose"\r\n\r\nbatch\r\n' in call.raw
                self.files[name] = call.raw.split(b"application/jsonl\r\n\r\n")[1].rsplit(b"\r\n--", 1)[0].decode()
                return Json({"id": name, "object": "file"})
            if call.path.endswith("/batches"):
                return self._begin(call.body)
        return self.answers(call)

    def _begin(self, body: dict[str, Any]) -> Json | Reset:
        assert (body["endpoint"], body["completion_window"]) == ("/v1/chat/completions", "24h")
        name = f"batch-{len(self.batches)}"
        fate = self.fate(len(self.batches))
        lines = [json.loads(line) for line in self.files[body["input_file_id"]].splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        assert {(line["method"], line["url"]) for line in lines} == {("POST", "/v1/chat/completions")}
        self.batches[name] = {
            "id": name,
            "metadata": body["metadata"],
            "input_file_id": body["input_file_id"],
            "fate": fate,
            "lines": lines,
        }
        if fate in ("completed", "held"):
            self.paid.update(json.dumps(line["body"], sort_keys=True) for line in lines)
        if self.loses_reply:
            self.loses_reply = False
            return Reset()
        return Json(self.ending.begun({"id": name, "object": "batch", "status": "validating"}))

    def get(self, path: str) -> Json | Raw:
        with self._guard:
            if "/batches?" in path:
                held = list(self.batches.values())[::-1]
                after = (re.search(r"after=([\w-]+)", path) or ["", ""])[1]
                start = [one["id"] for one in held].index(after) + 1 if after else 0
                page = held[start : start + 2]
                shown = [
                    {"status": None, **{key: one[key] for key in ("id", "metadata", "input_file_id")}} for one in page
                ]
                return Json(self.ending.listed({"data": shown, "has_more": start + 2 < len(held) or None}))
            if found := re.search(r"/files/([\w-]+)-(output|error)/content", path):
                lines = self._results(self.batches[found[1]], found[2])
                self.num_seen[path] += 1
                return self.ending.read(Lines(lines, found[2], self._number(found[1]), self.num_seen[path]))
            self.looks += 1
            batch = self.batches[path.rpartition("/")[2]]
            self.num_seen[batch["id"]] += 1
        self.on_look()
        return self.ending.shown(self._state(batch), self._number(batch["id"]), self.num_seen[batch["id"]])

    def _number(self, batch: str) -> int:
        return list(self.batches).index(batch)

    def _state(self, batch: dict[str, Any]) -> Json:
        name, fate = batch["id"], batch["fate"]
        if fate == "gone":
            return error(404, "no such batch")
        if fate == "held" and self.is_held:
            return Json({"id": name, "status": "in_progress"})
        if fate == "failed":
            errors = {"data": [{"code": "token_limit_exceeded", "message": "enqueued token limit reached"}]}
            return Json({"id": name, "status": "failed", "errors": errors})
        status = "expired" if fate == "expired" else "completed"
        files = {"output_file_id": f"{name}-output"}
        if fate in ("expired", "errors"):
            files["error_file_id"] = f"{name}-error"
        return Json({"id": name, "status": status, **files})

    def _results(self, batch: dict[str, Any], which: str) -> list[dict[str, Any]]:
        """Lines in another order than they came. Of one that expired, or errs, every second is answered."""
        lines = batch["lines"][::-1]
        is_half = batch["fate"] in ("expired", "errors")
        if which == "error":
            return [self._unanswered(line, batch["fate"]) for line in lines[1::2]]
        return [self._answered(line) for line in (lines[::2] if is_half else lines)]

    def _answered(self, line: dict[str, Any]) -> dict[str, Any]:
        reply = self.answers(Call("/v1/chat/completions", {}, json.dumps(line["body"]).encode(), 10**6))
        return {
            "custom_id": line["custom_id"],
            "response": {"status_code": reply.status, "body": reply.payload},
            "error": None,
        }

    def _unanswered(self, line: dict[str, Any], fate: str) -> dict[str, Any]:
        if fate == "errors":
            body = {"error": {"code": "context_length_exceeded", "message": "too long"}}
            return {"custom_id": line["custom_id"], "response": {"status_code": 400, "body": body}, "error": None}
        expired = {"code": "batch_expired", "message": "This request could not be executed in time."}
        return {"custom_id": line["custom_id"], "response": None, "error": expired}
