import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Generate(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        grade = len(asked["prompt"]) % 4
        body = json.dumps({"text": f"<think>Counted letters.</think>\n<score>{grade}</score>"}).encode()
        self.send_response(200 if self.path == "/generate" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Generate).serve_forever()
