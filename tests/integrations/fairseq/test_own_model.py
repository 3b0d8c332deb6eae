"""A model that a user registers: fairseq trains, saves and reshards it like the built-in one."""

from dataclasses import dataclass

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqDecoder, FairseqLanguageModel, register_model
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from helpers.sets import names_in, set_names
from helpers.training import LENGTH, make_config, make_trainer, named, own_batches, save
from omegaconf import OmegaConf, open_dict

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer


@dataclass
class BagOfWordsConfig(FairseqDataclass):
    """Sizes of its own, and the options that the trainer and checkpoints read."""

    dim: int = 16
    moe_expert_count: int = 4
    moe_normalize_expert_grad: str = "world_size"
    moe_load_log_interval: int = 0
    num_workers_valid: int = 0


class BagOfWordsDecoder(FairseqDecoder):
    """Each token alone, through one MoE layer."""

    def __init__(self, dictionary, cfg):
        super().__init__(dictionary)
        self.embed = torch.nn.Embedding(len(dictionary), cfg.dim)
        groups = build_groups(cfg.moe_expert_count)
        # nothing dropped: then several ranks compute what one does
        self.sparse = MoELayer(cfg.dim, cfg.moe_expert_count, 24, groups=groups, capacity_factor=0)
        self.out = torch.nn.Linear(cfg.dim, len(dictionary))

    def forward(self, prev_output_tokens, **unused):
        x = self.embed(prev_output_tokens)
        y, aux = self.sparse(x, return_aux=True)
        return self.out(x + y), {"moe": [aux]}

    def max_positions(self):
        return LENGTH


class BagOfWords(FairseqLanguageModel):
    """What the recipe of CONTRIBUTING asks for: a model with ``moe_layers`` and ``moe_groups``."""

    @classmethod
    def build_model(cls, cfg, task):
        return cls(BagOfWordsDecoder(task.target_dictionary, cfg))

    @property
    def moe_layers(self):
        return {0: self.decoder.sparse}

    @property
    def moe_groups(self):
        return self.decoder.sparse.groups


def _trainer():
    """In a process of its own: the registered name stays."""
    register_model("bag_of_words", dataclass=BagOfWordsConfig)(BagOfWords)
    # a balance loss over the tokens of a rank differs with their number; SGD shows what scale a
    # gradient has
    options = "--moe-gate-loss-wt 0 --clip-norm 0.5 --optimizer sgd --momentum 0.9 --lr 0.5"
    cfg = make_config("--moe-expert-count", "4", *options.split())
    with open_dict(cfg):
        cfg.model = OmegaConf.structured(BagOfWordsConfig(_name="bag_of_words"))
    return make_trainer(cfg)


def _trained(path, saves):
    trainer = _trainer()
    for update in range(3):
        trainer.train_step(own_batches(update, 4))
    weights = named(trainer)
    if saves:
        save(trainer, path)
        return weights
    trainer.load_checkpoint(path)
    return weights, named(trainer)


def test_trains_saves_and_resumes_at_another_number_of_ranks(tmp_path):
    path = str(tmp_path / "x.pt")
    by_rank = run_ranks(_trained, 2, path, True)
    assert names_in(tmp_path) == set_names("x", 2)
    ((one_rank, resumed),) = run_ranks(_trained, 1, path, False)
    two_ranks = {**by_rank[1], **by_rank[0]}
    torch.testing.assert_close(two_ranks, one_rank, rtol=1e-4, atol=1e-6)
    assert_same_state(resumed, {key: two_ranks[key] for key in resumed})
    assert any("sparse.experts" in name for name in one_rank)
