import threading
from http.server import ThreadingHTTPServer

import pytest
from toy.engine import Toy, ToyArgs
from toy_server import Generate

from relabel.manifests.asks import AnswerFormat, Ask, Choice, Message, Request
from relabel.manifests.errors import ServerGoneError
from relabel.manifests.specs import EngineSpec


def ask(document):
    user = Message("user", ("Query: ", "roses", " Document: ", document, ""), ("query", "document"))
    return Ask("verdict", (user,), AnswerFormat((Choice("score", ("0", "1")),)), 100)


@pytest.fixture
def engine():
    with ThreadingHTTPServer(("127.0.0.1", 0), Generate) as server:
        threading.Thread(target=server.serve_forever).start()
        args = ToyArgs(url=f"http://127.0.0.1:{server.server_address[1]}")
        engine = Toy(EngineSpec(name="toy", max_prompt_tokens=64, args=args))
        yield engine
        engine.close()
        server.shutdown()


def test_every_request_is_answered_once(engine):
    for number in range(10):
        engine.submit(Request(number, ask("x" * 100 * number), number))
    answers = []
    while len(answers) < 10:
        answers += engine.poll()
    finishes = {answer.request_id: answer.finish for answer in answers}
    assert finishes == {number: "stop" if number < 3 else "overlong" for number in range(10)}


def test_a_server_that_is_gone_ends_the_run():
    engine = Toy(EngineSpec(name="toy", args=ToyArgs(url="http://127.0.0.1:1", max_tries=1)))
    engine.submit(Request(0, ask("x"), 0))
    with pytest.raises(ServerGoneError):
        engine.poll()
    engine.close()
