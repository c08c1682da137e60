"""`kvdepotctl completion`: print the script that makes a shell complete this command."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class
from kvdepot.client.ctl.texts import say

_COMMAND = "kvdepotctl"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print a script for shell completion.

    SHELL then completes verbs, options, and the daemon's namespaces and chunks. For bash and this user:
    `kvdepotctl completion bash > ~/.local/share/bash-completion/completions/kvdepotctl`
    """
    script = get_completion_class(shell)
    assert script is not None, "click knows these shells"
    say(script(context.find_root().command, {}, _COMMAND, f"_{_COMMAND.upper()}_COMPLETE").source())
    return 0
