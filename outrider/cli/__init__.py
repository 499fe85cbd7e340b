"""The `outrider` command."""

from outrider.cli.command_line import main

__all__ = ["main"]
