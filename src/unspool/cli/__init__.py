"""The `unspool` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="unspool",
    help="Token-exact, multi-turn agent rollouts for reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Keeps the commands named even where there is one alone."""


@app.command("run")
def run_command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file: model, tools, data, sampling, limits, output.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as sampling.temperature=0.7.")
    ] = None,
) -> None:
    """Run the rollouts that a configuration describes.

    Writes traces (a JSON file for each trajectory, as it ends), a Parquet file, the configuration as it was run, and
    a summary into output.dir.
    """
    from unspool.cli.config import load_config
    from unspool.cli.run import run

    run(load_config(config, overrides or []))


@app.command("show")
def show_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A trace (.json), or trajectories in .jsonl or .parquet.")
    ],
    index: Annotated[int, typer.Option(help="Which trajectory of a file with several, from 0.")] = 0,
    id: Annotated[str | None, typer.Option(help="The trajectory with this id instead.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or name; default: the one noted in the file.")] = None,
    messages: Annotated[bool, typer.Option("--messages", help="Show messages instead of tokens.")] = False,
) -> None:
    """Print one trajectory: prompt, bridge and sampled tokens by colour, log-probabilities by shade."""
    from unspool.cli.show import show

    show(file, index=index, id=id, tokenizer=tokenizer, messages=messages)


def main() -> None:
    """The console entry: errors of unspool are one sentence on standard error and exit code 2."""
    from unspool.types import RolloutInterrupted, UnspoolError

    try:
        app()
    except UnspoolError as error:
        typer.echo(f"unspool: {error}", err=True)
        raise SystemExit(2) from None
    except RolloutInterrupted:
        typer.echo("unspool: interrupted", err=True)
        raise SystemExit(130) from None
