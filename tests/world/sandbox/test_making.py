"""Making the tool: which means is taken, what is refused, how it pickles."""

from __future__ import annotations

import pickle
import signal
import sys
from pathlib import Path

import pytest

from tests.world.sandbox.runs import WORKING, answer, cause, isolated
from unspool import PythonTool, ToolManager
from unspool.types import InvalidTypeError, InvalidValueError, SandboxError


@isolated
def test_the_first_means_that_works_is_taken() -> None:
    assert PythonTool().isolation == WORKING[0]


def test_without_means_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.world.sandbox import means as module

    monkeypatch.setattr(module, "problem", lambda means, readable=(): f"no {means} here")
    with pytest.raises(SandboxError) as refused:
        PythonTool()
    assert str(refused.value) == (
        "code cannot be isolated here (bubblewrap: no bubblewrap here; kernel: no kernel here); install bubblewrap, "
        "allow this user to make user namespaces, or give isolation='none' where the code is to be trusted"
    )
    with pytest.raises(SandboxError, match="no kernel here"):
        PythonTool(isolation="kernel")
    assert PythonTool(isolation="none").isolation == "none"


def test_a_means_whose_trial_goes_wrong_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.world.sandbox import means as module

    module._try.cache_clear()

    def at_work(command: list[str]) -> str | None:
        monkeypatch.setattr(module, "launch", lambda *rest, **named: (command, b"\0\0\0\0"))
        return module.problem("kernel")

    assert at_work([sys.executable, "-c", "print('3 no socket [] False 1')"]) == "a trial ended without a word"
    assert at_work(["/nonexistent/python"]) is not None
    said = "import sys; sys.stderr.write('failed OSError: unshare: Operation not permitted\\n')"
    assert at_work([sys.executable, "-c", said]) == "OSError: unshare: Operation not permitted"
    seen = "import sys; print('8 a socket [] True'); sys.stderr.write('exit 0\\n')"
    assert at_work([sys.executable, "-c", seen]) == "a trial was not contained: 8 a socket [] True"


def test_by_choice_a_plain_process_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("UNSPOOL_SECRET", "a secret")
    inside = answer("none", "import os\nopen('x', 'w').write('1')\nos.getcwd(), 'UNSPOOL_SECRET' in os.environ")
    assert inside.startswith(f"('{tmp_path}/unspool-python-") and inside.endswith("', False)")
    assert answer("none", "while True: pass", timeout=0.5) == "Error: the code ran longer than 0.5 s and was stopped"
    assert "(it used more than 100 MB of memory)" in cause(answer("none", "bytearray(10 << 30)", memory_mb=100))
    assert "printed more than 1 MB" in cause(answer("none", "while True: print('x' * 1000)"))
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
    )
    assert answer("none", daemon) == ""
    forking = "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    assert (
        answer("none", forking, max_processes=8) == "Error: the code had more than 8 processes at once and was stopped"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"isolation": "docker"}, "isolation must be 'auto', 'bubblewrap', 'kernel' or 'none', not 'docker'"),
        ({"timeout": float("inf")}, "timeout must be seconds above 0, not inf"),
        ({"timeout": None}, "timeout must be seconds above 0, not None"),
        ({"timeout": 0}, "timeout must be seconds above 0"),
        ({"memory_mb": 8}, "memory_mb must be a whole number, at least 32, not 8"),
        ({"max_processes": 0}, "max_processes must be a whole number, at least 1, not 0"),
        ({"files_mb": 1.5}, "files_mb must be a whole number, at least 1, not 1.5"),
        ({"concurrency": 0}, "concurrency must be a whole number, at least 1, or None, not 0"),
        ({"readable": ["/nonexistent/x"]}, "readable: there is no '/nonexistent/x'"),
        ({"readable": ["/"]}, "readable: '/' is the sandbox's own or the kernel's"),
        ({"readable": ["/tmp/."]}, "readable: '/tmp' is the sandbox's own"),
        ({"readable": ["/proc/1"]}, "readable: '/proc/1' is the sandbox's own or the kernel's"),
        ({"readable": ["/sys"]}, "readable: '/sys' is the sandbox's own or the kernel's"),
        ({"readable": ["/dev/shm"]}, "readable: '/dev/shm' is the sandbox's own or the kernel's"),
        ({"readable": [5]}, "readable must be a list of paths, and 5 is none"),
        ({"readable": [b"/usr"]}, "readable must be a list of paths, and b'/usr' is none"),
        ({"readable": 5}, "readable must be a list of paths, not 5"),
        ({"readable": Path("/usr")}, "readable must be a list of paths"),
        ({"readable": ["a\0b"]}, "readable: there is no 'a\\x00b'"),
        ({"readable": "/usr"}, "readable must be a list of paths"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options: dict[str, object], error: str) -> None:
    with pytest.raises((InvalidValueError, InvalidTypeError)) as refused:
        PythonTool(**options)  # type: ignore[arg-type]
    assert str(refused.value).startswith(error)


@isolated
def test_it_pickles_and_is_made_anew_where_it_arrives() -> None:
    made = PythonTool(timeout=3.5, name="run", max_chars=99)
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, PythonTool)
    assert (again.name, again.max_chars, again.isolation, again.info()) == ("run", 99, made.isolation, made.info())
    assert ToolManager([again])("run", {"code": "2"}) == "2"
    assert "3.5 s" in made.description and signal.SIGKILL == 9
