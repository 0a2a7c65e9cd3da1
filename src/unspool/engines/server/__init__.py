"""`ServerEngine`: token-level inference over HTTP, by one or more servers of vLLM or SGLang."""

from __future__ import annotations

from unspool.types import MissingExtraError

try:
    import httpx  # noqa: F401
    import tenacity  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f"ServerEngine needs the package {error.name}, which is not installed: run `pip install 'unspool[server]'`."
    ) from error

from unspool.engines.server.engine import ServerEngine

__all__ = ["ServerEngine"]
