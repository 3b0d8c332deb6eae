"""Translation by the real commands: the published flags of NLLB's models, other ranks."""

import re

import pytest
from commands import forked
from helpers.commands import logged
from helpers.golden import GOLDEN
from helpers.sets import member

pytestmark = pytest.mark.long

DATA = GOLDEN / "data_translation_world1"
# NLLB-200's flags (the branch's sweep), with small sizes and a dictionary of made-up words; the
# arch has another name, and --user-dir stands before them
_NLLB = """
    --user-dir fairseq_tutel --arch transformer_moe_24_24 --task translation_multi_simple_epoch
    --langs de,en --lang-pairs de-en --sampling-method temperature --sampling-temperature 1
    --encoder-langtok src --decoder-langtok --add-data-source-prefix-tags
    --encoder-layers 4 --decoder-layers 4 --encoder-embed-dim 32 --decoder-embed-dim 32
    --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --encoder-attention-heads 4
    --decoder-attention-heads 4 --encoder-normalize-before --decoder-normalize-before
    --share-all-embeddings --max-source-positions 512 --max-target-positions 512
    --moe-expert-count 4 --moe-gating-use-fp32 --moe-second-expert-policy all --use-moe-pad-mask
    --moe-normalize-expert-grad sqrt_world_size --moe-eval-capacity-token-fraction 1.0
    --criterion moe_label_smoothed_cross_entropy --label-smoothing 0.1
    --moe-gate-loss-combine-method sum --max-tokens 600 --max-tokens-valid 1024 --update-freq 1
    --ddp-backend fully_sharded --min-params-to-wrap 100000000 --memory-efficient-fp16
    --optimizer adam --adam-eps 1e-6 --fp16-adam-stats --clip-norm 0.0 --weight-decay 0.0
    --lr-scheduler inverse_sqrt --warmup-init-lr 1e-7 --attention-dropout 0.1 --relu-dropout 0.0
    --pass-tokens-transformer-layer --init-model-on-gpu --train-with-epoch-remainder-batch
    --cpu --seed 2 --log-format json --log-interval 1 --required-batch-size-multiple 1
    --no-epoch-checkpoints --num-workers 0
"""
# the three columns: ablations, the model of 54.5B parameters, fine-tuning it
COLUMNS = {
    "ablation": "--moe-freq 2 --moe-eom 0.1 --moe-gate-loss-wt 0.01 --dropout 0.0 --lr 0.004 "
    "--warmup-updates 8000",
    "54B": "--moe-freq 4 --moe-eom 0.2 --moe-gate-loss-wt 0.01 --dropout 0.3 --lr 0.002 "
    "--warmup-updates 8000",
    "fine-tuning": "--moe-freq 4 --moe-eom 0.2 --moe-gate-loss-wt 0.0 --dropout 0.3 --lr 5e-5 "
    "--warmup-updates 10 --replication-count 2 --reset-optimizer --reset-lr-scheduler "
    "--reset-dataloader --reset-meters",
}


def words(column, save_dir, updates):
    betas = ["--adam-betas", "(0.9, 0.98)", "--max-update", str(updates)]
    given = [*_NLLB.split(), *COLUMNS[column].split(), *betas]
    return [str(DATA), *given, "--save-dir", str(save_dir)]


_LANGUAGES = """--user-dir fairseq_tutel --task translation_multi_simple_epoch --langs de,en
    --lang-pairs de-en --encoder-langtok src --decoder-langtok --cpu
    --add-data-source-prefix-tags"""


def run(programs, program, path, more, ranks=1, **how):
    """Output of a program that reads a set."""
    command = [str(DATA), *_LANGUAGES.split(), "--path", str(path), *more.split()]
    return forked(programs, ranks, program, *command, **how)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, programs):
    """(folder, log) of a run on 2 ranks with the flags of the 54.5B model."""
    folder = tmp_path_factory.mktemp("nllb")
    return folder, forked(programs, 2, "fairseq-train", *words("54B", folder, 2))


def test_published_flags_train_and_continue_on_another_number_of_ranks(trained, programs, tmp_path):
    folder, log = trained
    assert [row["num_updates"] for row in logged(log, "train_inner")] == [1, 2]
    assert log.count("--pass-tokens-transformer-layer of Meta's branches has no effect") == 1
    (valid, _) = logged(log, "valid")
    assert valid["moe_gate_loss"] > 1
    assert member(folder / "checkpoint_last.pt", "rank-1")
    more = [*words("fine-tuning", tmp_path, 2), "--restore-file", f"{folder}/checkpoint_last.pt"]
    log = forked(programs, 1, "fairseq-train", *more)
    assert [row["num_updates"] for row in logged(log, "train_inner")] == [1, 2]
    assert "no existing checkpoint" not in log.lower()


def test_ablation_flags_train(programs, tmp_path):
    log = forked(programs, 1, "fairseq-train", *words("ablation", tmp_path, 1), "--no-save")
    (row,) = logged(log, "train_inner")
    assert row["moe_gate_loss"] > 2  # a sum: of four layers, each at least 1 but for padding


def test_generates_and_validates_what_was_trained(trained, programs):
    """A model beside itself, an ensemble, says what it says alone; interactive, what generate."""
    path, log = trained[0] / "checkpoint_last.pt", trained[1]
    found = []
    for file, how in ((path, "--batch-size 1"), (path, "--batch-size 8"),
                      (f"{path}:{path}", "--batch-size 8 --scoring sacrebleu")):  # fmt: skip
        given = f"-s de -t en --gen-subset test --max-len-b 8 --beam 2 {how}"
        output = run(programs, "fairseq-generate", file, given)
        lines = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
        found.append({number: (text, float(score)) for number, score, text in lines})
    assert "BLEU = " in output
    for hypotheses in found:
        assert len(hypotheses) == 10 and hypotheses.keys() == found[0].keys()
        for number, (text, score) in hypotheses.items():
            assert found[0][number] == (text, pytest.approx(score, abs=1e-5))
    sources = dict(re.findall(r"^S-(\d+)\t(?:__de__ )?(.*)$", output, re.MULTILINE))
    numbers = sorted(sources, key=int)[:3]
    given = "-s de -t en --beam 2 --max-len-b 8"
    text = "".join(f"{sources[number]}\n" for number in numbers)
    output = run(programs, "fairseq-interactive", path, given, text=text)
    said = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.MULTILINE))
    assert [said[str(i)] for i in range(3)] == [found[0][number][0] for number in numbers]

    command = [str(DATA), *_LANGUAGES.replace("--add-data-source-prefix-tags", "").split()]
    command += ["--path", str(path), "-s", "de", "-t", "en", "--gen-subset", "test"]
    text = forked(programs, 1, "fairseq-generate", *command, expect=1)
    assert "symbols, and this one has" in text and "or --add-data-source-prefix-tags" in text
    # three batches on two ranks
    given, rows = "--valid-subset valid --batch-size 4 --log-format json", []
    for ranks in (1, 2):
        rows += logged(run(programs, "fairseq-validate", path, given, ranks), "valid")
    in_training = logged(log, "valid")[-1]
    for row in rows:
        assert row["nll_loss"] == pytest.approx(in_training["nll_loss"], abs=2e-2)  # fp16 there
        assert row["nll_loss"] == pytest.approx(rows[0]["nll_loss"], abs=1e-3)
