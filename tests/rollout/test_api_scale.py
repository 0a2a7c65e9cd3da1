"""Many episodes over an API at once: no more connections than `concurrency`, and few threads."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from tests.chat_api import ChatAPI, a_call, completion
from unspool import APIMultiTurnRollout, ToolManager, tool


class Threads:
    """The most threads that there were, looked at all the time."""

    def __enter__(self) -> Threads:
        self.before = threading.active_count()  # some of them idle, kept for later tools
        self.most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, threading.active_count())

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()


def test_200_trajectories_on_concurrency_64_use_64_connections_and_80_threads_at_most() -> None:
    busy, most = 0, 0

    @tool
    def wait() -> str:
        """Wait on a thread."""
        time.sleep(0.02)
        return "done"

    async def script(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.02)
        busy -= 1
        if len(body["messages"]) == 1:
            return completion(None, tool_calls=[a_call("wait", {})])
        return completion(body["messages"][0]["content"])

    trajectories = [{"messages": [{"role": "user", "content": f"number {n}"}]} for n in range(200)]
    with (
        ChatAPI(script) as server,
        Threads() as threads,
        APIMultiTurnRollout(server.api(), ToolManager([wait]), concurrency=64, progress=False) as rollout,
    ):
        outs = rollout(trajectories)
    assert [out["messages"][-1]["content"] for out in outs] == [f"number {n}" for n in range(200)]
    assert {(out["turns"], out["stop_reason"]) for out in outs} == {(2, "stop")}
    assert len(server.bodies) == 400
    assert most <= 64
    assert server.connections <= 64
    assert threads.most - threads.before <= 80


def test_the_default_is_eight_at_once() -> None:
    busy, most = 0, 0

    async def script(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.01)
        busy -= 1
        return completion("ok")

    with ChatAPI(script) as server, APIMultiTurnRollout(server.api(), progress=False) as rollout:
        rollout([{"messages": [{"role": "user", "content": "Hi"}]}] * 40)
    assert most == 8
    assert server.connections <= 8
