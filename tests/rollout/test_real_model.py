"""A rollout of the real small model: what was recorded is what its forward pass says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from unspool import ChatTemplate, MultiTurnRollout, Step, TorchEngine
from unspool.engines.embedded import ensure_embedded_model

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")


class Echo:
    """Answers every turn with a message of its own length, so that there are three turns of ragged rows."""

    def __init__(self, words: int) -> None:
        self.words = words

    def tool_infos(self) -> list[dict[str, Any]]:
        return []

    def wants(self, message: Any) -> bool:
        return True

    async def step(self, message: Any) -> Step:
        return Step([{"role": "user", "content": "And then? " * self.words}])


PROMPTS = [
    {"messages": [{"role": "user", "content": text}]}
    for text in ("Hi", "Tell me about the sea, in one short sentence. " * 6, "What is 2 + 2?", "Name a colour.")
]


@pytest.fixture(scope="module")
def folder() -> Any:
    return ensure_embedded_model()


@pytest.fixture(scope="module")
def engine(folder: Any) -> Iterator[TorchEngine]:
    yield TorchEngine.from_pretrained(folder, dtype="float32")


def expected_logprobs(logits: Any, temperature: float, top_k: int, top_p: float) -> Any:
    """The log-probabilities of the sampling distribution, renormalised, [L, V] from logits [L, V]."""
    logits = logits.double() / temperature
    if top_k > 0:
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf"))
    return logits.log_softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.7, -1, 1.0), (0.7, 20, 0.9), (1.0, -1, 0.8)]
)
def test_recorded_log_probabilities_equal_a_fresh_forward_pass(
    engine: TorchEngine, folder: Any, temperature: float, top_k: int, top_p: float
) -> None:
    rollout = MultiTurnRollout(
        engine,
        ChatTemplate(str(folder)),
        sampling_params={
            "max_tokens": 40,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "stop": [".", "?", "!"],
        },
        max_turns=3,
        max_trajectory_tokens=600,
        seed=3,
        progress=False,
    )
    outs = rollout(PROMPTS, tool_manager=[Echo(i) for i in range(len(PROMPTS))])
    assert max(out["turns"] for out in outs) == 3
    for out in outs:
        assert out["error"] is None
        ids = torch.tensor([out["input_ids"]])
        with torch.inference_mode():
            logits = engine.model(ids).logits[0, :-1]
        sampled = torch.tensor(out["loss_mask"][1:], dtype=torch.bool)
        fresh = expected_logprobs(logits[sampled], temperature, top_k, top_p)
        targets = ids[0, 1:][sampled]
        recorded = torch.tensor(out["logprobs"][1:], dtype=torch.float64)[sampled]
        assert (fresh.gather(1, targets[:, None])[:, 0] - recorded).abs().max() < 1e-4
