"""`OpenAI`: its key, its client of each event loop, retries, and what it says when the API fails."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from tests.chat_api import ChatAPI, completion
from unspool import APIMultiTurnRollout, MultiTurnRollout, OpenAI
from unspool.types import InvalidTypeError, InvalidValueError, MissingExtraError

HI = {"messages": [{"role": "user", "content": "Hi"}]}


def fault(status: int, text: str = "broken", **headers: str) -> Response:
    return JSONResponse(
        {"error": {"message": text}}, status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def run(api: OpenAI, **options: Any) -> dict[str, Any]:
    with APIMultiTurnRollout(api, progress=False, **options) as rollout:
        [out] = rollout([HI])
    return out


# ------------------------------------------------------------------ keys


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def test_the_key_comes_from_the_argument_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatAPI([completion("ok")]) as server:
        run(server.api(api_key="mine"))
        monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
        run(server.api(api_key=None))
        run(server.api(api_key="mine"))
    keys = [headers["authorization"] for headers in server.headers]
    assert keys == ["Bearer mine", "Bearer of the environment", "Bearer mine"]


def test_a_server_of_ones_own_needs_no_key_and_openais_does() -> None:
    with ChatAPI([completion("ok")]) as server:
        assert run(server.api(api_key=None))["stop_reason"] == "stop"
    assert server.headers[0]["authorization"] == "Bearer no key"
    with pytest.raises(InvalidValueError, match="give api_key, or set OPENAI_API_KEY; for a server of your own"):
        run(OpenAI("gpt-5"))


def test_the_base_url_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatAPI([completion("ok")]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        assert run(OpenAI("tiny"))["messages"][-1]["content"] == "ok"


# ------------------------------------------------------------------ construction


def test_client_kwargs_reach_the_sdk() -> None:
    with ChatAPI([completion("ok")]) as server:
        run(server.api(client_kwargs={"default_headers": {"X-Team": "blue"}, "max_retries": 0, "timeout": 30.0}))
    assert server.headers[0]["x-team"] == "blue"


def test_what_cannot_be_an_api_is_refused_at_construction() -> None:
    with pytest.raises(InvalidValueError, match="model must be the name of a model, not ''"):
        OpenAI("")
    with pytest.raises(InvalidTypeError, match="client_kwargs must be a mapping, not list"):
        OpenAI("tiny", client_kwargs=["max_retries"])  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="api_key is given twice"):
        OpenAI("tiny", "a", client_kwargs={"api_key": "b"})
    with pytest.raises(InvalidTypeError, match="api must be an OpenAI"):
        APIMultiTurnRollout(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"which OpenAI has not; .* there is APIMultiTurnRollout"):
        MultiTurnRollout(OpenAI("tiny"), object())


def test_settings_that_the_sdk_does_not_know_are_said_at_the_first_call() -> None:
    with pytest.raises(InvalidTypeError, match=r"client_kwargs do not suit the SDK's client: .*'max_retrys'"):
        run(OpenAI("tiny", base_url="http://127.0.0.1:9/v1", client_kwargs={"max_retrys": 0}))


def test_the_sdk_is_loaded_with_the_first_request_only() -> None:
    code = (
        "import sys; from unspool import OpenAI, APIMultiTurnRollout, ChatPolicy;"
        "APIMultiTurnRollout(OpenAI('tiny'));"
        "print(sorted({'openai', 'httpx', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"


def test_without_the_sdk_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.policy.openai.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'unspool\[api\]'"):
        OpenAI("tiny")


def test_an_api_pickles_also_after_it_was_used() -> None:
    with ChatAPI([completion("ok")]) as server:
        api = server.api(client_kwargs={"max_retries": 0, "timeout": 5.0})
        run(api)
        again = pickle.loads(pickle.dumps(api))
        assert (again.model, again.base_url, again.api_key) == ("tiny", f"{server.url}/v1", "a key")
        assert again.client_kwargs == {"max_retries": 0, "timeout": 5.0}
        assert run(again)["stop_reason"] == "stop"


async def test_one_api_serves_several_event_loops_and_closes_for_all_of_them() -> None:
    with ChatAPI([completion("ok")]) as server:
        api = server.api()
        rollout = APIMultiTurnRollout(api, progress=False)
        here = await rollout.acall([HI])
        blocking = await asyncio.to_thread(rollout, [HI])
        elsewhere = await asyncio.to_thread(lambda: asyncio.run(rollout.acall([HI])))
        assert [out["stop_reason"] for [out] in (here, blocking, elsewhere)] == ["stop"] * 3
        client = api.client()
        assert client is api.client()
        await api.close()
        assert client.is_closed()
        assert (await rollout.acall([HI]))[0]["stop_reason"] == "stop"
        await api.close()


# ------------------------------------------------------------------ failures


def test_the_sdk_tries_again_and_leaves_it_where_it_is_told_to() -> None:
    for retries, expected, requests in ((2, "stop", 2), (0, "api_error", 1)):
        with ChatAPI([fault(500), completion("ok")]) as server:
            out = run(server.api(client_kwargs={"max_retries": retries}))
            assert (out["stop_reason"], len(server.bodies)) == (expected, requests)
    assert out["error"].startswith("InternalServerError: Error code: 500")
    assert "broken" in out["error"]


def test_a_server_that_asks_to_wait_is_waited_for() -> None:
    with ChatAPI([fault(429, "slow down", Retry_After="0.3"), completion("ok")]) as server:
        out = run(server.api(client_kwargs={"max_retries": 1}))
    assert out["stop_reason"] == "stop"
    assert 0.3 <= out["timings"]["generate"] < 5
    assert len(server.bodies) == 2


def test_a_refused_key_is_asked_for_once() -> None:
    with ChatAPI([fault(401, "wrong key")]) as server:
        out = run(server.api(client_kwargs={"max_retries": 3}))
    assert (out["stop_reason"], len(server.bodies)) == ("api_error", 1)
    assert out["error"].startswith("AuthenticationError: Error code: 401")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Response('{"choices": [{"mess', media_type="application/json"), "answered with something that is no JSON"),
        (Response("<html>Welcome</html>", media_type="text/html"), "no JSON ('<html>Welcome</html>'); is base_url"),
        (JSONResponse(["a"]), "answered with ['a'], which is no chat completion"),
        ({"choices": []}, "the API answered without a choice"),
        ({"error": {"message": "no such model"}}, "without a choice: {'message': 'no such model'}"),
        ({"choices": [{"finish_reason": "stop"}]}, "a choice that has no message"),
        ({"choices": [{"message": {"content": 7}}]}, "with content that is no text: 7"),
        (completion("half", finish="content_filter"), "broke the turn off (content_filter)"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error_in_a_sentence(reply: Any, said: str) -> None:
    with ChatAPI([reply]) as server:
        out = run(server.api())
    assert (out["stop_reason"], out["turns"], out["truncated"]) == ("api_error", 0, False)
    assert out["error"].startswith("EngineError: ")
    assert said in out["error"]


def test_a_server_that_is_not_there_is_named() -> None:
    out = run(OpenAI("tiny", base_url="http://127.0.0.1:9/v1", client_kwargs={"max_retries": 0}))
    assert out["stop_reason"] == "api_error"
    assert out["error"].startswith("EngineError: http://127.0.0.1:9/v1/ gave no answer (ConnectError")
