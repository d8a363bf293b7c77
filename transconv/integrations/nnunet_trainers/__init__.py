"""The folder that nnU-Net's variable ``nnUNet_extTrainer`` names."""
