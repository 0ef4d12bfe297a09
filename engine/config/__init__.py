"""What a model is (`ModelConfig`) and how it is to be run (`EngineConfig`). Torch-free."""

from lockstep.engine.config.engine import EngineConfig, check_fit
from lockstep.engine.config.families import FAMILIES, Family
from lockstep.engine.config.model import DTYPES, DType, ModelConfig

__all__ = ["DTYPES", "FAMILIES", "DType", "EngineConfig", "Family", "ModelConfig", "check_fit"]
