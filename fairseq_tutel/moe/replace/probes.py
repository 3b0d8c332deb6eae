"""Run a copy of a block, a probe, to learn what the block computes.

A probe has random weights, drawn from a fixed seed: the block's own may hide what it computes. With
a last projection of zeros, for example, every block gives zeros. The caller's random numbers,
autocast and gradient mode are left alone.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ...backends._torch_private import has_hooks, hooks_of
from ..torch_modes import without_autocast

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Values agree up to rounding. Gradients may differ more: a unit may be just at a kink, as of ReLU.
_VALUES, _GRADIENTS = 2e-5, 0.02
_WHOLE = (
    ". Match a module with the whole feed-forward network, such as a layer of BERT; if its two "
    "linear layers are in modules of their own, put both into one module with its own forward"
)
# Sizes of the tokens: small ones tell activations apart, large ones reach limits such as ReLU6's.
_SCALES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@contextlib.contextmanager
def _apart(device: torch.device, seed: int) -> Iterator[None]:
    """Context with seeded generators and gradients, without autocast."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), without_autocast(device), torch.enable_grad():
        torch.manual_seed(seed)
        yield


def check_block(name: str, block: nn.Module) -> None:
    """Raise ValueError unless experts can hold the block's weights, and nobody hooks its calls."""
    params = dict(block.named_parameters())
    if any(isinstance(param, nn.parameter.UninitializedParameter) for param in params.values()):
        raise ValueError(f"{name} has lazy layers: run the model once before")
    if not params or any(param.is_meta for param in params.values()):
        raise ValueError(f"{name} has no weights, or they are on the meta device")
    for each, param in params.items():
        if param.dtype not in _FLOATS:
            raise ValueError(f"{name}.{each} is quantized ({param.dtype}): load it without")
    kinds = {(param.dtype, param.device): each for each, param in reversed(params.items())}
    if len(kinds) > 1:
        listed = ", ".join(f"{each} is {dtype} on {dev}" for (dtype, dev), each in kinds.items())
        raise ValueError(
            f"{name} has weights of several kinds ({listed}): convert the block to one before"
        )
    hooked = [each for each, module in block.named_modules() if any(hooks_of(module))]
    hooked += [each for each, param in params.items() if has_hooks(param)]
    if hooked:
        raise ValueError(
            f"{', '.join(f'{name}.{each}' if each else name for each in hooked)}: experts do not "
            "take over hooks, such as weight_norm: remove them; the MoE layer takes new ones"
        )


def make_probe(name: str, block: nn.Module) -> nn.Module:
    """Return a copy of a block in fp32, without hooks, with random weights that need gradients."""
    try:
        probe = copy.deepcopy(block).float().requires_grad_()
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} ({type(block).__name__}) cannot be copied: {error}") from error
    for module in probe.modules():
        for hooks in hooks_of(module):
            hooks.clear()
    draw_weights(probe, 0)
    return probe


def draw_weights(probe: nn.Module, seed: int) -> None:
    """Draw matrices anew, and add up to 0.5 to vectors: a positive scale stays positive."""
    with _apart(next(probe.parameters()).device, seed), torch.no_grad():
        for param in probe.parameters():
            if param.dim() > 1:
                bound = math.sqrt(3 / param.shape[-1])
                param.uniform_(-bound, bound)
            else:
                param.add_(torch.rand_like(param), alpha=0.5)


def call_seeded(network: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return the output of a seeded call and the random numbers that come next.

    The latter tell whether two calls drew as many random numbers.
    """
    with _apart(x.device, 1):
        y = network(x.clone())  # it may be changed in place
        return [y, torch.randn(x.shape, device=x.device), torch.rand(1, device="cpu")]


def observe(network: Callable[[Tensor], Tensor], x: Tensor, params: Sequence[Tensor]) -> list:
    """Return the output of a seeded call, the next random numbers, and gradients of x and params.

    A parameter that gets no gradient is left out.
    """
    x = x.detach().requires_grad_()
    y, direction, after = call_seeded(network, x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return []
    found = [y.detach(), direction, after]
    if y.requires_grad:
        with _apart(x.device, 2):
            grads = torch.autograd.grad(y, [x, *params], direction, allow_unused=True)
        found += [grad for grad in grads if grad is not None]
    return found


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return whether two results of :func:`call_seeded` or :func:`observe` agree."""
    return len(found) == len(wanted) and all(
        a.shape == b.shape and _close(a, b, _VALUES if number < 3 else _GRADIENTS)
        for number, (a, b) in enumerate(zip(found, wanted, strict=True))
    )


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether each row differs by at most this part of its norm; False for NaN."""
    a, b = (each.detach().double() for each in (a, b))
    return bool(((a - b).norm(dim=-1) <= tolerance * b.norm(dim=-1)).all())


def fit_width(name: str, probe: nn.Module) -> Tensor:
    """Return tokens [2, 3, M] of the smallest width M that the probe keeps; refuse other probes."""
    wrong = ""
    device = next(probe.parameters()).device
    generator = torch.Generator("cpu").manual_seed(0)
    scales = torch.tensor(_SCALES, device="cpu").view(2, 3, 1)
    for model_dim in sorted({size for param in probe.parameters() for size in param.shape}):
        x = torch.randn(2, 3, model_dim, generator=generator, device="cpu", dtype=torch.float32)
        x = (x * scales).to(device)
        try:
            y, *_ = call_seeded(probe.eval(), x)
            call_seeded(probe.train(), x)
        except Exception as error:
            wrong = wrong or f"{type(error).__name__}: {error}"
            continue
        if isinstance(y, Tensor) and y.shape == x.shape:
            _refuse_in_place(name, probe, x)
            return x
        got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        wrong = f"it maps {list(x.shape)} to {got}"
    raise ValueError(f"{name} ({type(probe).__name__}) is no [..., M] -> [..., M]: {wrong}{_WHOLE}")


def _refuse_in_place(name: str, probe: nn.Module, x: Tensor) -> None:
    """Raise ValueError if the probe changes its input: callers may rely on it, experts do not."""
    for training in (False, True):
        given = x.clone()
        with _apart(x.device, 1), torch.no_grad():
            probe.train(training)(given)
        if not torch.equal(given, x):
            raise ValueError(
                f"{name} ({type(probe).__name__}) changes its input in place: let it copy x before"
            )


def check_tokens(name: str, probe: nn.Module, x: Tensor) -> None:
    """Raise ValueError if outputs depend on other tokens, or not on the probe's own weights."""
    where = f"{name} ({type(probe).__name__}) is no [..., M] -> [..., M]: "
    other, kept = x.clone(), torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    other[0, 1], kept[0, 1] = -x[0, 2], False
    for training in (False, True):
        wanted, found = (call_seeded(probe.train(training), each) for each in (x, other))
        wanted[0], found[0] = wanted[0][kept], found[0][kept]
        if not same(found, wanted):
            mode = "training" if training else "evaluation"
            raise ValueError(
                f"{where}a token's output depends on other tokens in {mode} (or on random numbers "
                f"that torch.manual_seed does not set){_WHOLE}"
            )
    drawn = copy.deepcopy(probe).eval()
    draw_weights(drawn, 1)
    if same(*(call_seeded(each.eval(), x) for each in (drawn, probe))):
        raise ValueError(f"{where}a copy does not use its own weights (was forward replaced?)")


def check_copies(name: str, probe: nn.Module, x: Tensor) -> None:
    """Raise ValueError unless the probe computes rows [n, M], also n = 0, as it does [..., M]."""
    rows = x.flatten(0, 1)
    for training in (False, True):
        probe.train(training)
        wanted = call_seeded(probe, x)
        wanted[:2] = (each.flatten(0, 1) for each in wanted[:2])
        try:
            found, single, none = (call_seeded(probe, each) for each in (rows, rows[:1], rows[:0]))
            shapes = single[0].shape, none[0].shape
            fits = same(found, wanted) and shapes == (rows[:1].shape, rows[:0].shape)
            reason = "the results differ, as if it drew or counted by sequence (DropPath)"
        except Exception as error:
            fits, reason = False, f"{type(error).__name__}: {error}"
        if not fits:
            raise ValueError(
                f"{name} ({type(probe).__name__}): an expert gets rows [n, M], but in "
                f"{'training' if training else 'evaluation'} it needs [batch, tokens, M]: {reason}"
            )
