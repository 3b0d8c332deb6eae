"""Writes the files beside it: checkpoints and logits of Microsoft's own Swin-MoE, tiny, on a CPU.

    python tests/examples/swin_moe_files/make_files.py --swin FOLDER --tutel FOLDER \\
        --commits COMMIT COMMIT

FOLDERs are checkouts of microsoft/Swin-Transformer and of microsoft/Tutel, built for a CPU; timm,
torchvision and yacs are needed, too. Their model, layer and function that saves are called as they
are; of the test's own are the sizes, the weights (drawn wide enough that experts, gates and biases
show in the logits), and that the gate's noise is drawn as zeros, so that the logits of training
mode can be compared. provenance.json says what the files were made with.

    slices.pth.*    2 experts on 4 ranks, half of one on each; weights only, the shared ones apart
    cosine.pth.*    4 experts on 2 ranks; cosine router; with configuration and optimizer
    expected.pt     of either, by rank: images, logits in evaluation and training, auxiliary loss
"""

import argparse
import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))
SIZES = {
    "PATCH_SIZE": 2, "EMBED_DIM": 8, "WINDOW_SIZE": 2, "MLP_FC2_BIAS": False, "TOP_VALUE": 1,
    "CAPACITY_FACTOR": 1.25, "IS_GSHARD_LOSS": False,
}  # fmt: skip
TWO_STAGES = {"DEPTHS": [1, 2], "NUM_HEADS": [2, 2], "MOE_BLOCKS": [[0], [1]]}
ONE_STAGE = {"DEPTHS": [2], "NUM_HEADS": [2], "MOE_BLOCKS": [[0, 1]]}
COSINE = {"COSINE_ROUTER": True, "COSINE_ROUTER_DIM": 8}
# ranks, experts of a rank (-R: R ranks to an expert), options, weights only
CASES = {
    "slices": (4, -2, TWO_STAGES, True),
    "cosine": (2, 2, {**ONE_STAGE, **COSINE}, False),
}


def build(name):
    """Their model, and the configuration that their program would have."""
    from config import _C
    from models.swin_transformer_moe import SwinTransformerMoE

    _, local, options, _ = CASES[name]
    config = _C.clone()
    config.DATA.IMG_SIZE, config.MODEL.NUM_CLASSES, config.MODEL.DROP_PATH_RATE = 16, 5, 0.0
    config.MODEL.TYPE, config.MODEL.NAME = "swin_moe", name
    for key, value in {**SIZES, "NUM_LOCAL_EXPERTS": local, **options}.items():
        config.MODEL.SWIN_MOE[key] = value
    moe = config.MODEL.SWIN_MOE
    model = SwinTransformerMoE(
        img_size=16, patch_size=2, num_classes=5, embed_dim=8, depths=moe.DEPTHS,
        num_heads=moe.NUM_HEADS, window_size=2, drop_path_rate=0.0, mlp_fc2_bias=False,
        moe_blocks=moe.MOE_BLOCKS, num_local_experts=local, top_value=1, capacity_factor=1.25,
        cosine_router=moe.COSINE_ROUTER, cosine_router_dim=moe.COSINE_ROUTER_DIM,
        use_bpr=moe.USE_BPR, is_gshard_loss=False, gate_noise=moe.GATE_NOISE, moe_drop=0.0,
    )  # fmt: skip
    return model, config


@torch.no_grad()
def draw_weights(model, rank, frozen_zero):
    """Shared ones alike on all ranks, experts of each rank its own."""
    for number, (name, param) in enumerate(model.named_parameters()):
        is_expert = ".experts." in name
        generator = torch.Generator().manual_seed(100 * number + (rank + 1 if is_expert else 0))
        value = torch.randn(param.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            param.copy_(1 + 0.2 * value)
        elif name.endswith("temperature"):
            param.fill_(1.5)
        elif name.endswith("batched_fc2_bias") and frozen_zero:
            param.zero_()  # not trained, and saved with the shared weights
        else:
            width = 0.5 if is_expert or ".gates." in name else 0.3
            param.copy_(width * value)


def on_rank(rank, name, swin, tutel, folder, port):
    sys.path[:0] = [swin, tutel]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    world_size, _, _, weights_only = CASES[name]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    from helpers.vision import import_timm

    timm = import_timm()
    sys.modules.setdefault("timm.models.layers", timm.layers)
    from timm.scheduler import CosineLRScheduler
    from utils_moe import save_checkpoint

    model, config = build(name)
    draw_weights(model, rank, frozen_zero=weights_only)
    for key, param in model.named_parameters():
        if param.requires_grad and getattr(param, "skip_allreduce", False):
            model.add_param_to_skip_allreduce(key)
    config.OUTPUT = str(folder)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = CosineLRScheduler(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    save_checkpoint(
        config, 0, model, 0.0, optimizer, scheduler, scaler, logging.getLogger("saved"),
        zero_redundancy=weights_only,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8, generator=generator)
    found = {"images": images}
    torch.randn_like = torch.zeros_like
    with torch.no_grad():
        for mode in ("eval", "train"):
            model.train(mode == "train")
            logits, aux = model(images / 64 - 2)
            found |= {mode: logits, f"{mode}_aux": aux}
    torch.save(found, folder / f"found-{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--swin", required=True)
    parser.add_argument("--tutel", required=True)
    parser.add_argument("--commits", nargs=2, required=True, help="of the two checkouts")
    options = parser.parse_args()
    expected = {}
    for port, (name, (world_size, *_)) in enumerate(CASES.items(), 29600):
        arguments = (name, options.swin, options.tutel, FOLDER, port)
        mp.spawn(on_rank, arguments, nprocs=world_size)
        parts = [FOLDER / f"found-{name}-{rank}.pt" for rank in range(world_size)]
        expected[name] = [torch.load(part) for part in parts]
        for part in parts:
            part.unlink()
        for file in FOLDER.glob("ckpt_epoch_0.pth.*"):
            file.rename(FOLDER / file.name.replace("ckpt_epoch_0", name))
    torch.save(expected, FOLDER / "expected.pt")
    provenance = {
        "microsoft/Swin-Transformer": options.commits[0],
        "microsoft/Tutel": options.commits[1],
        "torch": torch.__version__,
        "timm": importlib.metadata.version("timm"),
        "python": sys.version.split()[0],
    }
    (FOLDER / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


if __name__ == "__main__":
    main()
