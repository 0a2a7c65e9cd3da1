"""An environment is closed whatever ends its episode, costs no other episode anything, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.small import by_session, call, rollout, script, small_template, user
from tests.world.envs_for_tests import CountEnv, GuessEnv
from unspool import Env, EnvWorld, Limits, Step, StepResult, TextEnv, TokenPolicy, run_episode
from unspool.threads import THREADS
from unspool.types import RolloutInterrupted

GUESS_WRONG = call("guess", number=1)
PLAY = [{"role": "user", "content": "Play."}]
BAD = '<tool_call>\n{"name": "guess", "arguments": {"number": 1'


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class Waits(GuessEnv):
    """A step waits for the gate, on its thread."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate, self.began = gate, threading.Event()

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.began.set()
        self.gate.wait()
        return super().step(tool_name, arguments)


# ------------------------------------------------------------------ each way of ending


@pytest.mark.parametrize(
    ("reason", "lines", "limits"),
    [
        ("stop", ["I give up"], {}),
        ("env_done", [call("guess", number=7)], {}),
        ("max_turns", [GUESS_WRONG], {"max_turns": 2}),
        ("length", [GUESS_WRONG], {"max_trajectory_tokens": 420}),
        ("parse_error", [BAD], {"malformed_calls": "end"}),
        ("api_error", [GUESS_WRONG, RuntimeError("the engine is gone")], {}),
    ],
)
def test_an_environment_is_closed_once_whatever_ends_the_episode(reason: str, lines: Any, limits: Any) -> None:
    env = GuessEnv(7)
    [out] = rollout(script(*lines), env, limits=Limits(**limits))([user("Play.")])
    assert (out["stop_reason"], env.noted.closed, env.noted.log[0]) == (reason, 1, "reset")


def test_a_timed_out_step_is_given_up_and_its_environment_closed(gate: threading.Event) -> None:
    env = Waits(gate)
    [out, other] = rollout(script(GUESS_WRONG, "x"), [env, GuessEnv], limits=Limits(timeout=0.2))(
        [user("Play."), user("Play.")]
    )
    assert (out["stop_reason"], out["truncated"], other["stop_reason"]) == ("timeout", True, "stop")
    assert env.noted.closed == 1


def test_a_step_over_its_own_limit_ends_its_own_episode(gate: threading.Event) -> None:
    env = Waits(gate)
    [out] = rollout(script(GUESS_WRONG), EnvWorld(env, timeout=0.1))([user("Play.")])
    assert (out["stop_reason"], out["error"]) == ("api_error", "EnvError: Waits.step took longer than its 0.1 s")
    assert env.noted.closed == 1


def test_a_call_that_was_given_up_closes_behind_itself_when_it_returns(gate: threading.Event) -> None:
    env = Waits(gate)
    closed = threading.Event()
    rollout(script(GUESS_WRONG), EnvWorld(env, timeout=0.1))([user("Play.")])
    env.close = closed.set  # type: ignore[method-assign, assignment]
    gate.set()
    assert closed.wait(10)


async def test_a_cancelled_episode_closes_its_environment(gate: threading.Event) -> None:
    env = Waits(gate)
    task = asyncio.ensure_future(rollout(script(GUESS_WRONG), env).acall([user("Play.")]))
    await asyncio.to_thread(env.began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.noted.closed == 1


async def test_closing_goes_on_through_further_cancellations() -> None:
    closing, go_on = asyncio.Event(), asyncio.Event()

    class Slow(CountEnv):
        async def close(self) -> None:
            closing.set()
            await go_on.wait()
            await super().close()

    env = Slow()
    policy = TokenPolicy(script("done"), small_template())
    task = asyncio.ensure_future(run_episode(policy, env, messages=user("Go.")["messages"]))
    await closing.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.noted.closed == 1


def test_ctrl_c_closes_every_environment(gate: threading.Event) -> None:
    envs = [Waits(gate) for _ in range(3)]

    def interrupt() -> None:
        for env in envs:
            env.began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(RolloutInterrupted) as raised:
        rollout(script(GUESS_WRONG), envs)([user("Play.")] * 3)
    assert [out["stop_reason"] for out in raised.value.results] == ["cancelled"] * 3
    assert [env.noted.closed for env in envs] == [1] * 3


async def test_a_world_of_ones_own_is_opened_and_closed() -> None:
    log: list[str] = []

    class Own:
        def tool_infos(self) -> list[Any]:
            return []

        def wants(self, message: Any) -> bool:
            return True

        async def open(self, trajectory: Any) -> Any:
            log.append(f"open {trajectory['id']}")
            return [{"role": "user", "content": "Hello."}]

        async def step(self, message: Any) -> Step:
            return Step(done=True)

        async def close(self) -> None:
            log.append("close")

    [out] = await rollout(script("Hi"), Own()).acall([{"id": "x"}])
    assert (out["stop_reason"], [m["content"] for m in out["messages"]]) == ("env_done", ["Hello.", "Hi"])
    assert log == ["open x", "close"]


# ------------------------------------------------------------------ environments that fail


class Crashes(GuessEnv):
    """Raises in the method that it is told."""

    def __init__(self, where: str) -> None:
        super().__init__(1)
        self.where = where

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise OSError(f"broken in {where}")

    def reset(self, trajectory: Any = None) -> StepResult:
        self._maybe("reset")
        return super().reset(trajectory)

    def tools(self) -> list[Any]:
        self._maybe("tools")
        return super().tools()

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self._maybe("step")
        return super().step(tool_name, arguments)

    def close(self) -> None:
        super().close()
        self._maybe("close")


@pytest.mark.parametrize("where", ["reset", "tools", "step"])
def test_a_crash_costs_its_own_episode_only(where: str) -> None:
    envs = [Crashes("nowhere"), Crashes(where), Crashes("nowhere")]
    outs = rollout(script(GUESS_WRONG), envs)([user("Play.")] * 3)
    assert [out["stop_reason"] for out in outs] == ["env_done", "api_error", "env_done"]
    assert outs[1]["error"] == f"OSError: broken in {where}"
    assert [env.noted.closed for env in envs] == [1, 1, 1]


def test_closing_that_fails_changes_nothing_but_the_log(caplog: pytest.LogCaptureFixture) -> None:
    [out] = rollout(script(GUESS_WRONG), Crashes("close"))([user("Play.")])
    assert (out["stop_reason"], out["error"]) == ("env_done", None)
    assert "a world was not closed: OSError: broken in close" in caplog.text


@pytest.mark.parametrize("kind", [GeneratorExit, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("sync", [True, False])
def test_closing_that_raises_what_is_no_exception_is_logged(
    kind: type[BaseException], sync: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Here(GuessEnv):
        def close(self) -> None:
            raise kind("broken")

    class There(GuessEnv):
        async def close(self) -> None:  # type: ignore[override]
            raise kind("broken")

    [out] = rollout(script(call("guess", number=7)), Here if sync else There)([user("Play.")])
    assert (out["stop_reason"], out["error"], out["reward"]) == ("env_done", None, 1.0)
    assert "a world was not closed: " in caplog.text
    assert f"{kind.__name__}: broken" in caplog.text


def test_closing_that_hangs_is_given_up(gate: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    class Hangs(GuessEnv):
        def close(self) -> None:
            gate.wait()

    [out] = rollout(script(call("guess", number=7)), EnvWorld(Hangs(), close_timeout=0.1))([user("Play.")])
    assert out["stop_reason"] == "env_done"
    assert "Hangs.close took longer than its 0.1 s" in caplog.text


def test_what_a_maker_makes_too_late_is_closed(gate: threading.Event) -> None:
    closed = threading.Event()

    class Late(CountEnv):
        async def close(self) -> None:
            closed.set()

    def make() -> Env:
        gate.wait()
        return Late()

    [out] = rollout(script("done"), make, limits=Limits(timeout=0.1))([user("Play.")])
    assert (out["stop_reason"], out["turns"]) == ("timeout", 0)
    assert "making the world" in out["error"]
    gate.set()
    assert closed.wait(10)


# ------------------------------------------------------------------ nothing is left


class Process(TextEnv):
    """Owns a process, a folder and a thread, as a game server would; what is said goes through the process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process: subprocess.Popen[str] | None = None
        self.folder: Path | None = None
        self.stop, self.hangs = threading.Event(), threading.Event()
        self.when_reset: Callable[[], None] = lambda: None
        self.thread: threading.Thread | None = None

    def reset(self, trajectory: Any = None) -> StepResult:
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.thread = threading.Thread(target=self.stop.wait, name="of-an-environment", daemon=True)
        self.thread.start()
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.when_reset()
        return StepResult("Say something.")

    def act(self, text: str) -> StepResult:
        assert self.process is not None and self.process.stdin and self.process.stdout and self.folder
        if text == "crash":
            raise OSError("crashed")
        if text == "kill":
            self.process.kill()
            self.process.wait()
        if text in ("hang", "cancel"):
            self.hangs.set()
        else:  # a reader without a line waits until the process is gone
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise OSError("the process is gone")
        (self.folder / "log.txt").write_text(line)
        return StepResult(line.strip(), 1.0, text == "done")

    def close(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()) | {
        child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    }


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def _foreign_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith("unspool-")]


async def _episodes(ways: list[str], root: Path) -> list[str]:
    """How an episode of each kind ends, all at once; those that shall be are cancelled in the middle of a step."""
    engine = by_session(lambda request: ["hello", ways[int(request.session)], "hang"])
    policy = TokenPolicy(engine, small_template())

    async def one(index: int, way: str) -> str:
        env = Process(root)
        world = EnvWorld(env)
        if way == "hang":  # its steps alone are short of time: a reset may be slow on a busy machine
            env.when_reset = lambda: setattr(world, "timeout", 0.3)
        task = asyncio.ensure_future(run_episode(policy, world, Limits(), messages=PLAY, session=str(index)))
        if way == "cancel":
            await asyncio.to_thread(env.hangs.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return "cancelled"
        return str((await task).stop_reason)

    return await asyncio.gather(*(one(index, way) for index, way in enumerate(ways)))


def test_nothing_is_left_of_two_hundred_episodes_of_which_a_fifth_is_killed(tmp_path: Path) -> None:
    kinds = {"done": "env_done", "crash": "api_error", "kill": "api_error", "hang": "api_error", "cancel": "cancelled"}
    asyncio.run(_episodes(list(kinds), tmp_path))  # what is made once is made
    before = (_children(), _files(), sorted(_foreign_threads()))
    ways = ["done"] * 160 + ["crash", "kill", "hang", "cancel"] * 10
    random.Random(0).shuffle(ways)
    assert asyncio.run(_episodes(ways, tmp_path)) == [kinds[way] for way in ways]
    gc.collect()
    assert (_children(), _files(), sorted(_foreign_threads())) == before
    assert list(tmp_path.iterdir()) == []
    assert THREADS.alive <= 64  # those that a pool keeps for later
