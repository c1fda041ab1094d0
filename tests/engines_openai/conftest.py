"""A scripted server, and engines over it that never really wait between tries."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from relabel.labelers.engines.openai import OpenAi
from relabel.manifests.asks import Request
from relabel.manifests.specs import EngineSpec
from tests.engines.conftest import ask_for, run_all

from .scripted_server import MODEL, Call, Json, Script, ScriptedServer, chat

__all__ = ["ask_for", "run_all"]
GOOD = "<think>so</think><score>1</score>"
KEY = "sk-test-0123456789abcdef"


@pytest.fixture(scope="session", autouse=True)
def _httpx() -> None:
    pytest.importorskip("httpx", reason="the openai extra is not installed")


class Waits(list[float]):
    """Represents sleeping: remembers how long, and takes no time."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def serve() -> Iterator[Callable[[Script], ScriptedServer]]:
    started: list[ScriptedServer] = []

    def make(script: Script) -> ScriptedServer:
        started.append(ScriptedServer(script))
        return started[-1]

    yield make
    for server in started:
        server.close()


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def connect(waits: Waits) -> Iterator[Callable[..., OpenAi]]:
    """`connect(server or url, key=…, model=…, **args)`: an engine over it."""
    opened: list[OpenAi] = []

    def make(
        server: ScriptedServer | str,
        *,
        key: str | None = KEY,
        model: Path | None = None,
        overlong: str = "truncate",
        **changes: Any,
    ) -> OpenAi:
        spec_fields = {
            name: changes.pop(name) for name in ("max_prompt_tokens", "chat_template_kwargs") if name in changes
        }
        url = server if isinstance(server, str) else server.url
        args = OpenAi.Args(**({"base_url": url, "served_model": MODEL} | changes))
        spec = EngineSpec(name="openai", model=str(model) if model else None, args=args, **spec_fields)
        secrets = {"api_key_env": SecretStr(key)} if key is not None else {}
        opened.append(OpenAi(spec, overlong=overlong, secrets=secrets, pause=waits))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def requests_for(count: int, **changes: Any) -> list[Request]:
    return [
        Request(number, ask_for(f"q{number}", f"document {number}", **changes), seed=1000 + number)
        for number in range(count)
    ]


def echo(call: Call) -> Json:
    """Grades by the document's number, so that an answer shows whose it is."""
    words = call.body["messages"][-1]["content"].split()
    number = next((int(word) for word in words if word.isdecimal()), 0)
    return chat(f"<think>{number}</think><score>{number % 3}</score>")
