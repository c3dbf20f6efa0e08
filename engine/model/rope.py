"""The rotary tables of a model: angle of every position and frequency.

Called once per load. Never rotates anything; that is a backend's business.
"""

import math

import torch

from engine.model.architecture import FactorRope, LinearRope, Llama3Rope, ModelConfig


def rope_tables(config: ModelConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, float32 [positions, head_dim / 2] each (arXiv 2104.09864).

    Angles are computed in float64, so that far positions lose nothing.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), _frequencies(config))
    return angles.cos().float(), angles.sin().float()


def _frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float64 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    match config.rope_scaling:
        case None:
            return plain
        case LinearRope(factor=factor):
            return plain / factor
        case FactorRope(factors=factors):
            return plain / torch.tensor(factors, dtype=torch.float64)
        case Llama3Rope() as scaling:
            return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
    """Published with Llama 3.1: blend from kept to divided as the wavelength grows."""
    turns = scaling.original_max_position * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor
