"""Cohere's /rerank over a bundle: python rerank.py DEST [--host 127.0.0.1] [--port 8080]. Needs what load.py needs, and
nothing else.

Requests that wait are answered together: one thread computes, and takes all that came meanwhile. Where DEST is a folder
that `relabel pull` writes, a new version is served within a minute of its pull.
"""

import argparse
import importlib.util
import json
import queue
import sys
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

MOST_DOCUMENTS = 1_000
MOST_PAIRS = 256  # of requests that are answered together
MOST_BYTES = 16 << 20
LOOK_EVERY_S = 60.0  # how often DEST/current is looked at


def folder_of(dest):
    """The version that DEST/current points to now, or the bundle that DEST is."""
    current = Path(dest, "current")
    return (current if current.exists() else Path(dest)).resolve()  # once: every file comes from one version


def open_student(dest, **options):
    """The bundle that DEST/current points to, or that DEST is."""
    folder = folder_of(dest)
    spec = importlib.util.spec_from_file_location(f"load_{folder.name}", folder / "load.py")
    load = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(load)
    return load.Student(folder, **options)


def version_of(folder, student):
    """As it was published: a name that was given, with the digest, or the digest alone."""
    has_name = folder.parent.name == ".versions" and folder.name != student.version
    return f"{folder.name} ({student.version})" if has_name else student.version


class Served(NamedTuple):
    """A bundle that is open, and its version's name; in one value, so that no answer names another version."""

    student: Any
    version: str


def follow(server, dest, served, stop, look_every_s=LOOK_EVERY_S, **options):
    """Serve what DEST/current points to, whenever that is another folder than `served`, until `stop` is set. A version
    that can't be loaded is reported, and the one before it is served on."""
    while not stop.wait(look_every_s):
        folder = folder_of(dest)
        if folder == served:
            continue
        served = folder
        try:
            student = open_student(folder, **options)
            server.scorer.served = Served(student, version_of(folder, student))
            print(f"serving version {server.scorer.served.version}", file=sys.stderr)
        except Exception as exc:  # noqa: BLE001 (the server goes on)
            print(f"{folder} can't be served: {type(exc).__name__}: {exc}", file=sys.stderr)


class Scorer:
    """Scores pairs; those of requests that wait together go into one call."""

    def __init__(self, served):
        self.served = served
        self.waiting = queue.Queue(MOST_DOCUMENTS)
        threading.Thread(target=self._work, daemon=True).start()

    def scores(self, pairs):
        """A score a pair, from 0 to 1, and the version that they are of."""
        done = Future()
        self.waiting.put((pairs, done))
        return done.result()

    def _work(self):
        while True:
            asked = [self.waiting.get()]
            while not self.waiting.empty() and sum(len(pairs) for pairs, _ in asked) < MOST_PAIRS:
                asked.append(self.waiting.get())
            student, version = self.served
            try:
                found = student.score([pair for pairs, _ in asked for pair in pairs])
                for pairs, done in asked:
                    done.set_result((found[: len(pairs)], version))
                    found = found[len(pairs) :]
            except Exception as exc:  # noqa: BLE001 (those who asked get it)
                for _, done in asked:
                    done.set_exception(exc)


class Rerank(BaseHTTPRequestHandler):
    """POST /rerank or /v1/rerank {query, documents, top_n}; GET /health."""

    def do_GET(self):
        if self.path == "/health":
            self._reply(200, {"version": self.server.scorer.served.version})
        else:
            self._reply(404, {"error": "POST /rerank or GET /health"})

    def do_POST(self):
        try:
            size = int(self.headers.get("Content-Length", 0))
            if size > MOST_BYTES:
                raise ValueError(f"at most {MOST_BYTES} bytes")
            asked = json.loads(self.rfile.read(size))
            query, documents = asked["query"], asked["documents"]
            if not isinstance(query, str) or not all(isinstance(one, str) for one in documents):
                raise ValueError("query is a string, documents a list of strings")
            if len(documents) > MOST_DOCUMENTS:
                raise ValueError(f"at most {MOST_DOCUMENTS} documents")
        except (KeyError, TypeError, ValueError) as exc:
            self._reply(400, {"error": f"want {{query, documents}}: {exc}"})
            return
        try:
            scores, version = self.server.scorer.scores([(query, document) for document in documents])
        except Exception as exc:  # noqa: BLE001 (the server goes on)
            self._reply(500, {"error": f"{type(exc).__name__}: {exc}"[:300]})
            return
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: asked.get("top_n")]
        results = [{"index": place, "relevance_score": scores[place]} for place in order]
        self._reply(200, {"results": results}, {"X-Relabel-Version": version})

    def _reply(self, status, body, headers=None):
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Requests are not logged: they hold texts of users."""


def serve(served, port, host="127.0.0.1"):
    """A server, started by serve_forever()."""
    server = ThreadingHTTPServer((host, port), Rerank)
    server.scorer = Scorer(served)
    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest")
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 lets other machines ask, and asks nobody who they are"
    )
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--precision")
    arguments = parser.parse_args()
    folder = folder_of(arguments.dest)
    if not (folder / "load.py").is_file():
        print(f"{arguments.dest}: no bundle is here, and `relabel pull` has put none here yet.", file=sys.stderr)
        sys.exit(2)
    student = open_student(folder, precision=arguments.precision)
    version = version_of(folder, student)
    try:
        server = serve(Served(student, version), arguments.port, arguments.host)
    except OSError as exc:
        address = f"{arguments.host}:{arguments.port}"
        print(f"{address}: can't listen there ({exc.strerror}). Give another --port.", file=sys.stderr)
        sys.exit(2)
    following = [server, arguments.dest, folder, threading.Event()]
    threading.Thread(target=follow, args=following, kwargs={"precision": arguments.precision}, daemon=True).start()
    print(f"serving version {version} on {arguments.host}:{server.server_port}", file=sys.stderr)
    server.serve_forever()
