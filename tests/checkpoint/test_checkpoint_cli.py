"""python -m fairseq_tutel.checkpoint inspect | merge | reshard."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_helpers import Reference, names_in, set_names

from fairseq_tutel.checkpoint import inspect
from fairseq_tutel.checkpoint.__main__ import main

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def saved(tmp_path):
    path = str(tmp_path / "m.pt")
    Reference(4).save(path, 2)
    return path


def test_as_a_command(saved, tmp_path):
    """The real process, once: exit codes and streams."""
    command = [sys.executable, "-m", "fairseq_tutel.checkpoint"]
    options = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 120}
    out = str(tmp_path / "one.pt")
    done = subprocess.run([*command, "merge", saved, out], **options)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert "[1/1] writing one.pt" in done.stderr
    Reference(4).check_loadable(out, with_optimizer=False)


def test_inspect_table(saved, capsys):
    assert main(["inspect", saved]) == 0
    table = capsys.readouterr().out
    for words in (
        "set of 2 rank files, saved by 2 ranks",
        "MoE layers       2 (decoder.layers.1, decoder.layers.3)",
        "optimizer state  by name",
        "consistent       yes",
        "update, epoch    7, 3",
        "m-rank-1.pt",
    ):
        assert words in table


def test_inspect_json_is_complete(saved, capsys, tmp_path):
    assert main(["inspect", "--json", "--verify", saved]) == 0
    report = json.loads(capsys.readouterr().out)
    expert = 2 * 4 * (2 * 6 * 4 + 6 + 4)
    dense = 10 * 4 + 2 * (4 * 4 + 5 * 3)
    assert (report["params_expert"], report["params_dense"]) == (expert, dense)
    assert report["dtypes"] == {"float32": expert + dense - 30, "float16": 30}
    assert report["world_size"] == report["num_rank_files"] == 2
    assert report["size_on_disk"] == sum(os.path.getsize(tmp_path / n) for n in names_in(tmp_path))
    assert [file["experts"] for file in report["files"]] == [0, 2, 2]
    assert len({file["save_id"] for file in report["files"]}) == 1


def test_inspect_of_a_broken_set_lists_every_problem(saved, capsys, tmp_path):
    for rank in (0, 1):
        with open(tmp_path / f"m-rank-{rank}.pt", "rb+") as file:
            file.truncate(1000 + rank)
    assert main(["inspect", saved]) == 1
    table = capsys.readouterr().out
    assert "consistent       NO" in table
    for rank in (0, 1):
        assert f"m-rank-{rank}.pt: is truncated at {1000 + rank} bytes" in table


def test_verify_finds_a_flipped_bit(saved, capsys, tmp_path):
    path = tmp_path / "m-rank-1.pt"
    content = bytearray(path.read_bytes())
    value = Reference(4).stacked[1, "fc1.weight"][2].numpy().tobytes()
    content[content.find(value) + 5] ^= 4
    path.write_bytes(content)
    assert main(["inspect", saved]) == 0
    assert main(["inspect", "--verify", saved]) == 1
    assert "m-rank-1.pt: is damaged: wrong checksum" in capsys.readouterr().out


def test_reshard_and_merge(saved, capsys, tmp_path):
    out = str(tmp_path / "new" / "x.pt")
    assert main(["reshard", saved, out, "--ranks", "4"]) == 0
    report = inspect(out)
    # a run that goes on from it counts its place in the data in steps of the ranks that saved it
    assert (report["num_rank_files"], report["world_size"]) == (4, 2)
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n" and "[5/5] writing x-rank-3.pt" in captured.err
    assert names_in(tmp_path / "new") == set_names("x", 4)
    Reference(4).check_loadable(out)
    assert main(["merge", out, saved]) == 2
    assert "m.pt: exists" in capsys.readouterr().err
    assert main(["merge", out, saved, "--force", "--with-optimizer"]) == 0
    Reference(4).check_loadable(saved)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reshard", "m.pt", "x.pt", "--ranks", "3"], "4 experts cannot be placed on 3 ranks"),
        (["reshard", "m.pt", "m.pt", "--ranks", "2", "--force"], "is the source itself"),
        (["merge", "m.pt", "x.bin"], "expected NAME.pt"),
        (["merge", "nothing.pt", "x.pt"], "no such checkpoint"),
        (["inspect", "nothing.pt"], "no such checkpoint"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    saved, tmp_path, capsys, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    before = names_in(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr().err
    assert words in output and output.startswith("error: ") and output.count("\n") == 1
    assert names_in(tmp_path) == before


def test_help_explains_every_option(capsys):
    for command in ("inspect", "merge", "reshard"):
        with pytest.raises(SystemExit) as done:
            main([command, "--help"])
        assert done.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "number of ranks W" in output and output.count("its folder is made if missing") == 2
    with pytest.raises(SystemExit) as done:
        main(["reshard", "a.pt", "b.pt"])
    assert done.value.code == 2


def test_no_ranks_are_refused_with_the_options(capsys):
    with pytest.raises(SystemExit) as refusal:
        main(["reshard", "m.pt", "x.pt", "--ranks", "0"])
    assert refusal.value.code == 2
    assert "--ranks: 0 must be at least 1" in capsys.readouterr().err
