"""Generated speech: utterances of two-tone syllables in several dialects, as filter banks.

A dialect says each of 32 syllables by a pair of tones of its own, as telephone keys have pairs. An
utterance begins with one long tone, by which its dialect is known.
"""

from pathlib import Path

import numpy as np

SYLLABLES = [consonant + vowel for consonant in "bdfgklmn" for vowel in "aeio"]
DIALECTS = 4
UTTERANCES = {"train": 3000, "valid": 200, "test": 200}
RATE, WINDOW, HOP = 16000, 400, 320
_LOW, _HIGH = np.geomspace(300, 900, 8), np.geomspace(1100, 2200, 4)  # Hz
_EDGES = np.unique(np.geomspace(4, 240, 64).astype(int))  # of the banks, among 257 frequencies
BANKS = len(_EDGES)
CONFIG = f"""vocab_filename: dict.txt
input_channels: 1
input_feat_per_channel: {BANKS}
audio_root: banks
"""


def write_speech(folder: Path) -> None:
    """Write the data folder of fairseq's task speech_to_text."""
    draw = np.random.default_rng(1)
    tones = [draw.permutation(len(SYLLABLES)) for _ in range(DIALECTS)]
    banks = folder / "banks"
    banks.mkdir(parents=True)
    for split, count in UTTERANCES.items():
        rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
        for number in range(count):
            dialect = draw.integers(DIALECTS)
            said = draw.integers(len(SYLLABLES), size=draw.integers(4, 9))
            frames = _filter_banks(_samples(dialect, tones[dialect][said], draw))
            path = banks / f"{split}-{number}.npy"
            np.save(path, frames)
            text = " ".join(SYLLABLES[each] for each in said)
            rows.append(f"{path.stem}\t{path}\t{len(frames)}\t{text}\tdialect {dialect}")
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "dict.txt").write_text("".join(f"{each} 1\n" for each in SYLLABLES))
    (folder / "config.yaml").write_text(CONFIG)


def _samples(dialect: int, tones: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the waves of an utterance, 0.1 s for each syllable, with noise."""
    time = np.arange(RATE // 10) / RATE
    parts = [np.sin(2 * np.pi * (2400 + 500 * dialect) * time)]
    for tone in tones:
        pair = (_LOW[tone % 8], _HIGH[tone // 8])
        parts.append(sum(np.sin(2 * np.pi * hertz * time) for hertz in pair))
    wave = np.concatenate(parts)
    return wave + draw.normal(0, 0.1, len(wave))


def _filter_banks(wave: np.ndarray) -> np.ndarray:
    """Return fp32 [frames, BANKS]: logarithms of the energy, with mean 0 and deviation 1."""
    frames = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[::HOP] * np.hanning(WINDOW)
    energy = np.abs(np.fft.rfft(frames, 512)) ** 2
    banks = np.log(np.add.reduceat(energy, _EDGES, axis=1) + 1e-3)
    return ((banks - banks.mean()) / banks.std()).astype(np.float32)
