"""Reading fairseq's log lines and the expert loads; the pictures that are drawn from them."""

import json

import metrics
import pytest

STAMP = "2026-01-02 03:04:05 | INFO | "
TRAIN = (
    "train_inner | epoch 002:     20 / 621 loss=9.166, moe_gate_loss=2.28883, inner_loss=9.1, "
    "ppl=548.75, moe_util_slot=88.31, moe_drop=11.69, wps=14612.6, "
    "num_updates={}, lr=6e-05, gnorm=1.2, loss_scale=nan, wall=71"
)
VALID = (
    "valid | epoch 002 | valid on 'valid' subset | loss 8.02 | inner_loss 8.0 | ppl 256 | "
    "wps 9000 | num_updates {} | best_loss 8.02"
)
RESUMED = (
    "fairseq.trainer | Loaded checkpoint runs/q/checkpoints/checkpoint_last.pt "
    "(epoch 1 @ 20 updates)"
)


def test_curves_take_the_loss_without_the_gate_loss_and_the_last_of_repeated_updates(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "\n".join(
            [
                STAMP + TRAIN.format(10),
                STAMP + VALID.format(10).replace("ppl 256", "ppl 512"),
                STAMP + "fairseq_cli.train | end of epoch 1 | ppl 3 | num_updates 11",
                STAMP + RESUMED,
                STAMP + VALID.format(10),
                "[rank 1] warning | loss=1, num_updates=12",
            ]
        ),
        "utf-8",
    )
    curves = metrics.read_curves(log)
    assert curves.train == {10: (9.1, 14612.6)}
    assert curves.valid == {10: (8.0, 256.0)}
    assert curves.resumed == [20]
    assert curves.used == {10: {"moe_util_slot": 88.31, "moe_drop": 11.69}}


def test_utilisation_is_that_of_the_last_quarter():
    used = {update: {"moe_drop": float(update), "moe_dead": 1.0} for update in range(8, 0, -1)}
    used[1]["moe_util_slot"] = 50.0
    assert metrics.late_utilisation(metrics.Curves(used=used)) == {"moe_drop": 7.5, "moe_dead": 1.0}


def test_progress_keeps_fairseqs_position_and_the_chosen_metrics():
    shown = metrics.progress(STAMP + TRAIN.format(20))
    assert shown.startswith("epoch 002:    20 / 621 loss=9.166, ppl=548.8, wps=14613")
    assert "moe_gate_loss=2.289" in shown
    assert "loss_scale" not in shown
    assert metrics.progress(STAMP + VALID.format(20)) is None


def test_expert_load_is_sorted_and_a_repeated_update_counts_once(tmp_path):
    file = tmp_path / "load.jsonl"
    loads = [(10, [1, 3]), (5, [4, 0]), (10, [2, 2])]
    file.write_text(
        "".join(json.dumps({"update": u, "layers": {"3": x, "11": x}}) + "\n" for u, x in loads)
    )
    updates, layers = metrics.read_expert_load(file)
    assert updates == [5, 10]
    assert list(layers) == ["3", "11"]
    assert all(loads == [[4, 0], [2, 2]] for loads in layers.values())


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    import pictures

    curves = metrics.Curves({5: (9.0, 1.0), 10: (8.0, 1.0)}, {1: (12.0, 4096.0), 10: (8, 256)}, [5])
    pictures.draw_loss(curves, tmp_path / "loss.png")
    used = {10: {"moe_util_slot": 80.0}, 5: {"moe_util_slot": 70.0, "moe_util_load": 50.0}}
    even = {"moe_util_slot": 97.0, "moe_util_load": 90.0}
    pictures.draw_experts([5, 10], {"1": [[0, 0], [3, 1]]}, tmp_path / "experts.png", used, even)
    import exchange_picture

    choice = {"algorithm": "2dh", "overlap_degree": 4}
    lines = [
        {"update": 3, "what": "trial", "key": "a/1", "choice": choice, "samples": [4000, 5000]},
        {"update": 4, "what": "decision", "key": "a/1", "choice": choice, "us": 4500},
        {"update": 9, "what": "trial", "key": "a/2", "choice": {**choice, "r": 2}, "samples": [9]},
    ]
    file = tmp_path / "exchange.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"update": 1')
    assert exchange_picture.read(file) == lines
    assert exchange_picture.name(lines[-1]["choice"]) == "2dh d=4 r=2"
    exchange_picture.draw(lines, tmp_path / "exchange.png")
    for name in ("loss.png", "experts.png", "exchange.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
