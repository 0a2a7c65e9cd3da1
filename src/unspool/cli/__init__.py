"""The `unspool` command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def _told() -> Iterator[None]:
    """Errors of unspool are one sentence on standard error and exit code 2; Ctrl-C is one and exit code 130."""
    from unspool.types import RolloutInterrupted, UnspoolError

    try:
        yield
    except UnspoolError as error:
        typer.echo(f"unspool: {error}", err=True)
        raise typer.Exit(2) from None
    except RolloutInterrupted as stop:
        count = len(stop.results)
        kept = f"; {count} finished {'trajectory is' if count == 1 else 'trajectories are'} kept"
        typer.echo(f"unspool: interrupted{kept if count else ' before any trajectory was finished'}", err=True)
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        typer.echo("unspool: interrupted", err=True)
        raise typer.Exit(130) from None


@app.command("run", epilog="`unspool keys` lists every key with its type, its default and its meaning.")
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
    if (folder := str(Path.cwd())) not in sys.path:  # as `python -m` has it: tools and rewards of one's own
        sys.path.insert(0, folder)
    with _told():
        from unspool.cli.config import load_config
        from unspool.cli.run import run

        run(load_config(config, overrides or []))


@app.command("keys")
def keys_command() -> None:
    """List every key of a configuration: its type, its default, its meaning."""
    from unspool.cli.keys import show_keys

    show_keys()


@app.command("engines")
def engines_command() -> None:
    """List what can sample (engine: ... in a configuration), and how to install what is not."""
    with _told():
        from unspool.cli.engines import show_engines

        show_engines()


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
    with _told():
        from unspool.cli.show import show

        show(file, index=index, id=id, tokenizer=tokenizer, messages=messages)


@app.command("doctor")
def doctor_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_DIR", help="Folder of a tokenizer, its name on the hub, or 'embedded'.")
    ] = "embedded",
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja source to examine instead of the tokenizer's own.")
    ] = None,
    parser: Annotated[str | None, typer.Option(help="Tool-call parser; default: chosen.")] = None,
    tools: Annotated[bool, typer.Option("--tools/--no-tools", help="Whether rollouts use tools.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the tokenizer.")
    ] = False,
) -> None:
    """Say what a tokenizer and its chat template do to rollouts. Exit code 1 where something they need is broken."""
    with _told():
        from unspool.cli.doctor import examine, show_diagnosis

        found = examine(model, template=template, parser=parser, tools=tools, trust_remote_code=trust_remote_code)
        show_diagnosis(found, as_json=json)
    raise typer.Exit(0 if found.ok else 1)


def main() -> None:
    """The console entry."""
    app()
