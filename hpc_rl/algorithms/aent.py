"""AEnt: an entropy bonus whose coefficient keeps the entropy within a band.

Shen, "On Entropy Control in LLM-RL Algorithms", arXiv 2509.03493. The entropy is the clamped one: of the
distribution over the more probable tokens (engines/shared/logprobs.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Controller:
    """The band of the entropy, and the bounds and the rate of change of the coefficient."""

    entropy_low: float
    entropy_high: float
    coeff_lr: float
    coeff_box_low: float
    coeff_box_high: float
    warmup_steps: int = 0

    def adapt(self, coefficient: float, entropy: float, step: int) -> float:
        """Return the coefficient after a step: larger below the band, smaller above it; AReaL's update."""
        if step <= self.warmup_steps:
            return coefficient
        distance = min(0.0, entropy - self.entropy_low) + max(0.0, entropy - self.entropy_high)
        return min(max(coefficient - self.coeff_lr * distance, self.coeff_box_low), self.coeff_box_high)
