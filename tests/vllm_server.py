"""A real vLLM server (its build for CPUs) as a process of its own, for tests that need one.

One server with the embedded model, its adapter, its tools template and vLLM's developer endpoints serves all tests of a
run (fixture `vllm_server`); tests that kill or configure one start their own (`VLLMServer`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO

START_SECONDS = 240.0
BLOCK = 32
"""Tokens of a block of the cache: the smallest on a CPU, so that the prefix cache serves short turns."""

ADAPTER = "smollm2-tools"
KEY = "a key for tests"

_SMALL = (
    *("--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager"),
    *("--enable-prefix-caching", "--block-size", str(BLOCK), "--api-key", KEY),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VLLMServer:
    """`python -m vllm.entrypoints.openai.api_server`; `start` returns when it answers.

    Args:
        model: folder of the model.
        flags: of the command line, behind those that make it small.
        log: file for what it prints.
    """

    def __init__(self, model: Path, log: Path, flags: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self._command += ["--port", str(self.port), *_SMALL, *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def launch(self) -> None:
        """Begin to start it; see `wait`."""
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        settings |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_LOGGING_LEVEL": "WARNING"}
        self._output = self.log.open("ab")
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **settings},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers die with it: see `kill`
        )

    def wait(self) -> None:
        """Return when it answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of what it printed.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"the vLLM server does not answer; it printed:\n{self.log.read_text()[-4000:]}")

    def start(self) -> None:
        self.launch()
        self.wait()

    def kill(self) -> None:
        """End it at once, as a crash would, and all its processes."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._output is not None:
            self._output.close()
            self._output = None


def tools_server(log: Path, *flags: str) -> VLLMServer:
    """A server of the embedded model, with its adapter by name, its template, and tools in chat requests."""
    from unspool.engines.embedded import embedded_adapter, ensure_embedded_model

    adapter = embedded_adapter()
    return VLLMServer(
        ensure_embedded_model(),
        log,
        [
            *("--served-model-name", "smollm2", "--enable-lora", "--max-lora-rank", "16"),
            *("--lora-modules", f"{ADAPTER}={adapter}", "--chat-template", str(adapter / "chat_template.jinja")),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--logprobs-mode", "processed_logprobs", *flags),
        ],
    )
