"""A sentencepiece model as parts of ``tokenizer.json``."""

import base64
import logging
from collections.abc import Mapping
from pathlib import Path

from ..checkpoint.folders import SPECIAL
from .errors import ExportError

logger = logging.getLogger(__name__)

# types of pieces in a sentencepiece model
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6


def of_sentencepieces(file: Path, symbols: list[str]) -> dict:
    """Return normalizer, pre_tokenizer, decoder and model that split text as sentencepiece does.

    A piece that the dictionary lacks is left out, with a warning. ExportError if sentencepiece is
    missing, or the model cannot be expressed.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ExportError(f"{file}: pip install sentencepiece protobuf ({error})") from None
    model = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    training = model.trainer_spec
    for reason, found in (
        ("pieces that are neither unigrams nor byte pairs", training.model_type not in (1, 2)),
        ("user-defined symbols", any(each.type == _USER_DEFINED for each in model.pieces)),
        ("white space behind words", training.treat_whitespace_as_suffix),
        ("no white space before a text", not model.normalizer_spec.add_dummy_prefix),
    ):
        if found:
            raise ExportError(f"{file}: a sentencepiece model with {reason} cannot be exported")
    scores = {each.piece: each.score for each in model.pieces if each.type in (_NORMAL, _BYTE)}
    known = set(symbols)
    if missing := [piece for piece in scores if piece not in known]:
        logger.warning(
            "%s: %d of its %d pieces are not in the dictionary, such as %r; fairseq reads them as "
            "<unk>, and the exported tokenizer splits them into smaller ones",
            file, len(missing), len(scores), missing[0],
        )  # fmt: skip
    scores = {piece: score for piece, score in scores.items() if piece in known}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    make = _unigrams if training.model_type == 1 else _byte_pairs
    return {
        "normalizer": _normalizer(model.normalizer_spec),
        "pre_tokenizer": {**metaspace, "split": False},
        "decoder": {**metaspace, "split": False},
        "model": {"byte_fallback": training.byte_fallback, **make(symbols, scores)},
    }


def _normalizer(spec) -> dict:
    steps: list[dict] = []
    if spec.precompiled_charsmap:
        rules = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": rules})
    if spec.remove_extra_whitespaces:
        for pattern, content in (("^ +| +$", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    return {"type": "Sequence", "normalizers": steps}


def _unigrams(symbols: list[str], scores: Mapping[str, float]) -> dict:
    # other symbols are in no text; a lower score of theirs would lower that of unknown characters
    least = min(scores.values())
    vocabulary = [[symbol, scores.get(symbol, least)] for symbol in symbols]
    return {"type": "Unigram", "unk_id": symbols.index(SPECIAL[3]), "vocab": vocabulary}


def _byte_pairs(symbols: list[str], scores: Mapping[str, float]) -> dict:
    """Return the model; each way to make a piece of two is a merge with the piece's rank."""
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += [list(cut) for cut in cuts if cut[0] in scores and cut[1] in scores]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": SPECIAL[3],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "vocab": {symbol: number for number, symbol in enumerate(symbols)},
        "merges": merges,
    }
