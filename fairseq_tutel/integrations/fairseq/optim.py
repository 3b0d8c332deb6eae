"""``--optimizer adam --fp16-adam-stats`` without apex.

A plugin cannot register a second optimizer called ``adam``. So the constructor of fairseq's class
(:mod:`.hooks`) builds ``Adam16`` in exactly the case in which stock raises NotImplementedError.
"""

import importlib.util
import logging
from typing import Any

import torch
from fairseq.optim.adam import FairseqAdam
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.fused_adam import FusedAdamV1, get_fused_adam_class

from ...training.adam16 import Adam16, dequantize_state

logger = logging.getLogger(__name__)


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
    if not isinstance(self._optimizer, FusedAdamV1):
        self._optimizer.register_load_state_dict_pre_hook(_dequantize_loaded)
