"""Plans of encoder-decoders: NLLB-200's numbers; their layers: test_plan_counts.py."""

import pytest
from plan_helpers import A100, pairs

from fairseq_tutel.plan.cli import main
from fairseq_tutel.plan.compose import load_command
from fairseq_tutel.plan.planner import make_plan
from fairseq_tutel.plan.settings import read_settings

# of NLLB-200's published command (arXiv 2207.04672; branch nllb, sweep_mmt.py)
NLLB = """fairseq-train data-bin --user-dir fairseq_tutel --arch transformer_moe_nllb_54b
    --task translation_multi_simple_epoch --langs de,en --lang-pairs de-en --encoder-langtok src
    --decoder-langtok --criterion moe_label_smoothed_cross_entropy --optimizer adam --fp16
    --memory-efficient-fp16 --fp16-adam-stats --max-tokens 4096 --moe-eom 0.2 --use-moe-pad-mask
    --checkpoint-activations --ddp-backend fully_sharded"""


@pytest.mark.parametrize("gpus", [8, 256])
def test_nllb_200_as_published(gpus, capsys):
    if gpus == 8:
        assert main(["gpus=8", "vocabulary=256206", "--", *NLLB.split()]) == 0
        out = capsys.readouterr().out
        assert "54,500,569,088 (5.45e+10)" in out and "12 layers x 128 x 33,564,672" in out
        assert "24 encoder layers of 2048 + 24 decoder layers of 2048" in out
    plan = make_plan(
        read_settings(load_command(NLLB.split())[1], "nllb", gpus=gpus, vocabulary=256206), A100
    )
    assert plan.fits and plan.parameters.total == pytest.approx(54.5e9, rel=1e-3)
    assert plan.parameters.local_experts == max(1, 128 // gpus)
    held = plan.parameters.dense + 12 * plan.parameters.local_experts * 33_564_672
    assert plan.parameters.per_gpu == held and plan.memory.weights == 2 * held
    # 8 sentences of 512 tokens: top-2 of 128 experts, 4096 rows of 2048 halves and a capacity of 64
    assert (plan.work.capacity, plan.work.exchange_bytes) == (64, 2 * 4096 * 2048 * 2)
    assert plan.work.replicas == max(1, gpus // 128)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpus=8", "--", *NLLB.split()],
         "size of a translation's dictionary is unknown: give vocabulary=N"),
        (["gpus=8", "vocabulary=9", "sentence=999", "--", *NLLB.split()],
         "sentence=999: the run takes sentences of at most 512"),
        (["gpus=8", "sentence=9", "--config-name", "meta_1.1t"], "sentence=N is for encoder-deco"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_in_a_line(capsys, words, message):
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_a_sentence_counts_in_attention_alone():
    long, short = (make_plan(pairs(sentence=n), A100).work.model_flops for n in (32, 16))
    # of 4 encoder layers, and of 4 decoder layers twice
    assert long - short == 3 * 12 * 4 * 16 * 64


def test_a_data_bin_tells_its_dictionarys_size(tmp_path):
    for side in ("de", "en"):
        (tmp_path / f"dict.{side}.txt").write_text("a 1\nb 1\n", encoding="utf-8")
    words = ["--task", "translation", str(tmp_path), "-s", "de", "-t", "en"]
    name, config = load_command(
        ["fairseq-train", *words, "--arch", "transformer_moe", "--moe-expert-count", "4",
         "--optimizer", "adam", "--max-tokens", "600"]
    )  # fmt: skip
    settings = read_settings(config, name)
    assert (settings.vocabulary, settings.tokens_per_sample, settings.batch_size) == (6, 600, 1)
