"""Check whether a device multiplies in fp8."""

import functools
import logging

import torch

logger = logging.getLogger(__name__)

# Model and hidden dimension of experts in fp8 are multiples of it.
FP8_MULTIPLE = 16


@functools.cache
def check_fp8(device: torch.device) -> None:
    """Raise ValueError for a GPU without grouped fp8 products; warn once of emulation on a CPU."""
    if device.type == "cpu":
        logger.warning(
            "fp8 experts are emulated on a CPU: values are rounded to e4m3 and multiplied as before"
        )
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip or capability[0] not in (9, 10):
            raise ValueError(
                f"expert_compute='fp8' needs a Hopper or Blackwell GPU, this is {name}"
            )
