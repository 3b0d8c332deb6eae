"""``--optimizer adam``: scaled fp16 statistics without apex, and one pass over weights on a CPU.

A plugin cannot register a second optimizer called ``adam``. So the constructor of fairseq's class
(:mod:`.hooks`) builds ``Adam16`` for ``--fp16-adam-stats`` in exactly the case in which stock
raises NotImplementedError, and :class:`OnePassAdam` in place of fairseq's own loop.
"""

import importlib.util
import itertools
import logging
import math
from typing import Any

import torch
from fairseq.optim.adam import Adam, FairseqAdam
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.fused_adam import FusedAdamV1, get_fused_adam_class
from torch.optim.adamw import adamw

from ...training.adam16 import Adam16, dequantize_state

logger = logging.getLogger(__name__)


class OnePassAdam(Adam):
    """fairseq's Adam, which updates experts on a CPU by torch's fused kernel; same states.

    Experts have many weights per operation, so that an update's twelve passes over memory weigh:
    this takes 0.4 of their time. Other models are updated by fairseq's own lines.
    """

    def step(self, closure=None):
        """Update all weights, after ``closure()`` if it is given; return its result."""
        groups = self.param_groups
        params = list(itertools.chain(*(group["params"] for group in groups)))
        if not any(getattr(param, "expert", False) for param in params) or not (
            all(map(_is_plain, params)) and not any(group.get("amsgrad") for group in groups)
        ):
            return super().step(closure)
        loss = None if closure is None else closure()
        for group in groups:
            of_step: dict[int, list[torch.Tensor]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                for name in ("exp_avg", "exp_avg_sq"):
                    known = state.get(name)
                    state[name] = torch.zeros_like(param) if known is None else known.to(param)
                of_step.setdefault(state["step"], []).append(param)
            for step, updated in of_step.items():
                self._update(group, step, updated)
        return loss

    @torch.no_grad()
    def _update(self, group: dict[str, Any], step: int, params: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        # fairseq adds eps before it corrects the bias of the second moment, torch after it
        eps = group["eps"] / math.sqrt(1 - beta2**step)
        adamw(
            params,
            [param.grad for param in params],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [torch.tensor(step - 1.0) for _ in params],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=eps,
            maximize=False,
        )


def _is_plain(param: torch.Tensor) -> bool:
    """Return whether torch's fused kernel for CPUs takes a weight and its gradient."""
    tensors = [param] if param.grad is None else [param, param.grad]
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors) and not (
        param.grad is not None and (param.grad.is_sparse or not param.grad.is_contiguous())
    )


def _needs_adam16(cfg: Any) -> bool:
    """Return whether fairseq would raise because apex's extension is missing."""
    if not getattr(cfg, "fp16_adam_stats", False):
        return False
    # --bf16 turns tpu on even if no TPU is possible; torch_xla decides
    on_tpu = getattr(cfg, "tpu", False) and importlib.util.find_spec("torch_xla") is not None
    if on_tpu or getattr(cfg, "use_old_adam", False):
        return False
    return get_fused_adam_class() is not FusedAdamV1 or not torch.cuda.is_available()


def _refuse_averaging() -> None:
    raise ValueError("--use-bmuf cannot average the scaled statistics of --fp16-adam-stats")


def _dequantize_loaded(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Give fp32 Adam fp32 statistics if the checkpoint holds scaled fp16 ones; in place."""
    states = state_dict["state"]
    for key in states:
        states[key] = dequantize_state(states[key])


def init_adam(original: Any, self: FairseqAdam, cfg: Any, params: Any) -> None:
    """Replace ``FairseqAdam.__init__``, which is ``original``."""
    if _needs_adam16(cfg):
        FairseqOptimizer.__init__(self, cfg)
        logger.info("using Adam with fp16 statistics of fairseq_tutel (apex is not installed)")
        self._optimizer = Adam16(params, **self.optimizer_config)
        self.average_params = _refuse_averaging
        return
    original(self, cfg, params)
    if type(self._optimizer) is Adam:
        self._optimizer = OnePassAdam(self._optimizer.param_groups, **self.optimizer_config)
    if not isinstance(self._optimizer, FusedAdamV1):
        self._optimizer.register_load_state_dict_pre_hook(_dequantize_loaded)
