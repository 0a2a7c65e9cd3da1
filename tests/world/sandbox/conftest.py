"""The means that work here, and a look at what each test leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.world.sandbox.runs import WORKING, open_descriptors, sandboxed, wait_until


@pytest.fixture(params=WORKING)
def means(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WORKING[:1])
def any_means(request: pytest.FixtureRequest) -> str:
    """For what is the same by whichever means."""
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    descriptors = open_descriptors()
    before = sandboxed()
    yield
    # Other workers' sandboxes come and go; one that stays was left by the test.
    left = sandboxed() - before
    assert wait_until(lambda: not left & sandboxed()), "a process is left"
    # The first call of a process makes the private loop, which keeps a few; others close theirs a moment later.
    assert wait_until(lambda: open_descriptors() <= descriptors + 6), "descriptors are left"
