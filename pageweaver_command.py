"""The console script: Ctrl-C is answered from the first moment, before torch is imported.

A module beside the package, because importing anything inside of it imports torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Import the command line, then run it, which answers Ctrl-C by itself."""

    def leave(*_: object) -> None:
        # Nothing has been done yet; an exception may be swallowed inside of an import.
        os.write(2, b"Interrupted.\n")
        os._exit(130)

    # A shell starts background commands with Ctrl-C ignored; that stays.
    answered = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answered:
        signal.signal(signal.SIGINT, leave)
    from pageweaver.__main__ import main as run

    if answered:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
