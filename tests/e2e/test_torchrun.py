"""torchrun on a CPU without the launcher: one job, or one clear refusal; never two models."""

import re

import pytest
from commands import BIN, forked, train_words
from helpers.commands import free_port, run
from helpers.sets import names_in, set_names

pytestmark = pytest.mark.long


def test_torchrun_makes_one_job_of_its_processes(data_bin, programs, tmp_path, port):
    common = ("--tokens-per-sample", "32")
    command = train_words(data_bin, tmp_path, *common, "--batch-size", "3", "--max-update", "2")
    torchrun = f"{BIN}/torchrun --nproc-per-node 2 --master-addr 127.0.0.1 --master-port".split()
    train = [str(BIN / "fairseq-train"), *command, "--disable-validation"]
    output = run([*torchrun, str(port), *train])
    # one log line per update, of both ranks' batches; one set, with the experts of both
    assert re.findall(r'"bsz": "([\d.]+)"', output) == ["6", "6"]
    assert {name for name in names_in(tmp_path) if ".pt" in name} == set_names("checkpoint_last", 2)

    path = tmp_path / "checkpoint_last.pt"
    subset = ("--path", str(path), "--gen-subset", "test", "--batch-size", "4", *common)
    words = (str(data_bin), "--user-dir", "fairseq_tutel", *subset)
    # two processes with what torchrun gives to its own, forked
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    env |= {"TORCHELASTIC_RUN_ID": "none"}
    output = forked(programs, 2, "fairseq-eval-lm", *words, launched=False, **env)
    text = (data_bin.parent / "test.txt").read_text()
    tokens = len(text.split()) + text.count("\n")  # and an end of sentence each
    assert re.findall(r"All 2 ranks together evaluated ([\d,]+)", output) == [f"{tokens:,}"]
    assert output.count("Perplexity") == 1

    decode = f"""{data_bin} --user-dir fairseq_tutel --path {path} --cpu --gen-subset test --beam 1
        --task language_modeling --tokens-per-sample 16 --prefix-size 1 --max-len-b 4"""
    script = str(BIN / "fairseq-generate")
    output = run([*torchrun, str(free_port()), script, *decode.split()])
    found = sorted(map(int, re.findall(r"^H-(\d+)\t", output, re.MULTILINE)))
    assert found == list(range(-(-tokens // 16)))
    assert len(re.findall("^Generate test with beam=1: BLEU4", output, re.MULTILINE)) == 1
    assert f"Translated {len(found)} sentences" in output
