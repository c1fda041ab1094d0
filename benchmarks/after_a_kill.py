"""What `kill -9` costs a run over a chat server: how long the next call takes for what was left, against the time per
row of an undisturbed run.

    python -m benchmarks.after_a_kill [--rows 192] [--concurrency 64] [--latency 2] [--kills 1]

A stand-in server answers each request after the given seconds, more or less. Seconds are the server's: from a call's
first request to its last reply, so that imports and plans don't count. The goal is a ratio of 1.3 at most.
"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.engines_openai.chat_jobs import late_answer, start, write_chat_job
from tests.engines_openai.scripted_server import Call, Json, ScriptedServer


class Clocked:
    """Answers slowly, and remembers when.

    Args:
        latency_s: the mean.
    """

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self.arrived_s: list[float] = []

    def __call__(self, call: Call) -> Json:
        self.arrived_s.append(time.perf_counter())
        return late_answer(call, mean_s=self._latency_s)


def whole_call(job: Path, clock: Clocked) -> tuple[int, float]:
    """A call to its end: requests, and seconds from the first to the end of the call."""
    seen = len(clock.arrived_s)
    code = start(job).wait()
    ended_s = time.perf_counter()
    if code != 0:
        raise RuntimeError(f"relabel run ended with {code}")
    return len(clock.arrived_s) - seen, ended_s - clock.arrived_s[seen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--latency", type=float, default=2.0)
    parser.add_argument("--kills", type=int, default=1)
    args = parser.parse_args()
    clock = Clocked(args.latency)
    server = ScriptedServer(clock)
    try:
        with tempfile.TemporaryDirectory(prefix="relabel-kill-") as scratch:
            alone = write_chat_job(Path(scratch) / "alone", server, rows=args.rows, concurrency=args.concurrency)
            requests, seconds = whole_call(alone, clock)
            print(f"undisturbed: {requests} requests in {seconds:.1f} s", flush=True)
            job = write_chat_job(Path(scratch) / "killed", server, rows=args.rows, concurrency=args.concurrency)
            for _ in range(args.kills):
                seen = len(clock.arrived_s)
                process = start(job)
                while len(clock.arrived_s) - seen < args.rows * 5 // 8:
                    time.sleep(0.01)
                process.kill()
                process.wait()
                print(f"killed after {len(clock.arrived_s) - seen} requests", flush=True)
            left, took = whole_call(job, clock)
            ratio = (took / left) / (seconds / requests)
            print(f"the next call: {left} requests in {took:.1f} s, {ratio:.2f} of the undisturbed time for as many")
    finally:
        server.close()


if __name__ == "__main__":
    main()
