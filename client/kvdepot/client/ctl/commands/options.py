"""Options that several verbs have."""

from __future__ import annotations

import click

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: sizes in bytes, times in seconds, ids in hexadecimal."
)
