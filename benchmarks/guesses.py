"""What guessing ahead gains: an answer that quotes its source, and one that repeats nothing, with guesses
from the text itself and without, in turn on one engine.

    python benchmarks/guesses.py [MODEL.gguf] [--rounds 7] [--threads 2]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

from nemolocal import config
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec
from nemolocal.models import reference, store
from nemolocal.types import Finish, GenerationParams, SamplingParams, Segment, Usage

SOURCE = (
    "The harbour of Aldmere was built in 1742 by the merchant Tobias Crane. It has four piers, of which the "
    "northern one is used by the fishing fleet. The lighthouse at its mouth was lit for the first time in "
    "the winter of 1801 and has been kept by the same family ever since. In 1923 a storm destroyed the "
    "western breakwater, and the town council decided to replace it with one of granite. The new breakwater "
    "is three hundred metres long and eleven metres wide at its base."
)
TASKS = {
    "quotes its source": f"Text: {SOURCE}\n\nSummarise the text above, quoting it word for word.",
    "repeats nothing": "Write a story about a dog who learns to fly.",
}
N_NEW = 128


async def answer(engine: EngineClient, task: str, *, guesses: bool, seed: int) -> tuple[float, Usage]:
    """Tokens a second of one answer, and its counts."""
    prompt = f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"
    is_greedy = task != TASKS["repeats nothing"]
    sampling = SamplingParams(temperature=0.0 if is_greedy else 0.8, seed=seed, ignore_eos=True)
    params = GenerationParams(sampling, max_tokens=N_NEW, speculate=guesses, reuse_cache=True)
    async for item in engine.generate((Segment(prompt, is_control=True),), params):
        if isinstance(item, Finish):
            return item.usage.completion_tokens / item.timings.decode_s, item.usage
    raise RuntimeError("the answer did not end")


async def run(options: argparse.Namespace) -> None:
    path = options.model or store.resolve(reference.parse("starter"), config.load()).path
    with tempfile.TemporaryDirectory() as folder:
        spec = LoadSpec(str(path), 2048, 2, n_threads=options.threads)
        engine = await EngineClient.start(spec, Path(folder) / "engine.log")
        print("| answer | plain | guessing ahead | ratio | guesses right |\n|---|---|---|---|---|")
        for name, task in TASKS.items():
            await answer(engine, task, guesses=True, seed=0)
            speeds: dict[bool, list[float]] = {True: [], False: []}
            for number in range(options.rounds):
                for guesses in (number % 2 == 0, number % 2 == 1):
                    speed, counts = await answer(engine, task, guesses=guesses, seed=number)
                    speeds[guesses].append(speed)
                    if guesses:
                        usage = counts
            plain, ahead = statistics.median(speeds[False]), statistics.median(speeds[True])
            right = f"{usage.accepted_tokens} of {usage.drafted_tokens}"
            print(
                f"| {name} | {plain:.1f} tok/s | {ahead:.1f} tok/s | {ahead / plain:.2f} | {right} |",
                flush=True,
            )
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a GGUF file (default: the starter model)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
