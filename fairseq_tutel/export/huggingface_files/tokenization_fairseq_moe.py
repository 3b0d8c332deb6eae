"""Text to the numbers of a fairseq dictionary, as fairseq-interactive makes them.

Text is cut by sentencepiece, by GPT-2's byte pairs, or into words, whichever files are there; every
piece is a symbol of the dictionary, or unknown.
"""

import os
import shutil

from transformers import PreTrainedTokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


class FairseqMoETokenizer(PreTrainedTokenizer):
    """Puts ``</s>`` before a text (``<s>`` if the model was trained so), as in training.

    Args:
        dict_file: fairseq's dict.txt.
        sentencepiece_file: a sentencepiece model.
        encoder_file, merges_file: encoder.json and vocab.bpe of GPT-2, both or none.
        prompt_token: what stands before a text.
    """

    vocab_files_names = {
        "dict_file": "dict.txt",
        "sentencepiece_file": "sentencepiece.model",
        "encoder_file": "encoder.json",
        "merges_file": "vocab.bpe",
    }
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        dict_file,
        sentencepiece_file=None,
        encoder_file=None,
        merges_file=None,
        prompt_token="</s>",
        **kwargs,
    ):
        self.files = [dict_file, sentencepiece_file, encoder_file, merges_file]
        self.symbols = read_dictionary(dict_file)
        self.numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        self.pieces = self.pairs = None
        if sentencepiece_file:
            import sentencepiece

            self.pieces = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_file)
        elif encoder_file:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers

            self.pairs = Tokenizer(models.BPE.from_file(encoder_file, merges_file))
            self.pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            self.pairs.decoder = decoders.ByteLevel()
        self.prompt_token = prompt_token
        for name, token in zip(("bos", "pad", "eos", "unk"), SPECIAL, strict=True):
            kwargs.setdefault(f"{name}_token", token)
        super().__init__(prompt_token=prompt_token, **kwargs)

    @property
    def vocab_size(self):
        return len(self.symbols)

    def get_vocab(self):
        return {**self.numbers, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        if self.pieces is not None:
            text = " ".join(self.pieces.encode(text, out_type=str))
        elif self.pairs is not None:
            text = " ".join(map(str, self.pairs.encode(text, add_special_tokens=False).ids))
        return text.split()

    def _convert_token_to_id(self, token):
        return self.numbers.get(token, self.numbers[SPECIAL[3]])

    def _convert_id_to_token(self, index):
        return self.symbols[index]

    def convert_tokens_to_string(self, tokens):
        if self.pieces is not None:
            return "".join(tokens).replace("\u2581", " ").strip()
        if self.pairs is None:
            return " ".join(tokens)
        return self.pairs.decode([int(token) for token in tokens if token.isdigit()])

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        first = [self.numbers[self.prompt_token], *token_ids_0]
        return first if token_ids_1 is None else [*first, *token_ids_1]

    def get_special_tokens_mask(
        self, token_ids_0, token_ids_1=None, already_has_special_tokens=False
    ):
        if already_has_special_tokens:
            special = {self.numbers[symbol] for symbol in SPECIAL}
            return [int(number in special) for number in token_ids_0]
        return [1] + [0] * (len(token_ids_0) + len(token_ids_1 or ()))

    def create_token_type_ids_from_sequences(self, token_ids_0, token_ids_1=None):
        return [0] * len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))

    def save_vocabulary(self, save_directory, filename_prefix=None):
        saved = []
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        for source, name in zip(self.files, self.vocab_files_names.values(), strict=True):
            target = os.path.join(save_directory, prefix + name)
            if source and os.path.abspath(source) != os.path.abspath(target):
                shutil.copyfile(source, target)
            saved += [target] if source else []
        return tuple(saved)


def read_dictionary(path):
    """Symbols of a dict.txt in the order of their numbers, special ones first."""
    symbols = list(SPECIAL)
    known = dict(zip(SPECIAL, range(len(SPECIAL)), strict=True))
    with open(path, encoding="utf-8") as file:
        for line in file:
            symbol, _, field = line.rstrip().rpartition(" ")
            if field == "#fairseq:overwrite":
                symbol = symbol.rpartition(" ")[0]
            known[symbol] = len(symbols)
            symbols.append(symbol)
    return symbols
