"""States, simulated ranks and comparisons, by plain loops, independent of `checkpoint.layout`."""

from __future__ import annotations

import functools
import threading

import torch
from helpers.assertions import assert_same_state

from fairseq_tutel.checkpoint import AllRanks, load_for_rank, save_set

LAYERS = (1, 3)
MODEL_DIM, HIDDEN_DIM = 4, 6
EXPERT_SHAPES = {
    "fc1.weight": (HIDDEN_DIM, MODEL_DIM),
    "fc1.bias": (HIDDEN_DIM,),
    "fc2.weight": (MODEL_DIM, HIDDEN_DIM),
    "fc2.bias": (MODEL_DIM,),
}


def expert_name(layer: int, expert: int, rest: str) -> str:
    return f"decoder.layers.{layer}.moe_layer.experts.{expert}.{rest}"


class Reference:
    """A whole model and its optimizer (``named``), from which each rank's state can be cut."""

    def __init__(self, num_experts: int, seed: int = 0, layers: tuple[int, ...] = LAYERS) -> None:
        random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        self.num_experts, self.seed = num_experts, seed
        self.model = {"decoder.embed_tokens.weight": random(10, MODEL_DIM)}
        self.named = {}
        for layer in layers:
            gate = f"decoder.layers.{layer}.moe_layer.gate.wg.weight"
            self.model[gate] = random(num_experts, MODEL_DIM)
            self.model[f"decoder.layers.{layer}.fc1.weight"] = random(5, 3).half()
            for rest, shape in EXPERT_SHAPES.items():
                stacked = random(num_experts, *shape)  # views of it, as the layer has them
                for expert in range(num_experts):
                    self.model[expert_name(layer, expert, rest)] = stacked[expert]
        for name, tensor in self.model.items():
            self.named[name] = {"step": 7 + seed, "exp_avg": random(*tensor.shape)}
            if ".experts." in name:  # as fp16 Adam keeps them, and an fp32 tensor
                self.named[name]["exp_avg"] = self.named[name]["exp_avg"].half()
                self.named[name]["exp_avg_scale"] = float(random(1))
                self.named[name]["exp_avg_sq"] = random(*tensor.shape)

    def state(self, experts: list[int], *, with_optimizer: bool = True) -> dict:
        def mine(entries):
            kept = {}
            for name, value in entries.items():
                head, of_expert, tail = name.partition(".experts.")
                number, _, rest = tail.partition(".")
                if not of_expert:
                    kept[name] = value
                elif int(number) in experts:
                    kept[f"{head}.experts.{experts.index(int(number))}.{rest}"] = value
            return kept

        cfg = {"model": {"_name": "transformer_lm_gpt_moe", "seed": self.seed}}
        history = [{"num_updates": 7 + self.seed, "lr_scheduler_state": {}}]
        extra = {"train_iterator": {"epoch": 3}, "val_loss": 1.5}
        state = {"args": None, "cfg": cfg, "model": mine(self.model), "criterion": None,
                 "optimizer_history": history, "task_state": {}, "extra_state": extra}  # fmt: skip
        if with_optimizer:
            state["last_optimizer_state"] = {
                "named_state": mine(self.named), "loss_scale": 128.0,
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.98)}],
            }  # fmt: skip
        return state

    def rank_state(self, rank: int, world_size: int, **kwargs: bool) -> dict:
        """A rank's, by the definition of who holds which experts."""
        local, E = max(1, self.num_experts // world_size), self.num_experts
        return self.state([(rank * local + j) % E for j in range(local)], **kwargs)

    def save(self, path: str, world_size: int) -> None:
        run_ranks(world_size, lambda rank, gather: self.save_rank(path, rank, world_size, gather))

    def save_rank(self, path: str, rank: int, world_size: int, gather_texts) -> str:
        ranks, files = AllRanks(rank, world_size, gather_texts), min(self.num_experts, world_size)
        state = self.rank_state(rank, world_size)
        return save_set(path, state, num_rank_files=files, ranks=ranks)

    def check_loadable(self, path: str, world_sizes=(1,), *, with_optimizer: bool = True) -> None:
        """Every rank of every world size gets exactly its part, bit for bit."""
        for world_size in world_sizes:
            for rank in range(world_size):
                loaded = load_for_rank(path, rank=rank, world_size=world_size)
                loaded.pop("moe_checkpoint")
                expected = self.rank_state(rank, world_size, with_optimizer=with_optimizer)
                assert_same_state(loaded, expected)


def run_ranks(world_size: int, work) -> list:
    """Call work(rank, gather_texts) on threads that stand for ranks; returns results or exceptions.

    Where a rank is killed while others still gather, they get BrokenBarrierError.
    """
    barrier = threading.Barrier(world_size)
    texts: list = [None] * world_size
    results: list = [None] * world_size

    def run(rank: int) -> None:
        def gather_texts(text):
            texts[rank] = text
            barrier.wait(timeout=30)
            gathered = list(texts)
            barrier.wait(timeout=30)
            return gathered

        try:
            results[rank] = work(rank, gather_texts)
        except BaseException as error:  # Killed, below, is no Exception
            results[rank] = error
            if not isinstance(error, Exception):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a simulated rank hangs"
    return results
