"""MiniMind-style training code on the real small model, unchanged but for its imports."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

from unspool import ToolManager, TorchEngine, calculator  # noqa: E402
from unspool.engines import TorchRolloutEngine, compute_per_token_logps, create_rollout_engine  # noqa: E402
from unspool.engines.embedded import embedded_adapter, ensure_embedded_model  # noqa: E402
from unspool.rollout import parse_tool_calls, rollout_batch, rollout_single, validate_gt_in_text  # noqa: E402

MANAGER = ToolManager([calculator])
TOOLS = MANAGER.tool_infos()
MESSAGES = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((12, 7), (30, 45))]
ANSWERS = [["19"], ["75"]]


def execute_tool(name: str, arguments: Any) -> Any:
    return {"result": MANAGER(name, arguments)} if name in MANAGER.names else None


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    """The model with the adapter that taught it to call tools, in float32, and its tokenizer."""
    engine = TorchEngine.from_pretrained(ensure_embedded_model(), adapter=embedded_adapter(), dtype="float32")
    return engine.model, engine.tokenizer


@pytest.fixture(scope="module")
def rollout_engine(parts: tuple[Any, Any]) -> TorchRolloutEngine:
    model, tokenizer = parts
    return create_rollout_engine(engine_type="torch", policy_model=model, tokenizer=tokenizer, device="cpu")


def test_a_training_step_of_minimind(parts: tuple[Any, Any], rollout_engine: TorchRolloutEngine) -> None:
    """rollout_batch, padded tensors, per-token log-probabilities, the shifted mask, the loss, the gradient."""
    model, tokenizer = parts
    num_gen, device = 2, "cpu"
    random.seed(0)
    with torch.no_grad():
        (
            completions,
            contexts,
            prompt_ids_batch,
            response_ids_batch,
            response_masks_batch,
            response_old_logps_batch,
            turn_outputs_batch,
            unfinished_batch,
        ) = rollout_batch(
            rollout_engine,
            tokenizer,
            MESSAGES,
            [TOOLS] * 2,
            num_gen,
            max_turns=2,
            max_new_tokens=48,
            thinking_ratio=0.5,
            device=device,
            execute_tool=execute_tool,
            temperature=1.0,
        )
    assert len(completions) == len(contexts) == len(unfinished_batch) == 2 * num_gen
    assert any(len(turns) > 1 for turns in turn_outputs_batch)  # tools were called
    assert any(validate_gt_in_text(text, ANSWERS[i // num_gen]) for i, text in enumerate(contexts))

    packed = []
    for p, r, m, old_lp in zip(
        prompt_ids_batch, response_ids_batch, response_masks_batch, response_old_logps_batch, strict=True
    ):
        ids = p + r
        mask = [0] * len(p) + m
        old_logps = [0.0] * max(len(p) - 1, 0) + old_lp
        packed.append((ids, mask, old_logps))
    lengths = torch.tensor([len(ids) for ids, _, _ in packed])
    longest = int(lengths.max())
    pad = tokenizer.pad_token_id
    input_ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _, _ in packed])
    full_response_masks = torch.tensor([mask + [0] * (longest - len(mask)) for _, mask, _ in packed])
    old_per_token_logps = torch.tensor([old + [0.0] * (longest - 1 - len(old)) for _, _, old in packed])
    full_mask = (torch.arange(longest)[None] < lengths[:, None]).long()

    logits = model(input_ids, attention_mask=full_mask).logits[:, :-1, :]
    per_token_logps = F.log_softmax(logits, dim=-1).gather(2, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    completion_mask = full_response_masks[:, 1:]
    assert per_token_logps.shape == completion_mask.shape == old_per_token_logps.shape == (4, longest - 1)

    # On policy, at temperature 1: the two agree at every sampled token, and one place off they do not.
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    assert float(((ratio.detach() - 1).abs() * completion_mask).max()) < 1e-3
    assert int(completion_mask.sum()) == sum(map(sum, response_masks_batch))
    wrong = full_response_masks[:, :-1]
    assert float(((ratio.detach() - 1).abs() * wrong).max()) > 0.1
    with torch.no_grad():
        again = compute_per_token_logps(model, input_ids, longest - 1, attention_mask=full_mask)
    assert float(((again - per_token_logps).detach().abs() * completion_mask).max()) < 1e-4

    advantages = torch.tensor([1.0, -1.0] * 2)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss_of_token = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    loss = ((loss_of_token * completion_mask).sum(1) / completion_mask.sum(1).clamp(min=1)).mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients and all(bool(torch.isfinite(g).all()) for g in gradients)
    assert max(float(g.abs().max()) for g in gradients) > 0
    model.zero_grad(set_to_none=True)
    rollout_engine.update_policy(model)
    assert rollout_engine.version == 1


def test_each_turn_is_sampled_behind_the_tokens_recorded_at_its_own_temperature(
    parts: tuple[Any, Any], rollout_engine: TorchRolloutEngine
) -> None:
    model, tokenizer = parts
    out = rollout_single(
        rollout_engine, tokenizer, MESSAGES[0], TOOLS, max_new_tokens=48, execute_tool=execute_tool, seed=1,
        extra={"raw_logprobs": True},
    )  # fmt: skip
    assert len(out.turn_outputs) > 1
    ids = torch.tensor([out.prompt_ids + out.response_ids])
    assert ids.shape == (1, len(out.prompt_ids) + len(out.response_ids))
    with torch.no_grad():
        logits = model(ids).logits[0, len(out.prompt_ids) - 1 : -1]
    sampled = torch.tensor(out.response_mask, dtype=torch.bool)
    for temperature, recorded in (
        (0.8, torch.tensor(out.response_old_logps)[sampled]),
        (
            1.0,
            torch.tensor([v for s in out.trajectory["spans"] for v in s.get("metadata", {}).get("raw_logprobs", [])]),
        ),
    ):
        scored = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(out.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(scored[sampled], recorded, atol=1e-4, rtol=0)


def test_the_loop_of_the_seed_runs_as_it_stands(parts: tuple[Any, Any], rollout_engine: TorchRolloutEngine) -> None:
    """The active batch written out by hand over `rollout`, as one would with MiniMind's engine."""
    _, tokenizer = parts
    tokenizer.padding_side = "left"
    messages_batch, tools_batch, num_gen, max_turns = MESSAGES, [TOOLS] * 2, 2, 2
    thinking_ratio, device, max_new_tokens = 0.5, "cpu", 48
    random.seed(0)
    torch.manual_seed(0)

    trajectories: list[dict[str, Any]] = []

    for messages, tools in zip(messages_batch, tools_batch):  # noqa: B905
        for _ in range(num_gen):
            trajectories.append(
                {
                    "messages": [dict(m) for m in messages],
                    "tools": tools,
                    "active": True,
                    "open_thinking": random.random() < thinking_ratio,
                }
            )

    widths = []
    for _turn in range(max_turns):
        active_trajs = [t for t in trajectories if t["active"]]
        if not active_trajs:
            break

        contexts = [
            tokenizer.apply_chat_template(
                t["messages"],
                tokenize=False,
                add_generation_prompt=True,
                tools=t["tools"],
                open_thinking=t["open_thinking"],
            )
            for t in active_trajs
        ]

        inputs = tokenizer(
            contexts,
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
        ).to(device)

        rollout_result = rollout_engine.rollout(
            prompt_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            num_generations=1,
            max_new_tokens=max_new_tokens,
            temperature=0.8,
        )
        widths.append(len(rollout_result.completions))
        assert rollout_result.output_ids.shape == (
            len(active_trajs),
            inputs["input_ids"].shape[1] + int(rollout_result.completion_ids.shape[1]),
        )

        for row, traj in enumerate(active_trajs):
            new_text = rollout_result.completions[row]
            calls = parse_tool_calls(new_text)

            if not calls:
                traj["active"] = False
                continue

            traj["messages"].append({"role": "assistant", "content": new_text})
            for call in calls:
                result = execute_tool(call["name"], call["arguments"])
                traj["messages"].append({"role": "tool", "content": json.dumps(result, ensure_ascii=False)})

    assert widths[0] == 4 and widths == sorted(widths, reverse=True) and len(widths) > 1
    told = [message["content"] for t in trajectories for message in t["messages"] if message["role"] == "tool"]
    assert any(validate_gt_in_text(content, ["19", "75"]) for content in told)
