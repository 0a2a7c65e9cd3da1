"""The configuration of `unspool run`: YAML, typed, with `key=value` on top; what it does not know it refuses.

Paths in a file are relative to the folder that the command runs in, as on a command line.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unspool.types import InvalidValueError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelConfig(_Section):
    """Which model, and how it is loaded."""

    path: str = Field(
        "embedded", description="folder of a model, or 'embedded' for the small one that ships with unspool"
    )
    adapter: str | None = Field(None, description="folder of a LoRA adapter, or 'embedded' for the shipped one")
    dtype: Literal["bfloat16", "float32", "auto"] = Field(
        "bfloat16", description="of the weights; auto: the folder's own"
    )
    device: str | None = Field(None, description="such as cuda or cpu; null: a GPU where there is one, else the CPU")
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; null: as torch has it")
    max_batch_size: int | None = Field(
        None, ge=1, description="most conversations in one forward pass; null: the engine's own"
    )


class VLLMConfig(_Section):
    """vLLM in this process (engine: vllm); the model and its dtype are those of `model`."""

    max_model_len: int | None = Field(None, ge=1, description="most tokens of a conversation; null: the model's own")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="share of the GPU's memory that vLLM takes; null: vLLM's own"
    )
    sessions: Literal["cache", "resumable"] = Field(
        "cache", description="find the past of a turn in the prefix cache, or keep conversations open between turns"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM's AsyncEngineArgs")


class ServerConfig(_Section):
    """Servers of vLLM or SGLang (engine: server); `model.path` names the tokenizer of what they serve."""

    urls: list[str] = Field(default_factory=list, description="addresses, such as http://localhost:8000")
    kind: Literal["vllm", "sglang"] = Field("vllm", description="what they run")
    model: str | None = Field(None, description="its name there; null: the first that the server lists")
    api_key_env: str | None = Field(None, description="environment variable that holds the key; null: none is sent")
    max_episodes: int | Literal["auto"] | None = Field(
        None, description="most conversations on a server; auto: by its own queue; null: no bound"
    )
    request_timeout: float = Field(3600.0, gt=0, description="seconds of a request")
    start_timeout: float = Field(60.0, gt=0, description="seconds until a server has to be ready")
    recover_timeout: float = Field(300.0, gt=0, description="seconds that a turn waits while no server is there")


class APIConfig(_Section):
    """An OpenAI-compatible chat API (engine: api), which gives messages and no tokens; `model` is not used."""

    model: str | None = Field(None, description="its name there")
    base_url: str | None = Field(None, description="such as http://localhost:8000/v1; null: OpenAI's")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key")
    max_retries: int = Field(2, ge=0, description="how often a request is tried again")


class TemplateConfig(_Section):
    """The chat template, where it is not the model's own."""

    file: Path | None = Field(None, description="a file with Jinja source, instead of the model's own template")
    parser: str | None = Field(None, description="format of tool calls; null: told from the template")
    thinking: Literal["keep", "template"] = Field(
        "keep", description="old thinking at a new user message: keep it, or do as the template does"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="switches such as enable_thinking")


class DataConfig(_Section):
    """The prompts: a file, or a procedural task."""

    path: Path | None = Field(None, description="JSONL, JSON or Parquet with 'messages', 'prompt' or 'question'")
    task: str | None = Field(None, description="a reasoning_gym task; its scoring gives the reward")
    task_args: dict[str, Any] = Field(default_factory=dict, description="the task's own parameters")
    size: int | None = Field(None, ge=1, description="how many prompts; null: all of a file, 16 of a task")
    seed: int = Field(0, description="of the task")
    system: str | None = Field(None, description="a system message put before every prompt")

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.task is None):
            raise ValueError("give exactly one of data.path and data.task")
        return self


class SamplingConfig(_Section):
    """See `unspool.SamplingParams`."""

    max_tokens: int | None = Field(256, ge=1, description="most tokens of one turn; null: as many as fit")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    top_k: int = Field(-1, ge=-1, description="sample among so many likeliest tokens; -1: all")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens of this share")
    repetition_penalty: float = Field(1.0, gt=0, description="above 1: tokens that were there become less likely")
    stop: list[str] = Field(default_factory=list, description="strings that end a turn")
    extra: dict[str, Any] = Field(
        default_factory=dict,
        description="goes with every request: tool_choice, structured_outputs, adapter, ..., if the engine has it",
    )


class LimitsConfig(_Section):
    """See `unspool.Limits`."""

    max_turns: int | None = Field(6, ge=1, description="assistant turns; null: no limit")
    max_trajectory_tokens: int | None = Field(None, ge=1, description="hard cap on a trajectory's tokens")
    max_tool_calls: int | None = Field(None, ge=0, description="calls that are run")
    timeout: float | None = Field(None, gt=0, description="wall-clock seconds of an episode")
    malformed_calls: Literal["answer", "end"] = Field(
        "answer", description="tell the model what was wrong with its call, or end the episode"
    )


class OutputConfig(_Section):
    """Where results go."""

    dir: Path = Field(Path("runs/latest"), description="where results go")
    overwrite: bool = Field(False, description="replace results of an earlier run in output.dir; else it is refused")
    traces: bool = Field(True, description="a JSON file for each trajectory, under traces/")
    parquet: bool = Field(True, description="all trajectories in trajectories.parquet")
    jsonl: bool = Field(False, description="all trajectories in trajectories.jsonl")
    show: bool = Field(True, description="print one trajectory at the end")


class RunConfig(_Section):
    """All of `unspool run`."""

    engine: Literal["torch", "vllm", "server", "api"] = Field(
        "torch", description="what samples; `unspool engines` says which are installed"
    )
    model: ModelConfig = ModelConfig()
    vllm: VLLMConfig = VLLMConfig()
    server: ServerConfig = ServerConfig()
    api: APIConfig = APIConfig()
    template: TemplateConfig = TemplateConfig()
    tools: list[str] = Field(default_factory=list, description="import paths, such as unspool.world:calculator")
    tool_timeout: float = Field(30.0, gt=0, description="seconds a tool may take")
    env: str | None = Field(
        None, description="import path of an Env class, or a function that makes one; the world of every conversation"
    )
    env_args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of env")
    env_timeout: float = Field(60.0, gt=0, description="seconds that a reset or a step of env may take")
    data: DataConfig
    reward: str | None = Field(None, description="import path of a function from a finished trajectory to a number")
    sampling: SamplingConfig = SamplingConfig()
    limits: LimitsConfig = LimitsConfig()
    num_generations: int = Field(1, ge=1, description="rollouts of each prompt")
    concurrency: int | None = Field(None, ge=1, description="most conversations at once; null: all, 8 with an API")
    seed: int = Field(0, description="of the run")
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _one_world(self) -> RunConfig:
        if self.env is not None and self.tools:
            raise ValueError("give tools or env, not both; an environment has tools of its own")
        if self.env is None and self.env_args:
            raise ValueError("env_args are of env, which is not given")
        return self


def load_config(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """The configuration in a YAML file, with `section.key=value` overrides (values are YAML too).

    Raises:
        InvalidValueError: names the key, the value, and for an unknown key the nearest right one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(f"cannot read the configuration {path}: {error.strerror}") from error
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise InvalidValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise InvalidValueError(f"{path} must hold keys and values, not a {type(tree).__name__}")
    for override in overrides:
        _override(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise InvalidValueError("\n".join(_sentence(dict(problem)) for problem in error.errors())) from None


def _override(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise InvalidValueError(f"{override!r} is no override; write section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidValueError(f"the value of {name} is not valid YAML: {text!r}") from error
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise InvalidValueError(f"{name} cannot be set: {section} is a value, not a section")
    tree[last] = value


def _sentence(problem: dict[str, Any]) -> str:
    """One problem that pydantic found, as a sentence."""
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *sections, last = problem["loc"]
        known = _keys_of(sections)
        near = difflib.get_close_matches(str(last), known, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*map(str, sections), near[0]])}?" if near else f"known: {', '.join(known)}"
        return f"unknown key {where}; {hint}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    return message if problem["type"] == "value_error" else f"{where}: {message} (it is {problem['input']!r})"


def _keys_of(sections: list[Any]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for section in sections:
        kind = model.model_fields[section].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = kind
    return list(model.model_fields)
