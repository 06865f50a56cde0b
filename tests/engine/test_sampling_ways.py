"""Both ways to the next token, the device's candidates and all logits, draw from the one distribution that
the parameters define: the samplers draw thousands of times from one computed batch, and the counts are
compared with the probabilities, worked out here from the definitions of the steps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import llama_cpp.llama_cpp as library
import numpy as np
import pytest

from nemolocal.engine import sampling
from nemolocal.engine.backend import Batch, Row
from nemolocal.engine.llama.backend import LlamaBackend
from nemolocal.engine.llama.library import Log
from nemolocal.engine.llama.sampler import LlamaSampler
from nemolocal.engine.messages import LoadSpec
from nemolocal.types import SamplingParams
from tests import synthetic
from tests.engine.kinds import LAYOUTS, listening, text

pytestmark = pytest.mark.model

N_DRAWS = 6000
N_LEAST_EXPECTED = 5  # in a class of the chi-square test
Z_CHANCE = 5.0  # standard deviations: by chance once in three million tests
PROMPT = text(random.Random(6), 100)
ENDS = (2, 0)  # the synthetic vocabulary's


@dataclass(frozen=True)
class Computed:
    """One batch, computed: the same text in a slot of either way, and the model's logits after it."""

    backend: LlamaBackend
    outputs: dict[str, int]
    logits: np.ndarray

    def draw(self, way: str, params: SamplingParams, n: int = N_DRAWS) -> Counter[int]:
        """One token with each of `n` seeds."""
        counts: Counter[int] = Counter()
        for seed in range(n):
            sampler = self.backend.sampler(replace(params, seed=seed), PROMPT, n_logprobs=None)
            assert isinstance(sampler, LlamaSampler)
            counts += Counter(self.backend._samplers.sample(sampler, [self.outputs[way]], []).tokens)
            sampler.close()
        return counts


def compute(
    path: Path, log: Log, *, n_candidates: int = sampling.N_CANDIDATES, n_gpu_layers: int = 0
) -> Computed:
    spec = LoadSpec(
        str(path), n_ctx=256, n_slots=2, n_threads=1, sampling="device", n_gpu_layers=n_gpu_layers
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "N_CANDIDATES", n_candidates)
        backend = LlamaBackend(spec, lambda share: None, log=log)
    device = backend.sampler(SamplingParams(), PROMPT, n_logprobs=None)
    host = backend.sampler(SamplingParams(), PROMPT, n_logprobs=0)
    backend.launch(Batch([Row(0, 0, PROMPT, device), Row(1, 0, PROMPT, host)]))
    backend.collect()
    device.close()
    host.close()
    outputs = {"device": len(PROMPT) - 1, "host": 2 * len(PROMPT) - 1}
    pointer = library.llama_get_logits_ith(backend._context, outputs["host"])
    logits = np.ctypeslib.as_array(pointer, (384,)).astype(np.float64)
    return Computed(backend, outputs, logits)


def n_candidates(computed: Computed, way: str) -> int:
    """How many tokens the device handed over; 0 where it handed over everything."""
    context, output = computed.backend._context, computed.outputs[way]
    return int(library.llama_get_sampled_candidates_count_ith(context, output))


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with listening() as log:
        yield log


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    return synthetic.write(folder / "model.gguf", synthetic.TINY["qwen3"], is_attentive=True)


@pytest.fixture(scope="module")
def on_cpu(path: Path, log: Log) -> Iterator[Computed]:
    """Where both rows of the batch have the same logits to the last bit, as a GPU's have not."""
    computed = compute(path, log)
    yield computed
    computed.backend.close()


@pytest.fixture(scope="module", params=[0, pytest.param(-1, marks=pytest.mark.gpu, id="gpu")])
def n_gpu_layers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def computed(path: Path, log: Log, n_gpu_layers: int) -> Iterator[Computed]:
    computed = compute(path, log, n_gpu_layers=n_gpu_layers)
    yield computed
    computed.backend.close()


# What the parameters mean ------------------------------------------------------------------------


def probabilities(params: SamplingParams, logits: np.ndarray) -> np.ndarray:
    """The distribution of the next token, by definition of each step; all work on a copy of the logits."""
    logits = logits.copy()
    for token, bias in params.logit_bias:
        logits[token] += bias
    if params.ignore_eos:
        logits[list(ENDS)] = -np.inf
    penalise(params, logits)
    if 0 < params.top_k < len(logits):
        logits[np.argsort(-logits)[params.top_k :]] = -np.inf
    if params.top_p < 1.0:
        order = np.argsort(-logits)
        n_kept = int(np.searchsorted(np.cumsum(softmax(logits)[order]), params.top_p)) + 1
        logits[order[n_kept:]] = -np.inf
    if params.min_p > 0.0:
        logits[softmax(logits) < params.min_p * softmax(logits).max()] = -np.inf
    without = softmax(logits / params.temperature)
    if params.xtc_probability == 0.0:
        return without
    # All tokens of at least the threshold go, but for the least likely of them.
    above = [token for token in np.argsort(-logits) if softmax(logits)[token] >= params.xtc_threshold]
    logits[above[:-1]] = -np.inf
    share = params.xtc_probability
    return share * softmax(logits / params.temperature) + (1.0 - share) * without


def penalise(params: SamplingParams, logits: np.ndarray) -> None:
    """A repeat penalty looks back into the prompt, and so do the others where there is one."""
    if params.repeat_penalty == 1.0:
        return
    for token, n in Counter(PROMPT[-params.penalty_last_n :]).items():
        logits[token] *= params.repeat_penalty ** (-1 if logits[token] > 0 else 1)
        logits[token] -= n * params.frequency_penalty + params.presence_penalty


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def deviation(counts: Counter[int], probabilities: np.ndarray) -> float:
    """How unlikely the counts are, in standard deviations of a normal variable: Pearson's chi-square, by the
    approximation of Wilson and Hilferty. Rare tokens share a class."""
    n = sum(counts.values())
    order = np.argsort(-probabilities)
    expected, observed = [0.0], [0]
    for token in order:
        if expected[-1] >= N_LEAST_EXPECTED:
            expected.append(0.0)
            observed.append(0)
        expected[-1] += n * probabilities[token]
        observed[-1] += counts[int(token)]
    if expected[-1] < N_LEAST_EXPECTED and len(expected) > 1:
        expected[-2:] = [sum(expected[-2:])]
        observed[-2:] = [sum(observed[-2:])]
    impossible = [token for token in counts if probabilities[token] == 0.0]
    if impossible:
        return float("inf")
    k = len(expected) - 1
    assert k > 0, "one class only: nothing to compare"
    chi2 = float(((np.array(observed) - expected) ** 2 / expected).sum())
    return ((chi2 / k) ** (1 / 3) - (1 - 2 / (9 * k))) / (2 / (9 * k)) ** 0.5


# The tests ---------------------------------------------------------------------------------------

LIKELY = 6  # tokens that are banned in one of the cases: the likeliest ones

CASES = {
    "defaults": SamplingParams(),
    "hot with penalties": SamplingParams(
        temperature=1.3,
        top_p=1.0,
        min_p=0.0,
        repeat_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    ),
    "min-p": SamplingParams(temperature=1.0, top_k=100, top_p=1.0, min_p=0.02),
    "top-k alone": SamplingParams(temperature=1.5, top_k=sampling.N_CANDIDATES, top_p=1.0, min_p=0.0),
    "xtc": SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.04),
    "no end": SamplingParams(temperature=2.0, top_k=100, top_p=1.0, min_p=0.0, ignore_eos=True),
}


def case(name: str, logits: np.ndarray) -> SamplingParams:
    if name != "bans":
        return CASES[name]
    banned = tuple((int(token), -100.0) for token in np.argsort(-logits)[:LIKELY])
    return SamplingParams(temperature=1.0, top_k=60, top_p=1.0, min_p=0.0, logit_bias=banned)


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("name", [*CASES, "bans"])
def test_either_way_draws_from_the_distribution(computed: Computed, name: str, way: str) -> None:
    params = case(name, computed.logits)
    assert not sampling.needs_all_logits(params, n_ends=len(ENDS))
    assert n_candidates(computed, way) == (sampling.N_CANDIDATES if way == "device" else 0)
    z = deviation(computed.draw(way, params), probabilities(params, computed.logits))
    assert z < Z_CHANCE


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        SamplingParams(temperature=0.9, top_k=0, top_p=0.9, min_p=0.0, logit_bias=((50, 3.0), (51, 4.0))),
    ],
)
def test_requests_that_need_every_logit(computed: Computed, params: SamplingParams) -> None:
    assert sampling.needs_all_logits(params, n_ends=len(ENDS))
    expected = probabilities(params, computed.logits)
    assert deviation(computed.draw("host", params), expected) < Z_CHANCE
    assert deviation(computed.draw("device", params), expected) > Z_CHANCE, "they would notice the difference"


def test_same_seed_draws_the_same_token_by_either_way(on_cpu: Computed) -> None:
    for name in [*CASES, "bans"]:
        params = case(name, on_cpu.logits)
        assert on_cpu.draw("device", params, 100) == on_cpu.draw("host", params, 100)


def test_answer_that_penalises_what_it_said(on_cpu: Computed) -> None:
    """As many tokens as a penalty can lower, and below them as many as are kept: the last of the candidates
    matter too."""
    params = SamplingParams(
        temperature=5.0, top_k=64, top_p=1.0, min_p=0.0, presence_penalty=90.0, penalty_last_n=64, seed=3
    )
    assert not sampling.needs_all_logits(params, n_ends=len(ENDS))
    answers = []
    for way in ("device", "host"):
        sampler = on_cpu.backend.sampler(params, PROMPT, n_logprobs=None)
        assert isinstance(sampler, LlamaSampler)
        output = [on_cpu.outputs[way]]
        answers.append([on_cpu.backend._samplers.sample(sampler, output, []).tokens[0] for _ in range(300)])
        sampler.close()
    assert answers[0] == answers[1]
    worst = max(int((on_cpu.logits > on_cpu.logits[token]).sum()) for token in answers[0])
    assert 100 < worst < sampling.N_CANDIDATES


@pytest.mark.parametrize("name", ["defaults", "hot with penalties", "min-p", "top-k alone", "bans"])
def test_too_few_candidates_are_noticed(path: Path, log: Log, name: str) -> None:
    computed = compute(path, log, n_candidates=8)
    try:
        assert n_candidates(computed, "device") == 8
        params = case(name, computed.logits)
        z = deviation(computed.draw("device", params, 1000), probabilities(params, computed.logits))
        assert z > Z_CHANCE
    finally:
        computed.backend.close()


def test_greedy_with_penalties_and_bans(on_cpu: Computed) -> None:
    best = [int(token) for token in np.argsort(-on_cpu.logits)]
    for n_banned in range(0, 60, 7):
        params = SamplingParams(
            temperature=0.0,
            repeat_penalty=1.5,
            logit_bias=tuple((token, float("-inf")) for token in best[:n_banned]),
        )
        assert not sampling.needs_all_logits(params, n_ends=len(ENDS))
        logits = on_cpu.logits.copy()
        logits[best[:n_banned]] = -np.inf
        penalise(params, logits)
        right = Counter([int(np.argmax(logits))])
        assert on_cpu.draw("device", params, 1) == on_cpu.draw("host", params, 1) == right


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_row_gets_its_own_candidates(
    path: Path, log: Log, layout: Literal["shared", "split"], n_gpu_layers: int
) -> None:
    """Whoever takes part in a step, by whichever way and with however many guesses: the same tokens as from
    all logits. Slots that were idle in one step and not in the next once got their neighbours' tokens."""
    spec = LoadSpec(
        str(path),
        n_ctx=512,
        n_slots=4,
        n_batch=256,
        n_threads=1,
        kv_layout=layout,
        n_gpu_layers=n_gpu_layers,
    )
    device = LlamaBackend(replace(spec, sampling="device"), lambda share: None, log=log)
    host = LlamaBackend(replace(spec, sampling="host"), lambda share: None, log=log)
    try:
        rng = random.Random(5)
        for _ in range(12):
            device.memory.clear()
            host.memory.clear()
            lengths = [0] * 4
            for _ in range(8):
                compute_one_step(device, host, rng, lengths)
    finally:
        device.close()
        host.close()


def compute_one_step(
    device: LlamaBackend, host: LlamaBackend, rng: random.Random, lengths: list[int]
) -> None:
    """The same batch on both: some slots, most of which have the device choose where it can."""
    slots = [slot for slot in range(4) if rng.random() < 0.7]
    greedy = SamplingParams(temperature=0.0)
    kinds = {
        slot: (rng.choice([None, None, None, 0]), rng.choice([0, 0, 2]), rng.choice([0, 0, 9]))
        for slot in slots
    }
    said = []
    tokens = {slot: text(rng, 1 + n_drafted + n) for slot, (_, n_drafted, n) in kinds.items()}
    for backend in (device, host):
        rows = [
            Row(
                slot,
                lengths[slot],
                tokens[slot],
                backend.sampler(greedy, [], n_logprobs=n_logprobs),
                n_drafted,
            )
            for slot, (n_logprobs, n_drafted, _) in kinds.items()
        ]
        if rows:
            backend.launch(Batch(rows))
            said.append([sampled.tokens for sampled in backend.collect()])
        for row in rows:
            assert row.sampler
            row.sampler.close()
    for slot in slots:
        lengths[slot] += len(tokens[slot])
    assert said[:1] == said[1:]


def test_the_test_itself() -> None:
    """Draws from a distribution pass, draws from another one do not."""
    rng = np.random.default_rng(1)
    right = softmax(rng.normal(0.0, 1.0, 100))
    wrong = softmax(np.log(right) * 1.5)

    def draw(p: np.ndarray) -> Sequence[int]:
        return [int(token) for token in rng.choice(100, N_DRAWS, p=p)]

    assert max(deviation(Counter(draw(right)), right) for _ in range(50)) < Z_CHANCE
    assert min(deviation(Counter(draw(wrong)), right) for _ in range(50)) > Z_CHANCE
