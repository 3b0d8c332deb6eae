"""Exported models in transformers: fairseq's logits, hypotheses and tokenization."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from exported_models import (
    CASES,
    VOCABULARY,
    Saved,
    generate,
    interactive,
    logits_of,
    make,
    sentences,
    write_dictionary,
)
from helpers.assertions import assert_same_state
from helpers.commands import ROOT
from helpers.golden import GOLDEN

from fairseq_tutel.export import TokenizerFiles, export_huggingface

pytestmark = pytest.mark.extras


def load(folder, **options):
    how = {"trust_remote_code": True, "dtype": "auto", **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def load_tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
def logits_there(model, tokens, **options):
    return model(tokens, **options).logits


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_logits_are_those_of_fairseq_by_every_implementation(options, tmp_path):
    saved, tokens = make(tmp_path, options), sentences()
    export_huggingface(saved.path, tmp_path / "m", TokenizerFiles(saved.data), max_bytes=5000)
    model, want = load(tmp_path / "m"), logits_of(saved.model, tokens)
    assert want.std() > 0.1
    for experts in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(experts)
        for attention in ("eager", "sdpa"):
            model.set_attn_implementation(attention)
            got = logits_there(model, tokens)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ["", "--moe-expert-network swiglu"])
def test_sizes_that_grouped_products_refuse_work_by_default(options, tmp_path):
    saved = make(tmp_path, f"--moe-expert-ffn-dim 7 {options}")
    export_huggingface(saved.path, tmp_path / "m", TokenizerFiles(saved.data))
    want = logits_of(saved.model, sentences())
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        got = logits_there(load(tmp_path / "m", dtype=dtype), sentences())
        torch.testing.assert_close(got.float(), want, rtol=close, atol=close)


def test_half_weights_stay_half(tmp_path):
    saved = make(tmp_path, "--moe-load-bias sign")
    for file in tmp_path.glob("*-*.pt"):
        state = torch.load(file, weights_only=False)
        for key, value in state["model"].items():
            state["model"][key] = value if "load_bias" in key else value.bfloat16()
        torch.save(state, file)
    export_huggingface(saved.path, tmp_path / "m", TokenizerFiles(saved.data))
    model = load(tmp_path / "m")
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    assert dtypes.pop("model.layers.1.moe.router.load_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    got, want = logits_there(model, sentences()), logits_of(saved.model, sentences())
    torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.1)


def test_files_of_metas_own_code_are_exported(tmp_path):
    """A set without metadata of this package, whose options name a dense architecture."""
    from fairseq import checkpoint_utils

    path = GOLDEN / "top2_world2" / "final" / "checkpoint_last.pt"
    data = GOLDEN / "data_world2"
    export_huggingface(path, tmp_path / "m", TokenizerFiles(data))
    overrides = {"data": str(data), "moe_eval_capacity_token_fraction": None}
    (reference,), *_ = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides)
    tokens = torch.randint(4, 256, (3, 40), generator=torch.Generator().manual_seed(1))
    want = logits_of(reference.eval(), tokens)
    got = logits_there(load(tmp_path / "m"), tokens)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


PROMPTS = ["", "w5", "w3 w4 w1 w22 w0", "w9 w8 w7"]


class Exported(NamedTuple):
    saved: Saved
    folder: Path
    model: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    options = "--share-decoder-input-output-embed"
    saved = make(tmp_path_factory.mktemp("model"), options, scale=6.0, positions=40)
    folder = export_huggingface(saved.path, saved.data / "m", TokenizerFiles(saved.data))
    return Exported(saved, folder, load(folder), load_tokenizer(folder))


def continued(ours, prompt, length, **options):
    """Texts, what ``generate`` returns, and the logarithm of the probability of the prompt."""
    tokens, texts = ours.tokenizer(prompt, return_tensors="pt")["input_ids"], []
    found = generate(ours.model, {"input_ids": tokens}, length, **options)
    for numbers in found.sequences.tolist():
        numbers = numbers[1 : numbers.index(2, 1)]  # up to </s>; fairseq does not print <s>
        texts.append(" ".join(ours.tokenizer.convert_ids_to_tokens([n for n in numbers if n])))
    logits = logits_there(ours.model, tokens)[0, :-1].log_softmax(-1)
    return texts, found, logits.gather(-1, tokens[0, 1:, None]).sum().item()


@pytest.mark.parametrize("normalized", [False, True])
def test_beam_search_is_that_of_fairseq(normalized, ours, programs):
    """All hypotheses in order, and their scores, which fairseq divides by another length if it
    has a prompt."""
    words = ("--task", "language_modeling", "--beam", "4", "--nbest", "4", "--max-len-b", "14")
    words += () if normalized else ("--unnormalized",)
    prompts = [""] if normalized else PROMPTS
    want = interactive(programs, ours.saved, prompts, *words)
    for prompt, hypotheses in zip(prompts, want, strict=True):
        texts, found, given = continued(
            ours, prompt, 14, num_beams=4, num_return_sequences=4, early_stopping=True,
            length_penalty=float(normalized),
        )  # fmt: skip
        # fairseq's scores have those of the prompt's words in them
        assert texts == [text for _, text in hypotheses] and len(set(texts)) == 4
        scores = [score for score, _ in hypotheses]
        assert (found.sequences_scores + given).tolist() == pytest.approx(scores, abs=2e-4)


def test_left_padding_and_caches_change_nothing(ours):
    batch = ours.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert batch["input_ids"][0, 0] == ours.tokenizer.pad_token_id
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True}
    want = ours.model.generate(**batch, use_cache=False, **options)
    for cache in ("dynamic", "static"):
        got = ours.model.generate(**batch, cache_implementation=cache, **options)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
    mask = batch["attention_mask"]
    together = logits_there(ours.model, batch["input_ids"], attention_mask=mask)
    for row, prompt in enumerate(PROMPTS):
        one = ours.tokenizer(prompt, return_tensors="pt")
        alone = logits_there(ours.model, one["input_ids"])[0]
        torch.testing.assert_close(together[row, -len(alone) :], alone, rtol=1e-5, atol=1e-5)
        got = ours.model.generate(**one, **options).sequences[0, one["input_ids"].shape[1] :]
        assert torch.equal(got, want.sequences[row, mask.shape[1] :][: len(got)])


def test_the_program_of_the_model_card_runs(ours, monkeypatch, capsys):
    monkeypatch.chdir(ours.folder.parent)
    exec((ours.folder / "README.md").read_text().split("```")[1].removeprefix("python\n"), {})
    assert capsys.readouterr().out.startswith("['")


def test_it_is_saved_and_loaded_again(ours, tmp_path):
    ours.model.save_pretrained(tmp_path)
    ours.tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_state(again.state_dict(), ours.model.state_dict())
    torch.testing.assert_close(
        logits_there(again, sentences()), logits_there(ours.model, sentences())
    )
    text = " ".join(ours.tokenizer.convert_ids_to_tokens(range(4, 9)))
    want = {"input_ids": [2, 4, 5, 6, 7, 8], "attention_mask": [1] * 6}
    assert load_tokenizer(tmp_path)(text) == ours.tokenizer(text) == want


def without_sentencepiece(monkeypatch):
    """Make this process one in which sentencepiece is not installed."""

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "sentencepiece":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in list(sys.modules):  # also what was loaded of folders
        if name.partition(".")[0] in ("sentencepiece", "transformers_modules"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocked(), *sys.meta_path])


TEXTS = ["a cat sat on the mat.", "  two  words ", "naïve – 你好!", "zzz qqq"]


def assert_tokens(folder, tokenizer, cut, joined):
    """Those of fairseq's dictionary and of ``cut``, and text again by ``joined``."""
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(folder / "dict.txt"))
    unknown = 0
    for text in TEXTS:
        symbols = cut(text.strip())
        want = dictionary.encode_line(symbols, add_if_not_exist=False).tolist()
        got = tokenizer(text.strip())["input_ids"]
        assert got == [2, *want[:-1]], text
        unknown += 3 in want
        if 3 not in want:
            assert tokenizer.decode(got, skip_special_tokens=True) == joined(symbols)
    assert 0 < unknown < len(TEXTS)


def test_sentencepieces_are_those_of_fairseq(tmp_path, monkeypatch):
    import sentencepiece
    from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

    (tmp_path / "text").write_text("a cat sat on the mat. two words\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "spm"), model_type="bpe",
        vocab_size=VOCABULARY - 1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    config = SentencepieceConfig(sentencepiece_model=str(tmp_path / "spm.model"))
    reference = SentencepieceBPE(config)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    symbols = [pieces.id_to_piece(number) for number in range(3, pieces.get_piece_size())]
    symbols += [f"madeupword{number:04}" for number in range(VOCABULARY - 4 - len(symbols))]
    path = make(tmp_path, positions=40).path
    write_dictionary(tmp_path, symbols)
    files = TokenizerFiles(tmp_path, sentencepiece_model=tmp_path / "spm.model")
    export_huggingface(path, tmp_path / "m", files)
    load_tokenizer(tmp_path / "m").save_pretrained(tmp_path / "again")
    for name in ("m", "again"):
        tokenizer = load_tokenizer(tmp_path / name)
        assert_tokens(tmp_path, tokenizer, reference.encode, reference.decode)
    pair = tokenizer("a cat", "on the mat</s>")["input_ids"]
    assert pair == [*tokenizer("a cat")["input_ids"], *tokenizer("on the mat")["input_ids"][1:], 2]
    without_sentencepiece(monkeypatch)
    with pytest.raises(ImportError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path / "m")


def test_the_quickstart_compares_what_it_exported(ours, tmp_path, monkeypatch):
    """And notices a weight that differs."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "quickstart")
    (tmp_path / "texts").write_text("\nw3 w4 w1\nw9\n")
    worse = shutil.copytree(ours.folder, tmp_path / "worse")
    with (worse / "model.safetensors").open("r+b") as file:
        file.seek(-200, 2)
        file.write(bytes([60]) * 40)
    for folder, status in ((ours.folder, 0), (worse, 1)):
        words = [ours.saved.path, folder, tmp_path / "texts", "--data", ours.saved.data]
        assert import_module("compare_export").main(list(map(str, words))) == status


def test_byte_pairs_are_those_of_fairseq(tmp_path, monkeypatch):
    from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder

    merges = ["a t", "c at", "Ġ s", "Ġs at", "Ġ t", "h e", "Ġt he", "o n", "Ġ on", "Ġ m", "Ġm at"]
    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges)]
    encoder = {token: number for number, token in enumerate(tokens)}
    (tmp_path / "encoder.json").write_text(json.dumps(encoder))
    text = "".join(f"{line}\n" for line in ("#version: 0.2", *merges))
    (tmp_path / "vocab.bpe").write_text(text, encoding="utf-8")
    names = ("encoder.json", "vocab.bpe")
    reference = get_encoder(*(str(tmp_path / name) for name in names))

    def cut(text):
        return " ".join(map(str, reference.encode(text)))

    symbols = list(dict.fromkeys(" ".join(map(cut, TEXTS[:2])).split()))
    symbols += [f"madeupword{number:04}" for number in range(VOCABULARY - 4 - len(symbols))]
    path = make(tmp_path).path
    write_dictionary(tmp_path, symbols)
    files = TokenizerFiles(tmp_path, None, *(tmp_path / name for name in names))
    export_huggingface(path, tmp_path / "m", files)
    without_sentencepiece(monkeypatch)
    tokenizer = load_tokenizer(tmp_path / "m")
    assert_tokens(tmp_path, tokenizer, cut, lambda text: reference.decode(map(int, text.split())))


def test_words_are_those_of_fairseq(ours, monkeypatch):
    """Every kind of white space separates them; sentencepiece is not needed."""
    from fairseq.data import Dictionary

    without_sentencepiece(monkeypatch)
    tokenizer = load_tokenizer(ours.folder)
    dictionary = Dictionary.load(str(ours.saved.data / "dict.txt"))
    assert tokenizer.convert_ids_to_tokens(range(len(dictionary))) == dictionary.symbols
    spaces = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
    assert len(spaces) > 20
    for text in (
        " ".join(dictionary.symbols[4:30:3]),
        "w3 nothing w5\tw6",
        "".join(f"w1{space}w7" for space in spaces),
        "w1\u200bw2 w3\x00 \ufeffw4 w5",
    ):
        want = dictionary.encode_line(text, add_if_not_exist=False).tolist()
        assert tokenizer(text)["input_ids"] == [2, *want[:-1]]
        assert tokenizer.encode(text, add_special_tokens=False) == want[:-1]
    assert tokenizer.decode([2, 6, 5]) == f"</s> {dictionary[6]} {dictionary[5]}"
