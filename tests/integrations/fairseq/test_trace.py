"""``--moe-trace``: the experts of every token of the data, each once, beside the gates' logits."""

import json

import pytest
import torch
from helpers import architectures
from helpers.architectures import ROWS
from helpers.distributed import run_ranks
from helpers.training import LENGTH, make_batch, make_config, make_trainer, save
from helpers.translation import make_pairs, pair_config

from fairseq_tutel.distributed import process_world
from fairseq_tutel.moe.model import moe_layers
from fairseq_tutel.picture.trace import draw_trace, read_traces

WORDS = "--moe-expert-count 4 --moe-freq 1 --checkpoint-activations --moe-trace"


def read(folder, rank=0):
    lines = (folder / f"trace-rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _train(cfg):
    """By pass of this rank on data: the first layer's two best experts of each token, by hand."""
    rank, world_size = process_world()
    trainer, best = make_trainer(cfg), []
    gate = trainer.get_model().decoder.layers[0].moe_layer.gate

    def note(module, inputs, output):
        logits = inputs[0].detach() @ gate.wg.weight.detach().t()
        best.append(logits.topk(2).indices.tolist())

    handle = gate.register_forward_hook(note)
    short = make_batch(7, lengths=[8, 3])
    # the second rank has no second batch in the update, and none of validation
    batches = [[make_batch(1), short], [make_batch(2)]]
    mine = batches[rank] if world_size > 1 else [*batches[0], *batches[1]]
    trainer.train_step([*mine, *[{}] * (2 - len(mine))])
    trainer.train_step([make_batch(3 + rank)])
    with torch.no_grad():
        trainer.valid_step({} if rank else short)
    handle.remove()
    return best


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_and_validation_write_each_token_of_the_data_once(ranks, tmp_path):
    cfg = make_config(*WORDS.split(), str(tmp_path))
    best = run_ranks(_train, ranks, cfg)
    first = [[1, 7], [2]] if ranks == 2 else [[1, 7, 2]]  # seeds of the first update's batches
    short = make_batch(7, lengths=[8, 3])
    for rank in range(ranks):
        head, *passes = read(tmp_path, rank)
        assert head["ranks"] == ranks and head["experts"] == {"0": 4, "1": 4}
        assert len(head["symbols"][""]) == 32 and head["modes"] == ["train", "valid"]
        batches = [short if seed == 7 else make_batch(seed) for seed in first[rank]]
        kinds = [(1, "train")] * len(batches) + [(2, "train")] + [(2, "valid")] * (not rank)
        assert [(each["update"], each["mode"]) for each in passes] == kinds
        batches += [make_batch(3 + rank), *([] if rank else [short])]
        for batch, each in zip(batches, passes, strict=True):
            source = batch["net_input"]["src_tokens"]
            assert each["tokens"][""] == source[source != 1].tolist()
            assert each["lengths"][""] == (source != 1).sum(1).tolist()
        for each in passes:
            for choices in each["choices"].values():
                assert len(choices) == len(each["tokens"][""])
        # of the pass in validation, which recomputes nothing and has no filler on this rank
        if not rank:
            kept = (source != 1).flatten().tolist()
            want = [pair for pair, live in zip(best[rank][-1], kept, strict=True) if live]
            assert passes[-1]["choices"]["0"] == want


def test_encoder_and_decoder_have_tokens_of_their_own(tmp_path):
    words = f"--moe-expert-count 4 --moe-trace {tmp_path} --moe-trace-interval 2"
    trainer, pairs = make_trainer(pair_config(*words.split()), make_pairs(0)), make_pairs(1)
    for _ in range(3):
        trainer.train_step([pairs])
    head, line = read(tmp_path)
    assert line["update"] == 2 and set(head["symbols"]) == {"encoder", "decoder"}
    for stack, name in (("encoder", "src_tokens"), ("decoder", "prev_output_tokens")):
        given = pairs["net_input"][name]
        assert line["tokens"][stack] == given[given != 1].tolist()
        assert len(line["choices"][f"{stack}.1"]) == len(line["tokens"][stack])


def test_a_resumed_run_writes_later_updates_again(tmp_path):
    cfg = make_config(*WORDS.split(), str(tmp_path))
    cfg.checkpoint.no_save, cfg.checkpoint.save_dir = False, str(tmp_path)
    trainer = make_trainer(cfg)
    for update in range(3):
        trainer.train_step([make_batch(update)])
        if update == 1:
            save(trainer, tmp_path / "x.pt")
    with (tmp_path / "trace-rank-0.jsonl").open("a") as file:
        file.write('{"update": 1, "mode"')  # cut short by a crash
    # of a stretch on two ranks that this run abandons
    other = [json.dumps({"update": update}) for update in (0, 2, 3)]
    (tmp_path / "trace-rank-1.jsonl").write_text("\n".join(other) + "\n")
    again = make_trainer(cfg)
    again.load_checkpoint(str(tmp_path / "x.pt"))
    again.train_step([make_batch(9)])
    lines = read(tmp_path)
    assert [each.get("resumed") for each in lines] == [False, None, None, True, None]
    assert [each["update"] for each in lines] == [0, 1, 2, 0, 3]
    assert len(lines[-1]["tokens"][""]) == 4 * LENGTH
    assert [each["update"] for each in read(tmp_path, 1)] == [0, 2]


def _trace_of(name, data, tmp_path, *options):
    """A trainer of any architecture, its batch of an update, and the trace of that update."""
    words = ["--moe-freq", "1", "--moe-trace", str(tmp_path), *options]
    trainer = architectures.make_trainer(ROWS[name], data, *words)
    best = {}
    for layer_name, layer in moe_layers(trainer.get_model()).items():

        def note(gate, inputs, output, layer_name=layer_name):
            logits = inputs[0].detach() @ gate.wg.weight.detach().t()
            best.setdefault(layer_name, []).append(logits.topk(2).indices)

        layer.gate.register_forward_hook(note)
    (samples,) = architectures.batches(trainer, 1, total=1)
    trainer.train_step(samples)
    head, *lines = read(tmp_path)
    return trainer, samples[0], best, head, lines


def test_any_model_with_text_has_its_tokens(data, tmp_path):
    """Both stacks of BART, whose embedding they share; choices beside the gates' logits."""
    trainer, sample, best, head, (line,) = _trace_of("bart", data, tmp_path)
    for stack, name in (("encoder.layers", "src_tokens"), ("decoder.layers", "prev_output_tokens")):
        given = sample["net_input"][name]
        live = given != 1
        assert not live.all() and line["tokens"][stack] == given[live].tolist()
        assert line["lengths"][stack] == live.sum(1).tolist()
        for number in (0, 1):
            want = best[f"{stack}.{number}.fc1"][0].view(*given.shape, 2)
            assert line["choices"][f"{stack}.{number}"] == want[live].tolist()
        assert head["symbols"][stack] == trainer.task.source_dictionary.symbols
    assert set(head["experts"]) == set(line["choices"])


def test_frames_of_speech_have_choices_without_tokens(data, tmp_path):
    """Without those of padding; both blocks of a conformer's layer have a name."""
    trainer, sample, best, head, (line,) = _trace_of("s2t_conformer", data, tmp_path)
    stack = "encoder.conformer_layers"
    names = {f"{stack}.{i}/{ffn}" for i in (0, 1) for ffn in ("ffn1/w_1", "ffn2/w_1")}
    assert {name for name in line["choices"] if name.startswith(stack)} == names
    frames = sample["net_input"]["src_lengths"]
    for _ in range(2):  # two convolutions of stride 2
        frames = (frames - 1) // 2 + 1
    assert line["tokens"][stack] is None and line["lengths"][stack] == frames.tolist()
    assert len(line["choices"][f"{stack}.0/ffn1/w_1"]) == frames.sum()
    decoded = sample["net_input"]["prev_output_tokens"]
    assert line["tokens"]["decoder.layers"] == decoded[decoded != 1].tolist()
    assert head["symbols"][stack] == []
    (trace,) = read_traces(tmp_path).values()
    draw_trace(trace, tmp_path / "x.png")
    assert sum(trace.pairs[f"{stack}.0/ffn1/w_1"].values()) == 2 * frames.sum()


def test_calls_of_one_pass_are_lines(data, tmp_path):
    """Three runs of a decoder, each with the tokens that it got; two pairs of languages."""
    trainer, sample, best, _, lines = _trace_of("levenshtein_transformer", data, tmp_path / "1")
    first = sample["prev_target"]
    assert lines[0]["tokens"]["decoder.layers"] == first[first != 1].tolist()
    assert [len(each) for each in best.values()] == [1, 1] + [len(lines)] * 2 and len(lines) == 3
    for number, line in enumerate(lines):
        assert ("encoder.layers.0" in line["choices"]) == (number == 0)
        tokens = line["tokens"]["decoder.layers"]
        assert len(line["choices"]["decoder.layers.0"]) == len(tokens)
    trainer, sample, _, _, lines = _trace_of("multilingual_transformer", data, tmp_path / "2")
    assert len(lines) == len(trainer.task.lang_pairs)
    # a model of two channels embeds both before its layers: nobody says whose tokens they are
    *_, lines = _trace_of("speech_dlm", data, tmp_path / "3")
    assert {line["tokens"]["decoder.layers"] for line in lines} == {None}
