"""python -m fairseq_tutel.checkpoint inspect | merge | reshard | average; refusals of them all."""

import json
import os
import re

import pytest
import torch
from checkpoint_helpers import Reference
from helpers.sets import member, names_in, set_names

from fairseq_tutel.checkpoint import inspect, load_for_rank
from fairseq_tutel.checkpoint.__main__ import main


@pytest.fixture
def saved(tmp_path):
    path = str(tmp_path / "m.pt")
    Reference(4).save(path, 2)
    return path


def test_inspect_table(saved, capsys):
    assert main(["inspect", saved]) == 0
    table = capsys.readouterr().out
    for words in (
        "set of 2 rank files, saved by 2 ranks",
        "MoE layers        2 (decoder.layers.1, decoder.layers.3)",
        "optimizer state   by name",
        "consistent        yes",
        "updates done      7",
        "goes on in epoch  3",
        "-rank-1.pt",
    ):
        assert words in table
    for rank in (0, 1):  # every problem is listed
        os.truncate(member(saved, f"rank-{rank}"), 1000 + rank)
    assert main(["inspect", saved]) == 1
    table = capsys.readouterr().out
    for words in (
        "consistent        NO",
        *(f"{n}.pt: is truncated at 100{n} bytes" for n in (0, 1)),
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
    members = [os.path.getsize(file) for file in tmp_path.glob("m.pt.*")]
    assert len(members) == 3 and report["size_on_disk"] == sum(members)
    assert [file["experts"] for file in report["files"]] == [0, 2, 2]
    assert len({file["save_id"] for file in report["files"]}) == 1


def test_reshard_and_merge(saved, capsys, caplog, tmp_path):
    caplog.set_level("INFO", logger="fairseq_tutel")
    out = str(tmp_path / "new" / "x.pt")
    assert main(["reshard", saved, out, "--ranks", "4"]) == 0
    report = inspect(out)
    # a run that goes on from it counts its place in the data in steps of the ranks that saved it
    assert (report["num_rank_files"], report["world_size"]) == (4, 2)
    assert capsys.readouterr().out == f"{out}\n"
    assert "[5/5] writing x-rank-3.pt" in caplog.text
    assert names_in(tmp_path / "new") == set_names("x", 4)
    Reference(4).check_loadable(out)
    assert main(["merge", out, saved]) == 2
    assert "m.pt: exists" in capsys.readouterr().err
    assert main(["merge", out, saved, "--force", "--with-optimizer"]) == 0
    Reference(4).check_loadable(saved)


def test_average(saved, capsys, tmp_path):
    """Sets of other numbers of ranks, and a merged file; half weights stay half."""
    seeds = [Reference(4, seed=seed) for seed in range(3)]
    paths = [saved, str(tmp_path / "b.pt"), str(tmp_path / "c.pt")]
    seeds[1].save(paths[1], 4)
    seeds[2].save(str(tmp_path / "d.pt"), 2)
    assert main(["merge", str(tmp_path / "d.pt"), paths[2]]) == 0
    out = str(tmp_path / "mean" / "x.pt")
    assert main(["average", *paths, out]) == 0
    assert capsys.readouterr().out.endswith(f"{out}\n")
    found = load_for_rank(out, rank=0, world_size=1)["model"]
    assert found.keys() == seeds[0].model.keys()
    for name, value in found.items():
        of_seeds = [each.model[name].double() for each in seeds]
        assert value.dtype == seeds[0].model[name].dtype
        torch.testing.assert_close(value.double(), sum(of_seeds) / 3, rtol=1e-3, atol=1e-3)


REFUSED = {  # command in a folder with m.pt of 4 experts on 2 ranks, and e.pt of 8 -> words
    "reshard m.pt x.pt --ranks 3": "4 experts cannot be spread over 3 ranks",
    "reshard m.pt m.pt --ranks 2 --force": "is the source itself",
    "merge m.pt x.bin": "expected NAME.pt",
    "merge nothing.pt x.pt": "no such checkpoint",
    "average m.pt e.pt x.pt": "m.pt: has 4 experts, and e.pt 8",
    "average m.pt m.pt": "is the source itself",
    "inspect nothing.pt": "no such checkpoint",
    "grow m.pt x.pt --num-experts 4": "has 4 experts, 4 are not more .see `shrink`",
    "grow m.pt x.pt --num-experts 5": "5 experts cannot be spread over 2 .* --ranks",
    "grow m.pt x.pt --num-experts 8 --by load --load no.jsonl": "no.jsonl: no such file",
    "grow m.pt m.pt --num-experts 8 --force": "is the source itself",
    "grow m.pt e.pt --num-experts 8": "e.pt: exists; use --force to replace it",
    "shrink m.pt x.pt --num-experts 4": "4 must be at least .*, which a token chooses",
    "shrink m.pt x.pt --dense shared": "has no shared expert .* --dense one or",
    "shrink m.pt m.pt --dense": "is the source itself",
    "shrink m.pt e.pt --dense": "e.pt: exists; use --force to replace it",
    "shrink m.pt x.pt --dense --ranks 2": "--ranks 2: a dense model",
    "upcycle m.pt x.pt --num-experts 8": "has experts; `grow` makes more of them",
}


@pytest.mark.parametrize("command", REFUSED)
def test_refusals_are_one_line_and_exit_code_2(saved, tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Reference(8).save("e.pt", 2)
    if "exists" in REFUSED[command]:  # is refused before experts are read
        for name in ("rank-0", "rank-1"):
            os.truncate(member(saved, name), 0)
    before = names_in(tmp_path)
    assert main(command.split()) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1
    assert re.search(REFUSED[command], output), output
    assert names_in(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("reshard m.pt x.pt --ranks 0", "--ranks: 0 must be at least 1"),
        ("grow m.pt x.pt", "are required: --num-experts"),
        ("shrink m.pt x.pt", "one of the arguments --num-experts --dense is required"),
    ],
)
def test_refused_options(capsys, command, words):
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert words in capsys.readouterr().err
