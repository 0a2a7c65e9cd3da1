"""`TorchEngine`: sampling in this process with any causal language model of `transformers`.

Importing this package imports torch and transformers; `unspool.engines` does so only when the engine is asked for.
"""

from unspool.types import MissingExtraError

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f"TorchEngine needs the package {error.name}, which is not installed: run `pip install 'unspool[torch]'`."
    ) from error

from unspool.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
