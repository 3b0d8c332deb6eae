"""What fairseq's programs say with the plugin: no warnings that users can do nothing about, the
metrics of the page, and what the plugin replaces in them."""

import json
import re
import sys
import warnings

import pytest
from helpers.commands import ROOT, SMALL_LM, fairseq_command, logged, run

from fairseq_tutel.command_line import quiet
from fairseq_tutel.integrations.fairseq.errors import log_filters
from fairseq_tutel.integrations.fairseq.hooks import TABLE

FOLDER = ROOT / "fairseq_tutel/integrations/fairseq"
TINY = f"""{SMALL_LM}
    --task dummy_lm --dict-size 28 --tokens-per-sample 8 --batch-size 4 --no-save --lr 0.01
    --max-update 2 --disable-validation
"""
SHORT = f"""{TINY}
    --dataset-size 8 --moe-expert-count 2 --share-decoder-input-output-embed --log-interval 2
    --log-format simple --use-moe-pad-mask --checkpoint-activations
"""
ALL = f"""{TINY}
    --dataset-size 16 --moe-expert-count 4 --moe-null-experts 2 --moe-wire bf16
    --record-a2a-perf-stats --moe-second-expert-policy all
"""
FAIRSEQS = {
    "epoch", "wps", "ups", "wpb", "bsz", "num_updates", "lr", "gnorm", "clip", "train_wall", "wall",
    "gb_free",
}  # fmt: skip
# of a tuner, of a loss per sentence, of a GPU's clock, of an encoder-decoder, of ranks that help
NOT_IN_THIS_RUN = {
    "moe_exchange_ms", "nll_loss", "all_to_all_cuda_time_ms", "cmr_gate_loss",
    "moe_util_rank_helped", "moe_rows_helped", "moe_mb_moved",
}  # fmt: skip


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
    words = [*SHORT.split(), "--save-dir", str(tmp_path)]
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


@pytest.mark.long
def test_the_launcher_starts_hydra_without_warnings_in_the_directory_it_is_in(tmp_path):
    words = """-m fairseq_tutel.launch --nproc-per-node 1 -- fairseq-hydra-train
        --config-name tiny_cpu optimization.max_update=1 checkpoint.save_dir=saved"""
    assert "Warning" not in run([sys.executable, *words.split()], cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_page_names_every_metric_and_no_other_and_all_experts_are_counted(programs):
    page = (FOLDER / "WATCHING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`(?: \*)? \|(.*)\|(.*)\|$", page, re.MULTILINE)
    names = [name for name, *_ in rows]
    assert len(set(names)) == len(names) > 20 and all(all(map(str.strip, row)) for row in rows)
    marked = set(re.findall(r"^\| `(\w+)` \*", page, re.MULTILINE))
    assert marked == {name for name in names if log_filters._DETAILS.fullmatch(f", {name}=1")}
    counts = []
    for ranks in (1, 2):
        done = programs.run(["fairseq-train", *ALL.split()], ranks=ranks)
        assert done.status == 0, done.text[-3000:]
        counts += re.findall(r"parameters of all ranks: (.*) active per token: (.*)", done.stdout)
    (run,) = logged(done.text, "train")
    assert set(run) - FAIRSEQS == set(names) - NOT_IN_THIS_RUN
    # one layer of 4 experts: one has 2 * 16 * 32 weights and 48 biases
    assert counts[0] == counts[1] and "experts 4,288)" in counts[0][0]
    assert "(2 of 4 experts)" in counts[0][1]


# every attribute of every module of fairseq's, and of their classes, before and after
PROGRAM = """
import argparse, inspect, json, os, sys
sys.argv = ["fairseq-train"]
import fairseq_cli.train, fairseq_cli.eval_lm, fairseq_cli.validate, fairseq_cli.generate
import fairseq.optim.fused_adam, fairseq.hub_utils, fairseq.trainer

def attributes():
    found = {"sys.excepthook": sys.excepthook}
    for name in ("error", "format_help"):
        found[f"argparse.ArgumentParser.{name}"] = getattr(argparse.ArgumentParser, name)
    found["fairseq.trainer.Trainer.__new__"] = fairseq.trainer.Trainer.__new__  # inherited before
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("fairseq", "fairseq_cli") or module.__name__ != name:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                for member, code in list(vars(value).items()):
                    found[f"{name}.{key}.{member}"] = code
    return found

before = attributes()
import fairseq_tutel
fairseq_tutel.register()
after = attributes()
changed = [k for k in before if k in after and after[k] is not before[k]]
print(json.dumps(changed), flush=True)
os._exit(0)
"""


def test_the_table_names_all_that_is_replaced(programs):
    done = programs.run(["fairseq-train"], prelude=PROGRAM)  # in its place
    changed = json.loads(done.stdout.splitlines()[-1])
    assert sorted(changed) == sorted(TABLE), changed
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"{len(TABLE)} attributes" in " ".join(page.split())
