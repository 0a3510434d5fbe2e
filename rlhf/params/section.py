"""What every block of params is made of: refusal of unknown keys, and number types with bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

NOTHING = "conf/nothing"
"""An empty dependency that never changes, for a `reads` key whose source is elsewhere."""
REGISTERED = "models:/"
"""How the URI of a registered model begins."""
RUN = "runs:/"
"""How the URI of a run's artifacts begins."""
REWARD_MODEL_PATH = "models/reward"


class Section(BaseModel):
    """A block of params: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"Input should not be {str(value).lower()}")
        return value


MOST = 1_000_000  # far beyond any run, and small enough that a slip of the finger does not fill the memory
Count = Annotated[int, Field(ge=1, le=MOST)]
Size = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
LARGEST = 1e30  # what float32 holds, with room for products
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=1e-6, le=1e6)]  # logits over less would overflow float32
Name = Annotated[str, Field(min_length=1)]


class Fit(Section):
    """The optimiser of a supervised fit."""

    lr: Positive
    """Peak learning rate; falls linearly to a tenth."""
    warmup_steps: Size
    """Steps of linear warm-up."""
    weight_decay: NonNegative
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive
    """Gradient norm above which gradients are scaled down."""
