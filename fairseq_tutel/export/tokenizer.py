"""The files of a tokenizer: fairseq's dictionary, and what cuts text into its symbols."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from .description import ModelDescription
from .errors import ExportError

_NAMES = {
    "dictionary": "dict.txt",
    "sentencepiece_model": "sentencepiece.model",
    "gpt2_encoder_json": "encoder.json",
    "gpt2_vocab_bpe": "vocab.bpe",
}
_SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class TokenizerFiles:
    """Options of the same names as fairseq-interactive's; without the last three, text is words.

    Attributes:
        dictionary: dict.txt, or the folder with it; None: in the data that the model names.
        sentencepiece_model: of ``--bpe sentencepiece``.
        gpt2_encoder_json, gpt2_vocab_bpe: both, of ``--bpe gpt2``.
    """

    dictionary: Path | None = None
    sentencepiece_model: Path | None = None
    gpt2_encoder_json: Path | None = None
    gpt2_vocab_bpe: Path | None = None

    def __post_init__(self):
        for name in _NAMES:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else Path(value))
        if (self.gpt2_encoder_json is None) != (self.gpt2_vocab_bpe is None):
            raise ExportError("GPT-2's byte pairs need both encoder.json and vocab.bpe")
        if self.sentencepiece_model and self.gpt2_encoder_json:
            raise ExportError("text is cut by sentencepiece or by GPT-2's byte pairs: give one")

    def located(self, data: Path | None) -> TokenizerFiles:
        """With the dictionary's place; ``data`` is the folder that the model names."""
        place = self.dictionary or data
        if place is None:
            raise ExportError("the checkpoint names no data: give the folder of dict.txt by --data")
        if place.is_dir():
            place = place / "dict.txt"
        return dataclasses.replace(self, dictionary=place)

    def check(self, vocab_size: int) -> None:
        """Raise ExportError for a file that is not there, or a dictionary of another model."""
        for name in _NAMES:
            path = getattr(self, name)
            if path is not None and not path.is_file():
                hint = "; give the folder of dict.txt by --data" if name == "dictionary" else ""
                raise ExportError(f"{path}: no such file{hint}")
        with self.dictionary.open(encoding="utf-8") as file:
            symbols = len(_SPECIAL) + sum(1 for _ in file)
        if symbols != vocab_size:
            raise ExportError(
                f"{self.dictionary}: has {symbols} symbols, and the model {vocab_size}; give the "
                "folder of the dictionary that it was trained with by --data"
            )

    def write(self, folder: Path, model: ModelDescription) -> None:
        """Copy the files, and say how they are used."""
        for name, target in _NAMES.items():
            if (path := getattr(self, name)) is not None:
                shutil.copyfile(path, folder / target)
        config = {
            "tokenizer_class": "FairseqMoETokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_fairseq_moe.FairseqMoETokenizer", None]},
            "prompt_token": "<s>" if model.prompt == 0 else "</s>",
            "model_max_length": model.max_positions,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            **_SPECIAL,
        }
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
