"""Opens what guesses ahead for a model: the text itself, or a small model of the same vocabulary."""

from __future__ import annotations

from dataclasses import replace

from nemolocal.engine.llama.backend import LlamaBackend
from nemolocal.engine.llama.vocab import LlamaVocab
from nemolocal.engine.messages import LoadSpec
from nemolocal.engine.speculation import Drafter, ModelDrafter, NgramDrafter
from nemolocal.errors import EngineError

N_SPARE_TOKENS = 128  # by which the vocabularies of two sizes of a family may differ at their ends


def open_drafter(spec: LoadSpec, backend: LlamaBackend) -> Drafter | None:
    """Where guesses come from, as the plan says; None where the model cannot take a guess back.

    Raises EngineError for a draft model that cannot be loaded or whose vocabulary is not the model's.
    """
    if spec.draft == "off" or not spec.n_drafted:
        return None
    if not backend.memory.can_rollback:
        if spec.draft != "ngram":
            raise EngineError(
                "This model cannot take a guess back, so a draft model is of no use to it.",
                hint="Load it without --draft.",
            )
        return None
    if spec.draft == "ngram":
        return NgramDrafter()
    small_spec = replace(
        spec,
        path=spec.draft,
        draft="off",
        n_drafted=0,
        adapters=(),
        n_gpu_layers=-1 if spec.n_gpu_layers else 0,  # all of it, also where the large one lies in part
        tensor_split=(),
    )
    small = LlamaBackend(small_spec, lambda share: None, log=backend.log)
    difference = _difference(backend.vocab, small.vocab)
    if difference:
        small.close()
        raise EngineError(
            f"{spec.draft} cannot guess for this model: {difference}.",
            hint="A draft model must have the model's vocabulary, as smaller ones of its family mostly do.",
        )
    return ModelDrafter(small)


def _difference(one: LlamaVocab, other: LlamaVocab) -> str:
    """What tells two vocabularies apart, "" when a token of one is the same in the other."""
    if abs(one.n_tokens - other.n_tokens) > N_SPARE_TOKENS:
        return f"its vocabulary has {other.n_tokens} tokens, the model's {one.n_tokens}"
    for token in range(min(one.n_tokens, other.n_tokens)):
        if one.text(token) != other.text(token):
            return f"token {token} is {other.text(token)!r} in it and {one.text(token)!r} in the model"
    return ""
