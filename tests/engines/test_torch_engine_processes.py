"""A TorchEngine and other processes: forked children, and copies by pickle."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engines.tiny_models import request, tiny_llama
from unspool.engines.protocol import GenerateRequest, Generation
from unspool.engines.torch import TorchEngine
from unspool.types import InvalidTypeError

FORKING = """
import asyncio, os, signal, sys
from tests.engines.tiny_models import request, tiny_llama
from unspool.engines.torch import TorchEngine

engine = TorchEngine(tiny_llama(), threads={threads})
before = asyncio.run(engine.generate(request(1))).tokens
asyncio.run(engine.update_weights(engine.model))
child = os.fork()
if not child:
    signal.alarm(30)  # ends the child where it hangs
    after = asyncio.run(engine.generate(request(1)))
    assert after.tokens == before and set(after.versions) == {{1}}, after
    asyncio.run(engine.close())
    sys.exit(7)  # the long way out, through what runs at exit
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), asyncio.run(engine.generate(request(1))).tokens == before)
"""


async def answers(engine: TorchEngine, asked: Sequence[GenerateRequest]) -> list[Generation]:
    async with engine:
        return list(await asyncio.gather(*map(engine.generate, asked)))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_goes_on_with_a_thread_of_its_own(threads: int) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING.format(threads=threads)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["7", "True"], done.stderr


def test_an_engine_around_a_module_says_why_it_does_not_pickle() -> None:
    with pytest.raises(InvalidTypeError, match="cannot be pickled; make the engine in the process that uses it"):
        pickle.dumps(TorchEngine(tiny_llama()))
    with pytest.raises(InvalidTypeError, match="cannot be pickled"):
        copy.deepcopy(TorchEngine(tiny_llama()))


async def test_a_loaded_engine_pickles_as_its_configuration(tmp_path: Path) -> None:
    tiny_llama(seed=3).save_pretrained(tmp_path)
    engine = TorchEngine.from_pretrained(
        tmp_path, dtype="bfloat16", threads=1, max_batch_size=3, version=5, stop_token_ids=[7]
    )
    asked = [request(index) for index in range(3)]
    first = await answers(engine, asked)
    await engine.start()
    await engine.update_weights(tiny_llama(seed=4))
    await engine.close()
    pickled = pickle.dumps(engine)
    assert len(pickled) < 1000, "no weights"

    loaded = pickle.loads(pickled)
    assert (loaded.version, next(loaded.model.parameters()).dtype) == (5, torch.bfloat16)
    assert await answers(loaded, asked) == first
    assert pickle.dumps(loaded) == pickled
