"""Loads an exported folder by transformers, and compares its logits with fairseq's on some texts.

    python compare_export.py CHECKPOINT FOLDER TEXTS --data DATA [--sentencepiece-model FILE]

The exit status is 1 where numbers of tokens differ, or a logit by more than 1e-5 of the largest.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch

TOLERANCE = 1e-5


@torch.no_grad()
def compare(checkpoint: Path, folder: Path, texts: list[str], data: Path, pieces: Path | None):
    """The largest difference of a logit, over the largest logit of its text (or 1).

    Raises:
        ValueError: the tokenizers differ on a text.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fairseq_tutel import register

    register()
    from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE

    how = {"bpe": "sentencepiece", "sentencepiece_model": str(pieces)} if pieces else {}
    ours = TransformerLMGPTMoE.from_pretrained(
        str(checkpoint.parent), checkpoint.name, str(data.absolute()), **how
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
    end = ours.task.source_dictionary.eos()
    largest = 0.0
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        wanted = [end, *ours.encode(text).tolist()[:-1]]
        if tokens[0].tolist() != wanted:
            raise ValueError(f"{text!r}: transformers has {tokens[0].tolist()}, fairseq {wanted}")
        logits = ours.models[0](src_tokens=tokens, src_lengths=None)[0].float()
        difference = (theirs(tokens).logits.float() - logits).abs().max()
        largest = max(largest, (difference / logits.abs().max().clamp(min=1)).item())
    return largest


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", type=Path, help="a text per line")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sentencepiece-model", type=Path)
    args = parser.parse_args(argv)
    logging.getLogger().setLevel(logging.WARNING)
    texts = args.texts.read_text(encoding="utf-8").splitlines()
    try:
        found = compare(args.checkpoint, args.folder, texts, args.data, args.sentencepiece_model)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(texts)} texts by transformers and by fairseq: tokens alike, logits to {found:.1e}")
    return int(not found <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
