"""The command `integr8s-idem`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of the process, and exit with its status.

    0: success.  1: a service or a server failed.  2: the arguments or the settings are invalid.  130: interrupted.
    """
    try:
        # Imported here, so that importing the package stays cheap, and that Ctrl-C during the import has no traceback.
        from integr8s_idem.cli.standard_streams import escape_unencodable_text, open_missing_streams

        open_missing_streams()
        escape_unencodable_text()
        from integr8s_idem.cli.app import app

        app(prog_name="integr8s-idem")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
