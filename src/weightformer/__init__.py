"""WeightFormer: global visual modelling in linear time, by predicting a layer's weights from the image.

Importing the package registers its models in timm; it has no other effect.
"""

from weightformer import models

__all__ = ["__version__", "models"]

__version__ = "0.1.0"
