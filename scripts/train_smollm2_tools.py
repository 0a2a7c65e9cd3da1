"""Teach SmolLM2-135M-Instruct to call a calculator: the recipe of the adapter that unspool ships.

What this script promises:

- The dialogues are token for token what a rollout sees: made turn by turn from the model's own chat template,
  each assistant turn tokenized apart from its prompt.
- The loss falls on assistant tokens alone: calls, final answers and the stop token, never on tool answers.
- Train and held-out problems come from disjoint seeds; no held-out expression is trained on.
- The held-out figures come from the loop itself: sample at temperature 1, run the calculator, feed its answer
  back. The last figures are those of the saved bfloat16 adapter, merged into the base.

    python scripts/train_smollm2_tools.py                   # train, then evaluate (about 25 minutes, 2 cores)
    python scripts/train_smollm2_tools.py --evaluate-only   # the figures of the adapter that is there
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import peft
import reasoning_gym
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from unspool.engines.embedded import embedded_adapter, ensure_embedded_model

TRAIN_SEED, HELD_OUT_SEED = 0, 50_000_000
IGNORED = -100
CHECKS = (20, 60, 100)

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute one binary operation, such as '12 + 7'. Longer sums need several calls.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "Two numbers with one of + - * / between them."}
            },
            "required": ["expression"],
        },
    },
}


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes the adapter."""

    steps: int = 150
    batch: int = 8
    learning_rate: float = 1e-3
    warmup: int = 10
    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    min_terms: int = 3
    max_terms: int = 4
    min_digits: int = 2
    max_digits: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    expression: str


@dataclass(frozen=True)
class Example:
    """One dialogue after the shared system prefix: token ids, and the same ids or IGNORED as labels."""

    ids: list[int]
    labels: list[int]


def problems(recipe: Recipe, seed: int, count: int) -> list[Problem]:
    """`count` chain_sum problems as reasoning_gym words them; seeds `seed` to `seed + count`."""
    bounds = {k: getattr(recipe, k) for k in ("min_terms", "max_terms", "min_digits", "max_digits")}
    dataset = reasoning_gym.create_dataset("chain_sum", **bounds, seed=seed, size=count)
    return [Problem(x["question"], x["answer"], x["metadata"]["expression"]) for x in dataset]


def calculator(expression: str) -> str | None:
    """The value of one binary operation; None where the expression is not one."""
    number = r"(-?\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"\s*{number}\s*([-+*/])\s*{number}\s*", expression)
    if not match:
        return None
    left, right = Fraction(match[1]), Fraction(match[3])
    if match[2] == "/" and right == 0:
        return None
    value = {"+": left + right, "-": left - right, "*": left * right, "/": right and left / right}[match[2]]
    return str(value) if value.denominator == 1 else str(float(value))


def call(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def dialogue(problem: Problem) -> list[dict[str, Any]]:
    """The dialogue of one who works from left to right, one operation a turn."""
    result, *rest = problem.expression.split()
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        expression = f"{result} {operator} {term}"
        result = calculator(expression) or ""
        messages += [call(expression), {"role": "tool", "content": result}]
    assert result == problem.answer, (problem, result)
    return [*messages, {"role": "assistant", "content": result}]


def render(tokenizer: Any, messages: list[dict[str, Any]], ask: bool = False) -> str:
    text: str = tokenizer.apply_chat_template(messages, tools=[CALCULATOR], tokenize=False, add_generation_prompt=ask)
    return text


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def make_example(tokenizer: Any, messages: list[dict[str, Any]], skip: str) -> Example:
    """Tokens and labels of a dialogue, without the shared prefix `skip`."""
    ids: list[int] = []
    labels: list[int] = []
    done = len(skip)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answered = render(tokenizer, messages[:i], ask=True), render(tokenizer, messages[: i + 1])
        prompt = encode(tokenizer, asked[done:])
        completion = encode(tokenizer, answered[len(asked) :].removesuffix("\n"))
        ids += prompt + completion
        labels += [IGNORED] * len(prompt) + completion
        done = len(answered) - 1  # the line end after the stop token opens the next prompt
    return Example(ids, labels)


def batches(examples: list[Example], recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of mixed lengths; (batch, length) int64 each, padded on the right.

    Batches of like length would be cheaper, but each would hold one number of terms and pull the one hard
    decision (call again, or answer) its own way: a first try with them had not learnt it after 60 steps.
    """
    for start in range(0, len(examples), recipe.batch):
        group = examples[start : start + recipe.batch]
        longest = max(len(example.ids) for example in group)
        ids = [example.ids + [0] * (longest - len(example.ids)) for example in group]
        labels = [example.labels + [IGNORED] * (longest - len(example.labels)) for example in group]
        yield torch.tensor(ids), torch.tensor(labels)


def batch_loss(model: Any, prefix: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the labelled tokens.

    The prefix, the same in all dialogues, is computed once and its keys and values are repeated: gradients
    flow through them, and half of the tokens are saved. Logits are made only where there are labels.
    """
    llama = model.get_base_model()
    cache = llama.model(prefix, use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(ids))
    hidden = llama.model(ids, past_key_values=cache, use_cache=True).last_hidden_state[:, :-1]
    labelled = labels[:, 1:] != IGNORED
    logits = llama.lm_head(hidden[labelled]).float()
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:][labelled])


def parse(text: str) -> tuple[str, str] | None:
    """("call", its expression) or ("answer", the number); None for a turn that is neither."""
    if re.fullmatch(r"-?\d+", text):
        return "answer", text
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
    try:
        found = json.loads(match[1]) if match else {}
        expression = found["arguments"]["expression"] if found["name"] == "calculator" else ""
    except (ValueError, KeyError, TypeError):
        return None
    return ("call", expression) if isinstance(expression, str) and calculator(expression) is not None else None


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """One completion a prompt at temperature 1 from the full distribution, stop token kept, 64 tokens at most."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    out = model.generate(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=64,
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    texts = (tokenizer.decode(row) for row in out[:, batch.input_ids.shape[1] :])
    return [text.replace("<|endoftext|>", "") for text in texts]


def evaluate(model: Any, tokenizer: Any, asked: list[Problem], turns: int = 6) -> dict[str, Any]:
    """Shares over the trajectories of `asked`, each run for at most `turns` turns."""
    model.eval()
    talks: list[list[dict[str, Any]]] = [[{"role": "user", "content": p.question}] for p in asked]
    answers: dict[int, str] = {}
    malformed: dict[int, str] = {}
    calls = [0] * len(asked)
    for _ in range(turns):
        live = [i for i in range(len(asked)) if i not in answers and i not in malformed]
        if not live:
            break
        texts = sample(model, tokenizer, [render(tokenizer, talks[i], ask=True) for i in live])
        for i, text in zip(live, texts, strict=True):
            turn = parse(text.removesuffix("<|im_end|>")) if text.endswith("<|im_end|>") else None
            if turn is None:
                malformed[i] = text
            elif turn[0] == "answer":
                answers[i] = turn[1]
            else:
                calls[i] += 1
                talks[i] += [call(turn[1]), {"role": "tool", "content": calculator(turn[1])}]
    model.train()
    score = reasoning_gym.create_dataset("chain_sum", size=1, seed=0).score_answer
    right = [i for i, answer in answers.items() if score(answer, {"answer": asked[i].answer}) == 1.0]
    as_needed = [calls[i] == len(p.expression.split()) // 2 for i, p in enumerate(asked)]
    total = len(asked)
    return {
        "problems": total,
        "success": len(right) / total,
        "well_formed_in_every_turn": 1 - len(malformed) / total,
        "two_or_more_calls": sum(n >= 2 for n in calls) / total,
        "as_many_calls_as_operators": sum(as_needed) / total,
        "out_of_turns": (total - len(answers) - len(malformed)) / total,
        "mean_calls": round(sum(calls) / total, 2),
        "malformed_example": next(iter(malformed.values()), None),
    }


def save(model: Any, folder: Path) -> None:
    """The adapter as PEFT reads it, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({k: v.to(torch.bfloat16).contiguous() for k, v in state.items()}, folder / "adapter_model.safetensors")
    config = model.peft_config["default"]
    config.inference_mode = True
    config.save_pretrained(folder)


def load_base() -> tuple[Any, Any]:
    folder = ensure_embedded_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    return model, AutoTokenizer.from_pretrained(folder)


def train(recipe: Recipe, folder: Path, held_out: list[Problem]) -> dict[str, Any]:
    """Train, save to `folder` at every check, return the curve and the checks."""
    torch.manual_seed(recipe.seed)
    base, tokenizer = load_base()
    config = peft.LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, target_modules=list(recipe.targets), task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    model.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    parameters = [p for p in model.parameters() if p.requires_grad]
    unseen = {p.expression for p in held_out}
    drawn = problems(recipe, TRAIN_SEED, recipe.steps * recipe.batch)
    asked = [p for p in drawn if p.expression not in unseen]
    prefix = render(tokenizer, [{"role": "user", "content": ""}]).partition("<|im_start|>user")[0]
    examples = [make_example(tokenizer, dialogue(p), prefix) for p in asked]
    prefix_ids = torch.tensor([encode(tokenizer, prefix)])
    # The optimizer keeps float32 copies; the model computes with their bfloat16 rounding, which is what is saved.
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / recipe.warmup) * max(0.05, 1 - i / recipe.steps)
    )
    curve, checks, began = [], [], time.monotonic()
    for step, (ids, labels) in enumerate(batches(examples, recipe), start=1):
        loss = batch_loss(model, prefix_ids, ids, labels)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.data.copy_(master)
        schedule.step()
        if step <= 5 or step % 10 == 0:
            curve.append({"step": step, "loss": round(loss.item(), 5), "seconds": round(time.monotonic() - began)})
            print(curve[-1], tuple(ids.shape), flush=True)
        if step in CHECKS:
            save(model, folder)
            checks.append({"step": step, **evaluate(model, tokenizer, held_out[:16])})
            print(checks[-1], flush=True)
    save(model, folder)
    trainable = sum(p.numel() for p in parameters)
    return {"recipe": asdict(recipe), "parameters": trainable, "curve": curve, "checks": checks}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and evaluate the tool-calling adapter.")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--out", type=Path, default=embedded_adapter())
    parser.add_argument("--problems", type=int, default=64, help="held-out problems of the final figures")
    parser.add_argument("--evaluate-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(2)
    recipe = Recipe(steps=options.steps)
    held_out = problems(recipe, HELD_OUT_SEED, options.problems)

    report = {} if options.evaluate_only else train(recipe, options.out, held_out)
    torch.manual_seed(recipe.seed)
    base, tokenizer = load_base()
    merged: Any = peft.PeftModel.from_pretrained(base, str(options.out)).merge_and_unload()
    report["held_out"] = evaluate(merged, tokenizer, held_out)
    print(json.dumps(report["held_out"], indent=1))
    if not options.evaluate_only:
        (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
