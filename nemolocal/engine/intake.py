"""From a request as it arrives to one that the scheduler can take: its prompt as tokens, its adapters, and a
saved state that the prompt begins with. What takes long is done beside the running streams."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from nemolocal.engine import lora
from nemolocal.engine.backend import Adapters, Vocab
from nemolocal.engine.cache import WarmState
from nemolocal.engine.messages import Count, Counted, Rejected, Submit
from nemolocal.engine.warming import Warming
from nemolocal.errors import InvalidRequestError
from nemolocal.types import Segment

N_CHARS_INLINE = 20_000  # a longer prompt is tokenized on another thread


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that waits for nothing but a slot."""

    command: Submit
    tokens: list[int]
    adapters: Adapters
    warm: WarmState | None = None


class Intake:
    """`adapters` are the load's LoRA files and their scales, `n_ctx` the most tokens of prompt and answer."""

    def __init__(
        self,
        vocab: Vocab,
        *,
        n_ctx: int,
        adapters: Sequence[tuple[str, float]] = (),
        warming: Warming | None = None,
    ) -> None:
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._adapters = adapters
        self._warming = warming
        self._pending: set[int] = set()
        self._tokenized: queue.SimpleQueue[tuple[Submit, Future[list[int] | Rejected]]] = queue.SimpleQueue()
        self._counted: queue.SimpleQueue[Future[Counted]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Prepared | Rejected | Counted] = queue.SimpleQueue()
        self._tokenizer = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def n_pending(self) -> int:
        """Requests that are still being prepared."""
        return len(self._pending)

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to give."""
        return not (self._done.empty() and self._tokenized.empty() and self._counted.empty())

    def begin(self, command: Submit) -> None:
        """Take in a request; it comes out of `take` when it is prepared."""
        self._pending.add(command.id)
        n_chars = sum(len(part.text) for part in command.prompt if isinstance(part, Segment))
        if n_chars <= N_CHARS_INLINE:
            self._go_on(command, self._tokenize(command))
        else:
            future = self._tokenizer.submit(self._tokenize, command)
            future.add_done_callback(lambda done: self._tokenized.put((command, done)))

    def count(self, command: Count) -> None:
        """Count tokens; `take` gives the numbers when they are there."""
        self._pending.add(command.id)
        self._tokenizer.submit(self._count, command).add_done_callback(self._counted.put)

    def cancel(self, id: int) -> None:
        self._pending.discard(id)

    def take(self) -> list[Prepared | Rejected | Counted]:
        """What has been prepared, counted or refused since the last call; nothing of what was cancelled.
        Raises whatever broke on the other thread: a request must not wait for ever."""
        while not self._tokenized.empty():
            command, done = self._tokenized.get()
            self._go_on(command, done.result())
        while not self._counted.empty():
            self._done.put(self._counted.get().result())
        taken = []
        while not self._done.empty():
            item = self._done.get()
            id = item.command.id if isinstance(item, Prepared) else item.id
            if id in self._pending:
                self._pending.discard(id)
                taken.append(item)
        return taken

    def close(self) -> None:
        """Wait for what runs; after it nothing uses the vocabulary any more."""
        self._tokenizer.shutdown(cancel_futures=True)

    def _count(self, command: Count) -> Counted:
        counts = []
        for text in command.texts:
            if command.id not in self._pending:
                break  # cancelled: nobody waits for the rest
            counts.append(len(self._vocab.tokenize((Segment(text),))))
        return Counted(command.id, tuple(counts))

    def _tokenize(self, command: Submit) -> list[int] | Rejected:
        try:
            tokens = self._vocab.tokenize(command.prompt)
        except ValueError as error:
            return Rejected(command.id, "invalid", str(error), param="prompt")
        return tokens or Rejected(command.id, "invalid", "The prompt is empty.", param="prompt")

    def _go_on(self, command: Submit, tokens: list[int] | Rejected) -> None:
        if isinstance(tokens, Rejected):
            self._done.put(tokens)
            return
        try:
            adapters = lora.scales(self._adapters, command.params.adapters)
        except InvalidRequestError as error:
            message = f"{error.message} {error.hint}".strip()
            self._done.put(Rejected(command.id, "invalid", message, param=error.param))
            return

        def finish(done: Future[WarmState | None]) -> None:
            warm = None if done.cancelled() or done.exception() else done.result()
            self._done.put(Prepared(command, tokens, adapters, warm))

        reads = self._warming is not None and len(tokens) < self._n_ctx and command.params.reuses_cache
        if not (reads and self._warming and self._warming.read(tokens, adapters, finish)):
            self._done.put(Prepared(command, tokens, adapters))
