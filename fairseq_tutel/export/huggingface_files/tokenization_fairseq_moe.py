"""Tokenizer that splits text as fairseq-interactive does, by sentencepiece or GPT-2's byte pairs.

Every piece is a symbol of the dictionary or unknown.
"""

import json
import os
import shutil

from transformers import PreTrainedTokenizer

try:  # an ImportError here would stop folders with byte pairs from loading
    import sentencepiece
except ImportError:
    sentencepiece = None


class FairseqMoETokenizer(PreTrainedTokenizer):
    """Tokenizer that puts ``</s>``, or ``<s>`` if the model was trained so, before a text.

    Args:
        vocab_file: list of the dictionary's symbols, in the order of their numbers.
        sentencepiece_file: sentencepiece model.
        encoder_file, merges_file: GPT-2's encoder.json and vocab.bpe, both or none.
        prompt_token: symbol before a text.
    """

    vocab_files_names = {
        "vocab_file": "vocab.json",
        "sentencepiece_file": "sentencepiece.model",
        "encoder_file": "encoder.json",
        "merges_file": "vocab.bpe",
    }
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file,
        sentencepiece_file=None,
        encoder_file=None,
        merges_file=None,
        prompt_token="</s>",
        **kwargs,
    ):
        self.files = [vocab_file, sentencepiece_file, encoder_file, merges_file]
        with open(vocab_file, encoding="utf-8") as file:
            self.symbols = json.load(file)
        self.numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        self.pieces = self.pairs = None
        if sentencepiece_file and sentencepiece is None:
            raise ImportError("this tokenizer needs sentencepiece: pip install sentencepiece")
        if sentencepiece_file:
            self.pieces = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_file)
        else:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers

            self.pairs = Tokenizer(models.BPE.from_file(encoder_file, merges_file))
            self.pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            self.pairs.decoder = decoders.ByteLevel()
        self.prefix_tokens = [self.numbers[prompt_token]]
        super().__init__(
            prompt_token=prompt_token, special_tokens_pattern="prefix_suffix", **kwargs
        )

    @property
    def vocab_size(self):
        return len(self.symbols)

    def get_vocab(self):
        return {**self.numbers, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        if self.pieces is not None:
            return " ".join(self.pieces.encode(text, out_type=str)).split()
        return [str(number) for number in self.pairs.encode(text, add_special_tokens=False).ids]

    def _convert_token_to_id(self, token):
        return self.numbers.get(token, self.numbers["<unk>"])

    def _convert_id_to_token(self, index):
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens):
        if self.pieces is not None:
            return "".join(tokens).replace("\u2581", " ").strip()
        return self.pairs.decode([int(token) for token in tokens if token.isdigit()])

    def save_vocabulary(self, save_directory, filename_prefix=None):
        saved = []
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        for source, name in zip(self.files, self.vocab_files_names.values(), strict=True):
            target = os.path.join(save_directory, prefix + name)
            if source and os.path.abspath(source) != os.path.abspath(target):
                shutil.copyfile(source, target)
            saved += [target] if source else []
        return tuple(saved)
