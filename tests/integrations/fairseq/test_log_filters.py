"""A start of fairseq's programs without warnings that no user can do anything about."""

import re
import sys
import warnings

from helpers.commands import ROOT, SMALL_LM, fairseq_command, run

from fairseq_tutel.command_line import quiet
from fairseq_tutel.integrations.fairseq.errors import log_filters

TINY = f"""{SMALL_LM}
    --task dummy_lm --dict-size 28 --dataset-size 8 --tokens-per-sample 8 --batch-size 4 --no-save
    --moe-expert-count 2 --lr 0.01 --max-update 2 --share-decoder-input-output-embed
    --log-interval 2 --log-format simple --disable-validation --use-moe-pad-mask
    --checkpoint-activations
"""


def test_other_warnings_are_shown_and_known_ones_on_request(monkeypatch):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        log_filters.install()
        for message in ("something of the user's", "'pin_memory' argument is set as true but"):
            warnings.warn(message, UserWarning, stacklevel=1)
        assert [str(warning.message) for warning in seen] == ["something of the user's"]
        monkeypatch.setenv(quiet.VARIABLE, "1")
        before = list(warnings.filters)
        log_filters.install()
        assert warnings.filters == before


def test_training_runs_without_warnings_and_in_short_lines(tmp_path):
    words = [*TINY.split(), "--save-dir", str(tmp_path)]
    text = fairseq_command("fairseq-train", words)
    assert "Warning" not in text, [line for line in text.splitlines() if "Warning" in line]
    assert "done training" in text
    said = [line.split(" | ", 3)[-1] for line in text.splitlines() if " | INFO | " in line]
    for name in ("fairseq.tasks.fairseq_task", "fairseq.trainer"):
        line = log_filters._LINES[name]
        assert not [found for found in said if re.fullmatch(line, found)]
    # what fairseq says of what is shared indeed stays
    assert any(line.startswith("detected shared parameter: ") for line in said)
    named = {}
    for kind, line in re.findall(r"\| (train|train_inner) \| (.*)", text):
        named[kind] = set(re.findall(r"(\w+)[= ][\d.]+", line))
    inner, epoch = named["train_inner"], named["train"]
    details = {name for name in epoch if re.search("balance|unused|expert2", name)}
    assert epoch - inner == details and len(details) == 7
    assert {"loss", "moe_gate_loss", "overflow_expert1", "moe_util_load", "ppl"} <= inner
    table = (ROOT / "scripts/quickstart/main.py").read_text(encoding="utf-8")
    wanted = set(re.findall(r'mean\["(\w+)"\]', table))
    assert inner >= wanted and "moe_util_load" in wanted


def test_evaluation_shows_neither_hydras_notes_nor_the_whole_config(programs):
    """7 KB, before a word is said about the text. (DEBUG lines: fairseq-interactive's.)"""
    words = """tests/golden/data_world1 --user-dir fairseq_tutel --cpu --task language_modeling
        --path tests/golden/top2_world1/final/checkpoint_last.pt --tokens-per-sample 8"""
    for program, more in (
        ("eval-lm", "--gen-subset valid --batch-size 2"),
        ("interactive", "--max-len-b 5"),
        ("validate", "--valid-subset valid --batch-size 2"),
    ):
        done = programs.run([f"fairseq-{program}", *words.split(), *more.split()], text="a b\n")
        assert done.status == 0, done.text[-3000:]
        assert "DEBUG" not in done.text
        assert not [line for line in done.text.splitlines() if len(line) > 2000]


def test_the_launcher_starts_hydra_without_warnings_in_the_directory_it_is_in(tmp_path):
    words = """-m fairseq_tutel.launch --nproc-per-node 1 -- fairseq-hydra-train
        --config-name tiny_cpu optimization.max_update=1 checkpoint.save_dir=saved"""
    assert "Warning" not in run([sys.executable, *words.split()], cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
