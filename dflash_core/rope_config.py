"""How a config.json describes rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.errors import ConfigError
from dflash_core.fields import Fields

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class LinearScaling:
    """Every rotary frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The wavelength-dependent scaling of Llama 3.1; `original_...` is in positions."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over the whole head dimension."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None


def rope_config(fields: Fields) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before it).

    Raises ConfigError.
    """
    fields.neutral("partial_rotary_factor", 1, 1.0)
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    section = fields.section(name) or Fields({}, f"config.json: {name}")
    section.neutral("partial_rotary_factor", 1, 1.0)
    theta = (section if section.has("rope_theta") else fields).number("rope_theta")
    kind = section.raw.get("rope_type", section.raw.get("type", "default"))
    match kind:
        case "default":
            if section.has("factor"):
                raise ConfigError(f"{section.place}: factor is given but rope_type is missing")
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, LinearScaling(section.number("factor")))
        case "llama3":
            scaling = Llama3Scaling(
                factor=section.number("factor"),
                low_freq_factor=section.number("low_freq_factor"),
                high_freq_factor=section.number("high_freq_factor"),
                original_max_position_embeddings=section.integer(
                    "original_max_position_embeddings"
                ),
            )
            if scaling.high_freq_factor <= scaling.low_freq_factor:
                raise ConfigError(
                    f"{section.place}: high_freq_factor {scaling.high_freq_factor} is not above "
                    f"low_freq_factor {scaling.low_freq_factor}"
                )
            return RopeConfig(theta, scaling)
    raise ConfigError(
        f"{section.place}: rope_type is {kind!r}; supported are {', '.join(ROPE_TYPES)}"
    )
