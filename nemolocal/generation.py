"""What a request may ask of a generation: how each token is chosen, when the answer ends, and what the engine
may do to be fast. Layers take these names from types.py.

This module imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are llama.cpp's.

    `temperature` 0 means greedy. `top_k` 0 means no limit. `seed` None means a fresh one for each request.
    `logit_bias` holds (token id, bias) pairs; a bias of -100 or less bans the token. `mirostat_tau` above 0
    turns mirostat 2 on, which takes the place of top-k, top-p, min-p and typical. `dry_last_n` -1 looks back
    over the whole context. With `ignore_eos` the answer ends only at a stop string or a limit.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_tau: float = 0.0
    mirostat_eta: float = 0.1
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """One generation: how to sample and when to end. `max_tokens` None means up to the context.

    `reuse_cache` says whether a beginning of the prompt that is still in the cache may be used. None means:
    unless a seed decides the text, since a prompt read in one go and a prompt whose beginning was kept round
    differently, and a seed asks for the same text again.

    `n_logprobs` asks for the log probability of each token that is said, and of that many likeliest ones;
    None asks for none. `shift_context` lets an answer that meets the end of the context go on by forgetting
    the middle, where the model can. `speculate` says whether the engine may guess ahead; None means the same
    as for `reuse_cache`, since what is computed together rounds differently too. `adapters` are (name, scale)
    of the LoRA adapters to use; None means those of the load.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    reuse_cache: bool | None = None
    n_logprobs: int | None = None
    shift_context: bool = False
    speculate: bool | None = None
    adapters: tuple[tuple[str, float], ...] | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether a seed asks for the same text again."""
        return self.sampling.seed is not None and self.sampling.temperature > 0.0

    @property
    def reuses_cache(self) -> bool:
        """Whether a beginning of the prompt that is remembered may be used."""
        return not self.is_repeatable if self.reuse_cache is None else self.reuse_cache

    @property
    def guesses_ahead(self) -> bool:
        """Whether the engine may compute guesses."""
        return not self.is_repeatable if self.speculate is None else self.speculate
