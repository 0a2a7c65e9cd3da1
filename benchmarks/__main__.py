"""`python -m benchmarks [a] [b] [c] [d] [e] [f] [g] [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import overhead, scale, schedule
from benchmarks.report import Result, write_json
from benchmarks.workload import UnavailableError


def _torch_turns(quick: bool) -> Result:
    from benchmarks import torch_turns  # torch is loaded only for what needs it

    return torch_turns.run(quick)


def _first_token(quick: bool) -> Result:
    from benchmarks import first_token

    return first_token.run(quick)


def _vllm_turns(quick: bool) -> Result:
    from benchmarks import vllm_turns

    return vllm_turns.run(quick)


def _vllm_schedule(quick: bool) -> Result:
    from benchmarks import vllm_schedule

    return vllm_schedule.run(quick)


BENCHMARKS: dict[str, Callable[[bool], Result]] = {
    "a": schedule.run,
    "b": overhead.run,
    "c": scale.run,
    "d": _torch_turns,
    "e": _first_token,
    "f": _vllm_turns,
    "g": _vllm_schedule,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="(a) schedule, (b) overhead of a turn, (c) scale, (d) turns on a real model, "
        "(e) time to the first token, (f) turns and (g) slow tools on vLLM; docs/benchmarks.md says what each measures",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a to g; none means all of them")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that they run: the figures say nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
        "compare ratios, not times"
    )
    results: list[Result] = []
    for name in given.names or BENCHMARKS:
        try:
            results.append(BENCHMARKS[name](given.quick))
        except UnavailableError as missing:
            console.print(f"({name}) cannot run here: {missing}")
            continue
        results[-1].show(console)
    if given.json is not None:
        write_json(results, given.json)
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
