"""A folder for nnU-Net's variable ``nnUNet_extTrainer``: it imports every file here to find trainers."""

from transconv.integrations.nnunet import Accelerated, nnUNetTrainerTransconv

__all__ = ["Accelerated", "nnUNetTrainerTransconv"]
