"""`kvdepotctl completion`: the script with which a shell completes this command."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_COMMAND = "kvdepotctl"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print what makes SHELL complete verbs, options, and the daemon's namespaces and chunks.

    In bash, for this user: `kvdepotctl completion bash > ~/.local/share/bash-completion/completions/kvdepotctl`
    """
    script = get_completion_class(shell)
    assert script is not None, "click knows these shells"
    click.echo(script(context.find_root().command, {}, _COMMAND, f"_{_COMMAND.upper()}_COMPLETE").source())
    return 0
