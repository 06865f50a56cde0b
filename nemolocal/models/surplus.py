"""What becomes of the memory that a found way leaves over: slots, a longer context, speed.

Nothing here takes a layer off a GPU, or another file.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from nemolocal.models import architectures, placement, speed, tensor_split
from nemolocal.models.choice import Candidate
from nemolocal.models.memory import Load
from nemolocal.models.search import Found, Search
from nemolocal.models.wish import N_SLOTS_MOST

N_UBATCH_FAST: Final = (2048, 4096)
"""Tokens that a GPU reads at a time where there is plenty of room: up to a quarter faster than 512 where
several prompts wait."""
N_UBATCH_COPIED: Final = (2048, 1024)
N_SLOTS_BESIDE: Final = (8, 4, 2)
PRICE_OF_CONTEXT: Final = 1.15
PRICE_OF_BATCHES: Final = 1.05
"""How much longer an answer may take for a longer context, and for prompts that are read much faster, where a
part of the model is in RAM."""
SHARE_SPENT: Final = 0.125
"""Of what is left over, the most that goes into speed alone: another model may want the rest."""
GAIN_OF_TENSOR_SPLIT: Final = 1.2
"""How much faster an answer must be forecast to become for every matrix to be cut over cards: reading
prompts becomes slower."""
UNTRIED_IN_TENSOR_SPLIT: Final = frozenset({"deci"})
"""Layers without attention, with which nobody has run it; it has to be asked for."""


def spend(search: Search, found: Found) -> Found:
    """The same file in the same place, with what is left over put to use."""
    if not search.gpus:
        return found
    if not found[2].is_whole and search.wish.n_gpu_layers < 0:
        return _beside_the_ram(search, found)
    return _faster(search, _cut_over_cards(search, _with_more_slots(search, found)))


def _beside_the_ram(search: Search, base: Found) -> Found:
    """Where not all is on GPUs: the longest context, then prompts read in larger batches (since for each one
    what lies in RAM is copied to a GPU), where answers come nearly as fast as before; and slots that send
    nothing more to the RAM."""
    candidate, load, _ = longer = base
    for n_ctx in search.contexts(candidate):
        more = _beside(search, candidate, replace(load, n_ctx=n_ctx))
        if n_ctx > load.n_ctx and more and _price(base, more) <= PRICE_OF_CONTEXT:
            longer = more
            break
    found = longer
    for n_ubatch in () if search.wish.n_ubatch or candidate.shape.pooling else N_UBATCH_COPIED:
        more = _beside(search, candidate, replace(longer[1], n_ubatch=n_ubatch))
        if more and _price(base, more) <= PRICE_OF_CONTEXT and _price(longer, more) <= PRICE_OF_BATCHES:
            found = more
            break
    for n_slots in () if search.wish.n_slots else N_SLOTS_BESIDE:
        more = _beside(search, candidate, replace(found[1], n_slots=n_slots))
        if more and _is_alike(found, more):
            return more
    return found


def _beside(search: Search, candidate: Candidate, load: Load) -> Found | None:
    """The most of it on GPUs, None where the RAM is too small for the rest."""
    place = placement.most_on_gpus(search.job(candidate, load), search.gpus)
    return (candidate, load, place) if place.ram_bytes <= search.ram_bytes else None


def _is_alike(one: Found, other: Found) -> bool:
    """Whether the same layers and experts are in RAM."""
    return (one[2].n_gpu_layers, one[2].host_experts) == (other[2].n_gpu_layers, other[2].host_experts)


def _price(cheap: Found, dear: Found) -> float:
    """How much longer an answer is forecast to take; without a forecast, endless where more is in RAM."""
    if _is_alike(cheap, dear):
        return 1.0
    before_s, after_s = (speed.token_s(file.shape, load, place) for file, load, place in (cheap, dear))
    return after_s / before_s if before_s and after_s else math.inf


def _cut_over_cards(search: Search, found: Found) -> Found:
    """Every matrix cut over several cards, where they are of one kind and linked, and answers are
    forecast to come a good deal sooner for it."""
    candidate, load, place = found
    shape = candidate.shape
    refused = architectures.WITHOUT_TENSOR_SPLIT | UNTRIED_IN_TENSOR_SPLIT
    if search.wish.split != "auto" or shape.pooling or shape.architecture in refused or shape.n_expert:
        return found
    if not place.is_whole or load.kv_type != "f16" or shape.state_bytes:
        return found
    first = place.gpus[0]
    linked = [
        g for g in search.gpus if g.n_links and (g.name, g.total_bytes) == (first.name, first.total_bytes)
    ]
    n = 1 << (len(linked).bit_length() - 1) if linked else 0
    while n > 1 and not tensor_split.is_even(shape, n):
        n //= 2
    now = speed.token_s(shape, load, place)
    if now is None or n < 2:
        return found
    roomiest = sorted(linked, key=lambda g: (-g.free_bytes, g.uuid))[:n]
    other = tensor_split.across(search.job(candidate, load), roomiest)
    then = speed.token_s(shape, load, other) if other and other.ram_bytes <= search.ram_bytes else None
    if other is None or then is None or now / then < GAIN_OF_TENSOR_SPLIT:
        return found
    return candidate, load, other


def _faster(search: Search, found: Found) -> Found:
    """Spend what is left over on the GPUs in use: prompts read in larger batches, then, for who asked for
    slots and so serves many at a time, cells of its own for each, so that none has to look past those of
    the others."""
    candidate, load, place = found
    if candidate.shape.pooling or place.split_mode == "tensor" or not place.is_whole:
        return found
    if not search.wish.n_ubatch:
        for n_ubatch in N_UBATCH_FAST:
            found = _if_there_is_plenty(search, found, replace(load, n_ubatch=n_ubatch))
    if search.wish.n_slots > 1 and search.wish.kv_layout == "auto":
        found = _if_there_is_plenty(search, found, replace(found[1], kv_layout="split"))
    return found


def _if_there_is_plenty(search: Search, found: Found, load: Load) -> Found:
    """The same file with another load, where that takes no other GPUs and little of what is left over."""
    candidate, _, place = found
    other = search.place(candidate, load, place.gpus)
    if not other or not other.is_whole:
        return found
    n_left = sum(gpu.free_bytes for gpu in place.gpus) - place.gpu_bytes
    return (candidate, load, other) if other.gpu_bytes - place.gpu_bytes <= SHARE_SPENT * n_left else found


def _with_more_slots(search: Search, found: Found) -> Found:
    """Slots from what is left over: they share one cache, so most models have them almost for free."""
    candidate, load, place = found
    n = N_SLOTS_MOST
    while not search.wish.n_slots and n > load.n_slots:
        more = replace(load, n_slots=n)
        other = search.place(candidate, more, place.gpus)
        if other:
            return candidate, more, other
        n //= 2
    return found
