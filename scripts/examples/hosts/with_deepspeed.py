"""DeepSpeed's ZeRO-1 for the dense parameters of a model with experts; what they need is marked.

torchrun --nproc-per-node 2 scripts/examples/hosts/with_deepspeed.py run/checkpoint_last.pt
"""

import deepspeed
import torch
import toy
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

from fairseq_tutel import training

MOMENTS = "exp_avg", "exp_avg_sq"


def train(build, batches, steps, path, scaler=None):
    """Up to ``steps`` steps, in fp32: an overflow on one rank makes all skip the step."""
    deepspeed.init_distributed()
    model = build()  # <- once the ranks are connected
    training.prepare_data_parallel(model)  # <- before deepspeed.initialize
    experts, groups, first = training.expert_parameters(model), model.block.moe.groups, 0
    for param in experts:
        param.ds_optim_param = True  # <- DeepSpeed broadcasts rank 0's parameters but for these
    dense = [param for param in model.parameters() if not getattr(param, "expert", False)]
    whole, sharded, own = (torch.optim.AdamW(p, lr=toy.RATE) for p in (dense, dense, experts))
    if training.checkpoint_exists(path):
        first = training.load_checkpoint(path, model, [whole, own])["step"]  # <- on any ranks
    engine, zero, *_ = deepspeed.initialize(model=model, optimizer=sharded, config=toy.DEEPSPEED)
    dense_norm = zero.scaled_global_norm
    zero.scaled_global_norm = lambda: (  # <- one norm, one overflow check, with all experts
        (dense_norm() ** 2 + training.expert_grad_sq_norm(experts, groups)).sqrt()
    )
    for flat in zero.single_partition_of_fp32_groups if first else ():  # <- this rank's statistics
        sharded.state[flat] = {name: torch.zeros_like(flat) for name in MOMENTS}
        sharded.state[flat]["step"] = whole.state[dense[0]]["step"].clone()
    if first:
        zero._lazy_init_hp_params_optimizer_state()
        for param, name in ((param, name) for param in dense for name in MOMENTS):
            safe_set_full_optimizer_state(param, whole.state[param][name], name)
    for step in range(first, steps):
        for x in batches(step):
            with training.collect_aux(model) as aux:  # <- the layers' balance losses
                loss = toy.task_loss(engine(x), x)
            engine.backward(loss + toy.AUX_WEIGHT * aux.loss)
            engine.step()
        if engine.was_step_applied():  # <- the experts', clipped by the same norm
            factor = min(1.0, toy.MAX_NORM / (float(engine.get_global_grad_norm()) + 1e-6))
            torch._foreach_mul_([param.grad for param in experts], factor)
            own.step()
        own.zero_grad()
    for param in dense:  # <- whole in files, which any number of ranks takes up
        moments = {name: safe_get_full_optimizer_state(param, name) for name in MOMENTS}
        whole.state[param] = {"step": next(iter(sharded.state.values()))["step"], **moments}
    training.save_checkpoint(path, model, [whole, own], {"step": steps})
    return model


if __name__ == "__main__":
    toy.main(train)
