"""A worker in a thread of the test, as it runs in a process of its own elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection


def in_thread(run: Callable[[], None], its_end: Connection) -> threading.Thread:
    """Start `run`, and close the worker's end of the pipe when it is over, as its process would."""

    def whole() -> None:
        try:
            run()
        except (EOFError, OSError):
            pass
        finally:
            its_end.close()

    thread = threading.Thread(target=whole, daemon=True)
    thread.start()
    return thread
