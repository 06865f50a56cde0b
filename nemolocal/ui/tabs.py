"""What the server remembers of the page's open tabs, in memory only: their conversations, so that a
reload brings them back, and the answers that are being written, so that they can be stopped."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from nemolocal.ui.conversation import Chat, is_waiting, with_answer

STOPPED = "Stopped."
N_KEPT = 64


@dataclass(frozen=True, slots=True)
class Run:
    """An answer that is being written. Setting `stop` ends it; `ended` is set once it has."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Tabs:
    """A tab keeps its id over reloads; each load of the page is a session of its own."""

    def __init__(self) -> None:
        self._chats: OrderedDict[str, Chat] = OrderedDict()
        self._runs: dict[str, Run] = {}

    def keep(self, tab: str, chat: Chat) -> None:
        """Remember a tab's conversation; the tab that was longest untouched is forgotten for it."""
        if not tab:
            return
        self._chats[tab] = chat
        self._chats.move_to_end(tab)
        while len(self._chats) > N_KEPT:
            self._chats.popitem(last=False)

    def recall(self, tab: str) -> Chat:
        """The tab's conversation. An answer that had not begun when its page went away reads as stopped."""
        chat = self._chats.get(tab, ())
        return with_answer(chat, "", STOPPED) if is_waiting(chat) else chat

    def begin(self, session: str) -> Run | None:
        """A new run, or None while the session has one."""
        if session in self._runs:
            return None
        return self._runs.setdefault(session, Run())

    def end(self, session: str) -> None:
        """The session's run is over."""
        self._runs.pop(session).ended.set()

    def running(self, session: str) -> Run | None:
        """The session's run, if it has one."""
        return self._runs.get(session)
