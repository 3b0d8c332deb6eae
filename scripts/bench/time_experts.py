"""Seconds of an update of each setting of study_experts.py, in turns, and all curves, as a file.

    python scripts/bench/time_experts.py --turns 30

One thread runs updates from the trained weights of the first seed. Times are by the wall clock and
of this process on processors.
"""

import argparse
import random
import statistics
import time

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from models import Run
from record import ROOT, describe_run, ratio_of_pairs, write_json
from study_experts import RUNS, SETTINGS, words

import fairseq_tutel
from fairseq_tutel.picture.compare import read_run

RESULT = ROOT / "scripts/bench/results/experts.json"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def trained() -> dict[str, Run]:
    """Return the first run of each setting that has ended."""
    fairseq_tutel.register()
    runs: dict[str, Run] = {}
    for name in SETTINGS:
        last = RUNS / f"{name}-seed1/checkpoint_last.pt"
        if not last.exists():
            print(f"{name}: left out, it has not ended")
            continue
        given = [word for word in words(name) if word not in ("--user-dir", "fairseq_tutel")]
        parsed = options.parse_args_and_arch(options.get_training_parser(), given)
        runs[name] = Run("moe", convert_namespace_to_omegaconf(parsed))
        runs[name].trainer.load_checkpoint(str(last), True, True, {}, True)  # weights alone
    return runs


def measure(runs: dict[str, Run], turns: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds of updates by setting and clock."""
    task = runs["dense"].trainer.task
    task.load_dataset("train")
    data = task.dataset("train")
    samples = [data.collater([data[8 * n + i] for i in range(8)]) for n in range(16)]
    times = {name: {clock: [] for clock in CLOCKS} for name in runs}
    for turn in range(-2, turns):
        for name in random.Random(turn).sample(list(runs), len(runs)):
            begin = {clock: now() for clock, now in CLOCKS.items()}
            runs[name].update(samples[turn % len(samples)])
            for clock, now in CLOCKS.items() if turn >= 0 else ():
                times[name][clock].append(now() - begin[clock])
    return times


def main() -> None:
    """Write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(trained(), given.turns)
    about = describe_run("experts", torch.device("cpu"))
    for clock in CLOCKS:
        pairs = {name: (of[clock], times["dense"][clock]) for name, of in times.items()}
        about[f"{clock}_over_dense"] = {name: ratio_of_pairs(*pair) for name, pair in pairs.items()}
        print(clock, "over dense:", about[f"{clock}_over_dense"])
    dense = statistics.median(times["dense"]["processor"])
    ratios = about["processor_over_dense"]
    about["seconds_per_update"] = {name: dense * ratio[1] for name, ratio in ratios.items()}
    about["held_out_bits"] = {
        last.parent.name: {point.updates: point.bits for point in read_run(last.parent).points}
        for last in sorted(RUNS.glob("*-seed?/checkpoint_last.pt"))
    }
    write_json({**about, "seconds": times}, RESULT)


if __name__ == "__main__":
    main()
