"""accelerate, and with it transformers' Trainer: "transconv" among the backends of torch.compile.

    transconv.integrations.accelerate.register()
    TrainingArguments(..., torch_compile_backend="transconv")
    Accelerator(dynamo_backend="transconv")

accelerate takes the names of an enumeration of its own alone, and not those that packages enter for torch.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import DynamoBackend

NAME = "TRANSCONV"  # accelerate's names are upper case; torch gets them in lower case


def register() -> None:
    """Let accelerate know the name. To call it again changes nothing."""
    if NAME not in DynamoBackend._value2member_map_:
        made: Any = str.__new__(DynamoBackend, NAME)
        made._name_ = made._value_ = NAME
        DynamoBackend._value2member_map_[NAME] = DynamoBackend._member_map_[NAME] = made
