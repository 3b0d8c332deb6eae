"""Tokenizer files of an exported folder: fairseq's dictionary and the files that split text.

Words need no code: ``tokenizer.json`` holds the dictionary, and transformers' own class loads it.
Sentencepieces and byte pairs need the class in ``huggingface_files``. Pieces that the dictionary
lacks must become ``<unk>`` after merging, which ``tokenizer.json`` cannot express: there, the ids
of pieces are also the ids by which they are merged.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import ExportError

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_CODE = Path(__file__).parent / "huggingface_files" / "tokenization_fairseq_moe.py"
_OVERWRITE = "#fairseq:overwrite"
# white space of Python, at which fairseq splits words; \s lacks the last four
_SPACES = r"[\s\x1c-\x1f]+"


@dataclass(frozen=True)
class TokenizerFiles:
    """Files that split text, named as fairseq-interactive's options; words without the last three.

    Attributes:
        dictionary: dict.txt or its folder (default None: in the data that the model names).
        sentencepiece_model: file of ``--bpe sentencepiece``.
        gpt2_encoder_json, gpt2_vocab_bpe: files of ``--bpe gpt2``, both or none.
    """

    dictionary: Path | None = None
    sentencepiece_model: Path | None = None
    gpt2_encoder_json: Path | None = None
    gpt2_vocab_bpe: Path | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, None if value is None else Path(value))
        if (self.gpt2_encoder_json is None) != (self.gpt2_vocab_bpe is None):
            raise ExportError("GPT-2's byte pairs need both encoder.json and vocab.bpe")
        if self.sentencepiece_model and self.gpt2_encoder_json:
            raise ExportError("give a sentencepiece model or GPT-2's byte pairs, not both")

    def symbols(self, data: Path | None, vocab_size: int) -> list[str]:
        """Check that all files exist, and return the dictionary's symbols.

        Args:
            data: folder of dict.txt if ``dictionary`` is None.
            vocab_size: the model's number of symbols.

        Raises:
            ExportError: a file is missing, or the dictionary is not the model's.
        """
        path = self.dictionary or data
        if path is None:
            raise ExportError("the checkpoint names no data: give the folder of dict.txt by --data")
        path = path / "dict.txt" if path.is_dir() else path
        if not path.is_file():
            raise ExportError(f"{path}: no such file; give the folder of dict.txt by --data")
        for file in self._pieces().values():
            if not file.is_file():
                raise ExportError(f"{file}: no such file")
        symbols = [
            *SPECIAL,
            *map(_symbol, path.read_text(encoding="utf-8").rstrip("\n").split("\n")),
        ]
        if len(symbols) != vocab_size:
            raise ExportError(
                f"{path}: has {len(symbols)} symbols, and the model {vocab_size}; give the folder "
                "of the dictionary that it was trained with by --data"
            )
        return symbols

    def write(self, folder: Path, symbols: list[str], prompt: str, max_length: int) -> None:
        """Write the tokenizer; ``prompt`` is the symbol that stands before every text."""
        names = ("bos_token", "pad_token", "eos_token", "unk_token")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": max_length,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            **dict(zip(names, SPECIAL, strict=True)),
        }
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
            write_json(folder / "tokenizer.json", _tokenizer_of_words(symbols, prompt))
        write_json(folder / "tokenizer_config.json", config)

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


def _symbol(line: str) -> str:
    """Return the symbol of a line ``SYMBOL COUNT [#fairseq:overwrite]`` of dict.txt."""
    return line.rstrip().removesuffix(f" {_OVERWRITE}").rpartition(" ")[0]


def _tokenizer_of_words(symbols: list[str], prompt: str) -> dict:
    """Return tokenizer.json: the prompt's symbol, then words that are symbols or unknown."""
    numbers: dict[str, int] = {}
    for number, symbol in enumerate(symbols):
        if symbol in numbers:  # text gets the later number; the earlier stays in the vocabulary
            numbers[f"{symbol} {number}"] = numbers[symbol]
        numbers[symbol] = number
    first = {"SpecialToken": {"id": prompt, "type_id": 0}}
    text, pair = ({"Sequence": {"id": each, "type_id": 0}} for each in "AB")
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": symbol, **token, "special": True}
            for number, symbol in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": _SPACES},
            "behavior": "Removed",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, pair],
            "special_tokens": {
                prompt: {"id": prompt, "ids": [SPECIAL.index(prompt)], "tokens": [prompt]}
            },
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": numbers, "unk_token": "<unk>"},
    }
