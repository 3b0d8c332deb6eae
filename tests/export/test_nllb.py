"""Translation models as transformers' NllbMoe: fairseq's logits, hypotheses and tokenization."""

import logging
import re

import pytest
import torch
from exported_models import (
    NLLB_CASES,
    VOCABULARY,
    generate,
    interactive,
    make_translation,
    write_dictionary,
)

from fairseq_tutel.export import TokenizerFiles, export_huggingface

pytestmark = pytest.mark.extras

LANGUAGES = (
    "--task translation_multi_simple_epoch --langs de,en --lang-pairs de-en -s de -t en "
    "--encoder-langtok src --decoder-langtok"
)


@pytest.fixture(autouse=True)
def as_before_version_5():
    pytest.importorskip("transformers")
    from fairseq_tutel.integrations.transformers import repair_nllb_moe

    repair_nllb_moe()


def load(folder):
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize("options", NLLB_CASES.values(), ids=NLLB_CASES)
def test_logits_are_those_of_fairseq(options, tmp_path):
    saved = make_translation(tmp_path, options)
    folder = export_huggingface(saved.path, tmp_path / "m", max_bytes=9000)
    assert not list(folder.glob("*.py"))
    # padded as fairseq pads them
    sources, given = torch.randint(4, VOCABULARY, (2, 4, 7))
    sources[:, -1], given[:, 0] = 2, 2
    for row, padding in enumerate((0, 3, 1, 4)):
        sources[row, :padding] = 1
    mask = sources.ne(1)
    with torch.no_grad():
        want = saved.model(sources, mask.sum(1), given)[0]
        model = load(folder)
        got = model(sources, attention_mask=mask.long(), decoder_input_ids=given).logits
    assert want.std() > 0.1
    for name, value in re.findall(r"--(\S*dropout) (\S+)", options):
        assert getattr(model.config, name.replace("-", "_")) == float(value)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


SENTENCES = ["w5", "w3 w4 w1 w22 w0", "w9 w8 w7", "nothing w2"]


def translated(folder, sentence, length, **options):
    """Texts, and what ``generate`` returns; a translation of ``length`` symbols is ended."""
    from transformers import AutoTokenizer

    tokenizer, texts = AutoTokenizer.from_pretrained(folder), []
    language = tokenizer.convert_tokens_to_ids("__en__")
    given = tokenizer(f"__de__ {sentence}", return_tensors="pt")
    found = generate(load(folder), given, length, forced_bos_token_id=language, **options)
    for numbers in found.sequences.tolist():
        assert numbers[:2] == [2, language]
        words = tokenizer.convert_ids_to_tokens(numbers[2 : numbers.index(2, 1)])
        texts.append(" ".join("" if word == "<s>" else word for word in words).strip())
    return texts, found


def test_beam_search_is_that_of_fairseq(programs, tmp_path):
    """All hypotheses in their order; fairseq's scores have that of the language token in them."""
    saved = make_translation(tmp_path, "--moe-eom 0.1", scale=6.0)
    folder = export_huggingface(saved.path, tmp_path / "m")
    words = (*LANGUAGES.split(), "--beam", "4", "--nbest", "4", "--max-len-b", "12")
    want = interactive(programs, saved, SENTENCES, *words, "--unnormalized")
    for sentence, hypotheses in zip(SENTENCES, want, strict=True):
        texts, found = translated(
            folder, sentence, 12, num_beams=4, num_return_sequences=4, early_stopping=True,
            length_penalty=0.0,
        )  # fmt: skip
        assert texts == [text.removeprefix("__en__").strip() for _, text in hypotheses]
        given = torch.tensor([score for score, _ in hypotheses]) - found.sequences_scores
        torch.testing.assert_close(given, given[:1].expand(4), rtol=0, atol=2e-4)
        assert given[0] < -0.1


TEXTS = ["a cat sat on the mat.", "  two  words ", "naïve – 你好!", "zzz qqq", "", " ", "\ta\n cat"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_are_those_of_fairseq(kind, tmp_path, caplog):
    """Sentencepiece's, as numbers of the dictionary; the language token is a part of the text."""
    import sentencepiece
    from fairseq.data import Dictionary
    from transformers import AutoTokenizer

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat on the mat.\na naïve cat sat on two mats, too.\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "spm"), vocab_size=40, model_type=kind,
        hard_vocab_limit=False, minloglevel=2, bos_id=-1, eos_id=-1,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    symbols = [pieces.id_to_piece(number) for number in range(1, pieces.get_piece_size())]
    write_dictionary(tmp_path, symbols)
    folder = tmp_path / "m"
    folder.mkdir()
    files = TokenizerFiles(tmp_path, sentencepiece_model=tmp_path / "spm.model")
    listed = files.symbols(None, len(symbols) + 6, more=["__de__", "__en__"])
    with caplog.at_level(logging.WARNING):
        files.write_for_translation(folder, listed, ["__de__", "__en__"], 40)
        assert not caplog.text
        less = [symbol for symbol in listed if symbol != symbols[-1]]
        files.write_for_translation(tmp_path, less, ["__de__", "__en__"], 40)
    assert "1 of its" in caplog.text and repr(symbols[-1]) in caplog.text
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    german = len(dictionary)
    for text in TEXTS:
        cut = " ".join(pieces.encode(text, out_type=str))
        want = dictionary.encode_line(cut, add_if_not_exist=False).tolist()
        assert tokenizer(f"__de__ {text}")["input_ids"] == [german, *want]
        assert tokenizer(text)["input_ids"] == want
        if dictionary.unk() not in want:
            got = tokenizer.decode([german, *want], skip_special_tokens=True)
            assert got.strip() == pieces.decode(pieces.encode(text))
