"""Single updates: checkpointed activations, the norm over all experts, overflow, a rank without
memory or whose save fails, batches that differ between the ranks."""

import functools
import math

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.distributed import RanksFailed, run_ranks
from helpers.sets import names_in, set_names
from helpers.training import (
    gradients,
    make_batch,
    make_config,
    make_trainer,
    named,
    own_batches,
    record_updates,
    save,
)

from fairseq_tutel.checkpoint import CheckpointError
from fairseq_tutel.distributed import process_world
from fairseq_tutel.training.state import sharded_optimizer


def _each(function, cfgs, *args):
    return {words: function(cfg, *args) for words, cfg in cfgs.items()}


def on_ranks(world_size, function, options, *args):
    """By rank: ``function`` of every config, by its words; the ranks start once."""
    cfgs = {words: make_config("--moe-expert-count", "4", *words.split()) for words in options}
    return run_ranks(_each, world_size, function, cfgs, *args, timeout=120)


def assert_same_gradients(got, want, limit):
    for name, grad in want.items():
        if not name.endswith("k_proj.bias"):  # rounding is all there is in it
            assert rms_ratio(got[name], grad) < limit, name


def _one_update(cfg):
    trainer = make_trainer(cfg)
    updates = record_updates(trainer)
    trainer.train_step(own_batches(0, 2))
    return updates[0], gradients(trainer)


def test_checkpointed_activations_give_the_same_gradients():
    """With dropout, too: it is replayed. The aux loss is most of the loss here."""
    loss = "--moe-gate-loss-wt 50"
    dropout = f"{loss} --dropout 0.2 --activation-dropout 0.1"
    pairs = [(loss, f"{loss} --checkpoint-activations"), (loss, f"{loss} --offload-activations"),
             (dropout, f"{dropout} --checkpoint-activations")]  # fmt: skip
    for found in on_ranks(2, _one_update, sorted({words for pair in pairs for words in pair})):
        for plain, checkpointed in pairs:
            (update, grads), (other_update, other_grads) = found[plain], found[checkpointed]
            assert update.sums == pytest.approx(other_update.sums, rel=1e-6)
            assert update.grad_norm == pytest.approx(other_update.grad_norm, rel=1e-6)
            assert_same_gradients(other_grads, grads, 1e-6)


def _balanced(cfg):
    """(Updates, gradients) of two updates of two equal batches, and of one of twice the size.

    They stand beside validation: each counts its own tokens alone.
    """
    seed, found = 5 + process_world()[0], []
    batch, large = make_batch(seed), make_batch(seed, sentences=8)
    large["target"] = torch.cat([batch["target"]] * 2)
    large["net_input"] = {k: torch.cat([v] * 2) for k, v in batch["net_input"].items()}
    for samples in ([batch, batch], [large]):
        trainer = make_trainer(cfg)
        updates = record_updates(trainer)
        for _ in range(2):
            trainer.train_step(samples)
            trainer.valid_step(make_batch(99))
        found.append((updates, gradients(trainer)))
    return found


def test_with_balance_over_the_update_equal_batches_are_one_large_batch():
    """The gate loss is most of the loss. By hand: moe/test_balance.py."""
    words = "--moe-capacity-factor 0 --moe-gate-loss-scope update --moe-gate-loss-wt 50"
    for by_words in on_ranks(2, _balanced, [words, f"{words} --checkpoint-activations"]):
        for (updates, grads), (want_updates, want_grads) in by_words.values():
            for got, want in zip(updates, want_updates, strict=True):
                assert got.sums["loss"] == pytest.approx(want.sums["loss"], rel=1e-5)
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
            assert_same_gradients(grads, want_grads, 1e-4)


def test_sqrt_world_size_makes_expert_gradients_larger():
    """By the root of the number of ranks that exchange tokens; dense gradients stay."""
    how = "--moe-expert-count {} --moe-top-k 1 --moe-normalize-expert-grad {}world_size"
    options = {e: [how.format(e, root) for root in ("", "sqrt_")] for e in (1, 4)}
    for found in on_ranks(2, _one_update, [*options[1], *options[4]]):
        for experts, (usual, root) in options.items():
            larger = math.sqrt(min(2, experts))
            want = {name: grad * larger if ".experts." in name else grad
                    for name, grad in found[usual][1].items()}  # fmt: skip
            assert_same_gradients(found[root][1], want, 1e-5)


def _overflow(cfg, names):
    """An inf in the gradient of one parameter on rank 1, in the second of three updates."""
    rank, _ = process_world()
    found = {}
    for name in names:
        trainer = make_trainer(cfg)
        param = dict(trainer.get_model().named_parameters())[name]
        updates, scales, counts, weights = record_updates(trainer), [], [], []
        for update in range(3):
            hook = None
            if rank == 1 and update == 1:
                hook = param.register_hook(lambda grad: grad * math.inf)
            weights.append(named(trainer))
            output = trainer.train_step(own_batches(update, 2))
            trainer.valid_step(make_batch(99))  # does not move a load bias
            if hook is not None:
                hook.remove()
            assert (output is None) == (update == 1)
            scales.append(trainer.optimizer.scaler.loss_scale)
            counts.append(trainer.get_num_updates())
        kept, skipped = (
            all(torch.equal(weights[i][key], weights[i + 1][key]) for key in weights[i])
            for i in (0, 1)
        )
        found[name] = scales, counts, len(updates), skipped, kept
    return found


def test_overflow_of_one_rank_skips_the_update_on_all():
    """An expert's gradient is nowhere else; a dense one is averaged. Load biases stay, too."""
    names = ("decoder.layers.1.moe_layer.experts.fc2_weight", "decoder.layers.0.fc1.weight")
    scale = "--fp16-init-scale 8 --fp16-scale-tolerance 0 --moe-load-bias quantile --ddp-backend"
    options = [f"--fp16 {scale} legacy_ddp", f"--memory-efficient-fp16 {scale} legacy_ddp",
               f"--memory-efficient-fp16 {scale} pytorch_ddp --zero-sharding os"]  # fmt: skip
    for by_words in on_ranks(2, _overflow, options, names):
        for found in by_words.values():
            for name in names:
                scales, counts, recorded, skipped, kept = found[name]
                assert scales == [8.0, 4.0, 4.0], name
                assert counts == [1, 1, 2] and recorded == 2
                assert skipped and not kept


def _inf_in_fp32(cfg, folder):
    rank, _ = process_world()
    cfg.checkpoint.save_dir = folder
    trainer = make_trainer(cfg)
    param = trainer.get_model().moe_layers[1].experts.fc1_bias
    if rank == 1:
        param.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(FloatingPointError, match="Nan/Inf"):
        trainer.train_step(own_batches(0, 2))


def test_nan_of_one_rank_in_fp32_stops_all(tmp_path):
    cfg = make_config("--moe-expert-count", "4")
    run_ranks(_inf_in_fp32, 2, cfg, str(tmp_path))
    assert names_in(tmp_path) == set_names("crash", 2)


def _out_of_memory(cfg, step):
    rank, _ = process_world()
    trainer = make_trainer(cfg)
    if rank == 1:
        original = getattr(trainer.task, step)

        def fail_once(*args, **kwargs):
            setattr(trainer.task, step, original)
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

        setattr(trainer.task, step, fail_once)
    batches = own_batches(0, 2)
    getattr(trainer, step)(batches if step == "train_step" else batches[0])


@pytest.mark.parametrize("step, experts", [("train_step", 1), ("valid_step", 4)])
def test_a_rank_without_memory_ends_the_job(step, experts):
    """Stock leaves the batch out, or tries again, while the others wait: the job hangs."""
    cfg = make_config("--moe-expert-count", str(experts), "--moe-top-k", "1")
    with pytest.raises(RanksFailed, match="RuntimeError: CUDA out of memory"):
        run_ranks(_out_of_memory, 2, cfg, step, timeout=30.0)


def _fail_to_save(cfg, folder):
    path, trainer = folder / "checkpoint_last.pt", make_trainer(cfg)
    trainer.train_step(own_batches(0, 2))
    save(trainer, path)
    before = [file.read_bytes() for file in sorted(folder.iterdir())]
    if process_world()[0] == 0:
        sharded_optimizer._empty = lambda *form: (_ for _ in ()).throw(MemoryError("no room"))
    trainer.train_step(own_batches(1, 2))
    with pytest.raises(CheckpointError, match="saving .* rank 0: MemoryError: no room"):
        save(trainer, path)
    assert [file.read_bytes() for file in sorted(folder.iterdir())] == before


@pytest.mark.long
def test_a_save_that_fails_on_one_rank_fails_on_all_and_loses_nothing(tmp_path):
    run_ranks(_fail_to_save, 2, make_config("--zero-sharding", "os"), tmp_path)


UNEVEN = {
    "one rank has none": [[make_batch(1)], [None]],
    "the other rank has none": [[None], [make_batch(1)]],
    "fewer sentences": [[make_batch(1, sentences=1)], [make_batch(2, sentences=5)]],
    "other lengths": [[make_batch(1, lengths=[3, 2])], [make_batch(2, lengths=[8, 8, 5])]],
    "nobody has any in the second half": [[make_batch(1), None], [make_batch(2), None]],
    "one of two": [[make_batch(1), make_batch(2)], [make_batch(3), None]],
}


def _uneven(cfg):
    """Rank r trains on its entry; a single rank trains on all that are there."""
    rank, world_size = process_world()
    found = {}
    for name, by_rank in UNEVEN.items():
        batches = by_rank[rank]
        if world_size == 1:
            batches = [batch for each in by_rank for batch in each if batch is not None]
        trainer = make_trainer(cfg)
        updates = record_updates(trainer)
        trainer.train_step([{} if batch is None else batch for batch in batches])
        trainer.train_step(own_batches(1, 2))  # the ranks are still in step
        found[name] = (updates, gradients(trainer))
    return found


DROPLESS = "--moe-capacity-factor 0 --ddp-backend"
UNEVEN_OPTIONS = (
    f"{DROPLESS} pytorch_ddp --use-moe-pad-mask",
    f"{DROPLESS} legacy_ddp --checkpoint-activations",
)


uneven = functools.cache(lambda world_size: on_ranks(world_size, _uneven, UNEVEN_OPTIONS))


@pytest.mark.parametrize("options", UNEVEN_OPTIONS)
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_batches_change_nothing_for_the_tokens_there_are(name, options):
    ((want, grads),) = (found[options][name] for found in uneven(1))
    for got, got_grads in (found[options][name] for found in uneven(2)):
        for mine, one in zip(got, want, strict=True):
            assert mine.sample_size == one.sample_size
            assert mine.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
            assert mine.sums["loss"] == pytest.approx(one.sums["loss"], rel=1e-5)
            assert mine.sums["batch_count"] == one.sums["batch_count"]
        assert_same_gradients(got_grads, {key: grads[key] for key in got_grads}, 1e-4)


def _validate(cfg):
    """Validation of five batches of all kinds: in the end only one of four ranks has one."""
    rank, world_size = process_world()
    kinds = ([8] * 4, [5, 3], [8, 1], [2], [7, 7, 7])
    batches = [make_batch(i, lengths=lengths) for i, lengths in enumerate(kinds)]
    share = batches[rank::world_size]
    share += [{}] * (math.ceil(len(batches) / world_size) - len(share))
    trainer = make_trainer(cfg)
    total, original = {}, trainer._reduce_and_log_stats

    def reduce_and_sum(logs, *rest):
        for key in ("loss", "inner_loss", "moe_loss", "ntokens", "batch_count"):
            total[key] = total.get(key, 0.0) + float(sum(log[key] for log in logs))
        return original(logs, *rest)

    trainer._reduce_and_log_stats = reduce_and_sum
    for batch in share:
        with torch.no_grad():
            trainer.valid_step(batch)
    return total


def test_validation_does_not_depend_on_the_ranks():
    options = ["", "--fp16", "--moe-eval-capacity-token-fraction 1.0"]
    (want,) = on_ranks(1, _validate, options)
    for got in on_ranks(4, _validate, options):
        for words in options:
            assert want[words]["ntokens"] == 32 + 8 + 9 + 2 + 21
            near = 2e-3 if "fp16" in words else 1e-6
            assert got[words] == pytest.approx(want[words], rel=near), words
