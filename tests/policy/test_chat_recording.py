"""A chat API that returns token ids is recorded from them, exactly, and branches where its template rewrites."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat_api import ChatAPI, a_call, completion
from unspool import APIMultiTurnRollout, Record, ToolManager, tool

HI = {"messages": [{"role": "user", "content": "Hi"}]}
IDS = {"return_token_ids": True}

# Tokens by meaning: what opens and closes a turn, and a word for each message.
USER, A1, CLOSE, TOOL, GO, A2 = [1, 10], [20, 21], [2], [3, 30], [4], [22]


@tool
def look() -> str:
    """Look around."""
    return "a field"


def logprobs(*values: float) -> dict[str, Any]:
    """As vLLM writes them: the alternatives beside a token are not in the order of their likelihood."""
    other = {"token": "x", "logprob": -0.5}
    return {
        "content": [{"token": "t", "logprob": v, "top_logprobs": [{"token": "t", "logprob": v}, other]} for v in values]
    }


def turn(prompt: list[int], sampled: list[int], *, calls: bool = False, **message: Any) -> dict[str, Any]:
    return completion(
        "said",
        prompt_token_ids=prompt,
        token_ids=sampled,
        logprobs=logprobs(*(-0.25 * (n + 1) for n in range(len(sampled)))),
        **({"tool_calls": [a_call("look", {})]} if calls else {}),
        **message,
    )


def processed(body: dict[str, Any]) -> dict[str, Any]:
    """The likeliest first token, as a server says that applies every parameter."""
    value = {0.5: -0.1, 2.0: -2.0}.get(body["temperature"], -1.0)
    value = 0.0 if body["top_k"] == 1 else -3.0 if body["repetition_penalty"] < 1 else value
    return likely(-9.0, value)


def likely(*values: float) -> dict[str, Any]:
    return completion("3", logprobs={"content": [{"top_logprobs": [{"logprob": value} for value in values]}]})


def raw(body: dict[str, Any]) -> dict[str, Any]:
    """The same of a server that gives the model's own values, whatever the parameters."""
    return likely(-1.0, -2.0)


class Recording(ChatAPI):
    """A server that answers the probe's requests (whose one token is their mark) apart from the script."""

    def __init__(self, *replies: dict[str, Any], probe: Any = processed) -> None:
        super().__init__(replies)
        said, self.probes = self.script, 0

        def script(body: dict[str, Any]) -> Any:
            if body.get("max_tokens") == 1:
                self.bodies.pop()
                self.probes += 1
                return probe(body)
            return said(body)

        self.script = script


def run(server: ChatAPI, **options: Any) -> dict[str, Any]:
    options = {"extra_body": IDS, **options}
    with server, APIMultiTurnRollout(server.api(), ToolManager([look]), progress=False, **options) as rollout:
        [out] = rollout([HI])
    return out


def two_turns(second_prompt: list[int], **message: Any) -> list[dict[str, Any]]:
    return [turn(USER + GO, A1 + CLOSE, calls=True, **message), turn(second_prompt, A2 + CLOSE)]


GOES_ON = USER + GO + A1 + CLOSE + TOOL + GO


def test_turns_are_recorded_as_the_server_returned_them() -> None:
    server = Recording(*two_turns(GOES_ON))
    out = run(server)
    assert out["error"] is None
    assert out["input_ids"] == GOES_ON + A2 + CLOSE
    assert out["loss_mask"] == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert out["labels"] == [-100] * 3 + A1 + CLOSE + [-100] * 3 + A2 + CLOSE
    assert out["logprobs"] == [0, 0, 0, -0.25, -0.5, -0.75, 0, 0, 0, -0.25, -0.5]
    assert out["versions"] == [-1, -1, -1, 0, 0, 0, -1, -1, -1, 0, 0]
    assert [(span["origin"], span["length"], span["message"]) for span in out["spans"]] == [
        ("prompt", 3, 0),
        ("sampled", 3, 1),
        ("bridge", 3, 2),
        ("sampled", 2, 3),
    ]
    assert "branches" not in out
    assert Record.from_trajectory(out).to_arrays()["logprobs"] == out["logprobs"]


def test_a_recording_asks_for_ids_log_probabilities_and_every_sampling_parameter() -> None:
    server = Recording(*two_turns(GOES_ON))
    run(server, sampling_params={"temperature": 0.5, "max_tokens": 20})
    asked = {k: v for k, v in server.bodies[0].items() if k not in ("model", "messages", "tools")}
    assert asked == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
    }


def test_a_call_may_ask_for_a_recording_that_the_rollout_does_not_have() -> None:
    server = Recording(turn(USER + GO, A1 + CLOSE))
    with server, APIMultiTurnRollout(server.api(), progress=False) as rollout:
        [recorded] = rollout([HI], extra_body=IDS)
        [plain] = rollout([HI])
        [again] = rollout([recorded])
    assert recorded["input_ids"] == USER + GO + A1 + CLOSE
    arrays = {"input_ids", "labels", "loss_mask", "logprobs", "versions", "spans"}
    assert arrays <= set(recorded)
    assert not arrays & (set(plain) | set(again))


# ------------------------------------------------------------------ branches


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        ({(20, 21, 2): "ab.", (29, 2, 3, 30, 4): "ab.tool"}, "bpe"),
        ({(20, 21, 2): "ab.", (29, 2, 3, 30, 4): "aB.tool"}, "template"),
        (None, "unknown"),
    ],
)
def test_a_prompt_that_does_not_go_on_from_the_record_branches_it_with_a_cause(texts: Any, cause: str) -> None:
    other = USER + GO + [29] + CLOSE + TOOL + GO
    server = Recording(*two_turns(other))
    if texts is not None:
        server.texts = lambda ids: texts[tuple(ids)]
    out = run(server)
    assert out["input_ids"] == other + A2 + CLOSE
    assert out["loss_mask"] == [0] * len(other) + [1, 1]
    first, second = out["branches"]
    assert (second["parent"], second["forked_at"], second["cause"]) == (0, 1, cause)
    assert first["input_ids"] == USER + GO + A1 + CLOSE
    assert [(span["origin"], span["length"], span["message"]) for span in second["spans"]] == [
        ("prompt", 5, 1),
        ("sampled", 2, 3),
    ]
    assert out["branch"] == 1


def test_thinking_that_is_not_sent_back_is_the_cause_where_there_was_some() -> None:
    server = Recording(*two_turns(USER + GO + [21] + CLOSE + TOOL + GO, reasoning="hm"))
    out = run(server)
    assert [branch["cause"] for branch in out["branches"]] == [None, "thinking_dropped"]
    assert out["messages"][1]["reasoning_content"] == "hm"


def test_a_prompt_that_has_nothing_of_the_record_is_a_branch_of_its_own() -> None:
    server = Recording(*two_turns([9, 9, 9]))
    out = run(server)
    assert out["input_ids"] == [9, 9, 9, *A2, *CLOSE]
    assert out["branches"][1]["forked_at"] == 0


def test_turns_go_on_being_counted_on_a_branch() -> None:
    third = [9, 9, 9, *A2, *CLOSE, 3, 31, 4]
    replies = [*two_turns([9, 9, 9])[:1], turn([9, 9, 9], A2 + CLOSE, calls=True), turn(third, A2 + CLOSE)]
    server = Recording(*replies)
    run(server, extra_body=lambda turn: {**IDS, "user": f"turn {turn}"})
    assert [body["user"] for body in server.bodies] == ["turn 0", "turn 1", "turn 2"]


# ------------------------------------------------------------------ what cannot be recorded


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (completion("no ids"), "the API returned no token ids; servers of vLLM (0.10.2 or newer) return them"),
        (completion("x", prompt_token_ids=[1], token_ids=[]), "the API returned no token ids"),
        (
            completion("x", prompt_token_ids=[1], token_ids=[2, "3"], logprobs=logprobs(-1, -1)),
            "returned ids that are none",
        ),
        (completion("x", prompt_token_ids=[1], token_ids=[2, 3], logprobs=logprobs(-1.0)), "1 log-probabilities for 2"),
        (completion("x", prompt_token_ids=[1], token_ids=[2, 3]), "no log-probabilities for 2 tokens"),
    ],
)
def test_an_answer_that_cannot_be_recorded_is_an_error_with_the_remedy(reply: Any, said: str) -> None:
    out = run(Recording(reply))
    assert (out["stop_reason"], out["turns"], out["input_ids"]) == ("api_error", 0, [])
    assert said in out["error"]


def test_without_log_probabilities_where_they_are_not_wanted() -> None:
    server = Recording(completion("x", prompt_token_ids=[1], token_ids=[2, 3]))
    out = run(server, extra_body={**IDS, "logprobs": False})
    assert (out["error"], out["input_ids"], out["logprobs"]) == (None, [1, 2, 3], None)
    assert server.probes == 0
    assert "top_logprobs" not in server.bodies[0]


def test_ids_in_some_turns_only_are_refused() -> None:
    out = run(Recording(*two_turns(GOES_ON)), extra_body=lambda turn: IDS if turn == 0 else {})
    assert (out["stop_reason"], out["turns"]) == ("api_error", 1)
    assert "extra_body must have the same return_token_ids in every turn, and has another in turn 1" in out["error"]


# ------------------------------------------------------------------ what log-probabilities mean


def test_a_server_is_probed_once() -> None:
    server = Recording(*two_turns(GOES_ON))
    with server, APIMultiTurnRollout(server.api(), ToolManager([look]), progress=False, extra_body=IDS) as rollout:
        rollout([HI] * 8)
        rollout([HI], sampling_params={"temperature": 0.5})
    assert server.probes == 6


def test_a_prompt_that_leaves_no_choice_tells_nothing_and_another_is_taken() -> None:
    asked: list[str] = []

    def probe(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body["messages"][0]["content"])
        if len(asked) == 1:
            return likely(-0.001, -7.0)  # certain
        return likely(-1.0, -1.0) if len(asked) == 2 else processed(body)  # a tie, of which top-k keeps both

    server = Recording(turn(USER + GO, A1 + CLOSE), probe=probe)
    out = run(server, sampling_params={"temperature": 0.5, "top_k": 5, "repetition_penalty": 1.1})
    assert out["error"] is None
    assert len(asked) == 8
    assert len(set(asked)) == 3
    assert set(asked[2:]) == {asked[2]}


def test_a_server_without_log_probabilities_is_an_error_with_the_remedy() -> None:
    out = run(Recording(turn(USER + GO, A1 + CLOSE), probe=lambda body: completion("3")))
    assert out["stop_reason"] == "api_error"
    assert "no log-probabilities where some were asked for; put 'logprobs': False into extra_body" in out["error"]


@pytest.mark.parametrize(
    ("params", "extra", "said"),
    [
        ({"temperature": 0.5}, {}, "temperature=0.5"),
        ({"top_p": 0.9}, {}, "top_p=0.9"),
        ({}, {"top_k": 5}, "top_k=5"),
        ({}, {"min_p": 0.1}, "min_p=0.1"),
    ],
)
def test_parameters_that_raw_log_probabilities_lack_are_refused(params: Any, extra: Any, said: str) -> None:
    server = Recording(turn(USER + GO, A1 + CLOSE), probe=raw)
    out = run(server, sampling_params=params, extra_body={**IDS, **extra})
    assert (out["stop_reason"], out["turns"]) == ("api_error", 0)
    assert f"not those of the distribution sampled from with {said}; start it with `--logprobs-mode" in out["error"]
    assert server.bodies == []


def test_raw_log_probabilities_do_where_nothing_is_changed() -> None:
    assert run(Recording(turn(USER + GO, A1 + CLOSE), probe=raw))["error"] is None
