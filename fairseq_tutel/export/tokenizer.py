"""Tokenizer files of an exported folder: fairseq's dictionary and the files that split text.

Words need no code, only ``tokenizer.json``. Sentencepieces and byte pairs of a language model need
the class in ``huggingface_files``: pieces that the dictionary lacks must become ``<unk>`` after
merging, which ``tokenizer.json`` cannot express. For a translation model, whose folder has no code,
:mod:`.sentencepieces` leaves such pieces out.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..checkpoint.folders import SPECIAL
from .errors import ExportError
from .sentencepieces import of_sentencepieces

_CODE = Path(__file__).parent / "huggingface_files" / "tokenization_fairseq_moe.py"
_OVERWRITE = "#fairseq:overwrite"
# white space of Python, at which fairseq splits words; \s lacks the last four
_SPACES = r"[\s\x1c-\x1f]+"


@dataclass(frozen=True)
class TokenizerFiles:
    """Files that split text, named as fairseq-interactive's options; without them: words."""

    dictionary: Path | None = None  # dict.txt or its folder; None: in the data of the model
    sentencepiece_model: Path | None = None
    gpt2_encoder_json: Path | None = None
    gpt2_vocab_bpe: Path | None = None

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, None if value is None else Path(value))
        if (self.gpt2_encoder_json is None) != (self.gpt2_vocab_bpe is None):
            raise ExportError("GPT-2's byte pairs need both encoder.json and vocab.bpe")
        if self.sentencepiece_model and self.gpt2_encoder_json:
            raise ExportError("give a sentencepiece model or GPT-2's byte pairs, not both")

    def symbols(
        self, data: Path | None, vocab_size: int, name: str = "dict.txt", more: Sequence[str] = ()
    ) -> list[str]:
        """Return the ``vocab_size`` symbols of the dictionary, file ``name``; else ExportError.

        ``data`` is its folder if ``dictionary`` is None. ``more`` follow if the file lacks them.
        """
        path = self.dictionary or data
        if path is None:
            raise ExportError(f"the checkpoint names no data: give the folder of {name} by --data")
        path = path / name if path.is_dir() else path
        if not path.is_file():
            raise ExportError(f"{path}: no such file; give the folder of {name} by --data")
        for file in self._pieces().values():
            if not file.is_file():
                raise ExportError(f"{file}: no such file")
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        words = (line.rstrip().removesuffix(f" {_OVERWRITE}") for line in lines)  # SYMBOL COUNT
        symbols = [*SPECIAL, *(word.rpartition(" ")[0] for word in words)]
        symbols += [symbol for symbol in more if symbol not in set(symbols)]
        if len(symbols) != vocab_size:
            raise ExportError(
                f"{path}: has {len(symbols)} symbols, and the model {vocab_size}; give the model's "
                "own dictionary by --data"
            )
        return symbols

    def write(self, folder: Path, symbols: list[str], prompt: str, max_length: int) -> None:
        """Write the tokenizer; ``prompt`` is the symbol that stands before every text."""
        config = _config(max_length, "left")
        if pieces := self._pieces():
            config |= {
                "tokenizer_class": "FairseqMoETokenizer",
                "auto_map": {"AutoTokenizer": [f"{_CODE.stem}.FairseqMoETokenizer", None]},
                "prompt_token": prompt,
            }
            for name, path in pieces.items():
                shutil.copyfile(path, folder / name)
            shutil.copyfile(_CODE, folder / _CODE.name)
            write_json(folder / "vocab.json", symbols)
        else:
            tokenizer = _tokenizer(symbols, _words(symbols), before=prompt)
            write_json(folder / "tokenizer.json", tokenizer)
        write_json(folder / "tokenizer_config.json", config)

    def write_for_translation(
        self, folder: Path, symbols: list[str], languages: list[str], max_length: int
    ) -> None:
        """Write the tokenizer: ``</s>`` stands behind every text, which holds ``languages``."""
        if self.gpt2_encoder_json:
            raise ExportError("a translation model with GPT-2's byte pairs cannot be exported")
        parts = _words(symbols)
        if self.sentencepiece_model:
            parts = of_sentencepieces(self.sentencepiece_model, symbols)
        tokenizer = _tokenizer(symbols, parts, behind="</s>", languages=languages)
        write_json(folder / "tokenizer.json", tokenizer)
        write_json(folder / "tokenizer_config.json", _config(max_length, "right"))

    def _pieces(self) -> dict[str, Path]:
        files = {
            "sentencepiece.model": self.sentencepiece_model,
            "encoder.json": self.gpt2_encoder_json,
            "vocab.bpe": self.gpt2_vocab_bpe,
        }
        return {name: path for name, path in files.items() if path is not None}


def write_json(path: Path, content: dict | list) -> None:
    """Write one JSON file of an exported folder."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(max_length: int, padding_side: str) -> dict:
    """Return tokenizer_config.json for the class of transformers that reads tokenizer.json."""
    names = ("bos_token", "pad_token", "eos_token", "unk_token")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        "padding_side": padding_side,
        "clean_up_tokenization_spaces": False,
        **dict(zip(names, SPECIAL, strict=True)),
    }


def _words(symbols: list[str]) -> dict:
    """Return parts of tokenizer.json that split text into words, which are symbols or unknown."""
    numbers: dict[str, int] = {}
    for number, symbol in enumerate(symbols):
        if symbol in numbers:  # text gets the later number; the earlier stays in the vocabulary
            numbers[f"{symbol} {number}"] = numbers[symbol]
        numbers[symbol] = number
    split = {"type": "Split", "pattern": {"Regex": _SPACES}, "behavior": "Removed", "invert": False}
    return {
        "normalizer": None,
        "pre_tokenizer": split,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": numbers, "unk_token": "<unk>"},
    }


def _tokenizer(
    symbols: list[str],
    parts: dict,
    *,
    before: str | None = None,
    behind: str | None = None,
    languages: Sequence[str] = (),
) -> dict:
    """Return tokenizer.json: how text is split, and the symbols before and behind it."""
    first, last = (
        [{"SpecialToken": {"id": each, "type_id": 0}}] if each else [] for each in (before, behind)
    )
    text, pair = ({"Sequence": {"id": each, "type_id": 0}} for each in "AB")
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": symbols.index(symbol), "content": symbol, **token, "special": True}
            for symbol in (*SPECIAL, *languages)
        ],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*first, text, *last],
            "pair": [*first, text, pair, *last],
            "special_tokens": {
                each: {"id": each, "ids": [symbols.index(each)], "tokens": [each]}
                for each in filter(None, (before, behind))
            },
        },
        **parts,
    }
