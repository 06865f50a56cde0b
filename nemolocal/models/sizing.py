"""Which file of a model, on which devices, with how much context: one pure decision with its reasons.

Nothing is guessed from parameter counts: weights, KV cache, recurrent state and buffers are added up layer
by layer (memory.py) and laid on the devices as llama.cpp would (placement.py), into what is free now. What
gives way where it does not fit is in search.py, what becomes of what is left over in surplus.py, and the
words for a decision and for a refusal are in reasons.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nemolocal.errors import UsageError
from nemolocal.hardware import Hardware
from nemolocal.models import choice, reasons, refusals, speed, surplus
from nemolocal.models import wish as wishes
from nemolocal.models.choice import Candidate
from nemolocal.models.learned import Learned, placed
from nemolocal.models.plans import Bar, Plan
from nemolocal.models.search import (
    N_CTX_LEAST,
    N_CTX_LONG,
    N_CTX_WORTH_A_CARD,
    N_SLOTS_FIRST,
    Found,
    Search,
)
from nemolocal.models.wish import N_SLOTS_MOST, Wish

__all__ = ["GIB", "N_SLOTS_MOST", "Bar", "Candidate", "Plan", "Wish", "plan"]

GIB: Final = 1 << 30


def plan(
    model: str,
    candidates: Sequence[Candidate],
    hardware: Hardware,
    wish: Wish | None = None,
    learned: Learned | None = None,
) -> Plan:
    """Choose among the files of one model, given in any order, for this hardware.

    On GPUs the best quantization that the aim goes up to and that fits whole is taken, of the files that are
    here if one of them does; where none fits whole, of those that are here if one fits at all. What gives
    way, one on top of the other: the context down to 16k, the next lower quantization, the cache to q8_0
    where that saves more than it costs, the context down to 8k (again with the best quantization that fits),
    the number of slots, experts to the RAM, layers to the CPU. On a CPU the Q4 class is preferred.

    More memory, on whichever device, never makes a plan worse in this order, and never makes none of one. So
    as long as all of it is on GPUs, more memory gives a lower quantization only for a context that no longer
    has to be short, and a shorter context only for a higher quantization. (Beyond 65,536 tokens fewer cards
    count for more than a longer context. Where a part is in RAM, more memory brings layers or experts
    back to the GPUs or makes the context longer, and neither gets worse without the other getting better; as
    soon as a lower quantization that is still fair fits whole, it is taken.) What
    `learned` tells of earlier loads is used in place of the arithmetic.

    Raises DoesNotFitError when nothing fits, UsageError for a wish that cannot be met on this hardware or
    with this model, ModelNotFoundError when no file has the wished quantization.
    """
    wish, learned = wish or Wish(), learned or Learned()
    files = wishes.files(candidates, wish)
    searches = _searches(hardware, wish, files, learned)
    ways = [(search, surplus.spend(search, found)) for search in searches if (found := _find(search, files))]
    if not ways:
        roomiest = max(searches, key=lambda search: search.available_bytes)
        raise refusals.refusal(model, files, candidates, roomiest)
    search, found = max(ways, key=lambda way: _standing(*way))
    candidate, load, place = found
    shape = candidate.shape
    answer_s = None if shape.pooling else speed.token_s(shape, load, place)
    prompt_s = speed.prompt_token_s(shape, load, place, n_cores=hardware.cpu.physical_cores)
    return Plan(
        model=model,
        candidate=candidate,
        load=load,
        placement=place,
        reasons=tuple(reasons.explain(found, files, wish, search)),
        tokens_per_s=round(1 / answer_s, 1) if answer_s else None,
        prompt_tokens_per_s=round(1 / prompt_s, 1) if prompt_s else None,
        measured_tokens_per_s=learned.tokens_per_s.get(placed(candidate.file, place)),
        kept_bytes=wish.kept_bytes,
    )


def _searches(hardware: Hardware, wish: Wish, files: Sequence[Candidate], learned: Learned) -> list[Search]:
    """One search for each group of GPUs that one process can use and the wish can be met on. Raises what
    checking the wish raises where there is none."""
    searches, refused = [], None
    for group in wishes.groups(hardware, wish):
        try:
            wishes.check(wish, files, group, hardware)
        except UsageError as error:
            refused = refused or error
            continue
        searches.append(Search(hardware, wishes.within(files[0].shape, wish), group, learned))
    if refused and not searches:
        raise refused
    return searches


def _standing(search: Search, found: Found) -> tuple[float, ...]:
    """How good a way is beside those on other groups of GPUs: the order in which a search gives way, then
    the forecast speed. Of two that are as good, the first is taken, so whole cards before a slice."""
    candidate, load, place = found
    shape, is_good = candidate.shape, candidate.rank >= choice.GOOD
    seconds = None if shape.pooling else speed.token_s(shape, load, place)
    n_ctx = min(load.n_ctx, N_CTX_WORTH_A_CARD)
    is_as_wished = place.is_whole or (search.wish.n_gpu_layers >= 0 and bool(place.gpus))
    if is_as_wished and candidate.rank >= choice.FAIR:
        has_slots = load.n_slots >= min(search.wish.n_slots or N_SLOTS_FIRST, N_SLOTS_FIRST)
        is_long = load.n_ctx >= min(N_CTX_LONG, shape.n_ctx_train)
        way = (is_good, has_slots, is_long, load.kv_type == "f16", candidate.size_bytes, n_ctx)
        return 4, candidate.is_local, *way, 1 / seconds if seconds else 0
    in_ram = (place.n_gpu_layers, -len(place.host_experts), n_ctx, load.n_ubatch)
    if is_good and n_ctx >= min(N_CTX_LEAST, shape.n_ctx_train):
        return 0, candidate.is_local, 3, *in_ram
    if is_as_wished:
        return 0, candidate.is_local, 2, candidate.size_bytes, n_ctx
    return 0, candidate.is_local, 1, min(n_ctx, N_CTX_LEAST), candidate.rank >= choice.FAIR, *in_ram


def _find(search: Search, files: Sequence[Candidate]) -> Found | None:
    """The best way. What is here goes first, but for a file that would fit whole where none that is here
    does: that is worth a download."""
    here = [c for c in files if c.is_local]
    if not here or len(here) == len(files):
        return search.any(files)
    return search.whole(here) or search.whole(files) or search.any(here) or search.any(files)
