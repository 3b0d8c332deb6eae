"""Pictures of a run: fairseq's log lines in three formats, and the files that a run writes."""

import json
import re

import pytest
from helpers.dispatched import spied

from fairseq_tutel import picture

STAMP = "2026-01-02 03:04:05 | INFO | "
TRAIN = (
    "train_inner | epoch 002:     20 / 621 loss=9.166, moe_gate_loss=2.28883, inner_loss=9.1, "
    "ppl=548.75, moe_util_slot=88.31, moe_drop=11.69, wps=14612.6, "
    "num_updates={}, lr=6e-05, gnorm=1.2, loss_scale=nan, wall=71"
)
VALID = (
    "valid | epoch 002 | valid on 'valid' subset | loss 8.02 | inner_loss 8.0 | ppl {} | "
    "wps 9000 | num_updates {} | best_loss 8.02"
)
RESUMED = (
    "fairseq.trainer | Loaded checkpoint runs/q/checkpoints/checkpoint_last.pt "
    "(epoch 1 @ 20 updates)"
)
LOADS = [
    {"update": 10, "layers": {"3": [1, 3], "11": [1, 3]}},
    {"update": 15, "layers": {"3": [1, 3, 2], "11": [2, 2, 0]}},  # the run got an expert more
    {"update": 5, "layers": {"3": [4, 0], "11": [4, 0]}, "utilisation": {"3": {"slot": 50.0}}},
]
ABOUT = (
    "float32, model dim 4096, 512 experts, top-2, 134238208 expert parameters per layer and rank, "
    "capacity 256 to 383"
)
CHOICE = {"algorithm": "2dh", "overlap_degree": 4}
EXCHANGES = [
    {"update": 3, "what": "trial", "key": "a", "choice": CHOICE, "samples": [4000, 5000]},
    {"update": 4, "what": "decision", "key": "a", "choice": CHOICE, "us": 4500},
    {"update": 9, "what": "trial", "key": "b", "choice": {**CHOICE, "r": 2}, "samples": [9],
     "about": ABOUT},
]  # fmt: skip


# a trace of an encoder-decoder with one sparse layer in each stack
HEAD = {"modes": ["train", "valid"], "ranks": 2, "resumed": False, "update": 0,
        "experts": {"encoder.1": 3, "decoder.1": 4},
        "symbols": {"encoder": ["a", "b"], "decoder": ["x", "y", "z"]}}  # fmt: skip


def a_pass(update, mode="train", repeated=1):
    """Three tokens of the encoder and two of the decoder; -3 is a rejected choice."""
    return {
        "update": update, "mode": mode, "lengths": {"encoder": [3], "decoder": [2]},
        "tokens": {"encoder": [0, 1, 0] * repeated, "decoder": [2, 1] * repeated},
        "choices": {"encoder.1": [[0, 1], [2, -3], [0, 2]] * repeated,
                    "decoder.1": [[3, 0], [3, 1]] * repeated},
    }  # fmt: skip


def write(file, lines, tail=""):
    file.write_text("".join(f"{line}\n" for line in lines) + tail, "utf-8")
    return file


def curves_of(file, lines):
    """Losses by update in training and validation, what was read, and updates of restarts."""
    curves = picture.read_log(write(file, lines))
    losses = ({u: row["loss"] for u, row in each.items()} for each in (curves.train, curves.valid))
    return *losses, curves


def test_curves_take_the_loss_without_the_gate_loss_and_the_last_of_repeated_updates(tmp_path):
    lines = [
        TRAIN.format(10).replace("inner_loss=9.1", "inner_loss=9.9"), TRAIN.format(10),
        VALID.format(512, 10), "train | epoch 001 | loss 7 | num_updates 10",
        "fairseq_cli.train | end of epoch 1 | ppl 3 | num_updates 11", RESUMED,
        VALID.format(256, 10), "[rank 1] warning | loss=1, num_updates=12",
    ]  # fmt: skip
    train, valid, curves = curves_of(tmp_path / "train.log", [STAMP + line for line in lines])
    assert (train, valid, curves.resumed) == ({10: 9.1}, {10: 8.0}, [20])
    assert curves.train[10]["wps"] == 14612.6 and curves.train[10]["moe_drop"] == 11.69
    assert curves.valid[10]["ppl"] == 256.0


def test_the_file_of_fairseqs_own_log(tmp_path):
    """--log-file has the messages alone, and no word of a checkpoint that is loaded."""
    start = "num. shared model params: 1,000 (num. trained: 1,000)"
    lines = [line.partition(" | ")[2] for line in (TRAIN.format(5), VALID.format(256, 5))]
    more = json.dumps({"epoch": 2, "update": 1.5, "loss": "7.0", "num_updates": "9"})
    values = {"epoch": 2, "valid_loss": "6", "valid_ppl": "64", "valid_num_updates": "9"}
    valid = f"[2026-01-02 03:04:05,678][valid][INFO] - {json.dumps(values)}"  # Hydra's
    train, valid, curves = curves_of(tmp_path / "log", [start, *lines, start, more, valid])
    assert (train, valid, curves.resumed) == ({5: 9.1, 9: 7.0}, {5: 8.0, 9: 6.0}, [5])


def test_pictures_of_all_that_a_run_left(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = spied(monkeypatch, picture, "_figure")
    log = [STAMP + TRAIN.format(5), STAMP + TRAIN.format(10), STAMP + VALID.format(256, 10)]
    write(tmp_path / "train.log", log)
    write(tmp_path / "expert_load.jsonl", map(json.dumps, LOADS))
    write(tmp_path / "exchange.jsonl", map(json.dumps, EXCHANGES), '{"update": 1')  # cut short
    write(tmp_path / "trace-rank-0.jsonl", map(json.dumps, [HEAD, a_pass(2, "valid")]))
    assert picture.main([str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and len(shown.out.splitlines()) == 4
    for name in ("loss.png", "experts.png", "exchange.png", "trace-valid.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    *_, experts, exchange = (figure for *_, (figure, _) in figures)
    of_layer = experts.axes[0].collections[0].get_array().reshape(3, 3)
    shares = [[2, 0.5, 0.5], [0, 1.5, 1.5], [float("nan"), float("nan"), 1]]  # by expert
    for row, want in zip(of_layer.filled(float("nan")).tolist(), shares, strict=True):
        assert row == pytest.approx(want, nan_ok=True)
    key, words = (axes.get_title() for axes in exchange.axes)
    assert (key, words.split()) == ("a", ABOUT.split())
    assert max(map(len, words.splitlines())) <= 60  # beside the legend
    assert picture.choice_name(EXCHANGES[-1]["choice"]) == "2dh d=4 r=2"


def test_a_choice_is_drawn_until_the_next_one(tmp_path, monkeypatch):
    """The newest one for an update."""
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(
        Axes, "hlines", lambda _, y, *span_and_color: drawn.append((y, *span_and_color[:2]))
    )
    decisions = [{**EXCHANGES[1], "update": n, "us": us} for n, us in ((4, 4500), (7, 3000))]
    picture.draw_exchange(decisions, tmp_path / "exchange.png")
    assert drawn == [(4.5, 4, 7), (3.0, 7, 8)]


def test_what_is_missing_is_named(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    assert picture.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "no loss.png", "no experts.png", "no exchange.png", "no trace-*.png",
    ]  # fmt: skip
    (tmp_path / "train.log").touch()
    write(tmp_path / "expert_load.jsonl", map(json.dumps, LOADS))
    assert picture.main([str(tmp_path)]) == 0  # what a run did not write is no news
    assert capsys.readouterr().err.startswith("no loss.png: ")
    (tmp_path / "train.log").unlink()
    assert picture.main([str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"{lines[0]}\n"  # each run has a log, elsewhere
    assert "--log FILE" in lines[0] and "--moe-load-log-interval" in lines[1]
    for words in ([str(tmp_path / "none")], [str(tmp_path), "--log", "none"]):
        with pytest.raises(SystemExit, match="2"):
            picture.main(words)
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="1"):
        picture.main([str(tmp_path)])
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 3 and error[-1].endswith("pip install matplotlib")


def test_a_trace_has_the_newest_passes_of_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(picture.trace, "_TRACED_TOKENS", 9)
    again = {**HEAD, "resumed": True}
    lines = [HEAD, a_pass(1), HEAD, a_pass(1), a_pass(2), again, a_pass(3)]  # 10 tokens are kept
    write(tmp_path / "trace-rank-0.jsonl", map(json.dumps, lines))
    write(tmp_path / "trace-rank-1.jsonl", map(json.dumps, [HEAD, a_pass(1)]))
    # of a run on more ranks
    write(tmp_path / "trace-rank-2.jsonl", map(json.dumps, [HEAD, a_pass(1, repeated=100)]))
    (mode,) = traces = picture.read_traces(tmp_path)
    trace, passes = traces[mode], 3
    assert mode == "train"
    encoder = {(0, 0): 2, (0, 1): 1, (1, 2): 1, (0, 2): 1}
    assert trace.pairs["encoder.1"] == {pair: passes * n for pair, n in encoder.items()}
    assert trace.shares("encoder.1") == [0.4, 0.2, 0.4]
    assert trace.shares("encoder.1", 0) == [0.5, 0.25, 0.25]
    assert trace.shares("decoder.1") == [0.25, 0.25, 0, 0.5]
    assert trace.frequent("encoder.1", 5) == [0, 1] and len(trace.frequent("decoder.1", 1)) == 1


def a_log(file, bits, seconds, of_experts=""):
    """Write a run of 20 updates of 512 tokens, and return its folder: two validations."""
    lines = []
    for update, loss in zip((10, 20), bits, strict=True):
        lines.append(
            f"train_inner | epoch 001: {update} / 90 loss=9, wpb=512, {of_experts}"
            f"num_updates={update}, train_wall={seconds}, wall={10 * update}"
        )
        lines.append(
            f"valid | epoch 001 | valid on 'valid' subset | loss {loss} | num_updates {update}"
        )
    file.parent.mkdir()
    write(file, lines)
    return str(file.parent)


def test_runs_are_compared_by_updates_and_by_seconds(tmp_path, capsys, monkeypatch):
    """Two seeds of dense, which take 4 s per 10 updates, against experts, which take 8 s."""
    pytest.importorskip("matplotlib")
    figures = spied(monkeypatch, picture, "draw_comparison")
    dense = [a_log(tmp_path / f"dense-s{n}" / "a.log", (8, 7 + n / 10), 4) for n in (1, 2)]
    experts = a_log(tmp_path / "x" / "a.log", (6, 5), 8, "moe_drop=12.5, ")
    assert picture.main([*dense, f"experts={experts}", "--out", str(tmp_path / "out")]) == 0
    *rows, path = capsys.readouterr().out.splitlines()
    cells = {line[:24].strip(): re.split(r"  +", line[24:].strip()) for line in rows[:10]}
    assert cells["runs"] == ["2", "1"] and cells["updates"] == ["20", "20"]
    assert cells["held-out bits"] == ["7.150 (7.100 to 7.200)", "5.000"]
    assert cells["gap at equal updates"] == ["-", "-2.150 (-2.200 to -2.100)"]
    # at 8 s the experts have made 10 updates: 6 bits
    assert cells["gap at equal seconds"] == ["-", "-1.150 (-1.200 to -1.100)"]
    assert cells["tokens/s"] == ["1,280", "640"] and cells["choices dropped %"] == ["-", "12.5"]
    assert [line.split(": ")[1] for line in rows[-3:]] == ["no operations"] * 3
    assert path.endswith("comparison.png") and (tmp_path / "out/comparison.png").stat().st_size
    assert picture.compare.known_axes(figures[0][0][0]) == ["updates", "tokens", "seconds"]
    # measured apart: 0.1 s and 0.2 s per update, so after 2 s the experts have made 10 updates
    speeds = tmp_path / "speeds.json"
    speeds.write_text('{"seconds_per_update": {"dense": 0.1, "experts": 0.2}}')
    apart = ["--seconds-per-update", str(speeds), "--out", str(tmp_path)]
    assert picture.main([*dense, f"experts={experts}", *apart]) == 0
    said = re.sub(" +", " ", capsys.readouterr().out)
    assert "gap at equal seconds - -1.150 (-1.200 to -1.100)" in said
    assert "tokens/s 5,120 2,560" in said
    for words, said in (
        ([*dense, "--log", "a"], "--log names the log of one run"),
        ([dense[0], f"x={experts}", *apart], "has no seconds of x, only of dense, experts"),
        ([dense[0], *apart], "is for a comparison of several runs"),
        ([dense[0], str(tmp_path / "none")], "there is no log"),
        ([dense[0], str(write(tmp_path / "b.log", ["nothing"]))], "no lines of training"),
    ):
        with pytest.raises(SystemExit, match="2"):
            picture.main(words)
        assert said in capsys.readouterr().err
