"""An engine that answers by a function of what it is asked, and remembers what that was."""

from collections.abc import Callable, Sequence

from relabel.manifests.asks import Answer, Ask, Engine, EngineFacts, Request


class ScriptedEngine(Engine):
    """Answers each ask when it is submitted.

    Args:
        say: a text that ended by itself, or a whole answer; may raise as an engine does.
    """

    def __init__(self, say: Callable[[Ask], Answer | str]) -> None:
        self._say = say
        self.asked: list[Ask] = []
        self._ready: list[Answer] = []
        self.is_closed = False

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        return []

    @property
    def capacity(self) -> int:
        return 2 - len(self._ready)

    def submit(self, request: Request) -> None:
        self.asked.append(request.ask)
        said = self._say(request.ask)
        answer = Answer(0, said, "stop") if isinstance(said, str) else said
        answer.request_id = request.id
        self._ready.append(answer)

    def poll(self) -> list[Answer]:
        ready, self._ready = self._ready, []
        return ready

    def facts(self) -> EngineFacts:
        raise NotImplementedError

    def close(self) -> None:
        self.is_closed = True
