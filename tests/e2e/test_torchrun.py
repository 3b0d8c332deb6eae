"""torchrun on a CPU without the launcher: its processes are one job, never two models."""

import re

import pytest
from commands import BIN, train_words
from helpers.commands import free_port, run
from helpers.sets import names_in, set_names

pytestmark = pytest.mark.long


def test_torchrun_makes_one_job_of_its_processes(data_bin, tmp_path):
    def torchrun(program, words):
        launcher = f"{BIN}/torchrun --nproc-per-node 2 --master-addr 127.0.0.1 --master-port"
        return run([*launcher.split(), str(free_port()), str(BIN / program), *words])

    words = "--tokens-per-sample 32 --batch-size 3 --max-update 2 --disable-validation"
    output = torchrun("fairseq-train", train_words(data_bin, tmp_path, *words.split()))
    # one log line per update, of both ranks' batches; one set, with the experts of both
    assert re.findall(r'"bsz": "([\d.]+)"', output) == ["6", "6"]
    assert {name for name in names_in(tmp_path) if ".pt" in name} == set_names("checkpoint_last", 2)

    common = f"""{data_bin} --user-dir fairseq_tutel --path {tmp_path}/checkpoint_last.pt --cpu
        --gen-subset test --tokens-per-sample 16"""
    output = torchrun("fairseq-eval-lm", f"{common} --batch-size 4".split())
    text = (data_bin.parent / "test.txt").read_text()
    tokens = len(text.split()) + text.count("\n")  # and an end of sentence each
    assert re.findall(r"All 2 ranks together evaluated ([\d,]+)", output) == [f"{tokens:,}"]
    assert output.count("Perplexity") == 1

    words = f"{common} --beam 1 --task language_modeling --prefix-size 1 --max-len-b 4"
    output = torchrun("fairseq-generate", words.split())
    found = sorted(map(int, re.findall(r"^H-(\d+)\t", output, re.MULTILINE)))
    assert found == list(range(-(-tokens // 16)))
    assert len(re.findall("^Generate test with beam=1: BLEU4", output, re.MULTILINE)) == 1
    assert f"Translated {len(found)} sentences" in output
